"""Pipeline parallelism with nothing but send and recv: stages, a schedule that is data, one executor for all of them.

    torchrun --nproc-per-node 2 04_pipeline/from_scratch.py
Look at loss and grad_norm: those of train.py, and of one process. 1F1B with 2 ranks and 4 microbatches:
    rank 0 (embedding, layers 0, 1)    0 1 . a 2 b 3 c . d      0 1 2 3 forward, a b c d backward of the same
    rank 1 (layers 2, 3, norm, head)   . 0 a 1 b 2 c 3 d .      . nothing to do: the bubble
schedules.py makes the lists of steps, executor.py runs them, timeline.py shows them (--simulate, --timeline).
Shapes: B sequences, T tokens, D width, M MLP hidden, H heads, G key/value heads, K head width, V vocabulary (bytes).
"""

import argparse
import json
import os
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from executor import Executor, connect
from options import check_pp, largest_microbatch
from schedules import make_schedule, peak_activations
from stages import build_stages, load_stages, name_weights, save_stages, tie_weights
from timeline import check_drawing, draw_timeline, show_simulation
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from weight_gradients import take_apart

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError, process_group  # copied this folder out? copy common/ beside it or into it


# ---- config ----
def parse_args():
    add = (parser := argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)).add_argument
    add("--steps", type=int, default=100, help="optimizer steps")
    add("--batch", type=int, default=32, help="global batch in sequences, shared by the ranks")
    add("--microbatch", type=int, help="sequences per forward on one rank; default: two microbatches per rank")
    add("--seq-len", type=int, default=128, help="tokens (bytes) per sequence")
    for flag, default in (("--dim", 128), ("--layers", 4), ("--heads", 4), ("--kv-heads", 2), ("--seed", 0)):
        add(flag, type=int, default=default)
    add("--lr", type=float, default=3e-3)
    add("--clip", type=float, default=1.0, help="largest global gradient norm")
    add("--data", help="a file or a folder of text; default: the source of Python's standard library")
    add("--dtype", choices=("float32", "float64", "bfloat16", "float16"), default="float32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--timeout", type=float, default=600, help="seconds that a rank waits for another")
    add("--metrics", default=os.devnull, help="file for one JSON object per step")
    add("--save", help="folder for model.safetensors and the optimizer's states, written at the end")
    add("--resume", help="folder to go on from, saved at any pp; may be empty if --save names it too")
    add("--pp", type=int, help="ranks of a pipeline, the rest is data parallel; default: all")
    add("--schedule", choices=("gpipe", "1f1b", "interleaved", "zero-bubble"), default="1f1b")
    add("--chunks", type=int, help="stages per rank, with --schedule interleaved; default: 2")
    add("--split", help="layers per stage, as in 3,5; default: by estimated cost")
    add("--tie", action="store_true", help="embedding and head are one matrix")
    add("--checkpoint-activations", action="store_true", help="recompute activations in backward, layer by layer")
    add("--vary-length", action="store_true", help="microbatches of four different lengths")
    simulated = "only show the schedule, played with these costs"
    add("--simulate", nargs="?", const="1,1,1,0", metavar="F,B,W,SEND", help=simulated)
    add("--timeline", metavar="FILE", help="draw the last step, or the simulation, as .svg or .png, one lane a rank")
    return parser.parse_args()


def check_args(args, dp_size):
    """Refuses what cannot be trained: on every rank alike, before the first collective."""
    for name in ("steps", "batch", "seq_len", "dim", "layers", "heads", "kv_heads", "lr", "clip", "timeout"):
        if not getattr(args, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} must be above 0")
    if args.dim % (2 * args.heads) or args.heads % args.kv_heads:
        raise UsageError(f"{args.heads} heads must divide --dim {args.dim} / 2, and {args.kv_heads} kv-heads the heads")
    if args.batch % dp_size:
        raise UsageError(f"--batch {args.batch} is not divisible by {dp_size} data-parallel ranks: use {dp_size} x n")
    args.microbatch = args.batch // dp_size if args.microbatch is None else args.microbatch
    if args.microbatch < 1 or args.batch // dp_size % args.microbatch:
        raise UsageError(f"--microbatch {args.microbatch} must divide a rank's {args.batch // dp_size}: use 1, say")
    if not Path(args.metrics).absolute().parent.is_dir() or (args.save and Path(args.save).is_file()):
        raise UsageError(f"--metrics {args.metrics} needs a folder that exists; --save {args.save} must be a folder")


