"""The batch size, computed: the largest microbatch that leaves 20 % of the memory free, then accumulation.

    torchrun --nproc-per-node 2 02_ddp/batch_size.py --batch 512 --seq-len 1024

Look at the last line: the flags for train.py. The global batch stays as you want it, only its split follows the memory.

    peak(microbatch) = states + temporaries + microbatch * activations  <=  (1 - free) * memory, on the poorest rank

Trial steps of train.py's own model with 2 and 4 sequences give this line; 1 sequence checks that it is one.
Misses what lies outside torch's allocator (CUDA context, NCCL, oneDNN) and the gaps in it: the 20 % are for these.
Misses also --compile; and a container's limit below the host's memory: give that as --memory-gib. Below 1,000 tokens a
microbatch, bfloat16 on a CPU is up to 2 % off: oneDNN multiplies in ways that need other scratch.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils import checkpoint

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError, process_group  # copied this folder out? copy common/ beside it or into it


# ---- config ----
def parse_args():
    add = (parser := argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)).add_argument
    add("--batch", type=int, default=32, help="global batch in sequences, shared by the ranks")
    add("--seq-len", type=int, default=128, help="tokens (bytes) per sequence")
    for flag, default in (("--dim", 128), ("--layers", 4), ("--heads", 4), ("--kv-heads", 2)):
        add(flag, type=int, default=default)
    add("--dtype", choices=("float32", "float64", "bfloat16", "float16"), default="float32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--timeout", type=float, default=600, help="seconds that a rank waits for another")
    add("--checkpoint-activations", action="store_true", help="recompute activations in backward, block by block")
    add("--memory-gib", type=float, help="memory per rank to plan for; default: what its device has")
    add("--free", type=float, default=0.2, help="share of the memory to leave free")
    return parser.parse_args()


# ---- model ----
from train import Llama, check_args  # not a copy: whatever model train.py has, this one is measured


# ---- memory ----
def measure_peaks(args, device, memory):
    """Returns bytes: of the states, and the peaks when 1, 2 and 4 sequences are added to accumulated gradients.

    Running out counts as all of `memory` taken. No collective in here, so no rank waits for one that ran out.
    """
    cuda, sequences, states, peaks = device.type == "cuda", 0, memory, []
    try:
        model = Llama(args.dim, args.layers, args.heads, args.kv_heads)
        model.to(device, torch.float64 if args.dtype == "float64" else torch.float32)
        for layer in model.model.layers if args.checkpoint_activations else ():
            layer.forward = lambda x, block=layer.forward: checkpoint.checkpoint(block, x, use_reentrant=False)
        optimizer = torch.optim.AdamW(model.parameters(), fused=cuda)
        parameters = sum(p.nbytes for p in model.parameters())
        states = 5 * parameters  # and gradients, AdamW's two, and DDP's buckets: no_sync accumulates outside of them
        for sequences in (1, 1, 2, 4):  # the first makes what the others find: gradients and AdamW's states
            text = torch.randint(256, (sequences, args.seq_len + 1), device=device)  # the values do not matter
            recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            with contextlib.nullcontext() if cuda else recording:
                with torch.autocast(device.type, getattr(torch, args.dtype), enabled="16" in args.dtype):
                    logits = model(text[:, :-1]).flatten(0, 1)
                    loss = F.cross_entropy(logits, text[:, 1:].flatten(), reduction="sum") / text.numel()
                loss.backward()
                del logits, loss
            if cuda:
                peaks.append(torch.cuda.max_memory_allocated() + parameters)
            else:  # the CPU's allocator keeps no peak: add up the profiler's record of each block taken and given back
                with tempfile.NamedTemporaryFile(suffix=".json") as file:
                    recording.export_chrome_trace(file.name)
                    events = json.loads(Path(file.name).read_bytes())["traceEvents"]
                blocks = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
                peaks.append(states + max(itertools.accumulate(size for _, size in blocks)))
            optimizer.step()  # needs no more than that: its activations are gone
    except torch.OutOfMemoryError:
        note = f"out of memory at microbatch {sequences}: the figures are bounds"
        print(f"[rank{dist.get_rank()}] note: {note}", file=sys.stderr)
        while len(peaks) < 4:  # two known peaks give the third
            peaks.append(3 * peaks[2] - 2 * peaks[1] if len(peaks) == 3 else memory)
    return states, *peaks[1:]


# ---- main ----
def main():
    args = parse_args()
    with process_group(args.device, args.timeout) as (rank, _, world_size, device):
        unused = dict(steps=1, lr=1, clip=1, microbatch=None, metrics=os.devnull, save=None)  # flags of training
        check_args(argparse.Namespace(**vars(args), **unused), world_size)
        if not 0 <= args.free < 1 or (args.memory_gib is not None and not args.memory_gib > 0):
            raise UsageError(f"--free {args.free} --memory-gib {args.memory_gib}: use 0 to 0.99, and more than 0")
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        vacant = total = host / int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        if args.memory_gib:
            vacant = total = args.memory_gib * 2**30
        elif device.type == "cuda":
            vacant, total = torch.cuda.mem_get_info()
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reports each start and stop otherwise
        needs = measure_peaks(args, device, total)
        figures = [total, max(0, vacant - args.free * total), *(-need for need in needs)]
        figures = torch.tensor(figures, dtype=torch.float64, device=device) / 2**20  # MiB
        # all_reduce over dp: own memory and negated needs -> the least memory, the largest needs, the same on each rank
        dist.all_reduce(figures, dist.ReduceOp.MIN)
        total, limit, states, one, two, four = figures.abs().tolist()
        fixed, slope, share = 2 * two - four, (four - two) / 2, args.batch // world_size
        divisors = [n for n in range(1, share + 1) if share % n == 0]
        microbatch = max((n for n in divisors if fixed + n * slope <= limit), default=0)
        if not microbatch:
            needs = f"one sequence takes {fixed + slope:,.1f} MiB or more, {states:,.1f} of them states"
            ways_out = "a shorter --seq-len, --checkpoint-activations, or ZeRO (05_zero)"
            raise UsageError(f"{needs}; {limit:,.1f} of {total:,.1f} MiB may be used: use {ways_out}")
        if rank == 0:
            print(f"torch {torch.__version__} | {dist.get_backend()} | {device.type} | dp {world_size}")
            rows = {
                "memory of a rank": total,
                f"may be used, {args.free:.0%} stays free": limit,
                "parameters, gradients, buckets, AdamW's two": states,
                "temporaries at any microbatch": fixed - states,
                "activations per sequence": slope,
                "room for activations": limit - fixed,
            }
            for name, value in rows.items():
                print(f"{name:46} {value:12,.1f} MiB")
            print(f"check: the line through 2 and 4 sequences is {(fixed + slope) / one - 1:+.1%} off at 1")
            for n in divisors[divisors.index(microbatch) :][:2]:
                peak = fixed + n * slope
                print(f"microbatch {n} of {share}: peak {peak:,.1f} MiB, {peak / total:.0%} of the memory")
            single = int((total - fixed) / slope)  # what one device holds to the brim
            folk = int(0.8 * single * world_size)
            taken = (fixed + folk / world_size * slope) / total
            print(f"folk rule: {single} on one device x {world_size} x 0.8 = batch {folk}, {taken:.0%} of the memory")
            print(f"--batch {args.batch} --microbatch {microbatch}  (accumulate {share // microbatch})")


if __name__ == "__main__":
    main()
