"""03_tensor_parallel: one checkpoint for any layout and both scripts, and nothing lost when a run dies writing it."""

import json
import shutil

import pytest
import torch
from conftest import SEQ_LEN, SIZES, STEPS
from reference import logits
from runner import run
from safetensors.torch import load_file

TRAIN, FROM_SCRATCH = SCRIPTS = ["03_tensor_parallel/train.py", "03_tensor_parallel/from_scratch.py"]
EXACT = 1e-9  # float64, sums in another order
FLOAT32_NORMS = 1e-5  # Hugging Face's norms compute in float32, whatever the type of the weights
HALF_WAY = 3  # steps


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def resumed(train, flags, tmp_path, first, second, *more):
    """Trains half the steps as `first`, the others as `second` (script, processes, flags); returns rows and weights."""
    script, nproc, layout = first
    half = train(script, "--dtype", "float64", "--steps", HALF_WAY, *layout, *more, nproc=nproc)
    script, nproc, layout = second
    metrics, out = tmp_path / "metrics.jsonl", tmp_path / "out"
    shutil.copy(half.folder / "metrics.jsonl", metrics)
    flags = [*flags, "--dtype", "float64", *layout, *more, "--metrics", metrics, "--resume", half.folder, "--save", out]
    run(script, *flags, nproc=nproc).check()
    return rows(metrics), load_file(out / "model.safetensors")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((FROM_SCRATCH, 1, []), (FROM_SCRATCH, 4, ["--tp", 4])),
        ((FROM_SCRATCH, 4, ["--tp", 4]), (FROM_SCRATCH, 2, ["--tp", 1])),
        ((FROM_SCRATCH, 4, ["--tp", 2]), (TRAIN, 4, ["--tp", 4, "--sequence-parallel"])),
        ((TRAIN, 2, ["--tp", 2]), (TRAIN, 4, ["--tp", 4])),
        ((TRAIN, 4, ["--tp", 4]), (FROM_SCRATCH, 4, ["--tp", 2])),
        ((TRAIN, 4, ["--tp", 2]), (TRAIN, 1, [])),
    ],
    ids=lambda half: f"{half[0][19:-3]} {half[1]} {' '.join(map(str, half[2]))}",
)
def test_run_goes_on_in_another_layout_as_if_never_interrupted(first, second, train, serial, flags, tmp_path):
    sizes = {"kv_heads": 2, "vocab_size": 259}
    found, weights = resumed(train, flags, tmp_path, first, second, "--vocab-size", 259)
    reference = serial(torch.float64, **sizes)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in found] == pytest.approx(reference.losses, rel=EXACT)
    assert [row["grad_norm"] for row in found] == pytest.approx(reference.grad_norms, rel=EXACT)
    assert all(torch.allclose(weights[name], w, rtol=0, atol=EXACT) for name, w in reference.weights.items())


@pytest.mark.parametrize(
    ("script", "nproc", "more"),
    [(FROM_SCRATCH, 4, []), (FROM_SCRATCH, 4, ["--sequence-parallel"]), (TRAIN, 2, [])],  # DTensor is slow to start
)
def test_resumed_run_draws_the_dropout_of_an_uninterrupted_one(script, nproc, more, train, flags, tmp_path):
    layout = (script, nproc, ["--tp", 2])
    found, weights = resumed(train, flags, tmp_path, layout, layout, "--dropout", 0.2, *more)
    whole = train(script, "--dtype", "float64", "--tp", 2, "--dropout", 0.2, *more, nproc=nproc)
    assert [row["loss"] for row in found] == whole.column("loss")
    assert all(torch.equal(weights[name], weight) for name, weight in whole.weights.items())


@pytest.mark.parametrize("script", SCRIPTS)
def test_resumed_float16_run_keeps_its_loss_scale(script, train, flags, tmp_path):
    layout = ["--tp", 2, "--dtype", "float16"]
    found, _ = resumed(train, flags, tmp_path, (script, 2, layout), (script, 2, layout))
    assert [row["loss"] for row in found] == train(script, *layout, nproc=2).column("loss")


def test_the_flags_learning_rate_counts_not_the_checkpoints(train, flags, tmp_path):
    layout = (FROM_SCRATCH, 2, ["--tp", 2])
    found, _ = resumed(train, flags, tmp_path, layout, layout)
    slower, _ = resumed(train, flags, tmp_path, layout, (FROM_SCRATCH, 2, ["--tp", 2, "--lr", 1e-9]))
    assert slower[HALF_WAY]["loss"] == found[HALF_WAY]["loss"]
    assert slower[-1]["loss"] != pytest.approx(found[-1]["loss"], rel=1e-3)


