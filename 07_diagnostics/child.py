"""One rank's process, for hang.py: starts it under record.py, sees from outside where it is, and ends it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from proc import stat_fields
from record import SIGNAL
from records import Rank, as_calls, frames_in

POLL_S = 0.2


class Child:
    """One rank's process: starts it, and finds out where it is."""

    def __init__(self, rank: int, folder: Path, env: dict[str, str], script: list[str], timeout: float, output: Any):
        self.status, self.folder = Rank(rank), folder
        folder.mkdir()
        beats = [str(min(1.0, timeout / 4)), str(timeout / 2)]
        watched = [str(Path(__file__).resolve().with_name("hang.py")), "record", str(folder), *beats, *script]
        env = {"TORCH_FR_BUFFER_SIZE": "2000"} | os.environ | env
        self.process = subprocess.Popen([sys.executable, *watched], env=env, stdout=output, start_new_session=True)
        self.status.pid = self.process.pid
        self.seen: dict[str, float] = {}  # file -> its time when it was read
        self.moved = time.monotonic()  # when a call was last made or done
        self.cpu = 0.0  # processor seconds at that time
        self.looks = self.active = 0  # since then
        self.timeout = timeout
        self.asked: int | None = None  # bytes that faulthandler had written when it was asked for more

    def read(self, name: str) -> Any:
        """The content of one of the rank's files if it is new."""
        try:
            changed = (self.folder / name).stat().st_mtime_ns
            if changed == self.seen.get(name):
                return None
            content = json.loads((self.folder / name).read_bytes())
        except (OSError, ValueError):  # not yet written, or half
            return None
        self.seen[name] = changed
        return content

    def look(self) -> None:
        status = self.status
        if status.state == "ended":
            return
        code = self.process.poll()
        if beat := self.read("beat"):
            if beat["count"] != status.count:
                self.moved, self.cpu = time.monotonic(), cpu_seconds(status.pid)
                self.looks = self.active = 0
            vars(status).update(beat, seen=False)  # it speaks for itself
            self.asked = None
        if (calls := self.read("record")) is not None:
            status.calls = as_calls(calls)
        if code is not None:
            status.state, status.code, status.ended = "ended", code, time.time()
            status.last = self.read("call") or status.last
            if code < 0:
                self.take(self.stacks())
            return
        state, still = stat_fields(status.pid)[0], time.monotonic() - self.moved
        status.state = "stopped" if state in ("T", "t") else "running"
        self.looks, self.active = self.looks + 1, self.active + (state in ("R", "D"))  # wants a processor, or its disk
        status.busy = max((cpu_seconds(status.pid) - self.cpu) / max(still, POLL_S), self.active / self.looks)
        if still > 0.75 * self.timeout:
            status.last = self.read("call") or status.last
            silent_s = time.time() - self.seen.get("beat", time.time_ns()) / 1e9
            if self.asked is None and silent_s > 2 + self.timeout / 4:  # its thread is held up: look from outside
                self.asked = len(self.stacks())
                self.process.send_signal(SIGNAL)
                self.take(spied(status.pid))
            elif self.asked is not None and not status.seen:
                self.take(self.stacks()[self.asked :])

    def take(self, text: str) -> None:
        if frames := frames_in(text):
            self.status.stack, self.status.seen = frames, True

    def stacks(self) -> str:
        with suppress(OSError):
            return (self.folder / "stack").read_text()
        return ""

    def end(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def cpu_seconds(pid: int) -> float:
    return sum(map(int, stat_fields(pid)[11:13])) / os.sysconf("SC_CLK_TCK")  # utime, stime; 0 if it has gone


def spied(pid: int) -> str:
    """py-spy's stacks of a process, where it is installed and may look."""
    if not shutil.which("py-spy"):
        return ""
    command = ["py-spy", "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout
    return ""


def end_all(children: list[Child], grace: float) -> None:
    """SIGTERM, and SIGKILL for who is still there after the grace: a stopped process, or one that ignores it."""
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, grace)):
        for child in (child for child in children if child.process.poll() is None):
            child.end(number)
        deadline = time.monotonic() + seconds
        while any(child.process.poll() is None for child in children) and time.monotonic() < deadline:
            time.sleep(POLL_S / 2)
