"""What train.py and from_scratch.py share beside the checkpoint: which flags go together, and dropout."""

import sys
from math import gcd
from pathlib import Path

import torch
from checkpoint import require_safetensors

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError  # copied this folder out? copy common/ beside it or into it


def check_tp(args, tp_size):
    """Refuses what cannot be split: on every rank alike, before the first collective."""
    if tp_size < 1:
        raise UsageError(f"--tp {tp_size} must be above 0")
    hidden, kv_heads = 64 * -(-8 * args.dim // 192), args.kv_heads
    for what, number in (("--heads", args.heads), ("MLP width", hidden), ("--seq-len", args.seq_len)):
        if number % tp_size and (what != "--seq-len" or args.sequence_parallel):
            raise UsageError(f"{what} {number} is not divisible by --tp {tp_size}: use --tp {gcd(number, tp_size)}")
    if kv_heads % tp_size and tp_size % kv_heads:
        way_out = f"use --tp {gcd(kv_heads, tp_size)}"
        raise UsageError(f"--kv-heads {kv_heads} and --tp {tp_size}: one must divide the other; {way_out}")
    if args.vocab_size < 256:
        raise UsageError(f"--vocab-size {args.vocab_size} is less than the 256 values of a byte: use 256 or more")
    if not 0 <= args.dropout < 1:
        raise UsageError(f"--dropout {args.dropout} must be at least 0 and below 1")
    if vars(args).get("regather") and (args.no_overlap or not args.sequence_parallel):  # from_scratch.py's
        raise UsageError("--regather goes with --sequence-parallel, and without --no-overlap")
    if args.save or args.resume:
        require_safetensors()


def add_dropout(model, p, shared, private):
    """Dropout as Megatron-LM's: inside the split region from `private`, outside it from `shared`.

    Inside, before o_proj and down_proj, the ranks of a tp group hold different columns: with one random state, column i
    of each rank would be dropped together. Outside, they hold the same tokens, and must drop the same; with sequence
    parallelism they hold different tokens: pass private twice. shared, private: torch.Generator.
    """

    def drop(x, generator):
        return x * torch.empty_like(x).bernoulli_(1 - p, generator=generator) / (1 - p)

    for layer in model.model.layers:
        for half, last in ((layer.self_attn, layer.self_attn.o_proj), (layer.mlp, layer.mlp.down_proj)):
            last.register_forward_pre_hook(lambda _, inputs: drop(inputs[0], private))
            half.register_forward_hook(lambda _, inputs, output: drop(output, shared))
