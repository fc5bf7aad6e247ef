"""07_diagnostics/hang.py: every lab through the tool, the judge on composed records, bad input, several watchers."""

import io
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runner
from emulated import cluster, needs_namespaces, one_rank_each
from runner import ROOT

sys.path.append(str(ROOT / "07_diagnostics"))
import hang as script
import record
import records
import verdict
from labs import labs
from records import Call, Rank

sys.path.pop()
for module in ("child", "hang", "labs", "proc", "record", "records", "script", "verdict"):
    del sys.modules[module]

SCRIPT = ROOT / "07_diagnostics" / "hang.py"
TIMEOUT_S = 2  # without progress; a step of a lab takes milliseconds
PROMISED_S = 10  # the tool answers within its timeout and this
AT_ONCE = 4  # jobs
LABS, LABS_PY = labs(), ROOT / "07_diagnostics" / "labs.py"


class Forked:
    """In the place of subprocess.Popen: the same program, forked from this warm process."""

    def __init__(self, command, env, stdout, start_new_session):
        self.returncode = None
        self.file = open(Path(command[3]) / "output", "w+")
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            runner.become(Path(command[1]), command[2:], env, self.file)

    def poll(self):
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)


@pytest.fixture
def watch(monkeypatch, capsys):
    """Runs a script under hang.py, forked, and returns (exit code, the JSON object, seconds)."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, record.SIGNAL)
    handlers = {number: signal.getsignal(number) for number in numbers}
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: Forked(command, **options))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def watch(*words, ranks=1, timeout=TIMEOUT_S, grace=1):
        began = time.monotonic()
        code = script.run([str(word) for word in words], ranks, timeout, grace, None, True)
        return code, json.loads(capsys.readouterr().out), time.monotonic() - began

    yield watch
    monkeypatch.setattr(subprocess, "Popen", popen)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def command(*args, **options):
    line = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, **options)


@pytest.fixture
def plain(tmp_path):
    """Writes a script without torch."""

    def plain(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return plain


# ---- jobs that stand still ----
LOCK = """import re, torch, torch.distributed as dist
def tokenize():
    re.match("(a+)+$", "a" * 60 + "b")  # takes years, without a moment for another thread
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    tokenize()
dist.all_reduce(torch.ones(1))
"""
GROUPS = """import torch, torch.distributed as dist
dist.init_process_group("gloo")
alone = [dist.new_group([rank], group_desc=f"alone{rank}") for rank in (0, 1)]
dist.all_reduce(torch.ones(2), group=alone[dist.get_rank()])
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(3))
else:
    dist.recv(torch.ones(3), 0)
