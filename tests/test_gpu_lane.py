"""The GPU lane's own logic, on the CPU: its arithmetic, its recorder, its reading of traces, and its command lines."""

import json
from types import SimpleNamespace

import conftest
import gpu_model
import gpu_results
import gpu_runs
import gpu_watch
import pytest
import torch
from gpu_card import driver_version, matmul_rate
from runner import ROOT, run

CARD = dict(name="Card X", count=1, memory_gib=80.0, driver="580.1", torch="2.13.0", cuda="13.0", nccl="2.28.9")
CARD |= dict(date="2026-01-02", matmul_flops=6e14)
EXACT = 1e-12  # a few products of floats
ANY_CPU = 1e7  # FLOP/s, less than any processor makes; 0 or a mistaken unit would be below


# ---- the recorder ----
@pytest.fixture
def results(tmp_path):
    return gpu_results.Results(tmp_path / "results.json", CARD)


def test_recorder_keeps_what_passes_what_fails_and_what_has_no_bound(results):
    results.record("tokens/s", 123456.7)
    results.record("MFU", 0.61234, least=0.5)
    results.record("ratio", 1.05, least=0.9, most=1.1)
    with pytest.raises(AssertionError, match=r"deviation: 2e-09 <= 1e-09 FAILED"):
        results.record("deviation", 2e-9, most=1e-9)
    kept = json.loads(results.file.read_text())
    assert kept["card"] == CARD
    assert [(row["name"], row["measured"], row["ok"]) for row in kept["rows"]] == [
        ("tokens/s", 123456.7, True),
        ("MFU", 0.61234, True),
        ("ratio", 1.05, True),
        ("deviation", 2e-9, False),
    ]
    heading = "1 x Card X, 80.0 GiB, driver 580.1, torch 2.13.0, CUDA 13.0, NCCL 2.28.9, 2026-01-02"
    assert results.table().splitlines() == [
        heading,
        "name      | measured  | bound             | ok",
        "tokens/s  | 1.235e+05 |                   | recorded",
        "MFU       | 0.6123    | >= 0.5            | ok",
        "ratio     | 1.05      | >= 0.9 and <= 1.1 | ok",
        "deviation | 2e-09     | <= 1e-09          | FAILED",
    ]
    assert results.markdown().splitlines()[:5] == [
        f"**{heading}**",
        "",
        "| name | measured | bound | ok |",
        "| --- | --- | --- | --- |",
        "| tokens/s | 1.235e+05 |  | recorded |",
    ]


@pytest.mark.parametrize("bounds", [{"least": 0.5}, {"most": 0.5}, {"least": 0.1, "most": 0.9}])
def test_nan_is_within_no_bound(results, bounds):
    with pytest.raises(AssertionError):
        results.record("MFU", float("nan"), **bounds)


# ---- the model ----
def test_flops_are_those_counted_by_hand_and_by_the_planner(monkeypatch):
    small = gpu_model.Model(dim=8, layers=2, heads=4, kv_heads=2, seq_len=16)
    # A layer: queries and output 8 x 8, keys and values 4 x 8, three matrices 64 x 8 of the MLP. The head: 256 x 8.
    matrices = 2 * (2 * 64 + 2 * 32 + 3 * 512) + 2048
    assert small.flops_per_token == 6 * matrices + 6 * 2 * 8 * 16
    assert small.mfu(1000, 2, 1e9) == pytest.approx((6 * matrices + 1536) * 500 / 1e9, rel=EXACT)
    monkeypatch.syspath_prepend(ROOT / "06_hybrid")
    from plan_tables import Model

    model = gpu_model.Model()
    planned = Model("lane", "llama", model.layers, model.dim, model.heads, model.kv_heads, 128, 8192, 256)
    assert model.params == planned.params
    hidden_by_the_mask = model.layers * 2 * model.seq_len**2 * model.dim  # of the forward, which the planner counts
    assert model.flops_per_token * model.seq_len == 3 * (planned.forward_flops(model.seq_len) - hidden_by_the_mask)


def test_model_has_the_size_that_fills_a_card():
    model = gpu_model.Model()
    assert 350e6 < model.params < 1e9
    assert model.dim == 128 * model.heads
    assert model.heads % model.kv_heads == 0


