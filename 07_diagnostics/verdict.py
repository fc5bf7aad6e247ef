"""From where every rank is, to the cause: `find_cause` is a function of the ranks' records alone.

ended badly?    killed, aborted, raised          the first to fail, unless its calls do not match the others'
stopped?        state T of /proc                 somebody sent SIGSTOP, or a debugger holds it
calls differ?   number n of a group is not       skipped, another order, other sizes, a call of one rank alone,
                the same call on all ranks       ranks that left a loop before the others
not arrived?    a rank that others wait for,     slow in its data, in a save, in the optimizer; computes; idle
                and that waits for nobody
a circle?       ranks that wait for each other   another group, sends and receives that do not match
"""

import ast
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from records import (
    BUSY,
    DOES,
    Call,
    Rank,
    activity,
    at,
    branches,
    fork,
    loops,
    members,
    say_call,
    say_group,
    say_last,
    say_ranks,
    say_signal,
    say_transfer,
    they,
)

FIXES = {
    "killed_rank": "SIGKILL mostly means that memory was short: dmesg -T | grep -i 'killed process'; sacct -j JOB",
    "user_code_error": "the traceback of that rank, above, is the one that matters; the other ranks only miss it",
    "machine_lost": "look at that machine: down, rebooted, or cut off from the network",
    "stopped_process": "kill -CONT PID; who stopped it? A debugger, a terminal (Ctrl-Z), a batch system that suspends",
    "skipped_collective": "call it on every rank of the group: no `continue`, `break` or condition of one rank there",
    "rank_conditional_collective": "call it on every rank, and keep only the printing and writing for one rank",
    "collective_order": "the same order on every rank: sort before a loop over a set, no branch on the rank",
    "collective_size_mismatch": "equal shapes and types on all ranks: pad, or exchange the sizes first",
    "collective_mismatch": "every rank of a group must call the same collectives in the same order",
    "uneven_inputs": "as many batches on every rank: DistributedSampler, drop_last=True, or DDP's join()",
    "wrong_group": "all ranks of a group must name that group in the call: pass group= where the groups are made, once",
    "mismatched_send_recv": "every send needs its recv at the same time: let one side send first, or batch_isend_irecv",
    "slow_data": "that rank's data: a slow disk or shard, too few workers, a stuck worker; py-spy dump --pid PID",
    "slow_save": "the others wait while it writes: a longer --timeout, a barrier after it, or an asynchronous save",
    "slow_optimizer": "its stack says where: more parameters than the others, or states on the CPU?",
    "slow_rank": "its stack says what it computes: more work than the others, a slower device, a first compilation",
    "idle_rank": "its stack says what it waits for: a lock, a file, a network; py-spy dump --native --pid PID",
    "not_started": "is every rank started, with the same world size and address?",
    "working": "a longer --timeout, if its steps take that long",
    "unknown": "the calls above; py-spy dump --native --pid PID on the machine of each rank",
}
MISSES_PEER = re.compile(  # torch's errors on ranks that only miss another one
    r"(RuntimeError|Dist\w*Error): .*(closed by peer|reset by peer|refused|broken pipe|timed? ?out|remote|abort)", re.I
)
ONE_RANK = re.compile(  # a condition that one rank alone meets
    r"rank\w*(\(\))? == 0|not \w*rank\w*(\(\))?$|rank\w* in \(-1, 0\)|is_\w*(main|master|first|zero)|main_process"
)


class Verdict(NamedTuple):
    cause: str
    ranks: list[int]  # that are to blame
    why: str
    code: int = 0  # exit code of the process that failed first

    @property
    def fix(self) -> str:
        return FIXES[self.cause]


# ---- ended badly ----
def ended_badly(ranks: dict[int, Rank]) -> Verdict | None:
    """The first rank that failed by itself: ended by a signal, by what it raised, or without a word."""
    failed = [one for one in ranks.values() if one.error or (one.state == "ended" and one.code)]
    killed = sorted((one for one in failed if (one.code or 0) < 0), key=lambda one: one.ended)
    raised = [one for one in failed if one.error and not MISSES_PEER.search(one.error["text"])]
    silent = [one for one in failed if not one.error and one not in killed]
    for first in killed:
        if first.code == -signal.SIGABRT and first.last and (mismatch := sizes_at_abort(ranks, first)):
            return mismatch
    if killed:
        first = killed[0]
        doing = f"; its last call was {say_last(first.last)}" if first.last else ""
        why = f"{say_ranks([first.rank])} was ended by {say_signal(first.code or 0)}{doing}"
        return Verdict("killed_rank", [first.rank], why, 128 - (first.code or 0))
    if raised:
        first = min(raised, key=lambda one: (one.error or {})["time"])
        error = first.error or {}
        why = f"{say_ranks([first.rank])} raised {error['text']} at {at(error['where'])}"
        return Verdict("user_code_error", [first.rank], why, first.code or 1)
    if silent:
        first = min(silent, key=lambda one: one.ended)
        why = f"{say_ranks([first.rank])} ended with exit code {first.code}"
        return Verdict("user_code_error", [first.rank], why, first.code or 1)
    return None


