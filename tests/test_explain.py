"""07_diagnostics/explain.py: every rule by itself, public logs, logs of several ranks, real failures, bad input."""

import io
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys

import pytest
from runner import ROOT, run

sys.path.append(str(ROOT / "07_diagnostics"))
import explain as script
import logs
import patterns
from judges import JUDGES, watchdogs
from logs import Source, UsageError, as_text, numbered, open_all, without_prefix

sys.path.pop()
for module in ("explain", "judges", "logs", "patterns", "words"):
    del sys.modules[module]

SCRIPT = ROOT / "07_diagnostics" / "explain.py"
DATA = ROOT / "tests" / "data"
CAUSES, PATTERNS = script.load()
FIND = script.finder(PATTERNS)
RULES = [(name, table) for name, cause in CAUSES.items() for table in cause.get("rule", [])]
NO_FAULT = ("none", "benign_warning")
SAFE_MIB = 300  # of a process that streams: the interpreter and the rules take 20


@pytest.fixture(autouse=True)
def rules_are_read_once(monkeypatch):
    monkeypatch.setattr(script, "load", lambda: (CAUSES, PATTERNS))
    monkeypatch.setattr(script, "finder", lambda patterns: FIND)


def source(text, name="log", rank=None):
    return Source(name, numbered(io.BytesIO(text.encode())), rank)


def explain(*texts):
    """The answer to one log, or to the logs of several ranks."""
    if len(texts) == 1:
        return script.explain([source(texts[0])])
    return script.explain([source(text, f"rank{rank}.log", rank) for rank, text in enumerate(texts)])


def explain_path(path):
    return script.explain(open_all([str(path)]))


def command(*args, stdin=b"", **options):
    line = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(line, input=stdin, capture_output=True, timeout=60, **options)


# ---- every rule ----
@pytest.mark.parametrize(("name", "rule"), RULES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(RULES)])
def test_rule_leads_to_its_cause_and_leaves_near_misses_alone(name, rule):
    """Each pattern has a line that it finds; each such line leads through all other rules to the cause."""
    assert rule["yes"], f"{name} has a rule without a line that must lead to it"
    assert rule["no"], f"{name} has a rule without a near miss"
    kind = script.Rule(name, rule.get("level", "cause"), (), "", rule.get("errors", False))

    def finds(pattern, lines):
        texts = [without_prefix(line) for example in lines for line in example.splitlines()]
        return [text for text in texts if re.search(pattern, text, re.I) and script.speaks(kind, text)]

    assert [pattern for pattern in rule["says"] if not finds(pattern, rule["yes"])] == []
    assert [pattern for pattern in rule["says"] if finds(pattern, rule["no"])] == []
    assert {line: explain(line)["cause"] for line in rule["yes"]} == dict.fromkeys(rule["yes"], name)


def test_every_cause_has_a_rule_and_every_field_is_known():
    named = {other for _, rule in RULES for other in rule.get("or", [])}  # where a judge or a clue decides
    for name, cause in CAUSES.items():
        fields = {"family", "means", "check", "fix", "source"}
        assert fields <= set(cause) <= fields | {"rule", "clues", "finished", "succeeded", "trains"}
        assert cause["source"].startswith("https://")
        assert cause.get("rule") or name in {"none", *named}
        for rule in cause.get("rule", []):
            assert set(rule) <= {"says", "level", "errors", "or", "judge", "check", "yes", "no"}
            assert rule.get("level", "cause") in script.LEVELS
            assert {*rule.get("or", [])} <= CAUSES.keys() - {name}
            assert rule.get("judge", "watchdogs") in {*JUDGES, "watchdogs"}


def test_pattern_without_a_plain_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.undo()
    text = patterns.CAUSES.read_text().replace("says = [", "says = ['[a-z]+ \\d+', ", 1)
    (tmp_path / "causes.toml").write_text(text)
    monkeypatch.setattr(patterns, "CAUSES", tmp_path / "causes.toml")
    with pytest.raises(UsageError, match="holds no plain text of 3 letters"):
        script.load()


@pytest.mark.parametrize(
    ("pattern", "piece"),
    [
        (r"rank \d+ of (\d+) ranks", b" ranks"),
        (r"a?bcd[xyz]*efg(hij)?kl", b"bcd"),
        (r"(one|two) three", b" three"),
        (r"^Error: .*lost\b", b"error: "),
        (r"x{3}yy\.zzzz", b"zzzz"),
        (r"Ranks? (?P<rank>\d+)(, \d+)* failed", b" failed"),
    ],
)
def test_plain_text_stands_in_every_match(pattern, piece):
    assert patterns.plain(pattern) == piece


def test_search_of_all_texts_finds_what_one_by_one_finds():
    """The search tree may leave nothing out: compared on all lines of the public logs."""
    lines = {line for log in PUBLIC for line in log["log"].splitlines()}
    for line in lines:
        kind = line.encode().translate(None, script.DIGITS).lower()
        assert FIND(kind) == [pattern for pattern in PATTERNS if pattern.plain in kind]


