"""Why does this job stand still? Runs your script, watches every rank, names the cause, and ends the job.

    python 07_diagnostics/hang.py run --ranks 2 -- train.py --your --flags            one machine, without a launcher
    torchrun --nnodes 2 --nproc-per-node 8 .. 07_diagnostics/hang.py run -- train.py --your --flags     or srun, mpirun
    python 07_diagnostics/hang.py lab skip                   causes a hang, to see what it says; lab --list: all of them

Nothing is said while the job is well. When no rank has progressed for --timeout seconds, or a rank fails: the cause,
the rank, where every rank is, the way out. Exit code: the script's own; 124 for a job that stood still; 2 for bad use.

    hang.py on each rank:     starts    record.py + your script  --> beat, record, call, stack: files of that rank
                              reads     these files, and /proc: stopped, dead, computing
    hang.py of rank 0:        judges    all ranks, which the others report over TCP --> verdict.py --> "end"
"""

import argparse
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import verdict
from child import POLL_S, Child, end_all
from record import SIGNAL, become
from records import Call, Rank, as_calls, say_ranks, shown_stack, where_is
from verdict import Verdict

HERE = Path(__file__).parent
SETTLE_S = 2  # after the first failure: the other ranks need that long to notice, and the cause may be among them
LATE_S = 6  # for the records of all ranks to arrive
PORTS = 3  # tried for the reports: above 32768, the one after MASTER_PORT may be any connection's of this machine
STARTS = 10  # times the timeout, for a rank that computes before its first collective
STOOD_STILL = 124  # as timeout(1) has it


class UsageError(ValueError):
    """The user's mistake: one line and exit code 2."""


# ---- config ----
def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in (("run", "run a script and watch it"), ("lab", "cause a hang on the CPU, and watch it")):
        command = commands.add_parser(name, help=about, description=about)
        seconds = 300 if name == "run" else 3
        about = f"seconds without progress that are a hang (default {seconds})"
        command.add_argument("--timeout", type=float, default=seconds, help=about)
        command.add_argument("--grace", type=float, default=5, help="seconds between SIGTERM and SIGKILL (default 5)")
        command.add_argument("--json", action="store_true", help="print one JSON object; the script writes to stderr")
        if name == "run":
            command.add_argument("--ranks", type=int, default=1, help="processes, where no launcher started this")
            command.add_argument("--port", type=int, help="of rank 0, for reports (default: MASTER_PORT + 1, 2 or 3)")
            command.add_argument("script", nargs=argparse.REMAINDER, help="-- train.py --your --flags, or -- -m module")
        else:
            command.add_argument("--list", action="store_true", help="the labs")
            command.add_argument("name", nargs="?", metavar="NAME", help="one of them")
    return parser.parse_args()


def check_script(script: list[str]) -> list[str]:
    script = script[1:] if script[:1] == ["--"] else script
    if not script or script == ["-m"]:
        raise UsageError("0 scripts given, 1 needed: hang.py run --ranks 2 -- train.py --your --flags")
    if script[0] != "-m" and not Path(script[0]).is_file():
        raise UsageError(f"no file {script[0]}: give the path of your script, or -m and a module")
    return script


# ---- several watchers ----
class Hub:
    """Rank 0's: keeps what the other watchers report, a line of JSON each, and tells them when it is over."""

    def __init__(self, ports: list[int], greeting: str, expected: set[int]):
        reasons = []
        for port in ports:
            try:
                self.server = socket.create_server(("", port), backlog=4096)
                break
            except OSError as error:
                reasons.append(f"port {port} on this machine: {os.strerror(error.errno or 0)}")
        else:
            raise UsageError(f"{'; '.join(reasons)}; choose another with --port")
        self.greeting = greeting
        self.ranks = {rank: Rank(rank) for rank in expected}
        self.moved: dict[int, float] = dict.fromkeys(expected, time.monotonic())
        self.heard: dict[int, float] = {}  # rank -> when it last reported
        self.connections: list[socket.socket] = []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            connection, _ = self.server.accept()
            with suppress(OSError):
                connection.sendall(self.greeting.encode())
            self.connections.append(connection)
            threading.Thread(target=self.listen, args=(connection,), daemon=True).start()

    def listen(self, connection: socket.socket) -> None:
        rank = None
        for line in connection.makefile("r"):
            report = json.loads(line)
            rank = report["rank"]
            self.heard[rank] = time.monotonic()
            self.moved[rank] = time.monotonic() - report.pop("still")
            calls = as_calls(report["calls"]) if "calls" in report else self.ranks[rank].calls
            self.ranks[rank] = Rank(**report | {"calls": calls})
        if rank is not None and self.ranks[rank].state != "ended":
            self.ranks[rank].state = "lost"

    def lose_silent(self, seconds: float) -> None:
        """A machine that is cut off closes no connection: its watcher, who reports once a second, falls silent."""
        for rank, heard in self.heard.items():
            if self.ranks[rank].state != "ended" and time.monotonic() - heard > seconds:
                self.ranks[rank].state = "lost"

    def end(self, code: int) -> None:
        for connection in self.connections:
            with suppress(OSError):  # that one has gone already
                connection.sendall(f"{code}\n".encode())


