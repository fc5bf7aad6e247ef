"""Which layouts there are, which of them fit, which is fastest; and why the first ones that one would try do not do.

Every size that divides is tried: tp x pp x cp x dp over the GPUs, then virtual stages, microbatch, ZeRO, recomputation.
Memory prunes before time is computed.
"""

from math import log, log2
from typing import NamedTuple

from plan_memory import MARGIN, capacity_bytes, peak_memory
from plan_tables import Layout
from plan_time import step_seconds

MOST_CHUNKS = 8  # virtual stages tried per rank: sends grow with them
SHORTEST_PART = 4096  # tokens that context parallelism leaves a rank, at least: below, attention is a small part
EQUAL = 0.03  # layouts that differ by less count as equally fast, and the simpler one comes first


class Plan(NamedTuple):
    """A layout and what it was found to take."""

    layout: Layout
    memory: dict  # bytes by part, and total
    seconds: dict  # seconds by part, and total


class Found(NamedTuple):
    plans: list  # fastest first
    tried: int
    fit: int
    smallest: Plan | None  # of all that were tried, the one with the least memory


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def powers(most):
    """1, 2, 4, ... up to `most`."""
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


# ---- what there is ----
def meshes(job):
    """Yields (dp, tp, pp, cp) whose product is the number of GPUs: tp on the fast link, and all that must divide."""
    model, num_gpus = job.model, job.num_gpus
    for tp in divisors(num_gpus):
        if tp > job.node_gpus or job.node_gpus % tp or model.heads % tp or model.ffn % tp:
            continue
        if model.kv_heads % tp and tp % model.kv_heads:
            continue
        for pp in [n for n in divisors(num_gpus // tp) if n <= model.layers]:
            for cp in powers(max(1, job.seq_len // SHORTEST_PART)):
                dp, rest = divmod(num_gpus, tp * pp * cp)
                parts = tp * (2 * cp if cp > 1 else 1)  # of a sequence; two for each rank of cp, far apart, cost alike
                if rest == 0 and job.seq_len % parts == 0 and job.batch % dp == 0:
                    yield dp, tp, pp, cp


def chunk_counts(model, pp, count):
    """Virtual stages per rank: interleaving takes layers and microbatches in multiples (arXiv:2104.04473, 2.2.2).

    Two layers may be missing, where embedding and head count as one each.
    """
    if pp == 1 or count % pp:
        return [1]
    return [v for v in range(1, MOST_CHUNKS + 1) if v == 1 or model.layers % (pp * v) in (0, pp * v - 2)]


def shardings(job, dp, cp, pp):
    """(ZeRO stage, replicas): HSDP shards inside a node; with a pipeline ZeRO-2 saves nothing that 1 does not."""
    shards = dp * cp
    if shards == 1:
        return [(0, 1)]
    hybrid = [shards // job.gpus_per_node] if shards % job.gpus_per_node == 0 and shards > job.gpus_per_node else []
    return [(0, 1), (1, 1), *([] if pp > 1 else [(2, 1)]), *((3, replicas) for replicas in (1, *hybrid))]


def all_layouts(job, offload="none"):
    """Yields every layout; context parallelism of several sequences at once would be data parallelism with a ring."""
    for dp, tp, pp, cp in meshes(job):
        share = job.batch // dp
        for microbatch in [n for n in powers(share) if share % n == 0 and (cp == 1 or n == 1)]:
            for chunks in chunk_counts(job.model, pp, share // microbatch):
                for zero, replicas in shardings(job, dp, cp, pp):
                    for recompute in ("none", "selective", "full"):
                        yield Layout(dp, tp, pp, cp, chunks, zero, replicas, microbatch, recompute, tp > 1, offload)


# ---- what fits, and how fast ----
def complexity(layout):
    """How much there is to debug: each doubling of an axis beside dp, and each switch."""
    axes = log2(layout.tp) + log2(layout.pp) + 2 * log2(layout.cp)
    switches = (layout.chunks > 1, layout.replicas > 1, layout.recompute != "none")
    return axes + sum(switches) + layout.zero / 4


def search_layouts(job, margin=MARGIN, keep=10, offload=None, wanted=None):
    """Returns what was Found. wanted: function of a layout, to leave some out.

    Offloading is tried where nothing fits without, or alone where it is asked for: "optimizer" or "all".
    """
    limit, tried, fitting, smallest = capacity_bytes(job, margin), 0, [], None
    for kind in [offload] if offload else ["none", "optimizer", "all"]:
        for layout in all_layouts(job, kind):
            if wanted and not wanted(layout):
                continue
            tried += 1
            memory = peak_memory(job, layout)
            if smallest is None or memory["total"] < smallest.memory["total"]:
                smallest = Plan(layout, memory, {})
            if memory["total"] <= limit:
                fitting.append(Plan(layout, memory, step_seconds(job, layout)))
        if fitting:
            break
    fastest = min((plan.seconds["total"] for plan in fitting), default=1.0)

    def rank(plan):
        slower = log(plan.seconds["total"] / fastest) / log(1 + EQUAL)
        return int(slower), complexity(plan.layout), plan.memory["total"]

    fitting.sort(key=rank)
    return Found(fitting[:keep], tried, len(fitting), smallest)


# ---- why not the simple ones ----
def first_tries(job):
    """Returns {what one would try first: function of a layout that says whether it is that}."""
    node = min(job.node_gpus, job.num_gpus)

    def has(tp, pp, zeros):
        return lambda it: (it.tp, it.pp, it.cp, it.replicas) == (tp, pp, 1, 1) and it.zero in zeros

    if job.num_gpus == 1:
        return {"all on the GPU": has(1, 1, {0})}
    return {
        "plain data parallelism": has(1, 1, {0}),
        "ZeRO-1": has(1, 1, {1}),
        "ZeRO-2": has(1, 1, {2}),
        "ZeRO-3, FSDP": has(1, 1, {3}),
        f"tp {node} and ZeRO-1": has(node, 1, {1} if job.num_gpus > node else {0}),
        "a pipeline alone": has(1, job.num_gpus, {0}),
    }


def explain_try(job, name, wanted, best, margin=MARGIN):
    """Returns one sentence in numbers: why it does not fit, or what it costs beside the best Plan."""
    found = search_layouts(job, margin, 1, "none", wanted)
    limit = f"{capacity_bytes(job, margin) / 1e9:.1f} of the card's {job.gpu.memory_bytes / 1e9:.1f} GB are for it"
    if found.smallest is None:
        return f"{name}: does not divide {job.num_gpus} GPUs, a batch of {job.batch} and {job.model.layers} layers"
    if not found.plans:
        memory, words = found.smallest.memory, {"parameters": "weights", "optimizer": "optimizer states"}
        parts = sorted((part for part in memory if part not in ("total", "overhead")), key=memory.get, reverse=True)
        held = " and ".join(f"{memory[part] / 1e9:.1f} GB of {words.get(part, part)}" for part in parts[:2])
        return f"{name}: keeps {held} on every GPU, {memory['total'] / 1e9:.1f} GB in all; {limit}"
    plan = found.plans[0]
    slower = plan.seconds["total"] / best.seconds["total"]
    if slower < 1.02:
        return f"{name}: fits, and is as fast as the best"
    lost = {p: plan.seconds[p] - best.seconds.get(p, 0) for p in plan.seconds if p not in ("total", "matmul", "head")}
    worst = max(lost, key=lost.get)
    takes = f"{plan.seconds[worst]:.3g} s of {worst}, where the best has {best.seconds.get(worst, 0):.3g} s"
    return f"{name}: fits, and takes {slower:.2f} times as long: {takes}"