# ---- public logs ----
PUBLIC = [json.loads(line) for line in (DATA / "public_logs.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("log", PUBLIC, ids=[log["id"] for log in PUBLIC])
def test_public_log(log):
    """Logs that people posted: where the log alone can settle it, the first answer is right; else it is among them."""
    answer = explain(log["log"])
    if log["decidable"] == "yes":
        assert answer["cause"] == log["cause_class"], answer["evidence"]
    else:
        assert log["cause_class"] in [answer["cause"], *answer["alternatives"]], answer["evidence"]
    assert answer["check"]


def test_public_logs_name_every_family():
    assert len(PUBLIC) >= 240
    assert {CAUSES[log["cause_class"]]["family"] for log in PUBLIC} >= {
        cause["family"] for name, cause in CAUSES.items() if name != "unknown"
    }


# ---- healthy logs ----
HEALTHY = {
    "metrics": "step 10 | error: 0.0312 | loss 2.31\nval_error=0.05 top5_error: 0.01\nerror rate 3.1 %\n0 errors, 0 "
    "failed",
    "torchrun": "W0501 10:00:00.000000 42 torch/distributed/run.py:792]\nSetting OMP_NUM_THREADS environment "
    "variable for "
    "each process to be 1 in default, to avoid your system being overloaded\nstep 1 loss 5.5",
    "store": "[W socket.cpp:697] [c10d] The client socket has failed to connect to [node1]:29500 (errno: 22 - Invalid "
    "argument).\nepoch 1 loss 2.0\nepoch 2 loss 1.9\nTraining completed in 20 s",
    "address": "[W1130 05:13:25 socket.cpp:764] [c10d] The IPv6 network addresses of (node1, 29500) cannot be "
    "retrieved "
    "(gai error: -2 - Name or service not known).\nstep 1 loss 5.5\nfinished training",
    "unused": "[W reducer.cpp:1389] Warning: find_unused_parameters=True was specified in DDP constructor, but did not "
    "find any unused parameters in the forward pass.\nstep 10 loss 2",
    "strides": "UserWarning: Grad strides do not match bucket view strides. This may indicate grad was not created "
    "according to the gradient layout contract\nstep 10 loss 2",
    "exit": "[rank0]:[W1130 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called before "
    "program exit, which can leak resources.\n",
    "barrier": "[rank0]:[W ProcessGroupNCCL.cpp:4115] [PG ID 0 PG GUID 0 Rank 0]  using GPU 0 to perform barrier as "
    "devices used by this process are currently unknown.\nstep 1 loss 5",
    "scaler": "UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`.\nstep 1\nGradient "
    "overflow. "
    "Skipping step, loss scaler 0 reducing loss scale to 32768.0\nstep 2 loss 4.2",
    "libaio": "[WARNING] async_io requires the dev libaio .so object and headers but these were not found.\n[WARNING] "
    "Please specify the CUTLASS repo directory as environment variable $CUTLASS_PATH\nstep 1",
    "nccl": "node1:42:77 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so), using internal implementation\n"
    "node1:42:77 [0] NCCL INFO NET/IB : No device found.\nnode1:42:77 [0] NCCL INFO Bootstrap : Using "
    "eth0:10.0.0.1<0>\n"
    "node1:42:77 [0] NCCL INFO cudaDriverVersion 12040\nstep 1 loss 5.5",
    "arguments": "Namespace(timeout=1800, error_file=None, on_error='raise', resume_from_failed=False, "
    "kill_after=9)\nok",
    "retry": "WARNING: download failed, retrying (1/5)\nwarning: the connection was reset, trying again\nstep 1 loss 5",
    "tests": "test_out_of_memory PASSED\ntest_broken_pipe PASSED\n12 passed, 0 failed, 0 errors in 3.2s",
    "tensorflow": "2024-05-01 10:00:00.1: E external/local_xla/xla/stream_executor/cuda/cuda_dnn.cc:9261] Unable to "
    "register cuDNN factory: Attempting to register factory for plugin cuDNN when one has already been "
    "registered\nstep 1",
    "restored": "[rank1]: RuntimeError: Connection closed by peer [10.0.0.2]:4242\n[rank1]: restarting worker group\n"
    "[rank1]: step 500 loss 2.0\n[rank1]: training completed",
    "plain": "epoch 1\nepoch 2\ndone",
}


FAULT_FREE = [json.loads(line) for line in (DATA / "healthy_logs.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_log_raises_no_alarm(name):
    answer = explain(HEALTHY[name])
    assert answer["cause"] in NO_FAULT, answer["evidence"]


@pytest.mark.parametrize("log", FAULT_FREE, ids=[log["id"] for log in FAULT_FREE])
def test_words_of_a_fault_alone_raise_no_alarm(log):
    """Counters, settings, hints, printed code, help texts, steps that were skipped, starts that were tried again."""
    answer = explain(log["log"])
    assert answer["cause"] in NO_FAULT, answer["evidence"]


REPORTS = [  # (line that reports nothing, the like of it that does)
    ("ECC error count: 0", "CUDA error: uncorrectable ECC error encountered"),
    ("oom-kill events: 0", "oom-kill: constraint=CONSTRAINT_MEMCG"),
    ("no process was OOMKilled", "the process was OOMKilled"),
    ("watch: 'too many open files'", "accept: too many open files"),
    ("oom_message: \"CUDA out of memory. Tried\"", "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"),
    ("[INFO] on EADDRINUSE another port is taken", "[ERROR] EADDRINUSE"),
    ("node0:1:2 [0] NCCL INFO Cuda failure 'out of memory'?", "node0:1:2 [0] NCCL WARN Cuda failure 'out of memory'"),
    ("Tip: too many open files? ulimit -n 65536", "OSError: [Errno 24] Too many open files"),
    ("# illegal memory access is what this kernel does", "CUDA error: an illegal memory access was encountered"),
    ("    raise RuntimeError('duplicate rank 0')", "RuntimeError: duplicate rank 0"),
    ("test_address_already_in_use[Address already in use] PASSED", "RuntimeError: Address already in use"),
]  # fmt: skip


@pytest.mark.parametrize(("silent", "speaking"), REPORTS, ids=[silent for silent, _ in REPORTS])
def test_line_that_reports_nothing_is_told_from_one_that_does(silent, speaking):
    assert explain(silent)["cause"] == "none"
    assert explain(speaking)["cause"] not in (*NO_FAULT, "unknown")


def test_code_counts_in_a_traceback_only():
    code = "    assert self.rank < self.world_size"
    assert explain(code)["cause"] == "none"
    assert explain(f'  File "sampler.py", line 7, in __init__\n{code}')["cause"] == "rank_world_size_inconsistent"


def test_warning_is_got_over_by_the_steps_after_it_not_by_those_before():
    warning, step = "WARNING: CUDA error: out of memory, skipping this batch", "step 7 loss 2.5"
    assert explain(f"{warning}\n{step}")["cause"] == "none"
    assert explain(f"{step}\n{warning}")["cause"] == "cuda_oom_capacity"
    assert explain(step, warning)["cause"] == "none"  # another rank reports the steps
    assert explain(f"RuntimeError: CUDA error: out of memory\n{step}")["cause"] == "cuda_oom_capacity"


def test_warning_at_the_start_gives_way_to_a_later_failure_of_another_kind():
    warning = "[W1130 05:13:25 socket.cpp:764] [c10d] (gai error: -2 - Name or service not known)."
    late = "torch.distributed.DistNetworkError: The client socket has timed out after 60s"
    assert explain(warning)["cause"] == "hostname_resolves_wrongly"
    assert explain(f"{warning}\n{late}")["cause"] == "hostname_resolves_wrongly"
    assert explain(f"{warning}\nKeyError: 'a'")["cause"] == "user_code_error"
    assert explain(f"KeyError: 'a'\n{warning}")["cause"] == "hostname_resolves_wrongly"


def test_good_end_heals_what_stands_before_it_unless_more_follows():
    error, end = "RuntimeError: CUDA error: out of memory", "training finished"
    assert explain(f"{error}\n{end}")["cause"] == "none"
    assert explain(f"{error}\n{end}\n{error}")["cause"] == "cuda_oom_capacity"
    assert explain(f"{end}\n{error}")["cause"] == "cuda_oom_capacity"
    succeeded = "I0501 api.py:879] [default] worker group successfully finished. Waiting 300 seconds"
    assert explain(f"[rank1]: {error}\n{end}")["cause"] == "cuda_oom_capacity"  # whose end?
    assert explain(f"[rank1]: {error}\n{succeeded}")["cause"] == "none"  # of all ranks


def test_exception_that_python_ignores_is_no_fault_and_the_next_one_is():
    ignored = "Exception ignored in: <_io.TextIOWrapper name='<stdout>'>\nBrokenPipeError: [Errno 32] Broken pipe\n"
    assert explain(ignored)["cause"] == "none"
    assert explain(f"{ignored}KeyError: 'a'")["cause"] == "user_code_error"


def test_harmless_words_in_an_error_hide_nothing():
    error = (
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. You can "
        "enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` to DDP"
    )
    assert explain(error)["cause"] == "ddp_unused_parameters"


def test_frightening_warning_does_not_hide_the_fault_after_it():
    for warning in HEALTHY.values():
        assert explain(f"{warning}\nRuntimeError: unable to allocate shared memory(shm) for file </torch_1>: "
                       "No space left on device (28)")["cause"] == "shm_too_small"  # fmt: skip


# ---- several ranks ----
PRIMARY = {  # what the rank that failed first prints
    "cuda_oom_capacity": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total "
    "capacity of 79.15 GiB of which 1.20 GiB is free. Including non-PyTorch memory, this process has 77.90 GiB "
    "memory in "
    "use. Of the allocated memory 76.00 GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but "
    "unallocated.",
    "user_code_error": "KeyError: 'input_ids'",
    "shm_too_small": "RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that "
    "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
    "too_many_open_files": "OSError: [Errno 24] Too many open files",
    "ddp_unused_parameters": "RuntimeError: Expected to have finished reduction in the prior iteration before "
    "starting a "
    "new one. This error indicates that your module has parameters that were not used in producing loss.",
    "device_side_assert": "RuntimeError: CUDA error: device-side assert triggered",
    "backend_device_mismatch": "RuntimeError: No backend type associated with device type cpu",
    "port_in_use": "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
    "address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
}
SECONDARY = [  # what the others print, since that one is gone
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[10.0.0.1]:4242",
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, "
    "remote "
    "process exited or there was a network error, NCCL version 2.21.5",
    "[E ProcessGroupNCCL.cpp:629] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, "
    "NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:598] Read error [10.0.0.1]:4242: Connection "
    "reset by peer",
]
RANKS, FAILED = 4, 2


def traceback(error):
    return [
        "Traceback (most recent call last):",
        '  File "/app/train.py", line 42, in <module>',
        "    train(model, loader)",
        '  File "/app/train.py", line 17, in train',
        "    loss = step(batch)",
        error,
    ]


def lines_of_ranks(cause, chatter=3):
    """What each rank prints: steps, then the error of the one or what the others make of it."""
    errors = [PRIMARY[cause] if rank == FAILED else SECONDARY[rank % len(SECONDARY)] for rank in range(RANKS)]
    return [[f"step {step} loss 2.{step}" for step in range(chatter)] + traceback(error) for error in errors]


def torchrun_summary(root, code=1):
    def one(number, rank, exit_code, pid):
        name = {-9: "  (SIGKILL)", -15: "  (SIGTERM)"}.get(exit_code, "")
        yield from (f"[{number}]:", "  time      : 2024-05-01_10:00:05", "  host      : node1")
        yield from (f"  rank      : {rank} (local_rank: {rank})", f"  exitcode  : {exit_code} (pid: {pid}){name}")
        yield "  error_file: <N/A>"

    others = [rank for rank in range(RANKS) if rank != root]
    return [
        f"W0501 10:00:04.000000 7 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 1{others[0]} "
        f"closing "
        "signal SIGTERM",
        f"E0501 10:00:05.000000 7 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {code}) "
        f"local_rank: "
        f"{root} (pid: 10{root}) of binary: /usr/bin/python3",
        "Traceback (most recent call last):",
        '  File "/usr/lib/python3/site-packages/torch/distributed/launcher/api.py", line 269, in launch_agent',
        "    raise ChildFailedError(",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "=" * 60,
        "train.py FAILED",
        "-" * 60,
        "Failures:",
        *(line for number, rank in enumerate(others, 1) for line in one(number, rank, -15, 100 + rank)),
        "-" * 60,
        "Root Cause (first observed failure):",
        *one(0, root, code, 100 + root),
        "=" * 60,
    ]


def labelled(ranks, label):
    return [[label(rank, i) + line for i, line in enumerate(lines)] for rank, lines in enumerate(ranks)]


LAYOUTS = {  # layout -> (what stands before a rank's i-th line, what the launcher adds at the end)
    "torch": (lambda rank, i: f"[rank{rank}]: ", torchrun_summary(FAILED)),
    "torchrun": (lambda rank, i: f"[default{rank}]:", torchrun_summary(FAILED)),
    "torchrun_in_torch": (lambda rank, i: f"[default{rank}]:[rank{rank}]: ", []),
    "srun": (
        lambda rank, i: f"{rank}: ",
        [
            "srun: error: node1: task 0: Exited with exit code 1",
            "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
            "slurmstepd: error: *** STEP 77.0 ON node1 CANCELLED AT 2024-05-01T10:00:09 ***",
            "srun: error: node1: tasks 1,3: Terminated",
        ],
    ),
    "mpirun": (lambda rank, i: f"[1,{rank}]<stderr>:", ["mpirun noticed that the job aborted"]),
    "kubectl": (lambda rank, i: f"[pod/hybrid-{rank}/train] ", []),
    "kubectl_timestamps": (lambda rank, i: f"[pod/hybrid-{rank}/train] 2024-05-01T10:00:{i:02d}.000000000Z ", []),
    "kubernetes_torch": (lambda rank, i: f"2024-05-01T10:00:{i:02d}.123456789Z stderr F [rank{rank}]: ", []),
}
ORDERS = ("first", "last", "interleaved", "shuffled", "truncated")


def arranged(ranks, order, shuffler):
    """One log of all ranks' lines."""
    others = [lines for rank, lines in enumerate(ranks) if rank != FAILED]
    flat = [line for lines in others for line in lines]
    if order == "first":
        return ranks[FAILED] + flat
    if order == "last":
        return flat + ranks[FAILED]
    if order == "interleaved":
        return [line for lines in zip(*ranks) for line in lines]
    if order == "truncated":  # its first half is lost, and so are the ends of many tracebacks
        whole = flat + ranks[FAILED]
        return whole[len(whole) // 2 :]
    return shuffler.sample(whole := flat + ranks[FAILED], len(whole))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_log_of_several_ranks_names_the_one_that_failed_first(layout, order):
    label, summary = LAYOUTS[layout]
    for cause in PRIMARY:
        ranks = labelled(lines_of_ranks(cause), label)
        answer = explain("\n".join(arranged(ranks, order, random.Random(f"{cause} {layout}")) + summary))
        assert (answer["cause"], answer["rank"]) == (cause, FAILED), answer["evidence"]


@pytest.mark.parametrize("cause", PRIMARY)
def test_one_log_per_rank(cause):
    texts = ["\n".join(lines) for lines in lines_of_ranks(cause)]
    answer = explain(*texts)
    assert (answer["cause"], answer["rank"]) == (cause, FAILED)
    assert answer["where"] == f"rank{FAILED}.log:9"
    assert answer["evidence"] == PRIMARY[cause]
    assert {"peer_rank_died", "slow_rank_timeout"} & {*answer["alternatives"]}


@pytest.mark.parametrize("cause", PRIMARY)
def test_folder_of_torchrun_logs(cause, tmp_path):
    """torchrun --log-dir: LOGS/RUN/attempt_0/RANK/stderr.log, and error.json where the script is @record'ed."""
    for rank, lines in enumerate(lines_of_ranks(cause)):
        folder = tmp_path / "none_x1" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text("\n".join(line for line in lines if line.startswith("step")))
        (folder / "stderr.log").write_text("\n".join(line for line in lines if not line.startswith("step")))
    answer = explain_path(tmp_path)
    assert (answer["cause"], answer["rank"]) == (cause, FAILED)
    assert answer["where"].endswith(f"attempt_0/{FAILED}/stderr.log:6")
    assert answer["files"] == 2 * RANKS


@pytest.mark.parametrize("first", range(RANKS))
def test_error_json_tells_the_time(first, tmp_path):
    """Every rank has an error of its own: the earliest by torchrun's time stamps is the cause."""
    errors = ["KeyError: 'a'", PRIMARY["shm_too_small"], PRIMARY["too_many_open_files"], PRIMARY["cuda_oom_capacity"]]
    causes = ["user_code_error", "shm_too_small", "too_many_open_files", "cuda_oom_capacity"]
    for rank, error in enumerate(errors):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        stamp = str(1714557600 + (0 if rank == first else 10 + rank))
        extra = {"py_callstack": "\n".join(traceback(error)), "timestamp": stamp}
        (folder / "error.json").write_text(json.dumps({"message": {"message": error, "extraInfo": extra}}))
    answer = explain_path(tmp_path)
    assert (answer["cause"], answer["rank"]) == (causes[first], first)


def test_torn_error_json_is_read_as_text(tmp_path):
    folder = tmp_path / "attempt_0" / "3"
    folder.mkdir(parents=True)
    (folder / "error.json").write_text('{"message": {"message": "KeyError: \'x\'", "extraInfo": {"py_callstack": "Trac')
    assert explain_path(tmp_path)["files"] == 1


@pytest.mark.parametrize(
    "stamp", ["2024-05-01T10:0{}:00Z ", "2024-05-01 10:0{}:00,123 ", "2024-05-01T10:0{}:00.5Z stdout F "]
)
def test_earlier_time_wins_over_earlier_line(stamp):
    early, late = stamp.format(1), stamp.format(7)
    text = f"{late}[rank0]: KeyError: 'a'\n{early}[rank1]: OSError: [Errno 24] Too many open files"
    assert (explain(text)["cause"], explain(text)["rank"]) == ("too_many_open_files", 1)


def test_a_ranks_own_earliest_time_counts():
    times = [f"2024-05-01T10:0{minute}:00Z " for minute in range(4)]
    text = f"{times[3]}[rank1]: KeyError: 'late'\n{times[1]}[rank1]: KeyError: 'early'\n{times[2]}[rank0]: NameError: x"
    assert explain(text)["evidence"] == "KeyError: 'early'"


def test_without_times_named_cause_wins_over_error_of_the_program():
    text = "[rank0]: KeyError: 'a'\n[rank1]: OSError: [Errno 24] Too many open files"
    assert (explain(text)["cause"], explain(text)["rank"]) == ("too_many_open_files", 1)


def test_without_times_torchrun_decides_between_two_errors():
    lines = ["[rank0]: KeyError: 'a'", "[rank2]: KeyError: 'b'"]
    assert explain("\n".join(lines))["rank"] == 0
    assert explain("\n".join(lines + torchrun_summary(FAILED)))["rank"] == FAILED


KILLED = {  # a rank that dies without a word
    "torchrun": "\n".join(torchrun_summary(FAILED, -9)),
    "srun": f"srun: error: node1: task {FAILED}: Killed\nsrun: error: node1: task 0: Exited with exit code 1",
    "slurm": f"slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been OOM "
    f"Killed.\n"
    f"srun: error: node1: task {FAILED}: Out Of Memory",
}


@pytest.mark.parametrize("launcher", KILLED)
def test_killed_rank_is_told_from_those_that_lost_it(launcher):
    others = [f"[rank{rank}]: {SECONDARY[rank]}" for rank in range(RANKS) if rank != FAILED]
    answer = explain("\n".join(others) + "\n" + KILLED[launcher])
    assert (answer["cause"], answer["rank"]) == ("host_oom_killed", FAILED), answer["evidence"]


@pytest.mark.parametrize("secondary", range(len(SECONDARY)))
def test_reports_of_the_others_alone_send_the_reader_to_the_other_logs(secondary):
    answer = explain(f"[rank1]: {SECONDARY[secondary]}\n" + "\n".join(torchrun_summary(1)))
    assert answer["cause"] in ("peer_rank_died", "slow_rank_timeout", "rank_conditional_collective", "uneven_inputs")
    assert "peer_rank_died" in [answer["cause"], *answer["alternatives"]]


def test_ranks_that_wait_in_different_collectives_are_out_of_order():
    def waits(rank, call):
        frame = f'[rank{rank}]:   File "/env/torch/distributed/distributed_c10d.py", line 3252, in {call}\n'
        return f"{frame}[rank{rank}]: RuntimeError: Timed out waiting 6000ms for recv operation to complete\n"

    assert explain(waits(0, "all_reduce") + waits(1, "all_reduce"))["cause"] == "slow_rank_timeout"
    assert explain(waits(0, "all_reduce") + waits(1, "broadcast"))["cause"] == "rank_conditional_collective"
    assert explain(waits(0, "recv") + waits(1, "all_reduce"))["cause"] == "slow_rank_timeout"


def test_rank_that_torchrun_had_to_kill_was_not_killed_for_memory():
    """It ignored SIGTERM, since it stood still: the others say why the job ended."""
    waits = "[rank0]: RuntimeError: Timed out waiting 6000ms for recv operation to complete\n"
    killed = "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 8337)  (SIGKILL)"
    forced = "W1130 07:45:09 8106 torch/api.py:1047] Unable to shutdown process 8337 via 15, forcefully exiting via 9\n"
    assert explain(waits + killed)["cause"] == "host_oom_killed"
    assert explain(waits + forced + killed)["cause"] == "slow_rank_timeout"


def test_verdict_of_hang_py_wins_over_what_the_ranks_print():
    verdict = "cause     skipped_collective\nwhy       number 4 differs\nrank      3\n"
    errors = "2024-05-01T10:01:00Z [rank0]: RuntimeError: CUDA error: out of memory\n[rank1]: KeyError: 'a'\n"
    for text in (verdict + errors, errors + verdict):
        assert (explain(text)["cause"], explain(text)["rank"]) == ("rank_conditional_collective", 3)
    assert explain(errors + verdict)["alternatives"] == ["cuda_oom_capacity", "user_code_error"]
    stamped = [
        f"2024-05-01T10:0{i}:00Z {line}" for i, line in enumerate(f"[rank1]: KeyError: 'a'\n{verdict}".split("\n"))
    ]
    assert explain("\n".join(stamped))["cause"] == "rank_conditional_collective"  # though later


def test_every_cause_of_hang_py_leads_to_a_class():
    """Where it watched the job, its word counts; an error that a rank raised is named by the error's own words."""
    words = re.findall(r'^    "(\w+)": "', (SCRIPT.parent / "verdict.py").read_text(), re.MULTILINE)
    assert {"skipped_collective", "stopped_process", "machine_lost"} <= {*words}
    for word in {*words} - {"user_code_error", "killed_rank", "working", "unknown"}:
        assert explain(f"cause     {word}\nrank      1")["cause"] not in (*NO_FAULT, "unknown"), word


def test_job_that_was_ended_from_outside_is_no_rank_that_died():
    limit = "slurmstepd: error: *** JOB 7 ON node0 CANCELLED AT 2024-05-01T10:00:00 DUE TO TIME LIMIT ***\n"
    left = "[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4242\n"
    assert explain(left + limit)["cause"] == "ended_by_scheduler"
    assert explain(limit + left)["cause"] == "ended_by_scheduler"
    assert explain(limit + "[rank0]: KeyError: 'a'")["cause"] == "user_code_error"
    node = limit.replace("TIME LIMIT", "NODE FAILURE")
    assert explain(node)["cause"] == "peer_rank_died"
    assert explain(node)["check"].startswith("sinfo")


def test_rule_may_bring_a_check_of_its_own():
    crash = explain("  rank      : 1 (local_rank: 1)\n  exitcode  : -11 (pid: 4)")
    assert (crash["cause"], crash["rank"]) == ("unknown", 1)
    assert crash["check"].startswith("PYTHONFAULTHANDLER=1")
    assert "user_code_error" in crash["alternatives"]
    assert explain("SomeError:")["check"] == CAUSES["unknown"]["check"]


def test_line_may_name_the_rank_that_another_one_waits_for():
    answer = explain("[Rank 0]: Rank 3 failed to pass monitoredBarrier in 5000 ms")
    assert (answer["cause"], answer["rank"]) == ("slow_rank_timeout", 3)


def test_good_end_of_one_rank_does_not_hide_the_fault_of_another():
    texts = ["finished training", "KeyError: 'a'", "finished training"]
    assert (explain(*texts)["cause"], explain(*texts)["rank"]) == ("user_code_error", 1)
    healed = ["KeyError: 'a'\nretrying\nfinished training", "finished training"]
    assert explain(*healed)["cause"] == "none"


def test_message_below_the_name_of_its_exception_is_read():
    message = "The checkpoint being loaded used a DP world size of 4 but the current world size is 8."
    assert explain(message)["cause"] == "none"  # such words alone are no error
    answer = explain(f"[rank1]: deepspeed.runtime.zero.utils.ZeRORuntimeException: \n{message}")
    assert (answer["cause"], answer["rank"], answer["where"]) == ("ckpt_world_size_mismatch", 1, "log:2")


# ---- judges: where numbers decide ----
def oom(free, own, allocated, idle, tried="2.00 GiB"):
    return (
        f"CUDA out of memory. Tried to allocate {tried}. GPU 1 has a total capacity of 80.00 GiB of which {free} GiB "
        f"is "
        f"free. Including non-PyTorch memory, this process has {own} GiB memory in use. Of the allocated memory "
        f"{allocated} "
        f"GiB is allocated by PyTorch, and {idle} GiB is reserved by PyTorch but unallocated."
    )


@pytest.mark.parametrize(
    ("judge", "text", "rank", "expected"),
    [
        ("memory", oom(1, 78.5, 77, 0.5), 1, "cuda_oom_capacity"),
        ("memory", oom(1, 78.5, 60, 17.5), 1, "cuda_oom_fragmentation"),
        ("memory", oom(1, 39, 38, 0.5), 0, "cuda_oom_other_process"),
        ("memory", oom(1, 39, 38, 0.5).replace("GPU 1", "GPU 0"), 2, "cuda_oom_all_ranks_on_gpu0"),
        ("memory", "CUDA out of memory", 0, None),
        ("batch", "train_batch_size 64 != 4 * 2 * 1", 0, "ds_init_order"),
        ("batch", "train_batch_size 64 != 4 * 2 * 2", 0, "ds_batch_size_config"),
        ("batch", "train_batch_size must be positive", 0, None),
        ("fingerprint", "SequenceNumber=4, OpType=SEND, SequenceNumber=4, OpType=SEND", 0, "collective_size_mismatch"),
        ("fingerprint", "SequenceNumber=4, OpType=ALLREDUCE, SequenceNumber=5, OpType=ALLREDUCE", 0, None),
        ("barrier", "world_size=2, worker_count=3", 0, "rank_world_size_inconsistent"),
        ("barrier", "Timed out: world_size=4, worker_count=3", 0, "slow_rank_timeout"),
        ("inplace", "[torch.cuda.LongTensor [4, 8]] is at version 3", 0, "ddp_buffer_inplace"),
        ("inplace", "[torch.FloatTensor [8]] is at version 3", 0, "ddp_buffer_inplace"),
        ("inplace", "[torch.FloatTensor [8]], which is output 0 of ReluBackward0", 0, "inplace_op_in_model"),
        ("inplace", "[torch.FloatTensor [4, 8]] is at version 3", 0, None),
    ],
)  # fmt: skip
def test_judge(judge, text, rank, expected):
    judged = JUDGES[judge](text, rank)
    assert (judged[0] if judged else None) == expected


def test_barrier_that_all_have_reached_is_no_fault():
    assert JUDGES["barrier"]("Waiting in barrier: world_size=4, worker_count=2", 0) is None


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        (("SeqNum=4, OpType=ALLREDUCE, NumelIn=8, NumelOut=8", "SeqNum=4, OpType=BROADCAST, NumelIn=8, NumelOut=8"),
         "rank_conditional_collective"),
        (("SeqNum=4, OpType=ALLREDUCE, NumelIn=8, NumelOut=8", "SeqNum=5, OpType=ALLREDUCE, NumelIn=8, NumelOut=8"),
         "rank_conditional_collective"),
        (("SeqNum=4, OpType=ALLREDUCE, NumelIn=8, NumelOut=8", "SeqNum=4, OpType=ALLREDUCE, NumelIn=9, NumelOut=9"),
         "collective_size_mismatch"),
        (("SeqNum=4, OpType=ALLREDUCE, NumelIn=8, NumelOut=8",) * 2, None),
    ],
)  # fmt: skip
def test_watchdogs_of_the_ranks_are_compared(works, expected):
    assert watchdogs(works) == expected
    texts = [
        f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL({work}, Timeout(ms)=1000) ran for 1001 "
        "milliseconds before timing out."
        for rank, work in enumerate(works)
    ]
    if expected:
        assert explain("\n".join(texts))["cause"] == expected


def test_progress_bars_that_end_apart_mean_uneven_inputs():
    waits = (
        "[rank0]: RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation"
    )
    assert explain(waits)["cause"] == "slow_rank_timeout"
    bars = "100/101 [00:10<00:00, 9.9it/s]\n100/102 [00:10<00:00, 9.9it/s]\n"
    assert explain(bars + waits)["cause"] == "uneven_inputs"


# ---- prefixes ----
@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[rank3]: KeyError: 'a'", 3),
        ("[default3]:[rank3]: KeyError: 'a'", 3),
        ("3: KeyError: 'a'", 3),
        ("  12: KeyError: 'a'", 12),
        ("[1,3]<stderr>:KeyError: 'a'", 3),
        ("[pod/hybrid-3/train] KeyError: 'a'", 3),
        ("pod/hybrid-3 KeyError: 'a'", None),
        ("2024-05-01T10:00:00.000000000Z stderr F KeyError: 'a'", None),
        ("2024-05-01T10:00:00.000000000Z stderr F [rank3]: KeyError: 'a'", 3),
        ("[pod/hybrid-1/train] [rank3]: KeyError: 'a'", 3),
        ("\x1b[31m[rank3]: KeyError: 'a'\x1b[0m", 3),
        ("2024-05-01 10:00:00,123 KeyError: 'a'", None),
        ("KeyError: 'a'", None),
    ],
)
def test_rank_of_a_line(line, rank):
    answer = explain(line)
    if not line.startswith("pod/"):
        assert answer["cause"] == "user_code_error"
    assert answer["rank"] == rank


PREFIXES = {
    "torch": "[rank3]: ",
    "torchrun": "[default3]:",
    "srun": "3: ",
    "mpirun": "[1,3]<stderr>:",
    "kubectl": "[pod/hybrid-3/train] ",
    "kubernetes": "2024-05-01T10:00:00.123456789Z stderr F ",
    "both": "[pod/hybrid-3/train] 2024-05-01T10:00:00.123456789Z ",
    "compose": "trainer-1  | ",
    "syslog": "May  1 10:00:01 node1 train[4242]: ",
    "logger": "2024-05-01 10:00:00,123 ",
    "bracket": "[2024-05-01 10:00:00] ",
    "offset": "2024-05-01T10:00:00+00:00 ",
}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefix_before_every_line_changes_no_cause(prefix):
    changed = {}
    for log in PUBLIC:
        if (
            "[rank" in log["log"].lower() or "GPU 0 has" in log["log"]
        ):  # has ranks already; another rank on GPU 0 is a cause
            continue
        lines = [PREFIXES[prefix] + line for line in log["log"].splitlines()]
        plain, prefixed = explain(log["log"])["cause"], explain("\n".join(lines))["cause"]
        if plain != prefixed:
            changed[log["id"]] = plain, prefixed
    assert changed == {}


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.log", 3),
        ("rank_3.err", 3),
        ("run.3.log", 3),
        ("slurm-77_3.out", 3),
        ("logs/none_x/attempt_0/3/stderr.log", 3),
        ("train.log", None),
    ],
)
def test_rank_of_a_file(name, rank, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("KeyError: 'a'\n")
    assert explain_path(tmp_path)["rank"] == rank


# ---- the answer ----
def test_json_has_the_promised_keys():
    done = command("--json", stdin=b"step 1\n[rank1]: OSError: [Errno 24] Too many open files\n")
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert list(answer) == [
        "cause", "family", "alternatives", "rank", "evidence", "where", "means", "check", "fix", "source", "lines", ""
        "files",
    ]  # fmt: skip
    assert answer["cause"] == "too_many_open_files"
    assert answer["rank"] == 1
    assert answer["where"] == "stdin:2"
    assert answer["evidence"] == "OSError: [Errno 24] Too many open files"
    assert answer["lines"] == 2


def test_report_fits_a_screen_and_names_what_to_do():
    done = command(DATA / "logs" / "killed.log")
    lines = done.stdout.decode().splitlines()
    assert len(lines) <= 12
    names = [line.split()[0] for line in lines]
    assert names == ["cause", "why", "rank", "evidence", "check", "fix", "or", "source", "read"]


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("step 1\ndone\n", 0, "no fault found in 2 lines of 1 file"),
        ("KeyError: 'a'\n", 0, "cause     user_code_error"),
        ("terminate called after throwing an instance of 'x::y'\n", 1, "cause     unknown"),
    ],
)
def test_exit_code_tells_what_was_found(text, code, says):
    done = command(stdin=text.encode())
    assert (done.returncode, done.stdout.decode().splitlines()[0]) == (code, says)
    assert not done.stderr


