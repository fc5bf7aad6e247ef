"""Pipeline x data x tensor parallelism in one run: every rank has a place on three axes (arXiv:2104.04473, section 3).

    torchrun --nproc-per-node 8 06_hybrid/train.py --pp 2 --dp 2 --tp 2
Look at loss and grad_norm, those of one process, and at the mesh that is printed first. 8 ranks on 2 nodes:
    node 0   dp 0: [rank 0 - rank 1]   dp 1: [rank 2 - rank 3]   pp 0: embedding and layers 0, 1
                       |       |                  |       |
    node 1   dp 0: [rank 4 - rank 5]   dp 1: [rank 6 - rank 7]   pp 1: layers 2, 3, norm and head
tp, the dashes: each matrix is cut in two; all_reduces of (b, T, D) in every layer, so inside a node (as in 03).
dp, side by side: other sequences; weights and AdamW's states are cut again, as FSDP2 does: all_gathers of a layer's
    weights, one reduce_scatter of its gradients per step (05). --shard none keeps replicas instead (02).
pp, the bars: other layers; a send of (b, T, D) per microbatch and direction, so between nodes (04).
The loss is summed over tokens and divided by those of all ranks; gradients are sums over tp, microbatches and dp, never
means; of the norm each element is one term, wherever it lies.
Shapes: b sequences of a microbatch, T tokens, D width, M MLP hidden, H heads, K head width, V vocabulary.
Sources: Narayanan et al., 2021 (above); Zhao et al., FSDP, arXiv:2304.11277; Korthikanti et al., arXiv:2205.05198.
"""

import argparse
import json
import os
import signal
import sys
import time
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import PRESETS, LlamaConfig, preset, whole_shapes
from options import build_schedule, check_pipeline, check_tensor_sizes, choose_mesh
from parallel import build_hybrid_stage, fill, is_counted_here, make_mesh, make_tie_group
from topology import check_nodes, draw_mesh, identify_node, number_nodes
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import parallel as tp

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError, process_group  # copied this folder out? copy common/ beside it or into it


