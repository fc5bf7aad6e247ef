"""One try: the script's ranks as a job of its own, watched from outside and ended, so that nothing of it remains."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median, median_low
from typing import Any, NamedTuple

from fit_memory import Tree, has_gpu
from fit_search import Try

HERE = Path(__file__).parent
EVERY_S = 0.02  # between two looks; or nine times what a look takes: it costs at most a tenth of a processor
SETTLE_S = 3  # after the first rank left: the others notice, and the cause may be among them
LEAVE_S = 1  # for what a rank started to leave by itself, once the rank is gone
GONE_S = 10  # for what was killed to give its memory back
SHOWN = 100  # lines of a failed script's output
TIMED_OUT = 124  # as timeout(1) has it


class Setting(NamedTuple):
    """What is the same for all tries."""

    num_ranks: int | None  # None: python alone, without a launcher's variables
    steps: int
    keep: float  # share of the memory
    memory: int | None  # bytes that a rank may count on; None: what its GPU has, or its share of the host's
    host: int  # bytes: its share of the host's
    timeout: float

    @property
    def guard(self) -> int:
        """Bytes of host memory per rank at which a try is ended. On a machine with GPUs `memory` is a GPU's."""
        return self.host if has_gpu() else self.memory or self.host


# ---- the job ----
class Ranks:
    """The processes of a try, each with a session, a report and a file of output of its own."""

    def __init__(self, words: list[str], setting: Setting, folder: Path):
        self.folder = folder
        world_size = setting.num_ranks or 1
        self.port = socket.socket()  # bound, not listening: rank 0 may listen there, nobody else is given it
        self.port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.port.bind(("127.0.0.1", 0))
        given: dict[str, object] = dict(WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size, MASTER_ADDR="127.0.0.1")
        given |= dict(MASTER_PORT=self.port.getsockname()[1])
        given |= {} if "OMP_NUM_THREADS" in os.environ or world_size == 1 else dict(OMP_NUM_THREADS=1)  # as torchrun
        self.processes: list[subprocess.Popen] = []
        for rank in range(world_size):
            env = {name: str(value) for name, value in (given | dict(RANK=rank, LOCAL_RANK=rank)).items()}
            command = [sys.executable, str(HERE.resolve() / "fit_batch.py"), "rank", str(folder / f"{rank}.json")]
            env = os.environ | (env if setting.num_ranks else {})
            with open(folder / f"{rank}.out", "wb") as output:
                how: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
                command += [str(setting.steps), *words]
                self.processes.append(subprocess.Popen(command, env=env, start_new_session=True, **how))
        self.tree = Tree([process.pid for process in self.processes])

    def reports(self) -> dict[int, dict[str, Any]]:
        return {int(file.stem): json.loads(file.read_bytes()) for file in self.folder.glob("*.json")}

    def output(self, rank: int) -> str:
        return "\n".join((self.folder / f"{rank}.out").read_text(errors="replace").splitlines()[-SHOWN:])

    def end(self) -> None:
        """Kills the ranks together; then what they started and what has not left by itself. Waits until all is gone."""
        self.tree.refresh()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for seconds in (LEAVE_S, GONE_S):
            deadline = time.monotonic() + seconds
            while (left := self.tree.living()) and time.monotonic() < deadline:
                time.sleep(EVERY_S)
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.port.close()


# ---- what became of it ----
def wait_for_end(ranks: Ranks, setting: Setting) -> str:
    """Returns "done", "failed", "limit" or "timeout"."""
    began, left_at = time.monotonic(), None
    guard = setting.guard * len(ranks.processes)  # together: one may take more for a while, to load a checkpoint, say
    while True:
        looked = time.monotonic()
        done = sum(report["steps"] == setting.steps for report in ranks.reports().values())
        ranks.tree.sample()
        if done == len(ranks.processes):
            ranks.tree.sample()  # twice: all stand still, and no worker is missed however quick the steps were
            return "done"
        codes = [process.poll() for process in ranks.processes]
        if codes.count(None) < len(codes):  # without its steps, also when its exit code is 0
            left_at = left_at or looked
        if None not in codes or (left_at and looked - left_at > SETTLE_S):
            return "failed"
        if sum(ranks.tree.taken()) > guard:
            return "limit"
        if looked - began > setting.timeout:
            return "timeout"
        time.sleep(max(EVERY_S, 9 * (time.monotonic() - looked)))


