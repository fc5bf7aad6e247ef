"""What a GPU is, and what it gives: prints one JSON object. A process of its own, so that pytest's never uses CUDA.

The rate of a large bfloat16 matmul is measured, as the most that a training script could reach: a data sheet's peak
is out of reach at the clocks that a card keeps under load.
"""

import datetime
import json
import re
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

SIZE = 8192  # 1.1 TFLOP a call, more than a millisecond on any card
CALLS = 200  # measured, after as many that are not: cuBLAS loads its kernel, the clock settles


def matmul_rate(device: torch.device, size: int = SIZE, calls: int = CALLS) -> float:
    """Returns FLOP/s of a square matmul in bfloat16, the median of so many calls."""
    # Random numbers: zeros take less power, and a card's clock is limited by power.
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    for _ in range(calls):
        torch.mm(a, b, out=out)
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        marks[0].record()
        for mark in marks[1:]:
            torch.mm(a, b, out=out)
            mark.record()
        marks[-1].synchronize()
        seconds = [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
    else:
        clocks = [time.perf_counter()]
        for _ in range(calls):
            torch.mm(a, b, out=out)
            clocks.append(time.perf_counter())
        seconds = [after - before for before, after in pairwise(clocks)]
    return 2 * size**3 / median(seconds)


def driver_version(text: str) -> str:
    """text: /proc/driver/nvidia/version, in which the open kernel module names the processor before its version."""
    found = re.search(r"Kernel Module .*?(\d+\.[\d.]+)", text)
    return found[1] if found else "unknown"


def describe_card() -> dict[str, Any]:
    card = torch.cuda.get_device_properties(0)
    found = dict(name=card.name, count=torch.cuda.device_count(), memory_gib=card.total_memory / 2**30)
    found |= dict(
        driver=driver_version(Path("/proc/driver/nvidia/version").read_text()),
        torch=torch.__version__,
        cuda=torch.version.cuda,
    )
    found |= dict(nccl=".".join(map(str, torch.cuda.nccl.version())), date=datetime.date.today().isoformat())
    return found | dict(matmul_flops=matmul_rate(torch.device("cuda", 0)))


if __name__ == "__main__":
    print(json.dumps(describe_card()))
