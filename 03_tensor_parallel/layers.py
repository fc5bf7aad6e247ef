"""Layers whose matrices are split over the ranks, and the loss of a split vocabulary (Megatron-LM, section 3).

    ColumnParallelLinear     y = x W^T, W (N, D) split by rows of W, which are columns of y:  x whole    -> y (.., N/tp)
    RowParallelLinear        y = x W^T, W (D, N) split by columns of W, as x is:              x (.., N/tp) -> y whole
    VocabParallelEmbedding   the table (V, D) split by rows; a rank without the token adds zero
    VocabParallelCrossEntropy from logits (N, V/tp), which are never gathered
One after the other, the first two need one collective forward and one backward: none stands between them.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from operators import ColumnMatmul, Copy, GatherOutput, GatherTokens, Reduce, ScatterTokens
from shards import sharded
from torch import nn
from torch.autograd import Function


# ---- layers ----
class ColumnParallelLinear(nn.Module):
    """x (B, T, D), or with sequence parallelism (B, T/tp, D) -> (B, T, N/tp), or (B, T, N) with gather_output."""

    def __init__(self, in_features, out_features, tp, bias=False, gather_output=False, num_shards=None):
        super().__init__()
        self.tp, self.gather_output = tp, gather_output
        self.weight = sharded((out_features, in_features), 0, num_shards or tp.size)
        self.bias = sharded((out_features,), 0, num_shards or tp.size) if bias else None

    def forward(self, x):
        return project(x, self)[0]


def project(x, *layers):
    """Returns the output of each ColumnParallelLinear for the same x, with one all-reduce of its gradient for all."""
    tp = layers[0].tp
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))  # before the network, not after it
    if tp.overlap:
        ys = ColumnMatmul.apply(x, tp, *(layer.weight.to(x.dtype) for layer in layers))
    else:
        x = GatherTokens.apply(x, tp) if tp.sequence_parallel else Copy.apply(x, tp)
        ys = [F.linear(x, layer.weight) for layer in layers]
    ys = [y if layer.bias is None else y + layer.bias for y, layer in zip(ys, layers)]
    return [GatherOutput.apply(y, tp) if layer.gather_output else y for y, layer in zip(ys, layers)]


class RowParallelLinear(nn.Module):
    """x (B, T, N/tp) -> (B, T, D), or with sequence parallelism (B, T/tp, D)."""

    def __init__(self, in_features, out_features, tp, bias=False):
        super().__init__()
        self.tp = tp
        self.weight = sharded((out_features, in_features), 1, tp.size)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x):
        y = F.linear(x, self.weight)  # this rank's term of the sum
        y = ScatterTokens.apply(y, self.tp) if self.tp.sequence_parallel else Reduce.apply(y, self.tp)
        return y if self.bias is None else y + self.bias  # after the sum: before it, the bias would be added tp times


class VocabParallelEmbedding(nn.Module):
    """tokens (B, T) -> (B, T, D), or with sequence parallelism (B, T/tp, D)."""

    def __init__(self, vocab_size, dim, tp):
        super().__init__()
        self.tp = tp
        self.weight = sharded((vocab_size, dim), 0, tp.size)

    def forward(self, tokens):
        rows = tokens - self.tp.rank * self.weight.shape[0]
        mine = (rows >= 0) & (rows < self.weight.shape[0])
        y = F.embedding(rows.where(mine, 0), self.weight) * mine[..., None]  # zero, where another rank has the row
        return ScatterTokens.apply(y, self.tp) if self.tp.sequence_parallel else Reduce.apply(y, self.tp)


# ---- loss ----
class VocabParallelCrossEntropy(Function):
    """logits (N, V/tp), targets (N,), below vocab_size -> sum over tokens of log(sum_v exp z_v) - z_target.

    dz_v = exp(z_v) / sum_v exp(z_v) - [v is the target]. The columns from vocab_size on are padding.
    """

    @staticmethod
    def forward(ctx, logits, targets, vocab_size, tp):
        z = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        start = tp.rank * z.shape[-1]
        z[:, max(0, vocab_size - start) :] = -torch.inf  # the padding never wins
        # all_reduce over tp: largest logit of this rank's part of the vocabulary -> of all, so that no exp overflows
        dist.all_reduce(largest := z.amax(-1, keepdim=True), dist.ReduceOp.MAX, tp.group)
        z -= largest
        mine = (targets >= start) & (targets < start + z.shape[-1])
        rows, columns = torch.arange(len(z), device=z.device), (targets - start).where(mine, 0)
        # all_reduce over tp: the target's logit where this rank has it, else 0 -> the target's logit
        dist.all_reduce(target := z[rows, columns].where(mine, 0), group=tp.group)
        # all_reduce over tp: sum of exp over this rank's part of the vocabulary -> over all
        dist.all_reduce(total := z.exp_().sum(-1), group=tp.group)
        ctx.save_for_backward(z.div_(total[:, None]), rows, columns, mine)  # the softmax
        ctx.dtype = logits.dtype
        return (total.log() - target).sum()

    @staticmethod
    def backward(ctx, dloss):
        softmax, rows, columns, mine = ctx.saved_tensors
        dz = softmax * dloss
        dz[rows, columns] -= dloss * mine
        return dz.to(ctx.dtype), None, None, None
