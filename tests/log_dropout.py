"""Writes down dropout masks from outside: `log_dropout.py OUT script flags...` runs the script as it is.

Each rank writes OUT.RANK.pt: the masks, as drawn by Tensor.bernoulli_, in the order of the calls.
"""

import contextlib
import os
import runpy
import sys
from typing import Any

import torch

out, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(os.path.abspath(script)))  # as `python script` does
masks: list[torch.Tensor] = []
bernoulli = torch.Tensor.bernoulli_


def log(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    mask = bernoulli(self, *args, **kwargs)
    masks.append(mask.detach().clone())
    return mask


torch.Tensor.bernoulli_ = log  # type: ignore[method-assign, assignment]
with contextlib.suppress(SystemExit):
    runpy.run_path(script, run_name="__main__")
torch.save(masks, f"{out}.{os.environ['RANK']}.pt")
