"""Which microbatch to try next: growing, then closing in on the limit. Pure arithmetic; fit_batch.py runs the tries.

    peak |                        x  fails
         |- - - - - - - - -o- - - - may be used
         |       o    <- line
         |  o
         +-----------------------  microbatch

The line through two tries foresees the limit. What it foresees is run, and so is its neighbour above, which must fail.
Where the line was wrong twice, the search doubles and halves without it.
"""

from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from math import nan
from typing import NamedTuple

ENOUGH = 0.97  # of the best throughput: what more memory brings beyond it is within the noise of a few steps
FINE = 8  # grid points per doubling


class Try(NamedTuple):
    microbatch: int
    fits: bool
    why: str = "fits"
    peak: int = 0  # bytes taken on the fullest device; 0: unknown
    total: int = 0  # bytes that it has
    complete: bool = True  # False: the try ended before its last step, having taken `peak` or more
    of_memory: bool = True  # False: it failed, and not for want of memory
    step_ms: float = nan
    per_step: int = 1  # microbatches on each rank
    code: int = 0  # the script's exit code, where it ended by itself
    output: str = ""  # what it printed then
    grew: int = 0  # bytes, in its last step
    gaps: int = 0  # bytes of the peak that a GPU's allocator had reserved beyond what it gave out
    on_gpu: bool = False

    @property
    def free(self) -> float:
        return 1 - self.peak / self.total


# ---- grid ----
def grid_points(largest: int, spacing: int | None = None, divided: int | None = None) -> list[int]:
    """The microbatches to choose from: each up to 16, then by an eighth of the power of two below, up to the largest.

    Or in steps of `spacing`; or all that divide `divided`.
    """
    if divided and not spacing:
        return [point for point in range(1, largest + 1) if divided % point == 0]
    points = [spacing or 1]
    while points[-1] < largest:
        points.append(points[-1] + (spacing or max(1, 2 ** (points[-1].bit_length() - 1) // FINE)))
    return [*points[:-1], largest]


def index_of(points: list[int], microbatch: float) -> int:
    """The place of the grid point at `microbatch` or below; -1 if there is none."""
    return bisect_right(points, microbatch) - 1


# ---- search ----
def peak_line(tries: list[Try]) -> tuple[float, float] | None:
    """Bytes (fixed, per sequence) of the line through the largest complete try and the one at half of it or less.

    Not through all: where setting up takes more than a step, small microbatches have the same peak. And not through
    two neighbours: their difference may be noise.
    """
    known = sorted(one for one in tries if one.peak and one.complete)
    if len(known) < 2:
        return None
    far = known[-1]
    near = max((one for one in known if one.microbatch <= far.microbatch / 2), default=known[0])
    slope = (far.peak - near.peak) / (far.microbatch - near.microbatch)
    return far.peak - slope * far.microbatch, slope


def foresee(tries: list[Try], keep: float) -> float | None:
    """The microbatch, with a fraction, that would just fit by the line; None if it cannot be told."""
    line = peak_line(tries)
    if line is None or line[1] <= 0:
        return None
    total = max(one for one in tries if one.peak and one.complete).total
    return ((1 - keep) * total - line[0]) / line[1]


def search_limit(attempt: Callable[[int], Try], points: list[int], keep: float, first: int = 1) -> list[Try]:
    """Tries grid points until one fits and the next does not, or is not there; or none fits."""
    tries: list[Try] = []
    low, high, surprises = -1, len(points), 0  # places of the largest that fits and of the smallest that does not
    at = max(0, index_of(points, first))
    while low + 1 < high:
        foreseen = foresee(tries, keep)
        tries.append(one := attempt(points[at]))
        surprises += foreseen is not None and one.fits != (one.microbatch <= foreseen)
        low, high = (at, high) if one.fits else (low, at)
        failed = high < len(points)
        at = (low + high) // 2 if failed else index_of(points, 2 * one.microbatch)
        foreseen = foresee(tries, keep)
        if foreseen is not None and surprises < 2:
            at = index_of(points, foreseen) if failed else min(index_of(points, foreseen), at)
        at = min(max(at, low + 1), high - 1)
    return tries


def find_limit(tries: list[Try]) -> tuple[Try | None, Try | None]:
    """Returns the largest try that fits and the smallest that does not."""
    fitting, failing = ([one for one in tries if one.fits is fits] for fits in (True, False))
    return max(fitting, default=None), min(failing, default=None)


def inversions(tries: list[Try]) -> list[tuple[Try, Try]]:
    """Neighbours of which the larger microbatch took less memory: the peaks vary by as much from run to run."""
    known = sorted(one for one in tries if one.peak and one.complete)
    return [(small, large) for small, large in pairwise(known) if large.peak < small.peak]


def smallest_enough(tries: list[Try], ms_per_sample: Callable[[Try], float]) -> Try:
    """The smallest microbatch whose throughput is within 3 % of the best; of tries of which one fits."""
    fitting = sorted(one for one in tries if one.fits)
    best = min(map(ms_per_sample, fitting))
    return next(one for one in fitting if best / ms_per_sample(one) >= ENOUGH)


# ---- accumulation ----
def largest_divisor(batch: int, dp_size: int, limit: int) -> int:
    """The largest microbatch up to `limit` with which dp_size ranks make up the global batch; 0 if there is none."""
    return next((n for n in range(limit, 0, -1) if batch % (dp_size * n) == 0), 0)


def smallest_divisor(batch: int, dp_size: int, least: int, limit: int) -> int:
    """The smallest such microbatch from `least` on, else the largest below."""
    largest = largest_divisor(batch, dp_size, limit)
    return next((n for n in range(least, largest) if batch % (dp_size * n) == 0), largest)


def near_batches(batch: int, dp_size: int, least: int, limit: int) -> list[int]:
    """The nearest global batches, below and above, that microbatches from `least` to `limit` make up."""

    def divides(size: int) -> bool:
        return size > 0 and largest_divisor(size, dp_size, limit) >= least

    reach = range(1, dp_size * least + 1)  # the multiples of dp_size * least are among them
    found = [next((size for size in (batch + way * n for n in reach) if divides(size)), 0) for way in (-1, 1)]
    return [size for size in found if size]
