"""Draws two steps of all ranks, and writes them as one trace that https://ui.perfetto.dev opens.

White ground and dark letters whatever page it lies on. Colours: Okabe and Ito, Color Universal Design, 2008.
"""

import gzip
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from skew import Skew, key_of, some_ranks

COLOURS = {  # what the picture shows -> colour and the words of the legend
    "compute": ("#009E73", "computes"),
    "comm": ("#D55E00", "exposed communication"),
    "waited": ("#F0E442", "waits for another rank"),
    "data": ("#0072B2", "waits for data"),
    "copy": ("#CC79A7", "copies"),
    "host": ("#DDDDDD", "host: Python, or nothing"),
    "hidden": ("#E69F00", "hidden communication"),
}


# ---- picture ----
def pieces(summary: dict[str, Any]) -> dict[str, list[list[int]]]:
    """What is drawn of a rank: spans by colour. The waiting is drawn over the communication that it is part of."""
    first = min(start for spans in summary["picture"].values() for start, _ in spans)
    return summary["picture"] | {"waited": [one for one in summary["waited"] if one[1] > first]}


def draw_steps(path: Path, summaries: dict[int, dict[str, Any]], title: str) -> None:
    """Writes a PNG. Raises ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{path.name} needs matplotlib: pip install matplotlib ({error})") from None
    figure = Figure(figsize=(11, 1.9 + 0.7 * len(summaries)), dpi=120, facecolor="white", layout="constrained")
    axes = figure.subplots()
    drawn = {rank: pieces(one) for rank, one in sorted(summaries.items())}
    first = min(start for one in drawn.values() for spans in one.values() for start, _ in spans)
    last = max(end for one in drawn.values() for spans in one.values() for _, end in spans)
    for place, one in enumerate(drawn.values()):
        for lane, (colour, _) in COLOURS.items():
            top, height = (place + 0.2, 0.18) if lane == "hidden" else (place - 0.32, 0.5)
            bars = [((start - first) / 1e6, (end - start) / 1e6) for start, end in one.get(lane, [])]
            axes.broken_barh(bars, (top, height), facecolors=colour, linewidth=0)
    for summary in summaries.values():
        for start, end in summary["windows"]:
            for when in {start, end}:
                if first <= when <= last:
                    axes.axvline((when - first) / 1e6, color="black", linewidth=0.6, linestyle=":")
    axes.set_yticks(range(len(drawn)), [f"rank {rank}" for rank in drawn], fontsize=12)
    axes.set_ylim(len(drawn) - 0.4, -0.5)
    axes.set_xlim(0, (last - first) / 1e6)
    axes.set_xlabel("milliseconds; dotted: the end of a step", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    used = [lane for lane in COLOURS if any(one.get(lane) for one in drawn.values())]
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS[lane][0], label=COLOURS[lane][1]) for lane in used]
    figure.legend(handles=handles, ncols=3, loc="outside lower center", frameon=False, fontsize=11)
    axes.set_title(textwrap.fill(title, 100), fontsize=12)
    figure.savefig(path)


# ---- trace ----
def tracks(summary: dict[str, Any]) -> dict[Any, int]:
    """Numbers of a rank's tracks in the trace: its lanes, the thread that trains, then other threads and streams."""
    names = dict.fromkeys(["lanes", summary["thread"], *(row[1] for row in summary["rows"])])
    return {name: number for number, name in enumerate(names)}


def trace_events(summaries: dict[int, dict[str, Any]], skew: Skew) -> Iterator[dict[str, Any]]:
    """Events in Chrome's trace format: a process for each rank, its lanes above its threads and streams.

    An arrow leads from the rank that came last to a collective to each that had waited for it. Microseconds begin with
    the first event.
    """
    zero = min(row[2] for one in summaries.values() for row in one["rows"])
    zero = min(zero, *(start for one in summaries.values() for spans in one["picture"].values() for start, _ in spans))
    for rank, one in sorted(summaries.items()):
        names = tracks(one)
        yield dict(ph="M", pid=rank, tid=0, name="process_name", args=dict(name=f"rank {rank} on {one['host']}"))
        yield dict(ph="M", pid=rank, tid=0, name="process_sort_index", args=dict(sort_index=rank))
        for name, tid in names.items():
            text = "training thread" if tid == 1 else name if isinstance(name, str) else f"thread {name}"
            yield dict(ph="M", pid=rank, tid=tid, name="thread_name", args=dict(name=text))
            yield dict(ph="M", pid=rank, tid=tid, name="thread_sort_index", args=dict(sort_index=tid))
        for lane, spans in pieces(one).items():
            for start, end in [] if lane in ("hidden", "waited") else spans:
                what = COLOURS[lane][1]
                yield dict(
                    ph="X", pid=rank, tid=0, name=what, cat="lane", ts=(start - zero) / 1e3, dur=(end - start) / 1e3
                )
        details = {(call[7], call[3]): call for call in one["calls"]}
        for name, tid, start, dur, category in one["rows"]:
            event = dict(
                ph="X", pid=rank, tid=names[tid], name=name, cat=category, ts=(start - zero) / 1e3, dur=dur / 1e3
            )
            if call := details.get((tid, start)):
                event["args"] = dict(group=call[1], number=call[2], bytes=call[5], ranks=call[6])
            yield event
    yield from arrows(summaries, skew, zero)


def arrows(summaries: dict[int, dict[str, Any]], skew: Skew, zero: int) -> Iterator[dict[str, Any]]:
    shown: dict[int, dict[Any, tuple[int, int, int]]] = {}  # rank -> collective -> (track, start, end)
    for rank, one in summaries.items():
        names = tracks(one)
        starts = {(row[1], row[2]) for row in one["rows"]}
        calls = [call for call in one["calls"] if (call[7], call[3]) in starts]
        shown[rank] = {key_of(one, call): (names[call[7]], call[3], call[4]) for call in calls}
    number = 0
    for key in {key for one in shown.values() for key in one}:
        arrival, latest = skew.arrivals.get(key, (0, -1))
        if key not in shown.get(latest, {}):
            continue
        for rank in (rank for rank in shown if rank != latest and key in shown[rank]):
            tid, start, end = shown[rank][key]
            if not start < arrival < end:
                continue
            number += 1
            arrow = dict(cat="waits", name="waits for", id=number)
            yield dict(ph="s", pid=latest, tid=shown[latest][key][0], ts=(arrival - zero) / 1e3, **arrow)
            yield dict(ph="f", bp="e", pid=rank, tid=tid, ts=(arrival - zero) / 1e3 + 0.001, **arrow)


def write_trace(file: TextIO, events: Iterator[dict[str, Any]]) -> None:
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    for i, event in enumerate(events):
        file.write((",\n" if i else "") + json.dumps(event))
    file.write("\n]}\n")


def write_pictures(folder: Path, summaries: dict[int, dict[str, Any]], skew: Skew, title: str) -> list[str]:
    """Writes trace.json.gz and timeline.png; returns what could not be written, a line each."""
    with gzip.open(folder / "trace.json.gz", "wt", compresslevel=3) as file:
        write_trace(file, trace_events(summaries, skew))
    try:
        draw_steps(folder / "timeline.png", some_ranks(summaries, skew.late.rank), title)
    except ImportError as error:
        return [str(error)]
    return []