# ---- model ----
def rotate(x):  # (B, H, T, K) -> (B, H, T, K)
    """Turns the pair x[i], x[i + K/2] by the angle of its position (Su et al., RoFormer, section 3.2.2)."""
    frequency = 10000.0 ** -(torch.arange(0, x.shape[-1], 2, dtype=torch.float32, device=x.device) / x.shape[-1])
    angle = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32, device=x.device), frequency).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return (x * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.head_dim = dim // heads
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x):  # (B, T, D) -> (B, T, D)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)  # (B, H or G, T, K)
        out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        hidden = 64 * -(-8 * dim // 192)  # 8/3 of the width, rounded up to a multiple of 64
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):  # (B, T, D) -> (B, T, M) -> (B, T, D)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(dim, eps=1e-5)
        self.self_attn = Attention(dim, heads, kv_heads)
        self.post_attention_layernorm = nn.RMSNorm(dim, eps=1e-5)
        self.mlp = MLP(dim)

    def forward(self, x):  # (B, T, D) -> (B, T, D)
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):  # parameter names and shapes are those of Hugging Face's LlamaForCausalLM
    def __init__(self, dim, layers, heads, kv_heads, vocab_size=256):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab_size, dim)
        self.model.layers = nn.ModuleList(Block(dim, heads, kv_heads) for _ in range(layers))
        self.model.norm = nn.RMSNorm(dim, eps=1e-5)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens):  # (B, T) -> (B, T, V)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


def init_weights(model, seed):
    """Fills each matrix from the seed and its own name, so that a shard is a slice in any layout; norms start at 1."""
    for name, weight in model.named_parameters():
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        weight.data.copy_(0.02 * torch.randn(weight.shape, generator=generator) if weight.dim() > 1 else torch.ones(1))


# ---- data ----
def read_windows(path, seq_len, batch):
    """Returns the text, by default Python's own source, as (windows, T + 1) bytes: T inputs and, one on, T targets."""
    root = Path(path or os.path.dirname(os.__file__))
    files = [root] if root.is_file() else sorted(root.rglob("*") if path else root.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files if file.is_file())
    if len(text) <= seq_len * batch:
        raise UsageError(f"{root} has {len(text)} bytes of text, a batch takes {seq_len * batch + 1}: use more --data")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, seq_len + 1, seq_len)


