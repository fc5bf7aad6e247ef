"""Checkpoints that every rank writes a part of: a folder for the parts, and a note that makes it count.

    DIR/step-12/           what DeepSpeed or torch.distributed.checkpoint wrote, all ranks together
    DIR/checkpoint.json    renamed into place last: names the folder, the step, the run, and the size of every file

Until the note is renamed the last checkpoint counts, and a run that dies leaves it whole. A file that is missing or
shorter than its note says is refused by name. DIR must be a folder that all nodes share.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError  # copied this folder out? copy common/ beside it or into it


def begin_checkpoint(folder, step):
    """Returns a new folder for the parts; all ranks call it, and only then write."""
    names = [None]
    if dist.get_rank() == 0:
        try:
            counts = json.loads(Path(folder, "checkpoint.json").read_text())["folder"]
        except FileNotFoundError:
            counts = None
        names = [f"step-{step}" if counts != f"step-{step}" else f"step-{step}-again"]
        shutil.rmtree(Path(folder, names[0]), ignore_errors=True)  # what a run that died has left there
        Path(folder, names[0]).mkdir(parents=True)
    # broadcast over all ranks: the name that rank 0 chose and made
    dist.broadcast_object_list(names)
    return Path(folder, names[0])


def finish_checkpoint(path, run, step, **more):
    """Makes the parts in `path` the checkpoint, and removes older ones; all ranks call it, each when its part is there.

    run: dict of what a later run must have in common (sizes, data, seed). more: for JSON, given back at resume.
    """
    dist.barrier()  # over all ranks: every part is written
    if dist.get_rank() == 0:
        files = sorted(file for file in path.rglob("*") if file.is_file())
        for file in files:
            with open(file, "rb+") as opened:
                os.fsync(opened)
        sizes = {str(file.relative_to(path)): file.stat().st_size for file in files}
        note = dict(folder=path.name, step=step, run=run, world_size=dist.get_world_size(), more=more, files=sizes)
        with open(path.with_name("checkpoint.json.tmp"), "w") as file:
            json.dump(note, file, indent=1)
            file.flush()
            os.fsync(file)
        os.replace(file.name, path.with_name("checkpoint.json"))  # from here on, the new one counts
        for old in set(path.parent.glob("step-*")) - {path}:
            shutil.rmtree(old)
    dist.barrier()  # over all ranks: nobody goes on to the next before rank 0 is done


def find_checkpoint(folder, run):
    """Returns (folder of the parts, note). Refuses a torn one, and one whose `run` is another: on every rank alike."""
    try:
        note = json.loads(Path(folder, "checkpoint.json").read_text())
        path = Path(folder, note["folder"])
        for name, size in note["files"].items():
            there = Path(path, name).stat().st_size if Path(path, name).exists() else 0
            if there != size:
                raise ValueError(f"torn: {path / name} has {there} of its {size} bytes")
        if note["run"] != run:
            raise ValueError(f"made with {note['run']}, this run has {run}")
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"--resume another folder than {folder}: {error!r:.400}".replace("\n", " ")) from None
    return path, note
