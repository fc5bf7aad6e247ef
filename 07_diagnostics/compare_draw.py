"""Draws compare.py's table: the losses of all rows, how far each is from one process, and what does differ.

White ground and dark letters whatever page it lies on. Colours: Okabe and Ito, Color Universal Design, 2008.
"""

from typing import Any

from layouts import Row, UsageError

COLOURS = {"02": "#0072B2", "03": "#E69F00", "04": "#009E73", "05": "#D55E00", "06": "#CC79A7"}
ONE_PROCESS = "#999999"
SHOWN = 1e-8  # the smallest deviation on the axis: that of one process is 0
LETTERS = 13  # points: to be read when the picture is shown at half its width
INCHES = 0.32  # a row


def label_of(row: Row) -> str:
    """04 train gpipe."""
    words = row.flags.replace("--schedule ", "").replace("--", "")
    return f"{row.folder[:2]} {row.script[:-3]} {words}".strip() if row.ranks > 1 else "one process"


def draw_losses(axes: Any, drawn: list[tuple[Row, dict[str, Any], str]]) -> None:
    """All in one frame: the first at the bottom, wide, each of the others on it and narrower."""
    for i, (_, one, colour) in enumerate(drawn):
        axes.plot(range(1, len(one["loss"]) + 1), one["loss"], color=colour, linewidth=1 + 11 * (1 - i / len(drawn)))
    axes.set_title(f"loss, step by step, of {len(drawn)} runs", loc="left", fontsize=LETTERS + 1)
    axes.set_xticks(range(1, len(drawn[0][1]["loss"]) + 1))


def draw_comparison(path: str, rows: list[Row], found: list[dict[str, Any]], limit: float) -> None:
    """Writes FILE.png, .svg or .pdf; raises UsageError if that cannot be done. found[0] is one process, [1] is DDP."""
    from matplotlib.figure import Figure

    colours = [COLOURS[row.folder[:2]] if row.ranks > 1 else ONE_PROCESS for row in rows]
    drawn = [(row, one, colour) for row, one, colour in zip(rows, found, colours) if "loss" in one]
    place = {row: i + 0.6 * int(row.folder[:2]) for i, row in enumerate(rows)}  # a gap between the folders
    heights = (3, INCHES * (len(rows) + 6))
    figure = Figure(figsize=(13, sum(heights)), dpi=90, facecolor="white", layout="constrained")
    grid = figure.add_gridspec(2, 4, height_ratios=heights)
    draw_losses(figure.add_subplot(grid[0, :]), drawn)
    columns = (
        ("deviation from\none process", lambda one: min(max(one["deviation"], SHOWN), 5 * limit)),
        ("states, MiB\na rank holds", lambda one: one["state_mib"]),
        ("MB a rank\nsends in a step", lambda one: (one["bytes_sent"] or 0) / 1e6),
        ("step time,\nDDP is 1", lambda one: one["step_ms"] / found[1].get("step_ms", one["step_ms"])),
    )
    for column, (title, value) in enumerate(columns):
        axes = figure.add_subplot(grid[1, column])
        for row, one, colour in drawn:
            if column:
                axes.barh(place[row], value(one), 0.75, color=colour)
            else:
                axes.plot(value(one), place[row], "o", color=colour, markersize=7)
        if column == 0:
            axes.set_xscale("log")
            axes.set_xlim(SHOWN / 2, 10 * limit)
            axes.axvline(limit, color="black", linestyle="--", linewidth=1.5)
        axes.set_yticks(list(place.values()), [label_of(row) for row in rows] if column == 0 else [])
        axes.set_ylim(max(place.values()) + 1, min(place.values()) - 1)
        axes.set_title(title, fontsize=LETTERS + 1)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=LETTERS)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#DDDDDD")
        axes.set_axisbelow(True)
    try:
        figure.savefig(path)
        if path.endswith(".png"):
            from PIL import Image  # matplotlib needs it

            Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)  # a third of the bytes
    except OSError as error:
        raise UsageError(f"--picture {path}: {error}; give a file that can be written") from None