def global_batch(windows, batch, seed, step):
    """Returns the (B, T + 1) bytes of a step, counted from 0, in DistributedSampler's order: alike in any layout."""
    epoch, place = divmod(step, len(windows) // batch)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed + epoch))
    return windows[order[place * batch : (place + 1) * batch]]


# ---- pipeline ----
def make_stages(args, sizes, counts, mine, device, dtype):
    """Returns {number: Stage} of the numbers in mine, with their initial weights. counts: layers per stage."""
    with torch.device("meta"):  # shapes only: no rank ever holds the whole model
        whole = Llama(*sizes)
    stages = build_stages(whole, counts, mine, device, dtype, args.checkpoint_activations)
    for stage in stages.values():
        init_weights(stage, args.seed)
    return stages


# ---- main ----
def train_stages(args, rank, world_size, device):
    pp_size, dp_size, num_chunks, counts = check_pp(args, world_size)
    if args.microbatch is None:
        args.microbatch = largest_microbatch(args.batch // dp_size, pp_size, len(counts))
    check_args(args, dp_size)
    check_drawing(args)
    windows, cuda = read_windows(args.data, args.seq_len, args.batch), device.type == "cuda"
    ranks, timeout = torch.arange(world_size).view(dp_size, pp_size), timedelta(0, args.timeout)  # stages: neighbours
    groups = (dist.new_subgroups_by_enumeration(lists.tolist(), timeout)[0] for lists in (ranks.T, ranks))
    (dp_group, pp_group), (dp_rank, pp_rank), pipelines = groups, divmod(rank, pp_size), ranks.tolist()
    schedule = make_schedule(args.schedule, pp_size, args.batch // dp_size // args.microbatch, num_chunks)
    pipe = connect(schedule, pipelines, len(counts), timeout)
    dtype = torch.float64 if args.dtype == "float64" else torch.float32
    sizes = [args.dim, args.layers, args.heads, args.kv_heads, 256]
    stages = make_stages(args, sizes, counts, range(pp_rank, len(counts), pp_size), device, dtype)
    ends = (pipelines, timeout, args.seed, init_weights)
    tied, tie_group = tie_weights(stages, len(counts), *ends) if args.tie else (None, None)
    weights = list((names := name_weights(stages)).values())
    fused = cuda and args.dtype != "float16"  # the fused one wants ShardedGradScaler's flag in another shape
    optimizer = torch.optim.AdamW(weights, lr=args.lr, fused=fused)
    # A gradient that overflows on one stage must stop the step on all of them.
    scaler = ShardedGradScaler(device.type, enabled=args.dtype == "float16", process_group=pp_group)
    scaler.scale(torch.zeros((), device=device))  # ranks without a loss, too, must know the scale
    noted, works, losses, texts = [], [], [], []
    for stage in stages.values() if args.schedule == "zero-bubble" else ():
        take_apart(stage, noted)

    def forward(number, x, microbatch):
        text = texts[microbatch]
        with torch.autocast(device.type, getattr(torch, args.dtype), enabled="16" in args.dtype):
            y = stages[number](text[:, :-1] if x is None else x)
            if number < len(counts) - 1:
                return y
            loss = F.cross_entropy(y.flatten(0, 1), text[:, 1:].flatten(), reduction="sum") / tokens  # of all replicas
        losses.append(loss.detach())
        return scaler.scale(loss)

    def finished(number):  # the stages behind are done first: their all-reduce runs while the pipeline cools down
        if mine := list(stages[number].parameters()) if dp_size > 1 else []:
            flat = torch.cat([w.grad.flatten() for w in mine])
            # all_reduce over dp: this replica's gradients of a stage -> the sum
            works.append((dist.all_reduce(flat, group=dp_group, async_op=True), flat, mine))

    executor = Executor(schedule[pp_rank], pipe, forward, device, dtype, finished, noted)
    run = dict(windows=len(windows), batch=args.batch, seq_len=args.seq_len, seed=args.seed, sizes=sizes, tied=args.tie)
    first, log = 0, print if rank == 0 else lambda _: None
    if args.resume and (args.resume != args.save or Path(args.resume, "model.safetensors").exists()):
        first = load_stages(args.resume, run, names, optimizer, scaler)
    metrics = open(args.metrics if rank == 0 else os.devnull, "a" if first else "w")
    # all_reduce over all ranks: bytes of states on this rank -> the most
    dist.all_reduce(held := torch.tensor(sum(4 * w.nbytes + 4 for w in weights), device=device), dist.ReduceOp.MAX)

    def report(step, values, copied, seconds):
        copied.synchronize() if cuda else None
        loss, grad_norm, tokens = values.tolist()
        peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
        row = dict(step=step, loss=loss, grad_norm=grad_norm, tokens_per_s=tokens / seconds, step_ms=1e3 * seconds)
        print(json.dumps(row | dict(state_mib=states, peak_mib=peak)), file=metrics, flush=True)
        if rank == 0 and (step == 1 or step % max(1, args.steps // 10) == 0):
            print(f"{step:5} | {loss:6.4f} | {grad_norm:9.4f} | {tokens / seconds:8.0f}", flush=True)

    states = held.item() / 2**20
    plan = f"dp {dp_size} x pp {pp_size} | {args.schedule}"
    log(f"torch {torch.__version__} | {dist.get_backend()} | {device.type} | {plan}")
    log(" step |   loss | grad_norm | tokens/s")
    late, clock = [], time.perf_counter()
    for step in range(first + 1, args.steps + 1):
        mine = global_batch(windows, args.batch, args.seed, step - 1)[dp_rank::dp_size]  # (B/dp, T + 1)
        split = (mine.pin_memory() if cuda else mine).to(device, non_blocking=True).long().split(args.microbatch)
        texts[:] = [t[:, : t.shape[1] - args.vary_length * (i % 4) * (args.seq_len // 8)] for i, t in enumerate(split)]
        tokens = dp_size * sum(text[:, 1:].numel() for text in texts)
        record = [] if args.timeline and step == args.steps else None
        executor.run(step, [(args.microbatch, text.shape[1] - 1, args.dim) for text in texts], record)  # (B, T, D)
        for work, flat, mine in works:
            work.wait()
            for w, part in zip(mine, flat.split([w.numel() for w in mine])):
                w.grad.copy_(part.view_as(w))
        if tied is not None:  # all_reduce over the first and the last rank: gradient of its own use -> of both uses
            dist.all_reduce(tied.grad, group=tie_group)
        scaler.unscale_(optimizer)
        counted = [w.grad for w in weights if w is not tied or pp_rank == 0]  # of two tied copies one
        square = nn.utils.get_total_norm(counted) ** 2
        dist.all_reduce(square, group=pp_group)  # all_reduce over pp: square of this rank's part of the norm -> of it
        nn.utils.clip_grads_with_norm_(weights, args.clip, grad_norm := square.sqrt())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=device, dtype=dtype)
        dist.all_reduce(loss)  # all_reduce over all ranks: this replica's loss on its last rank, else 0 -> the loss
        losses.clear(), works.clear()
        # The host reads this step's figures one step later: waiting for them now would leave the GPU without work.
        values = torch.stack((loss, grad_norm, torch.full_like(loss, tokens))).to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if cuda else None
        began, clock = clock, time.perf_counter()
        late.append((step, values, copied, clock - began))
        while len(late) > (step < args.steps):  # one step late; at the end, all
            report(*late.pop(0))
    if args.save:
        once = {name: w for name, w in names.items() if w is not tied or pp_rank == 0}
        save_stages(args.save, run, max(first, args.steps), once, optimizer, scaler, pipelines[0])
    if args.timeline:
        measured, simulated = draw_timeline(record, schedule, pipelines[0], args.timeline, args.schedule)
        log(f"bubble of the last step: measured {measured:.1%}, simulated with the measured costs {simulated:.1%}")
    log(f"layers per stage {counts}, at most {max(map(peak_activations, schedule))} microbatches held by a rank")


def main():
    args = parse_args()
    pp = 1 if args.simulate else max(1, args.pp or 1)
    with process_group(args.device, args.timeout, pp=pp) as (rank, _, world_size, device):
        (show_simulation if args.simulate else train_stages)(args, rank, world_size, device)


if __name__ == "__main__":
    main()