def test_list_and_page_show_every_cause():
    names = [line.split()[0] for line in command("--list").stdout.decode().splitlines()]
    assert names == list(CAUSES)
    headings = re.findall(r"^### (\w+)$", (SCRIPT.parent / "CAUSES.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(CAUSES)


def test_page_of_causes_is_current():
    assert (SCRIPT.parent / "CAUSES.md").read_text() == script.page(CAUSES) + "\n"


# ---- bad input ----
def refused(*args, stdin=b""):
    """The one line with which it refuses."""
    done = command(*args, stdin=stdin)
    assert done.returncode == 2
    assert not done.stdout
    assert done.stderr.startswith(b"error: ")
    assert done.stderr.count(b"\n") == 1
    return done.stderr.decode()


def test_empty_log():
    assert "0 lines read" in refused(stdin=b"")


def test_missing_file_and_folder_without_logs(tmp_path):
    assert "No such file or directory" in refused(tmp_path / "missing.log")
    assert "0 logs with content" in refused(tmp_path)
    (tmp_path / "empty.log").write_text("")
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)))
    assert "0 logs with content" in refused(tmp_path)


@pytest.mark.parametrize("garbage", [bytes(range(256)) * 40, b"\x80\x02}q\x00(X\x01\x00" * 500, os.urandom(20_000)])
def test_binary_garbage(garbage, tmp_path):
    (tmp_path / "x.log").write_bytes(garbage)
    assert "are no text" in refused(tmp_path / "x.log")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig", "latin-1"])
