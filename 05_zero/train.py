"""ZeRO as you ship it: DeepSpeed splits optimizer states, gradients, parameters (Rajbhandari et al., SC20, section 5).

    torchrun --nproc-per-node 2 05_zero/train.py --stage 3        or: deepspeed --num_gpus 2 05_zero/train.py
Look at loss and grad_norm, those of one process at every stage, and at the last line: what a rank holds. Of 2 ranks:
    stage 0   rank 0: [ parameters ][ gradients ][   states   ]   rank 1: [ parameters ][ gradients ][   states   ]
    stage 1   rank 0: [ parameters ][ gradients ][states      ]   rank 1: [ parameters ][ gradients ][      states]
    stage 2   rank 0: [ parameters ][gradie     ][states      ]   rank 1: [ parameters ][     nts   ][      states]
    stage 3   rank 0: [parame      ][gradie     ][states      ]   rank 1: [      ters  ][     nts   ][      states]
arXiv:1910.02054. Beside it: ds_config.json; its checks, ds_config.py; what DeepSpeed has no call for, ds_engine.py.
Shapes: B sequences, T tokens, D width, M MLP hidden, H heads, G key/value heads, K head width, V vocabulary (bytes).
"""

import argparse
import json
import os
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import ds_engine
import torch
import torch.distributed as dist
import torch.nn.functional as F
from checkpoint import require_safetensors, write_model
from ds_bytes import gradient_bytes, state_bytes, watch_gradients
from ds_config import make_config
from ds_engine import adam, full_weights, join_group, load_engine, missing_scale, total_norm, undo_step_zero
from parts import begin_checkpoint, find_checkpoint, finish_checkpoint
from torch import nn
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
    add("--save", help="folder for checkpoint.json with its parts, and model.safetensors, written at the end")
    add("--save-every", type=int, default=0, help="and after every so many steps")
    add("--resume", help="folder to go on from, saved by any number of ranks; may be empty if --save names it too")
    add("--stage", type=int, choices=(0, 1, 2, 3), help="what is split, see above; default: the config's, 3")
    add("--offload", choices=("cpu",), help="optimizer states live on the CPU, at stage 3 parameters, too")
    add("--bucket-size", type=int, metavar="ELEMENTS", help="elements, not bytes, that a collective takes at once")
    add("--no-overlap", action="store_true", help="gradients are reduced when backward waits for them")
    add("--checkpoint-activations", action="store_true", help="recompute activations in backward, block by block")
    add("--fused", action="store_true", help="DeepSpeed's C++ Adam; its first run compiles: a compiler and 1.5 minutes")
    add("--config", default=str(Path(__file__).with_name("ds_config.json")), help="DeepSpeed's JSON; flags override it")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher adds it; LOCAL_RANK says the same
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


# ---- zero ----
def build_model(deepspeed, config, args, sizes, device):
    """Returns the model with its initial weights; at stage 3 no rank ever holds all of it."""
    # zero.Init splits each parameter when its layer has made it, and makes it in the config's data type.
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=args.stage == 3):
        model = Llama(*sizes)
    for name, weight in model.named_parameters():
        # all_gather over all ranks: 1/N of the parameter -> all of it; at the end broadcast of rank 0's, each keeps 1/N
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0, enabled=args.stage == 3):
            init_weights(SimpleNamespace(named_parameters=lambda one=(name, weight): [one]), args.seed)
    return model if args.stage == 3 else model.to(device)


def how_saved(args):
    return dict(stage=args.stage, dtype=args.dtype, fused=args.fused)  # DeepSpeed's files differ with each


def save_engine(engine, args, run, step, rank):
    """Writes each rank's part, and then the whole weights for everyone else."""
    path = begin_checkpoint(args.save, step)
    engine.save_checkpoint(str(path), tag="parts", save_latest=False)  # parts/: one file of states per rank
    finish_checkpoint(path, run, step, **how_saved(args))
    weights = dict(full_weights(engine, rank))  # one at a time on the device; rank 0 keeps them on the CPU
    if rank == 0:
        write_model(args.save, run, weights, {})


