"""07_diagnostics/compare.py: its table on two ranks, bytes against the formulas, planted faults, bad input."""

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from math import prod

import pytest
from runner import ROOT, run

sys.path.append(str(ROOT / "07_diagnostics"))
import compare as script
import forked
import layouts
import observe

sys.path.pop()
for module in ("compare", "forked", "layouts", "observe", "script"):
    del sys.modules[module]

SCRIPT = "07_diagnostics/compare.py"
BARE = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")
DIM, LAYERS, HEADS, KV_HEADS, BATCH, SEQ_LEN, STEPS = 32, 4, 4, 2, 8, 16, 3
MODEL = dict(dim=DIM, layers=LAYERS, heads=HEADS, kv_heads=KV_HEADS, batch=BATCH, seq_len=SEQ_LEN, steps=STEPS)
FLAGS = [word for name, size in MODEL.items() for word in (f"--{name.replace('_', '-')}", size)]
HIDDEN, VOCAB, FLOAT = 128, 256, 4
BLOCK = 2 * DIM + 2 * DIM * DIM + 2 * DIM * DIM * KV_HEADS // HEADS + 3 * DIM * HIDDEN
PARAMETERS = 2 * VOCAB * DIM + DIM + LAYERS * BLOCK
TOKENS = BATCH * SEQ_LEN  # of a step
FLOAT32 = 1e-5  # promised by DESIGN and README: rounding, amplified by AdamW in a few steps


@pytest.fixture(scope="module")
def compare(tmp_path_factory):
    """Runs compare.py in a fork, as from a shell: returns (exit code, all that it printed, the JSON object)."""

    def compare(*flags, path=ROOT / SCRIPT):
        place = tmp_path_factory.mktemp("compare")
        outputs = ["--json", place / "all.json", "--picture", place / "all.png"]
        result = run(path, *FLAGS, *outputs, *flags, env=BARE, timeout=150)
        text = (place / "all.json").read_text() if (place / "all.json").exists() else "{}"
        return result.codes[0], result.outputs[0], json.loads(text) | {"picture": place / "all.png"}

    return compare


def by_command(answer):
    return {row["command"]: row for row in answer["rows"][1:]}


def lines_of(output):
    """{(script and flags, layout): the row's line}; without the folder, which stands above its rows."""
    cells = [[cell.strip() for cell in line.split("|")] for line in output.splitlines() if line.startswith("  ")]
    layout = re.compile(r"1 rank|(dp|tp|pp) \d.*")
    return {(one[0], one[1]): " | ".join(one) for one in cells if len(one) > 2 and layout.fullmatch(one[1])}


# ---- the table ----
@pytest.fixture(scope="module")
def split(compare):
    return compare("--only", "03,04")


@pytest.fixture(scope="module")
def zero(compare):
    return compare("--only", "02,05")


@pytest.mark.parametrize("which", ["split", "zero"])
def test_every_row_is_printed_and_equal_to_one_process(which, request):
    code, output, answer = request.getfixturevalue(which)
    assert code == 0, output
    rows = answer["rows"]
    assert [row["deviation"] for row in rows if not row["deviation"] < FLOAT32] == []
    assert all(len(row["loss"]) == len(row["grad_norm"]) == STEPS for row in rows)
    assert f"{len(rows) - 1} of {len(rows) - 1} rows within 1e-05 of one process" in output
    lines = lines_of(output)
    assert len(lines) == len(rows)
    for row in rows[1:]:
        assert f"{row['deviation']:.1e}" in lines[f"{row['script']} {row['flags']}".strip(), row["layout"]]
    assert answer["picture"].read_bytes().startswith(b"\x89PNG")
    assert not (ROOT / "compare.png").exists()


def test_states_are_those_that_each_layout_leaves_on_a_rank(split, zero):
    whole, half = (16 * PARAMETERS / n / 2**20 for n in (1, 2))
    rows = by_command(split[2]) | by_command(zero[2])
    close = dict(rel=0.03)  # the norms are whole on every rank; AdamW counts its steps in 4 bytes for each tensor
    assert rows["02_ddp/train.py"]["state_mib"] == pytest.approx(whole, **close)
    for command in ("03_tensor_parallel/train.py", "04_pipeline/train.py --schedule 1f1b", "05_zero/fsdp.py --stage 3"):
        assert rows[command]["state_mib"] == pytest.approx(half, **close)