"""
SCRIPTS = {"lock.py": LOCK, "groups.py": GROUPS}  # of two ranks


def write_answer(words, ranks, file):
    """In a process of its own: runs a script under hang.py, and writes (exit code, JSON object, seconds)."""
    subprocess.Popen = Forked
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)
    sys.stdout, began = io.StringIO(), time.monotonic()
    code = script.run([str(word) for word in words], ranks, TIMEOUT_S, 1, None, True)
    file.write_text(json.dumps([code, json.loads(sys.stdout.getvalue()), time.monotonic() - began]))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """{lab or script: (exit code, JSON object, seconds)}: some at a time, as they mostly stand still."""
    folder, running = tmp_path_factory.mktemp("jobs"), set()
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)
    jobs = {name: ([folder / name], 2) for name in SCRIPTS}  # the slowest first
    jobs |= {name: ([LABS_PY, name], lab.ranks) for name, lab in LABS.items()}
    left = list(jobs)
    while left or running:
        if left and len(running) < AT_ONCE:
            name = left.pop(0)
            if (pid := os.fork()) == 0:
                try:
                    write_answer(*jobs[name], folder / f"{name}.json")
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                finally:
                    os._exit(0)
            running.add(pid)
        running -= {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.01)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in jobs}


@pytest.mark.parametrize("name", LABS)
def test_lab_is_named_with_its_rank_and_ended(name, answers):
    lab = LABS[name]
    code, answer, seconds = answers[name]
    assert (answer["cause"], answer["ranks"]) == (lab.cause, lab.blamed), json.dumps(answer, indent=1)
    assert code == answer["exit_code"]
    assert (code == 0) == (lab.cause == "none")
    assert seconds < TIMEOUT_S + PROMISED_S
    assert answer["fix"] or lab.cause == "none"


def test_answer_says_where_every_rank_is(answers):
    code, answer, _ = answers["save"]
    assert code == script.STOOD_STILL
    call = answer["pending"]["0"][0]
    assert (call["op"], call["size"], call["seq"]) == ("all_gather", "[8] float32", 4)
    assert "gather_and_save" in answer["where"]["0"]
    assert 'waits in number 4 of group "default_pg" (ranks 0-1): all_reduce of [8] float32' in answer["where"]["1"]
    assert "`if rank == 0 and step == FAULTY`" in answer["why"]
    assert any("gather_and_save" in line for line in answer["stacks"]["0"])


def test_watchers_of_a_launcher_report_to_rank_0():
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    line += ["run", "--timeout", "3", "--json", "--", str(LABS_PY), "data"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert done.stdout, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["cause"], answer["ranks"]) == ("slow_data", [1])
    assert "labs.py" in answer["where"]["1"]
    assert "__getitem__" in answer["stacks"]["1"][0]


def test_watchers_meet_at_the_next_port_where_one_is_taken(plain):
    path = plain("import os\nraise SystemExit(3 * int(os.environ['RANK']))\n")
    line = [sys.executable, str(SCRIPT), "run", "--json", "--", str(path)]
    with socket.create_server(("", 0)) as taken:  # it accepts, and does not greet
        port = taken.getsockname()[1]
        env = os.environ | dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port - 1))
        jobs = [subprocess.Popen(line, env=env | dict(RANK=rank), stdout=subprocess.PIPE) for rank in "01"]
        answer, _ = (job.communicate(timeout=60)[0] for job in jobs)
        refused = command("run", "--port", port, "--", path, env=env | dict(RANK="0"))
    assert [job.returncode for job in jobs] == [3, 3]
    assert json.loads(answer)["ranks"] == [1]
    assert refused.returncode == 2
    assert refused.stderr == f"error: port {port} on this machine: Address already in use; choose another with --port\n"


# The main thread waits, another runs code that comes and goes, as an import does, and the stack is asked for.
ASKED = f"""import os, threading, time
def work():
    while True:
        exec("def deep(n): return n and deep(n - 1)\\ndeep(30)", dict())
if not (pid := os.fork()):
    for _ in range(2000):
        os.kill(os.getppid(), {record.SIGNAL})
        time.sleep(0.0002)
    os._exit(0)
threading.Thread(target=work, daemon=True).start()
os.waitpid(pid, 0)
"""


def test_rank_that_is_asked_for_its_stack_lives_on(plain):
    done = command("run", "--json", "--", plain(ASKED))
    assert (done.returncode, json.loads(done.stdout)["cause"]) == (0, "none"), done.stdout


@needs_namespaces
def test_machine_that_is_cut_off_is_named_and_ends_itself(plain):
    text = """import torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(2))
    print("reduced", flush=True)
"""
    words = one_rank_each(SCRIPT, "run", "--timeout", 3, "--", plain(text))
    done = cluster("--at", "reduced:cut:1", *words)  # it ends: so node 1, whom nobody can tell, has ended its rank, too
    assert "[node0] cause     machine_lost\n" in done.stdout, done.stdout[-2000:] + done.stderr
    assert "[node0] rank      1\n" in done.stdout
    assert re.search(r"\[node0\] rank 0    .*all_reduce of \[2\] float32", done.stdout)
    assert "[node0] rank 1    no more word from it\n" in done.stdout
    assert "[node1] hang.py: no more word from rank 0's watcher" in done.stdout


def test_groups_without_a_rank_do_not_disturb_its_record(answers):
    """torch keeps a number in the place of a group of others."""
    _, answer, _ = answers["groups.py"]
    assert 'waits in number 1 of group "default_pg" (ranks 0-1): all_reduce of [3] float32' in answer["where"]["0"]
    assert "waits in recv from rank 0 of [3] float32" in answer["where"]["1"]
    assert (answer["cause"], answer["ranks"]) == ("mismatched_send_recv", [1]), answer["why"]


def test_rank_that_never_lets_go_of_pythons_lock_is_seen_from_outside(answers):
    _, answer, _ = answers["lock.py"]
    assert (answer["cause"], answer["ranks"]) == ("slow_rank", [1])
    assert any("lock.py:3 in tokenize" in line for line in answer["stacks"]["1"])


# ---- scripts ----
@pytest.mark.parametrize(("text", "expected"), [("", 0), ("raise SystemExit(3)", 3), ("import os; os._exit(7)", 7)])
def test_exit_code_of_a_script_passes_through(text, expected, plain, watch):
    code, answer, _ = watch(plain(text))
    assert code == answer["exit_code"] == expected
    assert answer["cause"] == ("user_code_error" if expected else "none")


def test_what_a_script_raises_is_told_with_its_place(plain, watch):
    code, answer, _ = watch(plain("def f():\n    raise KeyError('step')\n\n\nf()\n"))
    assert (code, answer["cause"], answer["ranks"]) == (1, "user_code_error", [0])
    assert "KeyError: 'step' at script.py:2 in f" in answer["why"]


def test_traceback_is_that_of_the_script_alone(plain):
    done = command("run", "--", plain("1 / 0\n"))
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "runpy" not in done.stderr
    assert "record.py" not in done.stderr


def test_script_sees_its_own_arguments_folder_and_name(plain, watch, tmp_path):
    (tmp_path / "record.py").write_text("mine = True\n")  # a module of the name of one of hang.py's
    text = f"""import record, sys
