"""Batch norm over the samples of all ranks: an all_reduce that autograd can differentiate, for CPU and GPU.

    torchrun --nproc-per-node 2 02_ddp/batch_norm.py    # then with --norm local; then each with --batch 2

Look at the loss column: with --norm synced it is the same for 1, 2 and 4 processes, with --norm local it is not.

    rank 0   x --> sum, count --> | all_  | --> mean --> sum of (x - mean)^2 --> | all_  | --> variance --> y
    rank 1   x --> sum, count --> |reduce | --> mean --> sum of (x - mean)^2 --> |reduce | --> variance --> y
"""

import argparse
import json
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError, process_group  # copied this folder out? copy common/ beside it or into it


# ---- config ----
def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--norm", choices=("synced", "local", "torch"), default="synced", help="torch: its SyncBatchNorm, for GPUs")
    add("--steps", type=int, default=100, help="optimizer steps")
    add("--batch", type=int, default=64, help="global batch in samples, shared by the ranks")
    add("--lr", type=float, default=3e-3)
    add("--clip", type=float, default=1.0, help="largest global gradient norm")
    add("--seed", type=int, default=0)
    add("--data", help="a file or a folder of text; default: the source of Python's standard library")
    add("--dtype", choices=("float32", "float64"), default="float32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--timeout", type=float, default=600, help="seconds that a rank waits for another")
    add("--metrics", help="file for one JSON object per step")
    return parser.parse_args()


# ---- data ----
def read_text(path):
    """Returns the bytes of a file or of a folder's files. Default: Python's own source."""
    root = Path(path or sysconfig.get_path("stdlib"))
    files = [root] if root.is_file() else sorted(root.rglob("*") if path else root.glob("*.py"))
    return b"".join(file.read_bytes() for file in files if file.is_file())


# ---- batch norm ----
class AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(total := x.clone())
        return total

    @staticmethod
    def backward(ctx, grad):  # this rank's x is in the sum that every rank gets: so are their gradients in its own
        return AllReduceSum.apply(grad)


class SyncedBatchNorm(nn.Module):
    """Ioffe and Szegedy 2015, algorithm 1, over all ranks. (B, C, ...) -> (B, C, ...); B may differ, even be 0."""

    def __init__(self, norm):
        super().__init__()
        self.eps, self.momentum, self.training = norm.eps, norm.momentum, norm.training
        self.weight, self.bias = norm.weight, norm.bias
        for name, buffer in norm.named_buffers():
            self.register_buffer(name, buffer)

    def forward(self, x):
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        if dist.get_world_size() * x.numel() == x.shape[1]:
            raise ValueError(f"Expected more than 1 value per channel when training, got {tuple(x.shape)}")
        dims, channels = [0, *range(2, x.dim())], (-1,) + (1,) * (x.dim() - 2)
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        # all_reduce over dp: sums and count of this rank -> of all, (C + 1,)
        sums = AllReduceSum.apply(torch.cat((values.sum(dims), values.new_full((1,), x.numel() // x.shape[1]))))
        count, mean = sums[-1], sums[:-1] / sums[-1]
        centred = values - mean.view(channels)
        # all_reduce over dp: (C,), a second one, because E[x^2] - E[x]^2 loses every digit where the mean is large
        var = AllReduceSum.apply(centred.square().sum(dims)) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            momentum = 1 / self.num_batches_tracked.to(mean.dtype) if self.momentum is None else self.momentum
            self.running_mean += momentum * (mean - self.running_mean)
            self.running_var += momentum * (var * count / (count - 1) - self.running_var)  # the unbiased variance
        y = centred * torch.rsqrt(var + self.eps).view(channels)
        return (y if self.weight is None else y * self.weight.view(channels) + self.bias.view(channels)).to(x.dtype)


def convert(module):
    """Returns the module with every BatchNorm in it replaced, weights and running statistics kept."""
    for name, child in module.named_children():
        setattr(module, name, convert(child))
    return SyncedBatchNorm(module) if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) else module


# ---- main ----
def main():
    args = parse_args()
    with process_group(args.device, args.timeout) as (rank, _, world_size, device):
        if args.norm == "torch" and device.type != "cuda":
            raise UsageError("--norm torch is torch.nn.SyncBatchNorm, which works on GPUs only: use --norm synced")
        text = read_text(args.data)
        if args.steps < 1 or args.batch < 2 or len(text) < 9:
            raise UsageError(f"--steps {args.steps} --batch {args.batch}, {len(text)} bytes: use 1, 2, 9 or more")
        contexts = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device).unfold(0, 9, 1)  # 8 to read, then 1
        torch.manual_seed(args.seed)
        layers = nn.Embedding(256, 16), nn.Flatten(), nn.Linear(8 * 16, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU()
        model = nn.Sequential(*layers, nn.Linear(128, 256)).to(device, getattr(torch, args.dtype))
        if args.norm != "local":
            model = convert(model) if args.norm == "synced" else nn.SyncBatchNorm.convert_sync_batchnorm(model)
        ddp = DistributedDataParallel(model)  # broadcasts rank 0's running statistics over dp before each forward
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        plan = torch.randint(len(contexts), (args.steps, args.batch)).to(device)  # every rank draws the same
        history, clock = torch.zeros(2, args.steps, dtype=torch.float64, device=device), [time.perf_counter()]
        for step in range(args.steps):
            batch = contexts[plan[step, rank::world_size]].long()  # (B, T + 1)
            loss = F.cross_entropy(ddp(batch[:, :-1]), batch[:, -1], reduction="sum") / args.batch
            # all_reduce over dp: partial gradients -> DDP's mean over ranks; times dp, because the sum is wanted
            (loss * world_size).backward()
            history[:, step] = torch.stack((loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), args.clip)))
            optimizer.step()
            optimizer.zero_grad()
            clock.append(time.perf_counter())  # by the host: a GPU may be a few steps behind
        del ddp  # while its group lives: freed after it, DDP would wait, with the GIL, for a thread that needs the GIL
        # all_reduce over dp: each rank's part of the losses -> the losses; so late, as reading one stops the GPU
        dist.all_reduce(history[0])
        if rank == 0:
            print(f"torch {torch.__version__} | {dist.get_backend()} | {device.type} | world size {world_size}")
            print(" step |   loss | grad_norm | tokens/s")
            with open(args.metrics or "/dev/null", "w") as file:
                for step, ((loss, norm), start, end) in enumerate(zip(history.T.tolist(), clock, clock[1:]), 1):
                    row = {"step": step, "loss": loss, "grad_norm": norm, "tokens_per_s": args.batch / (end - start)}
                    print("{step:5d} | {loss:6.4f} | {grad_norm:9.4f} | {tokens_per_s:8.0f}".format(**row))
                    print(json.dumps(row | {"step_ms": 1e3 * (end - start)}), file=file)
            batch, model = contexts[:: len(contexts) // 1000 + 1].long(), model.eval()
            print(f"with the running statistics: loss {F.cross_entropy(model(batch[:, :-1]), batch[:, -1]):.6f}")


if __name__ == "__main__":
    main()
