"""The ranks side by side: one clock, and how long each waited in a collective for one that came later.

    rank 0   ........[ waiting  |  transfer ]           the span of all_reduce 7 begins when a rank arrives
    rank 1   ...................[ transfer  ]           so what lies before the last arrival is waiting, not the network

Who arrived last is charged with the waiting of the others. On one machine the ranks have one clock; between machines
the ends of common collectives, which are nearly the same moment on all ranks, give the difference.
"""

from bisect import bisect_right
from collections import defaultdict
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from lanes import LANES, length, overlap, union, without
from records import say_ranks
from transfers import FACTORS

SHARES = ("data", "compute", "comm", "waiting", "copy", "host")
CAUSES = ("data", "compute", "host", "copy")  # what can make a rank late by its own doing
STEADY = 2  # a straggler is waited for so many times as long as any other rank; else the ranks take turns
EQUALLY_SLOW = 0.7  # of the time for a batch
HICCUP = 2.5  # times the median of the steps
FEW = 16  # ranks in a table or picture
NEAR = 16  # collectives that are under way at once on a rank, at most


class Late(NamedTuple):
    rank: int | None  # the rank that the others wait for in most steps, or None: they take turns
    share: float  # of a step, that the others wait
    steps: float  # share of the steps in which it was the latest
    lane: str  # what it does longer than the others
    ms: float  # .. by how much a step


class Skew(NamedTuple):
    shares: dict[int, dict[str, float]]  # of the steps' time, by rank; they sum to 1
    hidden: dict[int, float]  # communication beside compute or other work of the rank
    late: Late
    charged: dict[str, float]  # waiting for no steady rank, by what the late ones did meanwhile
    clocks: dict[str, tuple[float, float, int]]  # host -> (offset in ms, its spread, from so many)
    arrivals: dict[tuple[Any, ...], tuple[int, int]]  # collective -> (last arrival, the rank)


def key_of(summary: dict[str, Any], call: list[Any]) -> tuple[Any, ...]:
    """A collective's name on all ranks of its group; two groups may have one name if no rank is in both."""
    _, group, number = call[:3]
    return group, tuple(summary["groups"].get(group, ())), number


def some_ranks(summaries: dict[int, dict[str, Any]], late: int | None) -> dict[int, dict[str, Any]]:
    """Not more ranks than are easily looked at, and the late one among them."""
    first = sorted(summaries)[:FEW]
    if late is not None and late not in first:
        first[-1] = late
    return {rank: summaries[rank] for rank in first}


# ---- steps ----
def leave_out_hiccup(summaries: dict[int, dict[str, Any]]) -> str:
    """Takes the one step out that is much longer than the others: a checkpoint, a machine that did something else.

    Two long steps of a few are no hiccup but how the job runs, and stay. Returns what to say about it.
    """
    num_steps = min(len(one["windows"]) for one in summaries.values())
    ns = [median(one["windows"][i][1] - one["windows"][i][0] for one in summaries.values()) for i in range(num_steps)]
    longest, usual = max(range(num_steps), key=ns.__getitem__), median(ns)
    if num_steps < 4 or ns[longest] < HICCUP * usual:
        return ""
    for one in summaries.values():
        for by_step in (one["windows"], *one["lanes"].values()):
            del by_step[longest]
        kept = [(start, end) for start, end in one["windows"]]
        for name in ("exposed", "communication"):
            one[name] = [list(span) for span in overlap([(start, end) for start, end in one[name]], kept)]
    return f"left out: step {longest + 1} of {num_steps}, {ns[longest] / 1e6:.0f} ms where {usual / 1e6:.0f} are usual"


# ---- clocks ----
def align_clocks(summaries: dict[int, dict[str, Any]]) -> dict[str, tuple[float, float, int]]:
    """clock -> (offset in ns, spread, number of collectives): what is added to its times to have the first rank's.

    A clock is that of a machine. Those of two are compared where a rank of one and a rank of the other share a group.
    """
    offsets = {summaries[min(summaries)]["clock"]: (0.0, 0.0, 0)}
    ends = {rank: {key_of(one, call): call[4] for call in one["calls"]} for rank, one in summaries.items()}
    clocks = {rank: one["clock"] for rank, one in summaries.items()}
    for _ in range(len(set(clocks.values()))):
        for rank, other in product(clocks, clocks):
            if clocks[rank] in offsets or clocks[other] not in offsets:
                continue
            if shared := ends[rank].keys() & ends[other].keys():
                apart = [ends[other][key] - ends[rank][key] for key in shared]
                middle = median(apart)
                spread = median(abs(value - middle) for value in apart)
                offsets[clocks[rank]] = offsets[clocks[other]][0] + middle, spread, len(apart)
    return offsets


