"""05_zero/fsdp.py: the one loss column in each stage, what crosses the network, what a rank holds, what is saved."""

import json
import shutil
from collections import Counter
from math import ceil
from pathlib import Path

import pytest
import reference
import torch
import torch.distributed.checkpoint.state_dict  # these three once here, not again in each forked rank
import torch.distributed.fsdp
import torch.profiler
from runner import ROOT, run
from safetensors.torch import load_file
from stall import stall_before

FSDP = "05_zero/fsdp.py"
# Sums in another order differ by some 1e-16 (float64) and 1e-7 (float32) per operation, and there are thousands.
EXACT, FLOAT32 = 1e-9, 1e-5
# bfloat16 keeps 8 bits and float16 11: products are off by 4e-3 and 5e-4 each, the loss averages over many.
HALF_TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3}
STEPS, HALF_WAY, BATCH, SEQ_LEN, CLIP = 3, 1, 16, 16, 0.5
# 6 rows in k_proj: of 4 ranks one has none of them. Heads 2 wide: where the width is no power of two, one bit of the
# rotary frequencies (float32) differs between torch's pow and the reference's, and AdamW shows it in a weight.
SIZES = {"dim": 12, "layers": 2, "heads": 6, "kv_heads": 3}
SHAPES = reference.shapes(**SIZES)


class Trained:
    def __init__(self, folder):
        self.rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.weights = load_file(folder / "model.safetensors")
        self.folder = folder

    def column(self, name):
        return [row[name] for row in self.rows]


@pytest.fixture(scope="session")
def base(text):
    sizes = [word for name, n in SIZES.items() for word in (f"--{name.replace('_', '-')}", n)]
    flags = ["--steps", STEPS, "--batch", BATCH, "--seq-len", SEQ_LEN, "--clip", CLIP, "--data", text]
    return [*flags, "--dtype", "float64", *sizes]


@pytest.fixture(scope="session")
def many(base, tmp_path_factory):
    def many(script, nproc, cases):
        """Runs a script once per entry of {name: flags}, all in the same processes; returns {name: Trained}."""
        folder, lines = tmp_path_factory.mktemp("many"), []
        for name, more in cases.items():
            (place := folder / name).mkdir()
            flags = [*base, "--save", place, "--metrics", place / "metrics.jsonl", *more]
            lines.append([str(flag) for flag in flags])
        (folder / "cases.json").write_text(json.dumps(lines))
        run("tests/run_many.py", ROOT / script, folder / "cases.json", nproc=nproc, timeout=120).check()
        return {name: Trained(folder / name) for name in cases}

    return many