def test_other_encodings(encoding, tmp_path):
    path = tmp_path / "x.log"
    path.write_bytes("Schritt 1: größer\r\n[rank1]: KeyError: 'input_ids'\r\n".encode(encoding))
    answer = explain_path(path)
    assert (answer["cause"], answer["rank"], answer["where"]) == ("user_code_error", 1, f"{path}:2")


def test_binary_bytes_inside_a_log_do_no_harm():
    text = b"step 1\n" * 1000 + bytes(range(256)) * 4 + b"\n[rank1]: KeyError: 'a'\n"
    lines = numbered(as_text("log", io.BufferedReader(io.BytesIO(text))))
    assert script.explain([Source("log", lines)])["rank"] == 1


def test_progress_bars_without_line_ends_are_read_piece_by_piece():
    text = "\r".join(f"{i}/100 [00:{i:02d}<00:00, 9.9it/s]" for i in range(60)) + "\rKeyError: 'a'\n"
    assert explain(text)["cause"] == "user_code_error"
    assert explain(text)["where"] == "log:1"


def test_line_of_a_megabyte_is_looked_at_in_pieces():
    pieces = list(as_text("log", io.BufferedReader(io.BytesIO(b"x" * (1 << 20) + b"\nKeyError: 'a'\n"))))
    assert max(map(len, pieces)) <= logs.LONGEST
    assert explain("x" * (1 << 20) + "\nKeyError: 'a'\n")["where"] == "log:2"


