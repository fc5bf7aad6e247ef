"""When does tensor parallelism pay? The time of one block split over all ranks, against all of it on one rank.

    torchrun --nproc-per-node 2 03_tensor_parallel/crossover.py
On a link of a given rate: a loopback of your own, whose rate all ranks and both directions share (two ranks, 1 Gbit/s
each way: 2gbit). Needs Linux with user namespaces, not root; a burst above lo's packets of 64 KiB, which it would drop.
    unshare -Urn sh -c "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 70kb latency 1s &&
        torchrun --nproc-per-node 2 03_tensor_parallel/crossover.py"
Look at the speed-up, then at the column beside it, which says what stands in its way:
    one process ms  forward and backward of the whole block on rank 0; the others wait, so it has the machine to itself
    tp ms           the same of the split block, until the slowest rank is done; a rank has no more threads than before
    communication   the block's collectives and nothing else, as a share of tp ms; overlap may hide a part of it
    bytes to send   by each rank: 4 all-reduces (2 forward, 2 backward), each of 2 (tp-1)/tp x B T D elements; as many
                    with --sequence-parallel, if reduce_scatter sends half of an all_reduce (NCCL's does, gloo's all)
Times are medians, taken in turn. Computation grows with tokens x width^2, bytes with tokens x width: only a wider block
makes up for a slow link; more tokens make up for latency. On GPUs try --widths 2048 8192 --dtype bfloat16.
Shapes: B sequences, T tokens, D width. Source: Shoeybi et al., Megatron-LM, 2019, section 3.
"""

import argparse
import math
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from from_scratch import Block, ParallelAttention, ParallelMLP
from operators import TensorParallel, all_reduce, gather, scatter
from shards import init_shards

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError, process_group  # copied this folder out? copy common/ beside it or into it


# ---- config ----
def parse_args():
    add = (parser := argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)).add_argument
    add("--widths", type=int, nargs="+", default=[128, 256, 512], help="of the block, one table row each")
    add("--batches", type=int, nargs="+", default=[1, 4, 16], help="sequences per forward, one table row each")
    add("--seq-len", type=int, default=64, help="tokens per sequence")
    add("--heads", type=int, default=4)
    add("--kv-heads", type=int, default=2)
    add("--repeats", type=int, default=7, help="measurements, of which the median counts")
    add("--seed", type=int, default=0)
    add("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--timeout", type=float, default=600, help="seconds that a rank waits for another")
    add("--sequence-parallel", action="store_true", help="norms and residuals on 1/tp of the tokens")
    return parser.parse_args()


