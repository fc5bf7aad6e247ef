"""What ZeRO does, with nothing but reduce_scatter and all_gather (Rajbhandari et al., ZeRO, SC20, section 5).

    torchrun --nproc-per-node 2 05_zero/from_scratch.py --stage 3
Look at loss and grad_norm, those of one process, and at the table: what a rank holds, beside the paper's formulas.
Who holds what, of 2 ranks; stage 3 gathers a block before it computes, prefetches the next one, and frees it after:
    stage 1   rank 0: [ parameters ][ gradients ][states ]   rank 1: [ parameters ][ gradients ][ states]
    stage 2   rank 0: [ parameters ][gradie     ][states ]   rank 1: [ parameters ][     nts   ][ states]
    stage 3   rank 0: [parame      ][gradie     ][states ]   rank 1: [      ters  ][     nts   ][ states]
    compute:     | block 0 | block 1 | block 2 ..       all_gather:  [ block 0 ][ block 1 ][ block 2 ] ..
Shapes: B sequences, T tokens, D width, M MLP hidden, H heads, G key/value heads, K head width, V vocabulary (bytes).
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checkpoint import load_units, require_safetensors, save_units
from torch import nn
from units import group_modules
from zero import Zero

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
    add("--dtype", choices=("float32", "float64", "bfloat16", "float16"), default="float32", help="of the parameters")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--timeout", type=float, default=600, help="seconds that a rank waits for another")
    add("--metrics", default=os.devnull, help="file for one JSON object per step")
    add("--save", help="folder for the whole weights and AdamW's states, written at the end")
    add("--resume", help="folder of a checkpoint to go on from; may be empty if --save names it too")
    stages = "in slices over the ranks: 1 optimizer states, 2 and gradients, 3 and parameters; 0 nothing, to compare"
    add("--stage", type=int, choices=(0, 1, 2, 3), default=3, help=stages)
    add("--bucket-size", type=int, default=500_000, help="elements (not bytes) reduced together; stage 3: one block")
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


# ---- zero ----
PARTS = ("parameters", "gradients", "optimizer states")


def held_bytes(zero, optimizer):
    """Returns the bytes of parameters, gradients and optimizer states that this rank holds at the end of a step."""
    tensors = [[], [], []]
    for unit, master in zip(zero.units, zero.masters):
        tensors[0] += [unit.flat, unit.shard]
        tensors[1] += [unit.grad if unit.whole_grad is None else unit.whole_grad]
        tensors[2] += [master.detach(), *optimizer.state[master].values()]
    sizes, seen = [], set()
    for group in tensors:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in group}
        sizes.append(sum(nbytes for pointer, nbytes in storages.items() if pointer not in seen))
        seen |= set(storages)
    return sizes


def table(zero, held, sent, num_microbatches):
    """Yields lines: what held_bytes measured, and the elements sent in a step, beside the paper's formulas."""
    psi, padding = sum(unit.flat.numel() for unit in zero.units), sum(unit.padding for unit in zero.units)
    low, high = zero.units[0].flat.itemsize, zero.masters[0].itemsize
    states = 2 * high + (high if high > low else 0)  # per element: AdamW's two averages, and the master
    yield f"Ψ = {psi:,} parameters, {padding} of them padding; n = {dist.get_world_size()} ranks"
    yield "on each rank     | measured bytes | formula"
    for name, measured, nbytes, stage in zip(PARTS, held, (low, low, states), (3, 2, 1)):
        n, counters = zero.parts if zero.stage >= stage else 1, 4 * len(zero.units) * (stage == 1)  # AdamW's, of steps
        formula = f"{nbytes}Ψ{'/n' * (zero.stage >= stage)}{f' + {counters}' * (stage == 1)}"
        yield f"{name:16} | {measured:14,} | {formula} = {nbytes * psi // n + counters:,}"
    factor = (2, 2, num_microbatches + 1, 3 * num_microbatches)[zero.stage]
    yield f"elements sent    | {sent:14,} | {factor}Ψ = {factor * psi:,}"


