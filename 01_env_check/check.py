"""Can these machines train together? Compares facts, knows bad versions, verifies collectives, measures links.

    python 01_env_check/check.py                                   this machine alone
    torchrun --nproc-per-node 2 01_env_check/check.py              two ranks on it
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 01_env_check/check.py

Read the last line first: "all well" (exit code 0), or the number of findings (1). A FINDING names the ranks, and the
line below it says what to do. Bad usage: one line, exit code 2.

Nothing here can hang: the ranks talk through the key-value store that torchrun serves, before any process group
exists. Each step runs in a thread that is left behind when its time is up:

    rank 0   facts ----> clock ----> process group ----> all_reduce, ... ----> speed ----> pair 0-1, ... ----> report
    rank 1   facts ----> clock ----> process group ----> all_reduce, ... ----> speed ----> pair 0-1, ...
                    ^ after each step every rank leaves its outcome in the store; who did not is named

busbw and its factors: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
"""

import argparse
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
import links
import rules
from facts import XidWatch, collect
from rules import Facts, Line, name_ranks

from common.process_group import (  # copied this folder out? copy common/ beside it or into it
    UsageError,
    choose_device,
    read_environment,
)

GRACE_S = 1.0  # for outcomes to travel through the store after a step's time is up
REACH = (
    "do the host names lead to addresses that all ranks can reach? Else set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; "
    "a large job needs more time: --timeout 60"
)


# ---- config ----
def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=10, help="seconds for each step (default 10)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", metavar="FILE", help="write everything to a file as well (rank 0)")
    parser.add_argument("--brief", action="store_true", help="one line a section, and the findings")
    return parser.parse_args()


# ---- steps ----
class Stop(Exception):
    """A step did not end well on every rank; its lines say where. No later step can run."""

    def __init__(self, lines: list[Line], usage: Sequence[str] = (), alone: bool = False):
        self.lines = lines
        self.usage = usage  # mistakes of the user, named with their ranks
        self.alone = alone  # rank 0 is out of reach, so this rank has to speak for itself


