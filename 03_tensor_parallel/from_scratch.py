"""Megatron-LM's tensor parallelism on plain collectives (Shoeybi et al. 2019; Korthikanti et al. 2022 for sequences).

    torchrun --nproc-per-node 2 03_tensor_parallel/from_scratch.py
Look at loss and grad_norm: those of train.py, and of one process. Half a block on two ranks, f and g are collectives:
    rank 0:  x --+-- f -- rows 0 .. of gate, up ----> columns 0 .. of down ---- partial sum --+-- g --> y
    rank 1:  x --+-- f -- the other rows -----------> the other columns ------- partial sum --+-- g --> y
f copies forward and all-reduces backward, g the other way round (operators.py); layers.py holds the split matrices.
Shapes: B sequences, T tokens, D width, M MLP hidden, H heads, G key/value heads, K head width, V vocabulary.
"""

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checkpoint import load_training, save_training
from layers import ColumnParallelLinear, RowParallelLinear, VocabParallelCrossEntropy, VocabParallelEmbedding, project
from operators import TensorParallel
from options import add_dropout, check_tp
from shards import clip_gradients, copies, init_shards, shard, sum_gradients, unshard
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError, process_group  # copied this folder out? copy common/ beside it or into it


# ---- config ----
def parse_args():
    add = (parser := argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)).add_argument
    add("--steps", type=int, default=100, help="optimizer steps")
    add("--batch", type=int, default=32, help="global batch in sequences, shared by the ranks")
    add("--microbatch", type=int, help="sequences per forward on one rank; default: its whole share of the batch")
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
    add("--resume", help="folder to go on from, saved at any tp; may be empty if --save names it too")
    add("--tp", type=int, help="ranks that split each matrix, the rest is data parallel; default: all")
    add("--vocab-size", type=int, default=256)
    add("--sequence-parallel", action="store_true", help="norms and residuals on 1/tp of the tokens")
    add("--regather", action="store_true", help="with it: keep 1/tp of each layer's input, gather it again in backward")
    add("--no-overlap", action="store_true", help="wait for each collective before the next matmul")
    add("--gather-logits", action="store_true", help="a loss of whole logits on every rank, to compare")
    add("--dropout", type=float, default=0.0)
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


