"""How long a training step takes, in seconds, part by part: each formula with its source.

A matmul takes its FLOPs at the rate that large ones reach, and its bytes; all other kernels take their bytes; a
collective takes its latency and its payload over the bus bandwidth, as nccl-tests counts it. Of what hides behind
computation a part counts. Times are those of one rank of the slowest pipeline stage.
"""

from math import ceil, log2

from plan_memory import stage_layers, stage_params
from plan_tables import RECIPES

# Few constants, the same for all sources. What each stands for, and where its value comes from:
SUSTAINED = 0.86  # of a kernel's rate alone, in training (power, cold caches): public runs, 0.7 at 500 W to 0.9
HBM_FRACTION = 0.85  # of the memory's peak that a streaming kernel reaches
LINK_FRACTION = 0.8  # busbw of nccl-tests over the link's peak: A100 234 of 300 GB/s, H100 361 of 450 GB/s
NIC_FRACTION = 0.8  # ... over the NICs': p4de 0.83, p5en 0.87 of line rate
NODE_LATENCY = 30e-6  # a small all_reduce of 8 GPUs: 40 us in nccl-tests, less with fewer
NETWORK_LATENCY = 60e-6, 15e-6  # between nodes, and for each doubling of their number: 70 us on 2 nodes of p5
RING_HOP = 2.4e-6  # of all_gather and reduce_scatter, per rank: what 7B by FSDP loses from 8 to 512 GPUs (llm-foundry)
CONTENTION = 0.5  # of hidden communication, which takes memory bandwidth and multiprocessors: FSDP's runs, 0 to 1
EAGER = 1.5  # traffic of PyTorch's separate kernels over that of fused ones, for LayerNorm and GELU ...
EAGER_GATED = 2.5  # ... and for RMSNorm, rotary positions and SwiGLU, which are many small ones
SELECTIVE_MATMULS = 0.4  # of forward's, again under PyTorch's selective checkpointing: queries, values, the MLP's gate
LAYER_TENSORS = 12  # weights and biases of a layer, each gathered by itself by ZeRO-3 before 2022
LAUNCH_SECONDS = 5e-6  # of the host per kernel
LAYER_KERNELS = 20  # of one layer's forward; backward has twice as many
HOST_BYTES, HOST_MEMORY = 30, 20e9  # AdamW on the host: bytes per parameter, a GPU's share of its memory's bytes/s