def attempt(work: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """Runs work in a thread: {"value": v}, {"error": text}, {"usage": text}, or {"late": True} when time is up.

    A call that is stuck in C++ or in the driver cannot be interrupted; the thread is left behind and the process ends
    by os._exit.
    """
    box: list[dict[str, Any]] = []

    def run() -> None:
        try:
            box.append({"value": work()})
        except UsageError as error:
            box.append({"usage": str(error)})
        except Exception as error:
            box.append({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"})

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return box[0] if box else {"late": True}


class Team:
    """The ranks, talking through the store alone."""

    def __init__(self, rank: int, world_size: int, timeout: float):
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.store: dist.Store = dist.HashStore()  # one process alone needs no port
        self.side = self.store  # a connection for the work in a step, which may block it
        self.steps = 0  # every rank counts the same: a step of the same name has keys of its own

    def connect(self) -> None:
        """Joins torchrun's store, or one served by rank 0 at MASTER_ADDR:MASTER_PORT; waits for no other rank."""
        if not os.environ.get("RANK"):
            return
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        outcome = attempt(lambda: self.join(host, port, serves), self.timeout + GRACE_S)
        if "EADDRINUSE" in outcome.get("error", ""):
            raise UsageError(f"{host}:{port} is in use: choose another --master-port, or end the job that holds it")
        if "value" not in outcome:
            remedy = f"is rank 0 up, is {host} the first node's address here too, is port {port} open and its own?"
            text = f"rank {self.rank}: no answer from {host}:{port} within {self.timeout:g} s"
            raise Stop([Line("steps", "store", "FINDING", text, remedy)], alone=True)

    def join(self, host: str, port: int, serves: bool) -> None:
        patience = timedelta(seconds=self.timeout)
        store = dist.TCPStore(host, port, is_master=serves, timeout=patience, wait_for_workers=False)
        attempts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives a restart
        self.store = dist.PrefixStore(f"env_check{attempts}", store)
        self.side = self.store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs

    def step(self, name: str, work: Callable[[], Any]) -> list[Any]:
        """Runs work on every rank and returns every rank's value, in rank order. Raises Stop on every rank."""
        self.steps += 1
        end = time.monotonic() + self.timeout + GRACE_S
        outcome = attempt(work, self.timeout)
        shared = attempt(lambda: self.share(f"step{self.steps}", outcome, end), end - time.monotonic() + GRACE_S)
        outcomes = shared.get("value")
        if outcomes is None:
            outcomes = {str(self.rank): outcome}  # without rank 0, or without the store, each rank knows itself alone
        if len(outcomes) == self.world_size and all("value" in one for one in outcomes.values()):
            return [outcomes[str(rank)]["value"] for rank in range(self.world_size)]
        usage = [f"rank {rank}: {one['usage']}" for rank, one in outcomes.items() if "usage" in one]
        raise Stop(self.explain(name, outcomes), usage, alone="0" not in outcomes)

    def share(self, key: str, outcome: dict[str, Any], end: float) -> dict[str, Any]:
        """Leaves this rank's outcome in the store; rank 0 gathers those that come in time, and hands out all."""
        self.store.set(f"{key}/{self.rank}", json.dumps(outcome))
        if self.rank == 0:
            keys = {rank: f"{key}/{rank}" for rank in range(self.world_size)}
            self.wait([*keys.values()], end)
            there = [rank for rank in keys if self.store.check([keys[rank]])]
            outcomes = {rank: json.loads(self.store.get(keys[rank])) for rank in there}
            self.store.set(f"{key}/all", json.dumps(outcomes))
        elif not self.wait([f"{key}/all"], end + GRACE_S / 2):
            raise TimeoutError
        return json.loads(self.store.get(f"{key}/all"))

    def wait(self, keys: list[str], end: float) -> bool:
        """Waits for keys in the store until `end` (time.monotonic); True if all came. Asks less and less often."""
        pause = 0.001
        while not (there := self.store.check(keys)) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(1.2 * pause, 0.02)
        return there

    def explain(self, name: str, outcomes: dict[str, Any]) -> list[Line]:
        """Who is missing, who failed, and who waits for them."""
        silent = [rank for rank in range(self.world_size) if str(rank) not in outcomes] if "0" in outcomes else [0]
        failed = {rank: one["error"] for rank, one in outcomes.items() if "error" in one}
        late = [int(rank) for rank, one in outcomes.items() if "late" in one]
        lines = []
        if silent:
            text = f"{name_ranks(silent)} did not answer in '{name}' within {self.timeout:g} s"
            remedy = "see that rank's own output: did it start, was it killed or stopped? More time: --timeout 60"
            lines.append(Line("steps", name, "FINDING", text, remedy))
        for error, ranks in rules.group(list(failed.values())).items():
            text = f"{name_ranks(int(list(failed)[i]) for i in ranks)} failed in '{name}': {error}"
            remedy = REACH if name == "process group" else "read the output of that rank"
            lines.append(Line("steps", name, "FINDING", text, remedy))
        if late:
            text = f"{name_ranks(late)} still in '{name}' after {self.timeout:g} s"
            remedy = REACH if name == "process group" else "a slow or large job? --timeout 60"
            remedy = "they wait for the rank named above" if silent or failed else remedy
            lines.append(Line("steps", name, "FINDING", text, remedy))
        return lines


# ---- clock ----
def clock_offset(team: Team) -> tuple[float, float]:
    """(seconds by which rank 0's clock is ahead of this rank's, +- seconds): the best of five round trips, halved."""
    best = (0.0, float("inf")) if team.rank else (0.0, 0.0)
    for rank, turn in itertools.product(range(1, team.world_size), range(5)):
        key = f"clock/{rank}/{turn}"
        if team.rank == 0:
            team.side.get(f"{key}/ask")  # blocks until it is there
            team.side.set(f"{key}/answer", repr(time.time()))
        elif team.rank == rank:
            sent = time.time()
            team.side.set(f"{key}/ask", "")
            answer = float(team.side.get(f"{key}/answer"))
            half = (time.time() - sent) / 2
            best = min(best, (answer - sent - half, half), key=lambda pair: pair[1])
    return best


# ---- report ----
def matrix(title: str, size: int, cell: Callable[[int, int], str]) -> list[str]:
    rows = [[title, *(f"r{b}" for b in range(size))]]
    rows += [[f"  rank {a}", *(cell(a, b) if a != b else "X" for b in range(size))] for a in range(size)]
    return ["".join(text.ljust(22) if i == 0 else text.rjust(7) for i, text in enumerate(row)) for row in rows]


def print_report(found: dict[str, Any], brief: bool) -> None:
    lines: list[Line] = found["lines"]
    print(found["title"])
    for section, members in itertools.groupby(lines, key=lambda line: line.section):
        shown = list(members)
        if brief:
            bad = [line for line in shown if line.verdict == "FINDING"]
            shown = bad or [Line(section, "", "OK", f"lines: {len(shown)}")]
        for line in shown:
            print(f"{line.verdict:<8} {line.section:<12} {line.name:<16} {line.text}")
            if line.remedy and line.verdict == "FINDING":
                print(f"{'':<8} {'':<12} {'':<16} -> {line.remedy}")
    for text in [] if brief else found["pictures"]:
        print(text)
    findings = sum(line.verdict == "FINDING" for line in lines)
    can = f"{found['world_size']} ranks can train together" if found["world_size"] > 1 else "this rank can train"
    print(f"{findings} finding{'s' * (findings > 1)}: each says what to do" if findings else f"all well: {can}")


# ---- main ----
def examine(team: Team, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Runs every step in order and fills `found`; raises Stop at the first that does not end on every rank."""
    rank, local_rank, n, local_world_size = read_environment()
    lines: list[Line] = found["lines"]

    def look() -> Facts:
        if rank == 0 and args.json:
            try:
                open(args.json, "a").close()
            except OSError as error:
                raise UsageError(f"--json {args.json}: {error.strerror}; give a file in a folder that exists") from None
        try:
            own, error_text = choose_device(args.device, local_rank, local_world_size), None
        except RuntimeError as error:  # the GPU is there and does not start
            own, error_text = torch.device("cpu"), str(error).splitlines()[0]
        facts = collect(own, local_rank) | {"asked": args.device}
        return facts | ({"gpu_error": error_text} if error_text else {})

    facts = team.step("facts", look)
    found["facts"] = facts
    over = rules.backend(facts)
    device = torch.device("cuda", local_rank) if over == "nccl" else torch.device("cpu")
    version, num_nodes = facts[0]["torch"].split("+")[0], len(rules.nodes(facts))
    size = f"{n} rank{'s' * (n > 1)} on {num_nodes} node{'s' * (num_nodes > 1)}"
    found["title"] = f"env check: {size}, {over} on {device.type}, torch {version}"
    lines += rules.judge(facts)
    lines.append(rules.judge_clock(team.step("clock", lambda: clock_offset(team))))
    lines.sort(key=lambda line: ("software", "machine", "network", "gpu").index(line.section))
    try:
        issues = rules.load_issues()
        known = rules.match(issues, facts)
        lines.append(Line("known issues", "table", "OK", f"{len(known)} of {len(issues)} rules fit"))
        lines += known
    except ModuleNotFoundError as error:
        lines.append(Line("known issues", "table", "FINDING", "not checked", str(error)))
    found["topology"] = [[links.kind(a, b) if a is not b else "X" for b in facts] for a in facts]
    if n <= 16:
        found["pictures"] += matrix("topology", n, lambda a, b: found["topology"][a][b])

    xids: list[XidWatch] = []

    def form() -> None:
        xids.append(XidWatch(facts[rank]["gpu"]["uuid"] if facts[rank]["gpu"] else None))
        patience = timedelta(seconds=10 * team.timeout)  # beyond every step: the steps have the first word
        store, device_id = dist.PrefixStore("group", team.side), device if over == "nccl" else None
        dist.init_process_group(over, None, patience, n, rank, store, device_id=device_id)

    team.step("process group", form)
    right = True
    for name in links.COLLECTIVES:
        wrong = team.step(name, lambda name=name: links.wrong_values(name, rank, n, device))  # type: ignore[misc]
        right = right and not any(wrong)
        lines.append(links.judge_values(name, wrong))
    if n == 1:
        lines.append(Line("speed", "alone", "info", "one rank sends nothing: start with torchrun --nproc-per-node 2"))
        return
    rates = []  # GB/s
    for name in links.MEASURED if right else ():  # wrong values would also upset the time-keeping
        measured = team.step(f"speed of {name}", lambda name=name: links.measure(name, n, device))  # type: ignore[misc]
        latency, busbw = measured[0]  # the same on every rank
        found["speed"][name] = {"latency_s": latency, "busbw_gb_s": busbw}
        lines.append(links.judge_speed(name, latency, busbw, facts))
        rates.append(busbw)
    in_2_ms = min(rates, default=1.0) * 1e9 * 0.002  # bytes: long enough to measure, short enough for many pairs
    nbytes = min(max(in_2_ms, 512 << 10), links.LARGE[device.type])
    pairs, speeds = links.judge_pairs(team.step, rank, facts, int(nbytes) // 4, device)
    lines += pairs
    found["pairs_gb_s"] = {f"{a} -> {b}": rate for (a, b), rate in sorted(speeds.items())}
    if n <= 16:
        found["pictures"] += matrix("GB/s from row to col", n, lambda a, b: f"{speeds[a, b]:.2f}")
    for bad, numbers in enumerate(team.step("Xid", lambda: xids[0].seen())):
        if numbers:
            text = f"rank {bad}: the driver reported Xid {numbers} during this check"
            lines.append(Line("gpu", "Xid", "FINDING", text, "look the number up in NVIDIA's table of Xid errors"))


def part(team: Team) -> None:
    """Rank 0 may hold the store: it leaves when the others have left, and they wait until it has printed."""

    def leave() -> None:
        end = time.monotonic() + GRACE_S
        if team.rank:
            team.wait(["printed"], end)
            team.store.set(f"left/{team.rank}", "")
        else:
            team.store.set("printed", "")
            team.wait([f"left/{rank}" for rank in range(1, team.world_size)], end)

    attempt(leave, 2 * GRACE_S)


def main() -> int:
    args = parse_args()
    found: dict[str, Any] = {"title": "env check", "lines": [], "facts": [], "pictures": []}
    found |= {"speed": {}, "pairs_gb_s": {}}
    usage: Sequence[str] = ()
    alone = stuck = False
    try:
        if args.timeout <= 0:
            raise UsageError(f"--timeout {args.timeout:g} is not above 0 seconds: use --timeout 10")
        rank, _, found["world_size"], _ = read_environment()
        team = Team(rank, found["world_size"], args.timeout)
        team.connect()
        examine(team, args, found)
    except UsageError as error:
        print(f"[rank{os.environ.get('RANK', 0)}] error: {error}", file=sys.stderr)
        return 2
    except Stop as stop:
        found["lines"] += stop.lines
        usage, alone, stuck = stop.usage, stop.alone, True
    code = 2 if usage else int(any(line.verdict == "FINDING" for line in found["lines"]))
    if usage and rank == 0:
        print(f"[rank0] error: {usage[0]}", file=sys.stderr)
    elif rank == 0:
        print_report(found, args.brief)
        if args.json:
            lines = [line._asdict() for line in found["lines"]]
            Path(args.json).write_text(json.dumps({**found, "lines": lines, "exit_code": code}, indent=1) + "\n")
    elif alone:
        for line in (line for line in found["lines"] if line.verdict == "FINDING"):
            print(f"[rank{rank}] {line.verdict} {line.text} -> {line.remedy}", file=sys.stderr)
    if not alone:
        part(team)
    if not stuck:
        attempt(dist.destroy_process_group, GRACE_S)
    sys.stdout.flush()
    sys.stderr.flush()
    if stuck:
        os._exit(code)  # threads are left in calls that never return
    return code


if __name__ == "__main__":
    raise SystemExit(main())
