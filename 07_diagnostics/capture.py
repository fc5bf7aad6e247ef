"""Records what a rank does for a while, and takes nothing from the script but its time: torch's profiler for operators,
kernels and collectives; clocks around what the main thread waits in; its stack, every 2 ms.

    profiler         spans of operators, kernels, copies, collectives (gloo's on its own threads), DataLoader's next
    Work.wait        when the main thread was held up by a collective: torch's profiler has no span for it
    send, recv       to and from whom: gloo's spans do not tell
    Sampler          which line the main thread was in, and whether that line makes the next batch
    flight recorder  the group, number and size of each collective: gloo's spans have none of them

All times are nanoseconds of the system's clock (time.time_ns), which is the profiler's, too.
"""

import gc
import inspect
import json
import os
import pickle
import re
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile  # torch.profiler's is built on it, and imports torch._inductor: seconds

SAMPLE_S = 0.002
OWN = ("capture.py", "steps.py", "loaders.py", "script.py", "diagnose.py", "monitor.py")  # their frames are no user's
MAKES_DATA = re.compile(  # a function's name
    r"__next__|__getitems?__|.*collate.*|(get|next|load|read|fetch|make|sample|draw|global|local)_(.*_)?(batch|data).*"
)
DTYPE_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2, "ComplexFloat": 8}


class Sample(NamedTuple):
    time: int
    kind: str  # "data": a line that makes the next batch; "comm": inside torch.distributed; "": other
    where: str  # the innermost line that is not torch's: "train.py:12 in augment"


@dataclass
class PointToPoint:
    """A send or a receive."""

    op: str
    group: str
    peer: int  # its place in the group
    tag: int
    nbytes: int
    posted: int
    waited: tuple[int, int]  # when the training thread was in its wait


class Recorded(NamedTuple):
    """What one rank did from `began` to `ended`."""

    began: int
    ended: int
    thread: int  # the native id of the thread that trains
    events: list[dict[str, Any]]  # of the profiler, as Chrome's trace format has them; `ts` and `dur` are nanoseconds
    waits: list[tuple[int, int]]  # the training thread in Work.wait
    backwards: list[tuple[int, int]]  # .. and in backward
    transfers: list["PointToPoint"]
    samples: list[Sample]
    calls: list[dict[str, Any]]  # the flight recorder's
    groups: dict[str, list[int]]  # the ranks of each process group
    group_names: dict[str, str]  # what the script called it
    rank: int


# ---- stacks ----
def place(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


class Sampler(threading.Thread):
    """Looks at one thread's stack every 2 ms.

    trains: code that was on the stack during backward or the optimizer's step; a generator among it makes no data.
    """

    def __init__(self, ident: int, trains: set[CodeType]):
        super().__init__(daemon=True)
        self.watched, self.trains = ident, trains
        self.samples: list[Sample] = []
        self.over = threading.Event()
        self.torch_folder = os.path.dirname(torch.__file__) + os.sep
        self.waits_in = tuple(self.torch_folder + name for name in ("distributed", os.path.join("nn", "parallel")))
        self.library = os.path.dirname(os.__file__) + os.sep
        self.known: dict[CodeType, tuple[bool, bool]] = {}

    def about(self, code: CodeType) -> tuple[bool, bool]:
        """(is the user's, makes data) for a function."""
        if code not in self.known:
            file = code.co_filename
            ours = os.path.dirname(file) == os.path.dirname(__file__) and os.path.basename(file) in OWN
            below = ours or file.startswith(("<", self.torch_folder, self.library))
            makes = code.co_flags & inspect.CO_GENERATOR and not code.co_name.startswith("<")
            data = not below and bool(makes or MAKES_DATA.fullmatch(code.co_name))
            self.known[code] = not below and "site-packages" not in file, data
        return self.known[code]

    def look(self, frame: FrameType | None) -> Sample:
        now, kind, where = time.time_ns(), "", ""
        if frame and frame.f_code.co_filename.startswith(self.waits_in):
            kind = "comm"
        trains = False
        while frame and not (where and (trains or kind == "data")):
            users, makes_data = self.about(frame.f_code)
            where = where or (place(frame) if users else "")
            trains = trains or frame.f_code in self.trains
            if makes_data and not trains:
                kind = "data"
            frame = frame.f_back
        return Sample(now, kind, where)

    def run(self) -> None:
        while not self.over.wait(SAMPLE_S):
            self.samples.append(self.look(sys._current_frames().get(self.watched)))


def note_stack(trains: set[CodeType], frame: FrameType | None) -> None:
    """Adds the code on the stack, from a frame outwards: it trains, and so it makes no data."""
    while frame:
        trains.add(frame.f_code)
        frame = frame.f_back


# ---- what the profiler does not tell ----
def flight_record() -> list[dict[str, Any]]:
    """The collectives that torch's flight recorder knows: op, group, seq, created, nbytes of this rank's input."""
    module, entries, calls = sys.modules.get("torch._C._distributed_c10d"), [], []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):  # gloo's recorder, and NCCL's
        if dump := getattr(module, name, None):
            entries += pickle.loads(dump(True, False, False)).get("entries", [])
    for entry in entries:
        if not entry["is_p2p"]:
            sizes = zip(entry["input_sizes"], entry["input_dtypes"])
            nbytes = sum(torch.Size(size).numel() * DTYPE_BYTES.get(dtype, 1) for size, dtype in sizes)
            call = dict(op=entry["profiling_name"].partition(":")[2], group=entry["process_group"][0])
            calls.append(call | dict(seq=entry["collective_seq_id"], created=entry["time_created_ns"], nbytes=nbytes))
    return calls


