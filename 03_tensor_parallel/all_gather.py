"""The classic mistake: a column-parallel layer on dist.all_gather returns the right output and, silently, no gradient.

    torchrun --nproc-per-node 2 03_tensor_parallel/all_gather.py
Look at the errors of the gradients, then at the losses: they fall in every row, right or wrong.
    rank 0:  x --+-- rows 0 .. of W ---> y0 --+-- all_gather --> y = [y0 y1] --> head --> loss
    rank 1:  x --+-- the other rows ---> y1 --+-- all_gather --> y = [y0 y1] --> head --> loss
An error is the largest on any rank, as a share of the largest value that one process has; None: no gradient at all.
The losses are rank 0's after --steps. "saved" is AdamW's again, of what a checkpoint holds: rank 0's weights, all of W.
    all_gather alone          its outputs are new tensors: autograd stops there; W, and what is below, stay as they were
    outs[rank] = y            dW is right. But x feeds the columns of all ranks, and gets back its own rank's term only:
                              each rank trains an embedding of its own, and the log's loss is not the checkpoint's
    backward sums over ranks  as in torch.distributed.nn.functional.all_gather, for ranks that go on with different
                              data. These go on with the same: tp times too much. AdamW hides that, SGD does not
    Copy, GatherOutput        operators.py: f sums the terms of dx, and each rank takes its own columns of dy
On one rank only the first is wrong. Source: Shoeybi et al., Megatron-LM, 2019, section 3.
Shapes: B sequences, T tokens, D width, M hidden, V vocabulary (bytes).
"""

import argparse
import math
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from from_scratch import global_batch, read_windows
from operators import Copy, GatherOutput, TensorParallel, reduce_scatter_single

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError, process_group  # copied this folder out? copy common/ beside it or into it


# ---- config ----
def parse_args():
    add = (parser := argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)).add_argument
    add("--steps", type=int, default=50, help="optimizer steps")
    add("--batch", type=int, default=4, help="global batch in sequences, shared by the ranks")
    add("--seq-len", type=int, default=128, help="tokens (bytes) per sequence")
    add("--dim", type=int, default=32, help="width; the split layer makes it 4 times as wide")
    add("--seed", type=int, default=0)
    add("--data", help="a file or a folder of text; default: the source of Python's standard library")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--timeout", type=float, default=600, help="seconds that a rank waits for another")
    return parser.parse_args()


def check_split(args, tp_size):
    for name in ("steps", "batch", "seq_len", "dim", "timeout"):
        if not getattr(args, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} must be above 0")
    if 4 * args.dim % tp_size:
        way_out = f"use --dim {tp_size} x n, or --nproc-per-node {math.gcd(4 * args.dim, tp_size)}"
        raise UsageError(f"the hidden width 4 x --dim {args.dim} is not divisible by {tp_size} ranks: {way_out}")


# ---- model ----
def draw_weights(dim, seed):
    """Returns the whole embedding (V, D), layer (M, D) and head (V, M); float64, so that no error is mere rounding."""
    generator, shapes = torch.Generator().manual_seed(seed), ((256, dim), (4 * dim, dim), (256, 4 * dim))
    return [torch.randn(s, generator=generator, dtype=torch.float64) / math.sqrt(s[1]) for s in shapes]


def loss_of(y, head, text):  # (B, T, M) -> (B, T, V) -> mean over B and T
    return F.cross_entropy(F.linear(F.silu(y), head).flatten(0, 1), text[:, 1:].flatten())


# ---- column-parallel layers ----
# Each takes x (B, T, D), the same on every rank, and this rank's rows of W (M/tp, D), and returns y (B, T, M).
def gather_alone(x, weight, tp, put_back=False):
    y = F.linear(x, weight)
    # all_gather over tp: (B, T, M/tp) -> tp x (B, T, M/tp), written into tensors that have no history
    dist.all_gather(outs := [torch.empty_like(y) for _ in range(tp.size)], y, group=tp.group)
    if put_back:
        outs[tp.rank] = y  # this one, and no other, has a history
    return torch.cat(outs, dim=-1)


