"""02_ddp: the one loss column, what crosses the network, and proof that these tests see a fault."""

import json
from pathlib import Path

import pytest
import torch
from conftest import BATCH, SEQ_LEN, SIZES, STEPS
from reference import initial_weights, logits
from runner import ROOT, run

TRAIN, FROM_SCRATCH = SCRIPTS = ["02_ddp/train.py", "02_ddp/from_scratch.py"]
# Sums in another order differ by some 1e-16 (float64) and 1e-7 (float32) per operation, and there are thousands.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
# AdamW divides by the gradient's own size: where a gradient is near zero, its rounding error becomes a full step.
WEIGHT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
# Hugging Face's norms compute in float32, whatever the type of the weights.
FLOAT32_NORMS = 1e-5
COUNTED = 2  # steps whose collectives are counted: the profiler is slow
# bfloat16 keeps 8 bits and float16 11: products are off by 4e-3 and 5e-4 each, the loss averages over many.
HALF_TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3}


def differs(trained, reference, dtype=torch.float64):
    """Returns what is not equal to the reference: a list of words, empty when all is."""
    found = []
    for name, expected in (("loss", reference.losses), ("grad_norm", reference.grad_norms)):
        if trained.column(name) != pytest.approx(expected, rel=TOLERANCE[dtype]):
            found.append(name)
    for name, expected in reference.weights.items():
        if not torch.allclose(trained.weights[name], expected, rtol=0, atol=WEIGHT_TOLERANCE[dtype]):
            found.append(name)
    return found


@pytest.mark.parametrize(("microbatch", "dtype"), [(1, torch.float64), (2, torch.float64), (2, torch.float32)], ids=str)
@pytest.mark.parametrize("nproc", [1, 2, 4])
@pytest.mark.parametrize("script", SCRIPTS)
def test_losses_gradient_norms_and_weights_equal_the_serial_reference(script, nproc, microbatch, dtype, train, serial):
    name = str(dtype).removeprefix("torch.")
    trained = train(script, "--dtype", name, "--microbatch", microbatch, nproc=nproc)
    assert trained.column("step") == list(range(1, STEPS + 1))
    assert differs(trained, serial(dtype), dtype) == []


@pytest.mark.parametrize(
    "option",
    [
        ["--static-graph"],
        ["--find-unused", "--microbatch", 2],
        ["--checkpoint-activations", "--microbatch", 2],
        ["--compile", "eager"],
        ["--bucket-mb", 0.01, "--microbatch", 2],
        ["--workers", 1],
    ],
    ids=lambda option: option[0],
)
def test_no_option_of_train_changes_the_losses(option, train, serial):
    assert differs(train(TRAIN, "--dtype", "float64", *option, nproc=2), serial(torch.float64)) == []


@pytest.mark.parametrize("option", [["--find-unused"], ["--bucket-mb", 0.01]], ids=lambda option: option[0])
def test_no_option_of_from_scratch_changes_the_losses(option, train, serial):
    trained = train(FROM_SCRATCH, "--dtype", "float64", "--microbatch", 2, *option, nproc=2)
    assert differs(trained, serial(torch.float64)) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_half_precision_follows_the_float32_losses(script, dtype, train, serial):
    trained = train(script, "--dtype", dtype, "--microbatch", 2, nproc=2)
    assert trained.column("loss") == pytest.approx(serial(torch.float32).losses, rel=HALF_TOLERANCE[dtype])
    assert trained.column("loss") != pytest.approx(serial(torch.float32).losses, rel=TOLERANCE[torch.float32])
    assert {weight.dtype for weight in trained.weights.values()} == {torch.float32}


def test_compressed_gradients_follow_the_float32_losses(train, serial):
    trained = train(TRAIN, "--compress", nproc=2)
    assert trained.column("loss") == pytest.approx(serial(torch.float32).losses, rel=HALF_TOLERANCE["bfloat16"])
    assert trained.column("grad_norm") != pytest.approx(serial(torch.float32).grad_norms, rel=TOLERANCE[torch.float32])


