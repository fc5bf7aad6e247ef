"""What DistributedDataParallel does, with nothing but broadcast and all_reduce (Li et al., VLDB 2020, section 3.2).

    torchrun --nproc-per-node 2 02_ddp/from_scratch.py
Look at loss and grad_norm: those of train.py, and of one process. Buckets fill from the last layer to the first:
    backward:    lm_head   layer 3   layer 2   layer 1   layer 0   embed_tokens
    buckets:    [        0        ][             1                             ]
    network:                       [ all_reduce 0 ]                            [ all_reduce 1 ]  -> wait, clip, step
Shapes: B sequences, T tokens, D width, M MLP hidden, H heads, G key/value heads, K head width, V vocabulary (bytes).
"""

import argparse
import contextlib
import json
import os
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

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
    add("--save", help="folder for checkpoint.pt, written at the end; train.py can go on from it")
    add("--bucket-mb", type=float, default=25, help="gradients are reduced in buckets of this many MiB")
    add("--find-unused", action="store_true", help="look for parameters without a gradient in every step")
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


# ---- checkpoint ----
def save_checkpoint(folder, state):
    """Writes checkpoint.pt aside and renames it: whenever the job dies, the last whole one is there."""
    os.makedirs(folder, exist_ok=True)
    with open(Path(folder, "checkpoint.tmp"), "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file)
    os.replace(file.name, Path(folder, "checkpoint.pt"))


# ---- data parallel ----
class DataParallel(nn.Module):
    """Keeps a module alike on all ranks: weights and buffers are rank 0's, gradients the sum (not the mean) over dp."""

    def __init__(self, module, bucket_mb=25.0, find_unused=False):
        super().__init__()
        self.module, self.find_unused, self.sync = module, find_unused, True
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)  # broadcast over dp: rank 0's value -> every rank's
        buckets, room = [[]], min(1, bucket_mb) * 2**20  # a small first bucket lets the network start early
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            if room <= 0:
                buckets, room = [*buckets, []], bucket_mb * 2**20
            buckets[-1].append(p)
            room -= p.nbytes
        self.sizes, self.bucket, self.view = [len(bucket) for bucket in buckets], {}, {}
        self.flat = [torch.cat([p.detach().flatten() for p in bucket]) for bucket in buckets]  # of that size and type
        for number, members in enumerate(buckets):
            for p, part in zip(members, self.flat[number].split([p.numel() for p in members])):
                self.bucket[p], self.view[p] = number, part.view_as(p)
                p.register_post_accumulate_grad_hook(self.collect)
        self.missing, self.works = list(self.sizes), []

    def forward(self, *inputs):
        for buffer in self.module.buffers() if self.sync else ():
            dist.broadcast(buffer, src=0)  # broadcast over dp: rank 0's running statistics -> every rank's, as in DDP
        return self.module(*inputs)

    @contextlib.contextmanager
    def no_sync(self):  # backward passes inside only add to this rank's gradients
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def collect(self, p):  # the hook: autograd has just finished p.grad
        if p.grad is not self.view[p]:  # after zero_grad it is a tensor of autograd's own
            self.view[p].copy_(p.grad)
            p.grad = self.view[p]
        self.missing[self.bucket[p]] -= self.sync
        if self.missing[self.bucket[p]] < 0:
            raise RuntimeError("backward after the gradients were reduced: all but the last belong inside no_sync()")
        # Buckets leave in the same order on every rank, whatever the order in which they fill.
        while len(self.works) < len(self.flat) and self.missing[len(self.works)] == 0:
            # all_reduce over dp: one bucket of this rank's gradients -> their sum, while backward goes on
            self.works.append(dist.all_reduce(self.flat[len(self.works)], async_op=True))

    def finish_gradients(self):
        """Sends the buckets that a parameter without gradient kept open, and waits for all."""
        unused = {p: name for name, p in self.module.named_parameters() if p in self.view and p.grad is None}
        if unused and not self.find_unused:
            raise RuntimeError(f"rank {dist.get_rank()} has no gradient for {[*unused.values()]}: use --find-unused")
        for p in unused:
            self.view[p].zero_()  # this rank's part of the sum
        # all_reduce over dp: the buckets that are left, as above
        self.works += [dist.all_reduce(flat, async_op=True) for flat in self.flat[len(self.works) :]]
        if self.find_unused:
            ranks = torch.tensor([p not in unused for p in self.view], dtype=torch.int32, device=self.flat[0].device)
            dist.all_reduce(ranks)  # all_reduce over dp: has this rank a gradient -> how many ranks have one
            for (p, view), num_ranks in zip(self.view.items(), ranks.tolist()):
                p.grad = view if num_ranks else None  # if no rank has one, the optimizer leaves the parameter alone
        for work in self.works:
            work.wait()
        self.missing, self.works = list(self.sizes), []