class Spoke:
    """Another rank's: reports to rank 0, and learns from it when it is over."""

    def __init__(self, host: str, ports: list[int], greeting: str, patience: float, timeout: float):
        deadline = time.monotonic() + patience
        while not self.greeted(host, ports, greeting):
            if time.monotonic() > deadline:
                where = f"{host}, port {' or '.join(map(str, ports))}, in {patience:g} s ({self.reason})"
                raise UsageError(f"no watcher of rank 0 at {where}: is that port open?")
            time.sleep(POLL_S)
        self.sent: list[Call] | None = None
        self.connection.settimeout(None)
        # What it sends must arrive some time: else this machine is cut off, and nobody will tell it to end.
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * (timeout + LATE_S)))
        self.code: int | None = None
        threading.Thread(target=self.listen, daemon=True).start()

    def greeted(self, host: str, ports: list[int], greeting: str) -> bool:
        """Is one of the ports that of rank 0's watcher? Another job's may be there, or who knows what."""
        for port in ports:
            try:
                self.connection = socket.create_connection((host, port), timeout=2)
                self.lines = self.connection.makefile("r")
                if self.lines.readline() == greeting:
                    return True
                self.reason = f"something else answers at {port}"
            except (OSError, ValueError) as error:
                self.reason = str(error)
        return False

    def listen(self) -> None:
        line = ""
        with suppress(OSError):
            line = self.lines.readline()
        if not line:
            print("hang.py: no more word from rank 0's watcher: it ended, or this machine is cut off", file=sys.stderr)
        self.code = int(line or 1)

    def report(self, child: Child) -> None:
        row = vars(child.status) | {"still": time.monotonic() - child.moved}
        if child.status.calls is self.sent:
            del row["calls"]  # long, and known
        self.sent = child.status.calls
        with suppress(OSError):  # listen() sees the end, too
            self.connection.sendall(json.dumps(row).encode() + b"\n")


# ---- watching ----
def watch(children: list[Child], hub: Hub | None, timeout: float) -> tuple[Verdict | None, dict[int, Rank]]:
    """Waits for the job's end, or for its failure, or for `timeout` seconds without progress."""
    failed_at, began, told = None, time.monotonic(), False
    patient_since = began
    while True:
        for child in children:
            child.look()
        ranks = {child.status.rank: child.status for child in children} | (hub.ranks if hub else {})
        now = time.monotonic()
        if all(one.state == "ended" and one.code == 0 for one in ranks.values()):
            return None, ranks
        if failed := [one for one in ranks.values() if one.code or one.error or one.state == "lost"]:
            failed_at = failed_at or now
            late = any(one.error and not one.recorded for one in ranks.values())
            over = now - failed_at > SETTLE_S + (LATE_S if late else 0)
            if over or all(one.state in ("ended", "lost") for one in ranks.values()):
                found, code = verdict.find_cause(ranks), next((one.code for one in failed if one.code), 1)
                return found._replace(code=found.code or (code if code > 0 else 128 - code)), ranks
        moved = [child.moved for child in children if child.status.state != "ended"]
        moved += [hub.moved[rank] for rank, one in hub.ranks.items() if one.state != "ended"] if hub else []
        still = now - max(moved, default=now)
        complete = all(one.recorded or one.state != "running" for one in ranks.values())
        if still > timeout + (0 if complete else LATE_S) and now - patient_since > timeout:
            if hub:
                hub.lose_silent(max(timeout / 2, LATE_S))
            found = verdict.find_cause(ranks, starting=now - began < STARTS * timeout)
            if found.cause != "working":
                return found, ranks
            patient_since = now
            if not told and any(any(one.count) for one in ranks.values()):
                told = True
                print(f"hang.py: no call for {timeout:g} s; {found.why}: {found.fix}", file=sys.stderr)
        time.sleep(POLL_S)


def follow(child: Child, spoke: Spoke) -> int:
    """Reports to rank 0's watcher, until that one says that it is over."""
    while spoke.code is None:
        child.look()
        spoke.report(child)
        time.sleep(5 * POLL_S)
    return spoke.code


