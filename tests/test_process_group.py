"""common/process_group.py: what every script relies on, and the one line that each of the user's mistakes gets."""

import ast
import importlib.util
import re
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from runner import ROOT, run

MODULE = ROOT / "common" / "process_group.py"
ALONE = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "")
OWN_STORE = {"TORCHELASTIC_USE_AGENT_STORE": ""}  # as without torchrun: rank 0 serves the store
HEAD = f"""
import os, sys
import torch
import torch.distributed as dist
sys.path.append({str(ROOT)!r})
from common.process_group import UsageError, process_group
rank = os.environ.get("RANK")
"""
JOIN = """
with process_group("cpu", timeout=20) as (rank, local_rank, world_size, device):
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    print(rank, local_rank, world_size, device, dist.get_backend(), int(total))
assert not dist.is_initialized()
"""


@pytest.fixture
def start(tmp_path):
    """start(body, nproc, env, timeout) runs a tiny script with that body."""

    def start(body, nproc=1, env=None, timeout=20):
        script = tmp_path / "tiny.py"
        script.write_text(HEAD + body)
        return run(script, nproc=nproc, env=env, timeout=timeout)

    return start


@pytest.fixture
def module():
    """common/process_group.py, imported into this process under a name of its own."""
    spec = importlib.util.spec_from_file_location("process_group_under_test", MODULE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error_lines(output):
    """The lines that carry an error, torch's own noise left out; a traceback counts as one more."""
    return re.findall(r"^\[rank.*\] error: .*|^.*Traceback.*", output, re.MULTILINE)


# ---- joining and leaving ----
def test_one_process_without_torchrun_is_a_world_of_one(start):
    result = start(JOIN, env=ALONE).check()
    assert result.outputs == ["0 0 1 cpu gloo 1\n"]


def test_ranks_are_those_that_torchrun_set_and_the_group_is_left_at_the_end(start):
    result = start(JOIN, nproc=3).check()
    assert result.outputs == [f"{rank} {rank} 3 cpu gloo 3\n" for rank in range(3)]


def test_no_thread_of_the_group_outlives_it(tmp_path):
    """A gloo thread that is there when Python ends may abort the process, after its work is done.

    torch imports torch.distributed.nn with the first optimizer: inside the group, it keeps it as a default argument.
    """
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.append({str(ROOT)!r})\n"
        "from pathlib import Path\n"
        "from common.process_group import process_group\n"
        "with process_group():\n"
        "    import torch._dynamo\n"
        "names = [(task / 'comm').read_text() for task in Path('/proc/self/task').iterdir()]\n"
        "print([name for name in names if 'gloo' in name])\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr


def test_local_rank_is_torchruns_where_nodes_hold_one_rank_each(start):
    result = start(JOIN, nproc=2, env={"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}).check()
    assert result.outputs == [f"{rank} 0 2 cpu gloo 2\n" for rank in range(2)]


def test_mesh_sizes_that_divide_the_world_are_accepted(start):
    # A rank that leaves at once closes connections that others may still be making: torch's barrier keeps it.
    body = 'with process_group("cpu", 20, pp=1, tp=2) as (_, _, world_size, _): dist.barrier(); assert world_size == 4'
    start(body, nproc=4).check()


def test_restarted_workers_do_not_see_what_the_dead_attempt_left_in_the_store(start):
    body = """
from common.process_group import meet
for attempt in ("0", "1"):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
    store = meet(0, 20)
    print(store.check(["address of rank 1"]))
    store.set("address of rank 1", "127.0.0.1:1")
"""
    assert start(body).check().outputs == ["False\nFalse\n"]


def test_ranks_of_nodes_that_count_their_restarts_apart_meet_where_the_store_is_new(start):
    """A node that comes back has restarted nothing, the survivor once; torchrun then has rank 0 serve a new store."""
    body = """
os.environ["TORCHELASTIC_RESTART_COUNT"] = rank
kept = dist.rendezvous
def rendezvous(*args, **kwargs):  # the runner's store is new: it stands for the one that rank 0 serves
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    found = next(iter(kept(*args, **kwargs)))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    return [found]
dist.rendezvous = rendezvous
"""
    result = start(body + JOIN, nproc=2).check()
    assert result.outputs == [f"{rank} {rank} 2 cpu gloo 2\n" for rank in range(2)]


# ---- failing ----
def test_usage_error_is_one_line_and_exit_code_2_on_every_rank(start):
    result = start('with process_group("cpu", 20): raise UsageError("64 is not divisible by 3: use 63")', nproc=3)
    assert result.codes == [2, 2, 2]
    assert result.outputs == [f"[rank{rank}] error: 64 is not divisible by 3: use 63\n" for rank in range(3)]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ('ValueError("broken")', 1, r"\[rank1\]: ValueError: broken"),
        ('UsageError("only here")', 2, r"\[rank1\] error: only here"),
        ("KeyboardInterrupt", 1, r"\[rank1\]: KeyboardInterrupt"),
    ],
)
def test_one_rank_that_raises_ends_all_ranks_long_before_the_timeout(start, error, code, message):
    body = f"""
with process_group("cpu", timeout=600) as (rank, *_):
    dist.barrier()
    if rank == 1:
        raise {error}
    dist.all_reduce(torch.ones(1))
"""
    result = start(body, nproc=3)  # killed (code -9) after 20 s
    assert result.codes == [1, code, 1]
    for rank, output in enumerate(result.outputs):
        assert re.search(message if rank == 1 else rf"\[rank{rank}\]: RuntimeError: ", output), output


def test_two_ranks_that_wait_for_each_other_fail_after_the_timeout_by_name(start):
    body = """
with process_group("cpu", timeout=3) as (rank, *_):  # which is for the set-up, too
    dist.recv(torch.ones(1), src=1 - rank)
"""
    result = start(body, nproc=2)
    assert result.codes == [1, 1]
    for rank, output in enumerate(result.outputs):
        assert re.search(rf"\[rank{rank}\]: .*(Timed out waiting 3000ms|timeout after 3000ms|closed by peer)", output)


def test_no_rank_leaves_before_all_have_refused(start):
    """Rank 0 would break off rank 1's connections, which then ends in a traceback instead of its line."""
    body = """
import select
with process_group("cpu", timeout=20) as (rank, *_):
    dist.broadcast(pid := torch.tensor(os.getpid()), src=0)
    if rank == 1:
        assert not select.select([os.pidfd_open(int(pid))], [], [], 0.5)[0], "rank 0 has left"
    raise UsageError("64 is not divisible by 3: use 63")
"""
    assert start(body, nproc=2).codes == [2, 2]


# ---- the user's mistakes ----
@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"WORLD_SIZE": ""}, "RANK, MASTER_ADDR, MASTER_PORT set without WORLD_SIZE: start with torchrun, or unset"),
        ({"RANK": ""}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT set without RANK: "),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "RANK, WORLD_SIZE set without MASTER_ADDR, MASTER_PORT: "),
        ({"RANK": "first"}, "must be numbers: .*'first'; start with torchrun"),
        ({"WORLD_SIZE": "two"}, "must be numbers: .*'two'"),
        ({"MASTER_PORT": "http"}, "must be numbers: .*'http'"),
        ({"LOCAL_RANK": "zero"}, "must be numbers: .*'zero'"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "rank 2 of 2, .*: ranks end at size - 1"),
        ({"RANK": -1}, "rank -1 of 1, "),
        ({"LOCAL_RANK": 1}, "local rank 1 of 1: "),
    ],
)
def test_wrong_environment_is_one_line(start, env, message):
    result = start(JOIN, env=env)
    assert result.codes == [2]
    assert re.fullmatch(rf"\[rank{env.get('RANK', 0) or 0}\] error: .*{message}.*\n", result.outputs[0])


