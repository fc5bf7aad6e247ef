"""Every collective of torch.distributed: data that shows a wrong element, the seconds that a call takes, and their fit.

Sizes and factors are those of NVIDIA/nccl-tests (doc/PERFORMANCE.md, src/*.cu). S is the array of one rank for
all_reduce, broadcast, reduce and send_recv, the arrays of all ranks together for the others, in bytes. algbw = S / t,
and busbw = factor x algbw is what the slowest link carries.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import NamedTuple

import torch
import torch.distributed as dist

# Renamed in torch 2.13, where the old names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

FACTORS: dict[str, Callable[[int], float]] = {  # busbw / algbw among n ranks
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1,
    "barrier": lambda n: 0,  # no bytes: its latency alone
}
OF_ONE_RANK = ("all_reduce", "broadcast", "reduce", "send_recv")  # S is the array of one rank
ROOTED = ("broadcast", "reduce", "gather", "scatter")  # to or from the group's first rank
PERIOD = 61  # of the data: whole numbers that every data type holds; a prime, so that no two blocks are alike
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
BATCHES = 5  # of calls; their median counts
MOST_CALLS = 1000  # in a batch
WARM_UP_CALLS, WARM_UP_S = 10, 2.0  # at most, before a collective is measured: TCP needs some to find its rate


class Transfer(NamedTuple):
    """A collective on buffers of its own. calls(k) runs it k times, at least once, and yields after each."""

    size: int  # bytes, as nccl-tests counts them
    calls: Callable[[int], Iterator[None]]
    got: torch.Tensor | None = None  # what has arrived on this rank after one call ...
    want: torch.Tensor | None = None  # ... and what must have

    def wrong(self) -> int:
        """Elements that differ, on this rank."""
        return 0 if self.got is None or self.want is None else int((self.got != self.want).sum())


def show_size(size: int) -> str:
    """1536 -> 1536, 2048 -> 2K."""
    unit = next(unit for unit, number in reversed(UNITS.items()) if size % number == 0 and (size or not unit))
    return f"{size // UNITS[unit]}{unit}"


# ---- data ----
def message(count: int, source: int, to: int, like: torch.Tensor) -> torch.Tensor:
    """(count,) whole numbers from 1 to 61 that rank `source` has for rank `to`."""
    one = (torch.arange(PERIOD, device=like.device) * 3 + source * 7 + to * 5) % PERIOD + 1
    return one.to(like.dtype).repeat(count // PERIOD + 1)[:count]


def addend(count: int, rank: int, n: int, like: torch.Tensor) -> torch.Tensor:
    """(count,) of a rank, such that the sum over n ranks is message(count, 0, 0).

    Of n neighbours each rank holds one, and zeros: the sum is exact in every data type, and a rank that is left out or
    counted twice shows.
    """
    mine = torch.zeros(count, dtype=like.dtype, device=like.device)
    mine[rank::n] = message(count, 0, 0, like)[rank::n]
    return mine


# ---- collectives ----
def again(call: Callable[[], object]) -> Callable[[int], Iterator[None]]:
    def calls(times: int) -> Iterator[None]:
        for _ in range(times):
            call()
            yield

    return calls


def ring(outbox: torch.Tensor, inbox: torch.Tensor, group: dist.ProcessGroup) -> Callable[[int], Iterator[None]]:
    """Each rank sends to the next and receives from the one before, as nccl-tests' sendrecv."""
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()

    def grouped() -> None:
        pair = (dist.isend, outbox, after), (dist.irecv, inbox, before)
        for work in dist.batch_isend_irecv([dist.P2POp(op, x, group=group, group_peer=peer) for op, x, peer in pair]):
            work.wait()

    def posted_ahead(times: int) -> Iterator[None]:
        # gloo's sender waits for the receiver's word that it is ready, which is one more way across the link. So the
        # next receive is posted before this message goes out, as a pipeline's stages do.
        coming = dist.irecv(inbox, group=group, group_src=before)
        for i in range(times):
            following = dist.irecv(inbox, group=group, group_src=before) if i + 1 < times else None
            for work in filter(None, (dist.isend(outbox, group=group, group_dst=after), coming)):
                work.wait()
            coming = following
            yield

    return again(grouped) if outbox.device.type == "cuda" else posted_ahead


