"""Measures the peak of a script's activations from outside: `peak_saved.py OUT script flags...` runs it as it is.

Each rank writes OUT.RANK: the most bytes that autograd kept for backward at any time. Each piece of memory counts once.
"""

import contextlib
import os
import runpy
import sys
import weakref

import torch
from torch.autograd.graph import saved_tensors_hooks

out, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(os.path.abspath(script)))  # as `python script` does
users: dict[int, int] = {}  # address -> how many saved tensors lie there
alive = peak = 0


class Saved:
    """What autograd holds in the place of a tensor, for as long as it needs it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def forget(address: int, size: int) -> None:
    global alive
    users[address] -= 1
    alive -= 0 if users[address] else size


def pack(tensor: torch.Tensor) -> torch.Tensor | Saved:
    global alive, peak
    if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
        return tensor
    saved, storage = Saved(tensor), tensor.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    alive += 0 if users.get(address) else size
    users[address] = users.get(address, 0) + 1
    peak = max(peak, alive)
    weakref.finalize(saved, forget, address, size)
    return saved


def unpack(saved: torch.Tensor | Saved) -> torch.Tensor:
    return saved.tensor if isinstance(saved, Saved) else saved


with saved_tensors_hooks(pack, unpack), contextlib.suppress(SystemExit):
    runpy.run_path(script, run_name="__main__")
with open(f"{out}.{os.environ['RANK']}", "w") as file:
    file.write(str(peak))
