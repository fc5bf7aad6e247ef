"""Draws what ranks do over time as SVG or PNG: simulated schedules, or times taken on real ranks.

    draw({"1F1B": simulate(make_schedule("1f1b", 4, 8), {"F": 1, "B": 2})}, "bubble.svg", "4 ranks, 8 microbatches")
One picture per title, one under the other and on one scale of time; in each a lane per rank, and on it a box per event
with the number of its microbatch. Grey is idle: the bubble. In an SVG, the mouse on a box shows its step and times.
Colours: Okabe and Ito, Color Universal Design, 2008, which colour-blind readers can tell apart.
"""

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

KINDS = {  # colour and meaning; all colours are light enough for black numbers
    "F": ("#56B4E9", "forward"),
    "B": ("#E69F00", "backward"),
    "W": ("#009E73", "gradient of the weights"),
    "send": ("#F0E442", "send"),
    "wait": ("#FFFFFF", "wait"),
    "all_reduce": ("#CC79A7", "all_reduce"),
}
IDLE = "#DDDDDD"
LEFT, WIDTH, LANE, FONT = 66, 720, 26, 14  # pixels: the ranks' names, the axis of time, a lane, letters


class Box(NamedTuple):
    left: float  # pixels from the upper left corner
    top: float
    width: float
    height: float
    colour: str
    opacity: float = 1.0
    told: str = ""  # of an event: what it is, and when; empty for other boxes


class Label(NamedTuple):
    left: float  # pixels from the upper left corner
    middle: float
    text: str
    anchor: str = "start"  # "middle", "end": which part of the text stands at `left`
    size: int = FONT


# ---- layout ----
def span(events):
    """Returns the first start and the last end."""
    return min(event.start for event in events), max(event.end for event in events)


def layout(lanes, title):
    """Returns (boxes, labels, height in pixels)."""
    boxes, labels, top = [], [Label(LEFT, 18, title, size=FONT + 2)], 36
    longest = max(end - start for start, end in map(span, lanes.values())) or 1
    for heading, events in lanes.items():
        (first, last), num_ranks = span(events), 1 + max(event.rank for event in events)
        chunks = 1 + max(event.step.stage for event in events) // num_ranks
        labels.append(Label(LEFT, top + 8, heading))
        labels.append(Label(LEFT + WIDTH, top + 8, f"{float(last - first):g} s", "end"))
        top += 18
        for rank in range(num_ranks):
            boxes.append(Box(LEFT, top + rank * LANE, float((last - first) / longest) * WIDTH, LANE - 2, IDLE))
            labels.append(Label(LEFT - 6, top + rank * LANE + LANE / 2 - 1, f"rank {rank}", "end"))
        for rank, step, start, end in events:
            left, width = (float(time / longest) * WIDTH for time in (start - first, end - start))
            lane = top + rank * LANE
            told = f"{step.kind} stage {step.stage} microbatch {step.microbatch}: {float(start):g} to {float(end):g} s"
            paler = 1 - 0.8 * (step.stage // num_ranks) / chunks  # a later chunk of the rank
            boxes.append(Box(LEFT + left, lane, width, LANE - 2, KINDS[step.kind][0], paler, told))
            if step.kind != "all_reduce" and width > 0.7 * FONT * len(text := str(step.microbatch)):
                labels.append(Label(LEFT + left + width / 2, lane + LANE / 2 - 1, text, "middle"))
        top += num_ranks * LANE + 14
    left, shown = LEFT, {event.step.kind for events in lanes.values() for event in events}
    for colour, meaning in [KINDS[kind] for kind in KINDS if kind in shown] + [(IDLE, "idle")]:
        boxes.append(Box(left, top, 14, 14, colour))
        labels.append(Label(left + 18, top + 7, meaning, size=FONT - 2))
        left += 40 + 7 * len(meaning)
    if any(box.opacity < 1 for box in boxes):
        labels.append(Label(left, top + 7, "paler: a later chunk of the rank", size=FONT - 2))
    return boxes, labels, top + 26


# ---- files ----
def write_svg(path, boxes, labels, height):
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 16} {height}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="#FFFFFF"/>',
    ]
    for box in boxes:
        where = f'x="{box.left:.2f}" y="{box.top:.2f}" width="{box.width:.2f}" height="{box.height:.2f}"'
        if box.told:
            colour = f'fill="{box.colour}" fill-opacity="{box.opacity:.2f}" stroke="#000000" stroke-width="0.5"'
            lines.append(f'<rect class="event" {where} {colour}><title>{escape(box.told)}</title></rect>')
        else:
            lines.append(f'<rect {where} fill="{box.colour}"/>')
    for label in labels:
        where = f'x="{label.left:.2f}" y="{label.middle + label.size * 0.35:.2f}" text-anchor="{label.anchor}"'
        lines.append(f'<text {where} font-size="{label.size}" pointer-events="none">{escape(label.text)}</text>')
    Path(path).write_text("\n".join([*lines, "</svg>", ""]), encoding="utf-8")


def write_png(path, boxes, labels, height):
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError(f"{path} needs matplotlib: pip install matplotlib, or draw an .svg ({error})") from None
    figure = Figure(figsize=((LEFT + WIDTH + 16) / 100, height / 100), dpi=200)  # 100 pixels are an inch
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, LEFT + WIDTH + 16), ylim=(height, 0))
    axes.axis("off")
    for box in boxes:
        edge = {"edgecolor": "black", "linewidth": 0.4} if box.told else {}
        place = (box.left, box.top), box.width, box.height
        axes.add_patch(Rectangle(*place, facecolor=(box.colour, box.opacity), **edge))
    for label in labels:
        sides = {"start": "left", "middle": "center", "end": "right"}[label.anchor]
        style = {"ha": sides, "va": "center", "fontsize": label.size * 0.72, "parse_math": False}  # 72 points an inch
        axes.text(label.left, label.middle, label.text, **style)
    figure.savefig(path)


def draw(lanes, path, title):
    """Draws {title: events}; an event has rank, step (kind, stage, microbatch), start and end in seconds.

    Kinds: F, B, W, send, wait, all_reduce. Raises ValueError if path ends neither in .svg nor in .png, or if there is
    no event; ImportError for a .png without matplotlib; OSError if the file cannot be written.
    """
    writers = {".svg": write_svg, ".png": write_png}
    if (suffix := Path(path).suffix.lower()) not in writers:
        raise ValueError(f"{path} must end in .svg or .png")
    if not lanes or not all(lanes.values()):
        raise ValueError(f"no events to draw in {path}")
    writers[suffix](path, *layout(lanes, title))
