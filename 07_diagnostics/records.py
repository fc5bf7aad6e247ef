"""What is known of each rank, how it is said, and what the source around a call says. For verdict.py and hang.py."""

import ast
import os
import re
import signal
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

BUSY = 0.2  # above it, a rank computes
SETS_UP = ("init_process_group", "new_group", "rendezvous", "split_group", "init_device_mesh")
LIBRARY = re.compile(r"/lib/python\d|/torch/")
UNEQUAL = ("all_to_all", "alltoall", "scatter", "gather")  # their sizes may differ from rank to rank


# ---- records ----
class Call(NamedTuple):
    """A collective, as the flight recorder has it."""

    group: str
    seq: int  # its number in the group
    op: str
    size: str
    done: bool
    where: tuple[tuple[str, int, str], ...]  # (file, line, function), the innermost first, without torch's own

    @property
    def same(self) -> tuple[str, str]:
        """What must agree on all ranks of the group."""
        return self.op, "" if self.op.startswith(UNEQUAL) else self.size

    @property
    def site(self) -> tuple[str, int, str]:
        return self.where[0] if self.where else ("", 0, "")


@dataclass
class Rank:
    rank: int
    state: str = "running"  # or stopped, ended, lost
    code: int | None = None  # of a process that ended; negative: by that signal
    ended: float = 0.0  # when
    busy: float = 0.0  # processors used, or share of the time in which it wanted one, since the last progress
    pid: int = 0  # 0: it was never heard of
    count: list[int] = field(default_factory=list)  # of calls made and done
    recorded: bool = False  # `calls` holds all of them
    stack: list[list[Any]] = field(default_factory=list)  # [file, line, function], the innermost first
    line: str = ""  # the source of the innermost one
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> its ranks, and its description
    transfers: list[dict[str, Any]] = field(default_factory=list)  # sends and receives that are not done
    error: dict[str, Any] | None = None  # what it raised: text, where, time
    calls: list[Call] = field(default_factory=list)
    last: dict[str, Any] | None = None  # the last call that Python made: known even of a process that aborted
    seen: bool = False  # the stack was taken from outside: the process could not speak for itself

    def pending(self) -> list[Call]:
        """The first call of each group that is not done."""
        first: dict[str, Call] = {}
        for call in self.calls:
            if not call.done:
                first.setdefault(call.group, call)
        return [*first.values()] if self.state != "ended" or self.error else []

    def awaited_transfers(self) -> list[dict[str, Any]]:
        """Those on which it waits now: one that was posted early and is not yet waited for holds nobody up."""
        waits = self.stack and ("torch/distributed/" in self.stack[0][0] or "wait" in self.line)
        return self.transfers if waits and self.state != "ended" else []

    def reached(self, group: str) -> int:
        return max((call.seq for call in self.calls if call.group == group), default=0)


def as_calls(rows: list[Any]) -> list[Call]:
    """Calls from JSON."""
    fields = [row if isinstance(row, dict) else dict(zip(Call._fields, row)) for row in rows]
    return [Call(**row | {"where": tuple(tuple(frame) for frame in row["where"])}) for row in fields]


def members(ranks: dict[int, Rank], group: str) -> list[int]:
    found = next((one.groups[group]["ranks"] for one in ranks.values() if group in one.groups), None)
    return [rank for rank in found if rank in ranks] if found else sorted(ranks)