class GatherOutputSumGradients(GatherOutput):
    @staticmethod
    def backward(ctx, dy):
        whole = torch.stack(dy.chunk(ctx.tp.size, dim=-1))  # (tp, B, T, M/tp)
        # reduce_scatter over tp: dy of each rank -> this rank's columns of the sum; but each has all of dy, not a term
        reduce_scatter_single((dx := torch.empty_like(whole[0])).view(-1), whole.view(-1), group=ctx.tp.group)
        return dx, None


def copy_and_gather(x, weight, tp, gather=GatherOutput):
    return gather.apply(F.linear(Copy.apply(x, tp), weight), tp)


def train(layer, optimizer, windows, args, tp, device):
    """Returns loss, y, dW, dx of the first step, then the last loss, and that of the model as it would be saved."""
    table, weight, head = (weight.to(device) for weight in draw_weights(args.dim, args.seed))
    weight = weight.chunk(tp.size)[tp.rank].clone()  # (M/tp, D)
    optimizer, first = optimizer([w.requires_grad_() for w in (table, weight, head)]), None
    for step in range(args.steps + 1):
        text = global_batch(windows, args.batch, args.seed, step).to(device).long()  # (B, T + 1)
        (x := F.embedding(text[:, :-1], table)).retain_grad()  # (B, T, D)
        loss = loss_of(y := layer(x, weight, tp), head, text)
        if step == args.steps:
            break  # the weights stay as they are
        loss.backward()
        first = first or (loss.item(), y.detach(), weight.grad, x.grad)
        optimizer.step()
        optimizer.zero_grad()
    # all_gather over tp: rows of W -> W, as for a checkpoint
    dist.all_gather(parts := [torch.empty_like(weight) for _ in range(tp.size)], weight.detach(), group=tp.group)
    return *first, loss.item(), loss_of(F.linear(x, torch.cat(parts)), head, text).item()


# ---- main ----
def main():
    args = parse_args()
    with process_group(args.device, args.timeout) as (rank, _, world_size, device):
        check_split(args, world_size)
        windows = read_windows(args.data, args.seq_len, args.batch)
        tp, alone = TensorParallel(None, rank, world_size), TensorParallel(dist.new_subgroups(1)[0])
        layers = {
            "all_gather alone": gather_alone,
            "outs[rank] = y": partial(gather_alone, put_back=True),
            "backward sums over ranks": partial(copy_and_gather, gather=GatherOutputSumGradients),
            "Copy, GatherOutput": copy_and_gather,
        }

        def train_twice(layer, tp):
            start, *tensors, loss, saved = train(layer, partial(torch.optim.AdamW, lr=3e-3), windows, args, tp, device)
            sgd = train(layer, partial(torch.optim.SGD, lr=1.0), windows, args, tp, device)[-2]
            return start, tensors, (loss, saved, sgd)

        log = print if rank == 0 else lambda _: None
        log(f"torch {torch.__version__} | {dist.get_backend()} | {device.type} | tp {tp.size}")
        log("column-parallel layer    |  output | weight.grad | input.grad |  AdamW |  saved |    SGD")
        row, gaps = "{:24} | {:>7} | {:>11} | {:>10} | {:6.4f} | {:6.4f} | {:6.4f}".format, []
        start, (y, dw, dx), expected = train_twice(lambda x, weight, tp: F.linear(x, weight), alone)
        right = y, dw.chunk(tp.size)[rank], dx
        for name, layer in layers.items():
            _, tensors, losses = train_twice(layer, tp)
            errors = [math.inf if a is None else (a - b).abs().max() / b.abs().max() for a, b in zip(tensors, right)]
            # all_reduce over tp: this rank's errors -> the largest of any rank
            dist.all_reduce(worst := torch.tensor(errors, device=device), dist.ReduceOp.MAX)
            log(row(name, *("None" if math.isinf(e) else f"{e:.1e}" for e in worst.tolist()), *losses))
            gaps.append(round(losses[0] - expected[0], 4) + 0.0)  # never -0.0
        log(row("one process", *"---", *expected))
        log(f"every loss began at {start:.4f}; AdamW's end, less one process's: {', '.join(f'{g:+.4f}' for g in gaps)}")


if __name__ == "__main__":
    main()
