"""04_pipeline: the one loss column for every schedule, what crosses the network, what a rank holds, what is seen."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import reference
import torch
import torch.distributed.fsdp  # this and what the library needs once here, not again in each forked rank
import torch.distributed.pipelining
from runner import ROOT, run
from safetensors.torch import load_file
from stall import ALIVE, STALL

TRAIN, FROM_SCRATCH = SCRIPTS = ["04_pipeline/train.py", "04_pipeline/from_scratch.py"]
# Sums in another order differ by some 1e-16 (float64) per operation, and there are thousands.
EXACT = 1e-9
FLOAT32 = 1e-5
# bfloat16 keeps 8 bits and float16 11: products are off by 4e-3 and 5e-4 each, the loss averages over many.
HALF_TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3}
STEPS, BATCH, SEQ_LEN = 2, 48, 16
SIZES = {"dim": 16, "heads": 2, "kv_heads": 1}
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble"]
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]  # ranks of a pipeline, replicas
MICROBATCHES = [1, 3, 4, 8]
# (schedule, microbatches, tied). A pipeline alone takes each schedule with each number, tied and untied in turn: so
# every two of these values meet. One rank, which waits for nobody, and replicas, which know nothing of each other
# before the gradients are complete, take each schedule twice: with a number of its own tied, with another untied.
EACH = [
    (schedule, microbatches, (i + j) % 2 == 1)
    for i, schedule in enumerate(SCHEDULES)
    for j, microbatches in enumerate(MICROBATCHES)
]
SOME = [
    ("gpipe", 1, True),
    ("gpipe", 3, False),
    ("1f1b", 4, True),
    ("1f1b", 8, False),
    ("interleaved", 3, True),
    ("interleaved", 4, False),
    ("zero-bubble", 8, True),
    ("zero-bubble", 1, False),
]


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of real text for this batch: as the other tests' fixture, but longer."""
    path = tmp_path_factory.mktemp("text") / "text.py"
    letters = reference.text_of(None)[5000 : 5000 + 101 * SEQ_LEN + 5]
    path.write_bytes(bytes(letter * 37 % 256 for letter in letters))
    return str(path)


@pytest.fixture(scope="session")
def base(text):
    sizes = [word for name, n in SIZES.items() for word in (f"--{name.replace('_', '-')}", n)]
    return ["--steps", STEPS, "--batch", BATCH, "--seq-len", SEQ_LEN, "--data", text, *sizes]


class Trained:
    def __init__(self, folder):
        self.rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.weights = load_file(folder / "model.safetensors")
        self.folder = folder

    def column(self, name):
        return [row[name] for row in self.rows]


def cases(script, pp, dp):
    """Returns the (schedule, microbatches, tied) of a script in one layout.

    The library's 1F1B wants a microbatch per stage (tests/test_bad_input.py); from_scratch.py runs them all.
    """
    chosen = EACH if pp > 1 and dp == 1 else SOME
    return [case for case in chosen if script == FROM_SCRATCH or case[0] != "1f1b" or case[1] >= pp]


def layers(schedule, pp):
    """One more than stages: they differ in length."""
    return pp * (2 if schedule == "interleaved" else 1) + 1


