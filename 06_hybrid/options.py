"""Which flags go together: the mesh's sizes, what they must divide, and the pipeline's schedule by its short name."""

import sys
from math import gcd
from pathlib import Path

from split import layer_costs, split_layers
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble as ScheduleZeroBubble

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError  # copied this folder out? copy common/ beside it or into it


# ---- mesh ----
def choose_mesh(args, world_size):
    """Returns (pp, replicas, shards of each, tp): --dp, if left out, takes the ranks that pp and tp leave."""
    given = {name: size for name in ("pp", "dp", "tp", "replicas") if (size := getattr(args, name)) is not None}
    for name, size in given.items():
        if size < 1:
            raise UsageError(f"--{name} {size} must be above 0")
    pp_size, tp_size = given.get("pp", 1), given.get("tp", 1)
    fixed = pp_size * tp_size
    dp_size = given.get("dp", max(1, world_size // fixed))
    if (product := fixed * dp_size) != world_size:
        sizes = f"--pp {pp_size} x --dp {dp_size} x --tp {tp_size} = {product} ranks, but there are {world_size}"
        way_out = f"use {product}" + (", or leave out --dp" if world_size % fixed == 0 else "")
        raise UsageError(f"{sizes}: {way_out}")
    if dp_size % args.replicas or (args.replicas > 1 and args.shard == "none"):
        way_out = "use --replicas 1, say" if dp_size % args.replicas else "use --shard full, or optimizer"
        raise UsageError(f"--replicas {args.replicas} of {dp_size} ranks with --shard {args.shard}: {way_out}")
    return pp_size, args.replicas, dp_size // args.replicas, tp_size


def check_tensor_sizes(args, config, tp_size):
    """Refuses what tensor parallelism cannot split: on every rank alike, before the first collective."""
    numbers = {"--heads": config.heads, "MLP width": config.hidden, "vocabulary": config.vocab_size}
    for what, number in (numbers | ({"--seq-len": args.seq_len} if args.sequence_parallel else {})).items():
        if number % tp_size:
            raise UsageError(f"{what} {number} is not divisible by --tp {tp_size}: use --tp {gcd(number, tp_size)}")
    if config.kv_heads % tp_size and tp_size % config.kv_heads:
        way_out = f"use --tp {gcd(config.kv_heads, tp_size)}"
        raise UsageError(f"--kv-heads {config.kv_heads} and --tp {tp_size}: one must divide the other; {way_out}")
    if config.vocab_size < 256:
        raise UsageError(f"vocabulary {config.vocab_size} is less than the 256 values of a byte: use another model")


# ---- pipeline ----
def can_schedule(schedule, num_microbatches, num_stages, pp_size):
    """True if the library takes so many microbatches."""
    if schedule == "gpipe":
        return True
    if schedule == "1f1b":
        return num_microbatches >= num_stages
    return num_microbatches % max(1, num_microbatches // pp_size) == 0


def choose_microbatch(schedule, share, num_stages, pp_size):
    """Returns the largest microbatch that divides a rank's share of the batch and makes two microbatches per rank.

    Fewer would leave the stages idle for more of the time: (p - 1) / m with 1F1B. More make thinner matmuls.
    """
    wanted = max(1, share // max(2 * pp_size, num_stages))
    for size in [*range(wanted, 0, -1), *range(wanted + 1, share + 1)]:
        if share % size == 0 and can_schedule(schedule, share // size, num_stages, pp_size):
            return size
    return 1


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


def check_pipeline(args, config, pp_size, dp_size, check_args):
    """Returns (layers per stage, microbatches of a replica); sets args.microbatch. Refuses what the library would."""
    chunks = (2 if args.schedule == "interleaved" else 1) if args.chunks is None else args.chunks
    if chunks < 1 or (chunks > 1 and args.schedule in ("gpipe", "1f1b")):
        way_out = "use 1 or more with interleaved or zero-bubble, else 1"
        raise UsageError(f"--chunks {chunks} does not go with --schedule {args.schedule}: {way_out}")
    if args.schedule == "zero-bubble" and args.shard == "full":  # the library would find no weights, and no gradients
        raise UsageError("--schedule zero-bubble needs weights that stay whole till backward: use --shard optimizer")
    num_stages = pp_size * chunks
    if config.tied and pp_size == 1 < chunks:  # both copies of the tied weight would be on one rank
        raise UsageError(f"a tied model in {chunks} stages on --pp 1: use --chunks 1, or --pp 2")
    if config.layers < num_stages:
        way_out = f"use --layers {num_stages}, or a smaller --pp"
        raise UsageError(
            f"--layers {config.layers} are fewer than --pp {pp_size} x {chunks} = {num_stages} stages: {way_out}"
        )
    by_default = args.microbatch is None
    check_args(args, dp_size)
    share = args.batch // dp_size
    suits = choose_microbatch(args.schedule, share, num_stages, pp_size)
    args.microbatch = suits if by_default else args.microbatch
    if not can_schedule(args.schedule, count := share // args.microbatch, num_stages, pp_size):
        needed = f"{num_stages} or more" if args.schedule == "1f1b" else f"a multiple of {count // pp_size}"
        way_out = f"--microbatch {suits}, or gpipe"
        if not can_schedule(args.schedule, share // suits, num_stages, pp_size):
            way_out = f"gpipe, or a --batch of {num_stages} sequences or more for each of {dp_size} replicas"
        raise UsageError(f"--schedule {args.schedule} with {count} microbatches, not {needed}: use {way_out}")
    sizes = config.dim, args.seq_len, config.heads, config.kv_heads, config.hidden, config.vocab_size
    layer, first, last = layer_costs(*sizes)
    return split_layers([layer] * config.layers, num_stages, first, last), count
