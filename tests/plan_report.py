"""Compares 06_hybrid/plan.py with public measurements: parameters, memory, does it fit, step time, order of layouts.

    python tests/plan_report.py [--throughput FILE] [--fits FILE] [--memory FILE] [--models FILE] [--json]
Files are CSV in the format of ../shared/truth, which is the default. It calls the planner's own functions; what is
read into a row that does not say it (attention before FlashAttention, ...) is in `read_run`, for all sources alike.
Ends with the ten rows that are farthest off, and why that may be.
"""

import argparse
import csv
import json
import random
import re
import statistics
import sys
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "06_hybrid"))
from plan_memory import gathered_bytes, in_flight, layer_bytes, peak_memory, zero_bytes
from plan_search import search_layouts
from plan_tables import RECIPES, Job, Layout, Model, UsageError, load_tables
from plan_time import step_seconds

TRUTH = ROOT.parent / "shared" / "truth"
FLASH = 2205.14135  # arXiv number of FlashAttention: papers before it keep the scores in memory
HALVES = 20  # random halves, whose medians are averaged
NEAR = 0.15  # pairs of layouts that differ by less in measured time are not ordered


def read_rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def whole(text, default=1):
    """The number in a cell, or the default where it is blank or no number."""
    try:
        return int(float(text))
    except (TypeError, ValueError):
        return default


# ---- a row as the planner's job and layout ----
def find_gpu(text, gpus, memory_gb=""):
    """Returns the Gpu that a table's free text means, or None: "A100-SXM-40GB", "GB300", "V100-SXM2-16/32GB"."""
    text = text.lower()
    kind = re.match(r"[a-z]*\d+[a-z]*", text.replace("rtx-", "").replace("rtx ", ""))
    found = [gpu for name, gpu in gpus.items() if kind and kind[0] in name.split("-")]
    found = [gpu for gpu in found if ("pcie" in gpu.name) == ("pcie" in text)] or found
    sizes = [int(n) for n in re.findall(r"(\d+) ?gb", f"{text} {memory_gb}gb")]
    return (
        min(found, key=lambda gpu: min((abs(gpu.memory_gib - n) for n in sizes), default=-gpu.memory_gib))
        if found
        else None
    )


def read_precision(text):
    text = text.lower()
    if not text.startswith(("bf16", "fp16")):
        for name in ("fp4", "fp8"):
            if name in text:
                return name
    return "bf16"


def read_zero(text):
    """Returns the ZeRO stage that a sharding in words stands for."""
    text = text.lower()
    for stage, words in (
        (3, ("zero-3", "full_shard", "hybrid_shard")),
        (2, ("zero-2", "grad_op")),
        (1, ("zero-1", "distributed opt")),
    ):
        if any(word in text for word in words):
            return stage
    return 3 if "fsdp" in text else 1 if "zero" in text and "zero-0" not in text else 0


def read_recompute(text):
    text = text.lower()
    return next((kind for kind in ("full", "selective") if kind in text), "none")


def is_before_flash(row):
    """True if attention's scores went through memory: a paper before FlashAttention, or a GPU that it does not know."""
    numbers = [float(n) for n in re.findall(r"arXiv:(\d{4}\.\d{5})", row["source"])]
    years = [int(year) for year in re.findall(r"\b20[12]\d\b", row.get("framework", "") + " " + row["source"])]
    old = (numbers and min(numbers) < FLASH) or (years and max(years) < 2022)
    return bool(old or "V100" in row["gpu"] or "bigscience" in row["source"])


def has_fused_kernels(row):
    """True for frameworks with kernels of their own, and for torch.compile."""
    text = " ".join(row.get(name, "") for name in ("framework", "source_detail", "notes"))
    return bool(re.search("Megatron|NeMo|OneFlow|compile", text))


def has_fused_loss(row):
    """True for the frameworks that bring their own cross-entropy; the others use PyTorch's."""
    return bool(re.search("Megatron|NeMo|NVIDIA|OneFlow|foundry", row.get("framework", "") + row["source"]))


def is_nvidia_recipe(row):
    """True for NVIDIA's tuned recipes: gradients in bf16, as their printed memory shows (5.5 P on 8 ranks)."""
    return bool(re.search("NeMo|dgxc", row["source"]))