def layouts(nproc):
    """{name: flags}: every stage, with accumulation and on 1 and 2 ranks without; on 4 ranks 2 replicas, too."""
    return {
        f"stage {stage}, {count} microbatches, {replicas} replicas": [
            "--stage", stage, "--microbatch", BATCH // nproc // count, "--replicas", replicas]
        for replicas in ((1, 2) if nproc == 4 else (1,))
        for stage in (1, 2, 3)
        for count in ((4,) if nproc == 4 else (1, 4))
    }  # fmt: skip


OPTIONS = {  # with 2 ranks
    "offload": ["--offload", "cpu"],
    "offload, float32": ["--offload", "cpu", "--dtype", "float32"],
    "checkpoint activations": ["--checkpoint-activations", "--microbatch", 4],
    "two replicas of one shard": ["--replicas", 2, "--microbatch", 4],
    "async saves in a row": ["--async-save", "--save-every", 1],
    "compile": ["--compile", "eager", "--checkpoint-activations"],
}
HALVES = {
    2: {"half": ["--steps", HALF_WAY], "half async": ["--steps", HALF_WAY, "--async-save"]},
    4: {"half": ["--steps", HALF_WAY, "--replicas", 2, "--stage", 2, "--async-save"]},
}
TYPES = {
    "float32": ["--dtype", "float32", "--microbatch", 2],
    "bfloat16": ["--dtype", "bfloat16", "--microbatch", 2],
    "float16": ["--dtype", "float16", "--microbatch", 2, "--stage", 1],
    "reduce bfloat16": ["--dtype", "float32", "--reduce-dtype", "bfloat16"],
}
BIG = ["--dim", 64, "--layers", 4, "--heads", 4, "--kv-heads", 2, "--steps", 1, "--dtype", "float32"]


@pytest.fixture(scope="session")
def trained(many):
    """Returns, for a number of ranks, {name: Trained}: all healthy runs, each once."""
    done = {}

    def trained(nproc):
        if nproc not in done:
            cases = layouts(nproc) | HALVES.get(nproc, {}) | {"big": BIG}
            done[nproc] = many(FSDP, nproc, cases | (TYPES | OPTIONS if nproc == 2 else {}))
        return done[nproc]

    return trained


@pytest.fixture(scope="session")
def one(text):
    """The serial reference, once per data type."""
    done = {}

    def one(dtype=torch.float64):
        if dtype not in done:
            done[dtype] = reference.train(STEPS, BATCH, SEQ_LEN, text, dtype, clip=CLIP, **SIZES)
        return done[dtype]

    return one


def differs(trained, expected, first=0, tolerance=EXACT):
    """Returns what is not equal to the reference from the first row on: a list of words, empty when all is."""
    found = []
    if trained.column("step") != list(range(first + 1, STEPS + 1)):
        found.append("step")
    for name, column in (("loss", expected.losses), ("grad_norm", expected.grad_norms)):
        if trained.column(name) != pytest.approx(column[first:], rel=tolerance):
            found.append(name)
    assert trained.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        allowed = tolerance * (1 + expected.drift[name]) if weight.dtype == torch.float32 else EXACT
        if ((trained.weights[name] - weight).abs() > allowed).any():
            found.append(name)
    return found


# ---- equality ----
@pytest.mark.parametrize(("nproc", "layout"), [(nproc, layout) for nproc in (1, 2, 4) for layout in layouts(nproc)])
def test_losses_gradient_norms_and_weights_equal_the_serial_reference(nproc, layout, trained, one):
    assert min(one().grad_norms) > CLIP  # clipping is part of it
    assert differs(trained(nproc)[layout], one()) == []


@pytest.mark.parametrize("option", OPTIONS)
def test_no_option_changes_the_losses(option, trained, one):
    dtype, tolerance = (torch.float32, FLOAT32) if "float32" in option else (torch.float64, EXACT)
    assert differs(trained(2)[option], one(dtype), tolerance=tolerance) == []


def test_float32_equals_the_serial_reference(trained, one):
    assert differs(trained(2)["float32"], one(torch.float32), tolerance=FLOAT32) == []


@pytest.mark.parametrize("name", ["bfloat16", "float16", "reduce bfloat16"])
def test_half_precision_follows_the_float32_losses(name, trained, one):
    run, expected = trained(2)[name], one(torch.float32)
    assert run.column("loss") == pytest.approx(expected.losses, rel=HALF_TOLERANCE[name.split()[-1]])
    assert run.column("grad_norm") != pytest.approx(expected.grad_norms, rel=FLOAT32)  # it is in use
    assert {weight.dtype for weight in trained(2)[name].weights.values()} == {torch.float32}


UNSCALE = "        scaler.unscale_(optimizer)"


def test_float16_overflow_on_one_rank_makes_all_ranks_skip_the_step(plant, many, trained):
    """The same as an overflow on both: else one rank would step and the other not, and the shards would part."""
    fault = (
        "        if step == 2 and rank in {}:\n            next(model.parameters()).grad.to_local()[0, 0] = torch.inf\n"
    )
    flags, runs = TYPES["float16"], []
    for ranks in ([1], [0, 1]):
        (faulty,) = many(plant(FSDP, (UNSCALE, fault.format(ranks) + UNSCALE)), 2, {"run": flags}).values()
        runs.append(faulty)
    for name, weight in runs[0].weights.items():
        assert weight.isfinite().all()
        assert torch.equal(weight, runs[1].weights[name])
    losses = trained(2)["float16"].column("loss")
    assert runs[0].column("loss") == runs[1].column("loss")
    assert [a == b for a, b in zip(runs[0].column("loss"), losses)] == [True, True, False]


# ---- what crosses the network ----
def group_sizes(shards):
    """Elements of the groups that are gathered as one, padded so that each rank has as many rows of each weight."""
    sizes = Counter()
    for name, (rows, *columns) in SHAPES.items():
        group = name.split(".")[2] if ".layers." in name else "embedding" if "embed" in name else "head"
        sizes[group] += ceil(rows / shards) * shards * (columns or [1])[0]
    return sizes


PSI = sum(torch.Size(shape).numel() for shape in SHAPES.values())


@pytest.mark.parametrize(
    ("nproc", "replicas", "stage", "count", "steps"),  # of two steps the second begins with what the first has left
    [(2, 1, 1, 4, 1), (2, 1, 2, 1, 1), (2, 1, 2, 4, 1), (2, 1, 3, 1, 2), (2, 1, 3, 4, 1), (4, 2, 2, 2, 1)],
)
def test_stages_move_the_papers_bytes(nproc, replicas, stage, count, steps, base, tmp_path):
    out, shards = tmp_path / "calls", nproc // replicas
    more = ["--steps", steps, "--stage", stage, "--replicas", replicas, "--microbatch", BATCH // nproc // count]
    run("tests/count_comm.py", out, ROOT / FSDP, *base, *more, nproc=nproc).check()
    calls = [Counter(map(tuple, json.loads(Path(f"{out}.{rank}").read_text()))) for rank in range(nproc)]
    assert all(found == calls[0] for found in calls)
    sizes, expected = group_sizes(shards), Counter()
    for group, size in sizes.items():
        gathers, reduces = count if stage == 3 else 1, count if stage > 1 else 1
        again = stage == 3 and group not in ("embedding", "head")  # no need of the one, and the other was not freed
        expected["all_gather", size // shards] += steps * gathers * (2 if again else 1)
        expected["reduce_scatter", size] += steps * reduces
        if replicas > 1:
            expected["all_reduce", size // shards] += steps
    expected["all_reduce", 2] += steps  # the loss, and how many ranks have written their checkpoint
    expected["all_reduce", len(SHAPES)] += steps  # the norm of each gradient
    assert calls[0] == expected
    # nccl-tests: all_gather and reduce_scatter move (n-1)/n of the whole size each; the paper counts the whole size
    moved = sum(n * shards * times for (op, n), times in calls[0].items() if op == "all_gather")
    moved += sum(n * times for (op, n), times in calls[0].items() if op == "reduce_scatter")
    saved = sizes["embedding"] + sizes["head"]
    assert sum(sizes.values()) == PSI  # 2 shards need no padding
    assert moved / steps == {1: 2 * PSI, 2: (1 + count) * PSI, 3: count * (3 * PSI - saved)}[stage]


def test_uneven_shards_are_padded_on_the_network(base, tmp_path):
    out = tmp_path / "calls"
    run("tests/count_comm.py", out, ROOT / FSDP, *base, "--steps", 1, nproc=4).check()
    calls = Counter(map(tuple, json.loads(Path(f"{out}.0").read_text())))
    sizes = group_sizes(4)
    padding = 2 * 2 * (2 * SIZES["dim"])  # in each of 2 blocks k_proj and v_proj have 6 rows, and 8 are sent
    assert sum(sizes.values()) == PSI + padding
    assert {n: times for (op, n), times in calls.items() if op == "reduce_scatter"} == Counter(sizes.values())


# ---- what a rank holds ----
@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_states_of_a_rank_are_the_papers_formula(nproc, trained):
    """16 bytes a parameter in float32, over n. FSDP2 adds AdamW's count of steps, 4 bytes for each tensor."""
    shapes = reference.shapes(64, 4, 4, 2)
    size = sum(torch.Size(shape).numel() for shape in shapes.values())
    states = trained(nproc)["big"].rows[-1]["state_mib"] * 2**20
    assert states == 16 * size / nproc + 4 * len(shapes)
    assert states == pytest.approx(16 * size / nproc, rel=0.02)


MEASURE = """        if step == 2:
            kept = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
            kept = [(t.to_local() if hasattr(t, "to_local") else t).untyped_storage() for t in kept]
            print("kept", sum({s.data_ptr(): s.nbytes() for s in kept if s.nbytes()}.values()), held)
        optimizer.zero_grad()"""


@pytest.mark.parametrize(
    ("nproc", "more"),
    [(4, ["--stage", 1, "--microbatch", 1]), (2, ["--dtype", "bfloat16", "--offload", "cpu"])],
    ids=str,
)
def test_states_are_those_in_memory(nproc, more, plant, base):
    """Measured after a step: the storages behind weights, gradients and AdamW's states, each once."""
    script = plant(FSDP, ("        optimizer.zero_grad()", MEASURE))
    result = run(script, *base, *more, nproc=nproc).check()
    for rank, output in enumerate(result.outputs):
        kept, held = map(int, output.split("kept ")[1].split("\n")[0].split())
        if rank == 0:
            assert kept == held
        assert held <= kept <= held + 4 * 4 * 2 * SIZES["dim"] * 8  # the padding of 4 weights of 2 rows, at most


# ---- checkpoints ----
RESUMES = {  # ranks -> {name: (ranks and name of the half run, flags)}
    1: {"from 2": (2, "half", [])},
    2: {
        "from 2": (2, "half async", ["--offload", "cpu", "--async-save"]),
        "from 2 x 2": (4, "half", ["--replicas", 2, "--stage", 1, "--microbatch", 2]),
        "slower": (2, "half", ["--lr", 1e-9]),
    },
    4: {"from 2": (2, "half async", ["--replicas", 2, "--stage", 1, "--microbatch", 1])},
}


@pytest.fixture(scope="session")
def resumed(many, trained):
    done = {}

    def resumed(nproc):
        if nproc not in done:
            cases = {
                name: ["--resume", trained(before)[half].folder, *flags]
                for name, (before, half, flags) in RESUMES[nproc].items()
            }
            done[nproc] = many(FSDP, nproc, cases)
        return done[nproc]

    return resumed


@pytest.mark.parametrize(("nproc", "name"), [(1, "from 2"), (2, "from 2"), (2, "from 2 x 2"), (4, "from 2")])
def test_run_goes_on_in_another_layout_as_if_never_interrupted(nproc, name, resumed, one):
    assert differs(resumed(nproc)[name], one(), HALF_WAY) == []


def go_on(many, folder, script=FSDP, more=()):
    return many(script, 2, {"run": ["--resume", folder, *more]})["run"]


def test_resume_needs_the_optimizers_states(plant, many, trained, one):
    script = plant(
        FSDP,
        ("shards.py", 'optim_state_dict=state["optimizer"]', 'optim_state_dict=state["optimizer"] | {"state": {}}'),
    )
    found = differs(go_on(many, trained(2)["half"].folder, script), one(), HALF_WAY)
    assert {"loss", "grad_norm"} <= set(found)


def test_the_flags_learning_rate_counts_not_the_checkpoints(resumed, one):
    losses = resumed(2)["slower"].column("loss")
    assert losses[0] == pytest.approx(one().losses[HALF_WAY], rel=EXACT)  # the step before had the old rate
    assert losses[1] != pytest.approx(one().losses[HALF_WAY + 1], rel=1e-4)


def test_resume_from_an_empty_folder_begins_when_save_names_it_too(base, tmp_path):
    flags = [*base, "--save", tmp_path, "--resume", tmp_path, "--metrics", tmp_path / "metrics.jsonl"]
    for steps in (1, 2):
        run(FSDP, *flags, "--steps", steps).check()
    assert Trained(tmp_path).column("step") == [1, 2]


def test_resumed_float16_run_keeps_its_loss_scale(plant, many):
    """A gradient that is infinite in the first step halves the scale; the resumed run goes on with that half.

    That step is skipped, so the checkpoint's AdamW has not begun to count.
    """
    fault = "        if step == 1:\n            next(model.parameters()).grad.to_local()[0, 0] = torch.inf\n"
    flags = ["--dtype", "float16"]
    cases = {"whole": flags, "half": [*flags, "--steps", HALF_WAY]}
    whole, half = many(plant(FSDP, (UNSCALE, fault + UNSCALE)), 2, cases).values()
    rest = go_on(many, half.folder, more=flags)
    scalers = [
        json.loads((end.folder / "checkpoint.json").read_text())["more"]["scaler"] for end in (whole, half, rest)
    ]
    assert [(scaler["scale"], scaler["_growth_tracker"]) for scaler in scalers] == [(2**15, 2), (2**15, 0), (2**15, 2)]
    assert rest.column("loss") == whole.column("loss")[HALF_WAY:]
    assert all(torch.equal(rest.weights[name], weight) for name, weight in whole.weights.items())


def test_async_checkpoint_holds_the_step_it_was_taken_at_though_training_went_on(plant, many, one):
    """Without the save at the end, the last checkpoint is that of step 2, written while step 3 ran."""
    script = plant(FSDP, ("writer.start(max(first, args.steps), model, optimizer, scaler)", "pass"))
    early = many(script, 2, {"run": ["--async-save", "--save-every", 2]})["run"]
    assert json.loads((early.folder / "checkpoint.json").read_text())["step"] == 2
    assert differs(go_on(many, early.folder), one(), 2) == []


def test_async_checkpoint_counts_as_soon_as_all_ranks_have_written_it(plant, base, tmp_path):
    """Not only at the next save: the run dies two steps after the thread is done."""
    wait, die = "writer.pending[-1].result()", "os._exit(9)"
    fault = f"        if step == 4:\n            {wait}\n        if step == 6:\n            {die}\n"
    script = plant(FSDP, (UNSCALE, fault + UNSCALE))
    flags = ["--save", tmp_path / "save", "--async-save", "--save-every", 3, "--steps", 9]
    result = run(script, *base, *flags, nproc=2)
    assert result.codes == [9, 9]
    assert json.loads((tmp_path / "save" / "checkpoint.json").read_text())["step"] == 3


WRITE = "written = save(state_of(model, optimizer), checkpoint_id=path"


@pytest.mark.parametrize("more", [[], ["--async-save"]], ids=["sync", "async"])
def test_error_of_a_save_ends_the_run(more, plant, base, tmp_path):
    script = plant(FSDP, ("shards.py", WRITE, WRITE.replace("=path", '="/dev/null/x"')))
    result = run(script, *base, "--save", tmp_path / "save", *more, nproc=2)
    assert result.codes == [1, 1]
    for output in result.outputs:
        assert "NotADirectoryError" in output
    assert not (tmp_path / "save" / "checkpoint.json").exists()


DIE = """

def die(*_):
    os.kill(os.getpid(), 9)


if os.environ["RANK"] == "1":
    dcp.FileSystemWriter.write_data = die


class Writer:"""


@pytest.mark.parametrize(
    ("when", "more"), [("its parts", []), ("its parts", ["--async-save"]), ("the note", [])], ids=str
)
def test_rank_killed_while_it_writes_leaves_the_checkpoint_before(
    when, more, plant, many, trained, one, base, tmp_path
):
    save = tmp_path / "save"
    shutil.copytree(trained(2)["half"].folder, save)
    edit = "\n\nclass Writer:", DIE
    if when == "the note":
        note = "            finish_checkpoint(path"
        edit = note, f"            if dist.get_rank() == 0:\n                os.kill(os.getpid(), 9)\n{note}"
    killed = plant(FSDP, ("shards.py", *edit), ("shards.py", "import sys\n", "import os\nimport sys\n"))
    result = run(killed, *base, "--resume", save, "--save", save, "--timeout", 5, *more, nproc=2)
    assert sorted(result.codes) == [-9, 1]
    assert json.loads((save / "checkpoint.json").read_text())["step"] == HALF_WAY
    assert differs(go_on(many, save), one(), HALF_WAY) == []


@pytest.mark.parametrize("damage", ["cut", "gone", "garbled"])
def test_torn_checkpoint_is_refused_by_name_on_every_rank(damage, trained, base, tmp_path):
    shutil.copytree(trained(2)["half"].folder, tmp_path / "save")
    folder = tmp_path / "save" / f"step-{HALF_WAY}"
    torn = folder / (".metadata" if damage == "garbled" else "__1_0.distcp")
    content = torn.read_bytes()
    torn.unlink() if damage == "gone" else torn.write_bytes(content[: len(content) // 2])
    if damage == "garbled":  # of the right length
        torn.write_bytes(bytes(len(content)))
    result = run(FSDP, *base, "--resume", tmp_path / "save", nproc=2)
    assert result.codes == [2, 2]
    for rank, output in enumerate(result.outputs):
        line = output.splitlines()[-1]
        assert line.startswith(f"[rank{rank}] error: --resume another folder than {tmp_path / 'save'}")
        assert (str(folder) if damage == "garbled" else str(torn)) in line


def test_saved_folder_is_a_hugging_face_llama(trained):
    saved = trained(2)["async saves in a row"]
    assert {name: tuple(weight.shape) for name, weight in saved.weights.items()} == SHAPES
    assert all(weight.is_contiguous() and weight.dtype == torch.float64 for weight in saved.weights.values())
    assert sorted(path.name for path in saved.folder.iterdir()) == [
        "checkpoint.json", "config.json", "metrics.jsonl", "model.safetensors", f"step-{STEPS}"]  # fmt: skip
    config = json.loads((saved.folder / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (12, 2, 256)


# ---- faults ----
BAD = [  # ranks, flags, the line
    (4, ["--replicas", 3], "--replicas 3 does not divide 4 ranks: use --replicas 1, say"),
    (2, ["--replicas", 0], "--replicas 0 does not divide 2 ranks: use --replicas 1, say"),
    (2, ["--save-every", 1], "--save-every 1 and --async-save need --save DIR, and a number from 0 on"),
    (2, ["--async-save"], "--save-every 0 and --async-save need --save DIR, and a number from 0 on"),
    (2, ["--stage", 4], "argument --stage: invalid choice: 4"),
    (2, ["--batch", 5], "--batch 5 is not divisible by 2 data-parallel ranks: use 2 x n"),
    (2, ["--resume", "/nowhere"], "--resume another folder than /nowhere: FileNotFoundError"),
    (2, ["--resume", "half", "--seed", 7], "'seed': 0"),
]


@pytest.mark.parametrize(("nproc", "flags", "line"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_ends_in_one_line_on_every_rank(nproc, flags, line, trained, base):
    flags = [trained(2)["half"].folder if flag == "half" else flag for flag in flags]
    result = run(FSDP, *base, *flags, nproc=nproc)
    assert result.codes == [2] * nproc
    for output in result.outputs:
        assert line in output.splitlines()[-1]
        assert "Traceback" not in output


def test_rank_that_stalls_ends_the_job_within_the_timeout(plant, base):
    """In groups of some ranks, too: those that a device mesh makes by itself wait for half an hour."""
    stalled = plant(FSDP, *stall_before(UNSCALE))
    result = run(stalled, *base, "--replicas", 2, "--timeout", 4, nproc=4)
    assert result.codes == [1, -9, 1, 1]


@pytest.mark.parametrize(
    ("nproc", "more", "layout"),
    [(2, ["--replicas", 2, "--stage", 2], "dp 2 x 1 | stage 2"), (2, [], "dp 2 | stage 3"), (1, [], "dp 1 | stage 3")],
)
def test_output_names_the_layout_and_what_a_rank_holds(nproc, more, layout, base):
    """One process is one without torchrun's environment: `python 05_zero/fsdp.py`."""
    alone = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")
    result = run(FSDP, *base, "--steps", 1, *more, nproc=nproc, env=alone if nproc == 1 else {}).check()
    lines = result.outputs[0].splitlines()
    assert lines[0] == f"torch {torch.__version__} | gloo | cpu | {layout}"
    assert lines[1] == " step |   loss | grad_norm | tokens/s"
    whole, rest = 4 * 8 * PSI, 4 * len(SHAPES)  # at float64; 2 shards need no padding
    held = whole // (1 if more else nproc) + rest
    assert lines[-1] == f"{held:,} of {whole + rest:,} bytes of parameters, gradients and AdamW states on each rank"
    assert all(output == "" for output in result.outputs[1:])


# ---- proof that these tests see ----
FAULTS = {  # edits, and the flags that show them
    "mean instead of sum": [("module.set_gradient_divide_factor(1.0)", "pass")],
    "clipping by the norm of this rank's shards": [
        ("nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor()",
         "torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()\n"
         "        for p in model.parameters():\n"
         "            p.grad.to_local().mul_((args.clip / grad_norm).clamp(max=1))")],
    "gradients of the first microbatch only": [
        ("set_requires_gradient_sync(i == len(texts)", "set_requires_gradient_sync(i == 1"), "--stage 1"],
    "replicas summed after the first microbatch": [
        ("set_requires_all_reduce(i == len(texts))", "set_requires_all_reduce(i == 1)"), "--stage 2 --replicas 2"],
    "loss divided by this rank's tokens": [('reduction="sum") / tokens', 'reduction="sum") / text[:, 1:].numel()')],
    "the first shard on every rank": [("shards.py", "whole[place * rows : (place + 1) * rows]", "whole[:rows]")],
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_equality_test_turns_red_when_there_is(fault, plant, many, one):
    edits = [edit for edit in FAULTS[fault] if isinstance(edit, tuple)]
    more = [flag for edit in FAULTS[fault] if isinstance(edit, str) for flag in edit.split()]
    (faulty,) = many(plant(FSDP, *edits), 2, {"run": ["--microbatch", 2, *more]}).values()
    assert {"loss", "grad_norm"} & set(differs(faulty, one()))
