"""One stage of the model, three ways apart: its matrices over tp, then what is left of them over dp, then filled.

    tp 2 x dp 2    up_proj.weight (M, D): rows    down_proj.weight (D, M): rows of dp, columns of tp
                   [ tp 0, dp 0 ]                 [ tp 0, dp 0 | tp 1, dp 0 ]
                   [ tp 0, dp 1 ]                 [ tp 0, dp 1 | tp 1, dp 1 ]
                   [ tp 1, dp 0 ]
                   [ tp 1, dp 1 ]

The order of the steps: build on the meta device, split, recompute or compile, shard, fill. No rank ever holds the whole
model: until fill() there is no memory behind the weights, and fill() makes one whole matrix at a time.
"""

import warnings
import zlib
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from model import LlamaStage
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor import parallel as tp
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.checkpoint import checkpoint

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


# ---- mesh ----
def make_mesh(sizes, device_type, timeout):
    """Returns the mesh of all ranks, axes as in AXES: tp on neighbours, pp on the ranks farthest apart.

    sizes: of the axes. timeout: seconds; init_device_mesh would leave its groups without it. All ranks must call this.
    """
    ranks, groups = torch.arange(dist.get_world_size()).view(sizes), []
    for axis, size in enumerate(sizes):
        lists = ranks.movedim(axis, -1).reshape(-1, size).tolist()
        groups.append(dist.new_subgroups_by_enumeration(lists, timedelta(seconds=timeout))[0])
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=AXES)


def make_tie_group(mesh, timeout):
    """Returns the group of the first and last stage's ranks with this rank's place in dp and tp; else None."""
    ends = mesh.mesh[[0, -1]].movedim(0, -1).reshape(-1, 2).tolist()
    return dist.new_subgroups_by_enumeration(ends, timedelta(seconds=timeout))[0]


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


def split_stage(stage, mesh, config, sequence_parallel):
    """Makes DTensors of a stage's parameters, and communication where a placement changes; mesh: a tp group.

    Between stages x is a plain tensor, (B, T/tp, D) with sequence parallelism, else (B, T, D) on each rank of tp; the
    last stage's output is (B, T, V/tp).
    """
    outside = Shard(1) if sequence_parallel else Replicate()  # of x between the split regions
    # f, once for q, k, v and once for gate, up: one all_reduce of the gradient serves them all
    f = tp.PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate())
    # g over tp: partial (B, T, D) -> outside, since each rank has the sum over its own columns
    g = tp.RowwiseParallel(output_layouts=outside)
    norm, kv = tp.SequenceParallel() if sequence_parallel else Replicated(), tp.ColwiseParallel()
    if config.kv_heads < mesh.size():  # every rank computes all of them, and keeps the one that its query heads use
        head_dim = config.dim // config.heads
        kv = Replicated(mesh.get_local_rank() * config.kv_heads // mesh.size() * head_dim, head_dim)
    plan = {"input_layernorm": norm, "post_attention_layernorm": norm, "self_attn": f, "mlp": f}
    plan |= {f"self_attn.{name}_proj": style for name, style in zip("qkvo", (tp.ColwiseParallel(), kv, kv, g))}
    plan |= {"mlp.gate_proj": tp.ColwiseParallel(), "mlp.up_proj": tp.ColwiseParallel(), "mlp.down_proj": g}
    for layer in stage.model.layers.values():
        tp.parallelize_module(layer, mesh, plan)
    if stage.is_first:  # (V/tp, D); g
        embedding = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=outside)
        tp.parallelize_module(stage.model, mesh, {"embed_tokens": embedding})
    if stage.is_last:  # (V/tp, D); f
        head = {"model.norm": norm, "lm_head": tp.ColwiseParallel(input_layouts=outside)}
        tp.parallelize_module(stage, mesh, head)
    stage.tie(config)


