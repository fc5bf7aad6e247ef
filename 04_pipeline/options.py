"""What train.py and from_scratch.py share: which flags go together."""

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
    pp = world_size if args.pp is None else args.pp
    if pp < 1:
        raise UsageError(f"--pp {pp} must be above 0")
    chunks = (2 if args.schedule == "interleaved" else 1) if args.chunks is None else args.chunks
    if chunks < 1 or (chunks > 1 and args.schedule not in chunked):
        way_out = f"use 1 or more with {' or '.join(chunked)}, else 1"
        raise UsageError(f"--chunks {chunks} does not go with --schedule {args.schedule} on {pp} ranks: {way_out}")
    num_stages = pp * chunks
    if args.layers < num_stages:
        way_out = f"use --layers {num_stages} or fewer ranks"
        raise UsageError(
            f"--layers {args.layers} are fewer than {pp} ranks x {chunks} = {num_stages} stages: {way_out}"
        )
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
    return pp, world_size // pp, chunks, counts
