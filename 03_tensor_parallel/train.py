"""Tensor parallelism as you ship it: DTensor splits the matrices over ranks (Shoeybi et al., Megatron-LM, section 3).

    torchrun --nproc-per-node 2 03_tensor_parallel/train.py
Look at loss and grad_norm, those of one process, and at the last line: what a rank holds. Half a block on two ranks:
    rank 0:  x -- f --> columns of q k v: heads 0, 1 --> attention --> rows of o_proj --> term --+-- g --> sum
    rank 1:  x -- f --> columns of q k v: heads 2, 3 --> attention --> rows of o_proj --> term --+-- g --> sum
g is an all_reduce; f is one in backward. With --sequence-parallel x and sum hold T/tp tokens, f is an all_gather and g
a reduce_scatter, in backward the other way round (Korthikanti et al., 2022, section 4.2.2).
Shapes: B sequences, T tokens, D width, M MLP hidden, H heads, G key/value heads, K head width, V vocabulary.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checkpoint import load_training, save_training
from dtensors import Replicated, init_dtensors, part_of, use_async_tp
from options import add_dropout, check_tp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp

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
    add("--gather-logits", action="store_true", help="a loss of whole logits on every rank, to compare")
    add("--dropout", type=float, default=0.0)
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile")
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
def split(model, mesh, args):
    """Makes DTensors of all parameters, and communication where a placement changes; mesh: a tp group."""
    outside = Shard(1) if args.sequence_parallel else Replicate()  # of x between the split regions: (B, T/tp or T, D)
    # f, once for q, k, v and once for gate, up: one all_reduce of the gradient serves them all
    f = tp.PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate())
    # g over tp: partial (B, T, D) -> outside, since each rank has the sum over its own columns
    g = tp.RowwiseParallel(output_layouts=outside)
    norm, kv = tp.SequenceParallel() if args.sequence_parallel else Replicated(), tp.ColwiseParallel()
    if args.kv_heads < mesh.size():  # every rank computes all of them, and keeps the one that its query heads use
        head_dim = args.dim // args.heads
        kv = Replicated(mesh.get_local_rank() * args.kv_heads // mesh.size() * head_dim, head_dim)
    block = {"input_layernorm": norm, "post_attention_layernorm": norm, "self_attn": f, "mlp": f}
    block |= {f"self_attn.{name}_proj": style for name, style in zip("qkvo", (tp.ColwiseParallel(), kv, kv, g))}
    block |= {"mlp.gate_proj": tp.ColwiseParallel(), "mlp.up_proj": tp.ColwiseParallel(), "mlp.down_proj": g}
    embedding = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=outside)  # (V/tp, D), g
    # lm_head (V/tp, D): f; its output stays (B, T, V/tp), or all_gather over tp: -> (B, T, V)
    logits = dict(output_layouts=Replicate() if args.gather_logits else Shard(-1), use_local_output=args.gather_logits)
    head = tp.ColwiseParallel(input_layouts=outside, **logits)
    plan = {"model.embed_tokens": embedding, "model.norm": norm, "lm_head": head}
    tp.parallelize_module(model, mesh, plan | {f"model.layers.*.{name}": style for name, style in block.items()})


# ---- main ----
def train_with_dtensor(args, rank, world_size, device):
    check_tp(args, tp_size := world_size if args.tp is None else args.tp)
    check_args(args, dp_size := world_size // tp_size)
    if args.compile and args.dropout:
        raise UsageError(f"--compile {args.compile} cannot trace --dropout {args.dropout}'s generators: leave out one")
    if -(-args.vocab_size // tp_size) * (tp_size - 1) >= args.vocab_size:  # loss_parallel would wait for ever
        raise UsageError(f"--vocab-size {args.vocab_size} leaves one of {tp_size} ranks no row: use a smaller --tp")
    windows, cuda = read_windows(args.data, args.seq_len, args.batch), device.type == "cuda"
    ranks, timeout = torch.arange(world_size).view(dp_size, tp_size), timedelta(seconds=args.timeout)  # tp: neighbours
    # init_device_mesh would leave its groups without this timeout.
    groups = [dist.new_subgroups_by_enumeration(lists.tolist(), timeout)[0] for lists in (ranks.T, ranks)]
    mesh = DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=("dp", "tp"))
    dp_rank, dp_group = rank // tp_size, groups[0]
    shared = torch.Generator(device).manual_seed(args.seed + world_size + dp_rank + 1)  # alike in a tp group
    private = torch.Generator(device).manual_seed(args.seed + rank + 1)
    sizes = [args.dim, args.layers, args.heads, args.kv_heads, args.vocab_size]
    dtype = torch.float64 if args.dtype == "float64" else torch.float32
    with torch.device("meta"):  # shapes only: no rank ever holds the whole model
        model = Llama(*sizes).to(dtype)
    if args.dropout:  # before split, whose hooks make DTensors of what these see
        add_dropout(model, args.dropout, private if args.sequence_parallel else shared, private)
    for module in [m for m in model.modules() if isinstance(m, Attention | MLP)] if "16" in args.dtype else ():
        # Autocast casts in the matmul. Before the network that halves the bytes of f.
        module.register_forward_pre_hook(lambda _, inputs: inputs[0].to(getattr(torch, args.dtype)))
    split(model, mesh["tp"], args)
    init_dtensors(model, args.seed, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=cuda)
    # With DTensors as gradients an overflow on one rank is known to its tp group: all skip the step together.
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    run = dict(windows=len(windows), batch=args.batch, seq_len=args.seq_len, seed=args.seed, sizes=sizes)
    parts, first = (model, optimizer, scaler, (shared, private)), 0
    if args.resume and (args.resume != args.save or Path(args.resume, "model.safetensors").exists()):
        first = load_training(args.resume, run, *parts, part_of)
    # Async tensor parallelism needs GPUs that reach each other's memory, and all_gathers to overlap.
    one_node = cuda and 1 < tp_size <= torch.cuda.device_count()
    if overlap := one_node and args.sequence_parallel and args.compile == "inductor":
        use_async_tp(groups[1])
    if args.compile:
        model.compile(backend=args.compile)
    metrics = open(args.metrics if rank == 0 else os.devnull, "a" if first else "w")
    works, last = [], False

    def reduce(p):  # the hook: autograd has just finished p.grad
        if last:  # before the last microbatch they only add up
            # all_reduce over tp, if partial: of this rank's tokens (norms) or heads (k_proj, v_proj) -> of all
            p.grad = p.grad.redistribute(placements=p.placements)
            if dp_size > 1:
                # all_reduce over dp: this replica's gradient of the shard -> the sum, while backward goes on
                works.append(dist.all_reduce(p.grad.to_local(), group=dp_group, async_op=True))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(reduce)

    def report(step, values, copied, seconds):
        copied.synchronize() if cuda else None
        loss, grad_norm = values.tolist()
        peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
        row = dict(step=step, loss=loss, grad_norm=grad_norm, tokens_per_s=tokens / seconds, step_ms=1e3 * seconds)
        print(json.dumps(row | dict(state_mib=held / 2**20, peak_mib=peak)), file=metrics, flush=True)
        if rank == 0 and (step == 1 or step % max(1, args.steps // 10) == 0):
            print(f"{step:5} | {loss:6.4f} | {grad_norm:9.4f} | {tokens / seconds:8.0f}", flush=True)

    # Weight, gradient, AdamW's two averages, and its count of steps. Of uneven shards rank 0 has the largest.
    held = sum(4 * p.to_local().nbytes + 4 for p in model.parameters())
    whole = sum(4 * p.nbytes + 4 for p in model.parameters())
    log = print if rank == 0 else lambda _: None
    off = "off: it needs CUDA and --sequence-parallel"
    compiled = f" | {args.compile}, async tensor parallelism {'on' if overlap else off}" if args.compile else ""
    log(f"torch {torch.__version__} | {dist.get_backend()} | {device.type} | dp {dp_size} x tp {tp_size}{compiled}")
    log(" step |   loss | grad_norm | tokens/s")
    tokens, late, clock = args.batch * args.seq_len, [], time.perf_counter()
    for step in range(first + 1, args.steps + 1):
        # The ranks of a tp group take the same sequences: (B/dp, T + 1)
        loss, mine = 0.0, global_batch(windows, args.batch, args.seed, step - 1)[dp_rank::dp_size]
        texts = (mine.pin_memory() if cuda else mine).to(device, non_blocking=True).long().split(args.microbatch)
        for i, text in enumerate(texts, 1):
            last = i == len(texts)
            with torch.autocast(device.type, getattr(torch, args.dtype), enabled="16" in args.dtype):
                logits = model(text[:, :-1]).flatten(0, 1).to(dtype)  # (B T, V/tp), or with --gather-logits (B T, V)
            # all_reduce over tp, three of (B T): the maximum, the sum of exp, the target's logit
            with contextlib.nullcontext() if args.gather_logits else tp.loss_parallel():
                part = F.cross_entropy(logits, text[:, 1:].flatten(), reduction="sum") / tokens  # of all replicas
                part = part if args.gather_logits else part.to_local()
                scaler.scale(part).backward()
            loss += part.detach()
        while works:
            works.pop().wait()
        scaler.unscale_(optimizer)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor()  # each element counted once
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
        # all_gather over tp, of what is sharded: one tensor at a time
        save_training(args.save, run, max(first, args.steps), *parts, lambda part, _: part.full_tensor())
    log(f"{held:,} of {whole:,} bytes of parameters, gradients and AdamW states on each rank")


def main():
    args = parse_args()
    with process_group(args.device, args.timeout, tp=max(1, args.tp or 1)) as (rank, _, world_size, device):
        train_with_dtensor(args, rank, world_size, device)


if __name__ == "__main__":
    main()
