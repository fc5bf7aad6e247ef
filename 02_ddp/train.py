"""Data parallelism as you ship it: DistributedDataParallel (Li et al., VLDB 2020), and what a run needs around it.

    torchrun --nproc-per-node 2 02_ddp/train.py
Look at loss and grad_norm: 1, 2 and 4 processes print the same, because every step has the same global batch.
    rank 0:  sequences 0, 2, 4 ..  ->  forward, backward  ->  gradients --+-- all_reduce --> mean, and one AdamW step,
    rank 1:  sequences 1, 3, 5 ..  ->  forward, backward  ->  gradients --+   by buckets     the same on every rank
Shapes: B sequences, T tokens, D width, M MLP hidden, H heads, G key/value heads, K head width, V vocabulary (bytes).
"""

import argparse
import contextlib
import json
import os
import resource
import signal
import sys
import time
import zipfile
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint, data

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
    add("--save", help="folder for checkpoint.pt, written at the end and on SIGTERM")
    add("--save-every", type=int, default=0, help="and after every so many steps")
    add("--resume", help="folder of the checkpoint.pt to go on from; may be empty if --save names it too")
    add("--workers", type=int, default=0, help="data-loading processes per rank")
    add("--bucket-mb", type=float, default=25, help="gradients are reduced in buckets of this many MiB")
    add("--static-graph", action="store_true", help="promise that every step uses the same parameters")
    add("--find-unused", action="store_true", help="look for parameters without a gradient in every step")
    add("--compress", action="store_true", help="reduce the gradients in bfloat16")
    add("--checkpoint-activations", action="store_true", help="recompute activations in backward, block by block")
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