def sizes_at_abort(ranks: dict[int, Rank], one: Rank) -> Verdict | None:
    """gloo aborts the process that receives more than it expects: compare its last call with the others'."""
    lasts = {rank: other.last for rank, other in ranks.items() if other.last}
    mine = lasts[one.rank]
    alike = {r: last for r, last in lasts.items() if (last["op"], last["group"]) == (mine["op"], mine["group"])}
    sizes = Counter(last["size"] for last in alike.values())
    if len(sizes) < 2:
        return None
    before = Counter(call.size for other in ranks.values() for call in other.calls if call.done)
    usual = max(sizes, key=lambda size: (sizes[size], before[size]))
    odd = [rank for rank, last in alike.items() if last["size"] != usual]
    said = "; ".join(f"{say_ranks([r])} called {say_last(last)}" for r, last in [*alike.items()][:4])
    why = f"{said}; {say_ranks([one.rank])} got another size than it expected, and aborted"
    return Verdict("collective_size_mismatch", odd, why, 128 + signal.SIGABRT)


# ---- calls that differ ----
def first_difference(ranks: dict[int, Rank]) -> dict[int, Call]:
    """The calls {rank: call} of the first number in a group at which ranks called something else; {} if none did."""
    table: dict[tuple[str, int], dict[int, Call]] = {}
    for rank, one in ranks.items():
        for call in one.calls:
            table.setdefault((call.group, call.seq), {})[rank] = call
    differ = [calls for calls in table.values() if len({call.same for call in calls.values()}) > 1]
    if not differ:  # the same calls from other lines: one rank may be one call ahead, and that shows at the end
        stuck = {(call.group, call.seq) for one in ranks.values() for call in one.pending()}
        missed = {group for group, seq in stuck if any(ranks[r].reached(group) < seq for r in members(ranks, group))}
        lines = [c for (group, _), c in table.items() if group in missed and len({x.site for x in c.values()}) > 1]
        differ = [calls for calls in lines if shifted(ranks, calls)]
    return min(differ, key=lambda calls: next(iter(calls.values())).seq, default={})


def shifted(ranks: dict[int, Rank], calls: dict[int, Call]) -> bool:
    """True if, from here on, one rank calls from the lines from which another calls one number later."""

    def sites(rank: int, start: int) -> list[Any]:
        return [call.site for call in ranks[rank].calls if call.group == group and call.seq >= start]

    group, seq = next(iter(calls.values())).group, next(iter(calls.values())).seq
    for one in calls:
        for other in calls:
            ahead, behind = sites(one, seq), sites(other, seq + 1)
            if one != other and behind and ahead[: len(behind)] == behind:
                return True
    return False


def one_rank_alone(call: Call) -> str:
    """The condition around a call, or around one of its callers, that only one rank meets; "" without one."""
    for file, line, _ in call.where:
        for node, truth in branches(file, line).items():
            if truth and ONE_RANK.search(text := ast.unparse(node.test)):
                return f"`if {text}` ({Path(file).name}:{node.lineno})"
    return ""


def two_arms(one: Call, other: Call) -> str:
    """The condition, if the calls stand in the two parts of one if statement, and each part calls the other's, too."""

    def calls(part: list[ast.stmt], op: str) -> bool:
        names = [ast.unparse(node.func) for line in part for node in ast.walk(line) if isinstance(node, ast.Call)]
        return any(name.rpartition(".")[2].startswith(op) for name in names)

    (file, line, _), (other_file, other_line, _) = fork(one, other)
    arms = branches(other_file, other_line) if file == other_file else {}
    for node, truth in branches(file, line).items():
        both = all(calls(part, call.op) for part in (node.body, node.orelse) for call in (one, other))
        if arms.get(node) is (not truth) and both:
            return f" in the two parts of `if {ast.unparse(node.test)}` ({Path(file).name}:{node.lineno})"
    return ""


def has_left(call: Call, other: Call) -> bool:
    """True if `other` is in a loop that `call` is not in."""
    (file, line, function), (other_file, other_line, other_function) = fork(call, other)
    if (file, function) != (other_file, other_function):
        return False
    return bool(loops(other_file, other_line) - loops(file, line))