# ---- links ----
def group_link(job, axis, size, stride):
    """Returns (latency in seconds, bus bandwidth in bytes/s) of a group of `size` ranks that lie `stride` ranks apart.

    Ranks of a group on one node have its fast link. Between nodes a ring leaves a node through the NICs of those ranks;
    the slower of both counts. (Trees do better on two nodes, which is not counted.)
    """
    measured = {name: (alpha, rate) for name, alpha, rate in job.links}
    if axis in measured:
        return measured[axis]
    beside = max(1, min(size, job.node_gpus // stride))  # of the group, on one node
    nodes = ceil(size / beside)
    alpha, rate = measured.get("node", (NODE_LATENCY, job.gpu.link_gb_s * 1e9 * LINK_FRACTION))
    if nodes == 1:
        return alpha, rate
    first, doubling = NETWORK_LATENCY
    far_alpha, nic = measured.get("network", (first + doubling * log2(nodes), job.gpu.nic_gb_s * 1e9 * NIC_FRACTION))
    return far_alpha, min(rate, nic * beside) if beside > 1 else nic


def collective_seconds(kind, size_bytes, ranks, link):
    """Latency, and payload over bus bandwidth: 2(n-1)/n for all_reduce, else (n-1)/n (nccl-tests doc/PERFORMANCE.md).

    size_bytes is the array of one rank for all_reduce, the whole one for all_gather and reduce_scatter.
    """
    if ranks == 1 or size_bytes == 0:
        return 0.0
    factor = {"all_reduce": 2, "send": ranks / (ranks - 1)}.get(kind, 1) * (ranks - 1) / ranks
    hops = RING_HOP * ranks if kind in ("all_gather", "reduce_scatter") else 0.0
    return max(link[0], hops) + factor * size_bytes / link[1]


# ---- kernels ----
def matmul_seconds(gpu, precision, m, k, n):
    """(m, k) x (k, n): its FLOPs at the achievable rate, and its bytes at the memory's; small ones are all bytes."""
    each = 1 if precision in ("fp8", "fp4") else 4 if precision == "fp32" else 2
    traffic = each * (m * k + k * n) + 2 * m * n
    if precision in ("fp8", "fp4"):
        traffic += 4 * m * k  # the input is read in 16 bits, and written in 8, as it is and transposed
    rate = gpu.peak_flops(precision) * gpu.matmul_fraction * SUSTAINED
    return 2 * m * k * n / rate + traffic / (gpu.hbm_gb_s * 1e9 * HBM_FRACTION)


def bytes_seconds(gpu, traffic):
    return traffic / (gpu.hbm_gb_s * 1e9 * HBM_FRACTION)


def attention_seconds(job, layout):
    """(forward, backward) of the scores and weighted values of one layer: 4 s q FLOPs a token.

    Flash attention (arXiv:2205.14135) skips the half that a causal mask hides and computes the scores again in
    backward: 5 matmuls to forward's 2. Without it the scores go through memory: 13 bytes each for the two matmuls,
    scale, mask, softmax and dropout.
    """
    gpu, model = job.gpu, job.model
    tokens = job.seq_len / layout.cp * layout.microbatch
    flops = 4 * tokens * job.seq_len * model.q_dim / layout.tp
    if job.flash:
        rate = gpu.peak_flops("bf16") * (gpu.attention_fraction or 0.4) * SUSTAINED
        return flops / 2 / rate, 2.5 * flops / 2 / rate
    scores = tokens * job.seq_len * model.heads / layout.tp
    forward = flops / (gpu.peak_flops("bf16") * gpu.matmul_fraction * SUSTAINED) + bytes_seconds(gpu, 13 * scores)
    return forward, 2 * forward


def layer_seconds(job, layout):
    """Returns {part: (forward, backward)} of one layer and microbatch: matmuls, attention, memory-bound, tp, cp."""
    gpu, model, tp, precision = job.gpu, job.model, layout.tp, job.precision
    tokens = job.seq_len / layout.cp * layout.microbatch
    h, q, kv, f = model.hidden, model.q_dim, model.kv_dim, model.ffn
    shapes = [(tokens, h, (q + 2 * kv) / tp), (tokens, q / tp, h)]
    shapes += [(tokens, h, f * (1 + model.kind.gated) / tp), (tokens, f / tp, h)]
    matmul = sum(matmul_seconds(gpu, precision, *shape) for shape in shapes)
    attention = attention_seconds(job, layout)
    # Two norms (4 bytes each read and written), two residual sums (6); rotary or bias; the MLP's function.
    around = 20 * h / (tp if layout.sequence_parallel else 1)
    inside = (4 * (q + kv) + (6 if model.kind.gated else 4) * f) / tp
    passes = 1 if job.fused else EAGER_GATED if model.kind.gated else EAGER
    stream = bytes_seconds(gpu, tokens * (around + inside)) * passes
    launches = LAYER_KERNELS * LAUNCH_SECONDS
    idle = max(0.0, launches * passes - matmul - attention[0] - stream)

    # tp: two all_reduces of (b, s, h) forward, two backward (arXiv:2104.04473, section 3.2); with sequence parallelism
    # as many bytes in all_gathers and reduce_scatters (arXiv:2205.05198, section 4.2.2).
    link = group_link(job, "tp", tp, 1)
    sums = 2 * collective_seconds("all_reduce", 2 * tokens * h, tp, link)
    # cp: keys and values go round the ring while attention works on those before.
    ring = collective_seconds("all_gather", 2 * 2 * kv / tp * tokens * layout.cp, layout.cp,
                              group_link(job, "cp", layout.cp, tp))  # fmt: skip
    return {
        "matmul": (matmul, 2 * matmul),
        "attention": attention,
        "memory-bound": (stream + idle, 2 * (stream + idle)),
        "tp": (sums, sums),
        "cp": (max(0.0, ring - attention[0]), max(0.0, 2 * ring - attention[1])),
    }


def ends_seconds(job, layout, first, last):
    """(forward, backward) of embedding and head for a microbatch: the head's matmul, and logits through memory."""
    gpu, model, tp = job.gpu, job.model, layout.tp
    tokens = job.seq_len / layout.cp * layout.microbatch
    forward = backward = 0.0
    if first:
        forward = bytes_seconds(gpu, 4 * tokens * model.hidden)
        backward = bytes_seconds(gpu, 6 * tokens * model.hidden)
    if last:
        matmul = matmul_seconds(gpu, "bf16", tokens, model.hidden, model.vocab / tp)
        # Logits are written, cast to float32, reduced to maximum and sum, turned into gradients: 10 bytes each way.
        logits = bytes_seconds(gpu, 10 * tokens * model.vocab / tp) * (1 if job.fused_loss else EAGER_GATED)
        forward, backward = forward + matmul + logits, backward + 2 * matmul + logits
    return forward, backward


# ---- stages and step ----
def stage_seconds(job, layout, first, last):
    """Returns {part: seconds forward}, {part: seconds backward} of a stage (all its chunks) for one microbatch."""
    layers = stage_layers(job.model, layout, first, last)
    layer = layer_seconds(job, layout)
    forward = {part: layers * times[0] for part, times in layer.items()}
    backward = {part: layers * times[1] for part, times in layer.items()}
    ends = ends_seconds(job, layout, first, last)
    forward["head"], backward["head"] = ends
    if layout.recompute == "full":  # a whole forward again, its collectives included
        recomputed = sum(value for part, value in forward.items() if part != "head")
    elif layout.recompute == "selective" and job.flash:
        recomputed = SELECTIVE_MATMULS * forward["matmul"] + forward["memory-bound"]
    elif layout.recompute == "selective":
        recomputed = forward["attention"]
    else:
        recomputed = 0.0
    backward["recompute"] = recomputed
    return forward, backward


def data_parallel_seconds(job, layout, params, forward, backward):
    """What sticks out of the collectives of dp in a step. forward, backward: seconds of a microbatch, to hide behind.

    ZeRO-0 sums gradients; 1 scatters their sums and gathers weights, as many bytes; 2 scatters for every microbatch; 3
    gathers the weights twice and scatters once for every microbatch (arXiv:1910.02054, section 7), and HSDP then sums
    over the replicas. Behind a pipeline gradients are reduced once.
    """
    shards, count, tp = layout.shards, layout.microbatches(job.batch), layout.tp
    link = group_link(job, "dp", shards, tp)
    weight_bytes, gradient_bytes = 2 * params, (4 if RECIPES[job.recipe][1] == 4 else 2) * params
    calls = stage_layers(job.model, layout) * (1 if job.overlap else LAYER_TENSORS) if layout.zero == 3 else 1
    gather = calls * collective_seconds("all_gather", weight_bytes / calls, shards, link)
    kind = "reduce_scatter" if layout.zero else "all_reduce"
    reduce = calls * collective_seconds(kind, gradient_bytes / calls, shards, link)
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * count}[layout.zero]
    reduces = count if layout.zero >= 2 and layout.pp == 1 else 1
    copies = group_link(job, "dp", layout.replicas, tp * shards)
    total = collective_seconds("all_reduce", gradient_bytes / shards, layout.replicas, copies)
    if not job.overlap:
        return total + gathers * gather + reduces * reduce
    if layout.zero == 3:
        # Forward hides a gather, backward the other and the scatter; nothing those of the first and the last layer.
        outside = count * (max(0.0, gather - forward) + max(0.0, gather - backward))
        outside += reduces * max(0.0, reduce - max(0.0, backward - gather)) + count * (gather + reduce) / calls
    else:  # chunk by chunk, the last microbatches' backwards hide the reduction, the first ones' forwards the gather
        rounds = min(layout.pp, count) if layout.chunks > 1 else 1
        outside = reduces * max(0.0, reduce - rounds * backward) + gathers * max(0.0, gather - rounds * forward)
    hidden = max(0.0, gathers * gather + reduces * reduce - outside)
    return total + outside + CONTENTION * hidden


def step_seconds(job, layout):
    """Returns {part: seconds} of a step, and "total".

    With 1F1B the slowest stage works m microbatches, and the others' (p - 1) / v fill and drain the pipeline
    (arXiv:2104.04473, sections 2.2.1 and 2.2.2; equation 1 there is the whole).
    """
    pp, count, gpu = layout.pp, layout.microbatches(job.batch), job.gpu
    places = {0: 1, pp - 1: 1} | ({pp // 2: pp - 2} if pp > 2 else {})  # the first, the last, and how many between
    stages = {place: stage_seconds(job, layout, place == 0, place == pp - 1) for place in places}
    paces = {place: sum(f.values()) + sum(b.values()) for place, (f, b) in stages.items()}
    forward, backward = stages[max(paces, key=paces.get)]
    parts = {part: count * (forward.get(part, 0.0) + backward[part]) for part in backward}

    mean = sum(paces[place] * number for place, number in places.items()) / pp
    parts["bubble"] = (pp - 1) / layout.chunks * mean
    # pp: (b, s, h) of each microbatch to the next stage and back, once per chunk; tp ranks send 1/t each (section 4.1).
    link = group_link(job, "pp", pp, layout.dp * layout.tp * layout.cp)
    message_bytes = 2 * job.seq_len / layout.cp * layout.microbatch * job.model.hidden / layout.tp
    send = collective_seconds("send", message_bytes, pp, link)
    parts["pp"] = 2 * send * layout.chunks * ((0 if job.overlap else count) + pp - 1) if pp > 1 else 0.0

    params = stage_params(job.model, layout, True, pp == 1)
    parts["dp"] = data_parallel_seconds(job, layout, params, sum(forward.values()), sum(backward.values()))
    # AdamW: gradient, weight, momentum and variance are read, the last three and the 16-bit weight written; the norm.
    own = params / (layout.shards if layout.zero else 1)
    parts["optimizer"] = bytes_seconds(gpu, 34 * own)
    if layout.offload != "none":  # gradients to the host, weights back; all: weights once more for every pass
        _, host = next(((a, r) for name, a, r in job.links if name == "host"), (0, gpu.pcie_gb_s * 1e9 * LINK_FRACTION))
        passes = 2 * count if layout.offload == "all" else 0
        parts["offload"] = (4 * own + passes * 2 * own) / host + HOST_BYTES * own / HOST_MEMORY
    parts = {part: value / job.efficiency for part, value in parts.items()}
    return parts | {"total": sum(parts.values())}
