"""Checkpoints that move between layouts: every rank writes its shards by name, any (pp, dp, tp) reads them.

    DIR/step-12/__0_0.distcp ..   the shards, a file per rank, by torch.distributed.checkpoint (DCP)
    DIR/step-12/.metadata         which element lies where: a pickle, so go on only from folders that you trust
    DIR/step-12/checkpoint.json   the note: the step, the run, the loss scale, every file's size. Renamed into place
                                  last, it makes the folder count
    DIR/step-10/                  the one before: whole, should the newest be damaged

In a file lie, for each weight's name in the whole model, model.NAME, exp_avg.NAME, exp_avg_sq.NAME and step.NAME, and
for each rank its random states. A rank reads the pieces of files that overlap its own shards, and nothing else:
    saved by pp 2 x tp 2        rank 0: layer 0, top   | rank 1: layer 0, bottom | rank 2: layer 1, top | rank 3: ..
    read by dp 4    rank 1:     bottom half of its top | and                     |   second quarter of each weight
A run that dies while it saves leaves a folder without a note, which counts for nothing: --resume DIR goes on from the
one before, and says so. A damaged one that counts is refused by name; --resume DIR/step-10 asks for an older one.
DIR must be a folder that all nodes share.
"""

import json
import math
import os
import shutil
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError  # copied this folder out? copy common/ beside it or into it

NOTE = "checkpoint.json"
ADAMW = ("exp_avg", "exp_avg_sq", "step")  # of each weight: two averages of its shape, and the count of its steps


# ---- files ----
def write_aside(path, write):
    """Has `write` write beside path, then renames: whenever the job dies, there is the old file or the new one."""
    aside = f"{path}.tmp"
    write(aside)
    with open(aside, "rb+") as file:
        os.fsync(file)
    os.replace(aside, path)


def sync_folder(path):
    """Has the names of a folder's files reach the disk, as fsync does for what is in them."""
    opened = os.open(path, os.O_RDONLY)
    with suppress(OSError):  # some network file systems cannot
        os.fsync(opened)
    os.close(opened)


def read_note(path):
    """Returns the note of the checkpoint in folder `path`. ValueError if one of its files is gone or cut short."""
    note = json.loads((path / NOTE).read_text())
    for name, size in note["files"].items():
        there = (path / name).stat().st_size if (path / name).exists() else 0
        if there != size:
            raise ValueError(f"torn: {path / name} has {there} of its {size} bytes")
    return note


def is_whole(path):
    """True if the folder has a note, and all files that it names."""
    try:
        return bool(read_note(path))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def number_of(path):
    """Returns the place of a checkpoint among those of its folder, in the order of writing; inf if it cannot tell."""
    try:
        return json.loads((path / NOTE).read_text())["number"]
    except (OSError, ValueError, KeyError, TypeError):
        return math.inf


def step_folders(folder):
    """Returns the folders of all checkpoints, also of those that were never finished."""
    return [path for path in Path(folder).glob("step-[0-9]*") if path.is_dir()]


def checkpoints_in(folder):
    """Returns the checkpoints of a folder that count, whole or torn, the last written first."""
    return sorted((path for path in step_folders(folder) if (path / NOTE).exists()), key=number_of, reverse=True)


def has_checkpoint(folder):
    """True if there is something to go on from; a first save that died has left nothing."""
    return bool(checkpoints_in(folder)) or Path(folder, NOTE).exists()