def check_sizes(args, tp_size):
    """Refuses what cannot be split: on every rank alike, before the first collective."""
    least = dict(vars(args), widths=min(args.widths), batches=min(args.batches))
    for name in ("widths", "batches", "seq_len", "heads", "kv_heads", "repeats", "timeout"):
        if not least[name] > 0:
            raise UsageError(f"--{name.replace('_', '-')} {least[name]} must be above 0")
    splits = [("--heads", args.heads), ("--seq-len", args.seq_len)][: 1 + args.sequence_parallel]
    for width in args.widths:
        if width % (2 * args.heads):
            raise UsageError(f"--widths {width} is not divisible by 2 x {args.heads} heads: use {2 * args.heads} x n")
        splits.append((f"--widths {width} with MLP width", 64 * -(-8 * width // 192)))
    for what, number in splits:
        if number % tp_size:
            way_out = f"use --nproc-per-node {math.gcd(number, tp_size)}"
            raise UsageError(f"{what} {number} is not divisible by {tp_size} ranks: {way_out}")
    if args.heads % args.kv_heads or (args.kv_heads % tp_size and tp_size % args.kv_heads):
        raise UsageError(f"--kv-heads {args.kv_heads} must divide {args.heads} heads and fit {tp_size} ranks: use 1")


# ---- the two blocks ----
def build_blocks(width, args, tp):
    """Returns the whole block, and this rank's part of a block with the same weights."""
    whole, part = (Block(width, args.heads, args.kv_heads) for _ in range(2))
    part.self_attn = ParallelAttention(width, args.heads, args.kv_heads, tp)
    part.mlp = ParallelMLP(width, whole.mlp.up_proj.out_features, tp)
    init_shards(whole, args.seed, TensorParallel())
    init_shards(part, args.seed, tp)
    return whole, part


# ---- measurement ----
def forward_backward(block, x):
    """Returns y, and of the sum of its squares / 2 the gradients: dx and those of the weights."""
    y = block(x := x.detach().requires_grad_())
    return y.detach(), *torch.autograd.grad(y, (x, *block.parameters()), y.detach())


def communicate(x, tp):
    for _ in range(4):  # attention and MLP, forward and backward
        if tp.sequence_parallel:
            # all_gather, reduce_scatter over tp: (B, T/tp, D) -> (B, T, D) -> (B, T/tp, D), around each half of a block
            scatter(gather(x, tp)[0], tp)
        else:
            all_reduce(x, tp)  # all_reduce over tp: partial (B, T, D) -> replicated, by g forward and by f backward


def time_in_turn(calls, repeats, rank, device):
    """Returns the median ms of each (call, does every rank take part?); the slowest rank counts."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = torch.zeros(len(calls), repeats, dtype=torch.float64)
    for i in range(repeats + 1):
        for row, (call, everywhere) in zip(times, calls):
            dist.barrier()  # all start together; and while rank 0 works alone, the others wait in the next one
            if everywhere or rank == 0:
                wait()
                start = time.perf_counter()
                call()
                wait()
                row[i - 1] = 1e3 * (time.perf_counter() - start)  # the first, a warm-up, makes way for the last
    dist.all_reduce(times := times.to(device), dist.ReduceOp.MAX)  # all_reduce over tp: a rank's times -> the slowest's
    return times.median(dim=1).values.tolist()


# ---- main ----
def main():
    args = parse_args()
    with process_group(args.device, args.timeout) as (rank, _, world_size, device):
        check_sizes(args, world_size)
        tp, dtype = TensorParallel(None, rank, world_size, args.sequence_parallel), getattr(torch, args.dtype)
        log, rows, generator = print if rank == 0 else lambda _: None, [], torch.Generator().manual_seed(args.seed)
        setting = f"tp {tp.size} | {args.dtype} | {torch.get_num_threads()} threads per rank"
        log(f"torch {torch.__version__} | {dist.get_backend()} | {device.type} | {setting}")
        log("width | sequences | tokens | one process ms |    tp ms | speed-up | communication | bytes to send")
        for width in args.widths:
            whole, part = (block.to(device, dtype) for block in build_blocks(width, args, tp))
            for batch in args.batches:
                x = torch.randn(batch, args.seq_len, width, generator=generator).to(device, dtype)  # (B, T, D)
                mine = x.view(tp.size, batch, -1, width)[rank] if tp.sequence_parallel else x  # (B, T/tp, D), or x
                calls = [(partial(forward_backward, whole, x), False), (partial(forward_backward, part, mine), True)]
                calls.append((partial(communicate, torch.zeros_like(mine), tp), True))
                one, split, network = time_in_turn(calls, args.repeats, rank, device)
                tokens, sent = batch * args.seq_len, 4 * 2 * (tp.size - 1) * x.nbytes // tp.size
                rows.append((tokens * width, tokens, width, one / split))
                sizes = f"{width:5} | {batch:9} | {tokens:6} | {one:14.2f}"
                log(f"{sizes} | {split:8.2f} | {one / split:8.2f} | {network / split:13.0%} | {sent:13}")
        paying = [row for row in rows if row[-1] > 1]
        product, tokens, width, speed_up = min(paying) if paying else max(rows, key=lambda row: row[-1])
        where = f"{tokens} tokens x width {width} = {product:,} (speed-up {speed_up:.2f})"
        if tp.size == 1:
            log("tp 1 splits nothing: use --nproc-per-node 2 or more")
        elif paying:
            log(f"tp {tp.size} pays in {len(paying)} of {len(rows)} rows, the smallest {where}")
        else:
            log(f"tp {tp.size} does not pay in this table, best {where}: try larger --widths, or a faster link")


if __name__ == "__main__":
    main()
