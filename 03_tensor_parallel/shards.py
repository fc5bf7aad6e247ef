"""How a parameter is split over a tensor-parallel group, and what follows: initial weights, gradients, their norm."""

import zlib
from collections import defaultdict
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


# ---- shards ----
class Placement(NamedTuple):
    """How a parameter of a whole shape is split along dim, padded with zeros to equal shards. With fewer shards than
    ranks, neighbours hold the same one."""

    shape: torch.Size
    dim: int
    num_shards: int


def sharded(shape, dim, num_shards):
    """Returns a parameter for one shard of `shape`; its `placement` says which. One without is whole on every rank."""
    weight = nn.Parameter(torch.zeros(*shape[:dim], -(-shape[dim] // num_shards), *shape[dim + 1 :]))
    weight.placement = Placement(torch.Size(shape), dim, num_shards)
    return weight


def copies(weight, tp):
    """Returns how many ranks of the tp group hold the same part of a parameter."""
    return tp.size // weight.placement.num_shards if hasattr(weight, "placement") else tp.size


def shard(whole, weight, tp):
    """Returns this rank's part of a whole tensor, shaped like weight."""
    if not hasattr(weight, "placement"):
        return whole
    dim, size, length = weight.placement.dim, weight.shape[weight.placement.dim], whole.shape[weight.placement.dim]
    start = min(tp.rank // copies(weight, tp) * size, length)
    part = whole.narrow(dim, start, min(size, length - start))
    return F.pad(part, [0, 0] * (whole.dim() - 1 - dim) + [0, size - part.shape[dim]])


def unshard(part, weight, tp):
    """Returns the whole tensor from every rank's part of it; all ranks of the group must call it."""
    if not hasattr(weight, "placement"):
        return part
    # all_gather over tp: this rank's part -> the parts of all
    dist.all_gather(parts := [torch.empty_like(part) for _ in range(tp.size)], part.contiguous(), group=tp.group)
    shape, dim, _ = weight.placement
    return torch.cat(parts[:: copies(weight, tp)], dim).narrow(dim, 0, shape[dim])


# ---- initial weights ----
def init_shards(model, seed, tp):
    """Fills each parameter with its part of what init_weights gives the whole model, one at a time."""
    for name, weight in model.named_parameters():
        shape = getattr(weight, "placement", weight).shape
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        whole = 0.02 * torch.randn(shape, generator=generator) if weight.dim() > 1 else torch.ones(shape)
        weight.data.copy_(shard(whole, weight, tp))


# ---- gradients ----
def sum_gradients(weights, group):
    """Sums over a group, by one all-reduce, gradients of weights that all its ranks hold, each with its own term."""
    if not weights:
        return
    flat = torch.cat([weight.grad.flatten() for weight in weights])
    dist.all_reduce(flat, group=group)  # all_reduce over tp, or the ranks that share a kv head: a term -> the sum
    for weight, part in zip(weights, flat.split([weight.numel() for weight in weights])):
        weight.grad.copy_(part.view_as(weight))


def clip_gradients(weights, max_norm, tp):
    """Returns the norm of the whole gradient, each element counted once, however many ranks hold it; clips by it."""
    held = defaultdict(list)
    for weight in weights:
        held[copies(weight, tp)].append(weight.grad)
    square = sum(nn.utils.get_total_norm(grads) ** 2 / count for count, grads in held.items())
    dist.all_reduce(square, group=tp.group)  # all_reduce over tp: square of this rank's part of the norm -> of the norm
    nn.utils.clip_grads_with_norm_(weights, max_norm, norm := square.sqrt())
    return norm
