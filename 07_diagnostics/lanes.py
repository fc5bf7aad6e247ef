"""What one rank did, from its recording: every moment of its steps is given to one of five lanes.

    compute    a kernel runs; without a GPU: the training thread is inside an operator
    comm       exposed communication: a collective is under way, and no compute hides it
    copy       the GPU does nothing but copy
    data       the training thread makes, or waits for, the next batch
    host       none of these: Python between operators, a GPU without work

The lanes of a step are disjoint and fill it, so that their shares sum to 100 %. On a GPU the order above decides: a GPU
that computes is busy whatever the host does. Without one, the training thread can do one thing at a time.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from capture import DTYPE_BYTES, Recorded

LANES = ("compute", "comm", "copy", "data", "host")
Span = tuple[int, int]  # start and end, nanoseconds
COMMUNICATES = {"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"}  # namespaces of operators
NO_COMPUTE = COMMUNICATES | {"autograd", "profiler"}


class Collective(NamedTuple):
    """One collective on this rank, or a send or receive. Its number in its group is the same on all ranks."""

    op: str
    group: str
    seq: int | str  # of a send or receive: from whom to whom, and the how manieth
    start: int
    end: int
    nbytes: int  # nccl-tests' size: of an all_gather the output, of a reduce_scatter the input
    size: int  # ranks in the group
    track: int | str  # the thread, or the stream, that it was on
    held: int = 0  # since when it held up the training thread: of a send or receive, which is posted earlier


class Operator(NamedTuple):
    name: str
    calls: int
    ns: int


class Lanes(NamedTuple):
    cuda: bool
    windows: list[Span]  # the steps
    lanes: dict[str, list[Span]]
    communication: list[Span]  # exposed or hidden
    calls: list[Collective]
    transfers: list[Collective]  # sends and receives
    operators: list[Operator]  # the longest first; on a GPU, kernels
    copies: Operator
    hosts: dict[str, int]  # ns of the host's lane by line of the user's code
    makers: dict[str, int]  # .. and of the data lane
    num_operators: int


# ---- intervals ----
def union(spans: Iterable[Span]) -> list[Span]:
    """Sorted and disjoint spans that cover the same time."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        elif end > start:
            merged.append((start, end))
    return merged


