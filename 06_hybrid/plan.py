"""Which layout, before the machines are rented: does a model fit, how fast does it train, and what limits it.

    python 06_hybrid/plan.py --model llama2-70b --gpus 64 --gpu a100-80gb --seq-len 4096 --batch 1024
Look at the first row, the simplest of the fastest layouts; at why simpler ones do not do; and at --explain with it.
Arithmetic of published formulas (plan_memory.py, plan_time.py) over tables of models and GPUs (tables/), no training;
how it compares with measured runs is in PLAN.md. Needs the standard library alone, --plot matplotlib.
Sources: Narayanan et al., arXiv:2104.04473; Korthikanti et al., arXiv:2205.05198; Rajbhandari et al., arXiv:1910.02054.
"""

import argparse
import json
import sys

from plan_memory import MARGIN, capacity_bytes, host_bytes, peak_memory, stage_memory
from plan_search import EQUAL, Plan, explain_try, first_tries, search_layouts
from plan_tables import RECIPES, Job, Layout, UsageError, load_tables, read_links
from plan_time import step_seconds

PRESETS = {  # of our models those that train.py has -> their names there, for --preset
    "llama3.1-405b": "llama3-405b",
    **{name: name for name in ("llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3-70b")},
}
KEYS = {"micro": "microbatch", "sp": "sequence_parallel"}  # short names in --explain and --fix
GROUPS = {  # what a part of the step's time counts as
    "compute": ("matmul", "attention", "head", "recompute"),
    "memory": ("memory-bound", "optimizer", "offload"),
    "communication": ("tp", "cp", "pp", "dp"),
    "bubble": ("bubble",),
}
TERMS = {  # --explain's formulas; P parameters of the stage's rank, N ranks that ZeRO splits over
    "parameters": "2 P, / N with ZeRO-3 (arXiv:1910.02054, section 5)",
    "gradients": "2 or 4 P, / N from ZeRO-2 on without a pipeline",
    "optimizer": "12 P or so by recipe, / N from ZeRO-1 on",
    "activations": "s b h (10 + 24/t) a layer for GPT, times layers and microbatches in flight (arXiv:2205.05198)",
    "recomputed": "one layer whole, while its backward runs",
    "logits": "4 s b V / t on the last stage",
    "buffers": "gathered layers, buckets, messages",
    "overhead": "CUDA context 1 GB, NCCL 0.3 GB an axis, 5 % fragmentation",
    "matmul": "6 FLOPs a parameter and token at the fraction of peak that such shapes reach, and their bytes",
    "attention": "4 s q FLOPs a token and layer forward, half of it under flash attention, 2.5 times that backward",
    "memory-bound": "norms, residual sums, rotary positions, the MLP's function: bytes over the memory's bandwidth",
    "head": "6 h V FLOPs a token, logits through memory; embedding",
    "recompute": "forward once more, or 0.4 of its matmuls if selective",
    "tp": "4 all_reduces of 2 b s h bytes a layer; those of the recomputation count there",
    "cp": "keys and values round the ring, less what attention hides",
    "bubble": "(p - 1) / v of a microbatch's time (arXiv:2104.04473, section 2.2)",
    "pp": "2 b s h / t bytes a microbatch, chunk and direction",
    "dp": "gradients, and weights under ZeRO: what sticks out behind computation, and half of what does not",
    "offload": "gradients and weights over PCIe, AdamW on the host",
}