assert record.mine and __name__ == "__main__"
assert sys.argv == [{str(tmp_path / "script.py")!r}, "--timeout", "5"]
assert sys.path[0] == {str(tmp_path)!r}
"""
    code, answer, _ = watch(plain(text), "--timeout", "5")
    assert code == 0, answer


def test_script_that_ignores_sigterm_is_killed_after_the_grace(plain, watch, tmp_path):
    text = f"""import os, signal, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
threading.Event().wait()
"""
    code, answer, seconds = watch(plain(text), timeout=1, grace=0.5)
    assert code == script.STOOD_STILL
    assert "wait" in answer["stacks"]["0"][0]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert seconds < 1 + PROMISED_S


def test_script_that_computes_is_left_alone(plain, watch):
    text = "import time\nend = time.process_time() + 1.5\nwhile time.process_time() < end:\n    pass\n"
    code, answer, _ = watch(plain(text), timeout=0.5)
    assert (code, answer["cause"]) == (0, "none")


def test_script_ends_when_its_watcher_is_killed(plain, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    text = f"import threading\nf = open({str(fifo)!r}, 'w')\nf.write('up\\n')\nf.flush()\nthreading.Event().wait()\n"
    line = [sys.executable, str(SCRIPT), "run", "--", str(plain(text))]
    with subprocess.Popen(line) as watcher, open(fifo) as pipe:
        assert pipe.readline() == "up\n"
        watcher.kill()
        assert pipe.read() == ""  # returns once the script, too, is gone


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run"], "0 scripts given, 1 needed"),
        (["run", "--", "absent.py"], "no file absent.py"),
        (["run", "--timeout", "0", "--", str(SCRIPT)], "--timeout 0"),
        (["run", "--ranks", "0", "--", str(SCRIPT)], "--ranks 0"),
        (["lab", "nonsense"], "lab nonsense: not one of the 12"),
    ],
)
def test_bad_use_is_one_line_and_exit_code_2(words, says):
    done = command(*words)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ---- the record of a call ----
def test_a_call_is_written_once_and_passed_on(tmp_path, monkeypatch):
    class Group:
        group_name = "7"

    class Tensor:
        shape, dtype = (2, 3), "torch.bfloat16"

    recorder = record.Recorder(tmp_path, 1.0, 1.0)
    written = []
    monkeypatch.setattr(os, "pwrite", lambda file, content, place: written.append(content))
    call = recorder.wrapped("allreduce", lambda group, *args, **kwargs: (group, args, kwargs), "/nowhere")
    group, tensors = Group(), [Tensor()]
    assert call(group, tensors, 5, timeout=1) == (group, (tensors, 5), {"timeout": 1})
    assert recorder.num_calls == len(written) == 1
    note = json.loads(written[0])
    assert (note["op"], note["group"], note["size"]) == ("all_reduce", "7", "[2, 3] bfloat16")
    assert note["where"][0] == __file__
    assert not recorder.transfers


def test_calls_of_nccl_are_read_from_its_own_recorder(tmp_path, monkeypatch):
    """A build with CUDA has two recorders; this one stands in for NCCL's."""
    import torch.distributed as dist

    recorder = record.Recorder(tmp_path, 1.0, 1.0)
    recorder.distributed = dist
    before = recorder.progress()[2:]
    entry = dict(process_group=("0", "default_pg"), collective_seq_id=7000, profiling_name="nccl:all_reduce", frames=[])
    entry |= dict(input_sizes=[[8]], input_dtypes=["BFloat16"], state="started", retired=False, is_p2p=False)
    status = dict(last_enqueued_collective=7000, last_started_collective=7000, last_completed_collective=6999)
    content = pickle.dumps({"entries": [entry | {"time_created_ns": 1}], "pg_status": {0: status}})
    module = sys.modules["torch._C._distributed_c10d"]
    monkeypatch.setattr(module, "_dump_nccl_trace", lambda *_: content, raising=False)
    recorder.record()
    (call,) = [call for call in json.loads((tmp_path / "record").read_text()) if call["seq"] == 7000]
    assert (call["op"], call["size"], call["done"]) == ("all_reduce", "[8] bfloat16", False)
    assert [now - then for now, then in zip(recorder.progress()[2:], before)] == [7000, 7000, 6999]