def overlap(left: list[Span], right: list[Span]) -> list[Span]:
    """The time that two unions share."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(left: list[Span], right: list[Span]) -> list[Span]:
    """The time of one union that is not in another."""
    found, j = [], 0
    for start, end in left:
        while j < len(right) and right[j][1] <= start:
            j += 1
        k = j
        while k < len(right) and right[k][0] < end:
            if right[k][0] > start:
                found.append((start, right[k][0]))
            start = max(start, right[k][1])
            k += 1
        if start < end:
            found.append((start, end))
    return found


def length(spans: list[Span]) -> int:
    return sum(end - start for start, end in spans)


def span_of(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


# ---- operators of a thread ----
class Node:
    __slots__ = ("children", "computes", "event", "wraps")

    def __init__(self, event: dict[str, Any]):
        self.event, self.children, self.wraps = event, 0, False
        space, _, rest = event["name"].partition("::")
        compiled = event["name"].startswith("## Call CompiledFxGraph")
        self.computes = compiled or (event["cat"] == "cpu_op" and bool(rest) and space not in NO_COMPUTE)


def nest(events: list[dict[str, Any]]) -> list[Node]:
    """The spans of one thread, outer before inner, with the time of the computing ones directly inside each.

    wraps: an operator that does not compute by itself: a DTensor's (its Python calls the same operator on the local
    tensor), and all that contain one or a collective.
    """
    nodes: list[Node] = []
    open_: list[Node] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        node = Node(event)
        while open_ and open_[-1].event["ts"] + open_[-1].event["dur"] <= event["ts"]:
            open_.pop()
        above = next((one for one in reversed(open_) if one.computes), None)
        if node.computes and above:
            above.children += event["dur"]
        twice = node.computes and above is not None and above.event["name"] == event["name"]
        if twice or event["name"].partition("::")[0] in COMMUNICATES:
            for one in open_:
                one.wraps = True
        open_.append(node)
        nodes.append(node)
    return nodes


def longest(times: Iterable[tuple[str, int]]) -> list[Operator]:
    counts: dict[str, int] = defaultdict(int)
    sums: dict[str, int] = defaultdict(int)
    for name, ns in times:
        counts[name] += 1
        sums[name] += ns
    return sorted((Operator(name, counts[name], sums[name]) for name in sums), key=lambda one: -one.ns)


# ---- collectives ----
def size_of(op: str, nbytes: int, ranks: int) -> int:
    return nbytes * ranks if op in ("all_gather", "_allgather_base", "gather") else nbytes


def gloo_calls(events: list[dict[str, Any]], recorded: Recorded) -> list[Collective]:
    """gloo's spans, with group and number of the flight recorder's calls: both have them in the order of the calls."""
    spans, known = defaultdict(list), defaultdict(list)
    for event in events:
        spans[event["name"].partition(":")[2]].append((*span_of(event), event["tid"]))
    for call in recorded.calls:
        known[call["op"]].append(call)
    calls = []
    for op, several in spans.items():
        made = sorted(known[op], key=lambda call: call["created"])
        for (start, end, tid), call in zip(sorted(several)[max(0, len(several) - len(made)) :], made):
            size = len(recorded.groups.get(call["group"], ()))
            nbytes = size_of(op, call["nbytes"], size)
            calls.append(Collective(op, call["group"], call["seq"], start, end, nbytes, size, tid))
    return calls


def transfers_of(recorded: Recorded) -> list[Collective]:
    """Sends and receives, numbered so that both ends of one have the same number."""
    counts: dict[tuple[Any, ...], int] = defaultdict(int)
    found = []
    for one in recorded.transfers:
        ranks = recorded.groups.get(one.group, [])
        own, peer = recorded.rank, ranks[one.peer] if one.peer < len(ranks) else -1
        ends = (own, peer) if one.op == "send" else (peer, own)
        counts[one.group, ends, one.tag] += 1
        seq = f"{ends[0]} to {ends[1]}, tag {one.tag}, {counts[one.group, ends, one.tag]}"
        call = Collective(one.op, one.group, seq, one.posted, one.waited[1], one.nbytes, 2, recorded.thread)
        found.append(call._replace(held=one.waited[0]))
    return found


def nccl_calls(kernels: list[dict[str, Any]]) -> list[Collective]:
    """NCCL's kernels, which carry their group, number and size."""
    calls = []
    numbers: dict[str, int] = defaultdict(int)
    for event in sorted(kernels, key=lambda event: event["ts"]):
        args = event.get("args", {})
        op, group = plain_name(args.get("Collective name", "?")), str(args.get("Process Group Name", ""))
        elements = max(int(args.get("In msg nelems", 0)), int(args.get("Out msg nelems", 0)))
        width = DTYPE_BYTES.get(args.get("dtype", ""), 1)
        numbers[group] += 1
        seq, ranks = int(args.get("Seq", numbers[group])), int(args.get("Group size", 0))
        if op not in ("send", "recv"):
            calls.append(Collective(op, group, seq, *span_of(event), elements * width, ranks, f"stream {event['tid']}"))
    return calls


def plain_name(name: str) -> str:
    """NCCL's "_allgather_base" and such -> "all_gather"."""
    name = name.strip("_")
    for start in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        if name.replace("_", "").startswith(start.replace("_", "")):
            return start
    return name


# ---- one rank ----
def step_ends(marks: list[int], events: list[dict[str, Any]], kernels: list[dict[str, Any]]) -> list[int]:
    """When the steps that the host marked were over on the device: the end of what was launched before the mark."""
    launched = {e["args"]["correlation"]: e["ts"] for e in events if "correlation" in e.get("args", {})}
    ends = sorted((launched.get(k["args"].get("correlation"), k["ts"]), k["ts"] + k["dur"]) for k in kernels)
    times, latest, last = [], [], 0
    for time, end in ends:
        last = max(last, end)
        times.append(time)
        latest.append(last)
    return [max(mark, latest[i - 1]) if (i := bisect_right(times, mark)) else mark for mark in marks]


