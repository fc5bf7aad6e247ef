"""What a GPU holds at the peak of a training step, in bytes: each formula with its source.

s tokens of a sequence, b sequences of a microbatch, h width, a heads, t tensor-parallel ranks, N ranks that ZeRO
splits over. The worst stage counts: the first has the embedding and most microbatches in flight, the last the head.
"""

from math import ceil

from plan_tables import RECIPES

# Allowances: what is no tensor of the model. Bytes.
CONTEXT_BYTES = 1.0e9  # CUDA context and libraries' workspaces: nvidia-smi minus allocator, 0.5 to 1.5 GB
NCCL_BYTES = 0.3e9  # buffers of each communicator's channels, per axis with more than one rank
FRAGMENTATION = 0.05  # of all tensors: gaps of the caching allocator, with blocks that can grow
PREFETCHED_UNITS = 2  # layers whose weights are whole under ZeRO-3: the one at work and the next
BUCKET_ELEMENTS = 5e8  # DeepSpeed's reduce_bucket_size and allgather_bucket_size, by default; Megatron's is smaller
# Bytes per logit at the peak. Fused: one float32 copy (arXiv:2205.05198, eq. 5). F.cross_entropy: 16-bit logits,
# float32 ones, their logarithms of softmax, and the gradients of both kinds.
FUSED_LOGITS_BYTES, LOGITS_BYTES = 4, 16
MARGIN = 0.2  # of the memory, left free by default: batches differ, allocators fragment over time


# ---- parameters ----
def stage_layers(model, layout, first=False, last=False):
    """Layers of a place on pp, spread evenly over pp x chunks; if that does not divide, the last and first get less."""
    places = layout.pp * layout.chunks
    most = ceil(model.layers / places)
    spare = most * places - model.layers
    return most * layout.chunks - (last and spare > 0) - (first and spare > 1)


def stage_params(model, layout, first, last):
    """Elements that one rank of a stage computes with, before ZeRO: matrices are split over tp."""
    ends = first * model.embedding_params + last * model.head_params
    if last and not first and model.tied:
        ends += model.vocab * model.hidden  # a copy of the embedding, for the head
    return (stage_layers(model, layout, first, last) * model.layer_params + ends) / layout.tp


def zero_bytes(params, recipe, layout, pipelined=False):
    """Weights, gradients and optimizer states of `params` elements (Rajbhandari et al., arXiv:1910.02054, section 5).

    With a pipeline the gradients of all microbatches are summed whole, whatever ZeRO does at the end of the step.
    """
    weights, gradients, states = (params * bytes_each for bytes_each in RECIPES[recipe])
    shards, scattered = layout.shards, layout.zero >= 2 and not pipelined
    weights /= shards if layout.zero >= 3 else 1
    gradients /= shards if scattered else 1
    states /= shards if layout.zero >= 1 else 1
    if layout.offload != "none":  # gradients go to the host bucket by bucket, as soon as they are this rank's
        states = 0.0
        gradients = 0.0 if scattered or (shards == 1 and not pipelined) else gradients
    if layout.offload == "all":
        weights = 0.0
    return {"parameters": weights, "gradients": gradients, "optimizer": states}


def host_bytes(job, layout):
    """What offloading moves to the host of one node: 16-bit weights, gradients and states of its share."""
    if layout.offload == "none":
        return 0.0
    weights, gradients, states = RECIPES[job.recipe]
    each = gradients + states + (weights if layout.offload == "all" else 0)
    return each * job.model.params / job.num_gpus * job.gpus_per_node


# ---- activations ----
def score_bytes(model, seq_len, microbatch, tp=1):
    """5 a s^2 b / t of one layer: softmax, its dropout's output and mask (arXiv:2205.05198, eq. 1)."""
    return 5 * model.heads * seq_len**2 * microbatch / tp


def layer_bytes(model, seq_len, microbatch, tp=1, sequence_parallel=False, scores=True, fused=True, precision="bf16"):
    """What one layer keeps for backward in 16 bits: for GPT sbh (10 + 24/t + 5as/(ht)), arXiv:2205.05198, eq. 1, 2, 4.

    The 10: two norms' inputs (4), the inputs of queries and of the MLP (4), dropout's masks (2); sequence parallelism
    divides them, too. The 24: queries, keys, values (6), what attention returns (2), the MLP's inner tensors (16).
    A gated MLP keeps gate, up and their product. Without kernels of their own, SiLU's output is kept as well, two
    float32 copies of an RMSNorm's input for it (6 bytes each), and under sequence parallelism the inputs as gathered.
    Flash attention keeps no scores. With 8 or 4 bits the inputs of matmuls are kept in 8.
    """
    each, split = (1 if precision in ("fp8", "fp4") else 2), (tp if sequence_parallel else 1)
    norms = 4 if fused or not model.kind.gated else 16
    around = (norms + (2 if model.kind.dropout else 0)) * model.hidden / split
    inputs = 2 * each * model.hidden / (split if fused else 1)
    inner = ((4 if fused else 6) if model.kind.gated else 2) + each
    inside = (4 * model.q_dim + 4 * model.kv_dim + inner * model.ffn) / tp
    kept = seq_len * microbatch * (around + inputs + inside)
    return kept + (score_bytes(model, seq_len, microbatch, tp) if scores else 0)