def read_nic(text, gpus_per_node):
    """Returns GB/s of one GPU's share of the network in one direction, or None: "8x200Gb/s", "400Gb/s NDR per GPU"."""
    text = text.replace("ONE ", "1x")
    if not (found := re.search(r"(?:(\d+)x)?([\d.]+) ?([GT])b/s", text)):
        return None
    number, rate, unit = found.groups()
    total = int(number or 1) * float(rate) * (1000 if unit == "T" else 1) / 8
    return total if "per GPU" in text else total / gpus_per_node


FAMILY_WORDS = [(word, "llama") for word in ("llama", "mistral", "mixtral")] + [
    ("qwen", "qwen"),
    ("mpt", "mpt"),
    ("nemotron", "falcon"),
]


def read_model(row, seq_len):
    """Returns the Model of a row's own sizes: a GPT with learned positions, or a Llama."""
    layers, hidden, heads = (whole(row[name]) for name in ("layers", "hidden", "heads"))
    kv_heads, ffn = whole(row["kv_heads"], heads), whole(row["ffn"], 4 * hidden)
    name = row["model"].lower()
    family = next((f for word, f in FAMILY_WORDS if word in name), "gpt")
    tied = row["tied"] == "True"
    positions = seq_len if family in ("gpt", "mpt") else 0
    return Model(
        row["model"],
        family,
        layers,
        hidden,
        heads,
        kv_heads,
        hidden // heads,
        ffn,
        whole(row["vocab"]),
        positions,
        tied,
    )