@pytest.mark.parametrize(("gpus", "way_out"), [(0, "--device cpu"), (1, "--nproc-per-node 1")])
def test_cuda_without_a_gpu_for_every_local_rank_is_one_line(start, gpus, way_out):
    body = f"torch.cuda.device_count = lambda: {gpus}\nwith process_group('cuda', 20): pass"
    result = start(body, nproc=2)
    assert result.codes == [2, 2]
    line = f"error: 2 local ranks need as many GPUs, this node shows {gpus}: use {way_out}\n"
    assert result.outputs == [f"[rank0] {line}", f"[rank1] {line}"]


def test_unused_gpus_are_said_once(start):
    result = start("torch.cuda.device_count = lambda: 1" + JOIN.replace('"cpu"', '"auto"'), nproc=2).check()
    assert [output.count("note: 1 GPUs unused, 2 ranks run on the CPU\n") for output in result.outputs] == [1, 0]


@pytest.mark.parametrize(("sizes", "needed"), [("pp=2, tp=2", 4), ("tp=0", 1)])
def test_mesh_that_does_not_fit_the_world_is_one_line(start, sizes, needed):
    result = start(f'with process_group("cpu", 20, {sizes}): pass', nproc=3)
    assert result.codes == [2, 2, 2]
    line = f"world size 3 is not a multiple of {eval(f'dict({sizes})')}: use {needed} processes"
    assert result.outputs == [f"[rank{rank}] error: {line}\n" for rank in range(3)]


