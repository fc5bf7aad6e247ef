"""The GPU lane: the scripts under NCCL, and their speed. `tox -e gpu` runs these, and fails when none of them ran.

What each group asserts, and why that bound: GPU.md. What it runs: gpu_runs.py, gpu_model.py.
"""

import json

import gpu_model
import gpu_runs
import gpu_watch
import pytest
import torch
from gpu_runs import DEEPSPEED, SCRIPTS, deviation, layouts, python, torchrun
from runner import ROOT

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="this machine shows no GPU")]
needs_two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason=f"2 GPUs needed, this machine shows {NUM_GPUS}")
each_count = pytest.mark.parametrize("nproc", [n for n in (1, 2, 4, 8) if n <= max(NUM_GPUS, 1)])
MANY = max(n for n in (1, 2, 4, 8) if n <= max(NUM_GPUS, 1))  # of the runs that use several

# Rotary angles are float32 in any run, and a GPU's pow, cos and sin differ from the CPU's in the last bits. Planted on
# the CPU, 2 units in the last place of pow and 1 of cos and sin moved a norm by 5e-10; CUDA's may be off by twice that.
FLOAT64 = 1e-8
FLOAT32 = 1e-4  # DeepSpeed keeps no float64; a GPU's float32 matmuls sum in another order
# 8 bits a product. On the CPU, of all these runs, the largest found: 1.6e-4 of a loss, which averages over the batch,
# and 3.1e-3 of a norm, which averages less. A GPU sums in another order.
BFLOAT16_LOSS, BFLOAT16_NORM = 1e-3, 1e-2
MFU = 0.5  # of what a large matmul reaches; the rest is for smaller matmuls, attention, norms, casts, AdamW
MEMORY = 0.1  # of plan.py's tensors: it has no buffers of backward; compiled for the CPU they were 3 % of the peak
SHARES = 0.02  # lanes are cut by the profiler's clock; a lane that is missing takes more
EXPOSED = 0.1  # of a step: of DDP's buckets the last alone has no backward left to hide behind
SCALING = 0.8  # of n times one GPU: over PCIe the gradients take up to a fourth of a step; backward hides most of that


@pytest.fixture(scope="module")
def forks():
    with gpu_runs.start_forks() as forks:
        yield forks


