"""Runs a script on N ranks as torchrun would, but forked from this warm process: `import torch` is paid for once.

Each child is the real script run as `__main__` with torchrun's environment and a real gloo group. The parent serves
the store, as torchrun's agent does, so no port is picked twice. Not for CUDA (never fork after CUDA is initialised).
"""

import contextlib
import gc
import io
import os
import runpy
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch._dynamo  # every optimizer imports it at its first step: a second saved in each run
import torch.distributed as dist

gc.set_threshold(50_000)  # the ranks inherit it: looking at young objects is a twentieth of what they do
ROOT = Path(__file__).resolve().parents[1]
leave = os._exit  # a planted fault may put another in its place, and a child must never go on in its parent's tests
torch.set_num_threads(1)  # before any operation: OpenMP's threads do not survive a fork


class Result(NamedTuple):
    codes: list[int]  # exit code per rank; negative: ended by that signal
    outputs: list[str]  # stdout and stderr per rank, in the order in which they were written

    def check(self) -> "Result":
        shown = "\n".join(f"--- rank {r}: exit {c}\n{o}" for r, (c, o) in enumerate(zip(self.codes, self.outputs)))
        assert not any(self.codes), shown
        return self


def run(
    script: str | Path, *flags: object, nproc: int = 1, env: Mapping[str, str] | None = None, timeout: float = 60
) -> Result:
    """Runs `script flags...` on nproc ranks. A rank that is not done after `timeout` seconds is killed (code -9).

    env adds to torchrun's variables on every rank; an empty value removes one.
    """
    # The store's thread starts after the last fork: a lock that it held at that moment would stay shut in the child.
    start, starter = os.pipe()
    files = [tempfile.TemporaryFile("w+") for _ in range(nproc)]
    children: dict[int, int] = {}
    for rank in range(nproc):
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": nproc,
            "LOCAL_WORLD_SIZE": nproc,
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "OMP_NUM_THREADS": 1,
        }
        variables |= env or {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside pytest-xdist's thread
            pid = os.fork()
        if pid == 0:
            os.close(starter)
            variables = {"MASTER_PORT": int(os.read(start, 5) or 0)} | variables  # waits; 0 if the parent has died
            become(ROOT / script, [str(flag) for flag in flags], variables, files[rank])
        children[pid] = rank
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(starter, f"{store.port:5}".encode() * nproc)
    os.close(starter)
    os.close(start)
    codes = [-signal.SIGKILL] * nproc
    deadline = time.monotonic() + timeout
    while children:
        for pid, rank in list(children.items()):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)
                del children[pid]
        time.sleep(0.005)
    outputs = []
    for file in files:
        file.seek(0)
        outputs.append(file.read())
        file.close()
    return Result(codes, outputs)


def become(script: Path, flags: Sequence[str], variables: Mapping[str, object], file: io.TextIOBase) -> NoReturn:
    """Turns this forked child into `python script flags...`, output into file; never returns."""
    code = 1
    try:
        torch.set_num_threads(1)  # remakes a pool that the parent had, before autograd's threads race to do it
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        for name, value in variables.items():
            os.environ[name] = str(value)
            if value == "":
                del os.environ[name]
        for name in [name for name in sys.modules if name.split(".")[0] == "common"]:
            del sys.modules[name]
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        warnings.filterwarnings("error", category=DeprecationWarning, module="__main__|common")
        warnings.filterwarnings("error", category=FutureWarning, module="__main__|common")  # torch's own kind
        sys.argv = [str(script), *flags]
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        leave(code)
