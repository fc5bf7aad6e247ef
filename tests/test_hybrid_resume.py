"""06_hybrid/train.py: another mesh goes on where one stopped, Hugging Face's models come and go, memory stays small."""

import json
import re
import shutil
from pathlib import Path

import pytest
import reference
import torch
import torch.distributed.checkpoint  # these once here, not again in each forked rank
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from runner import ROOT, run
from safetensors.torch import load_file, save_file
from test_hybrid import REFUSE

TRAIN = "06_hybrid/train.py"
EXACT = 1e-9  # float64: sums in another order differ by some 1e-16 per operation, and there are thousands
LOGITS = 1e-5  # Hugging Face's norms compute in float32, whatever the model's type
BATCH, SEQ_LEN, CLIP = 8, 16, 0.5
SIZES = {"dim": 16, "layers": 4, "heads": 2, "kv_heads": 2}


@pytest.fixture(scope="session")
def base(text):
    sizes = [word for name, n in SIZES.items() for word in (f"--{name.replace('_', '-')}", n)]
    flags = ["--batch", BATCH, "--seq-len", SEQ_LEN, "--clip", CLIP, "--data", text, "--microbatch", 1]
    return [*flags, "--dtype", "float64", *sizes]


def weights_in(folder):
    return {name: weight for file in folder.glob("model*.safetensors") for name, weight in load_file(file).items()}


# ---- resume ----
FIRST = ["--pp", 2, "--dp", 1, "--tp", 2]
MESHES = {"2 x 1 x 2": FIRST, "1 x 4 x 1": ["--dp", 4], "4 x 1 x 1": ["--pp", 4], "1 x 2 x 2": ["--dp", 2, "--tp", 2]}
MODELS = {"untied": ["--sequence-parallel"], "tied, not sharded": ["--tie", "--shard", "none"]}
WAYS = {"untied": [*MESHES, "2 x 1 x 2"], "tied, not sharded": ["2 x 1 x 2", "1 x 4 x 1", "2 x 1 x 2"]}
MOVES = [(model, i) for model, way in WAYS.items() for i in range(1, len(way))]


@pytest.fixture(scope="module")
def chains(base, tmp_path_factory):
    """{model: {(mesh's place on the way, "loaded" or "on"): folder}}: jobs of 4 ranks, all in the same processes.

    The first mesh makes 2 steps. Each further one writes what it has read, and then goes on for a step.
    """
    folder, lines, chains = tmp_path_factory.mktemp("chains"), [], {model: {} for model in WAYS}
    for (model, way), chain in zip(WAYS.items(), chains.values()):
        for i, mesh in enumerate(way):
            for what in ("loaded", "on")[i == 0 :]:
                (place := folder / f"{model} {i} {what}").mkdir()
                flags = [*base, *MODELS[model], *MESHES[mesh], "--steps", i + 1 + (what == "on")]
                flags += ["--metrics", place / "metrics.jsonl", "--save-hf", place]
                flags += ["--save", place / "saved"] if what == "on" else []
                flags += ["--resume", chain[i - 1, "on"] / "saved"] if i else []
                lines.append([str(flag) for flag in flags])
                chain[i, what] = place
    (folder / "lines.json").write_text(json.dumps(lines))
    run("tests/run_many.py", ROOT / TRAIN, folder / "lines.json", nproc=4, timeout=200).check()
    return chains


@pytest.mark.parametrize(
    ("model", "i"), MOVES, ids=[f"{model}, {WAYS[model][i - 1]} to {WAYS[model][i]}" for model, i in MOVES]
)
def test_another_mesh_has_the_very_weights(model, i, chains):
    expected, found = (weights_in(chains[model][key]) for key in ((i - 1, "on"), (i, "loaded")))
    assert found.keys() == expected.keys() == reference.shapes(**SIZES, tied="not" in model).keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("model", WAYS)