# ---- config ----
def parse_args():
    add = (parser := argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)).add_argument
    add("--model", required=True, help="a name in tables/models.csv or --models")
    add("--gpus", type=int, required=True, help="how many there are")
    add("--gpu", required=True, help="a name in tables/gpus.csv or --hardware")
    add("--gpus-per-node", type=int, help="default: what the GPU's link joins, at most 8")
    add("--nic-gb-s", type=float, help="of one GPU to other nodes, one direction; default: the table's")
    add("--seq-len", type=int, default=4096, help="tokens per sequence")
    add("--batch", type=int, default=1024, help="global batch in sequences")
    precisions = ("bf16", "fp16", "fp8", "fp4", "fp32")
    add("--precision", choices=precisions, nargs="+", default=["bf16"], help="of the matmuls")
    add("--recipe", choices=tuple(RECIPES), default="18", help="bytes per parameter of weights, gradients and states")
    add("--eager", action="store_true", help="PyTorch's own kernels, without torch.compile, and F.cross_entropy")
    add("--no-flash", action="store_true", help="attention that keeps its scores in memory")
    add("--no-overlap", action="store_true", help="collectives that wait for computation, as before 2022")
    add("--offload", choices=("none", "optimizer", "all"), help="to the host; default: only if nothing fits without")
    add("--margin", type=float, default=MARGIN, help="part of the memory that stays free")
    add("--efficiency", type=float, default=1.0, help="predicted over measured time of a run of yours, for all layouts")
    add("--tokens", type=float, default=1e12, help="to train on, for the days")
    add("--top", type=int, default=5, help="rows of the table")
    add("--fix", metavar="tp=8,zero=1", help="try only layouts with these sizes")
    add("--explain", metavar="tp=8,pp=4,dp=2", help="every term of one layout")
    add("--links", metavar="FILE", help="measured latency and bandwidth, as JSON")
    add("--models", metavar="FILE", help="your models, as CSV with the columns of tables/models.csv")
    add("--hardware", metavar="FILE", help="your GPUs, as CSV with the columns of tables/gpus.csv")
    add("--json", action="store_true", help="all figures, in bytes and seconds")
    add("--plot", metavar="FILE", help="draw memory, time and strong scaling: FILE.png or .svg")
    return parser.parse_args()


def pick(flag, name, table, files):
    """Returns the row of a table, or refuses with the names that begin alike."""
    if name not in table:
        near = [other for other in table if name[:4].lower() in other] or list(table)
        way_out = f"use {', '.join(near[:8])}, or a table of yours, {files}"
        raise UsageError(f"{flag} {name} is none of {len(table)}: {way_out}")
    return table[name]