def test_every_wrapped_method_is_one_of_torch():
    import torch.distributed as dist

    known = [name for name in record.METHODS.split() if hasattr(dist.ProcessGroup, name)]
    assert {"allreduce", "_allgather_base", "_reduce_scatter_base", "broadcast", "barrier", "send", "recv"} <= {*known}


# ---- the judge ----
MAIN, DATA = "/job/train.py", "/env/torch/utils/data/dataloader.py"
USUAL = ("all_reduce", "[8] float32")
WORLD = {"0": {"ranks": [0, 1, 2], "name": "default_pg"}}


def called(*lines):
    """Calls from these lines of a script; a line may be (line, op) or (line, op, size)."""
    calls = []
    for seq, line in enumerate((one if isinstance(one, tuple) else (one,) for one in lines), 1):
        number, op, size = line if len(line) == 3 else (*line, *USUAL[len(line) - 1 :])
        calls.append(Call("0", seq, op, size, True, ((MAIN, number, "train"),)))
    return calls


def rank(number, *calls, **fields):
    """A rank that made these calls, of which the last is not done."""
    flat = [call for some in calls for call in some]
    flat[-1:] = [flat[-1]._replace(done=False)] if flat and not fields.pop("well", False) else flat[-1:]
    count = [len(flat)]
    return Rank(number, pid=1, count=count, recorded=True, groups=WORLD, calls=flat, **fields)


def judged(*some, starting=False):
    found = verdict.find_cause({one.rank: one for one in some}, starting)
    return found.cause, found.ranks


def test_one_of_three_that_skips_is_the_odd_one():
    others = [(10,), (11, "broadcast"), (10,)]
    skips = [(10,), (11, "broadcast"), (11, "broadcast")]
    assert judged(*(rank(n, called(*(skips if n == 2 else others))) for n in range(3))) == ("skipped_collective", [2])


def test_one_of_three_that_calls_more_is_the_odd_one():
    more = called(10, (12, "all_gather"))
    assert judged(rank(0, called(10, 10)), rank(1, more), rank(2, called(10, 10))) == (
        "rank_conditional_collective",
        [1],
    )


def test_size_of_the_minority_is_the_odd_one():
    sizes = [(10, "all_reduce", f"[{n}] float32") for n in (8, 8, 9)]
    assert judged(*(rank(n, called(10, size)) for n, size in enumerate(sizes))) == ("collective_size_mismatch", [2])


def test_known_sizes_at_one_line_are_another_order():
    """A loop over a set: the same line, the same tensors, in another order on one rank."""
    a, b = ((10, "all_reduce", f"[{n}] float32") for n in (4, 8))
    assert judged(*(rank(n, called(a, b, *((b, a) if n == 1 else (a, b)))) for n in range(3))) == (
        "collective_order",
        [1],
    )


@pytest.mark.parametrize("op", ["all_to_all", "scatter", "gather"])
def test_sizes_that_may_differ_are_no_fault(op):
    calls = [called((10, op, f"[{n}] float32"), 11) for n in range(3)]
    slow = rank(2, calls[2][:1], well=True, stack=[[DATA, 5, "_next_data"], [MAIN, 9, "train"]])
    assert judged(rank(0, calls[0]), rank(1, calls[1]), slow) == ("slow_data", [2])