def test_steady_rate_leaves_out_the_first_steps():
    rates = [1, 1, 1, 1, 10, 30, 20]
    assert gpu_model.steady_rate([{"tokens_per_s": rate} for rate in rates]) == 20


@pytest.mark.parametrize(("memory_gib", "microbatch"), [(139.8, 32), (79.2, 32), (39.4, 8)])
def test_planner_chooses_a_microbatch_for_the_card(memory_gib, microbatch, tmp_path):
    command = gpu_model.plan_command(gpu_model.Model(), memory_gib, tmp_path)
    answer = json.loads(run(*command).check().outputs[0])
    found = gpu_model.choose_plan(answer)
    assert found.microbatch == microbatch
    # A token keeps of each layer the inputs of norms and matmuls, of the head its input, and its logits in 32 bits.
    layer = 8 * 3072 + 4 * (3072 + 1024) + 6 * 8192
    tokens = microbatch * 2048
    held = 16 * gpu_model.Model().params + tokens * (6 * layer + 4 * 3072 + 4 * 256)
    assert found.tensor_bytes == pytest.approx(held, rel=EXACT)
    assert found.tensor_bytes < (1 - gpu_model.FREE) * memory_gib * 2**30
    assert gpu_model.choose_plan(answer | {"plans": answer["plans"][::-1]}) == found


def test_matmul_rate_is_in_flops_a_second():
    assert ANY_CPU < matmul_rate(torch.device("cpu"), size=128, calls=3) < 1e15


@pytest.mark.parametrize("module", ["x86_64 Kernel Module  580.65", "Open Kernel Module for x86_64  580.65"])
def test_driver_is_read_from_both_kernel_modules(module):
    assert driver_version(f"NVRM version: NVIDIA UNIX {module}.06  Release Build\nGCC version: 13.3.0") == "580.65.06"


# ---- traces ----
MAIN, BACKWARD, WATCHDOG = 1, 2, 3


def event(name, ts, tid=MAIN, cat="cuda_runtime"):
    return {"name": name, "ts": ts, "tid": tid, "cat": cat, "ph": "X", "dur": 1}


def steps(*begins):
    return [event("Optimizer.step#AdamW.step", ts, cat="user_annotation") for ts in begins]


STEADY = [
    *steps(100, 200, 300),
    event("cudaLaunchKernel", 110),
    event("cuLaunchKernelEx", 120, BACKWARD, "cuda_driver"),
]
STEADY += [event("cudaEventSynchronize", 150), event("cudaEventSynchronize", 250), event("cudaMemcpyAsync", 130)]
STEADY += [
    event("cudaEventRecord", 140),
    event("cudaStreamWaitEvent", 141),
    event("Optimizer.step#A", 1, 7, "gpu_user_annotation"),
]


def test_steady_trace_has_one_wait_for_an_event_a_step():
    assert gpu_watch.sync_calls(STEADY) == (2, {"cudaEventSynchronize": 2})


@pytest.mark.parametrize(
    "call",
    [
        event("cudaStreamSynchronize", 160),
        event("cudaStreamSynchronize", 160, BACKWARD),
        event("cudaDeviceSynchronize", 299),
        event("cudaMemcpy", 160),
        event("cuStreamSynchronize", 160, cat="cuda_driver"),
        event("cuCtxSynchronize", 160, BACKWARD, "cuda_driver"),
    ],
)
def test_call_that_holds_up_a_launching_thread_is_seen(call):
    assert gpu_watch.sync_calls([*STEADY, call])[1] == {"cudaEventSynchronize": 2, call["name"]: 1}


@pytest.mark.parametrize(
    "call",
    [
        event("cudaDeviceSynchronize", 99),  # the profiler's own start
        event("cudaDeviceSynchronize", 300),  # .. and end
        event("cudaEventSynchronize", 160, WATCHDOG),
        event("cudaMemcpyAsync", 160),
        event("cudaStreamSynchronize", 160, cat="cpu_op"),
    ],
)
def test_what_holds_up_no_step_is_not_counted(call):
    assert gpu_watch.sync_calls([*STEADY, call]) == (2, {"cudaEventSynchronize": 2})


def test_trace_without_steps_is_no_proof():
    with pytest.raises(ValueError, match="1 optimizer steps in the trace, 2 needed"):
        gpu_watch.sync_calls([event("cudaLaunchKernel", 1), *steps(5)])