def test_losses_go_on_as_if_never_interrupted(model, chains, text):
    folders, rows = [folder for (_, what), folder in chains[model].items() if what == "on"], []
    for folder in folders:
        rows += [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = 1 + len(folders)
    expected = reference.train(steps, BATCH, SEQ_LEN, text, torch.float64, clip=CLIP, tied="not" in model, **SIZES)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert [row["loss"] for row in rows] == pytest.approx(expected.losses, rel=EXACT)
    assert [row["grad_norm"] for row in rows] == pytest.approx(expected.grad_norms, rel=EXACT)
    for name, weight in weights_in(folders[-1]).items():
        assert (weight - expected.weights[name]).abs().max() < EXACT, name


SIGNAL = """
import os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook
steps = []

def hook(*_):
    steps.append(1)
    if os.environ["RANK"] == "2" and len(steps) == 2:
        os.kill(os.getpid(), signal.SIGTERM)

register_optimizer_step_post_hook(hook)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_sigterm_to_one_rank_saves_at_one_step_on_all_and_ends(base, text, tmp_path):
    """So ends a job whose time is up, or whose node is wanted back; code 143 tells the launcher that it is not done."""
    (tmp_path / "signal_at.py").write_text(SIGNAL)
    flags = [*base, *FIRST, "--steps", 6, "--save", tmp_path / "saved", "--metrics", tmp_path / "metrics.jsonl"]
    ended = run(tmp_path / "signal_at.py", ROOT / TRAIN, *flags, nproc=4)
    assert ended.codes == [143] * 4, ended.outputs
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-4"]  # two steps on: figures are read late
    run(TRAIN, *flags, "--resume", tmp_path / "saved", nproc=4).check()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    expected = reference.train(6, BATCH, SEQ_LEN, text, torch.float64, clip=CLIP, **SIZES)
    assert [row["loss"] for row in rows] == pytest.approx(expected.losses, rel=EXACT)
    assert [row["grad_norm"] for row in rows] == pytest.approx(expected.grad_norms, rel=EXACT)


# ---- refused ----
@pytest.fixture(scope="module")
def other_model(base, tmp_path_factory):
    """A run's checkpoint, and its weights in Hugging Face's layout, one file for each of two stages."""
    folder = tmp_path_factory.mktemp("other")
    run(TRAIN, *base, "--steps", 1, "--pp", 2, "--save", folder / "saved", "--save-hf", folder / "hf", nproc=2).check()
    return folder


def reshape(folder):
    """Halves the width of a matrix in the file of the first stage alone."""
    file = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:, :8].clone()
    save_file(tensors, file, {"format": "pt"})


BAD = {  # flags of a run, what happened to the folder, the line
    "a checkpoint of another width": (
        "--resume saved --dim 32", None, r"--resume another folder than \S+step-1: made with .* this run has "),
    "a checkpoint of a tied model": (
        "--resume saved --tie", None, r"--resume another folder than \S+step-1: made with .* this run has "),
    "a folder without a checkpoint": (
        "--resume hf", None, r"--resume another folder than \S+hf: no step-\*/checkpoint.json in "),
    "a file that is missing": (
        "--hf hf", lambda f: sorted(f.glob("*.safetensors"))[1].unlink(), r"\S+-00002-of-00002\S+ is missing: "),
    "weights of another shape": (
        "--hf hf", reshape, r"\S+-00001-\S+: model.layers.0.mlp.up_proj.weight is \(64, 8\), this model has \(64, 16"),
    "more layers than the files have": (
        "--hf hf --layers 5", None, r"\S+ lacks model.layers.4.input_layernorm.weight, and 8 more of 48 tensors"),
}  # fmt: skip


@pytest.fixture(scope="module")
def refusals(other_model, base, tmp_path_factory):
    """{bad: what each of 4 ranks says}, in one job: all ranks refuse alike, and their group stays whole."""
    (script := tmp_path_factory.mktemp("refuse") / "refuse.py").write_text(REFUSE)
    cases = []
    for i, (words, damage, _) in enumerate(BAD.values()):
        there = shutil.copytree(other_model, script.with_name(f"there{i}"))
        if damage:
            damage(there / "hf")
        flags = [str(there / word) if word in ("saved", "hf") else word for word in words.split()]
        few = ["--steps", 2, "--batch", 4, "--seq-len", SEQ_LEN, "--microbatch", 1, "--dtype", "float64"]
        sizes = few if "--hf" in flags else base  # else they would be asked for twice
        cases.append([TRAIN, *map(str, sizes), "--pp", "2", "--tp", "2", *flags])
    outputs = run(script, ROOT / TRAIN, json.dumps(cases), nproc=4).check().outputs
    said = [output.split("\nrefused\n") for output in outputs]
    return {bad: [parts[i] for parts in said] for i, bad in enumerate(BAD)}


@pytest.mark.parametrize("bad", BAD)
def test_what_does_not_belong_to_this_model_is_refused_in_one_line_on_every_rank(bad, refusals):
    for said in refusals[bad]:
        assert re.match(BAD[bad][2], said.splitlines()[-1]), said


# ---- Hugging Face ----
SEEN = """
import os, runpy, sys
import torch
out, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(script))
namespace = runpy.run_path(script)
Trainer, seen = namespace["Trainer"], []
forward_backward, loss_of = Trainer.forward_backward, Trainer.loss_of