@pytest.fixture(scope="module")
def planned(results, tmp_path_factory):
    return gpu_model.plan(gpu_model.Model(), results.card["memory_gib"], tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def trained(planned, tmp_path_factory):
    """trained(script, nproc): the rows of --metrics of the large model, trained once."""
    done = {}

    def trained(script, nproc=1):
        if (script, nproc) not in done:
            metrics = tmp_path_factory.mktemp("trained") / "metrics.jsonl"
            flags = gpu_model.Model().flags(planned.microbatch, nproc)
            # torch.compile cuts the graph where a bucket of DDP's ends: about one a layer, as FSDP2 has.
            more = ["--bucket-mb", 400] if script.startswith("02") else []
            ended = torchrun(ROOT / script, *flags, *more, "--device", "cuda", "--metrics", metrics, nproc=nproc)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            done[script, nproc] = gpu_runs.read_rows(metrics)
        return done[script, nproc]

    return trained


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    return gpu_runs.tools("cuda", folder), folder


# ---- the same numbers ----
OTHERS = [script for script in SCRIPTS if script != DEEPSPEED]
GROUPS = {  # scripts, data type, bounds of a loss and a norm
    "float64": (OTHERS, "float64", FLOAT64, FLOAT64),
    "bfloat16": (OTHERS, "bfloat16", BFLOAT16_LOSS, BFLOAT16_NORM),
    "DeepSpeed, float32": ([DEEPSPEED], "float32", FLOAT32, FLOAT32),
    "DeepSpeed, bfloat16": ([DEEPSPEED], "bfloat16", BFLOAT16_LOSS, BFLOAT16_NORM),
}


@each_count
@pytest.mark.parametrize("group", GROUPS)
def test_losses_and_norms_under_nccl_are_those_of_the_serial_reference(
    forks, group, nproc, flags, serial, tmp_path, results
):
    scripts, dtype, *bounds = GROUPS[group]
    flags = [*flags, "--device", "cuda", "--dtype", dtype]
    runs = forks.train([[s, *flags, *layout] for s in scripts for layout in layouts(s, nproc)], tmp_path, nproc)
    reference = serial(torch.float64 if dtype == "float64" else torch.float32)
    for run in runs:
        print(run.name, run.problem)  # which has no rows, and so deviates without end
    for column, expected, most in zip(("loss", "grad_norm"), (reference.losses, reference.grad_norms), bounds):
        off = {run.name: deviation([row[column] for row in run.rows], expected) for run in runs}
        print("\n".join(f"{column} {one:.1e} {name}" for name, one in off.items()))
        results.record(
            f"{group}, n={nproc}, {len(runs)} runs: {column}, largest deviation", max(off.values()), most=most
        )
    for run in runs:
        assert "nccl | cuda" in run.output
        assert all(row["peak_mib"] > row["state_mib"] for row in run.rows), run.name


# ---- no waiting ----
def test_the_hot_loop_never_makes_the_host_wait_for_the_gpu(forks, tmp_path, results):
    """But for one event a step, which was recorded a step before."""
    jobs = [
        ["tests/gpu_watch.py", tmp_path / f"{i}.trace", ROOT / script, *flags, "--device", "cuda"]
        for i, (script, *flags) in enumerate(gpu_runs.watched())
    ]
    runs = forks.train(jobs, tmp_path)
    found = {}
    for job, run in zip(jobs, runs):
        print(run.name, run.problem)
        if not run.problem:
            steps, calls = gpu_watch.sync_calls(gpu_watch.read_events(job[1]))
            found[run.name] = {name: number / steps for name, number in calls.items()}
    most = max((sum(calls.values()) for calls in found.values()), default=0)
    results.record(f"{len(found)} of {len(runs)} runs: synchronising calls a step, at most", most, most=1)
    assert [calls for calls in found.values() if calls != {"cudaEventSynchronize": 1}] == [], found
    assert len(found) == len(runs)


# ---- fast ----
@pytest.mark.parametrize(
    ("script", "least"), [("02_ddp/train.py", MFU), ("05_zero/fsdp.py", MFU), ("06_hybrid/train.py", None)]
)
def test_compiled_training_does_half_of_the_flops_of_a_large_matmul(script, least, trained, planned, results):
    rows, flops = trained(script), results.card["matmul_flops"]
    assert rows[-1]["loss"] < rows[0]["loss"]  # numbers that are no training would be as fast
    rate = gpu_model.steady_rate(rows)
    results.record(f"{script} --compile, microbatch {planned.microbatch}: tokens/s", rate)
    results.record(f"{script} --compile: MFU", gpu_model.Model().mfu(rate, 1, flops), least=least)


def test_a_large_matmul_is_measured(results):
    results.record("matmul of 8192, bfloat16: TFLOP/s", results.card["matmul_flops"] / 1e12)


def test_peak_memory_is_what_the_planner_foresees(trained, planned, results):
    peak = trained("06_hybrid/train.py")[-1]["peak_mib"] * 2**20
    name = f"06_hybrid/train.py --compile, microbatch {planned.microbatch}: peak memory / plan.py's"
    results.record(name, peak / planned.tensor_bytes, least=1 - MEMORY, most=1 + MEMORY)


# ---- the tools ----
def test_env_check_finds_nothing_wrong_and_names_the_card(commands, results):
    words, folder = commands[0]["check"], commands[1]
    done = python(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nccl on cuda" in done.stdout
    facts = json.loads((folder / "check.json").read_text())["facts"]
    assert facts[0]["gpu"]["name"] == results.card["name"]


def test_diagnose_has_a_verdict_and_figures_of_the_gpu(commands, results):
    words, folder = commands[0]["diagnose"], commands[1]
    done = torchrun(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "diagnose.json").read_text())
    assert found["verdict"]
    assert found["advice"]
    (rank,) = found["ranks"]
    assert rank["cuda"]
    assert rank["memory"]["limited_by"] == "the GPU"
    assert rank["operators"]
    assert {"gpu_percent", "sm_mhz"} <= rank["nvml"].keys()
    total = sum(rank["shares"].values())
    results.record("diagnose.py on 02_ddp/train.py: sum of a step's shares", total, 1 - SHARES, 1 + SHARES)
    results.record("diagnose.py on 02_ddp/train.py: share of a step that computes", rank["shares"]["compute"])


def test_fit_batch_finds_a_microbatch_by_the_gpus_memory(commands, results):
    words, folder = commands[0]["fit_batch"], commands[1]
    done = python(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["device"], found["microbatch"]) == ("cuda", 4)
    peaks = [one["peak_bytes"] for one in found["tries"]]
    own = gpu_runs.read_rows(folder / "metrics.jsonl")[-1]["peak_mib"] * 2**20  # of tensors alone
    assert peaks == sorted(peaks)
    assert peaks[-1] < found["tries"][-1]["memory_bytes"] <= results.card["memory_gib"] * 2**30
    results.record("fit_batch.py: peak / tensors at their peak", peaks[-1] / own, least=1.0)


def test_hang_says_nothing_of_a_job_that_is_well_under_nccl(commands):
    done = python(*commands[0]["hang"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["cause"] == "none"


# ---- several GPUs ----
@needs_two_gpus
def test_hang_names_a_stopped_rank_under_nccl(tmp_path):
    """The lab `stopped`, whose tensors and group are the CPU's, with those of the GPUs in their place."""
    lab = tmp_path / "lab.py"
    lab.write_text(
        "import os, runpy, sys, torch, torch.distributed as dist\n"
        "device = torch.device('cuda', int(os.environ['LOCAL_RANK']))\n"
        "torch.cuda.set_device(device)\n"
        "torch.set_default_device(device)\n"
        "init = dist.init_process_group\n"
        "dist.init_process_group = lambda _, **how: init('nccl', device_id=device, **how)\n"
        "sys.argv = ['labs.py', 'stopped']\n"
        f"runpy.run_path({str(ROOT / '07_diagnostics/labs.py')!r}, run_name='__main__')\n"
    )
    done = python(ROOT / "07_diagnostics/hang.py", "run", "--ranks", 2, "--timeout", 15, "--json", "--", lab)
    assert done.returncode == 124, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["cause"], found["ranks"]) == ("stopped_process", [1])


@needs_two_gpus
def test_every_technique_has_one_loss_column_on_gpus(tmp_path, results):
    file = tmp_path / "compare.json"
    words = ["--ranks", MANY, "--device", "cuda", "--json", file, "--picture", tmp_path / "compare.png"]
    done = python(ROOT / "07_diagnostics/compare.py", *words, timeout=1200)
    assert file.exists(), done.stdout + done.stderr
    found = json.loads(file.read_text())
    off = max(row["deviation"] for row in found["rows"] if "deviation" in row)
    results.record(f"compare.py, n={MANY}: largest deviation", off, most=found["limit"])
    assert done.returncode == 0, done.stdout + done.stderr  # no row has failed


@needs_two_gpus
def test_the_link_gives_what_it_should(tmp_path, results):
    file = tmp_path / "links.json"
    done = torchrun(ROOT / "07_diagnostics/bandwidth.py", "--collectives", "all_reduce", "--json", file, nproc=MANY)
    assert done.returncode == 0, done.stdout + done.stderr
    (axis,) = json.loads(file.read_text())
    results.record(f"bandwidth.py, n={MANY}: busbw of all_reduce, GB/s", axis["busbw_gb_s"])
    if axis["hardware"] is None:
        pytest.skip(f"the link of these {MANY} GPUs is not known: bandwidth.py --link names it")
    reached, share = axis["verdict"]["reached"], axis["hardware"]["share"]
    results.record(f"bandwidth.py, n={MANY}: share of {axis['hardware']['name']}", reached, least=share)
    assert axis["verdict"]["as_it_should_be"], axis["verdict"]["text"]


@needs_two_gpus
def test_backward_hides_the_communication_of_ddps_buckets(planned, tmp_path, results):
    file, flags = tmp_path / "diagnose.json", gpu_model.Model().flags(planned.microbatch, MANY)
    words = ["--stop", "--steps", 4, "--json", file, ROOT / "02_ddp/train.py", *flags, "--bucket-mb", 400]
    done = torchrun(ROOT / "07_diagnostics/diagnose.py", *words, "--device", "cuda", nproc=MANY)
    assert done.returncode == 0, done.stdout + done.stderr
    shares = [rank["shares"]["comm"] for rank in json.loads(file.read_text())["ranks"]]
    results.record(f"02_ddp/train.py, n={MANY}: exposed communication, share of a step", max(shares), most=EXPOSED)


@needs_two_gpus
@pytest.mark.parametrize("nproc", [n for n in (2, 4, 8) if n <= max(NUM_GPUS, 2)])
@pytest.mark.parametrize("script", ["02_ddp/train.py", "05_zero/fsdp.py"])
def test_throughput_grows_with_the_number_of_gpus(script, nproc, trained, results):
    """Weak scaling: each GPU has the same share of a batch, whatever their number."""
    alone, together = (gpu_model.steady_rate(trained(script, n)) for n in (1, nproc))
    results.record(f"{script}, n={nproc}: tokens/s of {nproc} x one GPU's", together / nproc / alone, least=SCALING)