# ---- main ----
def train_with_deepspeed(args, rank, world_size, device):
    check_args(args, world_size)
    if args.save or args.resume:
        require_safetensors()
    deepspeed, cuda = join_group(device, args.timeout), device.type == "cuda"
    config = make_config(args, world_size, cuda)
    windows = read_windows(args.data, args.seq_len, args.batch)
    sizes = [args.dim, args.layers, args.heads, args.kv_heads, 256]
    run = dict(windows=len(windows), batch=args.batch, seq_len=args.seq_len, seed=args.seed, sizes=sizes)
    first, parts, universal = 0, None, False
    if args.resume and (args.resume != args.save or Path(args.resume, "checkpoint.json").exists()):
        parts, note = find_checkpoint(args.resume, run)
        if note["more"] != (asked := how_saved(args)):
            raise UsageError(f"--resume another folder than {args.resume}: {note['more']}, this run has {asked}")
        first, universal = note["step"], args.stage > 0 and note["world_size"] != world_size
        config["checkpoint"] = config.get("checkpoint", {}) | {"load_universal": universal}
    model = build_model(deepspeed, config, args, sizes, device)
    for layer in model.model.layers if args.checkpoint_activations else ():
        layer.forward = lambda x, block=layer.forward: checkpoint(block, x, use_reentrant=False)
    # broadcast over all ranks: rank 0's weights -> everybody's
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model, args), config=config)
    undo_step_zero(engine) if args.stage == 0 else None
    if parts:
        load_engine(engine, parts, rank, universal, args.lr)
    metrics = open(args.metrics if rank == 0 else os.devnull, "a" if first else "w")
    tokens, gradients, held = args.batch * args.seq_len, watch_gradients(engine, args.stage), None

    def report(step, values, copied, seconds):
        copied.synchronize() if cuda else None
        loss, grad_norm = values.tolist()
        peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
        row = dict(step=step, loss=loss, grad_norm=grad_norm, tokens_per_s=tokens / seconds, step_ms=1e3 * seconds)
        print(json.dumps(row | dict(state_mib=sum(held) / 2**20, peak_mib=peak)), file=metrics, flush=True)
        if rank == 0 and (step == 1 or step % max(1, args.steps // 10) == 0):
            print(f"{step:5} | {loss:6.4f} | {grad_norm:9.4f} | {tokens / seconds:8.0f}", flush=True)

    log = print if rank == 0 else lambda _: None
    more = f"{args.stage}{' | offload cpu' if args.offload else ''}{f' | from step {first}' if first else ''}"
    versions = f"torch {torch.__version__} | deepspeed {deepspeed.__version__}"
    log(f"{versions} | {dist.get_backend()} | {device.type} | dp {world_size} | stage {more}")
    log(" step |   loss | grad_norm | tokens/s")
    late, clock = [], time.perf_counter()
    for step in range(first + 1, args.steps + 1):
        mine = global_batch(windows, args.batch, args.seed, step - 1)[rank::world_size]  # (B/dp, T + 1)
        texts = (mine.pin_memory() if cuda else mine).to(device, non_blocking=True).long().split(args.microbatch)
        loss = 0.0
        for text in texts:
            # Stage 3: all_gather over dp: 1/N of a layer's parameters -> all of them, ahead of their use.
            logits = engine(text[:, :-1]).flatten(0, 1)  # (B T, V)
            wide = torch.promote_types(logits.dtype, torch.float32)
            part = F.cross_entropy(logits.to(wide), text[:, 1:].flatten(), reduction="sum") / tokens  # of all ranks
            # DeepSpeed divides the loss by the number of microbatches and takes the mean over ranks: undo both.
            # Stages 0, 1, in the last microbatch; stage 2, in each: all_reduce over dp: a bucket of gradients -> their
            # mean, of which a rank keeps its part. Stage 3, in each: all_gather again of what forward has freed, and
            # reduce_scatter over dp: a bucket of gradients -> 1/N of their mean.
            engine.backward(part * len(texts) * world_size * missing_scale(engine, args.stage))
            loss += part.detach()
            if text is texts[-1]:
                unclipped = total_norm(engine) if args.stage == 0 else None
                kept = None if held else gradient_bytes(engine)
            # In the last: clip, AdamW. Stages 1 to 3: all_reduce over dp: square of 1/N's norm -> of the whole norm.
            # Stages 1, 2: all_gather over dp: 1/N of the new parameters -> all of them.
            engine.step()
        if held is None:
            largest = torch.tensor([max(kept, *gradients, 0), *state_bytes(engine)], device=device)
            dist.all_reduce(largest, dist.ReduceOp.MAX)  # all_reduce over dp, once: bytes of this rank -> most of any
            held = largest.tolist()
        grad_norm = unclipped if args.stage == 0 else engine.get_global_grad_norm()  # of all ranks, before clipping
        dist.all_reduce(loss)  # all_reduce over dp: this rank's part of the loss -> the loss
        # The host reads this step's figures one step later: waiting for them now would leave the GPU without work.
        values = torch.stack((loss, torch.as_tensor(grad_norm, dtype=loss.dtype, device=device)))
        values = values.to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if cuda else None
        began, clock = clock, time.perf_counter()
        late.append((step, values, copied, clock - began))
        while len(late) > (step < args.steps):  # one step late; at the end, all
            report(*late.pop(0))
        if args.save and args.save_every and step % args.save_every == 0 and step < args.steps:
            save_engine(engine, args, run, step, rank)
    if args.save:
        save_engine(engine, args, run, max(first, args.steps), rank)
    held = held or [0, *state_bytes(engine)]  # resumed where it ended
    log(f"{held[1]:,} bytes of parameters, {held[0]:,} of gradients, {held[2]:,} of optimizer states on each rank")
    ds_engine.let_go(engine)


def main():
    args = parse_args()
    if local_size := os.environ.get("LOCAL_SIZE"):  # the deepspeed launcher's word for torchrun's
        os.environ.setdefault("LOCAL_WORLD_SIZE", local_size)
    ds_engine.import_early(args.device)
    with process_group(args.device, args.timeout) as (rank, _, world_size, device):
        train_with_deepspeed(args, rank, world_size, device)


if __name__ == "__main__":
    main()