# ---- tensor parallel ----
class ParallelAttention(nn.Module):
    """Attention on this rank's heads. With fewer kv heads than ranks, neighbours share one."""

    def __init__(self, dim, heads, kv_heads, tp):
        super().__init__()
        self.head_dim = dim // heads
        kv_dim, shards = kv_heads * self.head_dim, min(kv_heads, tp.size)
        self.q_proj = ColumnParallelLinear(dim, dim, tp)
        self.k_proj = ColumnParallelLinear(dim, kv_dim, tp, num_shards=shards)
        self.v_proj = ColumnParallelLinear(dim, kv_dim, tp, num_shards=shards)
        self.o_proj = RowParallelLinear(dim, dim, tp)

    def forward(self, x):  # (B, T, D) -> (B, T, D), or both (B, T/tp, D)
        projected = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in projected)  # (B, H/tp or G/tp, T, K)
        out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class ParallelMLP(nn.Module):
    def __init__(self, dim, hidden, tp):
        super().__init__()
        self.gate_proj = ColumnParallelLinear(dim, hidden, tp)
        self.up_proj = ColumnParallelLinear(dim, hidden, tp)
        self.down_proj = RowParallelLinear(hidden, dim, tp)

    def forward(self, x):  # (B, T, D) -> (B, T, M/tp) -> (B, T, D), or from and to (B, T/tp, D)
        gate, up = project(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


def parallelize(model, heads, kv_heads, vocab_size, tp, gather_logits):
    """Puts split layers in the place of a model's own, which may be on the meta device: no rank ever holds those."""
    dim = model.lm_head.in_features
    model.model.embed_tokens = VocabParallelEmbedding(vocab_size, dim, tp)
    model.lm_head = ColumnParallelLinear(dim, vocab_size, tp, gather_output=gather_logits)
    for layer in model.model.layers:
        layer.self_attn = ParallelAttention(dim, heads, kv_heads, tp)
        layer.mlp = ParallelMLP(dim, layer.mlp.up_proj.out_features, tp)


# ---- main ----
def main():
    args = parse_args()
    with process_group(args.device, args.timeout, tp=max(1, args.tp or 1)) as (rank, _, world_size, device):
        check_tp(args, tp_size := world_size if args.tp is None else args.tp)
        check_args(args, dp_size := world_size // tp_size)
        windows, cuda = read_windows(args.data, args.seq_len, args.batch), device.type == "cuda"
        ranks, timeout = torch.arange(world_size).view(dp_size, tp_size), timedelta(0, args.timeout)  # tp: neighbours
        groups = (dist.new_subgroups_by_enumeration(lists.tolist(), timeout)[0] for lists in (ranks.T, ranks))
        (dp_group, tp_group), (dp_rank, tp_rank) = groups, divmod(rank, tp_size)
        tp = TensorParallel(tp_group, tp_rank, tp_size, args.sequence_parallel, not args.no_overlap, args.regather)
        sizes = [args.dim, args.layers, args.heads, args.kv_heads, args.vocab_size]
        with torch.device("meta"):
            model = Llama(*sizes)
        with device:
            parallelize(model, *sizes[2:], tp, args.gather_logits)
        for module in model.modules():
            module.to_empty(device=device) if isinstance(module, nn.RMSNorm) else None
        init_shards(model, args.seed, tp)
        model.to(torch.float64 if args.dtype == "float64" else torch.float32)
        shared = torch.Generator(device).manual_seed(args.seed + world_size + dp_rank + 1)  # alike in a tp group
        private = torch.Generator(device).manual_seed(args.seed + rank + 1)
        if args.dropout:  # with sequence parallelism the ranks of a tp group hold different tokens outside, too
            add_dropout(model, args.dropout, private if tp.sequence_parallel else shared, private)
        weights = list(model.parameters())
        optimizer = torch.optim.AdamW(weights, lr=args.lr, fused=cuda)
        # A gradient that overflows on one rank must stop the step on all of its tp group.
        scaler = ShardedGradScaler(device.type, enabled=args.dtype == "float16", process_group=tp.group)
        run = dict(windows=len(windows), batch=args.batch, seq_len=args.seq_len, seed=args.seed, sizes=sizes)
        parts, first, works = (model, optimizer, scaler, (shared, private)), 0, []
        if args.resume and (args.resume != args.save or Path(args.resume, "model.safetensors").exists()):
            first = load_training(args.resume, run, *parts, partial(shard, tp=tp))
        metrics = open(args.metrics if rank == 0 else os.devnull, "a" if first else "w")
        norms = [w for w in weights if not hasattr(w, "placement")] if tp.sequence_parallel else []
        same_kv = [w for w in weights if hasattr(w, "placement") and copies(w, tp) > 1]
        kv_group = dist.new_subgroups(copies(same_kv[0], tp), timeout=timeout)[0] if same_kv else None  # neighbours
        for weight in weights if dp_size > 1 else ():
            # all_reduce over dp: this replica's gradient -> the sum, while the last microbatch's backward goes on
            weight.register_post_accumulate_grad_hook(
                lambda w: works.append(dist.all_reduce(w.grad, group=dp_group, async_op=True)) if last else None
            )

        def report(step, values, copied, seconds):
            copied.synchronize() if cuda else None
            loss, grad_norm = values.tolist()
            peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
            states = sum(t.nbytes for w in weights for t in (w, w, *optimizer.state[w].values())) / 2**20
            row = dict(step=step, loss=loss, grad_norm=grad_norm, tokens_per_s=tokens / seconds, step_ms=1e3 * seconds)
            print(json.dumps(row | dict(state_mib=states, peak_mib=peak)), file=metrics, flush=True)
            if rank == 0 and (step == 1 or step % max(1, args.steps // 10) == 0):
                print(f"{step:5} | {loss:6.4f} | {grad_norm:9.4f} | {tokens / seconds:8.0f}", flush=True)

        log = print if rank == 0 else lambda _: None
        log(f"torch {torch.__version__} | {dist.get_backend()} | {device.type} | dp {dp_size} x tp {tp.size}")
        log(" step |   loss | grad_norm | tokens/s")
        tokens, late, clock = args.batch * args.seq_len, [], time.perf_counter()
        for step in range(first + 1, args.steps + 1):
            # The ranks of a tp group take the same sequences: (B/dp, T + 1)
            loss, mine = 0.0, global_batch(windows, args.batch, args.seed, step - 1)[dp_rank::dp_size]
            texts = (mine.pin_memory() if cuda else mine).to(device, non_blocking=True).long().split(args.microbatch)
            for i, text in enumerate(texts, 1):
                last, targets = i == len(texts), text[:, 1:].flatten()
                with torch.autocast(device.type, getattr(torch, args.dtype), enabled="16" in args.dtype):
                    logits = model(text[:, :-1]).flatten(0, 1)  # (B T, V/tp), or with --gather-logits (B T, V)
                    if args.gather_logits:
                        part = F.cross_entropy(logits[:, : args.vocab_size], targets, reduction="sum")
                    else:
                        part = VocabParallelCrossEntropy.apply(logits, targets, args.vocab_size, tp)
                part = part / tokens  # of all replicas
                scaler.scale(part).backward()
                loss += part.detach()
            while works:
                works.pop().wait()
            sum_gradients(norms, tp.group)  # each rank has seen 1/tp of the tokens
            sum_gradients(same_kv, kv_group)  # each rank has seen its own query heads
            scaler.unscale_(optimizer)
            grad_norm = clip_gradients(weights, args.clip, tp)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            dist.all_reduce(loss, group=dp_group)  # all_reduce over dp: this replica's part of the loss -> the loss
            # The host reads this step's figures one step later: waiting for them now would leave the GPU without work.
            values = torch.stack((loss, grad_norm)).to("cpu", non_blocking=True)
            copied = torch.cuda.current_stream().record_event() if cuda else None
            began, clock = clock, time.perf_counter()
            late.append((step, values, copied, clock - began))
            while len(late) > (step < args.steps):  # one step late; at the end, all
                report(*late.pop(0))
        if args.save:
            save_training(args.save, run, max(first, args.steps), *parts, partial(unshard, tp=tp))
        whole, part = sum(getattr(w, "placement", w).shape.numel() for w in weights), sum(w.numel() for w in weights)
        log(f"{part:,} of {whole:,} parameters on each rank")


if __name__ == "__main__":
    main()