# ---- bytes ----
# With 2 ranks the factors are 1 for all_reduce, 1/2 of the full size for all_gather and reduce_scatter, 1 for a send.
def test_bytes_of_data_parallelism_are_one_all_reduce_of_the_gradients(zero):
    rows = by_command(zero[2])
    loss = 2 * FLOAT  # and, for the signals, a flag
    for command in ("02_ddp/train.py", "02_ddp/train.py --microbatch 2"):
        assert rows[command]["bytes_sent"] == FLOAT * PARAMETERS + loss
    for command in ("02_ddp/from_scratch.py", "02_ddp/from_scratch.py --microbatch 2"):
        assert rows[command]["bytes_sent"] == FLOAT * PARAMETERS + FLOAT


def test_bytes_of_tensor_parallelism_are_four_all_reduces_a_block(split):
    rows = by_command(split[2])
    activations = (4 * LAYERS + 2) * TOKENS * DIM + 3 * TOKENS  # embedding and head; three numbers a token for the loss
    tensors = 3 + 9 * LAYERS  # DTensor sums the squared norm of each
    norms = (2 * LAYERS + 1) * DIM  # their gradients, with sequence parallelism
    sent = {
        "train.py": activations + tensors,
        "train.py --sequence-parallel": activations + tensors + norms,
        "from_scratch.py": activations + 1,
        "from_scratch.py --sequence-parallel": activations + 1 + norms,
    }
    for name, elements in sent.items():
        assert rows[f"03_tensor_parallel/{name}"]["bytes_sent"] == FLOAT * elements, name