def choose_checkpoint(folder, run):
    """Returns (path, note, names of all that is in it): of the newest in DIR, or of that one if given DIR/step-N.

    UsageError where that is torn, missing or of another run: it says why, and which other one is whole.
    """
    folder = Path(folder)
    exactly = folder.name.startswith("step-") or (folder / NOTE).exists()
    counting = checkpoints_in(folder.parent if exactly else folder)
    path = folder if exactly or not counting else counting[0]
    try:
        if not (path / NOTE).exists():
            raise ValueError(f"{path} has no {NOTE}" if exactly else f"no step-*/{NOTE} in {folder}")
        note = read_note(path)
        names = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    except Exception as error:  # reading a damaged pickle can raise anything
        whole = [other for other in counting if other != path and is_whole(other)]
        way_out = f"--resume {whole[0]}, which is whole" if whole else f"--resume another folder than {folder}"
        why = str(error) if type(error) is ValueError else f"{path}: {error!r:.400}".replace("\n", " ")
        raise UsageError(f"{way_out}: {why}") from None
    if note["run"] != run:
        raise UsageError(f"--resume another folder than {path}: made with {note['run']}, this run has {run}")
    unfinished = [str(other) for other in step_folders(folder) if not (other / NOTE).exists()]
    if unfinished and not exactly:
        print(f"note: {', '.join(unfinished)} was never finished: going on from {path}", file=sys.stderr)
    return path, note, names


# ---- states ----
def states_by_name(weights, optimizer):
    """Returns {"model": {name: tensor}, "exp_avg": {name: tensor}, ..}: the tensors themselves, no copies.

    By hand, for in every layout a weight has the same name, while an optimizer counts its states in its own order.
    Of a weight without states (no step yet, or none that float16 did not skip) there is the weight alone.
    """
    states = {"model": {name: weight.detach() for name, weight in weights.items()}}
    for kind in ADAMW:
        states[kind] = {n: optimizer.state[w][kind] for n, w in weights.items() if optimizer.state.get(w)}
    return states