def watch(self, text):
    forward_backward(self, text)
    torch.save([text, *seen], f"{out}.{os.environ['RANK']}")

def look(self, logits, targets):
    seen.append(logits.detach().clone())
    return loss_of(self, logits, targets)

Trainer.forward_backward, Trainer.loss_of = watch, look
namespace["main"]()
"""
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8}  # fmt: skip
KINDS = {"llama 2": {}, "llama 3.1, tied": {"rope_parameters": LLAMA3, "tie_word_embeddings": True}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", ["--pp 2 --dp 1 --tp 2", "--pp 1 --dp 2 --tp 2 --sequence-parallel"])
def test_logits_of_loaded_weights_are_those_of_transformers(mesh, kind, text, tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    sizes = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=256)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, intermediate_size=64, initializer_range=0.2, **KINDS[kind])
    theirs = transformers.LlamaForCausalLM(config).double().eval()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size=50_000)
    (tmp_path / "seen.py").write_text(SEEN)
    flags = ["--steps", 1, "--batch", 4, "--microbatch", 1, "--seq-len", 24, "--dtype", "float64", "--data", text]
    script = tmp_path / "seen.py", tmp_path / "seen", ROOT / TRAIN
    run(*script, *flags, *mesh.split(), "--hf", tmp_path / "hf", nproc=4).check()
    halves = [torch.load(tmp_path / f"seen.{rank}", weights_only=True) for rank in (2, 3)]  # of the last stage
    tokens = halves[0][0][:, :-1]
    found = torch.cat([torch.cat(half[1:]) for half in halves], dim=-1)
    with torch.no_grad():
        expected = theirs(tokens).logits
    assert expected.std() > 0.1
    assert found.shape == expected.shape == (len(tokens), 24, 256)
    assert (found - expected).abs().max() < LOGITS


# ---- memory ----
RESIDENT = """
import ctypes, os, re, runpy, sys
ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD, fixed: a matrix never lies in the heap, where freed pages stay
script = sys.argv[1]
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))
namespace = runpy.run_path(script)
build, Trainer = namespace["build_on_meta"], namespace["Trainer"]
train, init = namespace["train_with_mesh"], Trainer.__init__

def resident(word):
    return 1024 * int(re.search(word + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

def start(*args):
    global before, code
    ctypes.CDLL(None).malloc_trim(0)  # and free pages that the process had before cannot go while it is watched
    open("/proc/self/clear_refs", "w").write("5")  # VmHWM, the most so far, begins anew
    before, code = resident("VmRSS"), resident("RssFile")
    return build(*args)

def watched(self, *args):
    init(self, *args)
    mine = sum(p.to_local().nbytes for p in self.named.values())
    print("resident", resident("VmHWM") - before, code, mine, max(4 * p.numel() for p in self.named.values()))

train.__globals__["build_on_meta"], Trainer.__init__ = start, watched
namespace["main"]()
"""
# Code that runs for the first time, the mesh, schedules: 9 MiB seen, 21 with a CUDA build. The model takes 169.
OVERHEAD = 40 * 2**20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone tells a process its own peak")
def test_no_rank_ever_holds_the_model_while_it_is_built(tmp_path):
    """The process's own memory, as Linux counts it: from the mesh to the optimizer."""
    (tmp_path / "resident.py").write_text(RESIDENT)
    sizes = ["--dim", 768, "--layers", 6, "--heads", 8, "--kv-heads", 8, "--batch", 4, "--seq-len", 8, "--steps", 1]
    result = run(tmp_path / "resident.py", ROOT / TRAIN, *sizes, "--pp", 2, "--tp", 2, nproc=4).check()
    for output in result.outputs:
        (line,) = re.findall(r"resident (\d+) (\d+) (\d+) (\d+)", output)
        grown, code, mine, matrix = map(int, line)
        assert 40 * 2**20 < mine < grown + code  # of files, torch's code, the kernel may drop pages meanwhile
        assert grown < mine + matrix + OVERHEAD
