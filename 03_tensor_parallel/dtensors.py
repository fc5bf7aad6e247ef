"""What DTensor lacks for train.py: modules that stay whole, and whole tensors to shards and back, one at a time."""

import warnings
import zlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


# ---- tensor parallel ----
class Replicated(ParallelStyle):
    """A style for parallelize_module: whole weights and a whole input on every rank.

    Of the output a rank keeps `size` columns from `start`; it then has a part of the gradient, and says so: Partial.
    """

    def __init__(self, start=0, size=None):
        self.start, self.size = start, size

    def _apply(self, module, mesh):  # parallelize_module calls it
        def enter(_, inputs, mesh):
            return inputs[0] if isinstance(inputs[0], DTensor) else DTensor.from_local(inputs[0], mesh, [Replicate()])

        def leave(_, output, mesh):
            if self.size is None:
                return output.to_local()
            return output.to_local(grad_placements=[Partial()]).narrow(-1, self.start, self.size)

        return distribute_module(module, mesh, None, enter, leave)


def use_async_tp(group):
    """Has Inductor cut all_gather + matmul and matmul + reduce_scatter in pieces that overlap, in symmetric memory."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group  # neither switch has a public name

    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings():  # torch 2.13 calls this needless; without it the compiler pass does nothing
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)


# ---- shards ----
def part_of(whole, weight):
    """Returns a DTensor placed like weight, of a whole tensor that every rank has: no communication."""
    return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)


def init_dtensors(model, seed, device):
    """Gives a model on the meta device memory for its shards, with their part of what init_weights gives the whole."""
    for name, weight in list(model.named_parameters()):
        owner, _, last = name.rpartition(".")
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        shape = weight.shape  # the whole one
        whole = 0.02 * torch.randn(shape, generator=generator) if len(shape) > 1 else torch.ones(shape)
        shard = nn.Parameter(torch.empty_like(weight, device=device))
        shard.detach().copy_(part_of(whole, shard))
        setattr(model.get_submodule(owner), last, shard)
