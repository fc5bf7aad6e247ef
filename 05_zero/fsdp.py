"""Fully sharded data parallelism as PyTorch ships it: FSDP2, with distributed checkpoints (Zhao et al., VLDB 2023).

    torchrun --nproc-per-node 2 05_zero/fsdp.py
Look at loss and grad_norm, those of one process, and at the last line: what a rank holds. Between two steps that is
    rank 0:  the first half of the rows of each weight, gradient and AdamW average
    rank 1:  the second half
and within a step also whole weights, while they compute: E the embedding, 0 and 1 blocks, H the head, ' in backward.
Time runs to the right; g is an all_gather of weights over the ranks, s a reduce_scatter of gradients:
    network:  gE  g0  g1  gH     g1  sH g0  s1  s0  sE
    compute:      E   0   1   H  H'  1'     0'  E'
    whole:    E   E0  01  1H  H  H1  10     0
That is 3 times the weights' size on the network, of E and H only 2 times (ZeRO stage 3, arXiv:1910.02054, sections 5
and 7; FSDP, arXiv:2304.11277, section 3). --stage 2 frees no weights before a step's last backward: 2 times, and once
more for each further microbatch. --stage 1 also keeps the gradients whole until the last microbatch: 2 times in all.
ZeRO's own stages 1 and 2 keep the weights whole between the steps as well; FSDP2 frees them after the last backward.
Shapes: B sequences, T tokens, D width, M MLP hidden, H heads, G key/value heads, K head width, V vocabulary (bytes).
"""

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checkpoint import require_safetensors, write_model
from shards import Writer, fill_shards, load_shards
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

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
    add("--save", help="folder for a sharded checkpoint and model.safetensors, written at the end")
    add("--save-every", type=int, default=0, help="a sharded checkpoint after every so many steps, too")
    add("--async-save", action="store_true", help="a thread writes these while training goes on")
    add("--resume", help="folder to go on from, at any number of ranks; may be empty if --save names it too")
    add("--stage", type=int, choices=(1, 2, 3), default=3, help="whole longer, less traffic: see above")
    add("--replicas", type=int, default=1, help="HSDP: shard over 1/R of the ranks, replicate R times")
    add("--offload", choices=("cpu",), help="keep the shards, and AdamW's step, in host memory")
    add("--reduce-dtype", choices=("float32", "bfloat16"), help="of gradients on the network; default: the weights'")
    add("--checkpoint-activations", action="store_true", help="recompute activations in backward, block by block")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile, block by block")
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


# ---- fully sharded data parallel ----
def shard_by_block(model, mesh, args):
    """Makes groups of weights: the embedding, each block, norm and head. A group is gathered and reduced as one."""
    half = getattr(torch, args.dtype) if "16" in args.dtype else None  # of compute; the shards stay float32
    reduce = getattr(torch, args.reduce_dtype or ("float64" if args.dtype == "float64" else "float32"))
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if args.offload else OffloadPolicy()
    how = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(half, reduce), offload_policy=offload)
    # all_gather over dp_shard, before a group's forward, and before its backward if it was freed: shards -> whole
    # reduce_scatter over dp_shard, after its backward: gradient of this rank's tokens -> sum over ranks, 1/n of it
    # all_reduce over dp_replicate, after that, if there are replicas: this shard of one replica's sum -> of all
    for group in (model.model.embed_tokens, *model.model.layers):
        fully_shard(group, reshard_after_forward=args.stage == 3, **how)
    # A group of their own: left to the root they and the embedding would stay whole, unreduced, to the end of backward.
    # Backward begins with them, so freeing them in between would only cost a second all_gather.
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **how)
    fully_shard(model, **how)  # the root has no weights left; it keeps the order of the groups, to gather one ahead
    model.model.embed_tokens.set_unshard_in_backward(False)  # a lookup's gradient needs no table
    for module in [m for m in model.modules() if isinstance(m, FSDPModule)]:
        # The sum over ranks, not the mean: the loss is divided by all ranks' tokens already. With the factor alone the
        # collective would multiply by it, PREMUL_SUM, which gloo lacks; every backend has the plain sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


