"""03_tensor_parallel: the one loss column, what crosses the network, what a rank holds; proof that these tests see."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp  # this and DTensor once here, not again in each forked rank
import torch.distributed.tensor.parallel
from conftest import BATCH, SEQ_LEN, SIZES, Trained
from runner import ROOT, run
from safetensors.torch import load_file
from stall import stall_before

TRAIN, FROM_SCRATCH = SCRIPTS = ["03_tensor_parallel/train.py", "03_tensor_parallel/from_scratch.py"]
# Sums in another order differ by some 1e-16 (float64) and 1e-7 (float32) per operation, and there are thousands.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
# AdamW divides by the gradient's own size: where a gradient is near zero, its rounding error becomes a full step. So in
# float32 a weight may also move as gradients do that are off by the tolerance times their tensor's root mean square.
# bfloat16 keeps 8 bits and float16 11: products are off by 4e-3 and 5e-4 each, the loss averages over many.
HALF_TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
COUNTED = 2  # steps whose collectives are counted: the profiler is slow
DIM, LAYERS, HEADS = SIZES["dim"], SIZES["layers"], SIZES["heads"]
HIDDEN = 128  # 8/3 of DIM, rounded up to a multiple of 64: as the reference has it
TOKENS = BATCH * SEQ_LEN

LAYOUTS = [  # processes, tensor-parallel ranks, further flags
    (1, 1, []),
    (2, 2, []),
    (4, 4, []),
    (4, 2, []),
    (2, 2, ["--sequence-parallel"]),
    (4, 4, ["--sequence-parallel"]),
    (4, 2, ["--sequence-parallel"]),
]
FEW = 3  # steps: the second epoch begins, and AdamW has averages; more would only cost time
# kv heads, vocabulary, data type: as many kv heads as heads, or fewer than ranks; rows that do not divide. These three
# know nothing of each other, so the layouts take the lists in turn: each sees each value, and every two values meet.
CASES = [
    [(4, 256, torch.float64), (2, 259, torch.float64), (1, 256, torch.float32)],
    [(4, 259, torch.float32), (2, 256, torch.float32), (1, 259, torch.float64)],
]
EQUALITY = [(*layout, *case) for i, layout in enumerate(LAYOUTS) for case in CASES[i % 2]]
REPLICATED = {"kv_heads": 1, "vocab_size": 259}  # at tp 4: replicated kv heads, and padding
OPTIONS = [
    (FROM_SCRATCH, ["--no-overlap"]),
    (FROM_SCRATCH, ["--no-overlap", "--sequence-parallel"]),
    (FROM_SCRATCH, ["--regather", "--sequence-parallel"]),
    (FROM_SCRATCH, ["--gather-logits"]),
    (FROM_SCRATCH, ["--gather-logits", "--sequence-parallel"]),
    (TRAIN, ["--gather-logits"]),
    (TRAIN, ["--gather-logits", "--sequence-parallel"]),
]
ACCUMULATION = [(2, 1), (4, 2)]  # processes, sequences of a microbatch: 8 of them on one replica, 2 on each of two


def words(tp, more, dtype=torch.float64, **sizes):
    """Returns the flags of a run of a few steps."""
    flags = ["--tp", tp, "--dtype", str(dtype).removeprefix("torch."), "--steps", FEW, *more]
    return [*flags, *(word for name, n in sizes.items() for word in (f"--{name.replace('_', '-')}", n))]


TOGETHER = [  # processes and flags of train.py's runs that share their processes
    *((n, words(tp, more, dtype, kv_heads=kv, vocab_size=v)) for n, tp, more, kv, v, dtype in EQUALITY),
    *((4, words(4, option, **REPLICATED)) for script, option in OPTIONS if script == TRAIN),
    *((n, words(2, [], microbatch=microbatch)) for n, microbatch in ACCUMULATION),
    *((2, words(2, more, dtype)) for dtype in HALF_TOLERANCE for more in ([], ["--sequence-parallel"])),
]


def read(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Trained(rows, load_file(folder / "model.safetensors"), folder, "")


@pytest.fixture(scope="session")
def train_few(train, flags, tmp_path_factory):
    done = {}

    def train_few(script, *more, nproc):
        """As train, but the runs of TOGETHER with this nproc share their processes.

        DTensor works out how each operation splits, once per process: that takes longer than the steps.
        """
        if script != TRAIN:
            return train(script, *more, nproc=nproc)
        if nproc not in done:
            folder, lines, places = tmp_path_factory.mktemp("together"), [], {}
            for i, (_, case) in enumerate(entry for entry in TOGETHER if entry[0] == nproc):
                (place := folder / str(i)).mkdir()
                line = [*flags, "--metrics", place / "metrics.jsonl", "--save", place, *case]
                lines.append([str(word) for word in line])
                places[tuple(map(str, case))] = place
            (folder / "cases.json").write_text(json.dumps(lines))
            run("tests/run_many.py", ROOT / TRAIN, folder / "cases.json", nproc=nproc, timeout=200).check()
            done[nproc] = {case: read(place) for case, place in places.items()}
        return done[nproc][tuple(map(str, more))]

    return train_few


equality = pytest.mark.parametrize(
    ("nproc", "tp", "more", "kv_heads", "vocab_size", "dtype"),
    EQUALITY,
    ids=[f"dp{n // tp}tp{tp}{'sp' * bool(more)}-{kv}-{v}-{str(d)[-7:]}" for n, tp, more, kv, v, d in EQUALITY],
)


def differs(trained, serial, dtype=torch.float64, **run):
    """Returns what is not equal to the reference (steps and sizes: run): a list of words, empty when all is."""
    reference, found = serial(dtype, **run), []
    for name, expected in (("loss", reference.losses), ("grad_norm", reference.grad_norms)):
        if trained.column(name) != pytest.approx(expected, rel=TOLERANCE[dtype]):
            found.append(name)
    assert trained.weights.keys() == reference.weights.keys()
    for name, expected in reference.weights.items():
        drift = reference.drift[name] if dtype == torch.float32 else 0
        if ((trained.weights[name] - expected).abs() > TOLERANCE[dtype] * (1 + drift)).any():
            found.append(name)
    return found


# ---- equality ----
@equality
@pytest.mark.parametrize("script", SCRIPTS)
def test_losses_gradient_norms_and_weights_equal_the_serial_reference(
    script, nproc, tp, more, kv_heads, vocab_size, dtype, train_few, serial
):
    sizes = {"kv_heads": kv_heads, "vocab_size": vocab_size}
    trained = train_few(script, *words(tp, more, dtype, **sizes), nproc=nproc)
    assert trained.column("step") == list(range(1, FEW + 1))
    assert differs(trained, serial, dtype, steps=FEW, **sizes) == []


@pytest.mark.parametrize(("script", "option"), OPTIONS, ids=str)
def test_no_option_changes_the_losses(script, option, train_few, serial):
    trained = train_few(script, *words(4, option, **REPLICATED), nproc=4)
    assert differs(trained, serial, steps=FEW, **REPLICATED) == []


@pytest.mark.parametrize("more", [[], ["--sequence-parallel"]], ids=["plain", "sequence"])
def test_compiled_model_has_the_same_losses(more, train, serial):
    import torch._dynamo.backends.debugging  # what the compiler needs once here, not again in each forked rank
    import torch._inductor.debug
    import torch._inductor.pattern_matcher  # noqa: F401

    trained = train(TRAIN, *words(2, more, layers=1), "--compile", "aot_eager", nproc=2)
    assert "aot_eager, async tensor parallelism off" in trained.output  # it needs GPUs
    assert differs(trained, serial, steps=FEW, layers=1) == []


@pytest.mark.parametrize(("nproc", "microbatch"), ACCUMULATION)
@pytest.mark.parametrize("script", SCRIPTS)
def test_accumulation_over_microbatches_changes_nothing(script, nproc, microbatch, train_few, serial):
    trained = train_few(script, *words(2, [], microbatch=microbatch), nproc=nproc)
    assert differs(trained, serial, steps=FEW) == []


@pytest.mark.parametrize("more", [[], ["--sequence-parallel"]], ids=["plain", "sequence"])
@pytest.mark.parametrize("dtype", HALF_TOLERANCE, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_half_precision_follows_the_float32_losses(script, dtype, more, train_few, serial):
    trained, expected = train_few(script, *words(2, more, dtype), nproc=2), serial(torch.float32, FEW).losses
    assert trained.column("loss") == pytest.approx(expected, rel=HALF_TOLERANCE[dtype])
    assert trained.column("loss") != pytest.approx(expected, rel=TOLERANCE[torch.float32])
    assert {weight.dtype for weight in trained.weights.values()} == {torch.float32}


@pytest.mark.parametrize("script", SCRIPTS)
def test_all_ranks_are_tensor_parallel_unless_told_otherwise(script, train, serial):
    trained = train(script, "--dtype", "float64", "--steps", FEW, nproc=2)
    assert "dp 1 x tp 2" in trained.output
    assert differs(trained, serial, steps=FEW) == []


UNSCALE = {TRAIN: "        scaler.unscale_(optimizer)\n", FROM_SCRATCH: "            scaler.unscale_(optimizer)\n"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_float16_overflow_on_one_rank_makes_all_ranks_skip_the_step(script, plant, train):
    """The same as an overflow on both: else one rank would step and the other not, and the shards would part."""
    place = UNSCALE[script]
    fault = "{0}if step == 3 and rank in {1}:\n{0}    next(iter(model.parameters())).grad.mul_(float('inf'))\n"
    indent = place[: len(place) - len(place.lstrip())]
    more = ["--dtype", "float16", "--tp", 2, "--steps", 4]
    one, both = (
        train(plant(script, (place, fault.format(indent, ranks) + place)), *more, nproc=2)
        for ranks in ("[1]", "[0, 1]")
    )
    assert one.column("loss") == both.column("loss")
    assert all(torch.equal(one.weights[name], both.weights[name]) for name in one.weights)
    whole = train(script, *more, nproc=2)
    assert one.column("loss")[3:] != whole.column("loss")[3:]


@pytest.mark.parametrize("script", SCRIPTS)
def test_rank_that_stalls_ends_the_job_within_the_timeout(script, plant, flags):
    """In groups of some ranks, too: those that a device mesh makes by itself wait for half an hour."""
    stalled = plant(script, *stall_before(UNSCALE[script]))
    result = run(stalled, *flags, "--tp", 2, "--timeout", 4, nproc=4)
    assert result.codes == [1, -9, 1, 1]
    assert "Timed out" in result.outputs[0]


# ---- what crosses the network ----
def collectives(script, flags, tmp_path, nproc, *more):
    """Returns [operation, elements] per call of 2 steps, sorted; all ranks must have made the same calls."""
    out = tmp_path / "calls"
    run("tests/count_comm.py", out, ROOT / script, *flags, "--steps", COUNTED, *more, nproc=nproc).check()
    ranks = [sorted(json.loads(Path(f"{out}.{rank}").read_text())) for rank in range(nproc)]
    assert all(calls == ranks[0] for calls in ranks)
    return ranks[0]


def per_step(*counts):
    """(times, operation, elements) per step -> what `collectives` returns for 2 steps."""
    return sorted([op, elements] for times, op, elements in counts for _ in range(times * COUNTED))


BLOCK_CALLS = 2 * LAYERS  # in forward, and as many in backward
LOSS_CALLS = 3  # largest logit, target's logit, sum of exp: one number per token each
LOG_CALLS = 2  # square of the gradient norm over tp; the loss over dp


@pytest.mark.parametrize("tp", [2, 4])
def test_two_all_reduces_forward_and_two_backward_per_block(tp, flags, tmp_path):
    calls = collectives(FROM_SCRATCH, flags, tmp_path, tp, "--kv-heads", 4)
    # the embedding's in forward and the head's in backward make one more each way
    activations = (2 * BLOCK_CALLS + 2, "all_reduce", TOKENS * DIM)
    assert calls == per_step(activations, (LOSS_CALLS, "all_reduce", TOKENS), (LOG_CALLS, "all_reduce", 1))


@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallelism_moves_the_same_bytes(tp, flags, tmp_path):
    calls = collectives(FROM_SCRATCH, flags, tmp_path, tp, "--kv-heads", 4, "--sequence-parallel")
    assert calls == per_step(
        (2 * BLOCK_CALLS + 2, "all_gather", TOKENS * DIM // tp),
        (2 * BLOCK_CALLS + 2, "reduce_scatter", TOKENS * DIM),
        (1, "all_reduce", (2 * LAYERS + 1) * DIM),  # the norms' gradients, which each rank has for 1/tp of the tokens
        (LOSS_CALLS, "all_reduce", TOKENS),
        (LOG_CALLS, "all_reduce", 1),
    )
    # nccl-tests: an all_reduce moves 2(n-1)/n of its size over each link, all_gather and reduce_scatter (n-1)/n each
    moved = sum(n * tp for op, n in calls if op == "all_gather") + sum(n for op, n in calls if op == "reduce_scatter")
    assert moved == 2 * COUNTED * (2 * BLOCK_CALLS + 2) * TOKENS * DIM


def test_gathering_a_layers_input_again_costs_one_all_gather_per_layer(flags, tmp_path):
    calls = collectives(FROM_SCRATCH, flags, tmp_path, 2, "--kv-heads", 4, "--sequence-parallel", "--regather")
    gathers = [call for call in calls if call[0] == "all_gather"]
    assert gathers == per_step((2 * BLOCK_CALLS + 2 + BLOCK_CALLS + 1, "all_gather", TOKENS * DIM // 2))


def test_gathered_logits_cross_the_network_whole(flags, tmp_path):
    calls = collectives(FROM_SCRATCH, flags, tmp_path, 2, "--kv-heads", 4, "--gather-logits")
    activations = (2 * BLOCK_CALLS + 2, "all_reduce", TOKENS * DIM)
    assert calls == per_step(activations, (1, "all_gather", TOKENS * 256 // 2), (LOG_CALLS, "all_reduce", 1))


def test_replicated_kv_heads_cost_one_all_reduce_of_their_gradients_per_step(flags, tmp_path):
    calls = collectives(FROM_SCRATCH, flags, tmp_path, 4, "--kv-heads", 2)
    kv_gradients = LAYERS * 2 * DIM * (DIM // HEADS)  # of the k and v rows of one head
    assert ["all_reduce", kv_gradients] in calls
    assert calls == per_step(
        (2 * BLOCK_CALLS + 2, "all_reduce", TOKENS * DIM),
        (1, "all_reduce", kv_gradients),
        (LOSS_CALLS, "all_reduce", TOKENS),
        (LOG_CALLS, "all_reduce", 1),
    )


@pytest.mark.parametrize("microbatch", [2, 4])
def test_each_gradient_crosses_the_dp_group_once_per_step_however_it_accumulates(microbatch, flags, tmp_path, train):
    calls = collectives(FROM_SCRATCH, flags, tmp_path, 4, "--tp", 2, "--microbatch", microbatch)
    tokens, num_microbatches = microbatch * SEQ_LEN, BATCH // 2 // microbatch
    weights = train(FROM_SCRATCH, "--tp", 2, nproc=2).weights
    gradients = [w.numel() // (2 if w.dim() > 1 else 1) for w in weights.values()]
    assert calls == per_step(
        (num_microbatches * (2 * BLOCK_CALLS + 2), "all_reduce", tokens * DIM),
        (num_microbatches * LOSS_CALLS, "all_reduce", tokens),
        *((1, "all_reduce", elements) for elements in gradients),
        (LOG_CALLS, "all_reduce", 1),
    )


def test_train_makes_no_more_than_two_all_reduces_each_way_per_block(flags, tmp_path):
    calls = collectives(TRAIN, flags, tmp_path, 2, "--kv-heads", 4)
    assert calls.count(["all_reduce", TOKENS * DIM]) == COUNTED * (2 * BLOCK_CALLS + 2)


# ---- what a rank holds ----
def held(tp, kv_heads, vocab_size, itemsize):
    """Bytes of weights, gradients and AdamW's two averages of one rank, and the step count of each tensor."""
    head_dim = DIM // HEADS
    vocabulary = 2 * -(-vocab_size // tp) * DIM
    attention = 2 * DIM * DIM // tp + 2 * max(kv_heads // tp, 1) * head_dim * DIM
    elements = vocabulary + LAYERS * (attention + 3 * DIM * HIDDEN // tp + 2 * DIM) + DIM
    return 4 * itemsize * elements + 4 * (9 * LAYERS + 3)


@equality
@pytest.mark.parametrize("script", SCRIPTS)
def test_states_of_a_rank_are_the_sharded_formula_to_the_byte(
    script, nproc, tp, more, kv_heads, vocab_size, dtype, train_few
):
    trained = train_few(script, *words(tp, more, dtype, kv_heads=kv_heads, vocab_size=vocab_size), nproc=nproc)
    if script == TRAIN and kv_heads < tp:
        kv_heads *= tp  # each rank holds them all
    assert trained.rows[-1]["state_mib"] * 2**20 == held(tp, kv_heads, vocab_size, dtype.itemsize)


def activations(flags, tmp_path, tp, layers, *more):
    """Bytes that autograd keeps of a forward with so many layers, on rank 0."""
    out = tmp_path / "saved"
    more = ("--layers", layers, "--kv-heads", 4, *more)
    run("tests/count_saved.py", out, ROOT / FROM_SCRATCH, *flags, "--steps", 1, *more, nproc=tp).check()
    ranks = [sum(entry[0] for entry in json.loads(Path(f"{out}.{rank}").read_text())) for rank in range(tp)]
    assert len(set(ranks)) == 1
    return ranks[0]


def block_activations(whole, inputs, split):
    """Korthikanti et al. 2022, section 4, for this block: bytes kept per block.

    whole, inputs, split: what divides the part that the norms keep, the inputs of the split matrices, and what lies
    between these. A norm keeps its input, its input divided by the root mean square, and that number. Between the
    matrices lie q, k, v, the output of the attention with its log-sum-exp, and four times the width of the MLP: gate,
    silu(gate), up and their product. The rotary tables (cos and sin, for q and for k) do not grow with the batch.
    """
    norms, matrices = 2 * (2 * DIM + 1), 2 * DIM
    between = 4 * DIM + HEADS + 4 * HIDDEN
    rotary = 4 * SEQ_LEN * (DIM // HEADS)
    return 4 * (TOKENS * (norms / whole + matrices / inputs + between / split) + rotary)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    ("more", "divided"),  # which of norms, inputs and the middle are divided by tp
    [([], (0, 0, 1)), (["--sequence-parallel"], (1, 0, 1)), (["--sequence-parallel", "--regather"], (1, 1, 1))],
    ids=["plain", "sequence", "regather"],
)
def test_activations_of_a_block_are_the_papers_formula(more, divided, tp, flags, tmp_path):
    per_block = activations(flags, tmp_path, tp, 3, *more) - activations(flags, tmp_path, tp, 2, *more)
    assert per_block == block_activations(*(tp**power for power in divided))


def test_the_loss_keeps_this_ranks_part_of_the_vocabulary_only(flags, tmp_path):
    split = activations(flags, tmp_path, 4, 2)
    gathered = activations(flags, tmp_path, 4, 2, "--gather-logits")
    assert (
        gathered - split > 4 * TOKENS * 256 * 3 // 4 - TOKENS * 32
    )  # all logits instead of a quarter; some indices less


# ---- dropout ----
def masks(script, flags, tmp_path, nproc, *more):
    """Returns per rank the masks of step 1: inside the split region and outside it, in the order of the layers."""
    out = tmp_path / "masks"
    more = ("--steps", 1, "--dropout", 0.3, "--tp", 2, *more)
    run("tests/log_dropout.py", out, ROOT / script, *flags, *more, nproc=nproc).check()
    drawn = [torch.load(f"{out}.{rank}.pt", weights_only=True) for rank in range(nproc)]
    assert all(len(calls) == 4 * LAYERS for calls in drawn)
    return [(calls[0::2], calls[1::2]) for calls in drawn]


def alike(one, other):
    """How many of the masks are equal; masks of chance never are."""
    return sum(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("script", SCRIPTS)
def test_dropout_differs_inside_the_split_region_and_is_the_same_outside(script, flags, tmp_path):
    ranks = masks(script, flags, tmp_path, 4)  # ranks 0, 1 and 2, 3 are tp groups
    (inside_0, outside_0), (inside_1, outside_1), (inside_2, outside_2), _ = ranks
    assert [m.shape[-1] for m in inside_0] == [DIM // 2, HIDDEN // 2] * LAYERS
    assert [m.shape[-1] for m in outside_0] == [DIM, DIM] * LAYERS
    assert alike(inside_0, inside_1) == 0
    assert alike(outside_0, outside_1) == 2 * LAYERS
    assert alike(inside_0, inside_2) == alike(outside_0, outside_2) == 0  # another replica has other data
    everything = torch.cat([m.flatten() for inside, outside in ranks for m in (*inside, *outside)])
    assert everything.mean().item() == pytest.approx(0.7, abs=0.01)  # 100,000 draws: sigma is 0.0015


@pytest.mark.parametrize("script", SCRIPTS)
def test_dropout_differs_outside_too_where_the_ranks_hold_other_tokens(script, flags, tmp_path):
    (inside_0, outside_0), (inside_1, outside_1) = masks(script, flags, tmp_path, 2, "--sequence-parallel")
    assert outside_0[0].shape == (BATCH, SEQ_LEN // 2, DIM)
    assert alike(inside_0, inside_1) == alike(outside_0, outside_1) == 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_dropout_trains_and_keeps_the_ranks_together(script, train, serial):
    trained = train(script, "--dropout", 0.1, "--tp", 2, "--microbatch", 2, "--steps", FEW, nproc=4)
    expected = serial(torch.float32, FEW).losses
    assert trained.column("loss")[0] == pytest.approx(expected[0], rel=0.01)  # near, not equal
    assert trained.column("loss") != pytest.approx(expected, rel=TOLERANCE[torch.float32])
    assert trained.column("loss")[-1] < trained.column("loss")[0]


DROPOUT_FAULTS = {
    "the same mask on all ranks": ("manual_seed(args.seed + rank + 1)", "manual_seed(args.seed + dp_rank + 1)"),
    "another mask outside": ("private if tp.sequence_parallel else shared", "private"),
    "the same mask for all tokens": ("private if tp.sequence_parallel else shared", "shared"),
}


@pytest.mark.parametrize("fault", DROPOUT_FAULTS)
def test_the_dropout_tests_turn_red_when_there_is(fault, plant, flags, tmp_path):
    more = ["--sequence-parallel"] if "tokens" in fault else []
    script = plant(FROM_SCRATCH, DROPOUT_FAULTS[fault])
    (inside_0, outside_0), (inside_1, outside_1) = masks(script, flags, tmp_path, 2, *more)
    healthy = (0, 0) if more else (0, 2 * LAYERS)
    assert (alike(inside_0, inside_1), alike(outside_0, outside_1)) != healthy


# ---- proof that the equality test sees ----
OPS, LAYER, SHARDS = "operators.py", "layers.py", "shards.py"
NO_WAIT = "type('', (), {'wait': lambda self: None})()"
HALF = "dy.view(-1)[: dy.numel() // 2].view(dy.shape[0], -1, dy.shape[2])"
TARGET, LARGEST, TOTAL = "z[rows, columns].where(mine, 0)", "z.amax(-1, keepdim=True)", "z.exp_().sum(-1)"
HOOK = (
    "weight.register_post_accumulate_grad_hook(\n                lambda w: works.append(dist.all_reduce(w.grad, group="
)
FAULTS = {  # edits, and the flags that show them
    "no all-reduce of the input's gradient": [
        (OPS, "scatter if tp.sequence_parallel else all_reduce", f"lambda x, *_, **__: (x, {NO_WAIT})")],
    "no all-reduce in f's backward": [
        (OPS, "return all_reduce(dy.clone(), ctx.tp)[0], None", "return dy, None"), "--no-overlap"],
    "no all-reduce in g": [(OPS, "return all_reduce(x, tp)[0]", "return x")],
    "gradient times tp in g's backward": [
        (OPS, "    def backward(ctx, dy):\n        return dy, None",
         "    def backward(ctx, dy):\n        return dy * 2, None")],
    "no reduce_scatter of the input's gradient": [
        (OPS, "return scatter(dy, ctx.tp)[0], None", f"return {HALF}, None"), "--sequence-parallel --no-overlap"],
    "weight gradient of 1/tp of the tokens": [
        (OPS, "dx, summed = reduce(dx, tp, async_op=True)\n",
         "dx, summed = reduce(dx, tp, async_op=True)\n        x = ctx.saved_tensors[0]\n"
         "        dys = [dy[: x.shape[0] * x.shape[1]] for dy in dys]\n"), "--sequence-parallel --regather"],
    "logits' gradients summed over the ranks": [
        (OPS, "return dy.chunk(ctx.tp.size", "return (dy * ctx.tp.size).chunk(ctx.tp.size"), "--gather-logits"],
    "loss of gathered logits divided by the ranks": [
        ('targets, reduction="sum")\n', 'targets, reduction="sum") / tp.size\n'), "--gather-logits"],
    "every rank the same shard": [(SHARDS, "start = min(tp.rank // copies", "start = min(0 // copies")],
    "weights drawn from the shard": [(SHARDS, "torch.randn(shape,", "torch.randn(weight.shape,"),
                                     (SHARDS, "copy_(shard(whole, weight, tp))", "copy_(whole)")],
    "norm gradients not summed": [("  sum_gradients(norms, tp.group)", "  #"), "--sequence-parallel"],
    "kv gradients not summed": [("  sum_gradients(same_kv, kv_group)", "  #")],
    "the kv head of another rank": [(SHARDS, "tp.rank // copies(weight, tp) * size, length",
                                     "(tp.rank // copies(weight, tp) + 1) % 2 * size, length")],
    "clipping by the local norm": [(SHARDS, "    dist.all_reduce(square, group=tp.group)", "    #")],
    "replicated weights counted by every rank": [(SHARDS, "** 2 / count", "** 2")],
    "padding in the softmax": [(LAYER, "z[:, max(0, vocab_size - start) :] = -torch.inf", "pass")],
    "tokens of other ranks embedded": [(LAYER, " * mine[..., None]", "")],
    "largest logit of this rank's part": [
        (LAYER, f"dist.all_reduce(largest := {LARGEST}, dist.ReduceOp.MAX, tp.group)", f"largest = {LARGEST}")],
    "target's logit of this rank": [
        (LAYER, f"dist.all_reduce(target := {TARGET}, group=tp.group)", f"target = {TARGET}")],
    "softmax of this rank's part": [(LAYER, f"dist.all_reduce(total := {TOTAL}, group=tp.group)", f"total = {TOTAL}")],
    "gradient without the target": [(LAYER, "        dz[rows, columns] -= dloss * mine\n", "")],
    "gradients averaged over dp": [
        ("dist.all_reduce(w.grad, group=dp_group,", "dist.all_reduce(w.grad, dist.ReduceOp.AVG, group=dp_group,")],
    "gradients not summed over dp": [("if last else None", "if False else None")],
    "gradients summed over the tp group, not dp": [(HOOK + "dp_group", HOOK + "tp.group")],
    "gradients of the last microbatch only, dp": [
        ("            optimizer.zero_grad()", "            #"),
        ("last, targets = i", "optimizer.zero_grad()\n                last, targets = i")],
    "other data on each tp rank, dp": [("[dp_rank::dp_size]", "[rank % dp_size :: dp_size]")],
    "the loss not summed over dp": [("  dist.all_reduce(loss, group=dp_group)", "  #")],
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_equality_test_turns_red_when_there_is(fault, plant, train):
    edits = [edit for edit in FAULTS[fault] if isinstance(edit, tuple)]
    more = [flag for edit in FAULTS[fault] if isinstance(edit, str) for flag in edit.split()]
    dp, tp = 2 if "dp" in fault else 1, 4 if "kv" in fault else 2
    flags = ["--dtype", "float64", "--tp", tp, "--microbatch", 2, "--vocab-size", 259, "--steps", FEW, *more]
    healthy = train(FROM_SCRATCH, *flags, nproc=dp * tp)
    faulty = train(plant(FROM_SCRATCH, *edits), *flags, nproc=dp * tp)
    same = [faulty.column(name) == pytest.approx(healthy.column(name), rel=TOLERANCE[torch.float64])
            for name in ("loss", "grad_norm")]  # fmt: skip
    assert not all(same)