def shift(summary: dict[str, Any], ns: int) -> None:
    """Moves a rank's times to the first host's clock."""
    for name in ("windows", "exposed", "communication"):
        summary[name] = [[start + ns, end + ns] for start, end in summary[name]]
    for call in summary["calls"] + summary["transfers"]:
        call[3:5] = call[3] + ns, call[4] + ns
        call[8] += ns
    for lane, spans in summary["picture"].items():
        summary["picture"][lane] = [[start + ns, end + ns] for start, end in spans]
    for row in summary.get("rows", ()):
        row[2] += ns


# ---- waiting ----
def last_arrivals(summaries: dict[int, dict[str, Any]]) -> dict[tuple[Any, ...], tuple[int, int]]:
    """collective -> (when the last rank came, which), where at least two ranks of the group were recorded."""
    starts: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
    for rank, one in summaries.items():
        for call in one["calls"] + one["transfers"]:
            starts[key_of(one, call)].append((call[3], rank))
    return {key: max(several) for key, several in starts.items() if len(several) > 1}


class Wait(NamedTuple):
    start: int
    end: int
    rank: int  # for which
    pipelined: bool  # in a send or receive


def split_waiting(summary: dict[str, Any], arrivals: dict[tuple[Any, ...], tuple[int, int]]) -> list[Wait]:
    """Of the exposed communication of a rank, what was waiting: no collective was under way that all had come to."""
    before, transfers = [], []
    for i, call in enumerate(summary["calls"] + summary["transfers"]):
        arrival, rank = arrivals.get(key_of(summary, call), (call[3], -1))
        arrival = min(arrival, call[4])
        before.append(Wait(call[3], arrival, rank, i >= len(summary["calls"])))
        transfers.append((max(arrival, call[8]), call[4]))
    exposed = [(start, end) for start, end in summary["exposed"]]
    waiting = overlap(without(exposed, union(transfers)), union((one.start, one.end) for one in before))
    before.sort()
    starts, found = [one.start for one in before], []
    for start, end in waiting:
        begun = bisect_right(starts, start)
        near = reversed(before[max(0, begun - NEAR) : begun])
        for_whom = next((one for one in near if one.end >= end), Wait(0, 0, -1, False))
        found.append(for_whom._replace(start=start, end=end))
    return found


def compare_ranks(summaries: dict[int, dict[str, Any]]) -> Skew:
    """Shares of each rank, with the waiting taken out of the exposed communication, and who is waited for."""
    clocks = align_clocks(summaries)
    for one in summaries.values():
        if ns := round(clocks.get(one["clock"], (0,))[0]):
            shift(one, ns)
    arrivals = last_arrivals(summaries)
    shares, hidden, waits = {}, {}, {}
    for rank, one in summaries.items():
        total = sum(end - start for start, end in one["windows"])
        waits[rank] = split_waiting(one, arrivals)
        one["waited"] = [[wait.start, wait.end] for wait in waits[rank]]
        lanes = {lane: sum(one["lanes"][lane]) for lane in LANES}
        lanes["waiting"] = sum(wait.end - wait.start for wait in waits[rank])
        lanes["comm"] -= lanes["waiting"]
        shares[rank] = {lane: lanes[lane] / total for lane in SHARES}
        exposed = [(start, end) for start, end in one["exposed"]]
        hidden[rank] = length(without([(start, end) for start, end in one["communication"]], exposed)) / total
    late, charged = find_late(summaries, waits)
    hosts = {one["clock"]: one["host"] for one in summaries.values()}
    in_ms = {hosts[name]: (offset / 1e6, spread / 1e6, count) for name, (offset, spread, count) in clocks.items()}
    return Skew(shares, hidden, late, charged, in_ms, arrivals)


