"""Data-parallel training on ragged samples: batches of similar length, and a loss that counts every token once.

    torchrun --nproc-per-node 2 02_ddp/ragged.py

Look at the last line: the padding that bucketing saves. Loss and grad_norm are the same for 1, 2 and 4 processes.

    --no-bucket: any lines      --bucket: lines of similar length     # a token; . padding, computed for nothing
    rank 0  ####..........      rank 0  ########.                     The sorted batch is dealt in turn, like cards:
            ##############              #########                     a step takes as long as its slowest rank.
    rank 1  ########..          rank 1  #########
            ##########                  #########

Shapes: B lines on this rank, T tokens (bytes) of the longest of them, V vocabulary.
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
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError, process_group  # copied this folder out? copy common/ beside it or into it


# ---- config ----
def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--bucket", action=argparse.BooleanOptionalAction, default=True, help="batches of lines of similar length")
    add("--steps", type=int, default=100, help="optimizer steps")
    add("--batch", type=int, default=32, help="global batch in lines, shared by the ranks")
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
def read_lines(path):
    """Returns the lines that are not blank, as bytes, at most 129 of each. Default: Python's own source."""
    root = Path(path or sysconfig.get_path("stdlib"))
    files = [root] if root.is_file() else sorted(root.rglob("*") if path else root.glob("*.py"))
    lines = [line for file in files if file.is_file() for line in file.read_bytes().splitlines(keepends=True)]
    return [line[:129] for line in lines if len(line.strip()) > 1]


def pad(lines):
    """Returns inputs and targets, each (B, T): n bytes are n - 1 tokens. cross_entropy skips the target -100."""
    rows = pad_sequence([torch.tensor(list(line)) for line in lines], batch_first=True, padding_value=-100)
    return rows[:, :-1].clamp(min=0), rows[:, 1:]


# ---- bucketing ----
class BucketBatchSampler(Sampler):
    """Yields this rank's part of each global batch, (B,): on every rank the same count, and similar lengths."""

    def __init__(self, lengths, batch, rank, world_size, seed=0, bucket=True):
        self.lengths, self.batch, self.rank, self.world_size = lengths, batch, rank, world_size
        self.seed, self.bucket = seed, bucket
        self.set_epoch(0)

    def __len__(self):  # an incomplete batch at the end is left out: a rank without one would keep the rest waiting
        return len(self.lengths) // self.batch

    def set_epoch(self, epoch, start=0):
        """Plans an epoch from its batch `start` on. At step s, new or resumed: set_epoch(*divmod(s, len(sampler)))."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.lengths), generator=generator)[: len(self) * self.batch]
        if self.bucket:  # sort pools of 64 batches, not the epoch: else the same lines meet in every epoch
            pools = order.split(64 * self.batch)
            order = torch.cat([pool[self.lengths[pool].argsort(stable=True)] for pool in pools])
        plan = order.view(-1, self.batch)[torch.randperm(len(self), generator=generator)[start:]]
        self.plan = plan.view(len(plan), self.batch // self.world_size, self.world_size)
        self.tokens = self.lengths[self.plan]  # (steps, B, dp): every rank knows what the others compute

    def __iter__(self):
        return iter(self.plan[:, :, self.rank].tolist())

    def padding(self):  # as a share of the tokens computed: each rank pads to the longest of its own lines
        return 1 - self.tokens.sum().item() / (self.tokens.amax(1).sum().item() * self.tokens.shape[1])


# ---- main ----
def main():
    args = parse_args()
    with process_group(args.device, args.timeout) as (rank, _, world_size, device):
        lines = read_lines(args.data)
        if args.steps < 1 or not 0 < args.batch <= len(lines) or args.batch % world_size:
            problem = f"--steps {args.steps} --batch {args.batch} with {len(lines)} lines of text on {world_size} ranks"
            raise UsageError(f"{problem}: use at least 1 step, at most all lines, and a multiple of {world_size}")
        torch.manual_seed(args.seed)
        model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256))
        ddp = DistributedDataParallel(model.to(device, getattr(torch, args.dtype)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        lengths = torch.tensor([len(line) - 1 for line in lines])
        sampler = BucketBatchSampler(lengths, args.batch, rank, world_size, args.seed, args.bucket)
        loader = DataLoader(lines, batch_sampler=sampler, collate_fn=pad, pin_memory=device.type == "cuda")
        history = torch.zeros(2, args.steps, dtype=torch.float64, device=device)  # losses, gradient norms
        counts, clock = [], [time.perf_counter()]
        while len(counts) < args.steps:
            sampler.set_epoch(*divmod(len(counts), len(sampler)))  # without it every epoch has the first one's order
            totals = sampler.tokens.sum((1, 2)).tolist()  # tokens of each global batch
            for step, total, (x, y) in zip(range(len(counts), args.steps), totals, loader):
                logits, y = ddp(x.to(device, non_blocking=True)), y.to(device, non_blocking=True)  # (B, T, V), (B, T)
                # Divide by the global number: a mean of the ranks' means would favour the rank with fewer tokens.
                loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / total
                # all_reduce over dp: partial gradients -> DDP's mean over ranks; times dp, because the sum is wanted
                (loss * world_size).backward()
                history[:, step] = torch.stack((loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), args.clip)))
                optimizer.step()
                optimizer.zero_grad()
                counts.append(total)
                clock.append(time.perf_counter())  # by the host: a GPU may be a few steps behind
        del ddp  # while its group lives: freed after it, DDP would wait, with the GIL, for a thread that needs the GIL
        # all_reduce over dp: each rank's part of the losses -> the losses; so late, as reading one stops the GPU
        dist.all_reduce(history[0])
        if rank == 0:
            print(f"torch {torch.__version__} | {dist.get_backend()} | {device.type} | world size {world_size}")
            print(" step |   loss | grad_norm | tokens/s")
            with open(args.metrics or "/dev/null", "w") as file:
                rows = zip(history.T.tolist(), counts, clock, clock[1:])
                for step, ((loss, norm), total, start, end) in enumerate(rows, 1):
                    row = {"step": step, "loss": loss, "grad_norm": norm, "tokens_per_s": total / (end - start)}
                    print("{step:5d} | {loss:6.4f} | {grad_norm:9.4f} | {tokens_per_s:8.0f}".format(**row))
                    print(json.dumps(row | {"step_ms": 1e3 * (end - start)}), file=file)
            samplers = [BucketBatchSampler(lengths, args.batch, 0, world_size, args.seed, on) for on in (True, False)]
            print("padding: {:.0%} with --bucket, {:.0%} with --no-bucket".format(*(s.padding() for s in samplers)))


if __name__ == "__main__":
    main()