class Repeated(io.RawIOBase):
    """A log of a given size that never lies in memory."""

    def __init__(self, line, size):
        self.line, self.left = line, size // len(line)

    def readable(self):
        return True

    def readinto(self, buffer):
        times = min(self.left, max(1, len(buffer) // len(self.line)))
        data = self.line * times
        buffer[: len(data)] = data
        self.left -= times
        return len(data)


def test_large_log_is_streamed():
    """50 MB in a process that may have no more memory than a small one; a GB takes twenty times as long."""
    lines = "".join(f"{i}: step {i} loss {i / 7:.4f} lr 1e-4 tokens/s {i * 31}\n" for i in range(1000)).encode()
    preamble = (
        "import resource, runpy, sys\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({SAFE_MIB << 20}, {SAFE_MIB << 20}))\n"
        f"sys.argv = [{str(SCRIPT)!r}]\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    text = lines * 600 + b"3: KeyError: 'a'\n" + lines * 600
    assert len(text) > 50e6
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", preamble], input=text, capture_output=True, timeout=60)
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert done.returncode == 0, done.stderr
    assert b"cause     user_code_error" in done.stdout
    assert seconds < 3, f"{seconds:.1f} s of processor time for {len(text):,} bytes: 1 GB would take over a minute"


def test_python_310_without_tomli_says_the_way_out(tmp_path):
    (tmp_path / "tomllib.py").write_text("raise ModuleNotFoundError('No module named tomllib')")
    (tmp_path / "tomli.py").write_text("raise ModuleNotFoundError('No module named tomli')")
    done = command("--list", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr.decode() == (
        "error: Python 3.10 has no tomllib to read causes.toml: pip install tomli, or use Python 3.11\n"
    )


# ---- real failures on this torch, recorded ----
RECORDED = {  # log -> (cause, rank)
    "complex_max": ("user_code_error", 1),
    "detached": ("loss_detached_from_graph", 0),
    "half_environment": ("env_vars_missing", None),
    "key_error": ("user_code_error", 1),
    "killed": ("host_oom_killed", 1),
    "memory_error": ("host_oom_killed", 0),
    "missing_master": ("rendezvous_unreachable", None),
    "missing_module": ("user_code_error", 0),
    "missing_rank": ("rendezvous_unreachable", None),
    "models_differ": ("ddp_param_mismatch_across_ranks", 1),
    "no_memory": ("host_oom_killed", 1),
    "order": ("rank_conditional_collective", 1),
    "order_detail": ("rank_conditional_collective", 0),
    "port_in_use": ("port_in_use", None),
    "port_in_use_torchrun": ("port_in_use", None),
    "segfault": ("unknown", 1),
    "shared_memory": ("shm_too_small", 0),
    "sizes": ("collective_size_mismatch", 0),
    "sizes_detail": ("collective_size_mismatch", 0),
    "skipped": ("slow_rank_timeout", 0),
    "skipped_detail": ("slow_rank_timeout", 1),
    "too_many_files": ("too_many_open_files", 1),
    "torn_checkpoint": ("user_code_error", 0),
    "uneven": ("slow_rank_timeout", 1),
    "cgroup": ("host_oom_killed", 1),
    "cut_link": ("slow_rank_timeout", 1),
    "ds_batch": ("ds_batch_size_config", 0),
    "ds_offload": ("ds_client_optimizer_offload", 0),
    "ds_untested": ("ds_client_optimizer_offload", 1),
    "hang_busy": ("slow_rank_timeout", 1),
    "hang_data": ("slow_rank_timeout", 1),
    "hang_dead": ("host_oom_killed", 1),
    "hang_group": ("rank_conditional_collective", 2),
    "hang_order": ("rank_conditional_collective", 1),
    "hang_save": ("rank_conditional_collective", 0),
    "hang_send_recv": ("rank_conditional_collective", 0),
    "hang_sizes": ("collective_size_mismatch", 1),
    "hang_skip": ("rank_conditional_collective", 1),
    "hang_stopped": ("slow_rank_timeout", 1),
    "hang_uneven": ("uneven_inputs", 1),
    "lab_busy": ("slow_rank_timeout", 0),
    "lab_data": ("slow_rank_timeout", 0),
    "lab_dead": ("host_oom_killed", 1),
    "lab_group": ("slow_rank_timeout", 0),
    "lab_group_detail": ("slow_rank_timeout", 1),
    "lab_order": ("rank_conditional_collective", 0),
    "lab_order_detail": ("rank_conditional_collective", 0),
    "lab_save": ("rank_conditional_collective", 1),
    "lab_save_detail": ("rank_conditional_collective", 0),
    "lab_send_recv": ("slow_rank_timeout", 0),
    "lab_sizes": ("collective_size_mismatch", 0),
    "lab_skip": ("rank_conditional_collective", 0),
    "lab_skip_detail": ("rank_conditional_collective", 0),
    "lab_stopped": ("slow_rank_timeout", 0),
    "lab_stopped_detail": ("slow_rank_timeout", 1),
    "lab_uneven": ("uneven_inputs", 0),
    "lab_uneven_detail": ("unknown", 0),
    "lost_node": ("slow_rank_timeout", 0),
    "missing_common": ("user_code_error", 0),
    "sigterm": ("ended_by_scheduler", None),
    "slurm_kill": ("host_oom_killed", 1),
    "slurm_raise": ("user_code_error", 1),
    "slurm_scancel": ("ended_by_scheduler", None),
    "slurm_segfault": ("unknown", 1),
    "slurm_time_limit": ("ended_by_scheduler", None),
    "torn_fsdp": ("user_code_error", 1),
    "torn_tp": ("user_code_error", 0),
    "unknown_flag": ("user_code_error", 0),
    "usage_error": ("user_code_error", 0),
    "unknown_host": ("hostname_resolves_wrongly", None),
    "unused_parameters": ("ddp_unused_parameters", 1),
    "wrong_interface": ("wrong_network_interface", 0),
}
MISSING = {  # what such a log cannot tell from its first answer
    "skipped": "rank_conditional_collective",
    "uneven": "uneven_inputs",
    "lab_group": "rank_conditional_collective",
    "lab_group_detail": "rank_conditional_collective",
    "lab_send_recv": "rank_conditional_collective",
    "cut_link": "firewall_blocks_peer_ports",
    "lost_node": "peer_rank_died",
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_failure(name):
    """Caused here, with torch 2.13 on CPUs; paths are shortened. How:

    lab_X: torchrun --nproc-per-node 2 07_diagnostics/labs.py X, in a copy with a timeout of 6 s in init_process_group
    and new_group (group: 3 ranks); lab_X_detail: the same with TORCH_DISTRIBUTED_DEBUG=DETAIL, under which DDP
    crashes in this torch. hang_X: python 07_diagnostics/hang.py lab X. slurm_X: srun on two nodes of the Slurm that
    test_launch.py starts, rank 1 kills itself (SIGKILL, SIGSEGV), raises, scancel, --time 1. cut_link, lost_node:
    a node in a network namespace of its own whose link goes down, or whose processes die as well. cgroup: a memory
    limit of 1100 MiB. sigterm: kill -TERM of torchrun. ds_X: deepspeed.initialize with train_batch_size 7, with
    AdamW under offload_optimizer, with SGD under ZeRO. torn_X: --resume of 03 and of 05_zero/fsdp.py from a file cut
    short. missing_common: 02_ddp copied out alone. usage_error: --batch 3 on two ranks. unknown_flag: --lrr 1.
    """
    answer = explain_path(DATA / "logs" / f"{name}.log")
    assert (answer["cause"], answer["rank"]) == RECORDED[name]
    if name in MISSING:  # without TORCH_DISTRIBUTED_DEBUG=DETAIL gloo says only that it waited
        assert MISSING[name] in answer["alternatives"]


def test_every_recorded_log_is_used():
    assert {path.stem for path in (DATA / "logs").glob("*.log")} == {*RECORDED}


# ---- real failures on this torch, live ----
def failing(body, tmp_path, nproc=2, timeout=20, env=None, setup=""):
    """Runs a small script on real gloo ranks, and explains what they printed."""
    lines = ["import os, resource, torch", "import torch.distributed as dist", "from datetime import timedelta"]
    lines += [setup, "dist.init_process_group('gloo', timeout=timedelta(seconds=10))", "rank = dist.get_rank()", body]
    path = tmp_path / "train.py"
    path.write_text("\n".join(lines))
    result = run(path, nproc=nproc, timeout=timeout, env=env)
    assert any(result.codes)
    return explain(*result.outputs) if nproc > 1 else explain(result.outputs[0])


def test_live_error_of_one_rank(tmp_path):
    answer = failing("if rank == 1:\n    {}['input_ids']\ndist.barrier()", tmp_path)
    assert (answer["cause"], answer["rank"]) == ("user_code_error", 1)


def test_live_silent_death(tmp_path):
    """Without a launcher's word the killed rank leaves no line: the others' reports say to look for it."""
    answer = failing(f"if rank == 1:\n    os.kill(os.getpid(), {signal.SIGKILL:d})\ndist.barrier()", tmp_path)
    assert (answer["cause"], answer["alternatives"][0]) == ("peer_rank_died", "host_oom_killed")


def test_live_mismatched_sizes(tmp_path):
    debug = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    detail = "dist.set_debug_level_from_env()"
    answer = failing("dist.all_reduce(torch.ones(4 + rank))", tmp_path, env=debug, setup=detail)
    assert answer["cause"] == "collective_size_mismatch"
    both = "(dist.all_reduce if rank else dist.barrier)(*[torch.ones(4)][:rank])"
    answer = failing(both, tmp_path, env=debug, setup=detail)
    assert answer["cause"] == "rank_conditional_collective"


def test_live_wrong_interface(tmp_path):
    answer = failing("", tmp_path, env={"GLOO_SOCKET_IFNAME": "nosuch"})
    assert answer["cause"] == "wrong_network_interface"


def test_live_half_set_environment(tmp_path):
    answer = failing(
        "", tmp_path, nproc=1, env={"MASTER_ADDR": ""}, setup="del os.environ['TORCHELASTIC_USE_AGENT_STORE']"
    )
    assert answer["cause"] == "env_vars_missing"


def test_live_open_files(tmp_path):
    body = (
        "if rank == 1:\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
        "    held = [open(os.devnull) for _ in range(30)]\n"
        "dist.barrier()"
    )
    answer = failing(body, tmp_path)
    assert (answer["cause"], answer["rank"]) == ("too_many_open_files", 1)


def test_live_memory_limit(tmp_path):
    body = (
        "if rank == 1:\n"
        "    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))\n"
        "    torch.ones(2**30)\n"
        "dist.barrier()"
    )
    answer = failing(body, tmp_path)
    assert (answer["cause"], answer["rank"]) == ("host_oom_killed", 1)


@pytest.mark.parametrize(
    ("flags", "says"),
    [("--batch 3", "--batch 3 is not divisible by 2"), ("--resume {}", "--resume another folder than")],
)
def test_live_refusal_of_a_script_of_this_repository(flags, says, tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"PK\x03\x04 torn")
    small = "--steps 1 --batch 2 --seq-len 8 --dim 16 --layers 2 --heads 2 --kv-heads 1 "
    result = run(ROOT / "02_ddp" / "train.py", *(small + flags.format(tmp_path)).split(), nproc=2)
    answer = explain(*result.outputs)
    assert answer["cause"] == "user_code_error"
    assert says in answer["evidence"]


def test_live_torchrun_with_a_killed_rank_writes_logs_that_are_explained(tmp_path):
    """The real launcher's folder and summary: ranks without torch, so that it takes a second."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    torchrun += ["--log-dir", str(tmp_path / "logs"), "--redirects", "3", "--standalone"]
    rank = (
        'if [ $RANK = 1 ]; then kill -9 $$; fi; trap "" TERM; echo "RuntimeError: Connection reset by peer" >&2; exit 1'
    )
    done = subprocess.run([*torchrun, "sh", "-c", rank], capture_output=True, timeout=60)
    assert done.returncode != 0
    (tmp_path / "logs" / "torchrun.log").write_bytes(done.stderr)
    answer = explain_path(tmp_path / "logs")
    assert answer["cause"] in ("host_oom_killed", "peer_rank_died")
    assert "host_oom_killed" in [answer["cause"], *answer["alternatives"]]


def test_live_torchrun_on_a_taken_port(tmp_path):
    with socket.create_server(("", 0)) as taken:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--no-python"]
        torchrun += ["--master-port", str(taken.getsockname()[1]), "true"]
        done = subprocess.run(torchrun, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert explain(done.stderr)["cause"] == "port_in_use"


def test_gpu_error_of_a_cpu_tensor_is_known():
    """On a machine without a GPU the words of torch's source stand for the run."""
    for words in ("No backend type associated with device type cpu", "Tensors must be CUDA and dense"):
        assert explain(f"[rank0]: RuntimeError: {words}")["cause"] == "backend_device_mismatch"
