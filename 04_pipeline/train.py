"""Pipeline parallelism as you ship it: torch.distributed.pipelining runs the stages (Narayanan et al., 2021, section 2)

    torchrun --nproc-per-node 2 04_pipeline/train.py
Look at loss and grad_norm, those of one process, and at the last line: what a rank holds. 2 stages, 4 microbatches:
    rank 0, embedding and layers 0, 1:   F0 F1 .. B0 F2 B1 F3 B2 .. B3   F  forward, activations to the next stage
    rank 1, layers 2, 3 and head:        .. F0 B0 F1 B1 F2 B2 F3 B3 ..   B  backward, their gradient to the one before
This is 1F1B: rank 0 holds the activations of at most 2 microbatches. GPipe, all F before all B, holds those of all 4.
Shapes: b sequences of a microbatch, T tokens, D width, M MLP hidden, H heads, K head width, V vocabulary (bytes).
"""

import argparse
import json
import os
import sys
import time
import zlib
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from library import build_schedule, check_stages, count_held, shapes_of
from stages import load_stages, save_stages
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint

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
    add("--pp", type=int, help="ranks that split the layers, the rest is data parallel; default: all")
    add("--schedule", choices=("gpipe", "1f1b", "interleaved", "zero-bubble"), default="1f1b")
    add("--chunks", type=int, help="stages per rank; default: 2 for interleaved, else 1")
    add("--split", help="layers per stage, as in 3,5; default: by estimated cost")
    add("--tie", action="store_true", help="one weight for embedding and head")
    add("--checkpoint-activations", action="store_true", help="recompute activations in backward, layer by layer")
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
class StageModule(nn.Module):
    """Layers first .. last - 1 of a Llama, embedding or norm and head at its ends, under the whole model's names."""

    def __init__(self, whole, first, last, args, device):
        super().__init__()
        self.is_first, self.is_last, self.recompute = first == 0, last == args.layers, args.checkpoint_activations
        self.autocast = dict(device_type=device.type, dtype=getattr(torch, args.dtype), enabled="16" in args.dtype)
        self.model = nn.Module()
        if self.is_first or (self.is_last and args.tie):  # a tied head is a copy of the embedding, under its name
            self.model.embed_tokens = whole.model.embed_tokens
        own = {str(i): whole.model.layers[i] for i in range(first, last)}
        self.model.layers = nn.ModuleDict(own)  # a ModuleList would number them from 0
        if self.is_last:
            self.model.norm = whole.model.norm
            self.lm_head = None if args.tie else whole.lm_head

    def forward(self, x):  # (b, T) tokens on the first stage, else (b, T, D) -> (b, T, D), on the last (b, T, V)
        with torch.autocast(**self.autocast):
            x = self.model.embed_tokens(x) if self.is_first else x
            for layer in self.model.layers.values():
                x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            if not self.is_last:
                return x
            x = self.model.norm(x)
            return F.linear(x, self.model.embed_tokens.weight) if self.lm_head is None else self.lm_head(x)