def make_job(args, precision):
    """Returns the Job that the flags describe; refuses sizes that cannot be."""
    for name in ("gpus", "gpus_per_node", "nic_gb_s", "seq_len", "batch", "tokens", "top", "efficiency"):
        if (value := getattr(args, name)) is not None and not 0 < value < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} {value} must be above 0: use 1, say")
    if not 0 <= args.margin < 1:
        raise UsageError(f"--margin {args.margin} is not from 0 to below 1: use 0.2, say")
    models, gpus = load_tables(args.models, args.hardware)
    model = pick("--model", args.model, models, "--models FILE")
    gpu = pick("--gpu", args.gpu, gpus, "--hardware FILE")
    if model.experts > 1 or model.family in ("bert", "t5"):
        why = "layouts are planned for dense decoders only"
        raise UsageError(f"--model {model.name} has experts or is no decoder: {why}")
    per_node = min(args.gpus, args.gpus_per_node or min(gpu.link_gpus, 8))
    if args.gpus % per_node:
        whole = -(-args.gpus // per_node) * per_node
        raise UsageError(f"--gpus {args.gpus} are not whole nodes of {per_node}: use {whole}")
    gpu.peak_flops(precision)  # refuses a precision that it does not have
    if gpu.attention_fraction is None and precision == "bf16":
        raise UsageError(f"--precision bf16: {gpu.name} has none; use fp16")
    gpu = gpu._replace(nic_gb_s=args.nic_gb_s or gpu.nic_gb_s)
    links = read_links(args.links) if args.links else ()
    flash, fused = not args.no_flash and gpu.attention_fraction is not None, not args.eager
    how = flash, fused, fused, not args.no_overlap, args.efficiency, links
    return Job(model, gpu, args.gpus, per_node, args.seq_len, args.batch, precision, args.recipe, *how)


def read_sizes(text, flag):
    """Returns {field of Layout: value} of "tp=8,pp=4,zero=1"."""
    sizes = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        key = KEYS.get(key, key)
        words = {"recompute": ("none", "selective", "full"), "offload": ("none", "optimizer", "all")}.get(key)
        may_be_0 = key in ("zero", "sequence_parallel")
        is_right = value in words if words else value.isdecimal() and (int(value) > 0 or may_be_0)
        if key not in Layout._fields or not is_right:
            keys = ", ".join(Layout._fields)
            raise UsageError(f"{flag} {part!r}: write name=size,name=size; names are {keys}; sizes are above 0")
        sizes[key] = value if words else int(value)
    return sizes


def make_layout(job, sizes):
    """Returns the Layout of --explain, with what is left out: dp takes the other GPUs, ZeRO-1 where there is a dp."""
    fixed = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    dp = sizes.get("dp", max(1, job.num_gpus // fixed))
    layout = Layout(**({"dp": dp, "zero": int(dp > 1), "sequence_parallel": sizes.get("tp", 1) > 1} | sizes))
    if layout.size != job.num_gpus:
        product = f"dp {layout.dp} x tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {layout.size}"
        raise UsageError(f"--explain: {product}, but --gpus {job.num_gpus}: use sizes whose product that is")
    if job.batch % (layout.dp * layout.microbatch):
        factors = f"dp {layout.dp} x microbatch {layout.microbatch}"
        raise UsageError(f"--batch {job.batch} is no multiple of {factors}: use another")
    if layout.zero > 3 or layout.pp * layout.chunks > job.model.layers or layout.dp * layout.cp % layout.replicas:
        why = f"zero {layout.zero}, {layout.pp} x {layout.chunks} stages, {layout.replicas} replicas"
        way_out = f"use zero 0 to 3, at most {job.model.layers} stages, and replicas that divide dp"
        raise UsageError(f"--explain: {why}: {way_out}")
    return layout


# ---- the answer ----
def shares(seconds):
    """Returns {compute, memory, communication, bubble: share of the step}."""
    return {group: sum(seconds.get(part, 0.0) for part in parts) / seconds["total"] for group, parts in GROUPS.items()}


def figures(job, plan, args):
    """Returns what a reader compares, from the step's time. MFU counts attention whole (arXiv:2204.02311, app. B)."""
    seconds, tokens = plan.seconds["total"], job.batch * job.seq_len
    flops = 3 * job.model.forward_flops(job.seq_len) * job.batch
    return {
        "memory_bytes": plan.memory["total"],
        "step_seconds": seconds,
        "tokens_per_s_per_gpu": tokens / seconds / job.num_gpus,
        "mfu": flops / seconds / job.num_gpus / job.gpu.peak_flops(job.precision),
        "days": args.tokens / tokens * seconds / 86400,
        "shares": shares(plan.seconds),
    }


def name_layout(layout):
    sizes = {axis: getattr(layout, axis) for axis in ("tp", "pp", "cp", "dp")}
    text = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1 GPU"
    more = [f"ZeRO-{layout.zero}"] if layout.zero else []
    more += [f"{layout.replicas} replicas"] * (layout.replicas > 1) + [f"{layout.chunks} chunks"] * (layout.chunks > 1)
    more += [f"microbatch {layout.microbatch}"]
    more += [f"recompute {layout.recompute}"] * (layout.recompute != "none")
    return ", ".join([text, *more, *([f"offload {layout.offload}"] * (layout.offload != "none"))])


def obstacles(job, layout):
    """Returns what 06_hybrid/train.py lacks for a layout."""
    lacks = {
        f"{job.model.name} is none of its presets": job.model.name not in PRESETS,
        "it has no context parallelism": layout.cp > 1,
        "it does not offload": layout.offload != "none",
        f"it has no {job.precision}": job.precision in ("fp8", "fp4"),
        "it recomputes whole layers only": layout.recompute == "selective",
        "its stages have a layer at least": layout.pp * layout.chunks > job.model.layers,
    }
    return [why for why, is_so in lacks.items() if is_so]


def train_command(job, layout):
    """Returns the command that runs a layout that has no obstacles."""
    nodes = job.num_gpus // job.gpus_per_node
    start = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if nodes > 1 else ""
    flags = [f"--preset {PRESETS[job.model.name]} --pp {layout.pp} --dp {layout.dp} --tp {layout.tp}"]
    flags += [f"--seq-len {job.seq_len} --batch {job.batch} --microbatch {layout.microbatch}"]
    flags += ["--dtype " + {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[job.precision]]
    flags += ["--shard " + ("none", "optimizer", "optimizer", "full")[layout.zero]]
    flags += [f"--replicas {layout.replicas}"] * (layout.replicas > 1)
    flags += [f"--schedule interleaved --chunks {layout.chunks}"] * (layout.chunks > 1)
    flags += ["--sequence-parallel"] * bool(layout.sequence_parallel)
    flags += ["--checkpoint-activations"] * (layout.recompute == "full")
    return f"torchrun {start}--nproc-per-node {job.gpus_per_node} 06_hybrid/train.py {' '.join(flags)}"


def launch_lines(job, best, margin):
    """Returns lines: the command of the best Plan, or why train.py cannot run it, and that of the best one it can."""
    notes = ["# train.py keeps 16 bytes per parameter, float32 weights among them: --recipe 16 plans that"]
    notes = notes if job.recipe != "16" else []
    if not (reasons := obstacles(job, best.layout)):
        return [train_command(job, best.layout), *notes]
    lines = [f"# 06_hybrid/train.py cannot run the first: {'; '.join(reasons)}"]
    found = search_layouts(job, margin, 1, "none", lambda layout: not obstacles(job, layout))
    if not found.plans:
        return lines
    slower, layout = found.plans[0].seconds["total"] / best.seconds["total"], found.plans[0].layout
    lines += [f"# of those it can, {name_layout(layout)}: {slower:.2f} times as long"]
    return [*lines, train_command(job, layout), *notes]


def print_table(args, planned):
    days = f"days for {args.tokens:g}"
    print(f"   GB | s/step | tokens/s/GPU |  MFU | {days:>14} | limited by                      | layout")
    for job, plan in planned:
        row = figures(job, plan, args)
        most = sorted(row["shares"].items(), key=lambda item: -item[1])[:2]
        limits = ", ".join(f"{group} {share:.0%}" for group, share in most)
        head = f"{row['memory_bytes'] / 1e9:5.1f} | {row['step_seconds']:6.4g} | {row['tokens_per_s_per_gpu']:12,.0f}"
        label = name_layout(plan.layout) + (f", {job.precision}" if len(args.precision) > 1 else "")
        print(f"{head} | {row['mfu']:4.0%} | {row['days']:14,.1f} | {limits:31} | {label}")


def print_terms(job, plan, args):
    """--explain: every term of memory, for the first and the last stage, and of time."""
    layout = plan.layout
    ends = {stage: stage_memory(job, layout, stage) for stage in sorted({0, layout.pp - 1})}
    print(f"{name_layout(layout)}: {layout.microbatches(job.batch)} microbatches a step")
    print("GB held      |" + "".join(f" {f'stage {stage}':>8} |" for stage in ends))
    for part in ends[0]:
        held = "".join(f" {end[part] / 1e9:8.2f} |" for end in ends.values())
        print(f"{part:12} |{held} {TERMS.get(part, '')}".rstrip())
    print("s a step     |")
    for part, seconds in plan.seconds.items():
        formula = TERMS.get(part, "") if part != "optimizer" else "34 bytes a parameter over the memory's bandwidth"
        print(f"{part:12} | {seconds:8.4g} | {seconds / plan.seconds['total']:4.0%} | {formula}".rstrip())
    if layout.offload != "none":
        print(f"offloading takes {host_bytes(job, layout) / 1e9:,.0f} GB of each node's own memory")


def refuse(job, found, args):
    """Raises the UsageError of a job of which no layout fits: the least memory, and how many GPUs would do."""
    margin = args.margin
    if found.smallest is None and args.fix:
        why = f"none of the layouts of {job.num_gpus} GPUs has these sizes"
        raise UsageError(f"--fix {args.fix}: {why}; leave some out")
    if found.smallest is None:
        way_out = f"use --batch {job.num_gpus}, or other --gpus"
        what = f"{job.num_gpus} GPUs, a batch of {job.batch} and {job.model.name}"
        raise UsageError(f"no layout divides {what}: {way_out}")
    needs = f"{found.smallest.memory['total'] / 1e9:.1f} GB at least, with {name_layout(found.smallest.layout)}"
    for doublings in range(1, 13) if not args.fix else ():
        number = job.num_gpus * 2**doublings
        more = job._replace(num_gpus=number, gpus_per_node=min(8, number), batch=max(job.batch, number))
        if search_layouts(more, margin, 1, "none").plans:
            way_out = f"use --gpus {number}"
            break
    else:
        way_out = "leave out --fix" if args.fix else "use a GPU with more memory, or a shorter --seq-len"
    usable = f"{capacity_bytes(job, margin) / 1e9:.1f} GB usable"
    raise UsageError(f"{job.model.name} takes {needs}; {job.gpu.name} has {usable} with --margin {margin:g}: {way_out}")


def describe(job):
    model, gpu = job.model, job.gpu
    peak = f"{gpu.peak_flops(job.precision) / 1e12:g} TFLOP/s, {gpu.memory_bytes / 1e9:.1f} GB"
    batch = f"batch {job.batch} x {job.seq_len} tokens, {job.precision}, recipe {job.recipe}"
    machines = f"{job.num_gpus} x {gpu.name}, {job.gpus_per_node} a node: {peak}"
    return f"{model.name}, {model.params:,} parameters | {machines} | {batch}"


# ---- main ----
def answer(args):
    jobs, tries = [make_job(args, precision) for precision in dict.fromkeys(args.precision)], []
    capacity = capacity_bytes(jobs[0], args.margin)
    if args.explain:
        job, layout = jobs[0], make_layout(jobs[0], read_sizes(args.explain, "--explain"))
        planned = [(job, Plan(layout, peak_memory(job, layout), step_seconds(job, layout)))]
        tried, fit = 1, int(planned[0][1].memory["total"] <= capacity)
    else:
        fixed = read_sizes(args.fix, "--fix") if args.fix else {}

        def is_wanted(layout):
            return all(getattr(layout, key) == value for key, value in fixed.items())

        results = [search_layouts(job, args.margin, args.top, args.offload, is_wanted) for job in jobs]
        tried, fit = sum(found.tried for found in results), sum(found.fit for found in results)
        if not fit:
            refuse(jobs[0], results[0], args)
        planned = [(job, plan) for job, found in zip(jobs, results) for plan in found.plans]
        planned = sorted(planned, key=lambda pair: pair[1].seconds["total"])[: args.top] if len(jobs) > 1 else planned
        job, best = planned[0]
        tries = [explain_try(job, name, is_it, best, args.margin) for name, is_it in first_tries(job).items()]
    job, best = planned[0]
    launch = launch_lines(job, best, args.margin)
    if args.plot:
        from plan_draw import draw_plans

        plans = [plan for _, plan in planned]
        draw_plans(args.plot, job, plans, [name_layout(plan.layout) for plan in plans], describe(job), args.margin)
    if args.json:
        rows = [
            dict(layout=plan.layout._asdict(), precision=job.precision, memory=plan.memory, seconds=plan.seconds)
            | figures(job, plan, args)
            for job, plan in planned
        ]
        about = {"parameters": job.model.params, "tried": tried, "fit": fit, "first_tries": tries, "launch": launch}
        print(json.dumps(about | {"capacity_bytes": capacity, "plans": rows}, indent=1))
        return
    print(describe(job))
    limit = f"{capacity / 1e9:.1f} GB, {1 - args.margin:.0%} of the card"
    if args.explain:
        print_terms(job, best, args)
        print(f"{best.memory['total'] / 1e9:.1f} GB {'fit' if fit else 'do not fit'} into {limit}")
        print_table(args, planned)
    else:
        print(f"{tried:,} layouts divide, {fit:,} fit into {limit}; simplest first of those within {EQUAL:.0%}")
        print_table(args, planned)
        print("\n".join(tries))
        if best.layout.offload != "none":
            print(f"offloading takes {host_bytes(job, best.layout) / 1e9:,.0f} GB of each node's own memory")
    print("\n".join(launch))


def main():
    try:
        answer(parse_args())
    except (UsageError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