def explain_failure(ranks: Ranks, reports: dict[int, dict[str, Any]], microbatch: int, steps: int) -> Try:
    """The first rank that failed, of memory if any did."""
    nothing = dict(steps=0, error="", out_of_memory=False, time=0, gpus=[])  # of one that could not say anything
    codes = [process.poll() for process in ranks.processes]
    seen = {rank: reports.get(rank, nothing) for rank in range(len(codes))}
    failed = Try(microbatch, False, peak=max(ranks.tree.taken()), complete=False)
    if any(report["out_of_memory"] or any(gpu["short"] for gpu in report["gpus"]) for report in seen.values()):
        return failed._replace(why="out of memory")
    if -signal.SIGKILL in codes:
        return failed._replace(why="killed by SIGKILL: out of the host's memory")
    rank = min((rank for rank, code in enumerate(codes) if code), key=lambda rank: seen[rank]["time"], default=0)
    code, made = codes[rank] or 0, seen[rank]["steps"]
    failed = failed._replace(of_memory=False, code=code if code >= 0 else 128 - code, output=ranks.output(rank))
    what = seen[rank]["error"] or (f"exit code {code}" if code > 0 else f"signal {-code}" if code else "ended")
    said = failed.output.splitlines()[-1:] if code > 0 and not seen[rank]["error"] else []
    return failed._replace(why=": ".join([f"{what} (after {made} of {steps} optimizer steps)", *said]))


def judge_memory(reports: dict[int, dict[str, Any]], tree: Tree, microbatch: int, setting: Setting) -> Try:
    """Of a try that made all its steps: the fullest device, and whether enough of it is free."""
    gpus = [gpu for report in reports.values() for gpu in report["gpus"]]
    places = [(gpu["peak"], setting.memory or gpu["total"], gpu["gaps"]) for gpu in gpus]
    places = places or [(taken, setting.memory or setting.host, 0) for taken in tree.taken()]
    peak, total, gaps = max(places, key=lambda place: place[0] / place[1])
    step_ms = max(median(report["ms"][1:]) for report in reports.values())  # ms[0] is the second step's
    per_step = max(1, *(median_low(report["per_step"]) for report in reports.values()))
    found = Try(microbatch, True, peak=peak, total=total, step_ms=step_ms, per_step=per_step, on_gpu=bool(gpus))
    grew = max(report["peaks"][-1] - report["peaks"][-2] for report in reports.values())
    found = found._replace(gaps=gaps, grew=grew)
    if any(gpu["short"] for gpu in gpus):
        return found._replace(fits=False, why="out of memory, and the script went on")
    if peak > (1 - setting.keep) * total:
        return found._replace(fits=False, why=f"less than {setting.keep:.0%} free")
    return found


def run_try(words: list[str], microbatch: int, setting: Setting) -> Try:
    folder = Path(tempfile.mkdtemp(prefix="fit-"))
    ranks = Ranks(words, setting, folder)
    try:
        ended = wait_for_end(ranks, setting)
        reports, taken = ranks.reports(), max(ranks.tree.taken())
        if ended == "done":
            return judge_memory(reports, ranks.tree, microbatch, setting)
        if ended == "failed":
            return explain_failure(ranks, reports, microbatch, setting.steps)
        failed = Try(microbatch, False, peak=taken, complete=False)
        if ended == "limit":
            return failed._replace(why="ended: it passed the limit")
        why = f"not {setting.steps} optimizer steps in {setting.timeout:g} s"
        return failed._replace(why=why, of_memory=False, code=TIMED_OUT, output=ranks.output(0))
    finally:
        ranks.end()
        shutil.rmtree(folder, ignore_errors=True)