def read_run(row, gpus):
    """Returns (Job, Layout, seconds measured) of a row of throughput.csv; ValueError says why it cannot be planned."""
    gpu = find_gpu(row["gpu"], gpus)
    if gpu is None:
        raise ValueError(f"no such GPU in the tables: {row['gpu']}")
    if "LoRA" in row["tflops_kind"] or "lora" in row["model"].lower():
        raise ValueError("LoRA: the planner trains all weights")
    if "MoE" in row["tflops_kind"] or whole(row["ep"]) > 1:
        raise ValueError("experts: their sizes are not in the row")
    seq_len, num_gpus, batch = whole(row["seq_len"]), whole(row["n_gpus"]), whole(row["gbs"])
    per_node = whole(row["gpus_per_node"], 8)
    flash = not is_before_flash(row)
    nic = read_nic(row["interconnect"], per_node)
    gpu = gpu._replace(nic_gb_s=nic) if nic else gpu
    tp, pp, cp = (whole(row[axis]) for axis in ("tp", "pp", "cp"))
    zero = read_zero(row["sharding"])
    job = Job(
        read_model(row, seq_len), gpu, num_gpus, per_node, seq_len, batch, read_precision(row["precision"]),
        recipe="16" if zero == 3 or is_nvidia_recipe(row) else "20" if row["precision"].startswith("fp16") else "18",
        flash=flash, fused=has_fused_kernels(row), fused_loss=has_fused_loss(row),
        overlap=flash or "OneFlow" in row["framework"],
    )  # fmt: skip
    dp = whole(row["dp"], num_gpus // (tp * pp * cp))
    recompute = read_recompute(row["recompute"])
    if recompute == "selective" and flash and re.search("Megatron|NeMo", row["framework"]):
        recompute = "none"  # their selective recomputation is of the scores, which flash attention does not keep
    more = {"microbatch": whole(row["mbs"]), "recompute": recompute}
    more["sequence_parallel"] = tp > 1 and (flash or "sequence" in row["recompute"])
    layout = Layout(dp, tp, pp, cp, whole(row["vp"]), zero, **more)
    if layout.size != num_gpus:
        raise ValueError(f"dp x tp x pp x cp = {layout.size} is not {num_gpus} GPUs")
    if batch % (layout.dp * layout.microbatch):
        raise ValueError(f"a batch of {batch} is no multiple of {layout.dp} x {layout.microbatch}")
    tokens_per_s = float(row["tokens_per_s_per_gpu"] or 0) * num_gpus
    seconds = float(row["step_time_s"] or 0) or (batch * seq_len / tokens_per_s if tokens_per_s else 0)
    if not seconds:
        raise ValueError("no step time")
    return job, layout, seconds


class Run:
    """A measured row beside the planner's prediction."""

    def __init__(self, row, gpus):
        self.row, (self.job, self.layout, self.measured) = row, read_run(row, gpus)
        self.parts = step_seconds(self.job, self.layout)
        self.predicted = self.parts["total"]
        self.group = (row["source"], self.job.precision, self.job.gpu.name)

    def error(self, constant=1.0):
        return self.predicted / constant / self.measured - 1


def read_runs(rows, gpus):
    """Returns ([Run], Counter of reasons why a row is left out) of the rows with complete=yes."""
    runs, left_out = [], Counter()
    for row in rows:
        if row["complete"] != "yes" or row.get("status") == "OOM":
            continue
        try:
            runs.append(Run(row, gpus))
        except (ValueError, UsageError) as error:
            left_out[str(error)] += 1
    return runs, left_out


# ---- figures ----
def spread(errors):
    """Returns median and 90th percentile of absolute errors."""
    ordered = sorted(map(abs, errors))
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


def fit(runs):
    """One constant per source, precision and GPU: the median ratio of predicted and measured time."""
    ratios = defaultdict(list)
    for run in runs:
        ratios[run.group].append(run.predicted / run.measured)
    return {group: statistics.median(values) for group, values in ratios.items()}


def random_half(runs, seed):
    """Returns the errors on one random half with the constants fitted on the other."""
    shuffled = random.Random(seed).sample(runs, len(runs))
    constants = fit(shuffled[: len(runs) // 2])
    return [run.error(constants.get(run.group, 1.0)) for run in shuffled[len(runs) // 2 :]]


def leave_one_source_out(runs):
    """Returns {source: (rows, median error, 90th percentile)} with one constant for all, from the other sources."""
    found = {}
    for source in sorted({run.row["source"] for run in runs}):
        others = [run.predicted / run.measured for run in runs if run.row["source"] != source]
        own = [run for run in runs if run.row["source"] == source]
        if others:
            constant = statistics.median(others)
            found[source] = (len(own), *spread([run.error(constant) for run in own]))
    return found


def order_of_pairs(runs):
    """Returns (pairs in the right order, pairs): layouts of one model and source on one cluster, time per sequence."""
    clusters = defaultdict(list)
    for run in runs:
        clusters[run.group, run.row["model"], run.job.num_gpus, run.job.seq_len].append(run)
    right = pairs = 0
    for group in clusters.values():
        for a, b in combinations(group, 2):
            if a.layout == b.layout and a.job == b.job:
                continue
            measured = (a.measured / a.job.batch) / (b.measured / b.job.batch)
            if max(measured, 1 / measured) > 1 + NEAR:
                pairs += 1
                right += (measured > 1) == (a.predicted / a.job.batch > b.predicted / b.job.batch)
    return right, pairs


# ---- does it fit ----
TYPICAL = ((3e8, 1024), (1e9, 1536), (2e9, 2048), (5e9, 3072), (10e9, 4096), (18e9, 5120), (30e9, 6144), (50e9, 8192))


def guess_model(row, models, known, seq_len):
    """Returns the Model of a name: of the tables, of a measured row, or a GPT with so many parameters."""
    name, params = row["model"].lower(), float(row["params"])
    for known_name in (name, name.replace("3.1-", "3-")):
        if known_name in models:
            model = models[known_name]
            return model._replace(positions=seq_len) if model.positions else model
    if row["model"] in known:
        return read_model(known[row["model"]], seq_len)
    by_shape = 128 * round((params * 128 / 12) ** (1 / 3) / 128)  # about as wide as 128 times its layers
    hidden = next((width for most, width in TYPICAL if params <= most), by_shape)
    layers, heads = max(1, round((params - 50304 * hidden) / (12 * hidden**2))), hidden // 128
    return Model(row["model"], "gpt", layers, hidden, heads, heads, 128, 4 * hidden, 50304, seq_len, True)


def read_offload(row):
    words = f"{row['offload']} {row['sharding']}".lower()
    if "offload" not in words and row["offload"] in ("", "none"):
        return "none"
    return "all" if "param" in words else "optimizer"


def read_fit(row, gpus, models, known):
    """Returns (Job, [Layouts that the row may mean], or None for any) of a row of fits.csv.

    What it does not say is left open: recomputation, 1024 tokens, one sequence, a few microbatches.
    """
    if "lora" in row["task"].lower():
        raise ValueError("LoRA: the planner trains all weights")
    if (gpu := find_gpu(row["gpu"], gpus, row["gpu_mem_gb"])) is None:
        raise ValueError(f"no such GPU in the tables: {row['gpu']}")
    seq_len, num_gpus, zero = whole(row["seq_len"], 1024), whole(row["n_gpus"]), read_zero(row["sharding"])
    model, flash = guess_model(row, models, known, seq_len), not is_before_flash(row)
    how = "16" if zero == 3 else "18", flash, False, has_fused_loss(row)
    tp, pp, cp = (whole(row[axis]) for axis in ("tp", "pp", "cp"))
    dp, microbatch = whole(row["dp"], num_gpus // (tp * pp * cp)), whole(row["mbs"])
    job = Job(model, gpu, num_gpus, min(8, num_gpus), seq_len, dp * microbatch * 2 * pp, "bf16", *how)
    if "3D" in row["sharding"]:
        return job._replace(batch=num_gpus, recipe="16"), None
    kinds = [read_recompute(row["recompute"])] if row["recompute"] else ["none", "selective", "full"]
    more = {"microbatch": microbatch, "sequence_parallel": tp > 1 and flash, "offload": read_offload(row)}
    return job, [Layout(dp, tp, pp, cp, zero=zero, recompute=kind, **more) for kind in kinds]


def check_fits(rows, gpus, models, known):
    """Returns ([{id, kind, fits, accepted, gb, card_gb}], Counter of reasons). The whole card counts: no margin."""
    found, left_out = [], Counter()
    for row in rows:
        try:
            job, layouts = read_fit(row, gpus, models, known)
        except ValueError as error:
            left_out[str(error)] += 1
            continue
        if layouts is None:
            total = search_layouts(job, 0.0, 1).smallest.memory["total"]
        else:
            total = min(peak_memory(job, layout)["total"] for layout in layouts)
        card = job.gpu.memory_bytes
        what = {"id": row["id"], "kind": row["kind"], "fits": row["fits"], "accepted": total <= card}
        found.append(what | {"gb": round(total / 1e9, 1), "card_gb": round(card / 1e9, 1)})
    return found, left_out


def is_measured(check):
    return check["kind"].startswith(("measured", "statement + run", "smallest recipe"))


# ---- parameters and memory ----
FAMILY_OF = {
    "T5": "t5",
    "GPT-2": "gpt",
    "GPT-3": "gpt",
    "OPT": "gpt",
    "MPT": "mpt",
    "Falcon": "falcon",
    "BLOOM": "bloom",
}
FAMILY_OF |= {
    "GPT-NeoX": "neox",
    "GPT-J": "gptj",
    "PaLM": "palm",
    "BERT": "bert",
    "Mi": "llama",
    "llama": "llama",
    "Qwen": "qwen",
}


def check_params(rows):
    """Returns ([{id, printed, ours}], Counter of reasons): the closed form of each family against each row's count."""
    found, left_out = [], Counter()
    for row in rows:
        family = next((name for word, name in FAMILY_OF.items() if row["family"].startswith(word)), None)
        count = row["params_closed_form"] or row["params_exact"]
        if family is None or not count:
            left_out[f"{row['family']}: no closed form here"] += 1
            continue
        heads, head_dim, hidden = whole(row["heads"]), whole(row["head_dim"]), whole(row["hidden"])
        if family == "gpt" and heads * head_dim != hidden:  # misprints of GPT-3's table 2.1
            heads, head_dim = 1, hidden
        kv_heads = heads if family == "gpt" else whole(row["kv_heads"], heads)
        sizes = hidden, heads, kv_heads, head_dim, whole(row["ffn"]), whole(row["vocab"])
        positions = 2050 if row["family"] == "OPT" else whole(row["max_seq"], 0) if family in ("gpt", "bert") else 0
        if family == "mpt":  # its rows' learned positions follow the sequence length, which the note names
            positions = next((int(n) for n in re.findall(r"sequence length (\d+)", row["notes"])), 2048)
        experts = {"experts": whole(row["n_experts"]), "top_k": whole(row["top_k"])}
        model = Model(
            row["model"],
            family,
            whole(row["layers"].split("+")[0]),
            *sizes,
            positions,
            row["tied"] == "True",
            **experts,
        )
        found.append({"id": row["model"], "printed": int(count), "ours": model.params})
    return found, left_out


def is_about(row, *words):
    return all(word in row["quantity"] + row["sharding"] + row["offload"] + row["source"] for word in words)


def gpt_of(text):
    """The GPTs of Korthikanti et al., table 3, without embeddings, and their (tp, pp, chunks): "GPT 175B"."""
    layers, hidden, heads, pp, chunks = {
        "22B": (48, 6144, 64, 1, 1), "175B": (96, 12288, 96, 8, 3), "530B": (105, 20480, 128, 35, 3),
        "1T": (128, 25600, 160, 64, 1),
    }[text.split()[-1]]  # fmt: skip
    model = Model(text, "gpt", layers, hidden, heads, heads, hidden // heads, 4 * hidden, 51200)
    return model, Layout(tp=8, pp=pp, chunks=chunks)


def activation_share(model, words):
    """A layer's activations as a part of those with tensor parallelism alone, in percent (figure 7)."""
    base = layer_bytes(model, 2048, 1, 8)
    if "full" in words:
        return 100 * 2 * 2048 * model.hidden / base
    return 100 * layer_bytes(model, 2048, 1, 8, "SP" in words, "selective" not in words) / base


def remember(row, models):
    """Returns (kind of figure, the planner's value in the row's unit); KeyError: not a figure that it knows."""
    scale = 2**30 if row["unit"].startswith("GiB") else 1e9
    params, ranks = float(row["params"] or 0), whole(row["dp"])
    zero, offload = 0 if "DDP" in row["sharding"] else read_zero(row["sharding"]), read_offload(row)
    if is_about(row, "arXiv:1910.02054", "model states") or "arithmetic" in row["source"]:
        recipe = "20" if "18P" in row["formula"] else "16"
        held = sum(zero_bytes(params, recipe, Layout(ranks, zero=zero)).values())
        return ("zero" if "1910.02054" in row["source"] else "other"), held / scale
    if is_about(row, "DeepSpeed", "GPU model states"):
        largest = re.findall(r"printed as ([\d.]+)M", row["notes"])  # ZeRO-3 holds 4 bytes of the largest layer
        held = gathered_bytes(1e6 * float(largest[0])) if zero == 3 else 0.0
        if offload == "none":
            held += sum(zero_bytes(params, "20" if zero < 3 else "18", Layout(ranks, zero=zero)).values())
        elif offload == "optimizer":
            held += 2 * params / (ranks if zero == 3 else 1)
        return "other", held / scale
    if row["unit"] == "bytes/param":
        return "other", sum(RECIPES["20"])
    if is_about(row, "arXiv:2205.05198", "% of the TP-only"):
        return "figure 7", activation_share(gpt_of(row["model"])[0], row["recompute"] + row["sharding"])
    if is_about(row, "saved activations per layer"):  # in units of 2 s b h bytes, of PyTorch's own kernels
        model = next(model for name, model in models.items() if name.startswith(row["model"].lower()))
        return "other", layer_bytes(model, 1, 1, scores=False, fused=False) / 2 / model.hidden
    model, layout = gpt_of(row["model"])
    if is_about(row, "parameters + optimizer state"):
        params = 12 * model.layers * model.hidden**2 / 8 / layout.pp
        return "figure 1", sum(zero_bytes(params, "18", Layout()).values()) / scale
    if is_about(row, "activations, first stage"):
        light = "selective" in row["recompute"]
        each = layer_bytes(model, 2048, whole(row["mbs"]), 8, light, not light)
        return "figure 1", in_flight(layout, 10**6) * model.layers / layout.pp * each / scale
    raise KeyError(row["quantity"])


def check_memory(rows, models):
    """Returns ([{id, kind, printed, ours}], Counter of reasons)."""
    found, left_out = [], Counter()
    for row in rows:
        try:
            kind, ours = remember(row, models)
        except (KeyError, IndexError, StopIteration):
            left_out[row["quantity"][:50]] += 1
            continue
        known = "a formula that DeepSpeed has replaced" if "CONTRADICTION" in row["notes"] else ""
        value = {"printed": float(row["value"]), "printed_text": row["value"], "ours": ours, "known": known}
        found.append({"id": row["id"], "kind": kind} | value)
    return found, left_out


def difference(check):
    """How far ours is from the printed value, beyond half a unit of its last digit, in parts of it."""
    digits = str(check["printed_text"]).partition(".")[2]
    half_unit = 0.5 * 10.0 ** -len(digits)
    return max(0.0, abs(check["ours"] - check["printed"]) - half_unit) / check["printed"]


def worst(checks, kind):
    """Returns {largest difference, rows} of the checks of a kind."""
    chosen = [check for check in checks if check["kind"] == kind]
    return {"largest_difference": max(map(difference, chosen), default=0.0), "rows": len(chosen)}


# ---- report ----
def reason(run):
    """A likely reason for a row that is far off, from what the row says and does not say."""
    row, layout, largest = run.row, run.layout, max((p for p in run.parts if p != "total"), key=run.parts.get)
    if "includes" in row["notes"]:
        return f"measured: {row['notes'].split(';')[0]}"
    if layout.zero == 3 and not run.job.flash:
        return "ZeRO-3 of 2021, which gathered tensor by tensor: its collectives cost more than their bytes"
    if layout.pp > 1 and not row["vp"]:
        return "virtual stages are not stated: predicted with none"
    if peak_memory(run.job, layout)["total"] > run.job.gpu.memory_bytes and "full" not in row["recompute"]:
        return "does not fit as stated: recomputation or offloading is not in the row"
    if run.parts["attention"] > 0.4 * run.predicted:
        share = run.parts["attention"] / run.predicted
        return f"attention is {share:.0%}, whose kernels of 2022 to 2025 differ by a factor of two"
    if "V100" in row["gpu"]:
        return "two frameworks in one source, one constant; network of one port per node"
    if row["grad_accum"] == "":
        return "fine-tuning on packed sequences: attention is not over the whole length"
    return (
        f"mostly {largest}, {run.parts[largest] / run.predicted:.0%} of the prediction; one constant per source and GPU"
    )


def judge_time(runs):
    """Returns the figures of step time, for runs of any sources."""
    if not runs:
        return {}
    halves, constants = [spread(random_half(runs, seed)) for seed in range(HALVES)], fit(runs)
    medians, p90s = zip(*halves)
    half = {"median": statistics.mean(medians), "p90": statistics.mean(p90s)}
    right, pairs = order_of_pairs(runs)
    off = sorted(runs, key=lambda run: -abs(run.error(constants[run.group])))[:10]
    return {
        "no_fit": dict(zip(("median", "p90"), spread([run.error() for run in runs]))),
        "other_half": half | {"largest_median": max(medians), "largest_p90": max(p90s)},
        "constants": [{"group": group, "constant": constant} for group, constant in constants.items()],
        "leave_one_source_out": leave_one_source_out(runs),
        "order": {"right": right, "pairs": pairs},
        "worst": [
            {"id": run.row["id"], "measured_s": run.measured, "predicted_s": run.predicted}
            | {"error_fitted": run.error(constants[run.group]), "reason": reason(run)}
            for run in off
        ],
    }


def judge_fits(checks):
    ran = [check for check in checks if check["fits"] == "yes" and is_measured(check)]
    failed = [check for check in checks if check["fits"] == "no" and "OOM" in check["kind"]]
    wrong = [c for c in checks if c["fits"] in ("yes", "no") and c["accepted"] != (c["fits"] == "yes")]
    refused, accepted = sum(not check["accepted"] for check in failed), sum(check["accepted"] for check in ran)
    return {"oom": len(failed), "oom_refused": refused, "ran": len(ran), "ran_accepted": accepted, "wrong": wrong}


def evaluate(args):
    """Returns all figures as one dictionary. A default file that is not there counts as empty."""

    def rows_of(name):
        path = getattr(args, name)
        return [] if path == TRUTH / f"{name}.csv" and not path.exists() else read_rows(path)

    models, gpus = load_tables()
    throughput = rows_of("throughput")
    runs, time_left_out = read_runs(throughput, gpus)
    known = {row["model"]: row for row in throughput if row["layers"] and row["hidden"] and row["heads"]}
    fits, fits_left_out = check_fits(rows_of("fits"), gpus, models, known)
    memory, memory_left_out = check_memory(rows_of("memory"), models)
    params, params_left_out = check_params(rows_of("models"))
    exact = sum(check["ours"] == check["printed"] for check in params)
    return {
        "parameters": {"exact": exact, "rows": len(params), "left_out": params_left_out},
        "zero_table_1": worst(memory, "zero"),
        "activations_closed_form": worst(memory, "figure 1"),
        "activations_figure_7_points": max(
            (abs(c["ours"] - c["printed"]) for c in memory if c["kind"] == "figure 7"), default=0.0
        ),
        "memory_rows": {"checks": memory, "left_out": memory_left_out},
        "fits": judge_fits(fits) | {"left_out": fits_left_out},
        "step_time": {"rows": len(runs), "left_out": time_left_out} | judge_time(runs),
    }


def show(found):
    def left(counter):
        return "; ".join(f"{number} left out ({why})" for why, number in counter.items()) or "none left out"

    params, fits, time = found["parameters"], found["fits"], found["step_time"]
    print(f"parameters: {params['exact']} of {params['rows']} exact; {left(params['left_out'])}")
    for name, what in (("ZeRO, table 1", "zero_table_1"), ("activations, closed forms", "activations_closed_form")):
        print(f"{name}: {found[what]['rows']} values, largest difference {found[what]['largest_difference']:.2%}")
    points = found["activations_figure_7_points"]
    print(f"activations, figure 7 as read from the picture: largest difference {points:.2f} points of 100")
    print(f"other memory: {left(found['memory_rows']['left_out'])}")
    for check in found["memory_rows"]["checks"]:
        if check["kind"] == "other":
            line = f"    {check['id']}: printed {check['printed']:g}, planned {check['ours']:.4g} {check['known']}"
            print(line.rstrip())
    refused, accepted = f"{fits['oom_refused']} of {fits['oom']}", f"{fits['ran_accepted']} of {fits['ran']}"
    print(
        f"does it fit: {refused} that ran out of memory refused, {accepted} that ran accepted; {left(fits['left_out'])}"
    )
    for check in fits["wrong"]:
        sizes = f"{check['gb']} GB planned, {check['card_gb']} GB on the card"
        print(f"    wrong: {check['id']}, {check['kind']}, fits: {check['fits']}; {sizes}")
    print(f"step time: {time['rows']} rows; {left(time['left_out'])}")
    if not time["rows"]:
        return
    half, plain = time["other_half"], time["no_fit"]
    worst_half = f"worst of {HALVES} halves {half['largest_median']:.1%} and {half['largest_p90']:.1%}"
    print(f"    as shipped: median {plain['median']:.1%}, 90th percentile {plain['p90']:.1%}")
    print("    one constant per source, precision and GPU from a random half, on the other half:")
    print(f"        median {half['median']:.1%}, 90th percentile {half['p90']:.1%}; {worst_half}")
    print("    one constant for all, from the other sources:")
    for source, (rows, median, p90) in time["leave_one_source_out"].items():
        print(f"        {rows:4} rows, median {median:6.1%}, 90th percentile {p90:6.1%}: {source[:60]}")
    right, pairs = time["order"]["right"], time["order"]["pairs"]
    print(f"    order: {right} of {pairs} pairs of layouts that differ by more than {NEAR:.0%}")
    print("    farthest off, with the constants:")
    for row in time["worst"]:
        seconds = f"{row['predicted_s']:.3g} s, measured {row['measured_s']:.3g} s"
        print(f"        {row['error_fitted']:+.0%} {row['id']}: {seconds}; {row['reason']}")


def main():
    add = (parser := argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)).add_argument
    for name in ("throughput", "fits", "memory", "models"):
        add(f"--{name}", type=Path, default=TRUTH / f"{name}.csv")
    add("--json", action="store_true")
    args = parser.parse_args()
    if all(path == TRUTH / path.name for path in (args.throughput, args.fits, args.memory)) and not TRUTH.is_dir():
        print(f"error: no public figures in {TRUTH}: give --throughput, --fits or --memory", file=sys.stderr)
        sys.exit(2)
    try:
        found = evaluate(args)
    except (OSError, KeyError) as error:
        print(f"error: {error}: give files in the format of shared/truth beside the repository", file=sys.stderr)
        sys.exit(2)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)


if __name__ == "__main__":
    main()
