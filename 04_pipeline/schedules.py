"""Pipeline schedules as data: for each rank the list of its steps, in the order in which it runs them.

    1F1B, 3 ranks, 4 microbatches      forward 0 1 2 3, backward a b c d of the same; here both take as long
    rank 0   0 1 2 . . a 3 b . c . d   warm-up: as many forwards as there are ranks behind; steady state: one forward,
    rank 1   . 0 1 . a 2 b 3 c . d .   one backward; cool-down: the backwards that are left. The dots are the bubble.
    rank 2   . . 0 a 1 b 2 c 3 d . .   simulate.py draws any of the four.
With p ranks, m >= p microbatches, v chunks (stages per rank); F = B = W in time where B and W are apart:
    schedule      bubble, as a share of time   microbatches that rank r holds, each of one stage
    gpipe         (p-1) / (m+p-1)              m
    1f1b          (p-1) / (m+p-1)              min(m, p-r)
    interleaved   (p-1) / (vm+p-1)             min(vm, 2 (p-r-1) + (v-1) g + 1), g = p where p divides m
    zero-bubble   (p-1) / (3m+p-1)             min(m, p)
Huang et al., GPipe, 2019. 1F1B, interleaved: Narayanan et al., Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM, 2021, section 2.2. ZB-H1: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.1.
"""

from collections import Counter
from fractions import Fraction
from itertools import pairwise, product
from typing import NamedTuple


class Step(NamedTuple):
    kind: str  # "F" forward, "B" backward (of the input only where the schedule has "W"), "W" gradient of the weights
    stage: int  # 0 .. num_ranks * chunks - 1; stage s lies on rank s % num_ranks
    microbatch: int


# ---- schedules ----
def gpipe(num_ranks, num_microbatches):
    """All forward, then all backward."""
    return [[Step(kind, rank, i) for kind in "FB" for i in range(num_microbatches)] for rank in range(num_ranks)]


def alternate(forward, backward, warm_up):
    """Warm-up forwards, then one forward and one backward in turn, then the backwards that are left."""
    turns = [[*forward[warm_up + i : warm_up + i + 1], step] for i, step in enumerate(backward)]
    return sum(turns, forward[:warm_up])


def one_f_one_b(num_ranks, num_microbatches):
    """1F1B: backwards begin as early as they can, and rank r never holds more than p - r microbatches."""
    both = [[[Step(kind, rank, i) for i in range(num_microbatches)] for kind in "FB"] for rank in range(num_ranks)]
    return [alternate(*steps, warm_up=num_ranks - rank - 1) for rank, steps in enumerate(both)]