def run(script: list[str], num_ranks: int, timeout: float, grace: float, port: int | None, as_json: bool) -> int:
    if not (timeout > 0 and grace >= 0 and num_ranks > 0):
        raise UsageError(f"--timeout {timeout:g} and --ranks {num_ranks} must be above 0, --grace {grace:g} not below")
    launched = os.environ.get("RANK") is not None
    rank, world_size = (int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", num_ranks)))
    host, hub, spoke = os.environ.get("MASTER_ADDR", "127.0.0.1"), None, None
    master_port = int(os.environ.get("MASTER_PORT", 29500))
    ports = [port] if port else [master_port + n for n in range(1, PORTS + 1)]
    greeting = f"hang.py of the job at port {master_port}\n"
    if launched and rank == 0 and world_size > 1:
        hub = Hub(ports, greeting, set(range(1, world_size)))
    elif launched and rank:
        spoke = Spoke(host, ports, greeting, 60, timeout)
    reserved = socket.socket()  # bound, not listening: rank 0 of the script may listen there, nobody else is given it
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    shared_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="hang-", dir=shared_memory))
    children: list[Child] = []
    signal.signal(SIGNAL, signal.SIG_IGN)  # inherited: it ends nobody who does not, or no longer, write stacks on it
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        for one in [rank] if launched else range(num_ranks):
            env = dict(RANK=one, LOCAL_RANK=one, WORLD_SIZE=num_ranks, LOCAL_WORLD_SIZE=num_ranks)
            env |= dict(MASTER_PORT=reserved.getsockname()[1])
            env |= {} if "OMP_NUM_THREADS" in os.environ or num_ranks == 1 else dict(OMP_NUM_THREADS=1)  # as torchrun
            texts = {name: str(value) for name, value in env.items()} | dict(MASTER_ADDR="127.0.0.1")
            output = sys.stderr if as_json else None
            children.append(Child(one, folder / str(one), {} if launched else texts, script, timeout, output))
        if spoke:
            return follow(children[0], spoke)
        found, ranks = watch(children, hub, timeout)
        code = (found.code or STOOD_STILL) if found else 0
        if found or as_json:
            still = time.monotonic() - max(child.moved for child in children)
            print(as_object(found, ranks) if as_json else as_lines(found, ranks, still), flush=True)  # type: ignore[arg-type]
        if hub:
            hub.end(code)
        return code
    finally:
        end_all(children, grace)
        shutil.rmtree(folder, ignore_errors=True)


# ---- report ----
def as_lines(found: Verdict, ranks: dict[int, Rank], still: float) -> str:
    lines: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        lines.setdefault(where_is(ranks[rank], ranks), []).append(rank)
    rows = [("cause", found.cause), ("why", found.why), ("rank", say_ranks(found.ranks).partition(" ")[2])]
    rows += [("fix", found.fix)] + ([("after", f"{still:.0f} s without progress")] if not found.code else [])
    rows += [(say_ranks(some).replace("ranks", "rank"), text) for text, some in lines.items()]
    for rank in found.ranks[:2]:
        rows += [(f"stack {rank}" if i == 0 else "", line) for i, line in enumerate(shown_stack(ranks[rank]))]
    return "\n".join(f"{name:<9} {text}" for name, text in rows)


def as_object(found: Verdict | None, ranks: dict[int, Rank]) -> str:
    answer: dict[str, Any] = dict(cause="none", ranks=[], why="", fix="", exit_code=0)
    if found:
        answer = dict(cause=found.cause, ranks=found.ranks, why=found.why, fix=found.fix)
        answer["exit_code"] = found.code or STOOD_STILL
    answer["where"] = {rank: where_is(ranks[rank], ranks) for rank in sorted(ranks)}
    answer["pending"] = {rank: [call._asdict() for call in ranks[rank].pending()] for rank in sorted(ranks)}
    answer["stacks"] = {rank: shown_stack(ranks[rank]) for rank in (found.ranks if found else [])}
    return json.dumps(answer, indent=1)


# ---- main ----
def main() -> int:
    if sys.argv[1:2] == ["record"]:  # in the place of `python script`
        folder, every, patience = sys.argv[2:5]
        become(Path(folder), float(every), float(patience), sys.argv[5:])
        return 0
    args = parse_args()
    try:
        if args.command == "run":
            return run(check_script(args.script), args.ranks, args.timeout, args.grace, args.port, args.json)
        from labs import labs  # it needs torch, and to watch does not

        if args.list:
            print("\n".join(f"{name:<10} {lab.ranks} ranks  {lab.about}" for name, lab in labs().items()))
            return 0
        if args.name not in labs():
            raise UsageError(f"lab {args.name}: not one of the {len(labs())} labs {', '.join(labs())}")
        script = [str(HERE / "labs.py"), args.name]
        return run(script, labs()[args.name].ranks, args.timeout, args.grace, None, args.json)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