def sampled(recorded: Recorded, kind: str) -> list[Span]:
    """The time during which the training thread's samples were of a kind: from halfway before to halfway after each."""
    times = [sample.time for sample in recorded.samples]
    edges = [recorded.began, *((a + b) // 2 for a, b in pairwise(times)), recorded.ended]
    return union((edges[i], edges[i + 1]) for i, sample in enumerate(recorded.samples) if sample.kind == kind)


def sampled_lines(recorded: Recorded, spans: list[Span]) -> dict[str, int]:
    """How long the training thread was in each line of the user's code, of the given time."""
    starts = [start for start, _ in spans]
    counts: dict[str, int] = defaultdict(int)
    for sample in recorded.samples:
        i = bisect_right(starts, sample.time) - 1
        if i >= 0 and sample.time < spans[i][1]:
            counts[sample.where] += 1
    total = sum(counts.values())
    return {where: length(spans) * n // total for where, n in sorted(counts.items(), key=lambda item: -item[1])}


def share_out(windows: list[Span], order: list[tuple[str, list[Span]]]) -> dict[str, list[Span]]:
    """Gives the windows' time to the lanes: what the first has, the later ones do not get, and host has the rest."""
    rest = union(windows)
    found: dict[str, list[Span]] = {name: [] for name in LANES}
    for name, spans in order:
        found[name] = union([*found[name], *overlap(rest, spans)])
        rest = without(rest, spans)
    return found | {"host": rest}


def find_lanes(recorded: Recorded, marks: list[int]) -> Lanes:
    """marks: the ends of steps, of which the first is the beginning of the first measured one."""
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in recorded.events:
        by_kind[event["cat"]].append(event)
    on_main = [e for e in by_kind["cpu_op"] + by_kind["user_annotation"] if e["tid"] == recorded.thread]
    nodes = nest(on_main)
    kernels, moved = by_kind["kernel"], by_kind["gpu_memcpy"] + by_kind["gpu_memset"]
    nccl = [event for event in kernels if "nccl" in event["name"].lower()]
    busy = [event for event in kernels if "nccl" not in event["name"].lower()]
    # A receive is posted early, and its span tells no more than that: what counts is the wait for it.
    transfers, waited = transfers_of(recorded), union(one.waited for one in recorded.transfers)
    gloo = [event for event in by_kind["user_annotation"] if event["name"].startswith("gloo:")]
    gloo = [event for event in gloo if event["name"] not in ("gloo:send", "gloo:recv")]

    def named(*starts: str) -> list[Span]:
        return union(span_of(event) for event in on_main if event["name"].startswith(starts))

    # In backward, but in no node of it: the end, where DDP waits in C++ for its last buckets.
    gap = without(union(recorded.backwards), named("autograd::engine::evaluate_function"))
    under_way = overlap(union([*gap, *sampled(recorded, "comm")]), union(map(span_of, gloo)))
    held_up = union([*recorded.waits, *named(*(f"{space}::" for space in COMMUNICATES)), *under_way])
    loading = named("enumerate(Data")
    making = union([*loading, *sampled(recorded, "data")])
    if kernels:
        marks = step_ends(marks, by_kind["cuda_runtime"] + by_kind["cuda_driver"], kernels + moved)
        order = [("compute", union(map(span_of, busy))), ("comm", union(map(span_of, nccl)))]
        order += [("copy", union(map(span_of, moved))), ("data", making)]
        order += [("comm", union([*overlap(held_up, union(map(span_of, gloo))), *waited]))]
        times = [(event["name"], event["dur"]) for event in busy if marks[0] <= event["ts"] < marks[-1]]
        copied = [(event["name"], event["dur"]) for event in moved if marks[0] <= event["ts"] < marks[-1]]
    else:
        own = [node for node in nodes if node.computes and not node.wraps]
        order = [("data", loading), ("compute", union(span_of(node.event) for node in own))]
        order += [("comm", held_up), ("data", making)]
        counted = [node for node in own if marks[0] <= node.event["ts"] < marks[-1]]
        times = [(node.event["name"], node.event["dur"] - node.children) for node in counted]
        copied = [(name, ns) for name, ns in times if name == "aten::copy_"]
    windows, copies = list(pairwise(marks)), longest(copied)
    lanes = share_out(windows, order)
    return Lanes(
        cuda=bool(kernels),
        windows=windows,
        lanes=lanes,
        communication=overlap(union([*map(span_of, nccl + gloo), *waited]), union(windows)),
        calls=[call for call in gloo_calls(gloo, recorded) + nccl_calls(nccl) if call.end > marks[0]],
        transfers=[one for one in transfers if one.end > marks[0]],
        operators=longest(times),
        copies=Operator("copies", sum(one.calls for one in copies), sum(one.ns for one in copies)),
        hosts=sampled_lines(recorded, lanes["host"]),
        makers=sampled_lines(recorded, lanes["data"]),
        num_operators=len(times),
    )
