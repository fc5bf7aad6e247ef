"""Does the host wait for the GPU? `gpu_watch.py TRACE script flags...` runs a script as it is, and records some steps.

Two witnesses. torch's sync debug mode makes an error of every synchronising call of torch's own. The profiler sees all
calls into CUDA, NCCL's and the libraries', too, and writes them to TRACE, which sync_calls() reads.
"""

import json
import os
import re
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

SETTLED = 3  # AdamW makes its states in step 1, DDP agrees on its buckets in step 2
RECORDED = 8
SYNCHRONISES = re.compile(r"cu(da)?(Stream|Device|Ctx|Event)Synchronize|cudaMemcpy(2D|3D)?(_|$)")


class Watch:
    """A hook of torch's optimizers: after step SETTLED the recording begins, RECORDED steps later it ends."""

    def __init__(self, trace: str):
        self.trace, self.steps, self.cuda = trace, 0, torch.cuda.is_available()
        kinds = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * self.cuda]
        self.profiler = torch.profiler.profile(activities=kinds)

    def __call__(self, *_: Any) -> None:
        self.steps += 1
        if self.steps == SETTLED:
            self.profiler.start()
            self.forbid("error")
        elif self.steps == SETTLED + RECORDED:
            self.forbid("default")  # the profiler waits for the GPU
            self.profiler.stop()
            self.profiler.export_chrome_trace(self.trace)

    def forbid(self, mode: str) -> None:
        if self.cuda:
            torch.cuda.set_sync_debug_mode(mode)


def read_events(trace: Path) -> list[dict[str, Any]]:
    return json.loads(trace.read_text())["traceEvents"]


def sync_calls(events: list[dict[str, Any]]) -> tuple[int, Counter[str]]:
    """Returns how many whole steps a trace has, and the calls in them that hold up a thread that launches kernels."""
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("Optimizer.step#")]
    if len(steps) < 2:
        raise ValueError(f"{len(steps)} optimizer steps in the trace, 2 needed: did the script end too early?")
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    threads = {e["tid"] for e in calls if "LaunchKernel" in e["name"]} | {e["tid"] for e in steps}
    begin, end = (pick(e["ts"] for e in steps) for pick in (min, max))
    inside = [e for e in calls if e["tid"] in threads and begin <= e["ts"] < end]
    return len(steps) - 1, Counter(e["name"] for e in inside if SYNCHRONISES.match(e["name"]))


def main() -> None:
    trace, script = sys.argv[1:3]
    register_optimizer_step_post_hook(Watch(trace))
    sys.argv = sys.argv[2:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))  # as `python script` does
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