@pytest.mark.parametrize("script", SCRIPTS)
def test_resume_from_an_empty_folder_begins_when_save_names_it_too(script, train, serial, flags, tmp_path):
    run(script, *flags, "--save", tmp_path, "--resume", tmp_path, "--steps", HALF_WAY, nproc=2).check()
    run(script, *flags, "--save", tmp_path, "--resume", tmp_path, nproc=2).check()
    weights = load_file(tmp_path / "model.safetensors")
    whole = train(script, nproc=2).weights
    assert all(torch.equal(weights[name], weight) for name, weight in whole.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json", "model.safetensors", f"optimizer-{STEPS}.safetensors"]  # fmt: skip


def test_saved_folder_is_a_hugging_face_llama(train):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    trained = train(FROM_SCRATCH, "--dtype", "float64", "--tp", 2, "--vocab-size", 259, nproc=2)
    theirs = transformers.LlamaForCausalLM.from_pretrained(trained.folder, dtype=torch.float64)
    tokens = torch.arange(SEQ_LEN)[None] * 7 % 259
    ours = logits(trained.weights, tokens, **SIZES)
    assert torch.allclose(theirs(tokens).logits, ours, rtol=0, atol=FLOAT32_NORMS)
    assert theirs.state_dict().keys() == trained.weights.keys()  # nothing was made up at load


DIE = """    global renames
    if renames == {}:
        os.kill(os.getpid(), 9)
    renames += 1
    os.replace(aside, path)"""


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_run_killed_while_it_writes_leaves_the_last_whole_checkpoint(renames, plant, train, flags, tmp_path):
    """Killed after so many of its three files have their names: the folder is still that of the step before."""
    save = tmp_path / "save"
    run(FROM_SCRATCH, *flags, "--steps", HALF_WAY, "--save", save, nproc=2).check()
    killed = plant(
        FROM_SCRATCH,
        ("checkpoint.py", "def require_safetensors", "renames = 0\n\n\ndef require_safetensors"),
        ("checkpoint.py", "    os.replace(aside, path)", DIE.format(renames)),
    )
    result = run(killed, *flags, "--resume", save, "--save", save, "--timeout", 5, nproc=2)
    assert result.codes[0] == -9
    metrics = tmp_path / "metrics.jsonl"
    run(FROM_SCRATCH, *flags, "--resume", save, "--save", save, "--metrics", metrics, nproc=2).check()
    assert [row["step"] for row in rows(metrics)] == list(range(HALF_WAY + 1, STEPS + 1))
    assert [row["loss"] for row in rows(metrics)] == train(FROM_SCRATCH, nproc=2).column("loss")[HALF_WAY:]


@pytest.mark.parametrize("script", SCRIPTS)
def test_missing_safetensors_ends_in_one_line_that_says_what_to_install(script, flags, tmp_path):
    wrapper = tmp_path / "without.py"
    wrapper.write_text(
        "import os, runpy, sys\n"
        "for name in [name for name in sys.modules if name.split('.')[0] == 'safetensors']:\n"
        "    del sys.modules[name]\n"
        "sys.modules['safetensors'] = None\n"  # Python's own way to say: not there
        "sys.argv = sys.argv[1:]\n"
        "sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    for flag in ("--save", "--resume"):
        result = run(wrapper, script, *flags, flag, tmp_path, nproc=2)
        assert result.codes == [2, 2]
        for rank, output in enumerate(result.outputs):
            line = f"[rank{rank}] error: --save and --resume need safetensors: pip install safetensors\n"
            assert output.endswith(line)
    run(wrapper, script, *flags, "--steps", 1, nproc=2).check()  # without a checkpoint torch is enough


FAULTS = {
    "averages left out": ('state_dict({"state": dict(enumerate(state))', 'state_dict({"state": {}'),
    "step count left out": ('states.get_tensor("step").clone()', 'states.get_tensor("step") * 0'),
    "random states left out": ("            generator.set_state(random.clone())", "            pass"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_these_tests_turn_red_when_there_are(fault, plant, train, flags, tmp_path):
    script = plant(FROM_SCRATCH, ("checkpoint.py", *FAULTS[fault]))
    more = ["--dropout", 0.2] if "random" in fault else []
    healthy, faulty = (
        resumed(train, flags, folder, (FROM_SCRATCH, 2, []), (script, 2, []), *more)[0]
        for script, folder in ((FROM_SCRATCH, tmp_path), (script, script.parent))
    )
    assert [row["loss"] for row in faulty] != pytest.approx([row["loss"] for row in healthy], rel=EXACT)
