"""02_ddp/batch_size.py: a microbatch that fits, the same on every rank, from a line that the real train.py confirms."""

import json
import re
import subprocess
import sys
from functools import cache

import pytest
import torch
from runner import ROOT, run

SCRIPT, TRAIN = ROOT / "02_ddp" / "batch_size.py", ROOT / "02_ddp" / "train.py"
MODEL = ("--seq-len", 64, "--dim", 64, "--layers", 2)
BATCH, SHARE = 72, 36  # 2 ranks; the share's divisors are 1 2 3 4 6 9 12 18 36
PRINTED = 0.06  # MiB: the table shows one decimal
# Seen: 0.15 % and less (the data, the losses, a decimal). DDP's buckets left out would be 4 % and more at these sizes.
AGREES = 0.005
ACCUMULATED = 1e-5  # float32 sums of the microbatches in another order
CUDA_BLOCKS = 0.05  # the CUDA allocator rounds large blocks up, by as much as 1 MiB each


def said(output):
    """What was printed but for torch's profiler: a forked rank has imported torch before it can silence that."""
    return "".join(line for line in output.splitlines(keepends=True) if not line.startswith("USDT:"))


def read(output):
    """Returns the table in MiB by name, `peaks` in MiB by microbatch (the proposed, the next larger), the proposal."""
    rows = re.findall(r"^(.+?) +(-?[\d,.]+) MiB$", output, re.MULTILINE)
    found = {name: float(value.replace(",", "")) for name, value in rows}
    peaks = re.findall(r"^microbatch (\d+) of \d+: peak ([\d,.]+) MiB", output, re.MULTILINE)
    found["peaks"] = {int(microbatch): float(peak.replace(",", "")) for microbatch, peak in peaks}
    last = re.fullmatch(r"--batch (\d+) --microbatch (\d+)  \(accumulate (\d+)\)", output.splitlines()[-1])
    assert last, output
    return found | dict(zip(("batch", "microbatch", "accumulate"), map(int, last.groups())))


@cache
def propose(*flags, nproc=2, batch=BATCH):
    return read(said(run(SCRIPT, *MODEL, "--batch", batch, *flags, nproc=nproc).check().outputs[0]))


def around(folder, before, after="run()"):
    """Writes a script that takes another one's path and flags, and runs it unmodified after and within this code."""
    path = folder / "around.py"
    path.write_text(
        "import os, runpy, sys\n"
        "import torch\n"
        "rank = int(os.environ['RANK'])\n"
        "del sys.argv[0]\n"
        "sys.path.insert(0, os.path.dirname(sys.argv[0]))\n"
        "run = lambda: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        f"{before}\n{after}\n"
    )
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}\n" for i in range(2000)))
    return path


MEMORIES = (0.05, 0.025, 0.0125)  # GiB: from room for the whole share down to a few sequences


@pytest.mark.parametrize(("gib", "free"), [*((gib, 0.2) for gib in MEMORIES), (0.05, 0.6)])
def test_proposal_divides_the_share_and_fits_where_the_next_larger_divisor_would_not(gib, free):
    found = propose("--memory-gib", gib, "--free", free)
    divisors = [n for n in range(1, SHARE + 1) if SHARE % n == 0]
    limit = gib * 1024 * (1 - free)
    assert found["batch"] == BATCH
    assert found["microbatch"] * found["accumulate"] == SHARE
    assert list(found["peaks"]) == [n for n in divisors if n >= found["microbatch"]][:2]
    for microbatch, peak in found["peaks"].items():
        assert peak <= limit + PRINTED if microbatch == found["microbatch"] else peak > limit - PRINTED


def test_less_memory_never_raises_the_microbatch():
    proposed = [propose("--memory-gib", gib, "--free", 0.2)["microbatch"] for gib in MEMORIES]
    assert proposed == sorted(proposed, reverse=True)
    assert proposed[0] > proposed[-1]  # or the test would see nothing


