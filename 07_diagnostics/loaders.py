"""How long a DataLoader takes for a batch, wherever it makes it: in the training thread, or in worker processes.

The training thread sees only that it waits. So what fetches and collates a batch is given a clock before the script
starts its workers; they inherit it, and 16 bytes of shared memory each to write to.
"""

import mmap
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import _utils, get_worker_info

SLOTS = 256  # the training process, then its workers


class Made(NamedTuple):
    """What one process has made so far."""

    batches: int
    ns: int


class Loaders:
    def __init__(self) -> None:
        # Two numbers each, batches and nanoseconds, shared with the processes that this one forks.
        self.numbers = memoryview(mmap.mmap(-1, SLOTS * 2 * 8)).cast("q")
        for fetcher in (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher):
            fetcher.fetch = self.timed(fetcher.fetch)  # type: ignore[method-assign]

    def timed(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        def timed_fetch(fetcher: Any, index: Any) -> Any:
            began = time.perf_counter_ns()
            batch = fetch(fetcher, index)
            info = get_worker_info()
            slot = 0 if info is None else 1 + info.id % (SLOTS - 1)
            self.numbers[2 * slot] += 1
            self.numbers[2 * slot + 1] += time.perf_counter_ns() - began
            return batch

        return timed_fetch

    def made(self) -> list[Made]:
        return [Made(*self.numbers[2 * slot : 2 * slot + 2]) for slot in range(SLOTS)]


def fetch_facts(before: list[Made], after: list[Made]) -> dict[str, Any]:
    """workers: that have made a batch in between; ms: what one takes, or None where none was made."""
    grown = [Made(now.batches - then.batches, now.ns - then.ns) for then, now in zip(before, after)]
    batches, ns = sum(one.batches for one in grown), sum(one.ns for one in grown)
    return dict(workers=sum(one.batches > 0 for one in after[1:]), ms=ns / batches / 1e6 if batches else None)