# ---- main ----
def train_with_zero(args, rank, world_size, device):
    check_args(args, world_size)
    if args.bucket_size < 1:
        raise UsageError(f"--bucket-size {args.bucket_size} must be at least 1 element: use 500000, say")
    if args.save or args.resume:
        require_safetensors()
    windows, cuda = read_windows(args.data, args.seq_len, args.batch), device.type == "cuda"
    sizes, dtype = [args.dim, args.layers, args.heads, args.kv_heads], getattr(torch, args.dtype)
    with torch.device("meta"):  # shapes only
        model = Llama(*sizes)
    zero = Zero(model, group_modules(model, args.stage, args.bucket_size), args.stage, args.seed, dtype, device)
    optimizer = torch.optim.AdamW(zero.masters, lr=args.lr, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    run = dict(windows=len(windows), batch=args.batch, seq_len=args.seq_len, seed=args.seed, sizes=[*sizes, 256])
    first = 0
    if args.resume and (args.resume != args.save or Path(args.resume, "model.safetensors").exists()):
        first = load_units(args.resume, run, zero, optimizer, scaler)
    metrics = open(args.metrics if rank == 0 else os.devnull, "a" if first else "w")

    def report(step, values, copied, seconds):
        copied.synchronize() if cuda else None
        loss, grad_norm = values.tolist()
        peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
        row = dict(step=step, loss=loss, grad_norm=grad_norm, tokens_per_s=tokens / seconds, step_ms=1e3 * seconds)
        print(json.dumps(row | dict(state_mib=sum(held) / 2**20, peak_mib=peak)), file=metrics, flush=True)
        if rank == 0 and (step == 1 or step % max(1, args.steps // 10) == 0):
            print(f"{step:5} | {loss:6.4f} | {grad_norm:9.4f} | {tokens / seconds:8.0f}", flush=True)

    log = print if rank == 0 else lambda _: None
    log(f"torch {torch.__version__} | {dist.get_backend()} | {device.type} | dp {world_size} | stage {args.stage}")
    log(" step |   loss | grad_norm | tokens/s")
    tokens, late, held, clock = args.batch * args.seq_len, [], [0, 0, 0], time.perf_counter()
    for step in range(first + 1, args.steps + 1):
        loss, mine = 0.0, global_batch(windows, args.batch, args.seed, step - 1)[rank::world_size]  # (B/dp, T + 1)
        texts = (mine.pin_memory() if cuda else mine).to(device, non_blocking=True).long().split(args.microbatch)
        sent = zero.num_sent
        for i, text in enumerate(texts, 1):
            zero.last_microbatch = i == len(texts)
            logits = model(text[:, :-1]).flatten(0, 1)
            logits = logits.float() if "16" in args.dtype else logits
            part = F.cross_entropy(logits, text[:, 1:].flatten(), reduction="sum") / tokens  # of all ranks
            scaler.scale(part).backward()
            loss += part.detach()
        totals = zero.step(optimizer, scaler, args.clip, loss)
        held, sent = held_bytes(zero, optimizer), zero.num_sent - sent
        zero.zero_grad()
        # The host reads this step's figures one step later: waiting for them now would leave the GPU without work.
        values = torch.stack(totals).to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if cuda else None
        began, clock = clock, time.perf_counter()
        late.append((step, values, copied, clock - began))
        while len(late) > (step < args.steps):  # one step late; at the end, all
            report(*late.pop(0))
    for unit in zero.units:
        unit.wait()
    if args.save:
        save_units(args.save, run, max(first, args.steps), zero, optimizer, scaler)
    for line in table(zero, held, sent, len(texts)):
        log(line)


def main():
    args = parse_args()
    with process_group(args.device, args.timeout) as (rank, _, world_size, device):
        train_with_zero(args, rank, world_size, device)


if __name__ == "__main__":
    main()
