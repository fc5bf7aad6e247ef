"""Draws plan.py's answer: memory of a GPU and time of a step by part, for each of the best layouts, and strong scaling.

White ground and dark letters whatever page it lies on. Colours: Okabe and Ito, Color Universal Design, 2008.
"""

import textwrap

from plan_memory import capacity_bytes
from plan_search import search_layouts
from plan_tables import UsageError

MEMORY_COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#009E73",
    "activations": "#E69F00",
    "recomputed": "#F0E442",
    "logits": "#D55E00",
    "buffers": "#CC79A7",
    "overhead": "#999999",
}
TIME_COLOURS = {  # parts of a step's time, and what they are called
    "matmul and head": ("#0072B2", ("matmul", "head")),
    "attention": ("#56B4E9", ("attention",)),
    "recompute": ("#F0E442", ("recompute",)),
    "memory-bound": ("#009E73", ("memory-bound", "optimizer", "offload")),
    "tp, cp": ("#E69F00", ("tp", "cp")),
    "dp, pp": ("#D55E00", ("dp", "pp")),
    "bubble": ("#999999", ("bubble",)),
}


def scaling(job, margin):
    """Returns [(GPUs, tokens/s)] of the fastest layout with the same batch on a quarter to 32 times the GPUs."""
    points = []
    for power in range(-2, 6):
        number = job.num_gpus * 2**power
        if number < 1 or number != int(number):
            continue
        per_node = min(int(number), job.gpus_per_node)
        if number % per_node:
            continue
        found = search_layouts(job._replace(num_gpus=int(number), gpus_per_node=per_node), margin, 1, "none")
        if found.plans:
            points.append((int(number), job.batch * job.seq_len / found.plans[0].seconds["total"]))
    return points


def stack(axes, names, series, unit):
    """Draws one horizontal bar per name, the first on top; series: {part: (colour, [sizes])}."""
    left = [0.0] * len(names)
    for part, (colour, sizes) in series.items():
        if any(sizes):
            axes.barh(range(len(names)), sizes, left=left, height=0.7, color=colour, label=part, edgecolor="white")
            left = [start + size for start, size in zip(left, sizes)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.4, -0.24), frameon=False, fontsize=9)


def draw_plans(path, job, plans, names, title, margin):
    """Writes FILE.png or FILE.svg. Raises ImportError without matplotlib, UsageError if the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"--plot {path} needs matplotlib: pip install matplotlib ({error})") from None
    figure = Figure(figsize=(7.5, 9.5), dpi=160, facecolor="white", layout="constrained")
    memory, time, scale = figure.subplots(3, 1, height_ratios=(1, 1, 0.9))
    parts = {part: (colour, [p.memory[part] / 1e9 for p in plans]) for part, colour in MEMORY_COLOURS.items()}
    stack(memory, names, parts, "GB on a GPU of the fullest stage")
    card, usable = job.gpu.memory_bytes / 1e9, capacity_bytes(job, margin) / 1e9
    for where, text in ((card, "card"), (usable, f"{1 - margin:.0%}")):
        memory.axvline(where, color="black", linewidth=1, linestyle="--")
        memory.text(where, -0.55, text, ha="center", va="bottom", fontsize=9)
    sums = {
        name: (colour, [sum(p.seconds.get(part, 0.0) for part in group) for p in plans])
        for name, (colour, group) in TIME_COLOURS.items()
    }
    stack(time, names, sums, "seconds of a step")

    points = scaling(job, margin)
    scale.loglog(*zip(*points), "o-", color="#0072B2", base=2, label="fastest layout")
    first = points[0]
    ideal = [first[1] * number / first[0] for number, _ in points]
    scale.loglog([number for number, _ in points], ideal, "--", color="#999999", base=2, label="proportional")
    for (number, rate), best in zip(points, ideal):
        scale.annotate(f"{rate / best:.0%}", (number, rate), xytext=(8, -6), textcoords="offset points", fontsize=9)
    scale.set_xticks([number for number, _ in points], [str(number) for number, _ in points])
    scale.set_yticks([rate for _, rate in points], [f"{rate:,.0f}" for _, rate in points])
    scale.minorticks_off()
    scale.margins(0.06)
    scale.set_xlabel(f"GPUs, all with a batch of {job.batch} sequences")
    scale.set_ylabel("tokens/s")
    scale.legend(frameon=False, fontsize=9)
    figure.suptitle("\n".join(textwrap.wrap(title, 70)), fontsize=10)
    for axes in (memory, time, scale):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: {error}; give a FILE.png or FILE.svg that can be written") from None