def is_ahead(call: Call, other: Call, before: list[Call]) -> bool:
    """True if `call` comes after `other` in the script: below it in the same function, or so in earlier steps."""
    (file, line, function), (other_file, other_line, other_function) = fork(call, other)
    if (file, function) == (other_file, other_function) and line != other_line:
        return line > other_line
    next_of = {(a.site, b.site) for a in before for b in before if b.seq == a.seq + 1}
    return (other.site, call.site) in next_of


def blame_difference(ranks: dict[int, Rank], calls: dict[int, Call]) -> Verdict:
    """Why the ranks' calls of one number differ, and whose is the odd one."""
    by_call: dict[Any, list[int]] = {}
    for rank, call in calls.items():
        by_call.setdefault((call.same, call.site), []).append(rank)
    first, second, *_ = sorted(by_call.values(), key=lambda some: (-len(some), min(some)))  # the majority, if any
    x, y, tie = calls[first[0]], calls[second[0]], len(first) == len(second)
    number = f"number {x.seq} of {say_group(ranks, x.group)}"
    differ = f"{number} is {say_call(x)} on {say_ranks(first)}, but {say_call(y)} on {say_ranks(second)}"
    of_group = {rank: [c for c in one.calls if c.group == x.group] for rank, one in ranks.items()}
    before = [c for some in of_group.values() for c in some if c.seq < x.seq]

    def after(rank: int, distance: int) -> Any:
        return next(((c.same, c.site) for c in of_group[rank] if c.seq == x.seq + distance), None)

    def swapped() -> bool:
        one, other = first[0], second[0]
        pair = after(one, 1) == (y.same, y.site) and after(other, 1) == (x.same, x.site)
        return pair and after(one, 2) == after(other, 2)  # and on they go together: else one of them is a call ahead

    def seen(call: Call) -> bool:
        return any(c.site == call.site for c in before)

    if (arms := two_arms(x, y)) or swapped():
        return Verdict("collective_order", second, f"{differ}: another order{arms}")
    if x.op == y.op and x.size != y.size and x.site == y.site:
        sizes = {c.size for c in before if c.site == x.site}
        if {x.size, y.size} <= sizes:  # both have gone through this line before, so only their order is new
            return Verdict("collective_order", second, f"{differ}: another order")
        return Verdict("collective_size_mismatch", first if tie and sizes == {y.size} else second, differ)
    for some, call in ((second, y), (first, x)):
        if some == [min(members(ranks, call.group))] and (condition := one_rank_alone(call)):
            return Verdict("rank_conditional_collective", some, f"{differ}: it stands inside {condition}")
    for some, call, other in ((second, y, x), (first, x, y)):
        if seen(other) and not seen(call) and has_left(call, other):
            why = f"{differ}: {say_ranks(some)} left the loop in which the others still are"
            return Verdict("uneven_inputs", some, why)
    if x.same == y.same:  # only the lines differ: who made fewer calls in all skipped one
        reached = [min(ranks[rank].reached(x.group) for rank in some) for some in (first, second)]
        fewer, missed = (first, y) if reached[0] < reached[1] else (second, x)
        return Verdict("skipped_collective", fewer, f"{differ}: {say_ranks(fewer)} did not call {say_call(missed)}")
    if not tie and seen(x) and not seen(y):
        why = f"{differ}: only {say_ranks(second)} ever called that"
        return Verdict("rank_conditional_collective" if len(second) == 1 else "collective_mismatch", second, why)
    ahead = first if is_ahead(x, y, before) and not is_ahead(y, x, before) else second
    if tie or ahead is second:
        missed = y if ahead is first else x
        return Verdict("skipped_collective", ahead, f"{differ}: {say_ranks(ahead)} did not call {missed.op} there")
    why = f"{differ}: {say_ranks(second)} alone called {y.op} there"
    return Verdict("rank_conditional_collective" if len(second) == 1 else "collective_mismatch", second, why)


