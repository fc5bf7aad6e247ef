"""Tensor parallelism's operators: collectives that autograd can go through, in pairs that are each other's backward.

    name           forward                            backward                 Megatron-LM    Korthikanti et al.
    Copy           the same on every rank             all_reduce               f
    Reduce         all_reduce: sum of partial terms   copy                     g
    GatherTokens   all_gather: (B, T/tp, D) -> T      reduce_scatter                          g
    ScatterTokens  reduce_scatter: T -> (B, T/tp, D)  all_gather                              g with a bar
    GatherOutput   all_gather: (.., N/tp) -> (.., N)  this rank's slice
Shoeybi et al., Megatron-LM, 2019, section 3. Korthikanti et al., Reducing Activation Recomputation, 2022, section 4.2.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function

# torch 2.13 renamed both; the old names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TensorParallel(NamedTuple):
    """What a layer must know of its tensor-parallel group."""

    group: Any = None  # a ProcessGroup; None is the whole world
    rank: int = 0
    size: int = 1
    sequence_parallel: bool = False  # outside of the split matrices each rank holds 1/tp of the tokens
    overlap: bool = True  # all-reduce an input's gradient while the weights' gradients are computed
    regather: bool = False  # with sequence_parallel: keep 1/tp of a layer's input, gather it again in backward


# ---- tokens ----
# A rank's tokens are one stretch of the flattened (B, T): norms and residuals look at one token at a time, so any tp-th
# will do, and this one needs no copy. It is carried as (B, T/tp, D), though its rows are not those of the sequences.
def gather(x, tp, async_op=False):
    whole = x.new_empty(x.shape[0], x.shape[1] * tp.size, *x.shape[2:])
    return whole, all_gather_single(whole.view(-1), x.reshape(-1), group=tp.group, async_op=async_op)


def scatter(x, tp, async_op=False):
    part = x.new_empty(x.shape[0], x.shape[1] // tp.size, *x.shape[2:])
    return part, reduce_scatter_single(part.view(-1), x.reshape(-1), group=tp.group, async_op=async_op)


def all_reduce(x, tp, async_op=False):  # in place
    return x, dist.all_reduce(x, group=tp.group, async_op=async_op)


# ---- operators ----
class Copy(Function):
    """f: y = x; dx = sum over tp of dy, since each rank's columns see the whole x."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        # all_reduce over tp: this rank's term of dx -> dx. A copy: autograd may have given dy to another branch, too
        return all_reduce(dy.clone(), ctx.tp)[0], None


class Reduce(Function):
    """g: y = sum over tp of x; dx = dy. Sums in place: x is gone afterwards."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.mark_dirty(x)
        return all_reduce(x, tp)[0]  # all_reduce over tp: this rank's term of y -> y

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class GatherTokens(Function):
    """y = all tokens of x; dx = this rank's tokens of the sum over tp of dy."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return gather(x, tp)[0]  # all_gather over tp: (B, T/tp, D) -> (B, T, D)

    @staticmethod
    def backward(ctx, dy):
        return scatter(dy, ctx.tp)[0], None  # reduce_scatter over tp: partial (B, T, D) -> (B, T/tp, D)


class ScatterTokens(Function):
    """y = this rank's tokens of the sum over tp of x; dx = all tokens of dy."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return scatter(x, tp)[0]  # reduce_scatter over tp: partial (B, T, D) -> (B, T/tp, D)

    @staticmethod
    def backward(ctx, dy):
        return gather(dy, ctx.tp)[0], None  # all_gather over tp: (B, T/tp, D) -> (B, T, D)


class GatherOutput(Function):
    """y = the columns of all ranks' x; dx = this rank's columns of dy, which is the same on every rank, as y is."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        # all_gather over tp: (.., N/tp) -> tp x (.., N/tp)
        dist.all_gather(parts := [torch.empty_like(x) for _ in range(tp.size)], x.contiguous(), group=tp.group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx, dy):
        return dy.chunk(ctx.tp.size, dim=-1)[ctx.tp.rank], None


class ColumnMatmul(Function):
    """y_i = x W_i^T for several W_i, each split by rows; dx = sum over tp and i of dy_i W_i; dW_i = dy_i^T x.

    The same as Copy or GatherTokens and then F.linear, but dx is on the network while dW_i is computed.
    """

    @staticmethod
    def forward(ctx, x, tp, *weights):
        whole = gather(x, tp)[0] if tp.sequence_parallel else x  # all_gather over tp: (B, T/tp, D) -> (B, T, D)
        ctx.tp = tp
        ctx.save_for_backward(x if tp.regather else whole, *weights)
        return tuple(F.linear(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *dys):
        tp, (x, *weights) = ctx.tp, ctx.saved_tensors
        # all_gather over tp: (B, T/tp, D) -> (B, T, D), while dx is computed
        x, gathered = gather(x, tp, async_op=True) if tp.sequence_parallel and tp.regather else (x, None)
        dys = [dy.flatten(0, -2) for dy in dys]  # (B T, N/tp)
        dx = dys[0] @ weights[0]
        for dy, weight in zip(dys[1:], weights[1:]):
            dx.addmm_(dy, weight)
        dx = dx.view(x.shape)
        # all_reduce or reduce_scatter over tp: this rank's term of dx -> dx, or its tokens, while dW is computed
        reduce = scatter if tp.sequence_parallel else all_reduce
        dx, summed = reduce(dx, tp, async_op=True)
        gathered.wait() if gathered else None
        dweights = [dy.T @ x.flatten(0, -2) for dy in dys]
        summed.wait()
        return dx, None, *dweights