def prepare(name: str, size: int, group: dist.ProcessGroup, like: torch.Tensor) -> Transfer:
    """A collective of S <= size bytes, in whole elements of a rank (one at least), of like's data type and device."""
    if name == "barrier":
        return Transfer(0, again(lambda: dist.barrier(group)))
    n, me, width = group.size(), group.rank(), like.element_size()
    part = max(1, size // width // n)  # elements
    count = max(1, size // width) if name in OF_ONE_RANK else part * n
    said = message(count, 0, 0, like)
    if name == "all_reduce":
        # all_reduce: (count,) of each rank -> their sum, everywhere
        own = addend(count, me, n, like)
        return Transfer(count * width, again(lambda: dist.all_reduce(own, group=group)), own, said)
    if name == "reduce":
        # reduce: (count,) of each rank -> their sum on the first
        own = addend(count, me, n, like)
        call = again(lambda: dist.reduce(own, group=group, group_dst=0))
        return Transfer(count * width, call, own, said if me == 0 else own)
    if name == "broadcast":
        # broadcast: (count,) of the first rank -> everywhere
        own = said.clone() if me == 0 else torch.zeros_like(said)
        return Transfer(count * width, again(lambda: dist.broadcast(own, group=group, group_src=0)), own, said)
    if name == "send_recv":
        # send and recv: (count,) of each rank -> the next rank
        inbox, before = torch.zeros_like(said), (me - 1) % n
        outbox = message(count, me, (me + 1) % n, like)
        return Transfer(count * width, ring(outbox, inbox, group), inbox, message(count, before, me, like))
    full, short = torch.zeros_like(said), torch.zeros_like(said[:part])
    if name == "all_gather":
        # all_gather: (part,) of each rank -> (count,) everywhere
        own = message(part, me, 0, like)
        want = torch.cat([message(part, source, 0, like) for source in range(n)])
        return Transfer(count * width, again(lambda: all_gather_single(full, own, group=group)), full, want)
    if name == "reduce_scatter":
        # reduce_scatter: (count,) of each rank -> its (part,) of their sum
        own = addend(count, me, n, like)
        want = said[me * part : (me + 1) * part]
        return Transfer(count * width, again(lambda: reduce_scatter_single(short, own, group=group)), short, want)
    if name == "all_to_all":
        # all_to_all: row `to` of each rank -> row `source` there
        own = torch.cat([message(part, me, to, like) for to in range(n)])
        want = torch.cat([message(part, source, me, like) for source in range(n)])
        return Transfer(count * width, again(lambda: dist.all_to_all_single(full, own, group=group)), full, want)
    if name == "gather":
        # gather: (part,) of each rank -> (count,) on the first
        own, rows = message(part, me, 0, like), list(full.chunk(n)) if me == 0 else None
        want = torch.cat([message(part, source, 0, like) for source in range(n)]) if me == 0 else full
        return Transfer(count * width, again(lambda: dist.gather(own, rows, group=group, group_dst=0)), full, want)
    # scatter: (count,) of the first rank -> (part,) of each
    rows = [message(part, 0, to, like) for to in range(n)] if me == 0 else None
    call = again(lambda: dist.scatter(short, rows, group=group, group_src=0))
    return Transfer(count * width, call, short, message(part, 0, me, like))


# ---- seconds ----
def of_all_ranks(seconds: Sequence[float], name: str, group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Makes of each rank's times one of all, known to all: the mean of the ranks of a group, of the slowest group.

    Ranks leave the call that brings them into step up to a way across the link apart, and see the next ones shorter or
    longer by that; their mean does not. Where one rank gives and the others take, the giver runs ahead: there the
    slowest rank counts.
    """
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    if name not in ROOTED:
        dist.all_reduce(times, group=group)  # over the group: (len(seconds),) -> their sum
        times /= group.size()
    dist.all_reduce(times, dist.ReduceOp.MAX)  # over all ranks: (len(seconds),) -> the largest
    return times.tolist()


def seconds_a_call(transfer: Transfer, times: int, device: torch.device) -> float:
    """Seconds of one of `times` calls in a row on this rank. One call before them, not counted, brings it into step."""
    dist.barrier()
    calls = transfer.calls(times + 1)
    next(calls)
    if device.type == "cuda":  # the GPU's own clock: the host only queues the calls
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in calls:
            pass
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / times
    start = time.perf_counter()
    for _ in calls:
        pass
    return (time.perf_counter() - start) / times


def batch_seconds(
    name: str, transfer: Transfer, group: dist.ProcessGroup, budget: float, device: torch.device
) -> list[float]:
    """Seconds a call of each batch of calls, about `budget` seconds in all; the same on every rank."""

    def batches(number: int, times: int) -> list[float]:
        taken = [seconds_a_call(transfer, times, device) for _ in range(number)]
        return of_all_ranks(taken, name, group, device)

    first = batches(1, 1)  # all ranks see the same time, so all of them make the same number of calls
    times = min(MOST_CALLS, int(budget / first[0] / BATCHES) - 1)
    if times > 1:
        return batches(BATCHES, times)
    return first + batches(BATCHES - 1 if first[0] < budget else 2, 1)


def warm_up_transfer(name: str, transfer: Transfer, group: dist.ProcessGroup, device: torch.device) -> None:
    for _ in transfer.calls(1):
        pass
    (seconds,) = of_all_ranks([seconds_a_call(transfer, 1, device)], name, group, device)
    for _ in transfer.calls(max(1, min(WARM_UP_CALLS, int(WARM_UP_S / seconds)))):
        pass


# ---- fit ----
class Fit(NamedTuple):
    """t = alpha + x / beta, x = factor x S bytes on the link."""

    alpha: float  # seconds, not below 0
    beta: float  # bytes per second; inf where the times do not grow
    off: float  # the largest |fit / measured - 1|


def fit_times(x: Sequence[float], seconds: Sequence[float], rounds: int = 30) -> Fit:
    """The line through at least two (bytes, seconds) with the least sum of |line / measured - 1|.

    Errors count in proportion: small messages fix alpha, large ones beta. They count by their size, not its square: a
    size at which the library changes its algorithm, or which was disturbed, does not pull the line.
    """
    weights = [1 / t**2 for t in seconds]
    for _ in range(rounds):  # iteratively reweighted least squares
        total = sum(weights)
        mean_x = sum(w * a for w, a in zip(weights, x)) / total
        mean_t = sum(w * t for w, t in zip(weights, seconds)) / total
        joint = sum(w * (a - mean_x) * (t - mean_t) for w, a, t in zip(weights, x, seconds))
        slope = max(0.0, joint / sum(w * (a - mean_x) ** 2 for w, a in zip(weights, x)))
        alpha = mean_t - slope * mean_x
        if alpha < 0:  # through the origin instead
            weighted = [(w * a, a, t) for w, a, t in zip(weights, x, seconds)]
            alpha, slope = 0.0, sum(w * t for w, _, t in weighted) / sum(w * a for w, a, _ in weighted)
        errors = [abs((alpha + slope * a) / t - 1) for a, t in zip(x, seconds)]
        weights = [1 / t**2 / max(error, 1e-3) for t, error in zip(seconds, errors)]
    return Fit(alpha, 1 / slope if slope else inf, max(errors))
