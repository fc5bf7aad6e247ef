"""Runs a script as one rank of a try: counts its optimizer steps, and stops it after a few. fit_batch.py starts this.

FOLDER/RANK.json is written once: after the last step, or when the script ended by itself. Then the rank stands still in
its last step until it is killed: if it left by itself, the others would meet a closed connection.
"""

import functools
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from contextlib import suppress
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import script

OPTIMIZER = "torch.optim.optimizer"
OUT_OF_MEMORY = re.compile(  # CUDA, its libraries and NCCL; torch on the CPU; a worker of a data loader
    r"out of memory|ALLOC_FAILED|can(no|')t allocate memory|killed by signal: Killed", re.IGNORECASE
)


# ---- memory ----
def peak_rss() -> int:
    """Bytes: the most that this process has had in memory, as the kernel counted it."""
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def gpu_peaks(cuda: Any) -> list[dict[str, int]]:
    """Of each GPU that this process has used, bytes: peak, total, gaps; and how often memory ran out on it (short).

    The peak is what torch's allocator had reserved, its gaps included, and all that is not its own: CUDA's context,
    NCCL, other processes.
    """
    found = []
    for device in range(cuda.device_count()):
        stats = cuda.memory_stats(device)
        if not (reserved := stats.get("reserved_bytes.all.peak")):
            continue
        free, total = cuda.mem_get_info(device)
        others = max(0, total - free - stats["reserved_bytes.all.current"])
        gaps = reserved - stats["allocated_bytes.all.peak"]
        short = stats.get("num_ooms", 0) + stats.get("num_alloc_retries", 0)
        found.append(dict(peak=others + reserved, total=total, gaps=gaps, short=short))
    return found


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if that was the error, or what it was raised from: `except OutOfMemoryError: sys.exit(1)`, too."""
    while error:
        kind = type(error).__name__
        if isinstance(error, MemoryError) or kind == "OutOfMemoryError" or OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


# ---- steps ----
class StepCounter:
    """A hook of torch's optimizers. A step is over when the same parameters have been stepped once more.

    So an optimizer that is called once per group (DeepSpeed's), or several optimizers in turn, make one step together.
    """

    def __init__(self, report_file: Path, steps: int):
        self.file, self.steps = report_file, steps
        self.pid, self.parent = os.getpid(), os.getppid()
        self.times: Counter[tuple[int, int]] = Counter()
        self.clocks: list[float] = []
        self.events: list[Any] = []
        self.backwards, self.in_backward = 0, False
        self.per_step: list[int] = []  # how many there were
        self.rss: list[int] = []  # the peak after each step, in bytes
        self.reserved: list[int] = []

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if os.getpid() != self.pid:  # a process that the script forked
            return
        first = next((id(p) for group in optimizer.param_groups for p in group["params"]), 0)
        self.times[id(optimizer), first] += 1
        if self.times[id(optimizer), first] <= len(self.clocks):
            return
        self.mark(sys.modules["torch"].cuda)
        if len(self.clocks) == self.steps:
            self.write(None)
        while len(self.clocks) == self.steps and os.getppid() == self.parent:
            time.sleep(0.01)
        if os.getppid() != self.parent:  # the one that started this was killed: leave nobody behind
            shutil.rmtree(self.file.parent, ignore_errors=True)
            os._exit(1)

    def count_backwards(self, autograd: Any) -> None:
        """A microbatch is a call of backward, except inside another: that one is a checkpoint's."""
        backward = autograd.backward  # which Tensor.backward looks up

        @functools.wraps(backward)
        def count(*args: Any, **kwargs: Any) -> None:
            if self.in_backward:
                return backward(*args, **kwargs)
            self.in_backward = True
            try:
                backward(*args, **kwargs)
            finally:
                self.in_backward = False
                self.backwards += 1

        autograd.backward = count

    def mark(self, cuda: Any) -> None:
        self.clocks.append(time.perf_counter())
        self.per_step.append(self.backwards)
        self.backwards = 0
        self.rss.append(peak_rss())
        if cuda.is_initialized():  # the GPU's own clock: the host is ahead of it, and must not wait for it here
            self.events.append(event := cuda.Event(enable_timing=True))
            event.record()
            self.reserved.append(cuda.max_memory_reserved())

    def write(self, error: BaseException | None) -> None:
        gpus: list[dict[str, int]] = []
        ms = [1e3 * (after - before) for before, after in pairwise(self.clocks)]
        cuda = sys.modules["torch"].cuda if OPTIMIZER in sys.modules else None
        if cuda and cuda.is_initialized() and not error:  # after an error CUDA may answer no more
            cuda.synchronize()
            gpus = gpu_peaks(cuda)
        if gpus and len(self.events) == len(self.clocks):
            ms = [before.elapsed_time(after) for before, after in pairwise(self.events)]
        peaks = self.reserved if gpus else self.rss
        raised = error and not isinstance(error, SystemExit)  # whose words are in the output
        text = f"{type(error).__name__}: {error}".splitlines()[0] if raised else ""
        report = dict(steps=len(self.clocks), ms=ms, per_step=self.per_step, peaks=peaks, gpus=gpus)
        report |= dict(error=text, out_of_memory=is_out_of_memory(error), time=time.time())
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(report))
        part.replace(self.file)


class Finder:
    """Attaches the counter when the script imports torch, and not before: what it sets before that still counts."""

    def __init__(self, counter: StepCounter):
        self.counter = counter

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != OPTIMIZER:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        execute = loader.exec_module

        def execute_and_attach(module: ModuleType) -> None:
            execute(module)
            self.attach(module)

        loader.exec_module = execute_and_attach
        return spec

    def attach(self, module: Any) -> None:
        module.register_optimizer_step_post_hook(self.counter)
        self.counter.count_backwards(sys.modules["torch.autograd"])


# ---- main ----
def run_rank(report_file: Path, steps: int, words: list[str]) -> None:
    """Runs `script flags...` or `-m module flags...` as __main__, up to its last step."""
    with suppress(OSError):  # short of memory, the kernel is to kill this process, and not its neighbours
        Path("/proc/self/oom_score_adj").write_text("1000")
    finder = Finder(counter := StepCounter(report_file, steps))
    if OPTIMIZER in sys.modules:
        finder.attach(sys.modules[OPTIMIZER])
    else:
        sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        raised = script.run_script(words)
    except SystemExit as end:
        counter.write(end if end.code else None)
        raise
    counter.write(raised)
    if raised:
        raise SystemExit(1)
