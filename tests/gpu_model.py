"""The model of the GPU lane's speed and memory: its FLOPs, its flags, and what 06_hybrid/plan.py foresees for it."""

import csv
import json
import subprocess
import sys
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import reference
from runner import ROOT

TABLES = ROOT / "06_hybrid" / "tables"
STEPS = 10
SETTLED = 4  # steps that are not timed: torch.compile, AdamW's states, DDP's new buckets, the allocator's blocks
FREE = 0.4  # of the card, by plan.py, which counts 16-bit residuals: autocast keeps those of 02_ddp in 32 bits
LARGEST = 32  # microbatch, and the whole batch of a GPU: matmuls of 65,536 rows; more would only take longer


class Model(NamedTuple):
    """Six layers of a 3B Llama: 0.6 billion parameters, almost none in the vocabulary of 256 bytes."""

    dim: int = 3072
    layers: int = 6
    heads: int = 24  # of width 128
    kv_heads: int = 8
    seq_len: int = 2048

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return reference.shapes(self.dim, self.layers, self.heads, self.kv_heads)

    @property
    def params(self) -> int:
        return sum(prod(shape) for shape in self.shapes().values())

    @property
    def flops_per_token(self) -> int:
        """6 N + 6 L D T: forward and backward (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B).

        N: elements of the matrices; the embedding is looked up, not multiplied. Attention counts half of the paper's
        12 L D T, as a causal mask needs half of the scores (Dao, FlashAttention-2, arXiv:2307.08691, section 4.1). What
        is recomputed does not count.
        """
        matrices = {name: shape for name, shape in self.shapes().items() if len(shape) == 2 and "embed" not in name}
        return 6 * sum(map(prod, matrices.values())) + 6 * self.layers * self.dim * self.seq_len

    def mfu(self, tokens_per_s: float, num_gpus: int, matmul_flops: float) -> float:
        """matmul_flops: FLOP/s of one card."""
        return self.flops_per_token * tokens_per_s / num_gpus / matmul_flops

    def flags(self, microbatch: int, num_gpus: int = 1) -> list[object]:
        """Of a run that is measured, on so many GPUs, each with the same share of the batch."""
        sizes = ["--dim", self.dim, "--layers", self.layers, "--heads", self.heads, "--kv-heads", self.kv_heads]
        batch = ["--batch", microbatch * num_gpus, "--microbatch", microbatch, "--seq-len", self.seq_len]
        return [*sizes, *batch, "--steps", STEPS, "--lr", 1e-4, "--dtype", "bfloat16", "--compile"]


def steady_rate(rows: list[dict[str, Any]]) -> float:
    """Tokens per second of all GPUs: the median of the steady steps of --metrics."""
    return median(row["tokens_per_s"] for row in rows[SETTLED:])


# ---- 06_hybrid/plan.py ----
class Plan(NamedTuple):
    microbatch: int
    tensor_bytes: float  # what the allocator should have handed out at its peak


def plan_command(model: Model, memory_gib: float, folder: Path) -> list[str]:
    """The planner's command for this model on one card of that memory; writes the tables of both into the folder."""
    hidden = model.shapes()["model.layers.0.mlp.up_proj.weight"][0]
    sizes = dict(layers=model.layers, hidden=model.dim, heads=model.heads, kv_heads=model.kv_heads)
    sizes |= dict(head_dim=model.dim // model.heads, ffn=hidden, vocab=256)
    with open(TABLES / "gpus.csv", newline="") as file:  # the other columns are of speed, which is not asked for
        card = next(row for row in csv.DictReader(file) if row["name"] == "h200-141gb")
    rows = {"models": {"name": "lane", "family": "llama", **sizes}, "hardware": card | dict(memory_gib=memory_gib)}
    for name, row in rows.items():
        with open(folder / f"{name}.csv", "w", newline="") as file:
            table = csv.DictWriter(file, list(row))
            table.writeheader()
            table.writerow(row)
    files = ["--models", str(folder / "models.csv"), "--hardware", str(folder / "hardware.csv")]
    job = ["--model", "lane", "--gpus", "1", "--gpu", card["name"], "--gpus-per-node", "1", "--recipe", "16"]
    batch = ["--seq-len", str(model.seq_len), "--batch", str(LARGEST), "--margin", str(FREE)]
    which = ["--fix", "zero=0,recompute=none", "--top", "99", "--json"]
    return [str(ROOT / "06_hybrid/plan.py"), *files, *job, *batch, *which]


def choose_plan(answer: dict[str, Any]) -> Plan:
    """Returns the plan of the largest microbatch that fits. answer: plan.py's JSON.

    Its total has allowances for what is no tensor, the overhead; a training script's peak_mib has tensors alone.
    """
    best = max(answer["plans"], key=lambda one: one["layout"]["microbatch"])
    return Plan(best["layout"]["microbatch"], best["memory"]["total"] - best["memory"]["overhead"])


def plan(model: Model, memory_gib: float, folder: Path) -> Plan:
    command = [sys.executable, *plan_command(model, memory_gib, folder)]
    return choose_plan(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
