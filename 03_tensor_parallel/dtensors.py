"""What DTensor lacks for train.py: modules that stay whole, and whole tensors to shards and back, one at a time."""

import warnings
import zlib

import torch
import torch.distributed as dist
from checkpoint import read_checkpoint, write_checkpoint
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


# ---- initial weights ----
def copy_shard(target, whole):
    """Copies this rank's part of a whole tensor, which every rank has: no communication."""
    part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target.detach().to_local().copy_(part.to_local())


def init_dtensors(model, seed, device):
    """Gives a model on the meta device memory for its shards, with their part of what init_weights gives the whole."""
    for name, weight in list(model.named_parameters()):
        owner, _, last = name.rpartition(".")
        shard = nn.Parameter(torch.empty_like(weight, device=device))
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        shape = weight.shape  # the whole one
        copy_shard(shard, 0.02 * torch.randn(shape, generator=generator) if len(shape) > 1 else torch.ones(shape))
        setattr(model.get_submodule(owner), last, shard)


# ---- checkpoint ----
def save_dtensors(folder, run, step, model, optimizer, scaler, generators):
    """Puts every tensor together, one at a time, and has rank 0 write the whole."""
    random = torch.stack([generator.get_state() for generator in generators])
    # all_gather over all ranks: this rank's random states -> those of all
    dist.all_gather_object(rng := [None] * dist.get_world_size(), random)
    weights, states = {}, {"rng": torch.stack(rng)}
    for name, weight in model.named_parameters():
        state = optimizer.state[weight]
        states["step"] = state["step"].cpu()
        for into, key, part in (
            (weights, name, weight.detach()),
            (states, f"exp_avg.{name}", state["exp_avg"]),
            (states, f"exp_avg_sq.{name}", state["exp_avg_sq"]),
        ):
            whole = part.full_tensor()  # all_gather over tp, where it is sharded
            if dist.get_rank() == 0:
                into[key] = whole.cpu().contiguous()
    if dist.get_rank() == 0:
        write_checkpoint(folder, run, step, weights, states, {"scaler": scaler.state_dict()})


def load_dtensors(folder, run, model, optimizer, scaler, generators):
    """Takes this rank's part of every tensor, one at a time; returns the step."""
    step, weights, states, more = read_checkpoint(folder, run)
    state = []
    for name, weight in model.named_parameters():
        copy_shard(weight, weights.get_tensor(name))
        averages = {"exp_avg": torch.zeros_like(weight.detach()), "exp_avg_sq": torch.zeros_like(weight.detach())}
        for kind, average in averages.items():
            copy_shard(average, states.get_tensor(f"{kind}.{name}"))
        state.append(dict(step=states.get_tensor("step").clone(), **averages))  # each its own: it is a view of the file
    groups = optimizer.state_dict()["param_groups"]  # this run's: the flag's learning rate counts
    optimizer.load_state_dict({"state": dict(enumerate(state)), "param_groups": groups})
    if more["scaler"]:
        scaler.load_state_dict(more["scaler"])
    rng = states.get_tensor("rng")
    if rng.shape[0] == dist.get_world_size():  # in another layout dropout draws anew
        for generator, random in zip(generators, rng[dist.get_rank()]):
            generator.set_state(random.clone())  # of a view it would read the whole's beginning
    return step