# ---- config ----
def parse_args():
    add = (parser := argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)).add_argument
    add("--steps", type=int, default=100, help="optimizer steps")
    add("--batch", type=int, default=32, help="global batch in sequences, shared by the ranks")
    add("--microbatch", type=int, help="sequences per forward on one rank; default: two microbatches per stage")
    add("--seq-len", type=int, default=128, help="tokens (bytes) per sequence")
    add("--preset", choices=tuple(PRESETS), default="tiny", help="sizes of a model; the next four change some of them")
    for flag in ("--dim", "--layers", "--heads", "--kv-heads"):
        add(flag, type=int)
    add("--seed", type=int, default=0)
    add("--lr", type=float, default=3e-3)
    add("--clip", type=float, default=1.0, help="largest global gradient norm")
    add("--data", help="a file or a folder of text; default: the source of Python's standard library")
    add("--dtype", choices=("float32", "float64", "bfloat16", "float16"), default="float32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--timeout", type=float, default=600, help="seconds that a rank waits for another")
    add("--metrics", default=os.devnull, help="file for one JSON object per step")
    add("--save", help="folder for a sharded checkpoint, written at the end and on SIGTERM")
    add("--save-every", type=int, default=0, help="a checkpoint after every so many steps, too")
    add("--async-save", action="store_true", help="a thread writes these while training goes on")
    add("--resume", help="folder to go on from, saved on any mesh; may be empty if --save names it too")
    add("--hf", metavar="DIR", help="begin with sizes and weights of a Hugging Face Llama")
    add("--save-hf", metavar="DIR", help="folder for the weights as a Hugging Face Llama, written at the end")
    add("--pp", type=int, help="ranks that split the layers; default: 1")
    add("--dp", type=int, help="ranks that split the batch; default: what pp and tp leave")
    add("--tp", type=int, help="ranks that split each matrix; default: 1")
    add("--schedule", choices=("gpipe", "1f1b", "interleaved", "zero-bubble"), default="1f1b")
    add("--chunks", type=int, help="stages per rank; default: 2 for interleaved, else 1")
    add("--sequence-parallel", action="store_true", help="norms and residuals on 1/tp of the tokens")
    add("--shard", choices=("none", "optimizer", "full"), default="full", help="what dp splits; full: weights, too")
    add("--replicas", type=int, default=1, help="HSDP: shard over 1/R of dp, replicate R times")
    add("--tie", action="store_true", help="one weight for embedding and head")
    add("--checkpoint-activations", action="store_true", help="recompute activations in backward, layer by layer")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile, layer by layer")
    add("--allow-cross-node-tp", action="store_true", help="slow: every layer waits for the network between nodes")
    add("--dry-run", action="store_true", help="say what ranks of --world would hold and send; trains nothing")
    add("--world", type=int, default=1, help="ranks of the dry run")
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
def choose_config(args):
    """Returns the model's sizes: the preset's, or --hf's, where no flag says otherwise; sets the flags left out."""
    config = preset(args.preset)
    if args.hf or args.save_hf:
        from hf import need_safetensors, read_hf_config

        need_safetensors()
    if args.hf:
        config = LlamaConfig(**read_hf_config(args.hf))
    names = ("dim", "layers", "heads", "kv_heads")
    given = {name: size for name in names if (size := getattr(args, name)) is not None}
    if args.dim not in (None, config.dim):
        given["hidden"] = 64 * -(-8 * args.dim // 192)  # 8/3 of the width, rounded up to a multiple of 64
    config = config._replace(**given, tied=config.tied or args.tie)
    for name in names:
        setattr(args, name, getattr(config, name))
    return config


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


# ---- hybrid ----
def stage_shapes(args, config, stage, tp_size, half):
    """Returns what a stage takes and what it makes of a microbatch, on the meta device.

    Without them the library finds out by itself in the first step: one more forward, loss and backward of a microbatch.
    Without requires_grad no gradient comes back, and backward of the stage before stops.
    """
    whole = torch.float64 if args.dtype == "float64" else torch.float32
    residual = half if half and args.shard != "none" else whole  # autocast leaves the sum of the layers in float32
    place = args.seq_len // tp_size if args.sequence_parallel else args.seq_len
    between = torch.empty(args.microbatch, place, config.dim, dtype=residual, device="meta", requires_grad=True)
    first = torch.empty(args.microbatch, args.seq_len, dtype=torch.long, device="meta")  # (b, T)
    last = (args.microbatch, args.seq_len, config.vocab_size // tp_size)  # (b, T, V/tp)
    last = torch.empty(last, dtype=half or whole, device="meta", requires_grad=True)
    return first if stage.is_first else between, last if stage.is_last else between


def sum_replicas(weights, group):
    """Adds up the gradients of weights that are whole on every rank of dp: --shard none, once a step."""
    works = []
    for p in weights:
        # all_reduce over tp, if partial: of this rank's tokens (norms) or heads (k_proj, v_proj) -> of all
        p.grad = p.grad.redistribute(placements=p.placements)
        if group.size() > 1:
            # all_reduce over dp: this replica's gradient of the shard -> the sum; the next one need not wait for it
            works.append(dist.all_reduce(p.grad.to_local(), group=group, async_op=True))
    while works:
        works.pop().wait()


def build_on_meta(args, config, mesh_sizes, layers, device):
    """Returns the mesh, the group of the two ends that share a tied weight or None, and {number: this rank's stage}.

    The stages have shapes and no memory yet. mesh_sizes: choose_mesh's. layers: of each stage. All ranks call this.
    """
    mesh, ends = make_mesh(mesh_sizes, device.type, args.timeout), [0, *accumulate(layers)]
    tie_group = make_tie_group(mesh, args.timeout) if config.tied and mesh_sizes[0] > 1 else None
    # Stage s is on place s % pp_size of pp: with --chunks a microbatch goes round several times.
    numbers = range(mesh.get_local_rank("pp"), len(layers), mesh_sizes[0])
    return mesh, tie_group, {s: build_hybrid_stage(config, *ends[s : s + 2], mesh, args, device.type) for s in numbers}


class Trainer:
    """This rank's stages, and what a step needs. Nothing here depends on what the tensors hold, so that it runs on
    fake ones, too (dry_run.py).
    """

    def __init__(self, args, config, mesh, tie_group, modules, num_stages, num_microbatches, rank, device):
        """mesh, tie_group, modules: build_on_meta's."""
        self.args, self.device, self.mesh, self.tie_group = args, device, mesh, tie_group
        _, replicas, num_shards, tp_size = mesh.shape
        self.dp_size = replicas * num_shards
        self.tp_rank, self.dp_rank = rank % tp_size, rank // tp_size % self.dp_size
        self.pp_rank = rank // (self.dp_size * tp_size)
        half = getattr(torch, args.dtype) if "16" in args.dtype else None
        self.dtype, stages = torch.float64 if args.dtype == "float64" else torch.float32, []
        for number, stage in modules.items():
            fill(stage, config, args.seed, device)
            shapes = stage_shapes(args, config, stage, tp_size, half)
            stages.append(PipelineStage(stage, number, num_stages, device, *shapes, group=mesh["pp"].get_group()))
        self.named = {name: p for stage in stages for name, p in stage.submod.named_parameters()}
        self.tied = []  # the two copies of a tied weight, where they are on different ranks
        if tie_group is not None:
            both = ("model.embed_tokens.weight", "lm_head.weight")
            self.tied = [self.named[name] for name in both if name in self.named]
        self.weights, self.to_read = dict(self.named), dict(self.named)
        if self.tied and stages[-1].is_last:  # a checkpoint has one weight under one name: both read it, one is written
            self.to_read["model.embed_tokens.weight"] = self.to_read.pop("lm_head.weight")
            del self.weights["lm_head.weight"]
        self.optimizer = torch.optim.AdamW(self.named.values(), lr=args.lr, fused=True)
        # The norm has each element once: of the axes that replicate it, place 0's; of a tied weight, the embedding's.
        alone = args.shard != "none" or self.dp_rank == 0
        self.counted = [p for p in self.weights.values() if is_counted_here(p) and alone]
        self.scaler, self.parts = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16"), []
        self.one, self.tokens = torch.ones((), dtype=self.dtype, device=device), args.batch * args.seq_len
        self.scaler.scale(self.one)  # makes the scale, on ranks too that see no loss
        self.schedule = build_schedule(args.schedule, [*stages], num_microbatches, self.loss_of)

    def loss_of(self, logits, targets):  # of one microbatch, on the last stage
        logits = DTensor.from_local(logits.flatten(0, 1).to(self.dtype), self.mesh["tp"], [Shard(-1)])  # (b T, V/tp)
        # all_reduce over tp, three of (b T): the maximum, the sum of exp, the target's logit
        part = F.cross_entropy(logits, targets.flatten(), reduction="sum").to_local() / self.tokens  # of all replicas
        self.parts.append(part.detach())
        return self.scaler.scale(part)

    def forward_backward(self, text):
        """Leaves the sum of all gradients in .grad. text: (B/dp, T + 1), alike on all places of pp and tp."""
        with tp.loss_parallel():  # forward and backward of the loss on a vocabulary that tp splits
            # send and recv over pp, per microbatch: (b, T or T/tp, D) to the next stage, and its gradient back
            # FSDP2's collectives, over dp, are in parallel.py; gradients add up and are reduced once, at the end
            self.schedule.step(*[text[:, :-1]] * (self.pp_rank == 0), target=text[:, 1:], return_outputs=False)
        if self.args.shard == "none":
            sum_replicas(self.named.values(), self.mesh["dp_shard"].get_group())
        for p in self.tied:
            # all_reduce over the first and last stage: the gradient of the embedding, of the head -> their sum
            dist.all_reduce(p.grad.to_local(), group=self.tie_group)

    def update(self, written, signalled=False):
        """Clips and steps. Returns (4,): loss, how many ranks say each of the two, gradient norm; all of all ranks."""
        own = [p.grad.to_local() for p in self.counted]
        square = nn.utils.get_total_norm(own) ** 2 if own else 0 * self.one
        loss = sum(self.parts, 0 * self.one) * (self.tp_rank == 0)  # alike in a tp group
        self.parts.clear()
        # all_reduce over all ranks: what is counted here of the squared norm, of the loss, of the ranks that have
        # written their checkpoint or got SIGTERM -> of all. One collective, as each is but a number.
        dist.all_reduce(totals := torch.stack((loss, self.one * written, self.one * signalled, square)))
        norm = totals[3] = totals[3].sqrt() / self.scaler.scale(self.one)
        # If a gradient overflowed anywhere, this is nan everywhere: the scaler makes all ranks skip the step together.
        coefficient = (self.args.clip / (norm + 1e-6)).clamp(max=1) + 0 * norm
        for p in self.named.values():
            p.grad.to_local().mul_(coefficient)
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return totals


# ---- main ----
def train_with_mesh(args, rank, world_size, device):
    """Trains, and returns the exit code."""
    config = choose_config(args)
    pp_size, replicas, num_shards, tp_size = mesh_sizes = choose_mesh(args, world_size)
    layers, num_microbatches = check_pipeline(args, config, pp_size, dp_size := replicas * num_shards, check_args)
    check_tensor_sizes(args, config, tp_size)
    if (args.save_every or args.async_save) and not (args.save and args.save_every >= 0):
        raise UsageError(f"--save-every {args.save_every} and --async-save need --save DIR, and a number from 0 on")
    if args.save or args.resume:
        from checkpoint import Checkpoints, has_checkpoint, load_states
    if args.hf or args.save_hf:
        from hf import load_hf, save_hf
    windows, cuda = read_windows(args.data, args.seq_len, args.batch), device.type == "cuda"
    # all_gather over all ranks: this rank's node -> every rank's
    dist.all_gather_object(identities := [""] * world_size, identify_node())
    nodes, hosts = number_nodes(identities)
    dp_axes = {"dp": dp_size} if replicas == 1 else {"dp_replicate": replicas, "dp_shard": num_shards}
    sizes = {"pp": pp_size, **dp_axes, "tp": tp_size}
    if not args.allow_cross_node_tp:
        check_nodes(sizes, nodes, hosts)
    built = build_on_meta(args, config, mesh_sizes, layers, device)
    job = Trainer(args, config, *built, len(layers), num_microbatches, rank, device)
    run = dict(windows=len(windows), batch=args.batch, seq_len=args.seq_len, seed=args.seed, sizes=[*config])
    run, start, writer = json.loads(json.dumps(run)), 0, None  # as it is when it has been read from a file
    if args.hf:
        load_hf(args.hf, job.to_read)
    if args.save:
        writer = Checkpoints(args.save, run, args.timeout, args.async_save)
    if args.resume and (args.resume != args.save or has_checkpoint(args.resume)):
        start = load_states(args.resume, run, job.to_read, job.optimizer, job.scaler, writer and writer.group)
    metrics = open(args.metrics if rank == 0 else os.devnull, "a" if start else "w")

    def report(step, values, copied, seconds):
        copied.synchronize() if cuda else None
        loss, written, signalled, grad_norm = values.tolist()
        peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
        row = dict(step=step, loss=loss, grad_norm=grad_norm, tokens_per_s=tokens / seconds, step_ms=1e3 * seconds)
        print(json.dumps(row | dict(state_mib=held / 2**20, peak_mib=peak)), file=metrics, flush=True)
        if rank == 0 and (step == 1 or step % max(1, args.steps // 10) == 0):
            print(f"{step:5} | {loss:6.4f} | {grad_norm:9.4f} | {tokens / seconds:8.0f}", flush=True)
        if writer and written == world_size:  # every rank reads this number in the same step
            writer.finish()
        return signalled > 0

    # Weight, gradient, AdamW's two averages, and its count of steps.
    most = torch.tensor(sum(4 * p.to_local().nbytes + 4 for p in job.named.values()), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)  # all_reduce over all ranks: bytes of states here -> the most of a rank
    held = most.item()
    whole = sum(4 * shape.numel() * job.dtype.itemsize + 4 for shape in whole_shapes(config).values())
    log = print if rank == 0 else lambda _: None
    plan = f"{args.schedule}, {num_microbatches} microbatches of {args.microbatch} | shard {args.shard}"
    layout = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    log(f"torch {torch.__version__} | {dist.get_backend()} | {device.type} | {layout} | {plan}")
    log("\n".join(draw_mesh(sizes, nodes, hosts)))
    log(" step |   loss | grad_norm | tokens/s")
    tokens, late, clock = args.batch * args.seq_len, [], time.perf_counter()
    step, stop, signals = start, False, []
    signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    while step < args.steps and not stop:
        step += 1
        # The ranks of a replica take the same sequences, whatever their place on pp and tp: (B/dp, T + 1)
        mine = global_batch(windows, args.batch, args.seed, step - 1)[job.dp_rank :: job.dp_size]
        text = (mine.pin_memory() if cuda else mine).to(device, non_blocking=True).long()
        job.forward_backward(text)
        totals = job.update(writer is not None and writer.is_written(), len(signals) > 0)
        # The host reads this step's figures one step later: waiting for them now would leave the GPU without work.
        values = totals.to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if cuda else None
        began, clock = clock, time.perf_counter()
        late.append((step, values, copied, clock - began))
        while len(late) > (step < args.steps and not stop):  # one step late; at the end, all
            stop |= report(*late.pop(0))
        if args.save_every and step % args.save_every == 0 and step < args.steps and not stop:
            writer.start(step, job.weights, job.optimizer, job.scaler)
    if args.save:
        writer.start(step, job.weights, job.optimizer, job.scaler)
        writer.finish()
    if args.save_hf and not stop:
        save_hf(args.save_hf, job.weights, config, args.hf)
    log(f"layers per stage {layers}, {held:,} of {whole:,} bytes of parameters, gradients and AdamW states on a rank")
    return 128 + signal.SIGTERM if stop else 0


def try_on_paper(args):
    """--dry-run: one training step on fake tensors, of three ranks of --world."""
    from dry_run import choose_traces, dry_run, report_lines

    if args.world < 1:
        raise UsageError(f"--world {args.world} must be above 0")
    config = choose_config(args)
    pp_size, replicas, num_shards, tp_size = mesh_sizes = choose_mesh(args, args.world)
    dp_size = replicas * num_shards
    layers, num_microbatches = check_pipeline(args, config, pp_size, dp_size, check_args)
    check_tensor_sizes(args, config, tp_size)
    plan = f"{args.schedule}, {num_microbatches} microbatches of {args.microbatch} | shard {args.shard}"
    print(f"dry run | {args.world} ranks | pp {pp_size} x dp {dp_size} x tp {tp_size} | {plan}")
    print(f"{sum(shape.numel() for shape in whole_shapes(config).values()):,} parameters, layers per stage {layers}")

    def build(device):
        return build_on_meta(args, config, mesh_sizes, layers, device)

    def job(*built, rank, device, num_microbatches):
        return Trainer(args, config, *built, len(layers), num_microbatches, rank, device)

    counts = choose_traces(args.schedule, num_microbatches, len(layers), pp_size)
    for line in report_lines(dry_run(args.world, pp_size, build, job, counts, num_microbatches)):
        print(line)


def main():
    args = parse_args()
    if args.dry_run:
        try:
            return try_on_paper(args)
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
    with process_group(args.device, args.timeout) as (rank, _, world_size, device):
        code = train_with_mesh(args, rank, world_size, device)
    sys.exit(code)


if __name__ == "__main__":
    main()