def selective_bytes(job, layout):
    """What one layer keeps under selective recomputation.

    Of a model whose scores go through memory: all but these (arXiv:2205.05198, section 5). With flash attention: a
    layer's input, what attention returns, and the outputs of every second matmul (PyTorch's selective checkpointing, as
    torchtitan uses it): keys, attention's output matrix, one of the MLP's first two.
    """
    model, seq_len, tp, sp = job.model, job.seq_len / layout.cp, layout.tp, layout.sequence_parallel
    if not job.flash:
        how = dict(scores=False, fused=job.fused, precision=job.precision)
        return layer_bytes(model, seq_len, layout.microbatch, tp, sp, **how)
    inside = (2 * model.q_dim + 2 * model.kv_dim + 2 * model.ffn) / tp
    return seq_len * layout.microbatch * (4 * model.hidden / (tp if sp else 1) + inside)


def in_flight(layout, num_microbatches, stage=0):
    """Microbatches, each of a stage's layers, whose activations a stage holds under 1F1B: p - stage.

    Interleaved, on the first stage: p (1 + (p - 1) / (p v)) (arXiv:2205.05198, section 4.2.3).
    """
    pp, chunks = layout.pp, layout.chunks
    if chunks == 1:
        return min(pp - stage, num_microbatches)
    return min(pp + (pp - 1 - 2 * stage) / chunks, num_microbatches)


def stage_activations(job, layout, stage):
    """Returns {"activations": kept, "recomputed": one layer at work, "logits"} in bytes, for a stage of pp."""
    model, seq_len, tp = job.model, job.seq_len / layout.cp, layout.tp
    count, first, last = in_flight(layout, layout.microbatches(job.batch), stage), stage == 0, stage == layout.pp - 1
    scores = 0 if job.flash else score_bytes(model, seq_len, layout.microbatch, tp) * layout.cp
    how = dict(scores=False, fused=job.fused, precision=job.precision)
    full = layer_bytes(model, seq_len, layout.microbatch, tp, layout.sequence_parallel, **how) + scores
    split = tp if layout.sequence_parallel else 1
    inputs = 2 * seq_len * layout.microbatch * model.hidden / split  # 2sbh: a layer's input (table 2)
    kept = {"none": full, "selective": selective_bytes(job, layout), "full": inputs}[layout.recompute]
    at_work = {"none": 0, "selective": full - kept, "full": full}[layout.recompute]
    held, logits, tokens = count * stage_layers(model, layout, first, last) * kept, 0.0, seq_len * layout.microbatch
    if first and model.kind.dropout:  # the mask of the embedding's dropout, s b h p / t (eq. 5)
        held += count * tokens * model.hidden / split
    if last:  # last norm and head: their inputs, 2sbh/t each; the logits
        held += 4 * tokens * model.hidden / split
        logits = tokens * model.vocab / tp * (FUSED_LOGITS_BYTES if job.fused_loss else LOGITS_BYTES)
    return {"activations": held, "recomputed": at_work, "logits": logits}


# ---- all ----
def gathered_bytes(params, layers=PREFETCHED_UNITS):
    """16-bit weights of the layers that are whole at a time under ZeRO-3 (FSDP, arXiv:2304.11277, section 3.2.1)."""
    return layers * 2 * params


def buffer_bytes(job, layout, params):
    """What collectives need besides: gathered layers under ZeRO-3, buckets, messages of the pipeline."""
    model, total = job.model, 0.0
    layer = max(model.layer_params, model.embedding_params if layout.pp == 1 else 0) / layout.tp
    if (layout.zero == 3 and layout.shards > 1) or layout.offload == "all":
        total += gathered_bytes(layer) + 2 * layer  # and one layer's gradients, before they are scattered
    elif layout.zero == 2 and layout.shards > 1:
        total += 2 * min(params, BUCKET_ELEMENTS)
    if layout.pp > 1:  # two messages in, two out
        total += 4 * 2 * job.seq_len / layout.cp * layout.microbatch * model.hidden
    return total


def stage_memory(job, layout, stage):
    """Returns {part: bytes} of a rank of that stage, and "total" with the allowances."""
    first, last = stage == 0, stage == layout.pp - 1
    params = stage_params(job.model, layout, first, last)
    parts = zero_bytes(params, job.recipe, layout, layout.pp > 1) | stage_activations(job, layout, stage)
    parts["buffers"] = buffer_bytes(job, layout, params)
    axes = sum(size > 1 for size in (layout.dp, layout.tp, layout.pp, layout.cp))
    parts["overhead"] = FRAGMENTATION * sum(parts.values()) + CONTEXT_BYTES + axes * NCCL_BYTES
    return parts | {"total": sum(parts.values())}


def peak_memory(job, layout):
    """Returns stage_memory of the fullest stage: the first or the last."""
    stages = {0, layout.pp - 1}
    return max((stage_memory(job, layout, stage) for stage in stages), key=lambda parts: parts["total"])


def capacity_bytes(job, margin=MARGIN):
    return job.gpu.memory_bytes * (1 - margin)