# ---- runs ----
def test_forks_train_and_watch(flags, tmp_path):
    """The real processes, with a script that ends well, the one that records traces, and one that fails."""
    train = ["02_ddp/train.py", *flags, "--device", "cpu"]
    trace, watched = tmp_path / "trace", gpu_watch.SETTLED + gpu_watch.RECORDED + 2
    jobs = [
        train,
        ["tests/gpu_watch.py", trace, ROOT / train[0], *train[1:], "--steps", watched],
        [*train, "--heads", 3],
    ]
    with gpu_runs.start_forks(1) as forks:
        well, recorded, failed = forks.train(jobs, tmp_path)
    assert [len(one.rows) for one in (well, recorded, failed)] == [6, watched, 0]
    assert recorded.rows[5]["loss"] == well.rows[5]["loss"]
    assert "gloo | cpu" in well.output
    assert (well.problem, recorded.problem) == ("", "")
    assert "exit codes [2]" in failed.problem
    assert "3 heads must divide --dim 32 / 2" in failed.problem
    num_steps, calls = gpu_watch.sync_calls(gpu_watch.read_events(trace))
    assert (num_steps >= gpu_watch.RECORDED - 2, calls) == (True, {})


def test_deviation_is_the_largest_and_infinite_for_what_is_missing():
    assert gpu_runs.deviation([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert gpu_runs.deviation([1.0], [1.0, 2.0]) == float("inf")
    assert gpu_runs.deviation([1.0, float("nan")], [1.0, 2.0]) == float("inf")


PARSES = """
import json, os, runpy, sys
script, commands = sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))
parse_args = runpy.run_path(script)["parse_args"]
for words in json.loads(commands):
    sys.argv = [script, *words]
    print(vars(parse_args()))
"""


def command_lines(folder):
    """{script: all lists of flags that the lane gives it}."""
    model = gpu_model.Model().flags(32, 8)
    more = ["--bucket-mb", 400, "--device", "cuda", "--metrics", folder / "metrics.jsonl"]
    found = {
        script: [[*layout] for n in (1, 2, 8) for layout in gpu_runs.layouts(script, n)] for script in gpu_runs.SCRIPTS
    }
    for script, *flags in gpu_runs.watched():
        found[script].append(flags)
    for script in ("02_ddp/train.py", "05_zero/fsdp.py", "06_hybrid/train.py"):
        found[script].append([*model, *more[2 * (not script.startswith("02")) :]])
    for script, *flags in gpu_runs.tools("cuda", folder).values():
        found[str(script.relative_to(ROOT))] = [flags]
    return found


def test_every_command_line_of_the_lane_parses(tmp_path):
    (driver := tmp_path / "parse.py").write_text(PARSES)
    for script, lines in command_lines(tmp_path).items():
        words = json.dumps([[str(word) for word in line] for line in lines])
        result = run(driver, ROOT / script, words)
        assert result.codes == [0], f"{script} {lines}\n{result.outputs[0]}"
        assert result.outputs[0].count("\n") == len(lines)


# ---- the lane's end ----
@pytest.mark.parametrize(("stats", "code"), [({"skipped": [1]}, pytest.ExitCode.TESTS_FAILED), ({"passed": [1]}, 0)])
def test_lane_fails_when_no_gpu_test_ran(stats, code):
    plugins = SimpleNamespace(get_plugin=lambda _: SimpleNamespace(stats=stats))
    config = SimpleNamespace(option=SimpleNamespace(require_gpu=True), pluginmanager=plugins)
    session = SimpleNamespace(config=config, exitstatus=0)
    conftest.pytest_sessionfinish(session)
    assert session.exitstatus == code


def test_lane_ends_with_what_it_measured(results):
    results.record("MFU", 0.6, least=0.5)
    lines = []
    reporter = SimpleNamespace(section=lines.append, write_line=lines.append, stats={})
    config = SimpleNamespace(stash={conftest.RESULTS: results}, option=SimpleNamespace(require_gpu=False))
    conftest.pytest_terminal_summary(reporter, config)
    assert lines[0] == f"GPU lane, kept in {results.file}"
    assert results.table() in lines[1]
    assert results.markdown() in lines[1]
