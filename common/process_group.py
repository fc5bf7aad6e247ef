"""Process-group set-up for every script: which rank am I, which device, which backend. Nothing else lives here."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: imported after the set-up, it would hold the group, and its threads abort the exit


class UsageError(ValueError):
    """The user's mistake: one line and exit code 2."""


def read_environment() -> tuple[int, int, int, int]:
    """Returns (rank, local_rank, world_size, local_world_size) as torchrun set them; (0, 0, 1, 1) without it."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = {name: value for name in needed if (value := os.environ.get(name))}
    if not given:
        return 0, 0, 1, 1
    if missing := ", ".join(name for name in needed if name not in given):
        raise UsageError(f"{', '.join(given)} set without {missing}: start with torchrun, or unset them")
    try:
        rank, world_size, _ = (int(given[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError as error:
        raise UsageError(f"RANK, WORLD_SIZE and MASTER_PORT must be numbers: {error}; start with torchrun") from None
    if not (0 <= rank < world_size and 0 <= local[0] < local[1]):
        raise UsageError(f"rank {rank} of {world_size}, local rank {local[0]} of {local[1]}: ranks end at size - 1")
    return rank, local[0], world_size, local[1]


def choose_device(asked: str, local_rank: int, local_world_size: int) -> torch.device:
    """CUDA if there is a GPU for every local rank, else the CPU; `asked` insists on one of them."""
    num_gpus = torch.cuda.device_count()
    if asked == "cuda" and num_gpus < local_world_size:
        way_out = f"--nproc-per-node {num_gpus}" if num_gpus else "--device cpu"
        raise UsageError(f"{local_world_size} local ranks need as many GPUs, this node shows {num_gpus}: use {way_out}")
    if asked == "cpu" or num_gpus < local_world_size:
        if num_gpus and local_rank == 0:
            print(f"note: {num_gpus} GPUs unused, {local_world_size} ranks run on the CPU", file=sys.stderr)
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)  # before init: NCCL and every allocation after it use the current device
    return torch.device("cuda", local_rank)


def meet(rank: int, timeout: float) -> dist.Store:
    """Returns the store that the ranks share: torchrun's, or one served by rank 0 at MASTER_ADDR:MASTER_PORT."""
    if not os.environ.get("RANK"):
        return dist.HashStore()  # one process alone needs no port
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    silent = f"no meeting at {where} in {timeout:g} s: are all ranks up, and is that port rank 0's own?"
    alarm = threading.Timer(timeout + 1, lambda: (sys.stderr.write(f"[rank{rank}] error: {silent}\n"), os._exit(2)))
    alarm.start()  # a stranger on that port accepts and never speaks: the store itself would wait without end
    try:
        store = next(iter(dist.rendezvous("env://", timeout=timedelta(0, timeout))))[0]
    except (dist.DistError, ValueError) as error:  # ValueError: no such port
        taken = f"{where} is in use: choose another --master-port, or end the job that holds it"
        raise UsageError(taken if "EADDRINUSE" in str(error) else silent) from None
    finally:
        alarm.cancel()
    # A store of torchrun's outlives an attempt: a prefix keeps restarted workers from the dead one's addresses.
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # else no prefix: nodes count their own restarts
    return dist.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store) if kept else store


@contextmanager
def process_group(device: str = "auto", timeout: float = 600, **axes: int) -> Iterator[tuple]:
    """Joins the process group, yields (rank, local_rank, world_size, device), leaves it at the end. device: auto, cpu,
    cuda; timeout: seconds that a rank waits for another; axes: the mesh's fixed sizes (tp=2), whose product must divide
    the world size. A UsageError, here or in the body, ends in one line and exit code 2."""
    try:
        rank, local_rank, world_size, local_world_size = read_environment()
        if (size := prod(axes.values())) < 1 or world_size % size:
            raise UsageError(f"world size {world_size} is not a multiple of {axes}: use {max(size, 1)} processes")
        chosen, store = choose_device(device, local_rank, local_world_size), meet(rank, timeout)
        backend, device_id = ("nccl", chosen) if chosen.type == "cuda" else ("gloo", None)
        store.set(f"backend{rank}", backend)
        if (theirs := store.get("backend0").decode()) != backend:
            raise UsageError(f"this rank found {backend}, rank 0 {theirs}: mend its GPUs, or use --device cpu")
        dist.init_process_group(backend, None, timedelta(0, timeout), world_size, rank, store, device_id=device_id)
        yield rank, local_rank, world_size, chosen
    except BaseException as error:
        if group := dist.group.WORLD:
            with suppress(dist.DistError):  # all ranks refuse alike: the first to leave would break the others' set-up
                if isinstance(error, UsageError):
                    store.set(f"refused{rank}", "")
                    store.wait([f"refused{other}" for other in range(world_size)], timedelta(0, 5))
            group.abort()  # leaving in good order would wait for collectives that never end
        if isinstance(error, UsageError):
            print(f"[rank{os.environ.get('RANK', 0)}] error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        raise  # torch marks each line of the traceback with the rank
    dist.destroy_process_group()
