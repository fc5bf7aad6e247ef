"""The shards of a model: filled from the seed, written by every rank for itself, read by any number of ranks.

    DIR/step-12/__0_0.distcp ..    the shards, a file or more per rank, by torch.distributed.checkpoint (DCP)
    DIR/step-12/.metadata          which element lies where: a pickle, so go on only from folders that you trust
    DIR/checkpoint.json            the step, the run, the loss scale: written last, it makes the folder count

In the background a save costs the training no more than a copy of the shards in host memory:
    training:  step 10, copy | step 11 | step 12 | finish | step 13
    thread:                  [ write the shards ]
"""

import sys
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parts import begin_checkpoint, find_checkpoint, finish_checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError  # copied this folder out? copy common/ beside it or into it


def fill_shards(model, seed, place, num_shards, device):
    """Gives shard number `place` its rows of what init_weights gives the whole: one whole matrix at a time."""
    shards = {}
    for name, weight in model.named_parameters():
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        shape = weight.shape  # the whole one
        whole = 0.02 * torch.randn(shape, generator=generator) if len(shape) > 1 else torch.ones(shape)
        rows = -(-shape[0] // num_shards)  # the last shards may be shorter, or empty
        mine = whole[place * rows : (place + 1) * rows].to(weight.dtype, copy=True)  # a view would keep the whole
        how = dict(shape=shape, stride=weight.stride())
        shards[name] = DTensor.from_local(mine, weight.device_mesh, weight.placements, **how).to(device)
    model.load_state_dict(shards, assign=True)  # to_empty() would fail under a profiler that records shapes


def state_of(model, optimizer):
    """Returns the shards of the weights and of AdamW's states by name: the tensors themselves, no copies."""
    new = not optimizer.state
    weights, states = get_state_dict(model, optimizer)
    for state in optimizer.state.values() if new else ():
        state["step"].zero_()  # get_state_dict made the states by a step with gradients of zero; AdamW counted it
    return {"model": weights, "optimizer": states}


class Writer:
    """Writes checkpoints into a folder, one at a time; all methods but is_written must be called by all ranks.

    timeout: seconds that a rank waits for another. background: a thread writes, and the training goes on.
    """

    def __init__(self, folder, run, timeout, background):
        # A group of its own: the thread's collectives must not come between the training's. gloo: they are on the host.
        self.group = dist.new_group(None, timedelta(0, timeout), "gloo")
        self.folder, self.run, self.background, self.pending = folder, run, background, None

    def start(self, step, model, optimizer, scaler):
        """Saves this state, after the one that may still be in work: two in a row wait for each other."""
        self.finish()
        path = begin_checkpoint(self.folder, step)
        save = dcp.async_save if self.background else dcp.save  # async_save copies first, and returns a future
        # gather to rank 0 and scatter, of lists: who writes what. No tensor crosses the network.
        written = save(state_of(model, optimizer), checkpoint_id=path, process_group=self.group)
        self.pending = path, step, scaler.state_dict(), written if self.background else None
        if not self.background:
            self.finish()

    def is_written(self):
        """True once this rank has a checkpoint that waits for finish()."""
        return self.pending is not None and self.pending[-1].done()

    def finish(self):
        """Waits for the checkpoint in work, if there is one, and makes it count. Raises what the thread raised."""
        if self.pending is not None:
            path, step, scaler, future = self.pending
            if future is not None:
                future.result()
            finish_checkpoint(path, self.run, step, scaler=scaler)
            self.pending = None


def load_shards(folder, run, model, optimizer, scaler, group):
    """Reads this rank's shards of a checkpoint of any number of ranks; returns its step. AdamW's settings stay."""
    path, note = find_checkpoint(folder, run)
    settings = [{key: value for key, value in each.items() if key != "params"} for each in optimizer.param_groups]
    state = state_of(model, optimizer)  # of the right sizes, to be read into
    try:
        dcp.load(state, checkpoint_id=path, process_group=group)
    except dcp.CheckpointException as error:  # a BaseException; raised on all ranks if one fails
        why = {rank: repr(failure[0]) for rank, failure in error.failures.items()}
        raise UsageError(f"--resume another folder than {path}: {why!s:.400}".replace("\n", " ")) from None
    for read, mine in zip(state["optimizer"]["param_groups"], settings):
        read.update(mine)  # else the checkpoint's would silently win: its lr over the flag, its kernels over the device
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if note["more"]["scaler"]:
        scaler.load_state_dict(note["more"]["scaler"])
    return note["step"]