# ---- main ----
def main():
    args = parse_args()
    with process_group(args.device, args.timeout) as (rank, _, world_size, device):
        check_args(args, world_size)
        windows, cuda = read_windows(args.data, args.seq_len, args.batch), device.type == "cuda"
        torch.manual_seed(args.seed + rank)  # dropout must differ between ranks; weights and data order go by --seed
        sizes = [args.dim, args.layers, args.heads, args.kv_heads]
        model = Llama(*sizes)
        init_weights(model, args.seed)
        model.to(device, torch.float64 if args.dtype == "float64" else torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=cuda)
        scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
        replica = DataParallel(model, args.bucket_mb, args.find_unused)
        metrics = open(args.metrics if rank == 0 else os.devnull, "w")

        def report(step, values, copied, seconds):
            copied.synchronize() if cuda else None
            loss, grad_norm = values.tolist()
            peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
            states = sum(t.nbytes for p in model.parameters() for t in (p, p, *optimizer.state[p].values())) / 2**20
            row = dict(step=step, loss=loss, grad_norm=grad_norm, tokens_per_s=tokens / seconds, step_ms=1e3 * seconds)
            print(json.dumps(row | dict(state_mib=states, peak_mib=peak)), file=metrics, flush=True)
            if rank == 0 and (step == 1 or step % max(1, args.steps // 10) == 0):
                print(f"{step:5} | {loss:6.4f} | {grad_norm:9.4f} | {tokens / seconds:8.0f}", flush=True)

        log = print if rank == 0 else lambda _: None
        log(f"torch {torch.__version__} | {dist.get_backend()} | {device.type} | dp {world_size}")
        log(" step |   loss | grad_norm | tokens/s")
        tokens, late, clock = args.batch * args.seq_len, [], time.perf_counter()
        for step in range(1, args.steps + 1):
            loss, mine = 0.0, global_batch(windows, args.batch, args.seed, step - 1)[rank::world_size]  # (B/dp, T + 1)
            texts = (mine.pin_memory() if cuda else mine).to(device, non_blocking=True).long().split(args.microbatch)
            for i, text in enumerate(texts, 1):
                with replica.no_sync() if i < len(texts) else contextlib.nullcontext():
                    with torch.autocast(device.type, getattr(torch, args.dtype), enabled="16" in args.dtype):
                        logits = replica(text[:, :-1]).flatten(0, 1)
                        part = F.cross_entropy(logits, text[:, 1:].flatten(), reduction="sum") / tokens  # of all ranks
                    scaler.scale(part).backward()
                loss += part.detach()
            replica.finish_gradients()
            scaler.unscale_(optimizer)
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)  # after all-reduce and unscale
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            dist.all_reduce(loss)  # all_reduce over dp: this rank's part of the loss -> the global loss
            # The host reads this step's figures one step later: waiting for them now would leave the GPU without work.
            values = torch.stack((loss, grad_norm)).to("cpu", non_blocking=True)
            copied = torch.cuda.current_stream().record_event() if cuda else None
            began, clock = clock, time.perf_counter()
            late.append((step, values, copied, clock - began))
            while len(late) > (step < args.steps):  # one step late; at the end, all
                report(*late.pop(0))
        if args.save:
            dist.all_gather_object(rng := [None] * world_size, (torch.cuda if cuda else torch).get_rng_state())
            run = dict(windows=len(windows), batch=args.batch, seq_len=args.seq_len, seed=args.seed, sizes=sizes)
            state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict())
            if rank == 0:
                save_checkpoint(args.save, dict(step=step, run=run, rng=rng, **state))
        log(f"{len(replica.flat)} all-reduces per step, of {[flat.nbytes for flat in replica.flat]} bytes")


if __name__ == "__main__":
    main()