# ---- main ----
def train_with_fsdp(args, rank, world_size, device):
    check_args(args, world_size)
    if args.replicas < 1 or world_size % args.replicas:
        raise UsageError(f"--replicas {args.replicas} does not divide {world_size} ranks: use --replicas 1, say")
    if (args.save_every or args.async_save) and not (args.save and args.save_every >= 0):
        raise UsageError(f"--save-every {args.save_every} and --async-save need --save DIR, and a number from 0 on")
    if args.save:
        require_safetensors()
    windows, cuda = read_windows(args.data, args.seq_len, args.batch), device.type == "cuda"
    num_shards, timeout = world_size // args.replicas, timedelta(seconds=args.timeout)
    ranks = torch.arange(world_size).view(args.replicas, num_shards)  # the shards of a replica on neighbours
    backend = "cpu:gloo,cuda:nccl" if cuda and args.offload else None  # gloo for what stays on the host
    # init_device_mesh would leave its groups without this timeout.
    groups = [dist.new_subgroups_by_enumeration(lists.tolist(), timeout, backend)[0] for lists in (ranks.T, ranks)]
    mesh = DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=("dp_replicate", "dp_shard"))
    sizes = [args.dim, args.layers, args.heads, args.kv_heads, 256]
    dtype = torch.float64 if args.dtype == "float64" else torch.float32
    with torch.device("meta"):  # shapes only: no rank ever holds the whole model
        model = Llama(*sizes).to(dtype)
    for layer in model.model.layers if args.checkpoint_activations else ():
        # Inside the block's hooks: its weights are whole when backward recomputes it, none is gathered a third time.
        layer.forward = lambda x, block=layer.forward: checkpoint(block, x, use_reentrant=False)
    for layer in model.model.layers if args.compile else ():
        layer.compile(backend=args.compile)
    shard_by_block(model, mesh if args.replicas > 1 else mesh["dp_shard"], args)
    fill_shards(model, args.seed, rank % num_shards, num_shards, args.offload or device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    run = dict(windows=len(windows), batch=args.batch, seq_len=args.seq_len, seed=args.seed, sizes=sizes)
    writer, first = Writer(args.save, run, args.timeout, args.async_save), 0
    if args.resume and (args.resume != args.save or Path(args.resume, "checkpoint.json").exists()):
        first = load_shards(args.resume, run, model, optimizer, scaler, writer.group)
    metrics = open(args.metrics if rank == 0 else os.devnull, "a" if first else "w")

    def report(step, values, copied, seconds):
        copied.synchronize() if cuda else None
        loss, written, grad_norm = values.tolist()
        peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
        row = dict(step=step, loss=loss, grad_norm=grad_norm, tokens_per_s=tokens / seconds, step_ms=1e3 * seconds)
        print(json.dumps(row | dict(state_mib=held / 2**20, peak_mib=peak)), file=metrics, flush=True)
        if rank == 0 and (step == 1 or step % max(1, args.steps // 10) == 0):
            print(f"{step:5} | {loss:6.4f} | {grad_norm:9.4f} | {tokens / seconds:8.0f}", flush=True)
        if written == world_size:  # every rank reads this number in the same step
            writer.finish()

    # Weight, gradient, AdamW's two averages, and its count of steps. Of uneven shards rank 0 has the largest.
    held = sum(4 * p.to_local().nbytes + 4 for p in model.parameters())
    whole = sum(4 * p.nbytes + 4 for p in model.parameters())
    log = print if rank == 0 else lambda _: None
    layout = f"dp {world_size}" if args.replicas == 1 else f"dp {args.replicas} x {num_shards}"
    log(f"torch {torch.__version__} | {dist.get_backend()} | {device.type} | {layout} | stage {args.stage}")
    log(" step |   loss | grad_norm | tokens/s")
    tokens, late, clock = args.batch * args.seq_len, [], time.perf_counter()
    for step in range(first + 1, args.steps + 1):
        loss, mine = 0.0, global_batch(windows, args.batch, args.seed, step - 1)[rank::world_size]  # (B/dp, T + 1)
        texts = (mine.pin_memory() if cuda else mine).to(device, non_blocking=True).long().split(args.microbatch)
        for i, text in enumerate(texts, 1):
            model.set_requires_gradient_sync(i == len(texts) or args.stage > 1)  # stage 1: whole gradients add up
            model.set_requires_all_reduce(i == len(texts))  # the replicas meet once per step, in any stage
            model.set_reshard_after_backward(i == len(texts) or args.stage == 3)
            logits = model(text[:, :-1]).flatten(0, 1).to(dtype)
            part = F.cross_entropy(logits, text[:, 1:].flatten(), reduction="sum") / tokens  # of all ranks
            scaler.scale(part).backward()
            loss += part.detach()
        scaler.unscale_(optimizer)  # of DTensors: what overflows on one rank is known to all, and all skip the step
        # all_reduce over dp_shard: for each gradient the norm of this rank's shard -> of all shards, each counted once
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        # all_reduce over dp: this rank's loss, and whether its checkpoint is written -> the loss, and how many have
        dist.all_reduce(totals := torch.stack((loss, torch.full_like(loss, writer.is_written()))))
        # The host reads this step's figures one step later: waiting for them now would leave the GPU without work.
        values = torch.cat((totals, grad_norm.to(device)[None])).to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if cuda else None
        began, clock = clock, time.perf_counter()
        late.append((step, values, copied, clock - began))
        while len(late) > (step < args.steps):  # one step late; at the end, all
            report(*late.pop(0))
        if args.save_every and step % args.save_every == 0 and step < args.steps:
            writer.start(step, model, optimizer, scaler)
    if args.save:
        writer.start(max(first, args.steps), model, optimizer, scaler)
        # all_gather over dp_shard: one weight's shards -> the whole weight, which rank 0 keeps in host memory
        weights = ((name, p.detach().full_tensor()) for name, p in model.named_parameters())
        kept = {name: p.cpu().contiguous() for name, p in weights if rank == 0}
        writer.finish()
        if rank == 0:
            write_model(args.save, run, kept, {})
    log(f"{held:,} of {whole:,} bytes of parameters, gradients and AdamW states on each rank")


def main():
    args = parse_args()
    with process_group(args.device, args.timeout) as (rank, _, world_size, device):
        train_with_fsdp(args, rank, world_size, device)


if __name__ == "__main__":
    main()