# ---- data parallel ----
def shard_stage(stage, mesh, keep_whole, half):
    """Makes groups of weights: the embedding, each layer, norm and head. A group is gathered and reduced as one.

    mesh: dp_shard, or dp_replicate x dp_shard. keep_whole: from the first forward of a step to its last backward the
    weights stay whole, so that further microbatches gather none. half: data type of compute, or None for the shards'.
    """
    # What tensor parallelism returns is a view of a DTensor. Nothing here changes one in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    dtype = next(stage.parameters()).dtype
    how = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(half, dtype))
    # all_gather over dp_shard, before a group's forward, and before its backward if it was freed: shards -> whole / tp
    # reduce_scatter over dp_shard, once a step: gradient of this rank's tokens -> sum over dp_shard, 1/n of it
    # all_reduce over dp_replicate, after that, if there are replicas: this shard of one replica's sum -> of all
    for layer in stage.model.layers.values():
        fully_shard(layer, reshard_after_forward=not keep_whole, **how)
    if stage.is_first and not stage.is_tied_here:
        fully_shard(stage.model.embed_tokens, reshard_after_forward=not keep_whole, **how)
        stage.model.embed_tokens.set_unshard_in_backward(False)  # a lookup's gradient needs no table
    if stage.is_last and not stage.is_tied_here:  # backward begins with them: freeing them would only cost a gather
        fully_shard([stage.model.norm, stage.lm_head], reshard_after_forward=False, **how)
    fully_shard(stage, reshard_after_forward=False, **how)  # the root; of weights it has at most those of a tied end
    for module in [m for m in stage.modules() if isinstance(m, FSDPModule)]:
        # The sum over ranks, not the mean: the loss is divided by all ranks' tokens already. With the factor alone the
        # collective would multiply by it, PREMUL_SUM, which gloo lacks; every backend has the plain sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def build_hybrid_stage(config, first, last, mesh, args, device_type):
    """Returns layers first .. last - 1 as this rank's part of a stage, on the meta device: shapes, no memory.

    mesh: make_mesh's. args: shard (none, optimizer, full), dtype, sequence_parallel, checkpoint_activations, compile.
    """
    half = getattr(torch, args.dtype) if "16" in args.dtype else None
    with torch.device("meta"):
        stage = LlamaStage(config, first, last).to(torch.float64 if args.dtype == "float64" else torch.float32)
    if mesh["tp"].size() > 1 or args.shard == "none":  # else FSDP2 alone makes DTensors, and layers compute without
        split_stage(stage, mesh["tp"], config, args.sequence_parallel)
    for layer in stage.model.layers.values():
        if args.compile:
            layer.compile(backend=args.compile)
        if args.checkpoint_activations:
            # Inside the layer's hooks: its weights are whole when backward recomputes it, none is gathered again.
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if args.shard == "none":
        for module in [m for layer in stage.model.layers.values() for m in (layer.self_attn, layer.mlp)] * bool(half):
            # Autocast casts in the matmul. Before the network that halves the bytes of f. (prepend: f is a hook, too)
            module.register_forward_pre_hook(lambda _, inputs: inputs[0].to(half), prepend=True)
        stage.forward = torch.autocast(device_type, half, enabled=bool(half))(stage.forward)
    else:
        dp = mesh["dp_replicate", "dp_shard"] if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]
        shard_stage(stage, dp, args.shard == "optimizer", half)
    return stage


# ---- weights ----
def own_slices(weight):
    """Returns the slices of the whole tensor that are this rank's of a DTensor: tp's part first, of that dp's rows."""
    place, where = weight.device_mesh.get_coordinate(), [slice(0, size) for size in weight.shape]
    for axis in reversed(range(weight.device_mesh.ndim)):  # tp is the last
        if not weight.placements[axis].is_replicate():
            dim, parts = weight.placements[axis].dim, weight.device_mesh.size(axis)
            start, stop = where[dim].start, where[dim].stop
            size = -(-(stop - start) // parts)  # the last parts may be shorter, or empty
            start = min(start + place[axis] * size, stop)
            where[dim] = slice(start, min(start + size, stop))
    return tuple(where)


def fill(stage, config, seed, device):
    """Gives a stage on the meta device memory for this rank's shards, with their part of what init_weights gives all.

    One whole matrix at a time. A tied head has the embedding's values.
    """
    for name, weight in list(stage.named_parameters()):
        owner, _, last = name.rpartition(".")
        source = "model.embed_tokens.weight" if config.tied and name == "lm_head.weight" else name
        shape, generator = weight.shape, torch.Generator().manual_seed(seed + zlib.crc32(source.encode()))
        whole = torch.randn(shape, generator=generator).mul_(0.02) if len(shape) > 1 else torch.ones(shape)
        mine = whole[own_slices(weight)].to(device, weight.dtype, copy=True, memory_format=torch.contiguous_format)
        del whole
        how = dict(shape=shape, stride=weight.stride())
        shard = DTensor.from_local(mine, weight.device_mesh, weight.placements, run_check=False, **how)
        setattr(stage.get_submodule(owner), last, nn.Parameter(shard))
    stage.tie(config)


def is_counted_here(weight):
    """True on one of the ranks that hold the same shard: where each axis that replicates it has place 0."""
    place = weight.device_mesh.get_coordinate()
    return not any(p.is_replicate() and place[axis] for axis, p in enumerate(weight.placements))