def known_groups() -> tuple[dict[Any, list[int]], dict[Any, str]]:
    """The ranks of each of this rank's process groups, and the groups' names, such as "dp"."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}, {}
    groups = list(dist.distributed_c10d._world.pg_group_ranks.items())
    mine = [(group, sorted(ranks)) for group, ranks in groups if isinstance(group, dist.ProcessGroup)]
    names = {group.group_name: group.group_desc for group, _ in mine}
    return {group.group_name: ranks for group, ranks in mine}, names


def own_rank() -> int:
    ready = dist.is_available() and dist.is_initialized()
    return dist.get_rank() if ready else int(os.environ.get("RANK", 0))


# ---- recording ----
class Capture:
    """start(), then stop() on the same thread. Raises RuntimeError where the script runs a profiler of its own."""

    def __init__(self, trains: set[CodeType] | None = None):
        self.trains = trains if trains is not None else set()
        self.waits: list[tuple[int, int]] = []
        self.backwards: list[tuple[int, int]] = []
        self.transfers: list[PointToPoint] = []
        self.posted: dict[int, tuple[Any, PointToPoint]] = {}  # id of a Work -> itself, weakly, and its transfer
        self.replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.replaced.append((owner, name, vars(owner).get(name)))  # as it stands there: getattr would bind it
        setattr(owner, name, wrap(getattr(owner, name)))

    def timed(self, spans: list[tuple[int, int]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What the training thread may be held up in, with a clock."""
        ident = threading.get_ident()

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def wait(*args: Any, **kwargs: Any) -> Any:
                began = time.time_ns()
                try:
                    return function(*args, **kwargs)
                finally:
                    if threading.get_ident() == ident:
                        spans.append((began, time.time_ns()))
                        known, transfer = self.posted.get(id(args[0]), (None, None)) if args else (None, None)
                        if known and transfer and known() is args[0]:
                            transfer.waited = spans[-1]

            return wait

        return wrap

    def noted(self, op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A send or recv, written down."""

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def post(group: Any, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Any:
                now = time.time_ns()
                work = function(group, tensors, peer, tag)
                nbytes = sum(tensor.nbytes for tensor in tensors)
                self.transfers.append(PointToPoint(op, group.group_name, peer, tag, nbytes, now, (now, now)))
                if work is not None:
                    self.posted[id(work)] = weakref.ref(work), self.transfers[-1]
                return work

            return post

        return wrap

    def start(self) -> None:
        if torch.autograd._profiler_enabled():
            raise RuntimeError("a profiler is running already")
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it announces on stderr that it starts and ends
        self.profiler = profile(use_kineto=True, use_device="cuda" if torch.cuda.is_available() else None)
        self.profiler.__enter__()
        if dist.is_available():
            self.replace(dist.Work, "wait", self.timed(self.waits))
            for op in ("send", "recv"):
                self.replace(dist.ProcessGroup, op, self.noted(op))
        self.replace(torch.futures.Future, "wait", self.timed(self.waits))
        for name in ("backward", "grad"):
            self.replace(torch.autograd, name, self.timed(self.backwards))
        self.sampler = Sampler(threading.get_ident(), self.trains)
        self.sampler.start()
        self.began, self.thread = time.time_ns(), threading.get_native_id()

    def stop(self) -> Recorded:
        ended = time.time_ns()
        for owner, name, function in reversed(self.replaced):
            setattr(owner, name, function) if function else delattr(owner, name)
        self.sampler.over.set()
        self.sampler.join()
        self.profiler.__exit__(None, None, None)
        calls = [call for call in flight_record() if call["created"] >= self.began]
        lists = self.waits, self.backwards, self.transfers, self.sampler.samples, calls, *known_groups(), own_rank()
        return Recorded(self.began, ended, self.thread, self.events(), *lists)

    def events(self) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            self.profiler.export_chrome_trace(path)
            collecting = gc.isenabled()
            gc.disable()  # it would look for cycles among a hundred thousand dictionaries, again and again
            try:
                with open(path, "rb") as file:
                    trace = json.load(file)
            finally:
                if collecting:
                    gc.enable()
        base = trace.get("baseTimeNanoseconds", 0)
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") != "Trace"]
        for event in events:
            event["ts"], event["dur"] = base + round(1e3 * event["ts"]), round(1e3 * event["dur"])
        return events
