"""Data-parallel training when a rank has nothing to give: its batch skips part of the model, or it has none left.

    torchrun --nproc-per-node 2 02_ddp/uneven.py                        # a head that only some batches use
    torchrun --nproc-per-node 2 02_ddp/uneven.py --no-find-unused       # fails in the step after the first such batch
    torchrun --nproc-per-node 2 02_ddp/uneven.py --join                 # rank 1 has half the batches, and answers on
    torchrun --nproc-per-node 2 02_ddp/uneven.py --no-join --timeout 5  # it does not answer: rank 0 waits in vain

Look at loss and grad_norm: the same for 1, 2 and 4 processes, unless --join leaves ranks with fewer batches.

    gradients on   step 1   step 2   step 3   step 4     a body, b head for code, c head for comments
    rank 0         a b c    a b -    a b -    a b c      - DDP would wait for it, if it did not look for unused ones
    rank 1         a b c    a b c    a b -    0 0 0      0 no batch left: Join sends zeros in its place
    all_reduce     a b c    a b c    a b 0    a b c      where no rank used c, its gradient stays 0, as in one process
"""

import argparse
import json
import sys
import sysconfig
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError, process_group  # copied this folder out? copy common/ beside it or into it


# ---- config ----
def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add("--find-unused", action=switch, default=True, help="DDP looks for parameters without a gradient in every step")
    add("--join", action=switch, help="rank r of n has only steps * (n - r) / n batches: with Join, or without")
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


# ---- model ----
class TwoHeadModel(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(256, dim), nn.Linear(dim, 4 * dim), nn.ReLU())
        self.code_head, self.comment_head = nn.Linear(4 * dim, 256), nn.Linear(4 * dim, 256)

    def forward(self, tokens, comments):  # (B, T), and how many of B are comments, which stand first -> (B, T, V)
        hidden = self.body(tokens)
        first = [self.comment_head(hidden[:comments])] if comments else []
        second = [self.code_head(hidden[comments:])] if comments < len(hidden) else []
        return torch.cat(first + second)


# ---- data ----
def read_lines(path):
    """Returns the lines that are not blank, as bytes, at most 129 of each. Default: Python's own source."""
    root = Path(path or sysconfig.get_path("stdlib"))
    files = [root] if root.is_file() else sorted(root.rglob("*") if path else root.glob("*.py"))
    lines = [line for file in files if file.is_file() for line in file.read_bytes().splitlines(keepends=True)]
    return [line[:129] for line in lines if len(line.strip()) > 1]


def is_comment(line):
    return line.lstrip().startswith(b"#")


def pad_comments_first(lines):
    """Returns inputs and targets, each (B, T), and the number of comments; cross_entropy skips the target -100."""
    rows = [torch.tensor(list(line)) for line in sorted(lines, key=is_comment, reverse=True)]
    padded = pad_sequence(rows, batch_first=True, padding_value=-100)
    return padded[:, :-1].clamp(min=0), padded[:, 1:], sum(map(is_comment, lines))


# ---- main ----
def main():
    args = parse_args()
    with process_group(args.device, args.timeout) as (rank, _, world_size, device):
        lines = read_lines(args.data)
        if args.steps < 1 or not 0 < args.batch <= len(lines) or args.batch % world_size:
            problem = f"--steps {args.steps} --batch {args.batch} with {len(lines)} lines of text on {world_size} ranks"
            raise UsageError(f"{problem}: use at least 1 step, at most all lines, and a multiple of {world_size}")
        torch.manual_seed(args.seed)
        model = TwoHeadModel().to(device, getattr(torch, args.dtype))
        ddp = DistributedDataParallel(model, find_unused_parameters=args.find_unused)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        generator = torch.Generator().manual_seed(args.seed)
        plan = torch.randint(len(lines), (args.steps, args.batch), generator=generator).view(args.steps, -1, world_size)
        ends = [args.steps - (args.join is not None) * args.steps * r // world_size for r in range(world_size)]
        there = torch.arange(args.steps)[:, None] < torch.tensor(ends)  # (steps, dp): the ranks that have a batch
        # Every rank knows the plan, and so the global number of tokens in a step, without asking.
        totals = (torch.tensor([len(line) - 1 for line in lines])[plan].sum(1) * there).sum(1).tolist()
        batches = plan[: ends[rank], :, rank].tolist()
        pinned = device.type == "cuda"
        loader = DataLoader(lines, batch_sampler=batches, collate_fn=pad_comments_first, pin_memory=pinned)
        history = torch.zeros(2, args.steps, dtype=torch.float64, device=device)  # losses, gradient norms
        clock = [time.perf_counter()]
        # all_reduce over dp in each forward (two numbers): who has a batch? A rank that has none answers the gradients
        # of the others with zeros until all are done, then takes the last one's weights. Disabled, Join does nothing.
        with Join([ddp], enable=args.join is True):
            for step, (x, y, comments) in enumerate(loader):
                logits, y = ddp(x.to(device, non_blocking=True), comments), y.to(device, non_blocking=True)
                loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / totals[step]
                # all_reduce over dp: partial gradients -> sum / dp, even with fewer ranks left; the sum is wanted
                (loss * world_size).backward()
                history[:, step] = torch.stack((loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), args.clip)))
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)  # not None: with Join, DDP may turn None into zeros
                clock.append(time.perf_counter())  # by the host: a GPU may be a few steps behind
        del ddp  # while its group lives: freed after it, DDP would wait, with the GIL, for a thread that needs the GIL
        # A group of its own for the log: a rank that has run out must not answer gradients with losses.
        history, log_group = history.cpu(), dist.new_group(backend="gloo", timeout=timedelta(seconds=args.timeout))
        # all_reduce over dp: each rank's part of the losses -> the losses; so late, as reading one stops the GPU
        dist.all_reduce(history[0], group=log_group)
        if rank == 0:
            print(f"torch {torch.__version__} | {dist.get_backend()} | {device.type} | world size {world_size}")
            print(" step |   loss | grad_norm | tokens/s")
            with open(args.metrics or "/dev/null", "w") as file:
                rows = zip(history.T.tolist(), totals, clock, clock[1:])
                for step, ((loss, norm), total, start, end) in enumerate(rows, 1):
                    row = {"step": step, "loss": loss, "grad_norm": norm, "tokens_per_s": total / (end - start)}
                    print("{step:5d} | {loss:6.4f} | {grad_norm:9.4f} | {tokens_per_s:8.0f}".format(**row))
                    print(json.dumps(row | {"step_ms": 1e3 * (end - start)}), file=file)
            used = torch.tensor([is_comment(line) for line in lines])[plan].any(1) & there
            print(f"comment head used by {used.sum()} of {there.sum()} batches of a rank", end="; ")
            print(f"batches per rank {ends}, {1 - there.double().mean():.0%} of the ranks' time idle")


if __name__ == "__main__":
    main()