@pytest.fixture(scope="session")
def matrix(base, tmp_path_factory):
    """Runs all cases of a script in one layout in the same processes; returns {case: Trained}."""
    done = {}

    def matrix(script, pp, dp):
        if (script, pp, dp) not in done:
            folder, lines, found = tmp_path_factory.mktemp("matrix"), [], {}
            for schedule, microbatches, tied in cases(script, pp, dp):
                place = folder / f"{schedule} {microbatches} {tied}"
                place.mkdir()
                flags = [*base, "--dtype", "float64", "--pp", pp, "--schedule", schedule, "--save", place]
                flags += ["--layers", layers(schedule, pp), "--microbatch", BATCH // dp // microbatches]
                flags += ["--metrics", place / "metrics.jsonl", *["--tie"] * tied]
                lines.append([str(flag) for flag in flags])
                found[schedule, microbatches, tied] = place
            (folder / "cases.json").write_text(json.dumps(lines))
            run("tests/run_many.py", ROOT / script, folder / "cases.json", nproc=pp * dp, timeout=200).check()
            done[script, pp, dp] = {case: Trained(place) for case, place in found.items()}
        return done[script, pp, dp]

    return matrix


@pytest.fixture(scope="session")
def one(text):
    """The serial reference, once per layers and further words."""
    done = {}

    def one(layers, dtype=torch.float64, lengths=None, **more):
        key = (layers, dtype, tuple(lengths or ()), *more.items())
        if key not in done:
            run = reference.train(STEPS, BATCH, SEQ_LEN, text, dtype, lengths=lengths, layers=layers, **SIZES, **more)
            done[key] = run
        return done[key]

    return one


def differs(trained, reference, tolerance=EXACT):
    """Returns what is not equal to the reference: a list of words, empty when all is."""
    found = []
    for name, expected in (("loss", reference.losses), ("grad_norm", reference.grad_norms)):
        if trained.column(name) != pytest.approx(expected, rel=tolerance):
            found.append(name)
    assert trained.weights.keys() == reference.weights.keys()
    for name, expected in reference.weights.items():
        if not torch.allclose(trained.weights[name], expected, rtol=0, atol=tolerance):
            found.append(name)
    return found


# ---- equality ----
@pytest.mark.parametrize(
    ("script", "pp", "dp", "schedule", "microbatches", "tied"),
    [(script, *layout, *case) for script in SCRIPTS for layout in LAYOUTS for case in cases(script, *layout)],
    ids=lambda value: {False: "untied", True: "tied"}[value] if isinstance(value, bool) else None,
)
def test_losses_gradient_norms_and_weights_equal_the_serial_reference(
    script, pp, dp, schedule, microbatches, tied, matrix, one
):
    trained = matrix(script, pp, dp)[schedule, microbatches, tied]
    assert trained.column("step") == list(range(1, STEPS + 1))
    assert differs(trained, one(layers(schedule, pp), tied=tied)) == []


@pytest.fixture(scope="session")
def train(base, tmp_path_factory):
    done = {}

    def train(script, *more, nproc=2):
        """Runs `script flags... more...` in float64; a flag given twice counts as given last."""
        key = (str(script), nproc, *map(str, more))
        if key not in done:
            folder = tmp_path_factory.mktemp("run")
            flags = [*base, "--dtype", "float64", "--layers", 5, "--microbatch", 12]
            run(script, *flags, "--metrics", folder / "metrics.jsonl", "--save", folder, *more, nproc=nproc).check()
            done[key] = Trained(folder)
        return done[key]

    return train


@pytest.mark.parametrize(
    "option",
    [["--checkpoint-activations"], ["--split", "1,4"], ["--split", "4,1"], ["--schedule", "interleaved", "--chunks", 1],
     ["--schedule", "zero-bubble", "--checkpoint-activations"], ["--schedule", "interleaved", "--split", "2,1,1,1"]],
    ids=lambda option: " ".join(map(str, option)),
)  # fmt: skip
def test_no_option_changes_the_losses(option, train, one):
    assert differs(train(FROM_SCRATCH, *option), one(5)) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_of_different_length_count_each_token_once(schedule, train, one):
    """Microbatch i of 4, of 12 sequences (6 on each of 2 replicas), has i % 4 / 8 fewer tokens."""
    for dp in (1, 2):
        more = ["--vary-length", "--schedule", schedule, "--microbatch", 12 // dp, "--pp", 2]
        row = [j // dp // (12 // dp) for j in range(BATCH)]  # the microbatch of each sequence
        expected = one(5, lengths=[SEQ_LEN - i % 4 * (SEQ_LEN // 8) for i in row])
        assert differs(train(FROM_SCRATCH, *more, nproc=2 * dp), expected) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_half_precision_follows_the_float32_losses(script, schedule, dtype, train, one):
    trained = train(script, "--dtype", dtype, "--schedule", schedule)
    expected = one(5, torch.float32).losses
    assert trained.column("loss") == pytest.approx(expected, rel=HALF_TOLERANCE[dtype])
    assert trained.column("loss") != pytest.approx(expected, rel=FLOAT32 / 100)
    assert {weight.dtype for weight in trained.weights.values()} == {torch.float32}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_float32_equals_the_serial_reference(schedule, train, one):
    trained, expected = train(FROM_SCRATCH, "--dtype", "float32", "--schedule", schedule), one(5, torch.float32)
    assert trained.column("loss") == pytest.approx(expected.losses, rel=FLOAT32)
    assert trained.column("grad_norm") == pytest.approx(expected.grad_norms, rel=FLOAT32)
    for name, weight in expected.weights.items():
        off = (trained.weights[name] - weight).abs()
        assert (off <= FLOAT32 * (1 + expected.drift[name])).all(), name  # AdamW: see test_tensor_parallel.py


# ---- what crosses the network ----
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)])
def test_each_boundary_is_crossed_once_each_way_per_microbatch(schedule, chunks, tied, base, tmp_path):
    out, microbatches, tokens = tmp_path / "calls", 4, 12 * SEQ_LEN
    flags = [*base, "--steps", 1, "--layers", 5, "--microbatch", 12, "--schedule", schedule, *["--tie"] * tied]
    run("tests/count_comm.py", out, ROOT / FROM_SCRATCH, *flags, nproc=2).check()
    ranks = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]
    boundaries = 2 * chunks - 1
    for operation in ("send", "recv"):
        sent = Counter(elements for calls in ranks for name, elements in calls if name == operation)
        assert sent == {tokens * SIZES["dim"]: 2 * boundaries * microbatches}
    reduced = [Counter(elements for name, elements in calls if name == "all_reduce") for calls in ranks]
    # the most states of a rank, once; the square of the norm; the loss; and the tied matrix's gradient
    assert reduced == [Counter({1: 3, **({256 * SIZES["dim"]: 1} if tied else {})})] * 2


def test_gradients_cross_the_dp_group_once_per_step_stage_by_stage(base, tmp_path):
    out = tmp_path / "calls"
    flags = [*base, "--steps", 1, "--layers", 4, "--microbatch", 6, "--schedule", "interleaved", "--pp", 2]
    run("tests/count_comm.py", out, ROOT / FROM_SCRATCH, *flags, nproc=4).check()
    sizes = {name: torch.Size(shape).numel() for name, shape in reference.shapes(layers=4, **SIZES).items()}
    layer = sum(n for name, n in sizes.items() if ".layers.0." in name)
    ends = {0: sizes["model.embed_tokens.weight"], 3: sizes["model.norm.weight"] + sizes["lm_head.weight"]}
    for rank in range(4):
        calls = json.loads(Path(f"{out}.{rank}").read_text())
        reduced = sorted(elements for name, elements in calls if name == "all_reduce" and elements > 1)
        assert reduced == sorted(layer + ends.get(stage, 0) for stage in (rank % 2, rank % 2 + 2))


# ---- what a rank holds ----
def peaks(schedule, microbatches, base, tmp_path, nproc, *more):
    out = tmp_path / "peak"
    flags = [*base, "--batch", microbatches, "--microbatch", 1, "--layers", 4, "--schedule", schedule, *more]
    run("tests/peak_saved.py", out, ROOT / FROM_SCRATCH, *flags, nproc=nproc).check()
    return [int(Path(f"{out}.{rank}").read_text()) for rank in range(nproc)]


def test_peak_of_activations_is_the_schedules_own_count(base, tmp_path):
    """m microbatches with GPipe; with 1F1B rank r of p holds p - r, however many there are."""
    single = peaks("gpipe", 1, base, tmp_path, 4)
    indices = 8 * 8 * (SEQ_LEN + 1)  # the step's tokens, of which the embedding keeps a view
    for got, expected in zip(peaks("gpipe", 8, base, tmp_path, 4), single):
        assert abs(got - 8 * expected) <= indices
    for rank, (got, expected) in enumerate(zip(peaks("1f1b", 8, base, tmp_path, 4), single)):
        assert abs(got - (4 - rank) * expected) <= indices


@pytest.mark.parametrize(("batch", "held"), [(8, 4), (6, 6), (2, 2)])
def test_without_a_flag_there_are_two_microbatches_per_rank_or_more(batch, held, base):
    """GPipe holds all of them. A batch of 6 has no 4 equal parts."""
    flags = [*base, "--steps", 1, "--batch", batch, "--schedule", "gpipe"]
    assert f"at most {held} microbatches held by a rank" in run(FROM_SCRATCH, *flags, nproc=2).check().outputs[0]
    simulated = run(FROM_SCRATCH, *flags, "--pp", 2, "--simulate").check().outputs[0]
    assert f"a rank holds {held} at most" in simulated


# ---- faults ----
HANG = """            if step == Step("{kind}", {stage}, {microbatch}) and number == 2:
                import fcntl, os, __main__
                {how}
                os.kill(os.getpid(), 9)
            key, received"""
HOW = {"dies": ("pass", ""), "stalls": (STALL.format("__main__."), "Timed out")}  # code, error of the other rank


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("kind", "stage", "line"),
    [
        ("F", 0, "in step 2 rank 1 waited for the input of microbatch [01], stage 1, from rank 0: "),
        ("B", 1, "in step 2 rank 0 waited for the gradient of microbatch [01], stage 0, from rank 1: "),
    ],
)
def test_stage_that_dies_or_stalls_ends_the_job_and_is_named(kind, stage, line, how, plant, base):
    code, error = HOW[how]
    hang = HANG.format(kind=kind, stage=stage, microbatch=1, how=code)
    script = plant(FROM_SCRATCH, ALIVE, ("executor.py", "            key, received", hang))
    flags = [*base, "--layers", 4, "--microbatch", 12, "--timeout", 4]
    result = run(script, *flags, nproc=2)
    other = 1 - stage
    assert result.codes[other] == 1
    # A rank that dies takes along what it has just begun to send: the microbatch before.
    assert re.search(f"RuntimeError: {line}.*{error}", result.outputs[other]), result.outputs[other]


STORE = "dist.distributed_c10d._get_default_store()"
LATE = f"""        if self.number == 2:
            import fcntl, __main__
            {STORE}.set("received", "")
            {STALL.format("__main__.")}
        self.post(edge)
        return buffer"""


def test_stage_that_died_before_its_neighbour_asks_for_more_is_named(plant, base):
    """The neighbour has the first microbatch, and asks for the second when nobody is there: torch refuses at once."""
    dies = HANG.format(kind="F", stage=0, microbatch=1, how=f'{STORE}.wait(["received"])')
    late = ("executor.py", "        self.post(edge)\n        return buffer", LATE)
    script = plant(FROM_SCRATCH, ALIVE, ("executor.py", "            key, received", dies), late)
    result = run(script, *base, "--layers", 4, "--microbatch", 12, "--timeout", 4, nproc=2)
    assert result.codes == [-9, 1]
    line = "in step 2 rank 1 waited for the input of microbatch 1, stage 1, from rank 0: .*Connection closed"
    assert re.search(f"RuntimeError: {line}", result.outputs[1]), result.outputs[1]


def test_stage_that_died_before_its_neighbour_sends_more_is_named(plant, base):
    """The neighbour computes while the stage dies, and sends the next microbatch to nobody."""
    dies = HANG.format(kind="F", stage=1, microbatch=0, how="pass")
    sends = "work = dist.isend(tensor, rank, group=self.pipe.edges[edge])"
    late = f"""import fcntl, __main__
                late = self.number == 2 and target.microbatch == 1
                {STALL.format("__main__.")} if late else None
                {sends}
                while late:  # gloo learns of it in a thread of its own
                    {sends}"""
    script = plant(
        FROM_SCRATCH, ALIVE, ("executor.py", "            key, received", dies), ("executor.py", sends, late)
    )
    result = run(script, *base, "--layers", 4, "--microbatch", 12, "--timeout", 4, nproc=2)
    assert result.codes == [1, -9]
    line = "in step 2 rank 0 sent the input of microbatch 1, stage 1, to rank 1: .*Connection (closed|reset)"
    assert re.search(f"RuntimeError: {line}", result.outputs[0]), result.outputs[0]


# ---- proof that these tests see ----
FAULTS = {
    "gradients not divided": [('reduction="sum") / tokens', 'reduction="sum") / tokens * len(texts)')],
    "last microbatch dropped": [
        ("// args.microbatch, num_chunks)", "// args.microbatch - 1, num_chunks)")],
    "tied gradient not summed": [("dist.all_reduce(tied.grad, group=tie_group)", "pass"), "--tie"],
    "tied weight counted twice": [("if w is not tied or pp_rank == 0]  # of", "]  # of"), "--tie"],
    "tied weights that start apart": [("stages.py", "init(twin, seed)", "pass"), "--tie"],
    "activations of another microbatch": [
        ("executor.py", "                out = y.detach()", "                out = held[min(held)][1].detach()")],
    "targets of another microbatch": [("text = texts[microbatch]", "text = texts[microbatch - (x is not None)]")],
    "clipping per stage": [("        dist.all_reduce(square, group=pp_group)", "        #")],
    "weight gradients left out": [
        ("executor.py", "add_weight_gradient(*entry)", "add_weight_gradient(entry[0], 0 * entry[1], entry[2])"),
        "--schedule zero-bubble"],
    "weight gradient of the last microbatch only": [
        ("weight_gradients.py", "gradient if weight.grad is None else weight.grad.add_(gradient)", "gradient"),
        "--schedule zero-bubble"],
    "gradients not summed over dp": [("if dp_size > 1 else []", "if False else []")],
    "tokens of one replica of dp": [("tokens = dp_size * sum(", "tokens = sum(")],
    "the same data on each replica of dp": [("[dp_rank::dp_size]", "[0::dp_size]")],
    "optimizer before the all_reduce of dp": [("w.grad.copy_(part.view_as(w))", "pass")],
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_equality_test_turns_red_when_there_is(fault, plant, train):
    edits = [edit for edit in FAULTS[fault] if isinstance(edit, tuple)]
    more = [flag for edit in FAULTS[fault] if isinstance(edit, str) for flag in edit.split()]
    dp = 2 if "dp" in fault else 1
    more += ["--pp", 2, "--microbatch", 6]
    healthy = train(FROM_SCRATCH, *more, nproc=2 * dp)
    faulty = train(plant(FROM_SCRATCH, *edits), *more, nproc=2 * dp)
    expected = healthy.column("loss") + healthy.column("grad_norm")
    assert faulty.column("loss") + faulty.column("grad_norm") != pytest.approx(expected, rel=EXACT)


def test_the_librarys_scale_grads_divides_a_sum_by_the_number_of_microbatches(plant, train):
    """Right for a loss that is a mean per microbatch, not for this one; the first loss does not show it."""
    ours = "return schedule(stages[0], num_microbatches, loss_fn, scale_grads=False)"
    script = plant(TRAIN, ("library.py", ours, ours.replace(", scale_grads=False", "")))
    right, wrong = (train(one, "--microbatch", 6) for one in (TRAIN, script))  # 8 microbatches
    assert wrong.column("loss")[0] == pytest.approx(right.column("loss")[0], rel=EXACT)
    assert wrong.column("grad_norm")[0] == pytest.approx(right.column("grad_norm")[0] / 8, rel=EXACT)


def test_the_executor_sees_activations_that_are_not_freed(plant, base):
    keep = plant(FROM_SCRATCH, ("executor.py", "x, y = held.pop(key)", "x, y = held[key]"))
    result = run(keep, *base, "--layers", 4, "--microbatch", 6, nproc=2)
    assert any(result.codes)
    assert any(re.search(r"more held than \d microbatches", output) for output in result.outputs)


# ---- checkpoint ----
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((FROM_SCRATCH, 2, 2), (FROM_SCRATCH, 4, 4)),
        ((TRAIN, 4, 2), (FROM_SCRATCH, 1, 1)),
        ((FROM_SCRATCH, 1, 1), (TRAIN, 4, 2)),
    ],
    ids=["2 to 4", "library's 2 to 1", "1 to library's 2"],
)
def test_run_goes_on_with_another_number_of_stages(first, second, tied, train, base, one, tmp_path):
    """(script, processes, ranks of a pipeline) of the first step, and of the second."""
    (script, nproc, pp), more = first, ["--tie"] * tied
    half = train(script, "--steps", 1, "--pp", pp, *more, nproc=nproc)
    metrics, out = tmp_path / "metrics.jsonl", tmp_path / "out"
    metrics.write_text((half.folder / "metrics.jsonl").read_text())
    flags = [*base, "--dtype", "float64", "--layers", 5, "--microbatch", 12, "--pp", second[2], *more]
    flags += ["--schedule", "zero-bubble", "--resume", half.folder, "--save", out, "--metrics", metrics]
    run(second[0], *flags, nproc=second[1]).check()
    metrics.rename(out / "metrics.jsonl")
    resumed, expected = Trained(out), one(5, tied=tied)
    assert resumed.column("step") == [1, 2]
    assert differs(resumed, expected) == []


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_saved_folder_is_a_hugging_face_llama(script, tied, train):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    trained = train(script, *["--tie"] * tied)
    theirs = transformers.LlamaForCausalLM.from_pretrained(trained.folder, dtype=torch.float64)
    tokens = torch.arange(SEQ_LEN)[None] * 7 % 256
    ours = reference.logits(trained.weights, tokens, layers=5, **SIZES)
    assert torch.allclose(theirs(tokens).logits, ours, rtol=0, atol=FLOAT32)  # their norms compute in float32


