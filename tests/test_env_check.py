"""01_env_check: a healthy job passes; each planted fault is named with its rank, in time; each rule fires and rests."""

import argparse
import copy
import ctypes
import functools
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
import types

import pytest
import torch
from runner import ROOT, run

FOLDER = ROOT / "01_env_check"
CHECK = FOLDER / "check.py"
PATIENCE_S = 4  # for each step: time enough for a healthy rank of a loaded machine
sys.path.append(str(FOLDER))
import facts as facts_module
import links
import rules


def findings(output):
    """The FINDING lines of a report."""
    return [line for line in output.splitlines() if line.startswith("FINDING")]


def sabotage(tmp_path, code):
    """A script that runs `code` (rank is defined) and then check.py, as someone else's broken machine would."""
    script = tmp_path / "sabotage.py"
    head = "import os, runpy, signal, sys, time\nimport torch.distributed as dist\nrank = int(os.environ['RANK'])\n"
    path = f"sys.path.insert(0, {str(FOLDER)!r})\n"
    script.write_text(f"{head}{path}{code}\nrunpy.run_path({str(CHECK)!r}, run_name='__main__')\n")
    return script


# ---- a healthy job ----
@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_a_healthy_job_passes_and_every_rank_says_so(tmp_path, nproc):
    result = run(CHECK, "--json", tmp_path / "report.json", nproc=nproc).check()
    assert f"env check: {nproc} rank" in result.outputs[0]
    assert "all well" in result.outputs[0]
    assert not any(result.outputs[1:])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["exit_code"] == 0
    assert len(report["facts"]) == nproc
    right = [line["name"] for line in report["lines"] if line["section"] == "collectives" and line["verdict"] == "OK"]
    assert right == ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send/recv"]
    assert len(report["pairs_gb_s"]) == nproc * (nproc - 1)
    assert all(figure["busbw_gb_s"] > 0 and figure["latency_s"] > 0 for figure in report["speed"].values())
    assert set(report["speed"]) == (
        {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"} if nproc > 1 else set()
    )


def test_it_runs_alone_without_a_launcher():
    done = subprocess.run([sys.executable, CHECK, "--brief"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "all well: this rank can train"), done.stderr
    assert "Warning" not in done.stderr


# ---- faults, planted from outside ----
def test_a_differing_fact_names_the_ranks(tmp_path):
    script = sabotage(tmp_path, "import platform\nif rank == 1: platform.python_version = lambda: '3.9.1'")
    result = run(script, nproc=3)
    assert result.codes == [1, 1, 1]
    own = ".".join(map(str, sys.version_info[:3]))
    assert f"ranks 0, 2: {own}; rank 1: 3.9.1" in findings(result.outputs[0])[0]


def test_a_wrong_clock_names_the_rank(tmp_path):
    script = sabotage(tmp_path, "now = time.time\nif rank == 2: time.time = lambda: now() - 90")
    result = run(script, nproc=3)
    assert result.codes == [1, 1, 1]
    [line] = findings(result.outputs[0])
    assert re.search(r"clock +rank 2: (89|90)\.\d s", line)


def test_a_corrupted_result_names_the_rank_that_holds_it(tmp_path):
    script = sabotage(
        tmp_path,
        """
right = dist.all_reduce
def corrupted(tensor, *args, **kwargs):
    right(tensor, *args, **kwargs)
    if rank == 1 and tensor.dim() == 2:
        tensor[0, 3] += 1
dist.all_reduce = corrupted
""",
    )
    result = run(script, nproc=3)
    assert result.codes == [1, 1, 1]
    [line] = findings(result.outputs[0])
    assert "all_reduce" in line
    assert "float32, bfloat16, int64: wrong on rank 1 " in line


@pytest.mark.parametrize("name", ["all_reduce", "all_to_all_single"])
def test_a_corrupted_contribution_names_its_sender(tmp_path, name):
    script = sabotage(
        tmp_path,
        f"""
right = dist.{name}
def corrupted(*tensors, **kwargs):
    if rank == 1 and tensors[-1].dim() == 2:
        tensors[-1].mul_(3)
    return right(*tensors, **kwargs)
dist.{name} = corrupted
""",
    )
    result = run(script, nproc=3)
    [line] = findings(result.outputs[0])
    assert "wrong on ranks 0-2, in what rank 1 sent" in line


def test_a_link_that_corrupts_is_named(tmp_path):
    script = sabotage(
        tmp_path,
        """
import links
right = links.transfer
def corrupted(operation, tensor, peer):
    if operation is dist.isend and (rank, peer) == (2, 0) and len(tensor) > 1:
        tensor = tensor.clone()
        tensor[-1] = 77
    right(operation, tensor, peer)
links.transfer = corrupted
""",
    )
    result = run(script, nproc=3)
    [line] = findings(result.outputs[0])
    assert "2 -> 0" in line
    assert "what rank 2 sent arrived wrong" in line


def test_a_slow_link_is_the_only_one_named(tmp_path):
    script = sabotage(
        tmp_path,
        """
right = dist.batch_isend_irecv
def delayed(operations):
    if (rank, operations[0].peer, operations[0].op) == (1, 3, dist.isend):
        time.sleep(0.03)  # the fault itself: this link is slow
    return right(operations)
dist.batch_isend_irecv = delayed
""",
    )
    result = run(script, nproc=4)
    assert result.codes == [1, 1, 1, 1]
    lines = [line for line in findings(result.outputs[0]) if "pairs" in line]
    assert {re.search(r"\d -> \d", line).group() for line in lines} <= {"1 -> 3", "3 -> 1"}  # 3 waits for 1's receipt
    assert any("1 -> 3" in line for line in lines)


def test_a_rank_whose_links_are_all_slow_is_named_once(monkeypatch):
    speeds = {(a, b): 0.01 if 2 in (a, b) else 1.0 for a, b in itertools.permutations(range(4), 2)}
    monkeypatch.setattr(links, "sweep", lambda *arguments: (dict(speeds), []))
    lines, _ = links.judge_pairs(lambda name, work: [], 0, job(n=4, nodes=4, gpu=False), 1, torch.device("cpu"))
    assert [(line.name, line.verdict) for line in lines] == [("rank 2", "FINDING")]


def test_a_rank_that_never_starts_is_named_in_time(tmp_path):
    begin = time.monotonic()
    result = run(sabotage(tmp_path, "if rank == 1: os._exit(0)"), "--timeout", PATIENCE_S, nproc=3)
    assert (result.codes[0], result.codes[2]) == (1, 1)
    assert f"rank 1 did not answer in 'facts' within {PATIENCE_S} s" in findings(result.outputs[0])[0]
    assert time.monotonic() - begin < PATIENCE_S + 7


def test_a_rank_that_dies_in_a_collective_is_named(tmp_path):
    script = sabotage(tmp_path, "if rank == 2: dist.broadcast = lambda *args: os.kill(os.getpid(), signal.SIGKILL)")
    result = run(script, "--timeout", PATIENCE_S, nproc=3)
    assert result.codes == [1, 1, -9]
    assert any("rank 2 did not answer in 'broadcast'" in line for line in findings(result.outputs[0]))


def test_a_stopped_rank_is_named(tmp_path):
    stop = f"""
def stop(*args):
    os.symlink(str(os.getpid()), {str(tmp_path / "pid")!r})  # is there whole or not at all
    os.kill(os.getpid(), signal.SIGSTOP)
leave = os._exit
def end(code):  # rank 0, when it leaves, ends the stopped one, as torchrun would
    try:
        os.kill(int(os.readlink({str(tmp_path / "pid")!r})), signal.SIGKILL)
    finally:
        leave(code)
if rank == 0: os._exit = end
if rank == 1: dist.all_reduce = stop
"""
    result = run(sabotage(tmp_path, stop), "--timeout", PATIENCE_S, nproc=3)
    assert result.codes == [1, -9, 1]
    lines = findings(result.outputs[0])
    assert any("rank 1 did not answer in 'all_reduce'" in line for line in lines)
    assert any("ranks 0, 2 still in 'all_reduce'" in line for line in lines)


def test_a_missing_rank_0_is_named_by_the_others(tmp_path):
    result = run(sabotage(tmp_path, "if rank == 0: os._exit(0)"), "--timeout", PATIENCE_S, nproc=3)
    assert result.codes == [0, 1, 1]
    for rank in (1, 2):
        assert f"[rank{rank}] FINDING rank 0 did not answer in 'facts'" in result.outputs[rank]


def test_a_call_that_never_returns_ends_in_a_report(tmp_path):
    script = sabotage(tmp_path, "if rank == 1: dist.init_process_group = lambda *args, **kwargs: time.sleep(99)")
    begin = time.monotonic()
    result = run(script, "--timeout", PATIENCE_S, nproc=2, timeout=20)
    assert result.codes == [1, 1]
    assert time.monotonic() - begin < 5 * PATIENCE_S  # rank 0's own call would give up after 10
    late = f"ranks 0-1 still in 'process group' after {PATIENCE_S} s"
    assert any(late in line for line in findings(result.outputs[0]))
    assert "kernel" in result.outputs[0]  # what was learnt before is still shown


def test_a_port_where_nobody_answers_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts, and never speaks
        env = {"MASTER_PORT": mute.getsockname()[1]}
        result = run(CHECK, "--timeout", PATIENCE_S, nproc=2, env=env, timeout=20)
    assert result.codes == [1, 1]
    assert f"no answer from 127.0.0.1:{env['MASTER_PORT']} within {PATIENCE_S} s" in result.outputs[1]


# ---- bad usage ----
@pytest.mark.parametrize(
    ("flags", "env", "says"),
    [
        (["--timeout", "0"], {}, "--timeout 0 is not above 0 seconds: use --timeout 10"),
        (["--json", "/nowhere/report.json"], {}, "--json /nowhere/report.json: No such file or directory"),
        (["--device", "cuda"], {}, "2 local ranks need as many GPUs, this node shows 0: use --device cpu"),
        ([], {"WORLD_SIZE": ""}, "set without WORLD_SIZE: start with torchrun"),
        ([], {"RANK": "7"}, "rank 7 of 2"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(flags, env, says):
    result = run(CHECK, *(flags or ["--timeout", 5]), nproc=2, env=env)
    assert result.codes == [2, 2]
    lines = [line for output in result.outputs for line in output.splitlines()]
    assert lines
    assert all("error: " in line for line in lines)
    assert says in lines[0]


def test_an_occupied_port_is_one_line_and_exit_code_2():
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        env = {"MASTER_PORT": taken.getsockname()[1], "TORCHELASTIC_USE_AGENT_STORE": ""}
        result = run(CHECK, "--timeout", PATIENCE_S, nproc=1, env=env)
    assert result.codes == [2]
    assert f"127.0.0.1:{env['MASTER_PORT']} is in use: choose another --master-port" in result.outputs[0]


# ---- facts of machines that are not here ----
CARD = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory_mib": 81079,
    "capability": "9.0",
    "has_kernels": True,
    "ecc_uncorrected": 0,
    "rows_pending": False,
    "rows_failed": False,
    "pcie_generation": 5,
    "pcie_width": 16,
    "nvlinks": 18,
    "numa": 0,
}


@functools.cache
def own_facts():
    return facts_module.collect(torch.device("cpu"), 0)


def job(changes=None, n=2, nodes=1, gpu=True):
    """Facts of a healthy job of n ranks. changes, on every rank: {"gpu.capability": "7.0", "env.NCCL_NET": "IB"}."""
    own = own_facts() | {"asked": "auto", "env": {}, "cpu_count": 64, "threads": 1}
    own |= {"torch": "2.13.0", "python": "3.11.7", "kernel": "6.8.0", "machine": "x86_64", "container": False}
    own |= {"numpy": "2.4.0", "deepspeed": None, "shm_mib": 65536, "memlock_kib": None, "open_files": 1 << 20}
    own |= {"host_address": "10.0.0.1", "infiniband": [], "interface": "eth0", "interface_gbit": 10.0, "numa": [0]}
    if gpu:
        own |= {"device": "cuda", "cuda": "13.0", "driver": "590.48.01", "nccl": "2.30.7", "gpus": 8, "nvml": True}
    ranks = []
    for rank in range(n):
        facts = copy.deepcopy(own) | {
            "local_rank": rank,
            "node": str(rank * nodes // n),
            "cpus": [2 * rank, 2 * rank + 1],
        }
        if gpu:
            others = {f"GPU-{other}": "NV" for other in range(n) if other != rank}
            facts["gpu"] = copy.deepcopy(CARD) | {"uuid": f"GPU-{rank}", "distances": others}
        for name, value in (changes or {}).items():
            part, _, key = name.rpartition(".")
            (facts[part] if part else facts)[key] = value
        ranks.append(facts)
    return ranks


def bad(lines):
    return {line.name: line.text for line in lines if line.verdict == "FINDING"}


def test_a_healthy_gpu_job_has_no_finding():
    for shape in ({"n": 1}, {"n": 8}, {"n": 8, "nodes": 2}, {"n": 4, "gpu": False}):
        facts = job(**shape)
        assert bad(rules.judge(facts)) == {}
        assert [line for line in rules.match(rules.load_issues(), facts) if line.verdict == "FINDING"] == []


@pytest.mark.parametrize(
    ("name", "ranks", "changes", "says"),
    [
        ("torch", [3], {"torch": "2.12.1"}, "ranks 0-2: 2.13.0; rank 3: 2.12.1"),
        ("driver", [2, 3], {"driver": "580.1"}, "ranks 0-1: 590.48.01; ranks 2-3: 580.1"),
        ("nccl", [0], {"nccl": "2.29.7"}, "rank 0: 2.29.7; ranks 1-3: 2.30.7"),
        ("deepspeed", [1], {"deepspeed": "0.19.8"}, "ranks 0, 2-3: none; rank 1: 0.19.8"),
        ("kernel", [1], {"kernel": "6.1.0"}, "rank 1: 6.1.0"),
        ("name", [1], {"gpu.name": "A100"}, "rank 1: A100"),
        ("count", [1], {"gpus": 7}, "rank 1: 7"),
        ("ranks per GPU", [3], {"gpu.uuid": "GPU-2"}, "ranks 2-3 share GPU-2"),
        ("ranks per GPU", [2, 3], {"device": "cpu", "gpu": None}, "ranks 2-3 fell back to the CPU"),
        ("start", [1], {"gpu_error": "CUDA error 802"}, "rank 1: CUDA error 802"),
        ("memory health", [1], {"gpu.ecc_uncorrected": 3}, "rank 1: uncorrected ECC"),
        ("memory health", [2], {"gpu.rows_pending": True}, "rank 2: memory rows wait"),
        ("memory health", [2], {"gpu.rows_failed": True}, "rank 2: row remapping failed"),
        ("GPU affinity", [3], {"gpu.numa": 1}, "rank 3 runs on NUMA node [0], its GPU sits on node 1"),
        ("/dev/shm", [0, 1, 2, 3], {"shm_mib": 64}, "ranks 0-3: 64 MiB, below 1024 MiB"),
        ("open files", [1], {"open_files": 256}, "rank 1: 256, below 264"),
        ("affinity", [0, 1, 2, 3], {"cpus": [5]}, "1 of 64 CPUs for ranks 2-3"),
        ("affinity", [0, 1], {"threads": 8}, "16 threads"),
        ("host name", [2, 3], {"host_address": "127.0.1.1"}, "ranks 2-3 -> 127.0.1.1"),
        ("host name", [0, 1], {"host_address": None}, "ranks 0-1 -> nothing"),
        ("interface", [3], {"interface_gbit": 1.0}, "ranks 0-2: 10.0 Gbit/s; rank 3: 1.0 Gbit/s"),
        ("NCCL_SOCKET_IFNAME", [0], {"env.NCCL_SOCKET_IFNAME": "eth1"}, "rank 0: eth1; ranks 1-3: (unset)"),
        (
            "InfiniBand",
            [1],
            {"infiniband": [{"device": "mlx5_0", "state": "DOWN", "gbit": 400.0}]},
            "rank 1: mlx5_0 DOWN 400",
        ),
    ],
)
def test_a_bad_fact_is_a_finding_that_names_the_ranks(name, ranks, changes, says):
    facts, changed = job(n=4, nodes=2), job(changes, n=4, nodes=2)
    for rank in ranks:
        facts[rank] = changed[rank]
    found = bad(rules.judge(facts))
    assert says in found[name]


def test_limits_are_judged_only_where_they_matter():
    port = [{"device": "mlx5_0", "state": "ACTIVE", "gbit": 400.0}]
    assert "memlock" in bad(rules.judge(job({"memlock_kib": 64, "infiniband": port})))
    assert bad(rules.judge(job({"memlock_kib": 64}))) == {}  # nothing registers memory
    assert bad(rules.judge(job({"shm_mib": 64}, gpu=False))) == {}  # no NCCL
    assert bad(rules.judge(job({"host_address": "127.0.1.1"}))) == {}  # one node
    assert bad(rules.judge(job({"host_address": "127.0.1.1", "env.GLOO_SOCKET_IFNAME": "eth0"}, nodes=2))) == {}


def test_two_ranks_on_one_gpu_are_kept_from_nccl():
    assert rules.backend(job()) == "nccl"
    assert rules.backend(job({"gpu.uuid": "GPU-0"})) == "gloo"
    assert rules.backend(job(gpu=False)) == "gloo"


# ---- known-bad versions: rule -> (facts that trigger it, facts that just do not) ----
TWO_NODES = {"nodes": 2}
MLX = [{"device": "mlx5_0", "state": "ACTIVE", "gbit": 400.0}]
RULES = {
    "driver-below-cuda-13": ({"driver": "575.57.08"}, {"driver": "580.65.06"}),
    "driver-below-cuda-12": ({"cuda": "12.6", "driver": "520.61.05"}, {"cuda": "12.6", "driver": "525.60.13"}),
    "driver-below-cuda-11": ({"cuda": "11.8", "driver": "450.51.06"}, {"cuda": "11.8", "driver": "450.80.02"}),
    "torch-without-kernels": ({"gpu.has_kernels": False}, {"gpu.has_kernels": True}),
    "cuda-13-before-turing": ({"gpu.capability": "7.0"}, {"gpu.capability": "7.5"}),
    "cuda-12.8-wheel-before-turing": (
        {"torch": "2.11.0+cu128", "cuda": "12.8", "gpu.capability": "7.0"},
        {"torch": "2.10.0+cu128", "cuda": "12.8", "gpu.capability": "7.0"},
    ),
    "driver-560-p2p": ({"driver": "560.35.03", "cuda": "12.6"}, {"driver": "570.86.15", "cuda": "12.6"}),
    "fabric-manager-version": ({"fabric_manager": "580.65.06"}, {"fabric_manager": "590.48.01"}),
    "nccl-2.29.2-hang": ({"nccl": "2.29.2"}, {"nccl": "2.29.3"}),
    "nccl-aarch64-proxy-deadlock": ({"machine": "aarch64", "nccl": "2.28.9"}, {"machine": "aarch64", "nccl": "2.29.3"}),
    "nccl-abort-hang-2.25": ({"nccl": "2.25.1"}, {"nccl": "2.26.2"}),
    "nccl-abort-hang-2.17": ({"nccl": "2.17.1"}, {"nccl": "2.18.1"}),
    "device-id-hang": ({"torch": "2.7.0+cu126"}, {"torch": "2.7.1+cu126"}),
    "launch-blocking-hang": (
        {"nccl": "2.14.3", "env.CUDA_LAUNCH_BLOCKING": "1"},
        {"nccl": "2.17.1", "env.CUDA_LAUNCH_BLOCKING": "1"},
    ),
    "torch-2.0.1-infiniband": (
        {"torch": "2.0.1+cu118", "cuda": "11.8", "nccl": "2.14.3", "infiniband": MLX, **TWO_NODES},
        {"torch": "2.0.1+cu118", "cuda": "11.8", "nccl": "2.14.3", **TWO_NODES},
    ),
    "nccl-2.19-alltoall-hang": ({"nccl": "2.19.3", **TWO_NODES}, {"nccl": "2.19.3"}),
    "nccl-without-peermem": (
        {"nccl": "2.22.3", "peermem": True, "infiniband": MLX},
        {"nccl": "2.23.4", "peermem": True, "infiniband": MLX},
    ),
    "nccl-blackwell-desktop": (
        {"nccl": "2.25.1", "gpu.capability": "12.0"},
        {"nccl": "2.25.1", "gpu.capability": "10.0"},
    ),
    "nccl-host-memory-in-containers": ({"nccl": "2.26.2", "container": True}, {"nccl": "2.26.5", "container": True}),
    "p2p-disabled": ({"env.NCCL_P2P_DISABLE": "1"}, {"env.NCCL_P2P_DISABLE": "0"}),
    "infiniband-disabled": (
        {"env.NCCL_IB_DISABLE": "1", "infiniband": MLX, **TWO_NODES},
        {"env.NCCL_IB_DISABLE": "1", **TWO_NODES},
    ),
    "two-nccl-wheels": ({"several_nccl_wheels": True}, {"several_nccl_wheels": False}),
    "other-nccl-on-path": ({"nccl_on_library_path": "/opt/libnccl.so.2"}, {"nccl_on_library_path": None}),
    "nccl-not-from-wheel": ({"nccl_differs_from_wheel": True}, {"nccl_differs_from_wheel": False}),
    "conda-cuda-beside-pip-torch": ({"conda_cuda_beside_pip": "nccl-2.21"}, {"conda_cuda_beside_pip": None}),
    "numpy-2-before-torch-2.3": ({"torch": "2.2.2", "numpy": "2.0.1"}, {"torch": "2.3.0", "numpy": "2.0.1"}),
    "deepspeed-elastic-import": ({"deepspeed": "0.14.2", "torch": "2.4.0"}, {"deepspeed": "0.14.4", "torch": "2.4.0"}),
    "compile-on-python-3.12": ({"python": "3.12.3", "torch": "2.3.1"}, {"python": "3.12.3", "torch": "2.4.0"}),
    "compile-on-python-3.13": ({"python": "3.13.1", "torch": "2.5.1"}, {"python": "3.13.1", "torch": "2.6.0"}),
    "kernel-below-5.5": ({"kernel": "5.4.0-190-generic"}, {"kernel": "5.15.0-105-generic"}),
    "renamed-async-error-handling": (
        {"env.NCCL_ASYNC_ERROR_HANDLING": "1"},
        {"env.TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
    ),
    "renamed-blocking-wait": ({"env.NCCL_BLOCKING_WAIT": "1"}, {"env.TORCH_NCCL_BLOCKING_WAIT": "1"}),
    "renamed-flight-recorder-size": (
        {"env.TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"},
        {"env.TORCH_FR_BUFFER_SIZE": "2000"},
    ),
    "restart-meets-dead-store": ({"env.TORCHELASTIC_MAX_RESTARTS": "3"}, {"env.TORCHELASTIC_MAX_RESTARTS": "0"}),
    "flight-recorder-misses-teardown": ({"torch": "2.13.0"}, {"torch": "2.14.0"}),
}


@pytest.mark.parametrize("issue", rules.load_issues(), ids=lambda issue: issue["id"])
def test_each_rule_fires_on_its_facts_and_rests_on_the_next_ones(issue):
    fires, rests = RULES[issue["id"]]
    for changes, expected in ((fires, True), (rests, False)):
        nodes = changes.get("nodes", 1)
        facts = job({name: value for name, value in changes.items() if name != "nodes"}, nodes=nodes)
        lines = rules.match([issue], facts)
        assert bool(lines) is expected
        if lines:
            assert lines[0].text.startswith("ranks 0-1: ")
            assert lines[0].verdict == ("info" if issue.get("level") == "note" else "FINDING")
            assert issue["source"] in lines[0].remedy


def test_the_table_of_issues_is_complete():
    issues, known = rules.load_issues(), rules.conditions(job()[0], job())
    assert len(issues) >= 15
    assert sorted(RULES) == sorted(issue["id"] for issue in issues)
    for issue in issues:
        assert set(issue) <= {"id", "when", "level", "symptom", "remedy", "source", "confidence"}
        assert issue["source"].startswith("https://")
        assert issue["confidence"] in ("documented", "confirmed", "reported", "measured")
        assert all(name in known or name.startswith("env.") for name in issue["when"]), issue["when"]


def test_a_rule_names_only_the_ranks_it_fits():
    facts = job(n=4)
    facts[2] = job({"nccl": "2.29.2"}, n=4)[2]
    [line] = [line for line in rules.match(rules.load_issues(), facts) if line.verdict == "FINDING"]
    assert line.text.startswith("rank 2: ")


@pytest.mark.parametrize(
    ("version", "bounds", "inside"),
    [
        ("2.13.0+cpu", ">=2.13", True),
        ("2.9.1", ">=2.13", False),  # numbers, not text
        ("2.26.2", ">=2.25, <2.26.2", False),
        ("2.26.1", ">=2.25, <2.26.2", True),
        ("2.6", ">2.6.0", False),
        ("2.29.2", "==2.29.2", True),
        ("450.51.06", "<450.80.02", True),
        ("5.4.0-190-generic", "<5.5", True),
        ("none", ">=1", False),
    ],
)
def test_version_ranges(version, bounds, inside):
    assert rules.in_range(version, bounds) is inside


def test_without_a_toml_reader_the_table_is_a_finding_with_the_install_line(tmp_path):
    result = run(sabotage(tmp_path, "import rules\nrules.toml = None"), nproc=2)
    assert result.codes == [1, 1]
    [line] = findings(result.outputs[0])
    assert "known issues" in line
    assert "pip install tomli" in result.outputs[0]


# ---- links ----
@pytest.mark.parametrize("n", [2, 3, 8, 16, 17, 20])
def test_the_sweep_meets_every_pair_once_and_no_rank_twice_at_a_time(n):
    rounds = links.rounds(range(n))
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(n), 2))
    for pairs in rounds:
        members = list(itertools.chain(*pairs))
        assert len(members) == len(set(members))


def test_a_link_is_compared_with_links_of_its_own_kind():
    facts = job(n=4, nodes=2)
    speeds = {(a, b): 300.0 if a // 2 == b // 2 else 40.0 for a, b in itertools.permutations(range(4), 2)}
    assert links.slow_pairs(speeds, facts) == []
    speeds[0, 3] = 19.0
    assert links.slow_pairs(speeds, facts) == [(0, 3, 40.0)]


@pytest.mark.parametrize(
    ("shape", "changes", "gb_s", "name"),
    [
        ({}, {}, 450.0, "NVLink"),
        ({}, {"gpu.capability": "8.0", "gpu.nvlinks": 12}, 300.0, "NVLink"),
        ({}, {"gpu.distances": {"GPU-0": "PHB", "GPU-1": "PHB"}}, 63.0, "PCIe"),
        ({}, {"gpu.distances": {}, "gpu.pcie_generation": 4, "gpu.pcie_width": 8}, 15.5, "PCIe"),
        ({"nodes": 2}, {"infiniband": MLX * 8}, 400.0, "InfiniBand"),
        ({"nodes": 2}, {"infiniband": MLX * 8, "env.NCCL_IB_DISABLE": "1"}, 1.25, "Ethernet"),
        ({"nodes": 2, "gpu": False}, {}, 1.25, "Ethernet"),
        ({"nodes": 2, "gpu": False}, {"interface_gbit": None}, None, "network of unknown speed"),
        ({"gpu": False}, {}, None, "loopback"),
    ],
)
def test_what_the_links_should_give(shape, changes, gb_s, name):
    assert links.expected(job(changes, **shape)) == (gb_s, name)


def test_speed_is_judged_against_the_link():
    assert links.judge_speed("all_reduce", 40e-6, 360.0, job()).verdict == "OK"
    slow = links.judge_speed("all_reduce", 40e-6, 20.0, job())
    assert slow.verdict == "FINDING"
    assert "4% of NVLink's 450" in slow.text
    assert links.judge_speed("all_reduce", 0.05, 360.0, job()).verdict == "FINDING"
    cluster = job({"infiniband": MLX * 8}, n=16, nodes=2)
    assert links.judge_speed("all_reduce", 40e-6, 190.0, cluster).verdict == "FINDING"  # of 400 GB/s a node
    assert links.judge_speed("all_to_all", 40e-6, 45.0, cluster).verdict == "OK"  # of 50 GB/s a rank
    assert links.judge_speed("all_to_all", 40e-6, 20.0, cluster).verdict == "FINDING"
    assert links.judge_speed("all_reduce", 0.05, 0.1, job(gpu=False)).verdict == "OK"


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 6), ["sm_80", "sm_90"], True),  # same major
        ((7, 0), ["sm_75", "sm_80"], False),
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # PTX
        ((10, 0), ["sm_90a", "compute_90a"], False),  # "a": that card alone
    ],
)
def test_whether_torch_has_kernels_for_a_gpu(capability, built_for, runs):
    assert facts_module.has_kernels(*capability, built_for) is runs


class FakeNvml(types.SimpleNamespace):
    """nvidia-ml-py as far as facts.py uses it, for two cards joined by NVLink; what is unsupported raises NVMLError."""

    class NVMLError(Exception):
        pass

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK, NVML_NVLINK_MAX_LINKS = 2, 0, 18
    nvmlEventTypeXidCriticalError = 8
    xids = (79, 48)

    def __init__(self):
        super().__init__(waiting=list(self.xids))

    def __getattr__(self, name):
        def function(*arguments):
            if name == "nvmlEventSetWait_v2":
                if not self.waiting:
                    raise self.NVMLError("Timeout")
                return argparse.Namespace(eventData=self.waiting.pop(0))
            answers = {
                "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
                "nvmlDeviceGetHandleByIndex": lambda index: f"GPU-{index}",
                "nvmlDeviceGetUUID": lambda handle: handle,
                "nvmlDeviceGetCount": lambda: 2,
                "nvmlDeviceGetPciInfo": lambda handle: argparse.Namespace(busId=b"00000000:41:00.0"),
                "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 2,
                "nvmlDeviceGetRemappedRows": lambda handle: (0, 1, 1, 0),
                "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
                "nvmlDeviceGetNvLinkState": lambda handle, link: 1 if link < 12 else 0,
                "nvmlDeviceGetP2PStatus": lambda a, b, index: 0,
                "nvmlDeviceGetTopologyCommonAncestor": lambda a, b: 50,
            }
            if name in answers:
                return answers[name](*arguments)
            if name in ("nvmlInit", "nvmlShutdown", "nvmlEventSetCreate", "nvmlDeviceRegisterEvents"):
                return ctypes.c_void_p()
            raise self.NVMLError("Not Supported")

        return function


def test_nvml_facts_and_xids(monkeypatch):
    monkeypatch.setattr(facts_module, "pynvml", FakeNvml())
    found = facts_module.nvml_facts("GPU-0")
    assert (found["ecc_uncorrected"], found["rows_pending"], found["rows_failed"]) == (2, True, False)
    assert (found["pcie_generation"], found["pcie_width"]) == (5, None)  # the width is not supported here
    assert (found["nvlinks"], found["distances"]) == (12, {"GPU-1": "NV"})
    assert facts_module.XidWatch("GPU-0").seen() == [79, 48]


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder)", "570.86.15"),
        (None, None),
    ],
)
def test_driver_is_read_from_both_of_its_kernel_modules(line, version, monkeypatch):
    monkeypatch.setattr(facts_module, "read", lambda path: line and f"NVRM version: {line}\nGCC version:  gcc 12.2.0\n")
    assert facts_module.driver() == version


def test_without_nvml_nothing_is_claimed(monkeypatch):
    monkeypatch.setattr(facts_module, "pynvml", None)
    assert facts_module.nvml_facts("GPU-0") == {}
    assert facts_module.XidWatch("GPU-0").seen() == []
    lines = rules.judge(job({"nvml": False}))
    assert any("pip install nvidia-ml-py" in line.text for line in lines)
    assert bad(lines) == {}


def test_variables_that_steer_communication_are_shown_and_no_others(monkeypatch):
    for name in ("NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT", "OMP_NUM_THREADS", "MY_SECRET"):
        monkeypatch.setitem(os.environ, name, "1")
    shown = set(facts_module.machine()["env"])
    assert shown >= {"NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT", "OMP_NUM_THREADS"}
    assert "MY_SECRET" not in shown