def find_late(summaries: dict[int, dict[str, Any]], waits: dict[int, list[Wait]]) -> tuple[Late, dict[str, float]]:
    """The rank that the others wait for steadily; or, if the ranks take turns, what the waiting is charged to."""
    num_steps = min(len(one["windows"]) for one in summaries.values())
    blamed = {rank: [0] * num_steps for rank in summaries}  # ns that others waited for it, by step
    for rank, one in summaries.items():
        begins = [start for start, _ in one["windows"][:num_steps]]
        for wait in waits[rank]:
            if wait.rank in blamed:
                blamed[wait.rank][max(0, bisect_right(begins, wait.start) - 1)] += wait.end - wait.start
    if len(summaries) < 2 or not any(map(any, blamed.values())):
        return Late(None, 0.0, 0.0, "", 0.0), {}
    lengths = [
        median(one["windows"][i][1] - one["windows"][i][0] for one in summaries.values()) for i in range(num_steps)
    ]
    # The median over the steps: one hiccup, of whatever cause, makes no straggler.
    shares = {one: median(ns / length for ns, length in zip(blamed[one], lengths)) for one in blamed}
    rank = max(shares, key=lambda one: shares[one])
    latest = [max(blamed, key=lambda one: blamed[one][step]) for step in range(num_steps)]
    others = [one for one in summaries if one != rank]
    more = {}  # ns a step that the late rank has more of each lane than the others
    for lane in CAUSES:
        usual = [sum(summaries[one]["lanes"][lane][step] for one in others) / len(others) for step in range(num_steps)]
        more[lane] = median(own - mean for own, mean in zip(summaries[rank]["lanes"][lane], usual))
    lane = max(more, key=lambda one: more[one])
    late = Late(rank, shares[rank] / len(others), latest.count(rank) / num_steps, lane, more[lane] / 1e6)
    steady = shares[rank] >= STEADY * max(shares[one] for one in others)
    if steady and more[lane] > 0 and not (lane == "data" and equally_slow(summaries, rank)):
        return late, {}
    return late._replace(rank=None), charge(summaries, waits, latest)


def equally_slow(summaries: dict[int, dict[str, Any]], rank: int) -> bool:
    """Whether the others' workers take as long for a batch. They do not wait for them: they always are a batch ahead,
    as the late rank holds them up.
    """
    times = {one: summary["fetch"]["ms"] for one, summary in summaries.items() if summary["fetch"]["workers"]}
    others = [ms for one, ms in times.items() if one != rank and ms]
    return bool(times.get(rank) and others) and median(others) >= EQUALLY_SLOW * times[rank]


def charge(summaries: dict[int, dict[str, Any]], waits: dict[int, list[Wait]], latest: list[int]) -> dict[str, float]:
    """Waiting in collectives, as a share, by what the latest rank of each step did longer than the mean of the ranks.

    Not that of sends and receives: ranks that wait for each other in turn there are a pipeline, as it is meant to be.
    """
    total = sum(end - start for one in summaries.values() for start, end in one["windows"])
    waiting = sum(one.end - one.start for several in waits.values() for one in several if not one.pipelined) / total
    more: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
    for step, rank in enumerate(latest):
        for lane in CAUSES:
            mean = sum(one["lanes"][lane][step] for one in summaries.values()) / len(summaries)
            more[lane] += max(0.0, summaries[rank]["lanes"][lane][step] - mean)
    return {lane: waiting * ns / (sum(more.values()) or 1) for lane, ns in more.items()}


# ---- collectives ----
def collective_rows(summaries: dict[int, dict[str, Any]], skew: Skew) -> list[dict[str, Any]]:
    """Calls of one operation on one group, as rank 0 saw them: how many a step, bytes, milliseconds, busbw in GB/s."""
    first = min(summaries)
    summary, rows = summaries[first], []
    steps, begins = len(summary["windows"]), [start for start, _ in summary["windows"]]
    several: dict[tuple[str, str], list[list[Any]]] = defaultdict(list)
    for call in summary["calls"]:
        step = bisect_right(begins, call[3]) - 1
        if step >= 0 and call[3] < summary["windows"][step][1]:
            several[call[0], call[1]].append(call)
    for (op, group), calls in several.items():
        size = max(call[6] for call in calls)
        arrivals = [skew.arrivals.get(key_of(summary, call), (call[3], -1))[0] for call in calls]
        transfer = sum(max(0, call[4] - max(call[3], arrival)) for call, arrival in zip(calls, arrivals))
        nbytes, factor = sum(call[5] for call in calls), FACTORS.get(op, lambda n: 1.0)(max(size, 1))
        name = summary["group_names"].get(group, "undefined")  # as torch has it
        if name == "undefined":
            name = say_ranks(summary["groups"].get(group, []))
        row = dict(op=op, group=name, ranks=size, calls=len(calls) / steps)
        row |= dict(mb=nbytes / 1e6 / steps, ms=transfer / 1e6 / steps, mean_kb=nbytes / 1e3 / len(calls))
        rows.append(row | dict(busbw=factor * nbytes / transfer if transfer else None))
    return sorted(rows, key=lambda row: -row["ms"])