# Blocks that gloo's thread is the last to let go of are never seen to go: the profiler watches this thread alone. Those
# are the copy of the weights that DDP sends out at the start, which one rank does not need, and the bucket that it
# replaces after the first step, unless it looks for unused parameters.
PEAK = """
import functools, json
DDP = torch.nn.parallel.DistributedDataParallel
torch.nn.parallel.DistributedDataParallel = functools.partial(DDP, init_sync=False)
cpu = [torch.profiler.ProfilerActivity.CPU]
with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
    try:
        run()
    except SystemExit as end:
        assert not end.code
profile.export_chrome_trace(os.environ["TRACE"])
"""


# On some processors, oneDNN multiplies less than 1,000 rows of bfloat16 in other ways, each with scratch of its own.
@pytest.mark.parametrize(
    "flags",
    [("--seq-len", 64), ("--seq-len", 512, "--dtype", "bfloat16", "--checkpoint-activations")],
    ids=["float32", "bfloat16"],
)
def test_predicted_peak_of_an_unseen_microbatch_is_that_of_the_real_training_script(flags, tmp_path, text):
    microbatch, sizes = 6, ("--dim", 128, "--layers", 2, *flags)
    predicted = propose(*sizes, nproc=1, batch=microbatch)["peaks"][microbatch]
    trace = tmp_path / "trace.json"
    steps = ("--steps", 2, "--batch", 3 * microbatch, "--microbatch", microbatch, "--data", text, "--find-unused")
    run(around(tmp_path, "", PEAK), TRAIN, *sizes, *steps, env={"TRACE": str(trace)}).check()
    blocks = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    live = peak = 0
    for event in sorted(blocks, key=lambda event: event["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    assert predicted == pytest.approx(peak / 2**20, rel=AGREES)


def test_checkpointing_lowers_the_activations_and_leaves_the_states():
    plain, recomputed = propose(nproc=1), propose("--checkpoint-activations", nproc=1)
    states = "parameters, gradients, buckets, AdamW's two"
    assert recomputed["activations per sequence"] < 0.7 * plain["activations per sequence"]
    assert recomputed[states] == plain[states]


def test_poorest_rank_decides_and_only_rank_0_prints(tmp_path):
    before = "sys.argv += ['--memory-gib', '1' if rank == 0 else '0.025']"
    result = run(around(tmp_path, before), SCRIPT, *MODEL, "--batch", BATCH, nproc=2).check()
    assert read(said(result.outputs[0])) == propose("--memory-gib", 0.025, "--free", 0.2)
    assert read(said(result.outputs[0]))["accumulate"] > 1  # rank 0 alone would have room for all at once
    assert said(result.outputs[1]) == ""


@pytest.mark.parametrize("memories", [("0.001", "0.001"), ("1", "0.001")], ids=["every rank", "rank 1"])
def test_no_room_for_one_sequence_ends_every_rank_with_both_numbers(memories, tmp_path):
    before = f"sys.argv += ['--memory-gib', {memories}[rank]]"
    result = run(around(tmp_path, before), SCRIPT, *MODEL, "--batch", BATCH, nproc=2)
    assert result.codes == [2, 2]
    for rank, output in enumerate(map(said, result.outputs)):
        assert re.fullmatch(
            rf"\[rank{rank}\] error: one sequence takes [\d.]+ MiB or more, .*; 0\.8 of 1\.0 MiB .*\n", output
        )
        assert all(way in output for way in ("--seq-len", "--checkpoint-activations", "05_zero"))


OUT_OF_MEMORY = """
forward = torch.nn.functional.cross_entropy
def cross_entropy(logits, *others, **named):
    if rank == 1 and len(logits) >= {sequences} * 64:
        raise torch.OutOfMemoryError("planted")
    return forward(logits, *others, **named)
torch.nn.functional.cross_entropy = cross_entropy
"""


@pytest.mark.parametrize(("sequences", "microbatch"), [(1, None), (2, 1), (4, SHARE)])
def test_rank_out_of_memory_in_a_trial_step_bounds_the_proposal_and_leaves_no_rank_waiting(
    sequences, microbatch, tmp_path
):
    script = around(tmp_path, OUT_OF_MEMORY.format(sequences=sequences))
    result = run(script, SCRIPT, *MODEL, "--batch", BATCH, "--memory-gib", 1, nproc=2, timeout=20)
    if microbatch is None:
        assert result.codes == [2, 2]
    else:
        assert read(said(result.check().outputs[0]))["microbatch"] == microbatch


BEND = """
forward = torch.nn.functional.cross_entropy
def cross_entropy(logits, *others, **named):
    held = torch.empty(2**20) if len(logits) == 64 else None  # 4 MiB, at 1 sequence only
    return forward(logits, *others, **named)
torch.nn.functional.cross_entropy = cross_entropy
"""


@pytest.mark.parametrize(("before", "error"), [("", r"[+-]0\.\d"), (BEND, r"-[1-9]\d\.\d")], ids=["line", "bend"])
def test_third_trial_step_tells_whether_memory_is_a_line(before, error, tmp_path):
    output = run(around(tmp_path, before), SCRIPT, *MODEL).check().outputs[0]
    assert re.search(rf"^check: the line through 2 and 4 sequences is {error}% off at 1$", output, re.MULTILINE), output


def test_proposed_flags_train_to_the_loss_of_the_unaccumulated_run(tmp_path, text):
    found = propose("--memory-gib", 0.0125, "--free", 0.2)
    assert found["accumulate"] > 1
    losses = []
    for flags in ((), ("--microbatch", found["microbatch"])):
        metrics = tmp_path / "metrics.jsonl"
        common = ("--batch", found["batch"], "--steps", 2, "--data", text, "--metrics", metrics)
        run(TRAIN, *MODEL, *common, *flags, nproc=2).check()
        losses.append([json.loads(line)["loss"] for line in metrics.read_text().splitlines()])
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=ACCUMULATED)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--batch", 0), "--batch 0"),
        (("--seq-len", 0), "--seq-len 0"),
        (("--heads", 3), "3 heads"),
        (("--free", 1), "--free 1.0"),
        (("--memory-gib", 0), "--memory-gib 0.0"),
    ],
)
def test_bad_input_ends_in_one_line_before_any_measurement(flags, expected):
    result = run(SCRIPT, *flags, timeout=20)
    assert result.codes == [2]
    assert result.outputs[0].startswith("[rank0] error: ")
    assert result.outputs[0].count("\n") == 1
    assert expected in result.outputs[0]


def test_plain_python_runs_it_with_the_memory_of_this_machine_and_a_quiet_profiler():
    command = [sys.executable, SCRIPT, *map(str, MODEL), "--device", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert read(result.stdout)["microbatch"] == 32
    assert result.stderr == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and its allocator's peak")
def test_predicted_peak_is_the_cuda_allocators_in_the_real_training_script(tmp_path):
    sizes, microbatch, metrics = ("--seq-len", 512, "--dim", 512, "--layers", 4), 16, tmp_path / "metrics.jsonl"
    measure = [sys.executable, SCRIPT, *sizes, "--device", "cuda", "--batch", microbatch]
    steps = ("--steps", 3, "--batch", 3 * microbatch, "--microbatch", microbatch, "--metrics", metrics)
    found = read(subprocess.run([*map(str, measure)], capture_output=True, text=True, timeout=120, check=True).stdout)
    train = [sys.executable, TRAIN, *sizes, "--device", "cuda", *steps]
    subprocess.run([*map(str, train)], capture_output=True, timeout=120, check=True)
    peak = json.loads(metrics.read_text().splitlines()[-1])["peak_mib"]
    assert found["peaks"][microbatch] == pytest.approx(peak, rel=CUDA_BLOCKS)
