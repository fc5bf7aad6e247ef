"""Measures a script's activations from outside: `count_saved.py OUT script flags...` runs the script as it is.

Each rank writes OUT.RANK, a JSON list of [bytes, data type, shape]: what autograd has kept of the first forward when
its backward begins. Each piece of memory counts once, parameters do not count. Rank 0 prints the sum.
"""

import contextlib
import json
import os
import runpy
import sys
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

out, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(os.path.abspath(script)))  # as `python script` does
kept: dict[int, torch.Tensor] = {}  # by address; holding the tensors keeps their addresses from being used again
parameters: set[int] = set()
backward_began = False
adamw_step = torch.optim.AdamW.step


def local(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def pack(tensor: torch.Tensor) -> torch.Tensor:
    if not backward_began:
        kept.setdefault(local(tensor).untyped_storage().data_ptr(), local(tensor))
    return tensor


def unpack(tensor: torch.Tensor) -> torch.Tensor:
    global backward_began
    backward_began = True
    return tensor


def step(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
    parameters.update(local(p).untyped_storage().data_ptr() for group in self.param_groups for p in group["params"])
    return adamw_step(self, *args, **kwargs)


torch.optim.AdamW.step = step  # type: ignore[method-assign, assignment]
with saved_tensors_hooks(pack, unpack), contextlib.suppress(SystemExit):
    runpy.run_path(script, run_name="__main__")
found: list[tuple[int, str, list[int]]] = [
    (tensor.untyped_storage().nbytes(), str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
    for address, tensor in kept.items()
    if address not in parameters
]
with open(f"{out}.{os.environ['RANK']}", "w") as file:
    json.dump(found, file)
if os.environ["RANK"] == "0":
    print(f"{sum(size for size, *_ in found):,} bytes of activations on rank 0")