def test_the_initial_weights_of_the_model_are_those_of_the_reference(train, tmp_path):
    trained = train(TRAIN, "--steps", 1, "--lr", 1e-30, "--dtype", "float64")
    for name, weight in initial_weights(0, torch.float64, **SIZES).items():
        assert torch.equal(trained.weights[name], weight), name


def test_the_model_is_hugging_faces_llama(train):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    weights = train(TRAIN, "--dtype", "float64").weights
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=SIZES["dim"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"],
        intermediate_size=weights["model.layers.0.mlp.up_proj.weight"].shape[0],
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    theirs = transformers.LlamaForCausalLM(config).double()
    theirs.load_state_dict(weights)  # strict: the same names and shapes
    tokens = torch.arange(SEQ_LEN)[None] * 7 % 256
    assert torch.allclose(theirs(tokens).logits, logits(weights, tokens, **SIZES), rtol=0, atol=FLOAT32_NORMS)


def collectives(script, flags, tmp_path, nproc, *more):
    """Returns [operation, elements] per call of 2 steps, of rank 0; all ranks must have made the same calls."""
    out = tmp_path / "calls"
    run("tests/count_comm.py", out, ROOT / script, *flags, "--steps", COUNTED, *more, nproc=nproc).check()
    ranks = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(nproc)]
    assert all(sorted(calls) == sorted(ranks[0]) for calls in ranks)  # buckets may be on the network side by side
    return ranks[0]


@pytest.mark.parametrize("microbatch", [1, 2, 4])
@pytest.mark.parametrize("script", SCRIPTS)
def test_each_gradient_crosses_the_network_once_per_step_however_it_accumulates(
    script, microbatch, flags, tmp_path, train
):
    calls = collectives(script, flags, tmp_path, 2, "--microbatch", microbatch)
    parameters = sum(weight.numel() for weight in train(script).weights.values())
    reduced = [elements for operation, elements in calls if operation == "all_reduce"]
    log = 2 if script == TRAIN else 1  # the log line's: the loss, and in train.py whether to stop
    assert reduced == [parameters, log] * COUNTED  # one bucket holds this model
    # nccl-tests: an all_reduce of n ranks moves 2(n-1)/n times its size over each rank's link
    nproc = 2
    factor = 2 * (nproc - 1) / nproc
    gradient_bytes = [4 * factor * elements for elements in reduced if elements != log]
    assert gradient_bytes == [2 * (nproc - 1) / nproc * 4 * parameters] * COUNTED


@pytest.mark.parametrize("script", SCRIPTS)
def test_buckets_split_the_gradients_without_loss_or_repetition(script, flags, tmp_path, train):
    calls = collectives(script, flags, tmp_path, 2, "--bucket-mb", 0.01, "--layers", 8)
    parameters = sum(weight.numel() for weight in train(script, "--layers", 8).weights.values())
    reduced = [elements for operation, elements in calls if operation == "all_reduce" and elements > 2]
    assert sum(reduced) == parameters * COUNTED
    assert len(reduced) > COUNTED


def test_the_log_holds_the_states_bytes(train):
    parameters = sum(weight.numel() for weight in train(TRAIN).weights.values())
    states = (4 * parameters * 4 + 4 * len(train(TRAIN).weights)) / 2**20  # AdamW also keeps a step count per tensor
    assert train(TRAIN, nproc=2).rows[-1]["state_mib"] == states
    assert train(FROM_SCRATCH, nproc=2).rows[-1]["state_mib"] == states


