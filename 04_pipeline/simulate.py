"""Plays a pipeline schedule with given times per step: the picture, its bubble, and how much each rank must hold.

    python 04_pipeline/simulate.py                                     # 1F1B, 4 ranks, 8 microbatches
    python 04_pipeline/simulate.py --all --microbatches 16             # the four schedules, one under the other
    python 04_pipeline/simulate.py --all --send 0.5 --save bubble.svg  # what a slow link does, as a picture
Look at the dots, the bubble: a rank has nothing to do. One character is one unit of time:
    0 .. 9 forward   a .. j backward   A .. J gradient of the weights    of microbatches 0 .. 9, then from 0 again
A schedule without W does it within B, which takes --backward plus --weight. In the table below, the formula is that of
schedules.py, without --send; held: the most microbatches a rank holds at once, counted with all of its layers.
"""

import argparse
import math
import os
import shutil
import sys
from fractions import Fraction
from typing import Any, NamedTuple

from draw import draw
from schedules import SCHEDULES, bubble_formula, inputs, make_schedule, peak_activations, run_order


class Event(NamedTuple):
    rank: int
    step: Any  # a Step, or what else a rank did: its kind is "F", "B", "W", "send", "wait" or "all_reduce"
    start: Any  # seconds, int, float or Fraction
    end: Any


# ---- config ----
def seconds(text):
    try:
        return Fraction(text)
    except ZeroDivisionError as error:
        raise ValueError from error  # argparse says the rest


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--schedule", choices=SCHEDULES, default="1f1b")
    add("--all", action="store_true", help="the four schedules, and a table")
    add("--pp", type=int, default=4, help="ranks")
    add("--microbatches", type=int, default=8)
    add("--chunks", type=int, default=2, help="stages per rank of the interleaved schedule; the others have one")
    add("--forward", type=seconds, default="1", help="time of a microbatch in a rank's layers; a chunk takes its part")
    add("--backward", type=seconds, default="1", help="the same, for the gradient of the input")
    add("--weight", type=seconds, default="1", help="the same, for the gradient of the weights")
    add("--send", type=seconds, default="0", help="time from the end of a step until another rank has its output")
    add("--save", help="draw a picture, too: FILE.svg, or FILE.png, which needs matplotlib")
    args = parser.parse_args()
    for name in ("pp", "microbatches", "chunks", "forward", "backward", "weight", "send"):
        if (value := getattr(args, name)) < 0 or (value == 0 and name not in ("weight", "send")):
            parser.error(f"--{name} {value} must be {'0 or more' if name in ('weight', 'send') else 'above 0'}")
    return parser, args


# ---- simulation ----
def simulate(schedule, costs, send=0):
    """Returns one Event per step: a rank begins a step as soon as it has ended the one before and has its inputs.

    costs: {"F": seconds, "B": .., "W": ..}, each a number or a list with one per stage; B and W are added up where the
    schedule has no W. send: seconds between ranks; it keeps neither of them from computing. Exact with int, Fraction.
    """
    num_ranks, num_stages = len(schedule), 1 + max(step.stage for steps in schedule for step in steps)
    costs = {kind: cost if isinstance(cost, list) else [cost] * num_stages for kind, cost in costs.items()}
    if not any(step.kind == "W" for steps in schedule for step in steps) and "W" in costs:
        costs["B"] = [b + w for b, w in zip(costs["B"], costs["W"], strict=True)]
    events, free, ends = [], [0] * num_ranks, {}
    for rank, step in run_order(schedule):
        arrivals = [ends[one] + (send if one.stage % num_ranks != rank else 0) for one in inputs(step, num_stages)]
        start = max(free[rank], *arrivals, 0)
        ends[step] = free[rank] = start + costs[step.kind][step.stage]
        events.append(Event(rank, step, start, ends[step]))
    return events


def makespan(events):
    """Returns the time between the first start and the last end."""
    return max(event.end for event in events) - min(event.start for event in events)


def bubble(events):
    """Returns the share of all ranks' time, first start to last end, in which no F, B or W runs: a float."""
    busy = sum(event.end - event.start for event in events if event.step.kind in ("F", "B", "W"))
    whole = makespan(events) * (1 + max(event.rank for event in events))
    return float((whole - busy) / whole)


# ---- picture ----
LETTERS = {"F": "0123456789", "B": "abcdefghij", "W": "ABCDEFGHIJ"}
COLOURS = {"F": "30;46", "B": "30;43", "W": "30;42"}  # black on cyan, yellow, green


def render(events, width, colour=None):
    """Returns the picture: a line per rank, `width` characters from the first start to the last end.

    colour: True, False, or None for: on a terminal, unless NO_COLOR is set. A step shorter than half a character may
    not be seen.
    """
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") if colour is None else colour
    first, scale = min(event.start for event in events), width / makespan(events)
    lanes = [["."] * width for _ in range(1 + max(event.rank for event in events))]
    for rank, step, start, end in events:
        if step.kind in LETTERS:
            cell = LETTERS[step.kind][step.microbatch % 10]
            cell = f"\033[{COLOURS[step.kind]}m{cell}\033[0m" if colour else cell
            for place in range(round((start - first) * scale), round((end - first) * scale)):
                lanes[rank][place] = cell
    digits = len(str(len(lanes) - 1))
    return "\n".join(f"rank {rank:<{digits}}  {''.join(lane)}" for rank, lane in enumerate(lanes))


# ---- main ----
def main():
    parser, args = parse_args()
    costs = {"forward": args.forward, "backward": args.backward, "weight": args.weight}
    pictures, rows = {}, ["schedule              |   time | bubble | formula |  held | per rank, of one stage each"]
    for name in SCHEDULES if args.all else [args.schedule]:
        chunks = args.chunks if name == "interleaved" else 1
        schedule = make_schedule(name, args.pp, args.microbatches, chunks)
        events = simulate(schedule, {kind[0].upper(): cost / chunks for kind, cost in costs.items()}, args.send)
        formula = float(bubble_formula(name, args.pp, args.microbatches, chunks, **costs))
        held = [peak_activations(steps) for steps in schedule]
        title = name if chunks == 1 else f"{name}, {chunks} chunks"
        pictures[title] = events
        times = f"{float(makespan(events)):6g} | {bubble(events):6.1%} | {formula:7.1%}"
        rows.append(f"{title:21} | {times} | {max(held) / chunks:5.2f} | {' '.join(map(str, held))}")
    try:
        if args.save:
            lanes = {f"{title}: bubble {bubble(events):.1%}": events for title, events in pictures.items()}
            draw(lanes, args.save, f"{args.pp} ranks, {args.microbatches} microbatches")
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    # A character is the longest time that divides all others; a longer one where lines would not fit the terminal.
    times = [event.end for events in pictures.values() for event in events]
    denominator = math.lcm(*(time.denominator for time in times))
    unit = Fraction(math.gcd(*(int(time * denominator) for time in times)), denominator)
    unit = max(unit, max(times) / max(10, shutil.get_terminal_size((120, 24)).columns - 10))
    for title, events in pictures.items():
        print(f"{title}\n{render(events, round(makespan(events) / unit))}\n")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