def test_skip_between_calls_that_look_alike_is_found_by_their_lines():
    """Rank 1 skips line 11; every number still is an all_reduce of 8, until rank 1 has none left."""
    ranks = [rank(n, called(10, 11, 10, 11, 10, 11)) for n in (0, 2)]
    skips = rank(1, called(10, 10, 11, 10, 11), well=True, stack=[[MAIN, 20, "train"]])
    assert judged(*ranks, skips) == ("skipped_collective", [1])


def test_lines_that_differ_are_no_fault_by_themselves():
    """Rank 0 broadcasts from another line than the rest, as if rank == 0: .. else: .. does."""
    ranks = [rank(n, called((20 if n == 0 else 22, "broadcast"), 30)) for n in (0, 1)]
    late = rank(2, called((22, "broadcast")), well=True, busy=1.0, stack=[[MAIN, 25, "train"]])
    assert judged(*ranks, late) == ("slow_rank", [2])


@pytest.mark.parametrize(
    ("frames", "busy", "cause"),
    [
        ([[MAIN, 9, "next_batch"]], 0.0, "slow_data"),
        ([["/env/torch/serialization.py", 9, "_save"]], 0.0, "slow_save"),
        ([["/env/torch/optim/adam.py", 9, "step"]], 1.0, "slow_optimizer"),
        ([[MAIN, 9, "evaluate"]], 1.0, "slow_rank"),
        ([["/usr/lib/python3/threading.py", 9, "wait"]], 0.0, "idle_rank"),
        ([["/env/torch/distributed/distributed_c10d.py", 9, "new_group"], [MAIN, 8, "main"]], 0.0, "not_started"),
    ],
)
def test_rank_that_others_wait_for_is_named_with_what_it_does(frames, busy, cause):
    absent = rank(1, called(10), well=True, stack=frames, busy=busy)
    assert judged(rank(0, called(10, 11)), absent, rank(2, called(10, 11))) == (cause, [1])


def test_rank_that_computes_before_its_first_call_is_waited_for():
    absent = rank(1, busy=1.0, stack=[[MAIN, 3, "<module>"]])
    some = (rank(0, called(10)), absent, rank(2, called(10)))
    assert judged(*some, starting=True) == ("working", [1])
    assert judged(*some) == ("not_started", [1])  # but not without end


def test_rank_that_was_never_started_is_named():
    setting_up = [rank(n, stack=[["/env/torch/distributed/rendezvous.py", 9, "rendezvous"]]) for n in (0, 1)]
    assert judged(*setting_up, Rank(2)) == ("not_started", [2])


def test_rank_that_ended_well_before_the_others_had_fewer_inputs():
    ended = rank(1, called(10, 10), well=True, state="ended", code=0)
    assert judged(rank(0, called(10, 10, 10)), ended, rank(2, called(10, 10, 10))) == ("uneven_inputs", [1])


def test_rank_that_ended_well_is_named_where_torch_holds_the_broken_call_for_done():
    """As DDP's, which C++ starts: no call is pending, and Python has seen none."""
    error = {"text": "RuntimeError: Connection closed by peer [127.0.0.1]:1", "where": [MAIN, 9, "train"], "time": 1.0}
    broke = rank(0, called(10, 10), well=True, state="ended", code=1, error=error)
    ended = rank(1, called(10), well=True, state="ended", code=0)
    found = verdict.find_cause({0: broke, 1: ended})
    assert (found.cause, found.ranks) == ("uneven_inputs", [1])
    assert found.why == "rank 1 ended, with exit code 0, while rank 0 was at train.py:9 in train"
    assert found.code == 1


def test_all_that_compute_or_all_that_arrived_are_told_apart():
    assert judged(*(rank(n, called(10), well=True, busy=1.0) for n in range(3)))[0] == "working"
    assert judged(*(rank(n, called(10)) for n in range(3)))[0] == "unknown"
    assert judged(*(rank(n, called(10), well=True, stack=[[MAIN, 5, "f"]]) for n in range(3)))[0] == "idle_rank"


def transfer(op, peer, line=30):
    note = dict(op=op, group="0", peer=peer, tag=0, size="[8] float32", where=[MAIN, line, "stage"])
    return dict(transfers=[note], stack=[[MAIN, line, "stage"]], line="work.wait()")