def test_ranks_with_different_backends_are_refused(start):
    body = """
if rank == "1":  # as if only the second node had a GPU
    torch.cuda.device_count, torch.cuda.set_device = lambda: 1, lambda _: None
with process_group("auto", timeout=1): pass
"""
    result = start(body, nproc=2, env={"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1})
    assert result.codes[1] == 2
    assert result.codes[0] not in (0, -9)  # it waited for rank 1 for a second
    assert result.outputs[1] == (
        "[rank1] error: this rank found nccl, rank 0 gloo: mend its GPUs, or use --device cpu\n"
    )


# ---- the meeting point ----
@pytest.fixture
def port():
    """A port of 127.0.0.1 that is held, but not served, for the length of a test."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture
def stranger():
    """The port of a server that accepts connections and never speaks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_occupied_port_is_one_line(start, stranger):
    result = start(JOIN, env=OWN_STORE | {"MASTER_PORT": stranger})
    assert result.codes == [2]
    line = f"127.0.0.1:{stranger} is in use: choose another --master-port, or end the job that holds it"
    assert error_lines(result.outputs[0]) == [f"[rank0] error: {line}"]


SHORT = JOIN.replace("timeout=20", "timeout=2")


def test_stranger_that_never_speaks_ends_in_one_line_after_the_timeout(start, stranger):
    result = start(SHORT, env=OWN_STORE | {"MASTER_PORT": stranger, "RANK": 1, "WORLD_SIZE": 2}, timeout=10)
    assert result.codes == [2]
    (line,) = error_lines(result.outputs[0])
    assert re.match(rf"\[rank1\] error: .* 127\.0\.0\.1:{stranger} in 2 s: ", line)


def test_nobody_at_the_address_ends_in_one_line_after_the_timeout(start, port):
    result = start(SHORT, env=OWN_STORE | {"MASTER_PORT": port, "RANK": 1, "WORLD_SIZE": 2}, timeout=10)
    assert result.codes == [2]
    (line,) = error_lines(result.outputs[0])
    assert re.match(rf"\[rank1\] error: .* 127\.0\.0\.1:{port} in 2 s: ", line)


def test_rank_0_that_nobody_joins_ends_in_one_line_after_the_timeout(start):
    result = start(SHORT, env=OWN_STORE | {"MASTER_PORT": 0, "WORLD_SIZE": 2}, timeout=10)
    assert result.codes == [2]
    (line,) = error_lines(result.outputs[0])
    assert re.match(r"\[rank0\] error: .* 127\.0\.0\.1:0 in 2 s: ", line)


def test_number_that_is_no_port_ends_in_one_line(start):
    result = start(JOIN, env=OWN_STORE | {"MASTER_PORT": 99999})
    assert result.codes == [2]
    (line,) = error_lines(result.outputs[0])
    assert "127.0.0.1:99999" in line


# ---- CUDA, without one ----
def test_cuda_device_is_set_before_the_group_which_gets_device_and_timeout(module, monkeypatch):
    class Reached(Exception):
        pass

    def init(backend, _url, timeout, world_size, rank, _store, device_id):
        calls.append((backend, timeout.total_seconds(), world_size, rank, device_id))
        raise Reached

    calls = []
    for name in ALONE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", init)
    with pytest.raises(Reached), module.process_group("auto", timeout=7):
        pass
    assert calls == [0, ("nccl", 7, 1, 0, torch.device("cuda", 0))]


def test_each_local_rank_takes_the_gpu_of_its_number(module, monkeypatch):
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert [module.choose_device("auto", i, 4) for i in range(4)] == [torch.device("cuda", i) for i in range(4)]
    assert current == [0, 1, 2, 3]
    assert module.choose_device("cpu", 0, 4) == torch.device("cpu")


# ---- nothing else lives here ----
def test_module_holds_the_process_group_and_nothing_else():
    tree = ast.parse(MODULE.read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert names == {"UsageError", "read_environment", "choose_device", "meet", "process_group"}
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in modules if name.startswith("torch")} == {
        "torch",
        "torch.distributed",
        "torch.distributed.nn",
    }
    assert not modules & {"logging", "json", "argparse"}
    assert "mesh(" not in MODULE.read_text()
