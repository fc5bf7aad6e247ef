"""What train.py needs beside its pipeline: which sizes go together, and the library's schedule by its short name."""

import sys
from pathlib import Path

import torch
from options import check_pp
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble as ScheduleZeroBubble

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError  # copied this folder out? copy common/ beside it or into it


def can_schedule(schedule, num_microbatches, num_stages, pp_size):
    """True if the library takes so many microbatches."""
    if schedule == "gpipe":
        return True
    if schedule == "1f1b":
        return num_microbatches >= num_stages
    return num_microbatches % max(1, num_microbatches // pp_size) == 0  # a round has pp_size microbatches, or more


def choose_microbatch(schedule, share, num_stages, pp_size):
    """Returns the largest microbatch that divides a rank's share of the batch and makes two microbatches per rank.

    Fewer would leave the stages idle for more of the time: (p - 1) / m with 1F1B. More make thinner matmuls.
    """
    wanted = max(1, share // max(2 * pp_size, num_stages))
    for size in [*range(wanted, 0, -1), *range(wanted + 1, share + 1)]:
        if share % size == 0 and can_schedule(schedule, share // size, num_stages, pp_size):
            return size
    return 1


def check_stages(args, world_size, check_args):
    """Refuses what the library would: on every rank alike, before the first collective.

    Returns (layers per stage, ranks of a pipeline, microbatches of a replica); sets args.microbatch.
    """
    pp_size, dp_size, _, counts = check_pp(args, world_size, ("interleaved", "zero-bubble"))
    by_default = args.microbatch is None
    check_args(args, dp_size)
    num_stages, share = len(counts), args.batch // dp_size
    suits = choose_microbatch(args.schedule, share, num_stages, pp_size)
    args.microbatch = suits if by_default else args.microbatch
    if not can_schedule(args.schedule, num_microbatches := share // args.microbatch, num_stages, pp_size):
        needed = f"{num_stages} or more" if args.schedule == "1f1b" else f"a multiple of {num_microbatches // pp_size}"
        way_out = f"--microbatch {suits}, or gpipe"
        if not can_schedule(args.schedule, share // suits, num_stages, pp_size):
            way_out = f"gpipe, or a --batch of {num_stages} sequences or more for each of {dp_size} replicas"
        given = f"--schedule {args.schedule} with {num_microbatches} microbatches"
        raise UsageError(f"{given}, not {needed}: use {way_out}")
    return counts, pp_size, num_microbatches


def count_held(modules, pp_size):
    """Returns the number of parameters on each rank, and the MiB of states on the one that holds the most.

    States are weight, gradient, AdamW's two averages and its count of steps. modules: of all stages, meta or not.
    """
    held = [{p: p.numel() for module in modules[rank::pp_size] for p in module.parameters()} for rank in range(pp_size)]
    states = [sum(4 * p.nbytes + 4 for p in weights) for weights in held]
    return [sum(weights.values()) for weights in held], max(states) / 2**20


def shapes_of(args, stage, num_stages, dtype):
    """Returns what a stage takes and what it makes of a microbatch, on the meta device.

    Without them the library finds out by itself in the first step: one more forward, loss and backward of a microbatch.
    Without requires_grad no gradient comes back, and backward of the stage before stops.
    """
    sizes = args.microbatch, args.seq_len
    between = torch.empty(*sizes, args.dim, dtype=dtype, device="meta", requires_grad=True)  # (b, T, D)
    first = torch.empty(sizes, dtype=torch.long, device="meta")  # (b, T)
    last = torch.empty(*sizes, 256, dtype=dtype, device="meta", requires_grad=True)  # (b, T, V)
    return first if stage == 0 else between, last if stage == num_stages - 1 else between


def build_schedule(name, stages, num_microbatches, loss_fn):
    """Returns the library's schedule over this rank's stages.

    With scale_grads=True, the default, the library divides the gradients by the number of microbatches: right only for
    a loss that is a mean over its microbatch. Ours is a sum, divided by the global number of tokens.
    """
    if name in ("gpipe", "1f1b"):
        schedule = ScheduleGPipe if name == "gpipe" else Schedule1F1B
        return schedule(stages[0], num_microbatches, loss_fn, scale_grads=False)
    schedule = ScheduleInterleaved1F1B if name == "interleaved" else ScheduleZeroBubble
    return schedule(stages, num_microbatches, loss_fn, scale_grads=False)
