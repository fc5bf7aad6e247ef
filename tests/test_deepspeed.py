"""05_zero/train.py: the one loss column at every ZeRO stage, its checkpoints, what it refuses, what a rank holds."""

import gc
import importlib
import importlib.util
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import warnings
from typing import ClassVar

import pytest
import reference
import torch
from runner import ROOT, run
from safetensors.torch import load_file
from stall import stall_before

TRAIN = "05_zero/train.py"
# Sums in another order differ by some 1e-7 (float32) per operation, and there are thousands.
FLOAT32 = 1e-5
# AdamW divides by the gradient's own size: where a gradient is near zero, its rounding error becomes a full step. So a
# weight may also move as gradients do that are off by the tolerance times their tensor's root mean square.
# bfloat16 keeps 8 bits and float16 11: products are off by 4e-3 and 5e-4 each, the loss averages over many.
HALF_LOSS = {"bfloat16": 1e-3, "float16": 1e-4}
HALF_NORM = {"bfloat16": 1e-2, "float16": 2e-3}  # a norm averages less: largest found, 2.5e-3 and 4e-4
BYTES = 0.02  # DeepSpeed pads its flat parts, and keeps the norms of stage 3 whole
STEPS, BATCH, SEQ_LEN = 3, 16, 32
SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2}
STAGES = [0, 1, 2, 3]
each_stage = pytest.mark.parametrize("stage", STAGES)


@pytest.fixture(scope="session", autouse=True)
def deepspeed():
    """Imports here what every rank imports, so that a forked one has it."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # as the script says it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which DeepSpeed still uses
        module = pytest.importorskip("deepspeed", reason="pip install deepspeed==0.19.8")
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")  # the first engine does; with inductor
    gc.freeze()  # DeepSpeed collects garbage at every start: the ranks need not look at all of this
    return module


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of real text with 37 windows: 2 steps an epoch and 5 windows over, so that 3 steps see 2 epochs."""
    path = tmp_path_factory.mktemp("text") / "text.py"
    letters = reference.text_of(None)[5000 : 5000 + 37 * SEQ_LEN + 5]
    path.write_bytes(bytes(letter * 37 % 256 for letter in letters))
    return str(path)


@pytest.fixture(scope="session")
def base(text):
    sizes = [word for name, n in SIZES.items() for word in (f"--{name.replace('_', '-')}", n)]
    return ["--steps", STEPS, "--batch", BATCH, "--seq-len", SEQ_LEN, "--data", text, *sizes]


@pytest.fixture(scope="session")
def serial(text):
    return reference.train(STEPS, BATCH, SEQ_LEN, text, torch.float32, **SIZES)


@pytest.fixture(scope="session")
def gather_all(tmp_path_factory):
    """A config with which stage 3 splits every parameter: the matrices here are smaller than what it leaves whole."""
    path = tmp_path_factory.mktemp("config") / "gather_all.json"
    config = json.loads((ROOT / "05_zero/ds_config.json").read_text())
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def extensions(tmp_path_factory):
    """Where DeepSpeed would compile to."""
    return tmp_path_factory.mktemp("extensions")


class Trained:
    def __init__(self, folder):
        self.rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        saved = folder / "model.safetensors"
        self.weights = load_file(saved) if saved.exists() else {}
        self.folder = folder

    def column(self, name):
        return [row[name] for row in self.rows]


@pytest.fixture(scope="session")
def train_many(base, extensions, tmp_path_factory):
    def train_many(cases, nproc, script=ROOT / TRAIN, save=True):
        """Runs the script with each list of flags, all in the same processes; returns one Trained for each."""
        folder = tmp_path_factory.mktemp("many")
        places = [folder / str(i) for i in range(len(cases))]
        flags = []
        for place, case in zip(places, cases):
            place.mkdir()
            flags.append([*base, "--metrics", place / "metrics.jsonl", *["--save", place] * save, *case])
        (folder / "cases.json").write_text(json.dumps([[str(flag) for flag in case] for case in flags]))
        env = {"TORCH_EXTENSIONS_DIR": str(extensions), "DS_ACCELERATOR": "cpu"}
        run("tests/run_many.py", script, folder / "cases.json", nproc=nproc, env=env, timeout=200).check()
        return [Trained(place) for place in places]

    return train_many