# ---- main ----
def train_with_pipelining(args, rank, world_size, device):
    counts, pp_size, num_microbatches = check_stages(args, world_size, check_args)
    windows, cuda = read_windows(args.data, args.seq_len, args.batch), device.type == "cuda"
    dp_size, num_stages, tokens = world_size // pp_size, len(counts), args.batch * args.seq_len
    # pp: neighbours. A rank waits for the next stage in every microbatch, for the other replicas once per step.
    ranks, timeout = torch.arange(world_size).view(dp_size, pp_size), timedelta(seconds=args.timeout)
    pp_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout)  # init_device_mesh knows of no time limit
    dp_group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout)
    dp_rank, pp_rank = divmod(rank, pp_size)
    dtype = torch.float64 if args.dtype == "float64" else torch.float32
    sizes = [args.dim, args.layers, args.heads, args.kv_heads, 256]
    with torch.device("meta"):  # shapes only: no rank ever holds the whole model
        whole = Llama(*sizes).to(dtype)
        modules = [StageModule(whole, *ends, args, device) for ends in pairwise([0, *accumulate(counts)])]
    params, states = count_held(modules, pp_size)
    # Stage s is on rank s % pp_size: with --chunks a microbatch goes round the ranks several times.
    stages = []
    for s in range(pp_rank, num_stages, pp_size):
        init_weights(modules[s].to_empty(device=device), args.seed)
        shapes = shapes_of(args, s, num_stages, dtype)
        stages.append(PipelineStage(modules[s], s, num_stages, device, *shapes, group=pp_group))
    names = {name: p for stage in stages for name, p in stage.submod.named_parameters()}  # a shared one is there once
    weights, tied = list(names.values()), []
    if args.tie and pp_size > 1:
        tie_group, _ = dist.new_subgroups_by_enumeration(ranks[:, [0, -1]].tolist(), timeout)
        tied = [stage.submod.model.embed_tokens.weight for stage in stages if stage.is_first or stage.is_last]
    counted = [p for p in weights if pp_rank == 0 or p not in set(tied)]  # the norm has a tied weight once
    fused = cuda and args.dtype != "float16"  # the fused one wants ShardedGradScaler's flag in another shape
    optimizer = torch.optim.AdamW(weights, lr=args.lr, fused=fused)
    # A gradient that overflows on one stage must stop the step on all of them.
    scaler = ShardedGradScaler(device.type, enabled=args.dtype == "float16", process_group=pp_group)
    scaler.scale(torch.zeros((), device=device))  # makes the scale, on ranks too that see no loss
    parts = []

    def loss_of(logits, targets):  # of one microbatch, on the last stage
        part = F.cross_entropy(logits.flatten(0, 1).to(dtype), targets.flatten(), reduction="sum") / tokens  # of all
        parts.append(part.detach())
        return scaler.scale(part)

    schedule = build_schedule(args.schedule, stages, num_microbatches, loss_of)
    run = dict(windows=len(windows), batch=args.batch, seq_len=args.seq_len, seed=args.seed, sizes=sizes, tied=args.tie)
    first = 0
    if args.resume and (args.resume != args.save or Path(args.resume, "model.safetensors").exists()):
        first = load_stages(args.resume, run, names, optimizer, scaler)
    metrics = open(args.metrics if rank == 0 else os.devnull, "a" if first else "w")

    def report(step, values, copied, seconds):
        copied.synchronize() if cuda else None
        loss, grad_norm = values.tolist()
        peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
        row = dict(step=step, loss=loss, grad_norm=grad_norm, tokens_per_s=tokens / seconds, step_ms=1e3 * seconds)
        print(json.dumps(row | dict(state_mib=states, peak_mib=peak)), file=metrics, flush=True)
        if rank == 0 and (step == 1 or step % max(1, args.steps // 10) == 0):
            print(f"{step:5} | {loss:6.4f} | {grad_norm:9.4f} | {tokens / seconds:8.0f}", flush=True)

    log = print if rank == 0 else lambda _: None
    plan = f"{args.schedule}, {num_microbatches} microbatches"
    log(f"torch {torch.__version__} | {dist.get_backend()} | {device.type} | dp {dp_size} x pp {pp_size} | {plan}")
    log(" step |   loss | grad_norm | tokens/s")
    late, clock = [], time.perf_counter()
    for step in range(first + 1, args.steps + 1):
        # The stages of a replica take the same sequences: (B/dp, T + 1)
        mine = global_batch(windows, args.batch, args.seed, step - 1)[dp_rank::dp_size]
        text = (mine.pin_memory() if cuda else mine).to(device, non_blocking=True).long()
        # send and recv over pp, per microbatch: (b, T, D) to the next stage, and its gradient back
        schedule.step(*[text[:, :-1]] * (pp_rank == 0), target=text[:, 1:], return_outputs=False)
        for p in tied:
            # all_reduce over the first and last stage: the gradient of the embedding, of the head -> their sum
            dist.all_reduce(p.grad, group=tie_group)
        # all_reduce over dp: this replica's gradients -> the sum, on the later stages while the first still go backward
        works = [dist.all_reduce(p.grad, group=dp_group, async_op=True) for p in weights if dp_size > 1]
        while works:
            works.pop().wait()
        scaler.unscale_(optimizer)
        square = nn.utils.get_total_norm([p.grad for p in counted]) ** 2
        dist.all_reduce(square, group=pp_group)  # all_reduce over pp: square of these stages' norm -> of the whole norm
        nn.utils.clip_grads_with_norm_(weights, args.clip, grad_norm := square.sqrt())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loss = sum(parts, torch.zeros((), dtype=dtype, device=device))
        parts.clear()
        dist.all_reduce(loss)  # all_reduce over dp and pp: the last stage's part of the loss, 0 elsewhere -> the loss
        # The host reads this step's figures one step later: waiting for them now would leave the GPU without work.
        values = torch.stack((loss, grad_norm)).to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if cuda else None
        began, clock = clock, time.perf_counter()
        late.append((step, values, copied, clock - began))
        while len(late) > (step < args.steps):  # one step late; at the end, all
            report(*late.pop(0))
    if args.save:
        save_stages(args.save, run, max(first, args.steps), names, optimizer, scaler, ranks[0].tolist())
    log(f"layers per stage {counts}, parameters per rank {params}")


def main():
    args = parse_args()
    with process_group(args.device, args.timeout, pp=max(1, args.pp or 1)) as (rank, _, world_size, device):
        train_with_pipelining(args, rank, world_size, device)


if __name__ == "__main__":
    main()