def random_states():
    """Returns copies of this rank's random states, that of its GPU too if it uses one: (bytes) each."""
    states = {f"cpu{dist.get_rank()}": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[f"cuda{dist.get_rank()}"] = torch.cuda.get_rng_state()
    return states


class Checkpoints:
    """Writes checkpoints into a folder, one at a time; all methods but is_written must be called by all ranks.

    run: dict, for JSON, of what a later run must have in common (sizes, data, seed). timeout: seconds that a rank waits
    for another. background: a thread writes, and the training goes on; it costs a copy of the shards in host memory.
    keep: so many stay, the last ones; 1 or more.
    """

    def __init__(self, folder, run, timeout, background, keep=2):
        # A group of its own: the thread's collectives must not come between the training's. gloo: they are on the host.
        self.group = dist.new_group(None, timedelta(0, timeout), "gloo")
        self.folder, self.run, self.background, self.keep, self.pending = folder, run, background, keep, None

    def start(self, step, weights, optimizer, scaler):
        """Saves this state, after the one that may still be in work: two in a row wait for each other.

        weights: {name in the whole model: parameter}, of all stages of this rank. optimizer: AdamW over all of them.
        """
        self.finish()
        path = self.new_folder(step)
        states = states_by_name(weights, optimizer) | {"random": random_states()}
        save = dcp.async_save if self.background else dcp.save  # async_save copies first, and returns a future
        # gather to rank 0 and scatter, of lists: who writes what; of replicas one. No tensor crosses the network.
        written = save(states, checkpoint_id=path, process_group=self.group)
        self.pending = path, step, scaler.state_dict(), written if self.background else None
        if not self.background:
            self.finish()

    def new_folder(self, step):
        """Returns a new folder for the parts; never that of a checkpoint that counts."""
        made = [None]
        if dist.get_rank() == 0:
            path = Path(self.folder, f"step-{step}")
            while (path / NOTE).exists():  # a run that went on from an older one comes to a step again
                path = path.with_name(f"{path.name}-again")
            try:
                shutil.rmtree(path, ignore_errors=True)  # what a run that died has left there
                path.mkdir(parents=True)
                made = [path]
            except OSError as error:
                made = [str(error)]
        # broadcast over all ranks: the folder that rank 0 made, or why it could not
        dist.broadcast_object_list(made, group=self.group)
        if isinstance(made[0], str):
            raise UsageError(f"--save another folder than {self.folder}: {made[0]}")
        return made[0]

    def is_written(self):
        """True once this rank has a checkpoint that waits for finish()."""
        return self.pending is not None and self.pending[-1].done()

    def finish(self):
        """Waits for the checkpoint in work, if there is one, and makes it count. Raises what the thread raised."""
        if self.pending is None:
            return
        (path, step, scaler, future), self.pending = self.pending, None
        if future is not None:
            future.result()
        dist.barrier(self.group)  # over all ranks: every part is written
        if dist.get_rank() == 0:
            sync_folder(path)
            before = [number for old in checkpoints_in(self.folder) if (number := number_of(old)) < math.inf]
            files = {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("*") if file.is_file()}
            note = dict(number=1 + max(before, default=0), step=step, world_size=dist.get_world_size(), run=self.run)
            note |= dict(scaler=scaler, files=files)
            # From here on, it counts:
            write_aside(path / NOTE, lambda aside: Path(aside).write_text(json.dumps(note, indent=1)))
            sync_folder(path)
            sync_folder(path.parent)
            self.remove_all_but_the_last()
        dist.barrier(self.group)  # over all ranks: nobody goes on to the next before rank 0 is done

    def remove_all_but_the_last(self):
        """Removes what is older than the `keep` newest whole ones, what is torn, and what was never finished."""
        kept = [path for path in checkpoints_in(self.folder) if is_whole(path)][: self.keep]
        for old in set(step_folders(self.folder)) - set(kept):
            (old / NOTE).unlink(missing_ok=True)  # first: whoever dies here leaves an unfinished one, not a torn one
            shutil.rmtree(old)


def load_states(folder, run, weights, optimizer, scaler, group=None):
    """Reads this rank's shards of a checkpoint of any layout, in place; returns its step. AdamW's settings stay.

    folder: DIR, for the newest, or DIR/step-N. The rest as in Checkpoints; group: a process group of all ranks.
    The random states return only on as many ranks. UsageError, on all ranks alike, if it cannot be read.
    """
    found = [None]
    if dist.get_rank() == 0:  # one rank for all: thousands would ask for the sizes of thousands of files
        try:
            found = [choose_checkpoint(folder, json.loads(json.dumps(run)))]  # JSON has no tuples
        except UsageError as error:
            found = [str(error)]
    # broadcast over all ranks: the checkpoint that rank 0 chose, or why there is none
    dist.broadcast_object_list(found, group=group)
    if isinstance(found[0], str):
        raise UsageError(found[0])
    path, note, names = found[0]
    states = {"model": {name: weight.detach() for name, weight in weights.items()}}
    for kind in ADAMW:  # of the right sizes, to be read into; a count is a plain number in host memory
        new = (lambda _: torch.zeros(())) if kind == "step" else torch.empty_like
        states[kind] = {n: new(w.detach()) for n, w in weights.items() if f"{kind}.{n}" in names}
    same = note["world_size"] == dist.get_world_size()
    states["random"] = {key: state for key, state in random_states().items() if same and f"random.{key}" in names}
    try:
        dcp.load(states, checkpoint_id=path, process_group=group)
    except dcp.CheckpointException as error:  # a BaseException; raised on all ranks if one fails
        why = {rank: repr(failure[0]) for rank, failure in error.failures.items()}
        raise UsageError(f"--resume another folder than {path}: {why!s:.400}".replace("\n", " ")) from None
    name_of = {weight: name for name, weight in weights.items()}
    order = [name_of[weight] for group in optimizer.param_groups for weight in group["params"]]
    averages = {i: {k: states[k][name] for k in ADAMW} for i, name in enumerate(order) if name in states["step"]}
    groups = optimizer.state_dict()["param_groups"]  # this run's: the flag's learning rate counts
    optimizer.load_state_dict({"state": averages, "param_groups": groups})
    if note["scaler"]:
        scaler.load_state_dict(note["scaler"])
    for key, state in states["random"].items():
        (torch.set_rng_state if key.startswith("cpu") else torch.cuda.set_rng_state)(state)
    return note["step"]