def differs(trained, serial, loss=FLOAT32, norm=FLOAT32, weights=FLOAT32, first=0):
    """Returns what is not equal to the reference from step `first` on: a list of words, empty when all is."""
    found = []
    if trained.column("loss") != pytest.approx(serial.losses[first:], rel=loss):
        found.append("loss")
    if trained.column("grad_norm") != pytest.approx(serial.grad_norms[first:], rel=norm):
        found.append("grad_norm")
    assert trained.weights.keys() == serial.weights.keys()
    for name, expected in serial.weights.items():
        if ((trained.weights[name] - expected).abs() > weights * (1 + serial.drift[name])).any():
            found.append(name)
    return found


# ---- equality ----
ACCUMULATION = [1, 4]


@pytest.fixture(scope="session")
def matrix(train_many, gather_all):
    """Runs all stages with and without accumulation at one number of ranks; {(stage, accumulation): Trained}."""
    done = {}

    def matrix(nproc):
        if nproc not in done:
            keys = [(stage, steps) for stage in STAGES for steps in ACCUMULATION]
            config = {(3, 4): ["--config", gather_all]}
            cases = [
                ["--stage", stage, "--microbatch", BATCH // nproc // steps, *config.get((stage, steps), [])]
                for stage, steps in keys
            ]
            done[nproc] = dict(zip(keys, train_many(cases, nproc)))
        return done[nproc]

    return matrix


@each_stage
@pytest.mark.parametrize("accumulation", ACCUMULATION)
@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_losses_gradient_norms_and_weights_equal_the_serial_reference(nproc, accumulation, stage, matrix, serial):
    assert max(serial.grad_norms) > 1.0  # so that --clip 1.0 clips
    trained = matrix(nproc)[stage, accumulation]
    assert trained.column("step") == list(range(1, STEPS + 1))
    assert differs(trained, serial) == []


OPTIONS = {
    **{f"offload {stage}": ["--stage", stage, "--offload", "cpu", "--microbatch", 4] for stage in (1, 2, 3)},
    **{f"bucket {stage}": ["--stage", stage, "--bucket-size", 1000, "--microbatch", 4] for stage in (1, 2, 3)},
    **{f"no overlap {stage}": ["--stage", stage, "--no-overlap", "--microbatch", 4] for stage in (2, 3)},
    **{f"save every step {stage}": ["--stage", stage, "--save-every", 1] for stage in (1, 3)},
    **{f"checkpoint {stage}": ["--stage", stage, "--checkpoint-activations"] for stage in (2, 3)},
}
HALF = {f"{dtype} {stage}": ["--stage", stage, "--dtype", dtype] for dtype in HALF_LOSS for stage in STAGES}


@pytest.fixture(scope="session")
def options(train_many, gather_all):
    """Runs all of these on 2 ranks, in the same processes; {name: Trained}."""
    flags = OPTIONS | {name: [*case, "--microbatch", 4, "--config", gather_all] for name, case in HALF.items()}
    return dict(zip(flags, train_many(list(flags.values()), 2)))


@pytest.mark.parametrize("option", OPTIONS)
def test_no_option_changes_the_losses(option, options, serial):
    assert differs(options[option], serial) == []


@pytest.mark.parametrize("case", HALF)
def test_half_precision_follows_the_float32_losses(case, options, serial):
    dtype = case.split()[0]
    trained = options[case]
    assert trained.column("loss") == pytest.approx(serial.losses, rel=HALF_LOSS[dtype])
    assert trained.column("grad_norm") == pytest.approx(serial.grad_norms, rel=HALF_NORM[dtype])
    assert trained.column("loss") != pytest.approx(serial.losses, rel=1e-7)
    # float32 masters are saved: rounded to the data type, the weights would be others
    assert {weight.dtype for weight in trained.weights.values()} == {torch.float32}
    assert any((w != w.to(getattr(torch, dtype))).any() for w in trained.weights.values())


def test_no_run_compiles_an_extension(matrix, options, extensions):
    assert matrix(2)
    assert options
    assert list(extensions.iterdir()) == []


# ---- what a rank holds ----
def formula(dtype, stage, nproc):
    """Rajbhandari et al., section 5: bytes per parameter of parameters, gradients, and K = 12 of optimizer states.

    K: float32 masters, which DeepSpeed's stages 1 to 3 keep in float32 as well, and AdamW's two averages.
    """
    size = 4 if dtype == "float32" else 2
    k = 8 if (dtype, stage) == ("float32", 0) else 12
    return size / (nproc if stage > 2 else 1) + size / (nproc if stage > 1 else 1) + k / (nproc if stage > 0 else 1)


# dim 256 and 4 layers: large enough for padding and norms to be little
LARGE = {"dim": 256, "layers": 4, "heads": 4, "kv_heads": 2}
HELD = [(dtype, stage) for dtype in ("float32", "bfloat16") for stage in STAGES]


@pytest.fixture(scope="session")
def large(train_many):
    few = ["--dim", 256, "--layers", 4, "--steps", 1, "--batch", 2]
    cases = [[*few, "--dtype", dtype, "--stage", stage] for dtype, stage in HELD]
    return dict(zip(HELD, train_many(cases, 2, save=False)))


@pytest.mark.parametrize(("dtype", "stage"), HELD)
def test_states_of_a_rank_are_the_papers_formula(dtype, stage, large):
    (row,) = large[dtype, stage].rows
    parameters = sum(math.prod(shape) for shape in reference.shapes(**LARGE).values())
    assert row["state_mib"] * 2**20 == pytest.approx(formula(dtype, stage, 2) * parameters, rel=BYTES)
    assert row["peak_mib"] is None


# ---- checkpoints ----
@pytest.fixture(scope="session")
def saved(train_many):
    """Checkpoints of 2 ranks after step 1, of every stage; DeepSpeed's and, beside them, the whole weights."""
    return train_many([["--stage", stage, "--steps", 1] for stage in STAGES], 2)


@pytest.fixture(scope="session")
def resumed(saved, train_many):
    done = {}

    def resumed(nproc):
        if nproc not in done:
            cases = [["--stage", stage, "--resume", saved[stage].folder] for stage in STAGES]
            done[nproc] = train_many(cases, nproc)
        return done[nproc]

    return resumed


@each_stage
@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_run_resumed_by_any_number_of_ranks_goes_on_as_if_nothing_had_happened(nproc, stage, resumed, serial):
    trained = resumed(nproc)[stage]
    assert trained.column("step") == [2, 3]
    assert differs(trained, serial, first=1) == []


def test_learning_rate_of_the_flag_counts_and_not_the_checkpoints(saved, train_many):
    stages = [0, 1, 3]
    cases = [["--stage", stage, "--resume", saved[stage].folder, "--steps", 2, "--lr", 1e-9] for stage in stages]
    for stage, after in zip(stages, train_many(cases, 2)):
        for name, weight in saved[stage].weights.items():
            assert torch.allclose(after.weights[name], weight, rtol=0, atol=1e-7), name


def test_saved_folder_is_a_hugging_face_llama(matrix):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    trained = matrix(2)[3, 4]
    assert {name: tuple(w.shape) for name, w in trained.weights.items()} == reference.shapes(**SIZES)
    theirs = transformers.LlamaForCausalLM.from_pretrained(trained.folder)
    tokens = torch.arange(SEQ_LEN)[None] * 7 % 256
    ours = reference.logits(trained.weights, tokens, **SIZES)
    assert torch.allclose(theirs(tokens).logits, ours, rtol=0, atol=FLOAT32)
    assert theirs.state_dict().keys() == trained.weights.keys()  # nothing was made up at load


DIE = "    if rank == 1 and step == 2:\n        os.kill(os.getpid(), 9)\n"


def test_run_killed_while_it_saves_leaves_the_last_whole_checkpoint(plant, base, serial, tmp_path, train_many):
    place = "    finish_checkpoint(path, run"
    killed = plant(TRAIN, (place, DIE + place))
    save = tmp_path / "save"
    flags = [*base, "--stage", 2, "--save", save, "--save-every", 1, "--timeout", 5]
    assert run(killed, *flags, nproc=2).codes == [1, -9]
    assert (save / "step-2").exists()  # half of it was there
    (trained,) = train_many([["--stage", 2, "--resume", save]], 2)
    assert differs(trained, serial, first=1) == []


def test_torn_checkpoint_is_refused_by_name_on_every_rank(saved, base, tmp_path):
    torn = tmp_path / "torn"
    shutil.copytree(saved[3].folder, torn)
    part = sorted(torn.rglob("*optim_states.pt"))[-1]
    part.write_bytes(part.read_bytes()[:-100])
    result = run(TRAIN, *base, "--resume", torn, nproc=2)
    assert result.codes == [2, 2]
    assert all("torn: " in output and part.name in output for output in result.outputs)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dim", 64], "'sizes': [32, 2, 4, 2, 256]"),
        (["--seed", 1], "'seed': 0"),
        (["--stage", 2], "this run has {'stage': 2, 'dtype': 'float32', 'fused': False}"),
        (["--dtype", "bfloat16"], "'dtype': 'float32', 'fused': False}, this run has {'stage': 3, 'dtype': 'bfloat16'"),
        (["--resume", "nowhere"], "nowhere"),
    ],
)
def test_resume_of_another_run_is_refused(flags, words, saved, base):
    result = run(TRAIN, *base, "--resume", saved[3].folder, *flags, nproc=2)
    assert result.codes == [2, 2]
    assert all(words in output and output.count("\n") == 1 for output in result.outputs)


