"""Three lines in your own training loop print, every N steps, where the time of a step goes:

    from monitor import Monitor
    monitor = Monitor(every=100)
    for batch in loader:
        ...
        monitor.step()

    step 100 | 152 ms | data 1.0% | compute 85.2% | communication 9.1% | host 4.7% | memory 480 of 24106 MiB | cost 0.9%

One step of N is recorded, on rank 0, and looked at as diagnose.py does. What that costs is counted, and stays below 2 %
of the time: where N steps are too short for that, fewer are recorded. The other steps cost a microsecond.

    data            waits for the next batch
    compute         a kernel or an operator runs
    communication   exposed, so that no compute hides it; waiting for a late rank is in it: diagnose.py tells them apart
    host            none of these
    cost            of the recordings so far, as a share of the time
"""

import sys
import time
from types import CodeType

import torch
from capture import Capture, note_stack, own_rank
from lanes import LANES, find_lanes, length
from machine import counts, memory_facts

COST = 0.01  # of the time; twice that where a recording turns out dearer than the last
FIRST_S = 0.1  # what the first recording is expected to cost


class Monitor:
    """every: steps; cost: the share of the time that recording may take."""

    def __init__(self, every: int = 100, cost: float = COST):
        if every < 2 or not 0 < cost < 1:
            raise ValueError(f"every {every} must be at least 2, and cost {cost} a share such as 0.01")
        self.every, self.cost, self.num_steps = every, cost, 0
        self.began = self.last = time.perf_counter()
        self.spent_s, self.expected_s = 0.0, FIRST_S  # by all recordings, and by one
        self.usual_s = 0.0  # a step that is not recorded
        self.trains: set[CodeType] = set()
        self.capture: Capture | None = None

    def step(self) -> dict[str, float] | None:
        """At the end of each step. Returns what it printed, if it did: shares of the step, and bytes of memory."""
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        self.num_steps += 1
        if self.capture:
            return self.finish(self.capture, seconds)
        affordable = self.spent_s + self.expected_s <= self.cost * (now - self.began)
        due = self.num_steps % self.every == self.every - 1 and affordable and own_rank() == 0
        if due and not torch.autograd._profiler_enabled():  # the script's own
            note_stack(self.trains, sys._getframe(1))
            self.usual_s, self.counts, self.capture = seconds, counts(), Capture(self.trains)
            self.capture.start()
            self.last = time.perf_counter()
            self.expected_s = self.last - now
        return None

    def finish(self, capture: Capture, seconds: float) -> dict[str, float]:
        recorded, self.capture = capture.stop(), None
        found = find_lanes(recorded, [recorded.began, recorded.ended])
        total = found.windows[0][1] - found.windows[0][0]
        shares = {lane: length(found.lanes[lane]) / total for lane in LANES}
        memory = memory_facts(self.counts)
        ended = time.perf_counter()
        # Starting, stopping and looking; and the step itself, which recording makes slower.
        self.expected_s += ended - self.last + max(0.0, seconds - self.usual_s)
        self.spent_s, self.last = self.spent_s + self.expected_s, ended
        words = dict(data=shares["data"], compute=shares["compute"], communication=shares["comm"])
        words |= dict(host=shares["host"] + shares["copy"])
        told = [f"step {self.num_steps}", f"{1e3 * seconds:.1f} ms", *(f"{word} {words[word]:.1%}" for word in words)]
        told.append(f"memory {memory['used'] / 2**20:.0f} of {memory['limit'] / 2**20:.0f} MiB")
        print(" | ".join([*told, f"cost {self.spent_s / (ended - self.began):.1%}"]), flush=True)
        return shares | {"memory": memory["used"]}