def microbatches(windows, args, rank, world_size, step, pin):
    """Yields this rank's microbatches, (B, T + 1) bytes, from a step on; pin: copies to a GPU overlap with compute."""
    share, epoch_steps = args.batch // world_size, len(windows) // args.batch
    sampler = data.DistributedSampler(windows, world_size, rank, seed=args.seed, drop_last=True)
    how = dict(num_workers=args.workers, pin_memory=pin, generator=torch.Generator())  # the global one is the model's
    for epoch in range(step // epoch_steps, args.steps):
        sampler.set_epoch(epoch)  # without it every epoch repeats the order of the first
        order = list(sampler)[max(0, step - epoch * epoch_steps) * share : epoch_steps * share]  # whole global batches
        yield from data.DataLoader(windows, args.microbatch, sampler=order, **how)


# ---- checkpoint ----
def save_checkpoint(folder, state):
    """Writes checkpoint.pt aside and renames it: whenever the job dies, the last whole one is there."""
    os.makedirs(folder, exist_ok=True)
    with open(Path(folder, "checkpoint.tmp"), "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file)
    os.replace(file.name, Path(folder, "checkpoint.pt"))


def load_checkpoint(folder, run):
    """Returns what save_checkpoint wrote; refuses a torn file, and one whose `run` (sizes, data, seed) is another."""
    path = Path(folder, "checkpoint.pt")
    try:
        damaged = zipfile.ZipFile(path).testzip()
        state = torch.load(path, map_location="cpu", weights_only=True)  # cpu: or all ranks load into GPU 0
        if damaged or state["run"] != run:
            raise ValueError(f"damaged: {damaged}; made with {state['run']}, this run has {run}")
    except Exception as error:
        raise UsageError(f"--resume another folder than {path.parent}: {str(error).splitlines()[0]}") from None
    return state


# ---- data parallel ----
def to_bfloat16(world_size, bucket):
    """A communication hook: half the bytes, for a mean that is rounded to bfloat16. torch's own refuses the CPU."""
    half = bucket.buffer().to(torch.bfloat16).div_(world_size)
    # all_reduce over dp: one bucket of this rank's gradients -> their mean
    return dist.all_reduce(half, async_op=True).get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


# ---- main ----
def train_with_ddp(args, rank, world_size, device):
    check_args(args, world_size)
    windows, cuda = read_windows(args.data, args.seq_len, args.batch), device.type == "cuda"
    torch.manual_seed(args.seed + rank)  # dropout must differ between ranks; weights and data order go by --seed
    sizes = [args.dim, args.layers, args.heads, args.kv_heads]
    model = Llama(*sizes)
    init_weights(model, args.seed)
    model.to(device, torch.float64 if args.dtype == "float64" else torch.float32)
    if args.static_graph and args.microbatch < args.batch // world_size:
        raise UsageError("--static-graph learns the graph from a synchronised backward: no --microbatch beside it")
    for layer in model.model.layers if args.checkpoint_activations else ():
        layer.forward = lambda x, block=layer.forward: checkpoint.checkpoint(block, x, use_reentrant=False)
    if args.compile:
        model.compile(backend=args.compile)
    how = dict(gradient_as_bucket_view=True, static_graph=args.static_graph, find_unused_parameters=args.find_unused)
    ddp = nn.parallel.DistributedDataParallel(model, [device] if cuda else None, bucket_cap_mb=args.bucket_mb, **how)
    if args.compress:
        ddp.register_comm_hook(world_size, to_bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=cuda)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    step, parts = 0, {"model": model, "optimizer": optimizer, "scaler": scaler}
    run = dict(windows=len(windows), batch=args.batch, seq_len=args.seq_len, seed=args.seed, sizes=sizes)
    if args.resume and (args.resume != args.save or Path(args.resume, "checkpoint.pt").exists()):
        state = load_checkpoint(args.resume, run)
        step = state["step"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
        optimizer.param_groups[0]["lr"] = args.lr  # else the checkpoint's would silently win over the flag
        (torch.cuda if cuda else torch).set_rng_state(state["rng"][rank % len(state["rng"])])
    metrics = open(args.metrics if rank == 0 else os.devnull, "a" if step else "w")
    memory = torch.cuda.mem_get_info()[1] if cuda else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def report(step, values, copied, seconds, waited):
        copied.synchronize() if cuda else None
        loss, signalled, grad_norm = values.tolist()
        peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else resource.getrusage(0).ru_maxrss / 2**10
        states = sum(t.nbytes for p in model.parameters() for t in (p, p, *optimizer.state[p].values())) / 2**20
        row = dict(step=step, loss=loss, grad_norm=grad_norm, tokens_per_s=tokens / seconds, step_ms=1e3 * seconds)
        print(json.dumps(row | dict(state_mib=states, peak_mib=peak if cuda else None)), file=metrics, flush=True)
        if rank == 0 and (step == 1 or step % max(1, args.steps // 10) == 0):
            shown = f"{step:5} | {loss:6.4f} | {grad_norm:9.4f} | {tokens / seconds:8.0f} | {waited / seconds:9.1%}"
            print(f"{shown} | {peak:.0f} of {memory / 2**20:.0f} MiB", flush=True)
        return signalled > 0

    log = print if rank == 0 else lambda _: None
    log(f"torch {torch.__version__} | {dist.get_backend()} | {device.type} | dp {world_size} | from step {step}")
    log(" step |   loss | grad_norm | tokens/s | data wait | peak memory")
    stream, tokens = microbatches(windows, args, rank, world_size, step, cuda), args.batch * args.seq_len
    signals, late, stop, clock = [], [], False, time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    while step < args.steps and not stop:
        step, loss, waited = step + 1, 0.0, 0.0
        for left in reversed(range(args.batch // world_size // args.microbatch)):
            waited -= time.perf_counter()
            text = next(stream).to(device, non_blocking=True).long()  # (B, T + 1)
            waited += time.perf_counter()
            # The forward, too, belongs inside no_sync: there DDP decides whether this backward all-reduces.
            with ddp.no_sync() if left else contextlib.nullcontext():
                with torch.autocast(device.type, getattr(torch, args.dtype), enabled="16" in args.dtype):
                    logits = ddp(text[:, :-1]).flatten(0, 1)
                    part = F.cross_entropy(logits, text[:, 1:].flatten(), reduction="sum") / tokens  # of all ranks
                scaler.scale(part * world_size).backward()  # DDP takes the mean over ranks, the sum is wanted
            loss += part.detach()
        scaler.unscale_(optimizer)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)  # after all-reduce and unscale
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        # all_reduce over dp: this rank's loss, and whether it got SIGTERM -> the global loss, and whether any did
        totals = torch.stack((loss, torch.full_like(loss, len(signals))))
        dist.all_reduce(totals)
        # The host reads this step's figures one step later: waiting for them now would leave the GPU without work.
        values = torch.cat((totals, grad_norm[None])).to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if cuda else None
        began, clock = clock, time.perf_counter()
        late.append((step, values, copied, clock - began, waited))
        while len(late) > (step < args.steps and not stop):  # one step late; at the end, all
            stop |= report(*late.pop(0))
        if args.save and (stop or step == args.steps or (args.save_every and step % args.save_every == 0)):
            dist.all_gather_object(rng := [None] * world_size, (torch.cuda if cuda else torch).get_rng_state())
            if rank == 0:
                state = {name: part.state_dict() for name, part in parts.items()}
                save_checkpoint(args.save, dict(step=step, run=run, rng=rng, **state))
    log(f"{sum(p.nbytes for p in model.parameters()) >> args.compress:,} bytes of gradients all-reduced per step")
    return 128 + signal.SIGTERM if stop else 0


def main():
    args = parse_args()
    with process_group(args.device, args.timeout) as (rank, _, world_size, device):
        code = train_with_ddp(args, rank, world_size, device)
    sys.exit(code)


if __name__ == "__main__":
    main()