# ---- words ----
def say_ranks(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def they(ranks: list[int], one: str, many: str) -> str:
    return f"{say_ranks(ranks)} {many if len(ranks) > 1 else one}"


def say_signal(code: int) -> str:
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


def at(where: Any) -> str:
    return f"{Path(where[0]).name}:{where[1]} in {where[2]}" if where and where[0] else "place unknown"


def say_group(ranks: dict[int, Rank], group: str) -> str:
    found = next((one.groups[group] for one in ranks.values() if group in one.groups), None)
    if not found:
        return f'group "{group}"'
    name = found["name"] if found["name"] not in ("", "undefined") else group
    return f'group "{name}" ({say_ranks(found["ranks"])})'


def own(frames: Any) -> Any:
    """The innermost frame outside of torch, the standard library and what pip installed; else the innermost."""
    return next((frame for frame in frames if not LIBRARY.search(frame[0])), frames[0] if frames else [])


def say_call(call: Call) -> str:
    return f"{call.op}{f' of {call.size}' if call.size else ''} at {at(own(call.where))}"


def say_last(note: dict[str, Any]) -> str:
    return f"{note['op']}{' of ' * bool(note['size'])}{note['size']} at {at(note['where'])}"


def say_transfer(note: dict[str, Any]) -> str:
    peer = "any rank" if note.get("to") is None else f"rank {note['to']}"
    way = "to" if note["op"] == "send" else "from"
    return f"{note['op']} {way} {peer} of {note['size']}, tag {note['tag']}, at {at(note['where'])}"


# ---- where a rank is ----
DOES = {
    "slow_data": "in its data",
    "slow_save": "saving",
    "slow_optimizer": "in the optimizer",
    "slow_rank": "computing",
    "idle_rank": "neither computing nor in a collective",
    "not_started": "still setting up",
}


def activity(one: Rank) -> tuple[str, list[Any]]:
    """What a rank does that waits in no collective: a cause, and the frame of the stack that shows it."""
    shown = own(one.stack)
    for file, _, name in one.stack:
        if "torch/distributed/" in file and name.startswith(SETS_UP):
            return "not_started", shown
        if "torch/utils/data/" in file or ("/torch/" not in file and re.search(r"batch|dataset|load_data", name)):
            return "slow_data", shown
        if "torch/distributed/distributed_c10d" in file:  # in a collective, whatever its callers are called
            break
        if "torch/serialization" in file or "distributed/checkpoint" in file or re.search(r"save|checkpoint", name):
            return "slow_save", shown
        if "torch/optim/" in file:
            return "slow_optimizer", shown
    if not any(one.count) and not one.last:
        return "not_started", shown
    return "slow_rank" if one.busy > BUSY else "idle_rank", shown


def where_is(one: Rank, ranks: dict[int, Rank]) -> str:
    """Where a rank is, in a line."""
    if one.state == "lost":
        return "no more word from it"
    parts = [f"raised {one.error['text'].split('. ')[0]}"] if one.error else []
    if one.state == "ended":
        code = one.code or 0
        parts.append(f"ended by {say_signal(code)}" if code < 0 else f"ended with exit code {code}")
    waits = "waits" if one.state == "running" and not one.error else "was"
    for call in one.pending():
        parts.append(f"{waits} in number {call.seq} of {say_group(ranks, call.group)}: {say_call(call)}")
    parts += [f"waits in {say_transfer(note)}" for note in one.awaited_transfers()[:4]]
    if one.state == "stopped":
        parts = [f"stopped; its last call was {say_last(one.last)}" if one.last else "stopped"]
    if not parts and one.last and not one.recorded:  # it stands too short a time, or its machine is overloaded
        parts = [f"no record yet; its last call was {say_last(one.last)}"]
    if not parts:
        kind, frame = activity(one)
        parts = [f"{DOES[kind]}: {at(frame)} ({one.busy:.0%} busy)" if one.pid else "no word from it"]
    return "; ".join(parts)


def shown_stack(one: Rank) -> list[str]:
    if one.state != "running" and not one.seen:  # its last word is older
        return []
    frames = [frame for frame in one.stack if "/torch/" not in frame[0]] or one.stack
    here = os.getcwd() + os.sep
    return [f"{file.removeprefix(here)}:{line} in {name}" for file, line, name in frames[:8]]


def frames_in(text: str) -> list[list[Any]]:
    """The main thread's stack in what faulthandler or py-spy print."""
    threads = re.split(r"\n(?=Thread |Current thread )", text)
    main = next((thread for thread in threads if "MainThread" in thread), threads[-1])
    found = re.findall(r'^ +File "(.+)", line (\d+) in (.+)$', main, re.MULTILINE)
    found += [(file, line, name) for name, file, line in re.findall(r"^ +(\S+) \((.+):(\d+)\)$", main, re.MULTILINE)]
    hidden = [str(Path(__file__).resolve().with_name(name)) for name in ("record.py", "script.py", "hang.py")]
    return [[file, int(line), name] for file, line, name in found if not file.startswith((*hidden, "<frozen"))]


# ---- source ----
@lru_cache
def parsed(file: str) -> ast.Module:
    try:
        return ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):  # another machine's file, a notebook's cell
        return ast.Module([], [])


def holds(part: list[ast.stmt], line: int) -> bool:
    return bool(part) and part[0].lineno <= line <= (part[-1].end_lineno or 0)


def branches(file: str, line: int) -> dict[ast.If, bool]:
    """The if statements around a line, and whether the line is in the part that is run if the condition is true."""
    conditions = [node for node in ast.walk(parsed(file)) if isinstance(node, ast.If)]
    true = {node: True for node in conditions if holds(node.body, line)}
    return true | {node: False for node in conditions if holds(node.orelse, line)}


def loops(file: str, line: int) -> set[ast.AST]:
    """The loops around a line."""
    nodes = ast.walk(parsed(file))
    return {node for node in nodes if isinstance(node, ast.For | ast.While) and holds(node.body, line)}


def fork(one: Call, other: Call) -> tuple[tuple[str, int, str], tuple[str, int, str]]:
    """The outermost frames in which the two calls differ: where the ranks' ways through the script part."""
    pairs = zip(reversed(one.where), reversed(other.where))
    return next((pair for pair in pairs if pair[0] != pair[1]), (one.site, other.site))
