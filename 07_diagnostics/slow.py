"""A training job that is slow on purpose: one for each verdict of diagnose.py, on the CPU.

    torchrun --nproc-per-node 2 07_diagnostics/diagnose.py 07_diagnostics/slow.py slow_collate
    torchrun --nproc-per-node 2 07_diagnostics/diagnose.py 07_diagnostics/slow.py late_sleep --kind fsdp
    python 07_diagnostics/slow.py list

The same MLP is trained with ddp, fsdp or tp. What makes it slow takes `--seconds` of each step, and outweighs the rest.
Of the causes that begin with late_, rank 1 alone suffers.
"""

import argparse
import hashlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

CAUSES_OF = {
    "data-bound": "slow_dataset slow_augment slow_collate slow_generator slow_worker get_batch",
    "compute-bound": "slow_operator matmuls one_core",
    "communication-bound": "large_all_reduce",
    "straggler": "late_dataset late_collate late_operator late_sleep late_python",
    "memory-bound": "address_space data_segment",
    "host-bound": "sleep python logging files many_modules",
    "": "nothing",
}
PER_BATCH = 4  # samples


# ---- config ----
def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    causes = [cause for several in CAUSES_OF.values() for cause in several.split()]
    parser.add_argument("cause", choices=[*causes, "list"], metavar="CAUSE")
    parser.add_argument("--kind", choices=["ddp", "fsdp", "tp"], default="ddp")
    parser.add_argument("--seconds", type=float, default=0.06, help="that a step takes longer")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rows", type=int, default=64, help="of a batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--bucket-mb", type=float, default=25)
    return parser.parse_args()


def keep_busy(seconds: float) -> None:
    end, digest = time.perf_counter() + seconds, b""
    while time.perf_counter() < end:
        digest = hashlib.md5(digest).digest()


# ---- model ----
@torch.library.custom_op("slow::work", mutates_args=())
def work(seconds: float) -> torch.Tensor:
    """An operator that takes a known time whatever else the machine does: it needs no core."""
    time.sleep(seconds)
    return torch.zeros(1)


class SlowLayer(nn.Module):
    def __init__(self, cause: str, seconds: float):
        super().__init__()
        self.cause, self.seconds = cause, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cause.endswith("_operator"):
            work(self.seconds)
        elif self.cause == "matmuls":
            end, matrix = time.perf_counter() + self.seconds, torch.ones(600, 600)
            while time.perf_counter() < end:
                torch.mm(matrix, matrix)
        return x


def build_slow_model(args: argparse.Namespace, cause: str) -> nn.Module:
    layers = [nn.Linear(args.dim, args.dim, bias=False) for _ in range(args.layers)]
    extra = [nn.Identity() for _ in range(8_000 if cause == "many_modules" else 0)]
    model = nn.Sequential(*layers, SlowLayer(cause, args.seconds), *extra)
    if args.kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True)
    if args.kind == "fsdp":
        for module in (*layers, model):
            fully_shard(module)
        return model
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan: dict[str, ParallelStyle] = {
        str(i): RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(args.layers)
    }
    return parallelize_module(model, mesh, plan)


# ---- data ----
class SlowRows(Dataset):
    def __init__(self, args: argparse.Namespace, cause: str):
        self.args, self.cause = args, cause

    def __len__(self) -> int:
        return PER_BATCH * (self.args.steps + 1)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.cause.endswith("_dataset") or self.cause == "slow_worker":
            time.sleep(self.args.seconds / PER_BATCH)
        elif self.cause == "slow_augment":
            keep_busy(self.args.seconds / PER_BATCH)
        return torch.full((self.args.rows // PER_BATCH, self.args.dim), 0.1)


def get_batch(args: argparse.Namespace) -> torch.Tensor:
    time.sleep(args.seconds)
    return torch.full((args.rows, args.dim), 0.1)


def batches(args: argparse.Namespace, cause: str) -> Iterator[torch.Tensor]:
    def slow_collate(rows: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(args.seconds)
        return torch.cat(rows)

    while cause == "slow_generator":
        time.sleep(args.seconds)
        yield torch.full((args.rows, args.dim), 0.1)
    collate = slow_collate if cause.endswith("_collate") else torch.cat
    yield from DataLoader(SlowRows(args, cause), PER_BATCH, collate_fn=collate, num_workers=cause == "slow_worker")


# ---- host and memory ----
def slow_host(cause: str, seconds: float) -> None:
    end = time.perf_counter() + seconds
    if cause in ("python", "late_python"):
        keep_busy(seconds)
    elif cause in ("sleep", "late_sleep"):
        time.sleep(seconds)
    elif cause == "logging":
        lines: list[str] = []
        while time.perf_counter() < end:
            lines.append(repr({"step": len(lines), "loss": 0.1}))
    elif cause == "files":
        while time.perf_counter() < end:
            Path(os.devnull).write_bytes(b"x" * 1000)


def limit_memory(cause: str) -> None:
    """Sets a limit that is almost reached: 9 % above what this process has, so that it may still start a thread."""
    limits = {"address_space": (resource.RLIMIT_AS, "VmSize"), "data_segment": (resource.RLIMIT_DATA, "VmData")}
    limit, size = limits[cause]
    kib = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if size in line)
    resource.setrlimit(limit, (int(1.09 * 1024 * int(kib)), resource.getrlimit(limit)[1]))


# ---- main ----
def train_slowly(args: argparse.Namespace) -> None:
    rank = dist.get_rank()
    cause = "nothing" if args.cause.startswith("late_") and rank != 1 else args.cause
    if cause == "one_core":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.manual_seed(0)
    model = build_slow_model(args, cause)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    large, stream = torch.zeros(2**22), batches(args, cause)
    for step in range(args.steps):
        x = get_batch(args) if cause == "get_batch" else next(stream)  # (rows, dim)
        model(x).square().mean().backward()
        for _ in range(4 if cause == "large_all_reduce" else 0):
            dist.all_reduce(large)  # all_reduce over all ranks: 16 MiB of zeros -> as many
        slow_host(cause, args.seconds)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and cause in CAUSES_OF["memory-bound"].split():
            limit_memory(cause)
    print(f"rank {rank}: {args.steps} steps")


def main() -> None:
    args = parse_args()
    if args.cause == "list":
        print("\n".join(f"{verdict:20} {causes}" for verdict, causes in CAUSES_OF.items()))
        return
    alone = {} if os.environ.get("RANK") else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)  # type: ignore[arg-type]
    train_slowly(args)  # in a function: the model goes before its process group does
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
