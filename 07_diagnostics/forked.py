"""Runs a script on N ranks, as torchrun would, but forked from a process that has imported torch: two seconds saved
for each rank. Where there are GPUs, torchrun starts the ranks: nobody may fork who has touched CUDA.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn

POLL_S = 0.005
GRACE_S = 5  # for the other ranks to notice that one has failed


class Ended(NamedTuple):
    code: int  # 0 if every rank ended with 0, else the largest
    problem: str  # what went wrong on which rank, in a few words
    output: str  # of the ranks that failed


def warm(deepspeed: bool = False) -> None:
    """Imports what the scripts will: before the first fork, and before any thread is started."""
    if deepspeed:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import_module("deepspeed")
        import_module("torch._inductor.compile_fx")  # its stages 1 to 3 do
        return
    import torch
    import torch._dynamo  # every optimizer imports it at its first step
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.nn
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel

    torch.set_num_threads(1)  # before any operation: OpenMP's threads do not survive a fork


def name_codes(codes: dict[int, int]) -> str:
    """{0: 1, 1: -9} -> "rank 0: exit code 1, rank 1: SIGKILL"."""
    words = {rank: signal.Signals(-code).name if code < 0 else f"exit code {code}" for rank, code in codes.items()}
    return ", ".join(f"rank {rank}: {word}" for rank, word in words.items())


def tail(text: str, lines: int = 20) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


# ---- forked ----
def run_forked(run: Callable[[], None], num_ranks: int, folder: Path, timeout: float) -> Ended:
    """Calls run() in num_ranks children with torchrun's environment; kills those that are not done in time."""
    import torch.distributed as dist

    listener = socket.create_server(("127.0.0.1", 0))  # the store's port, known before there is a store
    port = listener.getsockname()[1]
    children: dict[int, int] = {}
    codes: dict[int, int] = {}
    killed: set[int] = set()
    try:
        # The store's thread starts after the last fork: a lock that it held then would stay shut in the child.
        for rank in range(num_ranks):
            (folder / f"output.{rank}").touch()
            sys.stdout.flush()
            sys.stderr.flush()
            if (pid := os.fork()) == 0:
                listener.close()
                become_rank(run, rank, num_ranks, port, folder / f"output.{rank}")
            children[pid] = rank
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        deadline = time.monotonic() + timeout
        while children:
            for pid, rank in list(children.items()):
                if time.monotonic() > deadline and rank not in killed:
                    killed.add(rank)
                    os.kill(pid, signal.SIGKILL)
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    del children[pid]
                    if codes[rank]:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
            time.sleep(POLL_S)
        del store
    finally:
        for pid in children:  # interrupted
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    outputs = {rank: (folder / f"output.{rank}").read_text(errors="replace") for rank in range(num_ranks)}
    failed = {rank: code for rank, code in sorted(codes.items()) if code and rank not in killed}
    if killed and not failed:
        failed = {rank: codes[rank] for rank in sorted(killed)}
        problem = f"no end in {timeout:g} s, killed: rank {', '.join(map(str, sorted(killed)))}"
    else:
        problem = name_codes(failed)
    shown = "\n".join(f"[rank {rank}]\n{tail(outputs[rank])}" for rank in failed)
    return Ended(max((code if code > 0 else 128 - code for code in failed.values()), default=0), problem, shown)


def become_rank(run: Callable[[], None], rank: int, num_ranks: int, port: int, output: Path) -> NoReturn:
    """Turns this forked child into a rank that torchrun started, output into a file; never returns."""
    code = 1
    try:
        import torch

        torch.set_num_threads(1)  # remakes a pool that the parent had
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, file), (2, file)):
            os.dup2(source, descriptor)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        local = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=num_ranks, LOCAL_WORLD_SIZE=num_ranks)
        store = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE=True)
        for name, value in (local | store | dict(TORCHELASTIC_RESTART_COUNT=0, OMP_NUM_THREADS=1)).items():
            os.environ[name] = str(value)
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


# ---- launched ----
def run_launched(words: list[str], num_ranks: int, folder: Path, timeout: float) -> Ended:
    """Runs `script flags...` under torchrun, and ends all of it when it is not done in time."""
    launcher = [sys.executable, *f"-m torch.distributed.run --standalone --nproc-per-node {num_ranks}".split()]
    output = folder / "output"
    with open(output, "w") as file:
        process = subprocess.Popen(
            [*launcher, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(timeout)
            problem = f"torchrun: exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            code, problem = 137, f"no end in {timeout:g} s, killed"
        finally:
            if process.poll() is None:
                process.terminate()  # its workers are in sessions of their own: torchrun ends them, if it may
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2 * GRACE_S)
                process.kill()
                process.wait()
    return Ended(code, problem, tail(output.read_text(errors="replace"), 40) if code else "")