# ---- the config ----
ZERO = '{"zero_optimization": {"stage": 3, %s}}'
REFUSED = {  # what is wrong: the file, flags, words of the error
    "sizes": (
        '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}',
        [],
        "train_batch_size 64 is not 4 x 4 x 2 ranks = 32: leave them out, --batch and --microbatch give all three",
    ),
    "another batch": ('{"train_batch_size": 64}', [], "train_batch_size 64, --batch and --microbatch say 16"),
    "another clip": ('{"gradient_clipping": 0.5}', [], "gradient_clipping 0.5, --clip say 1.0"),
    "auto": ('{"train_batch_size": "auto"}', [], "leave the batch sizes out"),
    "text for a number": ('{"train_batch_size": "16"}', [], "train_batch_size 16"),
    "mistyped": ('{"gradient_cliping": 1.0}', [], 'no "gradient_cliping": did you mean "gradient_clipping"?'),
    "unknown": ('{"qqqq": 1}', [], 'no "qqqq": leave it out'),
    "mistyped in zero": (
        ZERO % '"overlap_com": true',
        [],
        'no "overlap_com" in zero_optimization: did you mean "overlap_comm"?',
    ),
    "removed": ('{"amp": {"enabled": true}}', [], 'removed "amp": use "bf16", "fp16" or "torch_autocast"'),
    "gone": ('{"sparse_attention": {}}', [], 'removed "sparse_attention": use torch.nn.attention.flex_attention'),
    "without successor": ('{"nebula": {}}', [], 'removed "nebula": it has no successor'),
    "removed in zero": (
        ZERO % '"cpu_offload_params": true',
        [],
        'removed "cpu_offload_params" in zero_optimization: use "offload_param"',
    ),
    "mics": (ZERO % '"mics_shard_size": 2', [], 'removed "mics_shard_size" in zero_optimization: use'),
    "two data types": ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', [], "enables bf16 and fp16"),
    "old name, too": ('{"bfloat16": {"enabled": true}, "fp16": {"enabled": true}}', [], "enables bfloat16 and fp16"),
    "one by two names": ('{"bf16": {}, "bfloat16": {}}', [], "one by two names"),
    "another data type": ('{"bf16": {"enabled": true}}', [], "enables bf16: use --dtype bfloat16, not float32"),
    "two optimizers": ('{"optimizer": {"type": "AdamW"}}', [], 'names an "optimizer", the script gives one'),
    "stage 4": ('{"zero_optimization": {"stage": 4}}', [], '"stage" 4 must be 0, 1, 2 or 3'),
    "zero is true": ('{"zero_optimization": true}', [], '"zero_optimization" is no object'),
    "twice": ('{"zero_optimization": {"stage": 1, "stage": 2}}', [], '"stage" stands there twice'),
    "no JSON": ('{"fp16": {}\n "bf16": {}}', [], "Expecting ',' delimiter at line 2, column 2"),
    "a list": ("[]", [], "holds a list"),
    "missing": (None, [], "No such file or directory"),
    "value": (ZERO % '"reduce_bucket_size": "many"', [], "DeepSpeed refuses it: "),
    "key of a block": ('{"bf16": {"enable": true}}', [], "DeepSpeed refuses it: "),
    "bucket of nothing": ("{}", ["--bucket-size", 0], "--bucket-size 0 must be above 0"),
    "offload of nothing": ("{}", ["--offload", "cpu"], "use --stage 1, 2 or 3, not 0"),
    "fused at stage 0": ("{}", ["--fused"], "use --stage 1, 2 or 3, not 0"),
    "float64": ("{}", ["--dtype", "float64"], "--dtype float64 is nothing that DeepSpeed trains"),
    "batch": ("{}", ["--batch", 15], "--batch 15 is not divisible by 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistake_is_one_line_on_every_rank(case, base, tmp_path):
    content, flags, words = REFUSED[case]
    config = tmp_path / "config.json"
    if content is not None:
        config.write_text(content)
    result = run(TRAIN, *base, "--config", config, *flags, nproc=2)
    assert result.codes == [2, 2]
    for rank, output in enumerate(result.outputs):
        assert output.startswith(f"[rank{rank}] error: ")
        assert output.count("\n") == 1
        assert words in output


def load_module(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "05_zero" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Asked(dict):
    """Remembers the keys that somebody looks for."""

    keys_asked: ClassVar[set[str]] = set()

    def get(self, key, default=None):
        self.keys_asked.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.keys_asked.add(key)
        return super().__contains__(key)

    def __copy__(self):
        return Asked(self)

    def keys(self):
        return self


def test_known_and_removed_keys_are_those_of_the_installed_deepspeed():
    theirs = importlib.import_module("deepspeed.runtime.config")
    theirs.DeepSpeedConfig(Asked(train_batch_size=1))
    ours = load_module("ds_config")
    removed = {*ours.REMOVED, *ours.GONE.split()}
    known = set(ours.KNOWN_KEYS.split())
    assert known | removed == Asked.keys_asked | {"sequence_parallel_size"}  # asked for in a running job only
    assert not known & removed
    assert removed == set(theirs._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert set(ours.REMOVED_ZERO) >= set(theirs._REMOVED_ZERO_CONFIG_KEYS)
    assert len(ours.KNOWN_KEYS.split()) == len(known)


def test_missing_deepspeed_is_one_line(plant, base):
    first = "    args = parse_args()\n"
    absent = plant(TRAIN, (first, '    sys.modules["deepspeed"] = None\n' + first))
    result = run(absent, *base, nproc=2)
    assert result.codes == [2, 2]
    assert all("pip install deepspeed==0.19.8" in output and output.count("\n") == 1 for output in result.outputs)


def test_rank_that_stalls_ends_the_job_within_the_timeout(plant, base):
    """In DeepSpeed's own group, too, which waits half an hour if nobody tells it otherwise."""
    stalled = plant(TRAIN, *stall_before("            engine.step()\n"))
    result = run(stalled, *base, "--stage", 2, "--timeout", 2, nproc=2)
    assert result.codes == [1, -9]
    assert "Timed out waiting 2000ms" in result.outputs[0]


THREADS = """
import os, runpy, sys
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
for stage in "0123":
    sys.argv += ["--stage", stage]
    runpy.run_path(sys.argv[0], run_name="__main__")
    names = [open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")]
    print(f"stage {stage} leaves", *[name.strip() for name in names if "gloo" in name])
"""


def test_no_thread_of_a_process_group_is_left_at_the_end(base, tmp_path):
    """DeepSpeed keeps process groups; a thread of gloo that is there at the exit aborts it, now and then."""
    (tmp_path / "threads.py").write_text(THREADS)
    command = [sys.executable, "threads.py", ROOT / TRAIN, *base, "--steps", 2]  # this process has DeepSpeed already
    done = subprocess.run(map(str, command), capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.findall("stage .* leaves.*", done.stdout) == [f"stage {stage} leaves" for stage in range(4)]


# ---- the launchers ----
def test_deepspeeds_launcher_starts_it_and_nothing_but_the_table_is_printed(base, tmp_path, serial, deepspeed):
    env = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"} | {"OMP_NUM_THREADS": "1"}
    metrics = tmp_path / "metrics.jsonl"
    flags = [str(flag) for flag in [*base, "--metrics", metrics, "--stage", 2]]
    with socket.create_server(("127.0.0.1", 0)) as free:
        launcher = f"-m deepspeed.launcher.runner --num_gpus 2 --master_port {free.getsockname()[1]}".split()
    command = [sys.executable, *launcher, str(ROOT / TRAIN), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert losses == pytest.approx(serial.losses, rel=FLOAT32)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("[20")]  # the launcher's
    versions = f"torch {torch.__version__} | deepspeed {deepspeed.__version__}"
    assert lines[0] == f"{versions} | gloo | cpu | dp 2 | stage 2"
    assert lines[1] == " step |   loss | grad_norm | tokens/s"
    assert [re.match(r" +(\d+) \| ", line) is not None for line in lines[2:-1]] == [True] * STEPS
    assert re.fullmatch(r"[\d,]+ bytes of parameters, .+ on each rank", lines[-1])


TORCHRUNS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_python_alone_is_one_rank(base):
    result = run(TRAIN, *base, env=dict.fromkeys(TORCHRUNS, "")).check()
    assert "| dp 1 | stage 3\n" in result.outputs[0]


# ---- proof that the equality test sees ----
BACKWARD = "part * len(texts) * world_size * missing_scale(engine, args.stage)"
FAULTS = {  # edits, and the flags that show them
    "a mean over microbatches": [(BACKWARD, BACKWARD.replace(" * len(texts)", ""))],
    "a mean over ranks": [(BACKWARD, BACKWARD.replace(" * world_size", ""))],
    "no division by the global number of tokens": [('reduction="sum") / tokens', 'reduction="sum")')],
    "no clipping": [("ds_config.py", 'config |= batch_sizes(args, world_size) | {"gradient_clipping": args.clip}',
                     'config |= batch_sizes(args, world_size) | {"gradient_clipping": 0.0}')],  # left out, it is 1.0
    "the same data on every rank": [("[rank::world_size]", "[0::world_size]")],
    "the loss of one rank": [("        dist.all_reduce(loss)", "        #")],
    "a step on zero gradients at the start": [
        ("    undo_step_zero(engine)", "    None"), "--stage 0 --dtype bfloat16"],
    "no loss scale": [
        (" * missing_scale(engine, args.stage)", ""), "--stage 0 --dtype float16"],
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_equality_test_turns_red_when_there_is(fault, plant, train_many, serial):
    edits = [edit for edit in FAULTS[fault] if isinstance(edit, tuple)]
    more = [flag for edit in FAULTS[fault] if isinstance(edit, str) for flag in edit.split()]
    case = ["--stage", 2, "--microbatch", 4, *more]
    (trained,) = train_many([case], 2, plant(TRAIN, *edits), save=False)
    loss, norm = (HALF_LOSS[more[-1]], HALF_NORM[more[-1]]) if more else (FLOAT32, FLOAT32)
    same = [trained.column("loss") == pytest.approx(serial.losses, rel=loss),
            trained.column("grad_norm") == pytest.approx(serial.grad_norms, rel=norm)]  # fmt: skip
    assert not all(same)