def test_pipeline_waits_for_the_stage_that_waits_for_nobody():
    slow = rank(2, called(1), well=True, busy=1.0, stack=[[MAIN, 40, "forward"]])
    first, second = rank(0, **transfer("recv", 1)), rank(1, **transfer("recv", 2))
    assert judged(first, second, slow) == ("slow_rank", [2])


def test_receive_that_is_posted_early_holds_nobody_up():
    """Rank 1 posted a receive and computes: it is the one that the others wait for."""
    posted = transfer("recv", 0) | dict(stack=[[MAIN, 41, "forward"]], line="y = layer(x)")
    slow = rank(1, called(1), well=True, busy=1.0, **posted)
    assert judged(rank(0, **transfer("recv", 1)), slow, rank(2, **transfer("recv", 1))) == ("slow_rank", [1])


def test_peer_of_a_transfer_is_named_by_its_rank_not_by_its_place_in_the_group():
    groups = {"0": {"ranks": [1, 2], "name": "pp"}}
    waits = [rank(n, **transfer("recv", peer)) for n, peer in ((1, 1), (2, 0))]
    for one in waits:
        one.groups = groups
    found = verdict.find_cause({one.rank: one for one in waits})
    assert "rank 1 waits in recv from rank 2" in found.why
    assert (found.cause, found.ranks) == ("mismatched_send_recv", [1, 2])


def raised(text, when):
    return dict(error=dict(text=text, where=[MAIN, 9, "train"], time=when), state="ended", code=1)


def test_rank_that_failed_by_itself_counts_before_those_that_miss_it():
    lost = [rank(n, called(10), **raised("RuntimeError: Connection closed by peer", n)) for n in (0, 1)]
    assert judged(*lost, rank(2, called(10), **raised("ValueError: no such file", 5))) == ("user_code_error", [2])
    own_timeout = rank(2, called(10), **raised("TimeoutError: The read timed out", 5))
    assert judged(*lost, own_timeout) == ("user_code_error", [2])


def test_killed_rank_counts_before_what_the_others_raise():
    lost = [rank(n, called(10), **raised("RuntimeError: Connection closed by peer", n)) for n in (0, 1)]
    killed = Rank(2, pid=1, state="ended", code=-signal.SIGKILL, ended=3)
    found = verdict.find_cause({one.rank: one for one in (*lost, killed)})
    assert (found.cause, found.ranks, found.code) == ("killed_rank", [2], 128 + signal.SIGKILL)
    assert "SIGKILL" in found.why


def test_machine_without_a_word_is_named_first():
    assert judged(rank(0, called(10)), Rank(1, pid=1, state="lost"), rank(2, called(10))) == ("machine_lost", [1])


def test_stacks_from_outside_are_those_of_the_main_thread():
    faulthandler = """Thread 0x1 (most recent call first):
  File "/job/other.py", line 3 in watch

Current thread 0x2 (most recent call first):
  File "/job/train.py", line 9 in step
  File "/job/train.py", line 20 in <module>
"""
    py_spy = """Process 7: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (active): "MainThread"
    step (/job/train.py:9)
    <module> (/job/train.py:20)

Thread 8 (idle): "Thread-1"
    watch (/job/other.py:3)
"""
    expected = [[MAIN, 9, "step"], [MAIN, 20, "<module>"]]
    assert records.frames_in(faulthandler) == records.frames_in(py_spy) == expected
    assert records.frames_in("") == []


def test_ranks_are_named_in_spans():
    assert [records.say_ranks(some) for some in ([3], [0, 1, 2, 5], [7, 6])] == ["rank 3", "ranks 0-2, 5", "ranks 6-7"]


def test_every_cause_of_a_lab_has_a_fix():
    assert {lab.cause for lab in LABS.values()} - {"none"} <= set(verdict.FIXES)


def test_rank_without_a_record_is_said_to_have_none():
    """On an overloaded machine a record takes longer than it is waited for: then its stack alone proves nothing."""
    stack = [["/env/torch/distributed/distributed_c10d.py", 3151, "all_gather"], [MAIN, 9, "gather_and_save"]]
    last = {"op": "all_gather", "group": "0", "size": "[8] float32", "where": [MAIN, 9, "gather_and_save"]}
    late = [Rank(n, pid=1, count=[1], groups=WORLD, stack=stack, last=last) for n in range(2)]
    assert judged(*late) == ("unknown", [0, 1])
    assert records.where_is(late[0], {}).startswith("no record yet; its last call was all_gather of [8] float32")
