"""The classic hangs, caused on the CPU: what a job looks like when one rank does otherwise than the rest.

python 07_diagnostics/hang.py lab skip
torchrun --nproc-per-node 2 07_diagnostics/labs.py skip     without anybody who watches: it stands still
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEPS = 4
FAULTY = 2  # the step at which it happens


# ---- labs ----
def skip(rank: int) -> None:
    gradient, metric = torch.ones(8), torch.ones(1)
    for step in range(STEPS):
        if rank == 1 and step == FAULTY:
            pass  # "nothing to reduce in this step"
        else:
            dist.all_reduce(gradient)
        dist.broadcast(metric, 0)


def order(rank: int) -> None:
    gradient, weight = torch.ones(8), torch.ones(8)
    if rank % 2 == 0:
        dist.all_reduce(gradient)
        dist.broadcast(weight, 0)
    else:
        dist.broadcast(weight, 0)
        dist.all_reduce(gradient)


def sizes(rank: int) -> None:
    for step in range(STEPS):
        rows = 8 if rank == 1 and step == FAULTY else 4  # the last batch is of another size
        dist.all_reduce(torch.ones(rows, 1024))


def uneven(rank: int) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for batch in torch.ones(STEPS - rank, 2, 4):  # rank 1 has one batch less
        model(batch).sum().backward()
    metric = torch.ones(1)
    dist.all_reduce(metric)


class Slow(Dataset):
    def __init__(self, rank: int):
        self.rank = rank

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rank == 1 and index == FAULTY:
            time.sleep(3600)  # a shard on a slow disk
        return torch.ones(4)


def data(rank: int) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for batch in DataLoader(Slow(rank), batch_size=1):
        model(batch).sum().backward()


def gather_and_save(shard: torch.Tensor) -> None:
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)


def rank_0_saves(rank: int) -> None:
    gradient = torch.ones(8)
    for step in range(STEPS):
        dist.all_reduce(gradient)
        if rank == 0 and step == FAULTY:
            gather_and_save(gradient)


def dead(rank: int) -> None:
    stop_at_step(rank, signal.SIGKILL)


def stopped(rank: int) -> None:
    stop_at_step(rank, signal.SIGSTOP)


def stop_at_step(rank: int, number: int) -> None:
    gradient = torch.ones(8)
    for step in range(STEPS):
        if rank == 1 and step == FAULTY:
            os.kill(os.getpid(), number)
        dist.all_reduce(gradient)


def wrong_group(rank: int) -> None:
    data_parallel, tensor_parallel = (dist.new_group([0, 1, 2], group_desc=name) for name in ("dp", "tp"))
    activation = torch.ones(8)
    for step in range(STEPS):
        wrong = rank == 2 and step == FAULTY
        dist.all_reduce(activation, group=data_parallel if wrong else tensor_parallel)


def send_recv(rank: int) -> None:
    mine, theirs = torch.ones(8), torch.empty(8)
    dist.recv(theirs, 1 - rank)  # each waits for the other to send first
    dist.send(mine, 1 - rank)


def busy(rank: int) -> None:
    gradient = torch.ones(8)
    for step in range(STEPS):
        while rank == 1 and step == FAULTY:
            gradient.sum()
        dist.all_reduce(gradient)


def well(rank: int) -> None:
    for _ in range(STEPS):
        dist.all_reduce(torch.ones(8))


class Lab(NamedTuple):
    work: Callable[[int], None]
    ranks: int
    cause: str  # what hang.py must name
    blamed: list[int]
    about: str


def labs() -> dict[str, Lab]:
    return {
        "skip": Lab(skip, 2, "skipped_collective", [1], "a rank skips an all_reduce"),
        "order": Lab(order, 2, "collective_order", [1], "a rank calls two collectives in another order"),
        "sizes": Lab(sizes, 2, "collective_size_mismatch", [1], "a rank's tensor has another size"),
        "uneven": Lab(uneven, 2, "uneven_inputs", [1], "a rank has one batch less"),
        "data": Lab(data, 2, "slow_data", [1], "a rank waits for its data"),
        "save": Lab(rank_0_saves, 2, "rank_conditional_collective", [0], "a collective inside `if rank == 0`"),
        "dead": Lab(dead, 2, "killed_rank", [1], "a rank is killed by SIGKILL"),
        "stopped": Lab(stopped, 2, "stopped_process", [1], "a rank is stopped by SIGSTOP"),
        "group": Lab(wrong_group, 3, "wrong_group", [2], "a rank names another group"),
        "send_recv": Lab(send_recv, 2, "mismatched_send_recv", [0, 1], "two ranks wait for each other's send"),
        "busy": Lab(busy, 2, "slow_rank", [1], "a rank computes without end"),
        "well": Lab(well, 2, "none", [], "nothing is wrong: it says nothing"),
    }


# ---- main ----
def main() -> None:
    alone: dict[str, Any] = {} if os.environ.get("RANK") else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    labs()[sys.argv[1]].work(rank := dist.get_rank())
    dist.destroy_process_group()
    if rank == 0:
        print(f"{sys.argv[1]}: ended by itself")


if __name__ == "__main__":
    main()
