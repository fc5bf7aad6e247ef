"""Finds the steps of a training script from outside, and has some of them recorded.

A step ends with the optimizer's step (torch.optim's global hook). Several optimizers that step without a backward
between them end one step together: DeepSpeed's parameter groups, or a model with two optimizers. Several backwards
before it are one step's microbatches.

    1 .. skip       not recorded: first allocations, DDP's new bucket order; their time, to compare the profiler's with
    skip + 1        recorded, not counted: the profiler's own start
    .. + steps      counted; when the next backward begins, on every rank the same, `measured` is called
"""

import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from types import CodeType
from typing import Any

import torch
from capture import Capture, Recorded, note_stack
from torch.optim.optimizer import register_optimizer_step_post_hook


class Steps:
    def __init__(self, skip: int, steps: int, begin: Callable[[], None], measured: Callable[[], None]):
        self.skip, self.steps, self.begin, self.measured = skip, steps, begin, measured
        self.marks: list[int] = []  # the end of each step
        self.began = 0  # the end of step `skip`, before the profiler was started
        self.stepped = True  # the optimizer, since the last backward
        self.seen_backward = False
        self.trains: set[CodeType] = set()
        self.capture: Capture | None = None
        self.recorded: Recorded | None = None
        self.refused = ""  # why nothing could be recorded
        self.thread = 0

    # ---- hooks ----
    def attach(self) -> None:
        self.handle = register_optimizer_step_post_hook(self.end_step)
        self.functions = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}
        for name, function in self.functions.items():
            setattr(torch.autograd, name, self.noticed(function))

    def detach(self) -> None:
        self.handle.remove()
        for name, function in self.functions.items():
            setattr(torch.autograd, name, function)

    def noticed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            self.begin_backward()
            return function(*args, **kwargs)

        return backward

    def begin_backward(self) -> None:
        complete = self.stepped and len(self.marks) > self.skip + self.steps
        if self.capture and complete and threading.get_ident() == self.thread:
            self.finish()
        if self.stepped:
            note_stack(self.trains, sys._getframe(1))
        self.seen_backward, self.stepped = True, False

    def end_step(self, *_: Any) -> None:
        if self.stepped and self.seen_backward and self.marks:
            self.marks[-1] = time.time_ns()
            return
        note_stack(self.trains, sys._getframe(1))
        self.stepped = True
        self.marks.append(time.time_ns())
        if len(self.marks) == self.skip and not self.capture:
            self.thread, self.capture, self.began = threading.get_ident(), Capture(self.trains), self.marks[-1]
            self.begin()
            try:
                self.capture.start()
            except RuntimeError as error:
                self.refused, self.capture = str(error).splitlines()[0], None
                self.detach()
        if len(self.marks) == self.skip:
            self.marks[-1] = time.time_ns()

    # ---- results ----
    def finish(self) -> None:
        """Ends the recording, wherever the script is, and hands it over."""
        self.detach()
        if self.capture:
            self.recorded, self.capture = self.capture.stop(), None
            self.measured()

    def why_not(self) -> str:
        """Why nothing was measured."""
        if self.refused:
            return f"nothing measured: {self.refused}, the script's own; run it without"
        if not self.marks:
            why = "nothing measured: this process ended without a step of a torch.optim optimizer"
            return f"{why}; a script that starts its ranks itself is started with torchrun, instead"
        ended, needed = len(self.marks), self.skip + 2
        return f"nothing measured: {ended} optimizer steps, {needed} needed with --skip {self.skip}"

    @property
    def counted(self) -> list[int]:
        """Where the counted steps begin and end."""
        return self.marks[self.skip : self.skip + self.steps + 1]

    @property
    def unrecorded_ms(self) -> float | None:
        """The median time of a step before anything was recorded; the first one, which is special, does not count."""
        times = sorted(b - a for a, b in pairwise([*self.marks[: self.skip - 1], self.began]))
        return times[len(times) // 2] / 1e6 if times else None