@pytest.mark.parametrize("name", ["04_pipeline/train.py", "04_pipeline/from_scratch.py"])
def test_bytes_of_a_pipeline_are_the_activations_between_its_stages(name, split):
    rows, scalars = by_command(split[2]), 2 * FLOAT  # loss, square of the norm
    for schedule, boundaries in (("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 3)):
        sent = rows[f"{name} --schedule {schedule}"]["bytes_sent"]
        assert sent == boundaries * FLOAT * TOKENS * DIM + scalars, schedule


def test_bytes_of_zero_are_those_of_the_paper(zero):
    rows = by_command(zero[2])
    scalars = 2 * FLOAT  # loss and norm in one all_reduce
    for stage, times in ((1, 2), (2, 2), (3, 3)):  # (m + 1) and 3 m, for m = 1 microbatch
        sent = rows[f"05_zero/from_scratch.py --stage {stage}"]["bytes_sent"]
        assert sent == times * FLOAT * PARAMETERS / 2 + scalars, stage


def test_bytes_of_deepspeed_and_fsdp_are_as_their_page_says(zero):
    """DeepSpeed all-reduces the gradients at stages 1 and 2, and gathers a small model once at stage 3."""
    rows, small = by_command(zero[2]), dict(rel=0.01)  # numbers for norms and overflows
    whole = FLOAT * PARAMETERS / 2
    for stage, times in ((0, 2), (1, 3), (2, 3), (3, 2)):
        sent = rows[f"05_zero/train.py --stage {stage}"]["bytes_sent"]
        assert sent == pytest.approx(times * whole, **small), stage
    assert rows["05_zero/fsdp.py --stage 1"]["bytes_sent"] == pytest.approx(2 * whole, **small)
    unsent = FLOAT * 2 * VOCAB * DIM / 2  # the embedding is not gathered for backward, nor the head again
    assert rows["05_zero/fsdp.py --stage 3"]["bytes_sent"] == pytest.approx(3 * whole - unsent, **small)


def entry(name, *frames):
    return {"profiling_name": name, "frames": [{"filename": f"/torch/{file}", "name": call} for file, call in frames]}


@pytest.mark.parametrize(
    ("recorded", "op"),
    [
        (entry("gloo:all_reduce", ("_engine.py", "backward")), "all_reduce"),  # DDP's reducer
        (entry("gloo:all_reduce", ("distributed_c10d.py", "all_reduce"), ("x.py", "reduce_scatter")), "all_reduce"),
        (entry("gloo:all_reduce", ("distributed_c10d.py", "reduce_scatter_single")), "reduce_scatter"),
        (entry("gloo:all_reduce", ("_ops.py", "__call__"), ("_functional_collectives.py", "all_reduce")), "all_reduce"),
        (
            entry("gloo:all_reduce", ("_ops.py", "_"), ("_functional_collectives.py", "reduce_scatter_tensor")),
            "reduce_scatter",
        ),
        (entry("gloo:all_gather"), "all_gather"),
        (entry("nccl:_all_gather_base"), "all_gather"),
        (entry("nccl:_reduce_scatter_base"), "reduce_scatter"),
        (entry("nccl:allreduce_coalesced"), "all_reduce"),
        (entry("nccl:all_to_all"), "all_to_all"),
        (entry("nccl:broadcast"), "broadcast"),
    ],
)
def test_collective_is_known_by_what_the_script_called(recorded, op):
    assert observe.operation(recorded) == op


@pytest.mark.parametrize(
    ("op", "given", "sent"),
    [
        ("all_reduce", 800, 1200),  # 2 * 3/4
        ("all_gather", 200, 600),  # of the full 800, 3/4
        ("reduce_scatter", 800, 600),
        ("all_to_all", 800, 600),
        ("broadcast", 800, 800),
    ],
)
def test_factors_are_those_of_nccl_tests(op, given, sent):
    assert observe.sent_bytes(op, given, 4) == sent


# ---- rows ----
@pytest.mark.parametrize("ranks", layouts.RANKS)
def test_every_training_script_has_a_row_in_a_layout_of_all_ranks(ranks):
    rows = layouts.choose_rows(ranks, list(layouts.FOLDERS), 32, 4, 4)
    scripts = {f"{path.parent.name}/{path.name}" for path in ROOT.glob("0[2-6]_*/*.py")}
    trains = {name for name in scripts if name.endswith(("/train.py", "/from_scratch.py", "/fsdp.py"))}
    assert {f"{row.folder}/{row.script}" for row in rows} == trains
    assert len({row.command for row in rows[1:]}) == len(rows) - 1
    for row in rows[1:]:
        assert row.ranks == ranks
        assert prod(int(part.split()[1]) for part in row.layout.partition(",")[0].split(" x ")) == ranks, row
    assert [row.ranks for row in rows[:2]] == [1, ranks]
    assert any("pp 2 x dp 2 x tp 2" in row.layout for row in rows) == (ranks == 8)


def test_rows_of_four_ranks_run():
    args = argparse.Namespace(**MODEL, seed=0, dtype="float32", timeout=100, data=None)
    one, *rows = layouts.choose_rows(4, ["06"], BATCH, LAYERS, HEADS)
    meshes = [row for row in rows if " x " in row.layout]
    assert [row.layout for row in meshes] == ["pp 2 x dp 2", "dp 2 x tp 2", "pp 2 x tp 2"]
    reference, *found = (script.run_row(row, args, cuda=False) for row in (one, *meshes))
    assert max(script.deviation(each, reference) for each in found) < FLOAT32


# ---- deviation ----
def figures(losses, norms):
    return {"loss": losses, "grad_norm": norms}


@pytest.mark.parametrize(
    ("losses", "norms", "expected"),
    [
        ([4.0, 2.0], [1.0, 1.0], 0.0),
        ([4.0, 2.002], [1.0, 1.0], 1e-3),
        ([4.0, 1.998], [1.0, 1.0], 1e-3),
        ([4.0, 2.0], [0.5, 1.0], 0.5),  # a gradient of the wrong size, which no loss shows
        ([4.0, math.nan], [1.0, 1.0], math.inf),
        ([4.0], [1.0], math.inf),
    ],
)
def test_deviation_is_the_largest_of_losses_and_norms_at_any_step(losses, norms, expected):
    assert script.deviation(figures(losses, norms), figures([4.0, 2.0], [1.0, 1.0])) == pytest.approx(expected)


def test_reference_that_is_no_number_is_equal_to_nothing():
    nan = figures([math.nan], [1.0])
    assert script.deviation(nan, nan) == math.inf


# ---- rows that fail ----
REDUCE = "        for work in self.works:\n            work.wait()\n"
MAIN = "    args = parse_args()\n    with process_group"
FAULTS = {  # in 02_ddp/from_scratch.py, in the row where {}: (old, new), words of the row, words below the table
    "wrong gradients": (
        (REDUCE, REDUCE + "        if {}:\n            [flat.mul_(0.5) for flat in self.flat]\n"),
        "<-- above 1e-05", ""),
    "raises": (
        (REDUCE, REDUCE + "        if {} and dist.get_rank() == 1:\n            raise OSError('planted')\n"),
        "FAILED: rank", "OSError: planted"),
    "killed": (
        (REDUCE, REDUCE + "        if {} and dist.get_rank() == 1:\n            os.kill(os.getpid(), 9)\n"),
        "rank 1: SIGKILL", "(dp 2) failed: rank"),
    "does nothing": (
        (MAIN, "    if {}:\n        return\n" + MAIN), "FAILED: exit code 0 without 3 lines of metrics", ""),
}  # fmt: skip
ROWS = {"from_scratch.py": "not in", "from_scratch.py --microbatch 2": "in"}  # --microbatch, its flags


@pytest.mark.parametrize("faults", [("wrong gradients", "raises"), ("killed", "does nothing")], ids=" and ".join)
def test_row_that_fails_is_named_and_the_others_go_on(faults, compare, plant):
    path, edits = plant(SCRIPT), []
    for fault, is_in in zip(faults, ROWS.values()):
        old, new = FAULTS[fault][0]
        edits.append((old, new.format(f"'--microbatch' {is_in} sys.argv")))
    plant("02_ddp/from_scratch.py", *edits)
    code, output, answer = compare("--only", "02", path=path)
    assert code == 1, output
    lines = lines_of(output)
    assert len(lines) == 5
    for row, (_, in_row, below) in zip(ROWS, map(FAULTS.get, faults)):
        assert {name for (name, _), line in lines.items() if in_row in line} == {row}
        assert below in output
    assert "2 of 4 rows within 1e-05 of one process" in output
    assert len(answer["rows"]) == 5


def test_row_without_end_is_killed(tmp_path):
    ended = forked.run_forked(signal.pause, 2, tmp_path, timeout=0.5)
    assert ended.problem == "no end in 0.5 s, killed: rank 0, 1"
    assert ended.code == 128 + signal.SIGKILL


def test_interrupted_run_leaves_no_rank_behind(tmp_path):
    def stand():
        (part := tmp_path / f"part{os.getpid()}").write_text(str(os.getpid()))
        part.rename(tmp_path / f"pid{os.environ['RANK']}")
        signal.pause()

    if (pid := os.fork()) == 0:
        with contextlib.suppress(SystemExit):
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
            forked.run_forked(stand, 2, tmp_path, timeout=60)
        os._exit(0)
    ranks = [tmp_path / f"pid{rank}" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    assert os.waitpid(pid, 0)[1] == 0
    for file in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_nothing_is_compared_with_a_reference_that_failed(compare, plant):
    path = plant(SCRIPT)
    plant("02_ddp/train.py", ("    args = parse_args()\n    with", "    raise OSError('planted')\n    with"))
    code, output, answer = compare("--only", "02", path=path)
    assert code == 1
    assert "OSError: planted" in output
    assert "one process failed, there is nothing to compare with" in output
    assert "rows" not in answer


def test_missing_deepspeed_is_said_and_not_counted(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    rows = layouts.choose_rows(2, ["05"], 32, 4, 4)
    args = argparse.Namespace(dtype="float32")
    well = dict(loss=[1.0], deviation=0.0, grad_norm=[1.0], step_ms=1.0, state_mib=1.0, peak_mib=None, bytes_sent=1)
    found = [script.run_row(row, args, cuda=False) if row.deepspeed else well for row in rows]
    script.print_rows(rows, found, FLOAT32)
    assert script.print_verdict(rows, found, FLOAT32)
    output = capsys.readouterr().out
    said = {name: line.rpartition("| ")[2] for (name, _), line in lines_of(output).items()}
    assert [said[f"train.py --stage {stage}"] for stage in range(4)] == ["pip install deepspeed"] * 4
    assert "7 of 7 rows within 1e-05" in output
    assert "4 did not run: pip install deepspeed" in output


# ---- under torchrun ----
def test_row_runs_under_torchrun_as_it_does_on_gpus(tmp_path):
    metrics, sent = tmp_path / "metrics", tmp_path / "sent"
    words = [ROOT / SCRIPT, "observe", sent, STEPS, ROOT / "02_ddp/train.py", *FLAGS, "--device", "cpu"]
    ended = forked.run_launched([*map(str, words), "--metrics", str(metrics)], 2, tmp_path, timeout=100)
    assert ended == (0, "", "")
    assert len(metrics.read_text().splitlines()) == STEPS
    assert [json.loads((tmp_path / f"sent.{rank}").read_text()) for rank in range(2)] == [FLOAT * PARAMETERS + 8] * 2


def test_launcher_that_does_not_end_is_ended(tmp_path):
    (tmp_path / "stands.py").write_text("import signal\nsignal.pause()\n")
    ended = forked.run_launched([str(tmp_path / "stands.py")], 1, tmp_path, timeout=0.5)
    assert ended.problem == "no end in 0.5 s, killed"
    assert ended.code == 128 + signal.SIGKILL


# ---- bad input ----
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--ranks 3", "invalid choice: 3"),
        ("--steps 2", "--steps 2 leaves none after the first 2, to time: use 3 or more"),
        ("--batch 30 --ranks 4", "--batch 30 is not 2 microbatches on each of 4 ranks: use --batch 32"),
        ("--layers 3", "--layers 3 are fewer than the 4 stages of interleaved: use --layers 4 or more"),
        ("--heads 3", "--heads 3 are not divisible by 2 ranks"),
        ("--layers 1 --only 06", "--heads 4 and --layers 1 must be halved"),
        ("--only 02,07", "--only 02,07: '07' is none of 02, 03, 04, 05, 06; use --only 02,03, say"),
        ("--dim 0", "--dim 0 must be above 0"),
        ("--timeout nan", "--timeout nan must be above 0"),
        ("--json nowhere/all.json", "--json nowhere/all.json cannot be written"),
        ("--picture nowhere/all.png", "--picture nowhere/all.png cannot be written"),
        ("--picture all.gif", "--picture all.gif must end in .png, .svg, .pdf"),
        ("--device cuda --ranks 8", "--ranks 8 need as many GPUs, this machine shows"),
        ("--dim 36 --only 02", "4 heads must divide --dim 36 / 2"),  # the script's own words
        ("--data /dev/null --only 02", "/dev/null has 0 bytes of text"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags, says, tmp_path):
    result = run(ROOT / SCRIPT, *flags.split(), env=BARE)
    assert result.codes == [2], result.outputs
    assert says in result.outputs[0]
    errors = [line for line in result.outputs[0].splitlines() if "error: " in line]
    assert len(errors) == 1
    assert "Traceback" not in result.outputs[0]


def test_launcher_is_refused():
    result = run(ROOT / SCRIPT)
    assert result.codes == [2]
    assert "RANK is set, and compare.py starts its ranks itself: use python, not torchrun" in result.outputs[0]


@pytest.mark.parametrize("folders", [[], ["02_ddp", "03_tensor_parallel", "common"]])
def test_missing_folders_are_named(folders, tmp_path):
    for folder in ["07_diagnostics", *folders]:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    result = run(tmp_path / SCRIPT, env=BARE)
    wanted = [name for name, _ in layouts.FOLDERS.values() if name not in folders] + ["common"] * (not folders)
    assert result.codes == [2]
    assert f"lacks {', '.join(wanted)}: copy {' '.join(wanted)} there, beside 07_diagnostics" in result.outputs[0]


# ---- on the terminal ----
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_only_on_a_terminal(terminal, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with script.progress(5) as show:
        show(3, "04_pipeline/train.py")
    assert ("3 of 5 rows, 04_pipeline/train.py" in capsys.readouterr().err) == terminal


def test_progress_uses_tqdm_where_it_is_installed(monkeypatch, capsys):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with script.progress(5) as show:
        show(3, "04_pipeline/train.py")
        assert "3/5" in capsys.readouterr().err
    with contextlib.suppress(KeyError):
        assert sys.modules["tqdm"].tqdm.monitor is None  # no thread while this process forks