# ---- pictures ----
def test_timeline_draws_what_was_measured_above_what_it_should_be(base, tmp_path):
    picture = tmp_path / "picture.svg"
    flags = [*base, "--layers", 4, "--microbatch", 12, "--schedule", "zero-bubble", "--timeline", picture]
    result = run(FROM_SCRATCH, *flags, nproc=2).check()
    (line,) = re.findall(r"bubble of the last step: measured (.*)%, simulated .* (.*)%\n", result.outputs[0])
    assert all(0 <= float(share) <= 100 for share in line)
    boxes = picture.read_text().count('class="event"')
    assert boxes == 2 * 2 * 4 * 3  # measured and simulated, ranks, microbatches, F and B and W


@pytest.mark.parametrize("nproc", [1, 2])
def test_simulation_needs_no_ranks_and_trains_nothing(nproc, tmp_path):
    picture = tmp_path / "picture.svg"
    flags = ["--simulate", "2,2,2,0", "--pp", 4, "--microbatch", 4, "--timeline", picture]
    result = run(FROM_SCRATCH, *flags, nproc=nproc).check()
    lines = result.outputs[0].splitlines()
    assert [line[:7] for line in lines[:4]] == [f"rank {rank} " for rank in range(4)]
    assert "bubble 27.3%, by the formula without sends 27.3%; a rank holds 4 at most" in lines[4]  # 3 / (8 + 3)
    assert picture.read_text().count('class="event"') == 4 * 8 * 2
