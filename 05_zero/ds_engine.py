"""What train.py asks of DeepSpeed beyond its few calls: a quiet start, the gradient norm, whole weights, resuming.

Each of these differs from stage to stage, and there is no one call for it. Written for DeepSpeed 0.19.8.
"""

import argparse
import contextlib
import gc
import io
import os
import shutil
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError  # copied this folder out? copy common/ beside it or into it


def import_early(device):
    """Imports DeepSpeed before there is a process group, which its default arguments would hold for good (let_go)."""
    # FutureWarning: torch 2.13 renamed two collectives, DeepSpeed calls them by their old names, which still work.
    renamed = "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    warnings.filterwarnings("ignore", renamed, FutureWarning)
    with contextlib.suppress(ValueError, ImportError):  # no number, no DeepSpeed: told where it ends all ranks
        if device == "cpu" or torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
            os.environ["DS_ACCELERATOR"] = "cpu"  # else it warns that it found no accelerator, and may take another one
        import deepspeed.ops  # noqa: F401


def join_group(device, timeout):
    """Returns the module, joined to the process group that is there already, without a word and without a compiler."""
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # DeepSpeed reads it, python alone does not set it
    try:
        import deepspeed.ops
    except ImportError as error:
        raise UsageError(f"DeepSpeed is missing ({error}): pip install deepspeed==0.19.8") from None
    # A faster all_reduce among CPU processes, which init_distributed would compile for a minute or two.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)  # there is a group: it makes none
    # It does make one later, a copy, in which a rank would wait half an hour for another.
    deepspeed.comm.comm.cdb.new_group = lambda ranks: dist.new_group(ranks, timedelta(seconds=timeout))
    return deepspeed


def let_go(engine):
    """Ends the engine and whatever of it knows the process group: gloo's threads would live on and abort the exit."""
    from deepspeed.utils import groups

    engine.destroy()
    groups._WORLD_GROUP = None
    offload = [engine.optimizer.parameter_offload] if hasattr(engine.optimizer, "parameter_offload") else []
    for part in (*engine.module.parameters(), *offload, engine.optimizer, engine):
        vars(part).clear()  # hooks in autograd keep these objects for good
    gc.collect()


def adam(model, args):
    """Returns torch's AdamW, or with --fused DeepSpeed's own, which it compiles first."""
    if not args.fused:
        return torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)  # one kernel over all, also on a CPU
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    kind = DeepSpeedCPUAdam if args.offload else FusedAdam
    return kind(model.parameters(), lr=args.lr, weight_decay=0.01)  # torch's default; both decay as AdamW does


def total_norm(engine):
    """Returns the global gradient norm at stage 0, before engine.step(): a tensor.

    There, engine.get_global_grad_norm() has none in float32, and in float16 the norm times the loss scale.
    """
    gradients = [p.grad for p in engine.module.parameters()]
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)  # float16 ends at 65504, and the loss is scaled
    norms = [torch.linalg.vector_norm(g, dtype=dtype) for g in gradients]
    return torch.linalg.vector_norm(torch.stack(norms)) / missing_scale(engine, 0)


def missing_scale(engine, stage):
    """Returns what to multiply the loss by: at stage 0 in float16 step() divides by a scale that backward() forgets."""
    return getattr(engine.optimizer, "loss_scale", 1.0) if stage == 0 else 1.0


def undo_step_zero(engine):
    """Takes back a step that DeepSpeed makes at stage 0 in bfloat16 and float16, for AdamW to have its averages.

    Its gradients are zero, but AdamW counts it and decays the weights: the first real step would be a quarter smaller.
    """
    zero = engine.optimizer
    for halves, wholes in zip(getattr(zero, "fp16_groups", ()), getattr(zero, "fp32_groups", ())):
        for half, whole in zip(halves, wholes):
            whole.data.copy_(half)
            zero.state.pop(whole, None)


def full_weights(engine, rank):
    """Yields (name, float32 tensor) of each weight, whole on rank 0; all ranks call it, one parameter at a time."""
    from deepspeed.utils import safe_get_full_fp32_param

    halves, wholes = (getattr(engine.optimizer, name, []) for name in ("fp16_groups", "fp32_groups"))
    masters = {id(h): w for hs, ws in zip(halves, wholes) for h, w in zip(hs, ws)}  # stage 0 in bfloat16 and float16
    for name, p in engine.module.named_parameters():
        if hasattr(p, "ds_id") or hasattr(p, "_hp_mapping"):
            # all_reduce (stages 1, 2) or all_gather (stage 3) over all ranks: 1/N of the float32 weight -> all of it
            whole = safe_get_full_fp32_param(p)
        else:
            whole = masters.get(id(p), p)
        shape = getattr(p, "ds_shape", p.shape)  # at stage 3 a parameter that is not gathered is empty
        yield name, whole.detach().to("cpu", torch.float32, copy=True).view(shape) if rank == 0 else None


def to_universal(path, rank):
    """Makes `path/universal` of a ZeRO checkpoint, once, by rank 0: whole tensors, which any number of ranks loads."""
    if rank == 0 and not (path / "universal").exists():
        from deepspeed.checkpoint.ds_to_universal import main as convert

        how = dict(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True)
        where = dict(input_folder=str(path / "parts"), output_folder=str(path / "universal.tmp"))
        shutil.rmtree(path / "universal.tmp", ignore_errors=True)  # what a run that died has left there
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # progress bars
            # inject_missing_state: stages 1 and 2 want to be told that no tensor parallelism was there
            convert(argparse.Namespace(**where, **how, inject_missing_state=True))
        os.replace(path / "universal.tmp", path / "universal")
    dist.barrier()  # over all ranks: nobody loads before it is whole


def load_engine(engine, path, rank, universal, lr):
    """Loads what engine.save_checkpoint wrote at this number of ranks or, universal, at any."""
    if universal:
        to_universal(path, rank)
    # barriers and all_gathers over all ranks: each reads its part
    found, _ = engine.load_checkpoint(str(path), tag="universal" if universal else "parts")
    if found is None:
        raise UsageError(f"--resume another folder than {path.parent}: DeepSpeed found nothing in it")
    for group in engine.optimizer.param_groups:
        group["lr"] = lr  # else the checkpoint's would silently win over the flag
