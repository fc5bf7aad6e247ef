"""What the flags allow: how the layers are split, which flags go together, which microbatch is taken without one."""

import sys
from pathlib import Path

from checkpoint import require_safetensors
from split import layer_costs, split_layers

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError  # copied this folder out? copy common/ beside it or into it


def split_by_cost(args, num_stages):
    """Returns the layers per stage that make the slowest stage as fast as can be; the head belongs to the last."""
    hidden = 64 * -(-8 * args.dim // 192)
    layer, first, last = layer_costs(args.dim, args.seq_len, max(args.heads, 1), args.kv_heads, hidden, 256)
    return split_layers([layer] * args.layers, num_stages, first, last)


def check_pp(args, world_size, chunked=("interleaved",)):
    """Returns (ranks of a pipeline, replicas, stages per rank, layers per stage).

    Refuses what cannot be split, on every rank alike. chunked: the schedules that take several stages per rank.
    """
    pp_size = world_size if args.pp is None else args.pp
    if pp_size < 1:
        raise UsageError(f"--pp {pp_size} must be above 0")
    chunks = (2 if args.schedule == "interleaved" else 1) if args.chunks is None else args.chunks
    if chunks < 1 or (chunks > 1 and args.schedule not in chunked):
        way_out = f"use 1 or more with {' or '.join(chunked)}, else 1"
        raise UsageError(f"--chunks {chunks} does not go with --schedule {args.schedule} on {pp_size} ranks: {way_out}")
    num_stages = pp_size * chunks
    if args.layers < num_stages:
        fewer = f"--layers {args.layers} are fewer than {pp_size} ranks x {chunks} = {num_stages} stages"
        raise UsageError(f"{fewer}: use --layers {num_stages} or fewer ranks")
    counts = split_by_cost(args, num_stages)
    if args.split:
        try:
            counts = [int(word) for word in args.split.split(",")]
        except ValueError:
            raise UsageError(f"--split {args.split} must be {num_stages} numbers of layers, as in 3,5") from None
        if len(counts) != num_stages or sum(counts) != args.layers or min(counts) < 1:
            wanted = f"{num_stages} numbers of 1 and more that sum to --layers {args.layers}"
            raise UsageError(f"--split {args.split} sums to {sum(counts)} in {len(counts)} stages: use {wanted}")
    if args.save or args.resume:
        require_safetensors()
    return pp_size, world_size // pp_size, chunks, counts


def largest_microbatch(share, pp_size, num_stages):
    """Returns the largest size that makes two microbatches per rank, and one per stage, of a rank's share of the batch.

    Fewer would leave the stages idle for more of the time: (p - 1) / m with 1F1B.
    """
    most = max(1, share // max(2 * pp_size, num_stages))
    return max(size for size in range(1, most + 1) if share % size == 0)