def interleaved(num_ranks, num_microbatches, chunks):
    """Megatron-LM's interleaved 1F1B: a group of microbatches goes through all of a rank's chunks, then the next group.

    Groups are of p, as Megatron-LM's, where p divides m; else m // p groups, as even as can be: with fewer than p in
    one, the first rank would wait for them to come back for the next chunk. One chunk is 1F1B.
    """
    if chunks == 1:
        return one_f_one_b(num_ranks, num_microbatches)
    num_groups = max(1, num_microbatches // num_ranks)
    bounds = [-(-i * num_microbatches // num_groups) for i in range(num_groups + 1)]  # the first group is the largest
    order = [(chunk, i) for group in pairwise(bounds) for chunk in range(chunks) for i in range(*group)]
    schedule = []
    for rank in range(num_ranks):
        forward = [Step("F", chunk * num_ranks + rank, i) for chunk, i in order]
        backward = [Step("B", (chunks - 1 - chunk) * num_ranks + rank, i) for chunk, i in order]
        schedule.append(alternate(forward, backward, 2 * (num_ranks - rank - 1) + (chunks - 1) * bounds[1]))
    return schedule


def zero_bubble(num_ranks, num_microbatches):
    """ZB-H1: 1F1B with B and W apart. Rank r is r weight gradients late, and with these fills its wait at the end."""
    schedule = one_f_one_b(num_ranks, num_microbatches)
    for rank, steps in enumerate(schedule):
        late = {Step("B", rank, i + rank): Step("W", rank, i) for i in range(num_microbatches)}  # W after this B
        schedule[rank] = [both for step in steps for both in (step, late.pop(step, None)) if both] + [*late.values()]
    return schedule


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zero-bubble": zero_bubble}


def make_schedule(name, num_ranks, num_microbatches, chunks=1):
    """Returns a list of steps per rank. Raises ValueError for an unknown name and for numbers that it cannot have."""
    if name not in SCHEDULES or min(num_ranks, num_microbatches, chunks) < 1 or (chunks > 1 and name != "interleaved"):
        given = f"schedule {name} of {num_ranks} ranks, {num_microbatches} microbatches, {chunks} chunks"
        raise ValueError(f"no {given}: use {', '.join(SCHEDULES)}, 1 or more of each, and chunks if interleaved")
    return SCHEDULES[name](num_ranks, num_microbatches, *[chunks] * (name == "interleaved"))


# ---- bubble and memory ----
def peak_activations(steps):
    """Returns the most microbatches, each of one stage, that a rank holds: F adds one; B, or W if any, frees it."""
    held, frees = [0], "W" if any(step.kind == "W" for step in steps) else "B"
    for step in steps:
        held.append(held[-1] + (step.kind == "F") - (step.kind == frees))
    return max(held)


def bubble_formula(name, num_ranks, num_microbatches, chunks=1, forward=1, backward=1, weight=1):
    """Returns the bubble as a share of time, for equal stages and free sends; a Fraction unless a cost is a float.

    Exact for every m: where m < p, interleaved and zero-bubble wait for a microbatch's whole way as well, which the
    papers' formulas leave out. Costs count for zero-bubble alone: with W <= F and W <= B it idles (p-1) (F+B-W), as in
    Qi et al.'s table 2; the waits are too short for a longer W, and it idles (p-1) max(F, B).
    """
    p, m, v = num_ranks, num_microbatches, chunks if name == "interleaved" else 1
    if name != "zero-bubble":
        return 1 - Fraction(v * m, max(v * m + p - 1, v * p + m - 1))
    work, most = m * (forward + backward + weight), min(m, p)
    idle = (most - 1) * max(forward + backward - weight, forward, backward) + (p - most) * (forward + backward)
    return Fraction(1) * idle / (work + idle)


# ---- checks ----
def inputs(step, num_stages):
    """Returns the set of steps that must be done before this one, on its rank or on another."""
    kind, stage, i = step
    needed = {"F": [("F", stage - 1)], "B": [("F", stage), ("B", stage + 1)], "W": [("B", stage)]}[kind]
    return {Step(*pair, i) for pair in needed if 0 <= pair[1] < num_stages}


def run_order(schedule):
    """Yields (rank, step) as ranks can run them, each in its order; ValueError where all that are left wait."""
    num_stages, done = 1 + max(step.stage for steps in schedule for step in steps), set()
    left = [[*steps] for steps in schedule]
    while ready := [rank for rank, steps in enumerate(left) if steps and done >= inputs(steps[0], num_stages)]:
        for rank in ready:
            yield rank, left[rank][0]
            done.add(left[rank].pop(0))
    waits = [(r, len(schedule[r]) - len(steps), steps[0]) for r, steps in enumerate(left) if steps]
    texts = [f"rank {r}, step {i}, {step} waits for {sorted(inputs(step, num_stages) - done)}" for r, i, step in waits]
    if texts:
        raise ValueError("deadlock: " + "; ".join(texts))


def check_schedule(schedule, num_microbatches):
    """Raises ValueError, which names rank and step, unless every step is there once and the ranks can run them all."""
    num_ranks, places, last = len(schedule), {}, {}
    num_stages = num_ranks * (1 + max(step.stage for steps in schedule for step in steps) // num_ranks)
    kinds = "FBW" if any(step.kind == "W" for steps in schedule for step in steps) else "FB"
    for rank, steps in enumerate(schedule):
        found, stages = Counter(steps), range(rank, num_stages, num_ranks)
        wanted = Counter(Step(*step) for step in product(kinds, stages, range(num_microbatches)))
        for step in sorted(found | wanted):
            if found[step] != wanted[step]:
                raise ValueError(f"rank {rank} has {step} {found[step]} times, not {wanted[step]}")
        places |= {step: i for i, step in enumerate(steps)}
    for rank, step in run_order(schedule):
        for sent in inputs(step, num_stages):
            channel = sent.stage % num_ranks, rank, step.kind  # delivers in the order of sending
            if channel[0] != rank and places[sent] < last.get(channel, 0):
                raise ValueError(f"rank {rank}, step {places[step]}, {step}: rank {channel[0]} sends in another order")
            last[channel] = places[sent]
