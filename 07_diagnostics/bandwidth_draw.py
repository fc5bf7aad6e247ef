"""Draws bandwidth.py's answer: for each axis, time and busbw by size, the fits, and what the link gives.

White ground and dark letters whatever page it lies on. Colours: Okabe and Ito, Color Universal Design, 2008.
"""

from typing import Any

from transfers import FACTORS, show_size

STYLES = {  # colour and marker
    "all_reduce": ("#0072B2", "o"),
    "all_gather": ("#009E73", "^"),
    "reduce_scatter": ("#E69F00", "v"),
    "broadcast": ("#56B4E9", "D"),
    "reduce": ("#CC79A7", "P"),
    "all_to_all": ("#F0E442", "X"),
    "gather": ("#999999", "<"),
    "scatter": ("#000000", ">"),
    "send_recv": ("#D55E00", "s"),
}


def draw_links(path: str, answers: list[dict[str, Any]]) -> None:
    """Writes FILE.png or FILE.svg."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.6 * len(answers) + 0.4), dpi=160, facecolor="white", layout="constrained")
    for answer, (left, right) in zip(answers, figure.subplots(len(answers), 2, squeeze=False)):
        n, sizes = len(answer["groups"][0]), set()
        for name, one in answer["collectives"].items():
            rows, factor = [row for row in one["rows"] if row["size"]], FACTORS[name](n)
            if not rows:
                continue
            sizes |= {row["size"] for row in rows}
            colour, form = STYLES[name]
            how = dict(color=colour, marker=form, markersize=4, linewidth=0, label=name)
            left.plot([row["size"] for row in rows], [row["time_us"] for row in rows], **how)
            right.plot([row["size"] for row in rows], [row["busbw_gb_s"] for row in rows], **how)
            for row in rows:  # from the median to the lower quartile, which is fitted
                left.plot([row["size"]] * 2, [row["quartile_us"], row["time_us"]], color=colour, linewidth=0.6)
            if one["beta_gb_s"]:
                between = [rows[0]["size"] * (rows[-1]["size"] / rows[0]["size"]) ** (i / 100) for i in range(101)]
                times = [one["alpha_us"] + factor * size / one["beta_gb_s"] / 1e3 for size in between]
                left.plot(between, times, color=colour, linewidth=1)
                rates = [factor * size / t / 1e3 for size, t in zip(between, times)]
                right.plot(between, rates, color=colour, linewidth=1)
        if link := answer["hardware"]:
            gives, whose = link["gb_s"] / answer["shared_by"], f", shared by {answer['shared_by']}"
            label = f"{link['name']}{whose if answer['shared_by'] > 1 else ''}: {gives:.4g} GB/s"
            right.axhline(gives, color="black", linestyle="--", linewidth=1)
            right.text(0.02, gives * 1.1, label, transform=right.get_yaxis_transform(), fontsize=9)
        for axes, what in ((left, "time, us"), (right, "busbw, GB/s")):
            axes.set(xscale="log", yscale="log", ylabel=what, xlabel="S, bytes")
            shown = sorted(sizes)[:: 1 + len(sizes) // 7]
            axes.set_xticks(shown, [show_size(size) for size in shown])
            axes.minorticks_off()
            axes.tick_params(labelsize=9)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="#DDDDDD", linewidth=0.5)
        where = "across nodes" if answer["link"] == "network" else "inside a node"
        left.set_title(f"{answer['name']} {n}, {where}", fontsize=10, loc="left")
        right.set_title("points: medians; lines: the fit", fontsize=9, loc="right")
        left.legend(frameon=False, fontsize=9)
    figure.savefig(path)