FAULTS = {
    "DDP's mean taken for a sum": (TRAIN, [("scaler.scale(part * world_size)", "scaler.scale(part)")]),
    "mean of means": (TRAIN, [('reduction="sum") / tokens', 'reduction="mean")')]),
    "set_epoch missing": (TRAIN, [("        sampler.set_epoch(epoch)", "        #")]),
    "zero_grad missing": (TRAIN, [("        optimizer.zero_grad()\n", "")]),
    "the same data on every rank": (TRAIN, [("(windows, world_size, rank, seed", "(windows, world_size, 0, seed")]),
    "the loss not summed over ranks": (TRAIN, [("        dist.all_reduce(totals)\n", "")]),
    "no clipping": (TRAIN, [("model.parameters(), args.clip)", "model.parameters(), 1e9)")]),
    "the last microbatch never synchronised": (TRAIN, [("ddp.no_sync() if left else", "ddp.no_sync() if True else")]),
    "targets not shifted": (TRAIN, [("text[:, 1:].flatten()", "text[:, :-1].flatten()")]),
    "weights drawn from the layout": (TRAIN, [("zlib.crc32(name.encode())", "0")]),
    "rotary positions missing": (TRAIN, [("(rotate(q), rotate(k), v", "(q, k, v")]),
    "all_reduce missing": (FROM_SCRATCH, [("while len(self.works) < len(self.flat) and", "while False and"),
                                          ("in self.flat[len(self.works) :]", "in []")]),
    "last bucket not reduced": (FROM_SCRATCH, [("while len(self.works) < len(self.flat) and",
                                                "while len(self.works) < len(self.flat) - 1 and"),
                                               ("in self.flat[len(self.works) :]", "in []")]),
    "average instead of sum": (FROM_SCRATCH, [("self.flat[len(self.works)], async_op",
                                               "self.flat[len(self.works)], dist.ReduceOp.AVG, async_op")]),
    "replicas that start apart": (FROM_SCRATCH, [
        ("init_weights(model, args.seed)", "init_weights(model, args.seed + rank)"),
        ("            dist.broadcast(tensor.detach(), src=0)", "            pass")]),
    "clipping by the local norm": (FROM_SCRATCH, [
        ("            replica.finish_gradients()\n", ""),
        ("args.clip)  # after all-reduce and unscale", "args.clip)\n            replica.finish_gradients()")]),
    "optimizer before the gradients": (FROM_SCRATCH, [
        ("            replica.finish_gradients()\n", ""),
        ("            scaler.update()", "            scaler.update()\n            replica.finish_gradients()")]),
    "the gradient not moved into its bucket": (FROM_SCRATCH, [("            self.view[p].copy_(p.grad)\n", "")]),
    "a microbatch dropped": (FROM_SCRATCH, [("enumerate(texts, 1)", "enumerate(texts[1:], 2)")]),
    "epochs in the same order": (FROM_SCRATCH, [("manual_seed(seed + epoch)", "manual_seed(seed)")]),
    "every rank the whole batch": (FROM_SCRATCH, [("[rank::world_size]", "[: args.batch // world_size]")]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_equality_test_turns_red_when_there_is(fault, plant, train):
    script, edits = FAULTS[fault]
    more = ["--dtype", "float64", "--microbatch", 1]
    if "bucket" in fault:
        more += ["--bucket-mb", 0.01, "--layers", 8]
    healthy = train(script, *more, nproc=2)
    faulty = train(plant(script, *edits), *more, nproc=2)
    same = [faulty.column(name) == pytest.approx(healthy.column(name), rel=TOLERANCE[torch.float64])
            for name in ("loss", "grad_norm")]  # fmt: skip
    assert not all(same)


def test_the_counting_test_turns_red_when_only_the_backward_is_inside_no_sync(plant, flags, tmp_path, train):
    forward = "                    logits = ddp(text[:, :-1]).flatten(0, 1)\n"
    source = (ROOT / TRAIN).read_text()
    block = source[source.index("            # The forward, too") : source.index("            loss += part.detach()")]
    assert forward in block
    broken = """            with torch.autocast(device.type, getattr(torch, args.dtype), enabled="16" in args.dtype):
                logits = ddp(text[:, :-1]).flatten(0, 1)
                part = F.cross_entropy(logits, text[:, 1:].flatten(), reduction="sum") / tokens
            with ddp.no_sync() if left else contextlib.nullcontext():
                scaler.scale(part * world_size).backward()
"""
    calls = collectives(plant(TRAIN, (block, broken)), flags, tmp_path, 2, "--microbatch", 1)
    gradients = [elements for operation, elements in calls if operation == "all_reduce" and elements > 2]
    assert len(gradients) == COUNTED * BATCH // 2  # one per microbatch, instead of one per step
