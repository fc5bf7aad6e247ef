"""Two pictures of a schedule: as it should run with given costs (--simulate), and as the ranks ran it (--timeline)."""

import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch.distributed as dist
from draw import draw
from options import check_pp, largest_microbatch
from schedules import bubble_formula, make_schedule, peak_activations
from simulate import Event, bubble, render, simulate

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError  # copied this folder out? copy common/ beside it or into it


def check_drawing(args):
    """Refuses on every rank alike, before anything is trained, what could not be drawn at the end."""
    if args.timeline and Path(args.timeline).suffix not in (".svg", ".png"):
        raise UsageError(f"--timeline {args.timeline} must end in .svg or .png")
    if args.timeline and not Path(args.timeline).absolute().parent.is_dir():
        raise UsageError(f"--timeline {args.timeline} needs a folder that exists")
    if args.timeline and args.timeline.endswith(".png"):
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            way_out = "pip install matplotlib, or use .svg"
            raise UsageError(f"--timeline {args.timeline} needs matplotlib: {way_out}") from None


def save(lanes, path, title):
    draw({f"{name}: bubble {bubble(events):.1%}": events for name, events in lanes.items()}, path, title)


def show_simulation(args, rank, world_size, _):
    """Prints the schedule of these flags, and its bubble; draws it, too, with --timeline. One process is enough."""
    pp_size, _, chunks, counts = check_pp(args, args.pp or world_size)
    check_drawing(args)
    size = largest_microbatch(args.batch, pp_size, len(counts)) if args.microbatch is None else args.microbatch
    if not 0 < size <= args.batch or args.batch % size:
        raise UsageError(f"--microbatch {size} must divide --batch {args.batch}: use 1, say")
    num_microbatches = args.batch // size
    try:
        *costs, send = (float(word) for word in args.simulate.split(","))
        costs = dict(zip("FBW", costs, strict=True))
        if min(*costs.values(), send) < 0 or min(costs["F"], costs["B"]) == 0:
            raise ValueError
    except ValueError:
        needed = "four costs F,B,W,SEND, F and B above 0: 1,1,1,0"
        raise UsageError(f"--simulate {args.simulate} must be {needed}") from None
    dist.barrier()  # over all ranks: who left before would break the set-up of those that are still in it
    if rank:
        return
    schedule = make_schedule(args.schedule, pp_size, num_microbatches, chunks)
    events = simulate(schedule, {kind: cost / chunks for kind, cost in costs.items()}, send)
    formula = bubble_formula(args.schedule, pp_size, num_microbatches, chunks, *costs.values())
    held = max(map(peak_activations, schedule))
    print(render(events, 100))
    shares = f"bubble {bubble(events):.1%}, by the formula without sends {float(formula):.1%}"
    print(f"{shares}; a rank holds {held} at most")
    if args.timeline:
        save({args.schedule: events}, args.timeline, f"{pp_size} ranks, {num_microbatches} microbatches, simulated")


def draw_timeline(record, schedule, ranks, path, name):
    """Draws what the ranks of a pipeline did, above what the schedule makes of the same costs; all ranks must call it.

    record: this rank's (step, start, end), seconds since all ranks began. Returns (bubble measured, bubble simulated).
    """
    dist.all_gather_object(everyones := [None] * dist.get_world_size(), record)  # all_gather over all ranks: records
    events = [Event(place, *times) for place, rank in enumerate(ranks) for times in everyones[rank]]
    durations = defaultdict(list)
    for event in events:
        durations[event.step.kind, event.step.stage].append(event.end - event.start)
    stages = range(1 + max(stage for _, stage in durations))
    costs = {kind: [median(durations[kind, stage]) for stage in stages] for kind in {kind for kind, _ in durations}}
    again = simulate(schedule, costs)
    if dist.get_rank() == 0:
        save({f"{name}, measured": events, f"{name}, simulated with these costs": again}, path, f"{len(ranks)} ranks")
    return bubble(events), bubble(again)