# ---- who has not arrived ----
def blame_absent(ranks: dict[int, Rank], starting: bool) -> Verdict | None:
    """The ranks that others wait for while they wait for nobody; then ranks that wait for each other."""
    waits: dict[int, tuple[Call, list[int]]] = {}  # rank -> its call, the ranks that have not come to it
    for rank, one in ranks.items():
        for call in one.pending():
            missing = [r for r in members(ranks, call.group) if r != rank and ranks[r].reached(call.group) < call.seq]
            if missing:
                waits.setdefault(rank, (call, missing))
    transfers = {rank: some[0] for rank, one in ranks.items() if (some := one.awaited_transfers())}
    wanted = {r for _, missing in waits.values() for r in missing}
    wanted |= {note["to"] for note in transfers.values() if note.get("to") in ranks}
    roots = sorted(wanted - waits.keys() - transfers.keys())
    if left := [rank for rank in roots if ranks[rank].state == "ended"]:
        doing = [f"{say_ranks([rank])} waits in {say_call(call)}" for rank, (call, _) in waits.items()]
        doing += [f"{say_ranks([rank])} waits in {say_transfer(note)}" for rank, note in transfers.items()]
        return Verdict("uneven_inputs", left, f"{say_ranks(left)} ended, with exit code 0, while {doing[0]}")
    if roots:
        cause, where = activity(ranks[roots[0]])
        same = [rank for rank in roots if activity(ranks[rank])[0] == cause]
        if cause == "not_started" and starting and any(ranks[rank].busy > BUSY for rank in same):
            return Verdict("working", same, f"{they(same, 'is', 'are')} still setting up")
        return Verdict(cause, same, f"the others wait for {say_ranks(same)}: {DOES[cause]}, {at(where)}")
    if transfers:
        pairs = [f"{say_ranks([rank])} waits in {say_transfer(note)}" for rank, note in sorted(transfers.items())]
        return Verdict("mismatched_send_recv", sorted(transfers), "; ".join(pairs[:4]))
    by_group: dict[str, list[int]] = {}
    for rank, (call, _) in waits.items():
        by_group.setdefault(call.group, []).append(rank)
    if len(by_group) < 2:
        return None
    first, second, *_ = sorted(by_group.values(), key=lambda some: (-len(some), min(some)))
    x, y = waits[first[0]][0], waits[second[0]][0]
    used = {c.group for one in ranks.values() for c in one.calls if c.done and c.site == x.site}
    if len(first) == len(second) and used == {y.group}:
        first, second, x, y = second, first, y, x
    texts = [f"{say_call(call)}, {say_group(ranks, call.group)}" for call in (x, y)]
    why = f"{they(first, 'waits', 'wait')} in {texts[0]}; {say_ranks(second)} in {texts[1]}"
    return Verdict("wrong_group" if x.same == y.same else "collective_order", second, why)


# ---- the verdict ----
def find_cause(ranks: dict[int, Rank], starting: bool = False) -> Verdict:
    """Names the cause, and the ranks that are to blame, of a job that stands still or whose ranks end badly.

    starting: ranks that compute before their first collective (imports, data) are given time: "working".
    """
    for one in ranks.values():
        for note in one.transfers:  # the peer, by its rank in the group -> its rank
            group = next((r.groups[note["group"]]["ranks"] for r in ranks.values() if note["group"] in r.groups), None)
            note["to"] = note["peer"] if group is None or note["peer"] is None else group[note["peer"]]
    if lost := [rank for rank, one in ranks.items() if one.state == "lost"]:
        return Verdict("machine_lost", lost, f"no more word from the machine of {say_ranks(lost)}", 1)
    if verdict := ended_badly(ranks):
        return verdict
    if stopped := [rank for rank, one in ranks.items() if one.state == "stopped"]:
        pids = ", ".join(str(ranks[rank].pid) for rank in stopped)
        return Verdict("stopped_process", stopped, f"{they(stopped, 'is', 'are')} stopped: state T, pid {pids}")
    if calls := first_difference(ranks):
        return blame_difference(ranks, calls)
    if absent := [rank for rank, one in ranks.items() if not one.pid]:
        why = f"no word from {say_ranks(absent)}: never started, or it cannot reach hang.py of rank 0"
        return Verdict("not_started", absent, why)
    if verdict := blame_absent(ranks, starting):
        return verdict
    if failed := [one for one in ranks.values() if one.error]:  # each misses a peer, and none is known to have failed
        first = min(failed, key=lambda one: (one.error or {})["time"])
        left = [rank for rank, one in ranks.items() if one.state == "ended" and not one.code and not one.error]
        if left:  # torch counts a call that broke off as done, so none was pending
            why = f"{say_ranks(left)} ended, with exit code 0, while {say_ranks([first.rank])} was at"
            return Verdict("uneven_inputs", left, f"{why} {at((first.error or {})['where'])}", first.code or 1)
        why = f"{say_ranks([first.rank])} raised {(first.error or {})['text']}"
        return Verdict("unknown", [first.rank], why, first.code or 1)
    alive = [rank for rank, one in ranks.items() if one.state == "running"]
    if any(ranks[rank].pending() for rank in alive):
        return Verdict("unknown", alive, "every rank has come to its collective, and it does not end: network, device?")
    if late := [rank for rank in alive if ranks[rank].last and not ranks[rank].recorded]:
        return Verdict("unknown", late, f"{say_ranks(late)}: no record of its calls in time: an overloaded machine?")
    if all(ranks[rank].busy <= BUSY for rank in alive):
        cause, where = activity(ranks[alive[0]])
        return Verdict(cause, alive, f"{say_ranks(alive)}: {DOES[cause]}, {at(where)}")
    return Verdict("working", alive, f"{say_ranks(alive)}: no rank waits for another")
