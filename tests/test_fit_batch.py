"""07_diagnostics/fit_batch.py: the search on made-up memory, and tries of scripts whose memory is known."""

import json
import os
import signal
import subprocess
import sys
import time
from math import log2
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from runner import ROOT, become, run
from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path.append(str(ROOT / "07_diagnostics"))
import fit_batch as script
import fit_memory
import fit_rank
import fit_search
import fit_try
from fit_search import Try

sys.path.pop()
MODULES = ("fit_batch", "fit_memory", "fit_rank", "fit_search", "fit_try", "proc")
for module in MODULES:
    del sys.modules[module]

MIB = 2**20
KEEP = 0.2
NOISE = 4 * MIB  # by which two runs of one script differ; and more than a forked worker writes to, seen: 1 MiB
PER_SEQUENCE = 16  # MiB: half a step of the grid is clear of the noise


# ---- search ----
def searched(peak, total=1000.0, first=1, largest=10**5, grid=None):
    """The tries of a search; peak: microbatch -> bytes, None if it runs out of memory and nobody knows."""

    def attempt(microbatch):
        taken = peak(microbatch)
        if taken is None:
            return Try(microbatch, False, complete=False)
        return Try(microbatch, taken <= (1 - KEEP) * total, peak=taken, total=total, step_ms=1.0)

    return fit_search.search_limit(attempt, fit_search.grid_points(largest, grid), KEEP, first)


def above(microbatch, grid=None):
    return next(point for point in fit_search.grid_points(10 * microbatch + 20, grid) if point > microbatch)


def check_bracket(tries, grid=None):
    """The answer was run, and so was its neighbour above. Returns the answer, 0 if none fits."""
    limit, failed = fit_search.find_limit(tries)
    low = limit.microbatch if limit else 0
    assert failed.microbatch == above(low, grid)
    assert len({one.microbatch for one in tries}) == len(tries)  # none twice
    return low


def test_grid_is_one_by_one_then_an_eighth():
    assert fit_search.grid_points(81) == [*range(1, 16), *range(16, 32, 2), *range(32, 64, 4), 64, 72, 80, 81]
    assert fit_search.grid_points(20, spacing=6) == [6, 12, 18, 20]
    assert fit_search.grid_points(20, divided=24) == [1, 2, 3, 4, 6, 8, 12]
    assert [fit_search.grid_points(n) for n in (1, 2)] == [[1], [1, 2]]
    assert [fit_search.index_of([2, 4, 8], n) for n in (1, 2, 7.9, 100)] == [-1, 0, 1, 2]


@given(fixed=st.floats(0, 790), slope=st.floats(0.05, 900), first=st.integers(1, 64))
def test_limit_of_a_line_is_found_in_few_tries(fixed, slope, first):
    tries = searched(lambda n: fixed + slope * n, first=first)
    low = check_bracket(tries)
    assert fixed + slope * above(low) > 800
    assert low == 0 or fixed + slope * low <= 800
    assert len(tries) <= abs(log2(max(low, 1) / first)) + 5, [one.microbatch for one in tries]


@given(fixed=st.floats(0, 700), slope=st.floats(0.1, 100), blind=st.floats(1, 1))
def test_try_that_leaves_no_figure_costs_little(fixed, slope, blind):
    """On a GPU a try that runs out of memory dies, and nobody knows what it would have taken."""
    tries = searched(lambda n: taken if (taken := fixed + slope * n) < 1000 else None)
    assert len(tries) <= log2(max(check_bracket(tries), 1)) + 6


@given(st.lists(st.floats(0, 40), min_size=1, max_size=20), st.sampled_from([None, 1, 5]), st.integers(1, 100))
def test_limit_of_any_growing_memory_is_found(growth, grid, first):
    peaks = [0.0]
    for more in growth * 400:
        peaks.append(peaks[-1] + more + 3)  # over 800 at 266, at the latest

    tries = searched(lambda n: peaks[min(n, 400)], first=first, largest=1000, grid=grid)
    low = check_bracket(tries, grid)
    assert peaks[low] <= 800 < peaks[above(low, grid)]
    assert len(tries) <= 2 * log2(266) + 5


@given(st.lists(st.floats(-5, 5), min_size=50, max_size=50), st.floats(0.2, 30))
def test_noise_moves_the_limit_by_no_more_than_itself(noise, slope):
    tries = searched(lambda n: 100 + slope * n + noise[n % 50])
    low = check_bracket(tries)
    assert 100 + slope * low - 5 <= 800
    assert 100 + slope * above(low) + 5 > 800


def test_flat_start_does_not_mislead():
    """Setting up takes more than a step of a small microbatch: the line is drawn through the larger ones."""
    tries = searched(lambda n: max(500, 100 + 10 * n))
    assert check_bracket(tries) == 64  # of 70, on a grid of 8
    assert len(tries) <= 10


def test_line_that_misleads_is_given_up():
    """Up to 1850 the line says 2000; beyond, memory grows ten times as fast. Creeping on would take 600 tries."""
    tries = searched(lambda n: 0.4 * n if n < 1850 else 740 + 4 * (n - 1850), grid=1, largest=4096)
    assert check_bracket(tries, grid=1) == 1865
    assert len(tries) <= 25


def test_line_is_not_drawn_through_neighbours():
    """Their difference may be noise: here, it is."""
    tries = [Try(n, True, peak=peak, total=1000) for n, peak in ((4, 140), (8, 180), (15, 249), (16, 262))]
    tries.append(Try(32, False, peak=300, complete=False))
    slope = (262 - 180) / 8
    assert fit_search.peak_line(tries) == pytest.approx((262 - 16 * slope, slope))
    assert fit_search.peak_line(tries[:1]) is None


def test_largest_ends_the_search():
    assert [one.microbatch for one in searched(lambda n: 1, largest=12)] == [1, 2, 4, 8, 12]
    tries = searched(lambda n: 1 if n < 12 else 900, largest=12)
    assert check_bracket(tries) == 11


def test_first_that_does_not_fit_goes_down():
    tries = searched(lambda n: 50 * n, first=64)
    assert check_bracket(tries) == 16
    assert [one.microbatch for one in searched(lambda n: 900)] == [1]


def test_microbatch_that_took_less_is_told():
    peaks = {1: 100, 2: 120, 4: 110, 8: 900}
    tries = [Try(n, peak <= 800, peak=peak, total=1000, step_ms=1) for n, peak in peaks.items()]
    assert [(small.microbatch, large.microbatch) for small, large in fit_search.inversions(tries)] == [(2, 4)]


# ---- accumulation ----
@given(batch=st.integers(1, 300), dp_size=st.integers(1, 8), limit=st.integers(1, 64), least=st.integers(1, 64))
def test_batch_is_split_without_remainder(batch, dp_size, limit, least):
    least = min(least, limit)
    whole = [n for n in range(1, limit + 1) if batch % (dp_size * n) == 0]
    assert fit_search.largest_divisor(batch, dp_size, limit) == max(whole, default=0)
    enough = min((n for n in whole if n >= least), default=max(whole, default=0))
    assert fit_search.smallest_divisor(batch, dp_size, least, limit) == enough
    for near in fit_search.near_batches(batch, dp_size, least, limit):
        assert near != batch
        assert any(near % (dp_size * n) == 0 for n in range(least, limit + 1))


def test_near_batches_are_the_nearest():
    assert fit_search.near_batches(254, 2, 8, 16) == [252, 256]  # 126 = 9 x 14, 128 = 16 x 8
    assert fit_search.near_batches(3, 2, 1, 4) == [2, 4]


def test_smallest_microbatch_near_the_best_throughput_is_enough():
    tries = [Try(n, n < 16, total=1, step_ms=ms) for n, ms in ((1, 5), (2, 6), (4, 10.2), (8, 20), (16, 30))]
    assert fit_search.smallest_enough(tries, lambda one: one.step_ms / one.microbatch).microbatch == 4


# ---- inside a rank ----
def test_peak_of_a_gpu_counts_what_is_not_the_allocators():
    """An allocator that had reserved 30 and has 20; 5 are CUDA's, NCCL's or another process's."""
    stats = {"reserved_bytes.all.peak": 30, "reserved_bytes.all.current": 20, "allocated_bytes.all.peak": 25}
    cuda = SimpleNamespace(
        device_count=lambda: 2,
        memory_stats=lambda device: stats | dict(num_ooms=0, num_alloc_retries=1) if device else {},
        mem_get_info=lambda device: (75, 100),
    )
    assert fit_rank.gpu_peaks(cuda) == [dict(peak=35, total=100, gaps=5, short=1)]


def test_steps_on_a_gpu_are_timed_by_its_own_clock(tmp_path, monkeypatch):
    """The host is ahead of the GPU: it records an event in each step, and waits once, after the last."""
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = 10.0 * len(calls)
            calls.append("record")

        def elapsed_time(self, later):
            return later.at - self.at

    stats = {f"{kind}_bytes.all.{what}": 20 for kind in ("reserved", "allocated") for what in ("peak", "current")}
    cuda = SimpleNamespace(
        Event=Event,
        is_initialized=lambda: True,
        max_memory_reserved=lambda: 7 + len(calls),
        synchronize=lambda: calls.append("synchronize"),
        device_count=lambda: 1,
        memory_stats=lambda device: stats,
        mem_get_info=lambda device: (70, 100),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    counter = fit_rank.StepCounter(tmp_path / "0.json", 3)
    for _ in range(3):
        counter.mark(cuda)
    counter.write(None)
    report = json.loads(counter.file.read_text())
    assert calls == ["record", "record", "record", "synchronize"]
    assert (report["ms"], report["peaks"]) == ([10.0, 10.0], [8, 9, 10])
    assert report["gpus"] == [dict(peak=30, total=100, gaps=0, short=0)]


def test_gpu_with_too_little_free_fails():
    def report(*peaks):
        gpus = [dict(peak=peak, total=100, gaps=9, short=0) for peak in peaks]
        return dict(gpus=gpus, peaks=[1, 1, 1], ms=[9.0, 5.0, 7.0], per_step=[2, 2, 2])

    setting = fit_try.Setting(2, 3, KEEP, None, 1000, 60)
    tree = SimpleNamespace(taken=lambda: [10, 10])
    found = fit_try.judge_memory({0: report(10, 79), 1: report(80)}, tree, 4, setting)
    assert found == Try(4, True, peak=80, total=100, step_ms=6.0, per_step=2, gaps=9, on_gpu=True)
    assert not fit_try.judge_memory({0: report(10, 79), 1: report(81)}, tree, 4, setting).fits
    report_short = report(10)
    report_short["gpus"][0]["short"] = 1  # the script caught an OutOfMemoryError, or the allocator emptied its cache
    assert not fit_try.judge_memory({0: report(10), 1: report_short}, tree, 4, setting).fits


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you .."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), True),
        (RuntimeError("NCCL error: unhandled cuda error (Cuda failure 'out of memory')"), True),
        (RuntimeError("shape '[8, 128]' is invalid for input of size 1000"), False),
        (ValueError("--batch 3 is not divisible by 2"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error, expected):
    assert fit_rank.is_out_of_memory(error) is expected
    end = SystemExit("no luck")
    end.__context__ = error  # raised in `except`
    assert fit_rank.is_out_of_memory(end) is expected


def counted(run):
    """Runs a loop under the hook; returns how many steps it made of it."""
    counter = fit_rank.StepCounter(Path(os.devnull), 99)  # never: at its last step the hook would wait for its end
    handle = register_optimizer_step_post_hook(counter)
    try:
        run()
    finally:
        handle.remove()
    return len(counter.clocks)


def test_optimizers_that_step_in_turn_make_one_step():
    """Two optimizers; and one that is stepped group by group, as DeepSpeed does it."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    one, other = torch.optim.SGD(parameters[:1], lr=0.1), torch.optim.SGD(parameters[1:], lr=0.1)
    groups = torch.optim.SGD([dict(params=[p]) for p in parameters], lr=0.1)

    def in_turn():
        for _ in range(4):
            one.step()
            other.step()

    def group_by_group():
        whole = groups.param_groups
        for _ in range(4):
            for group in whole:
                groups.param_groups = [group]
                groups.step()
            groups.param_groups = whole

    assert counted(in_turn) == 4
    assert counted(group_by_group) == 4
    assert counted(lambda: [one.step() for _ in range(4)]) == 4


def test_backward_is_counted_once_for_each_microbatch(monkeypatch):
    """A checkpoint calls backward inside backward. Its own count is not a microbatch's."""
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # undone at the end
    counter = fit_rank.StepCounter(Path(os.devnull), 99)
    counter.count_backwards(torch.autograd)
    weight = torch.ones(2, requires_grad=True)
    for _ in range(3):
        torch.utils.checkpoint.checkpoint(torch.sin, weight, use_reentrant=True).sum().backward()
    torch.autograd.backward(weight.sum())
    assert counter.backwards == 4


# ---- memory, from outside ----
FAMILY = """
import os
from fit_memory import Tree, held_beyond
MIB = 2**20
until_the_end, end = os.pipe()
pids = []
def fork(function=bytes):
    done, say = os.pipe()
    if not (pid := os.fork()):
        os.closerange(end, end + 1)  # closed already in a child's child
        kept = function()
        os.write(say, b".")
        os.read(until_the_end, 1)
        os._exit(0)
    os.close(say)
    assert os.read(done, 1) == b"."
    pids.append(pid)
"""


def family(body):
    """What a process with forked children prints. It is a bare one: Python counts references where the objects lie, and
    each child makes its own the pages that this writes to, 1 MiB here, and more where much is imported.
    """
    env = dict(os.environ, PYTHONPATH=str(ROOT / "07_diagnostics"))
    line = [sys.executable, "-c", FAMILY + body]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, timeout=60, env=env, check=True)
    return [int(word) for word in done.stdout.split()]


def test_workers_count_once():
    """Twice 50 MiB of their own count; 100 MiB that they inherited and only read do not."""
    body = """
inherited = bytearray(b"x") * (100 * MIB)
for _ in range(2):
    fork(lambda: bytearray(b"x") * (50 * MIB))
print(held_beyond(os.getpid(), pids))
inherited[::4096] = b"y" * len(inherited[::4096])  # now the workers hold the old pages, and share them
print(held_beyond(os.getpid(), pids))"""
    own, with_old_pages = family(body)
    assert 100 * MIB <= own <= 100 * MIB + 2 * NOISE
    assert 200 * MIB <= with_old_pages <= 200 * MIB + 2 * NOISE


def test_batch_that_waits_in_shared_memory_counts():
    """A worker's batch that nobody has mapped yet is held open by its descriptor alone."""
    body = """
def wait_with_a_batch():
    descriptor = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    for _ in range(30):  # in pieces: of 30 MiB at once the allocator might keep what was freed
        os.write(descriptor, b"x" * MIB)
    return [descriptor]
fork(wait_with_a_batch)
fork()
print(held_beyond(os.getpid(), pids))"""
    [beyond] = family(body)
    assert 30 * MIB <= beyond <= 30 * MIB + 2 * NOISE


def test_children_and_theirs_are_found_with_their_rank():
    body = """
tree = Tree([os.getpid()])
fork()
fork(fork)
tree.refresh()
print(len(tree.rank_of), list(tree.rank_of.values()).count(os.getpid()), int(os.getppid() in tree.rank_of))"""
    assert family(body) == [4, 4, 0]


def test_double_of_a_moment_does_not_count(monkeypatch):
    """A child that is about to start another program still has its parent's memory."""
    seen = iter([0, 500, 0, 70, 60, 0])
    monkeypatch.setattr(fit_memory, "held_beyond", lambda pid, children: next(seen))
    tree = fit_memory.Tree([os.getpid()])
    monkeypatch.setattr(tree, "refresh", lambda: tree.rank_of.update({0: os.getpid()}))
    for _ in range(6):
        tree.sample()
    assert tree.beyond == {os.getpid(): 60}


@pytest.mark.parametrize(("version", "folder"), [(2, "a/b"), (1, "a/b"), (2, "."), (1, ".")])
def test_limit_of_a_control_group_counts(version, folder, tmp_path, monkeypatch):
    """Also that of a group above; in a container, the group's own path may not be there."""
    line = "0::/a/b" if version == 2 else "4:cpu,memory:/a/b"
    monkeypatch.setattr(fit_memory, "read_proc", lambda pid, name: f"7:cpuset:/x\n{line}\n")
    root = tmp_path / "memory" if version == 1 else tmp_path
    (root / folder).mkdir(parents=True, exist_ok=True)
    (root / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text("123456\n")
    (root / folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text("999999\n")
    assert fit_memory.host_limit(tmp_path) == (123456 if folder != "." else 999999)
    assert fit_memory.host_limit(tmp_path / "nothing") == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# ---- tries ----
@pytest.fixture
def fit(monkeypatch, capsys, tmp_path):
    """fit(words..): runs the tool. Returns (exit code, JSON object or None, stderr)."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def fit(*words):
        monkeypatch.setattr(sys, "argv", ["fit_batch.py", "--json", "--timeout", "60", *map(str, words)])
        code = script.main()
        out, err = capsys.readouterr()
        assert not list(temporary.iterdir())
        return code, json.loads(out) if out else None, err

    yield fit
    for number, handler in handlers.items():
        signal.signal(number, handler)


STEPS = """
import os, sys, time, torch
MIB, n = 2**20, int(sys.argv[1])
rank = int(os.environ.get("RANK", 0))
optimizer = torch.optim.optimizer.Optimizer()
def take(mib):
    return bytearray(b"x") * (mib * MIB)  # touched
for step in range(5):
    {body}
    optimizer.step()
"""
LIKE_TORCH = """
HOOKS = []
register_optimizer_step_post_hook = HOOKS.append
class Optimizer:
    param_groups = [dict(params=[0])]
    def step(self):
        for hook in HOOKS:
            hook(self, (), {})
"""


@pytest.fixture
def steps(tmp_path):
    """Writes a script of five optimizer steps, body: what else happens in each; beside it, a torch that loads at once:
    as much of it as a try looks at.
    """
    optim = tmp_path / "torch" / "optim"
    optim.mkdir(parents=True)
    (optim.parent / "__init__.py").write_text("import torch.autograd, torch.optim.optimizer, torch.cuda\n")
    (optim.parent / "autograd.py").write_text("def backward(): pass\n")
    (optim.parent / "cuda.py").write_text("def is_initialized(): return False\n")
    (optim / "__init__.py").write_text("")
    (optim / "optimizer.py").write_text(LIKE_TORCH)

    def steps(body):
        path = tmp_path / "script.py"
        path.write_text(STEPS.replace("{body}", body.replace("\n", "\n    ")))
        return path

    return steps


@pytest.fixture
def base(fit, steps):
    """Bytes that the script takes without any sequence."""
    code, found, err = fit("--largest", 1, "--", steps("pass"), "{}")
    assert code == 0, err
    return found["tries"][0]["peak_bytes"]


def limit_mib(base, sequences):
    """A limit that keeps a fifth free at `sequences` and a half, in the tool's words."""
    return f"{(base / MIB + PER_SEQUENCE * (sequences + 0.5)) / (1 - KEEP):.3f}MiB"


def test_limit_of_known_memory_is_found(fit, steps, base):
    truth = 13
    path = steps(f"batch = take({PER_SEQUENCE} * n); del batch")
    code, found, _ = fit("--memory", limit_mib(base, truth), "--largest", 32, "--", path, "{}")
    assert code == 0
    assert (found["microbatch"], found["failed"]) == (truth, truth + 1), json.dumps(found, indent=1)
    assert found["bytes_per_sample"] == pytest.approx(PER_SEQUENCE * MIB, abs=NOISE)
    assert found["fixed_bytes"] == pytest.approx(base, abs=2 * NOISE)


def test_fullest_rank_decides(fit, steps, base):
    path = steps(f"batch = take({PER_SEQUENCE} * (n + 3 * rank)); del batch")
    code, found, _ = fit("--ranks", 2, "--memory", limit_mib(base, 8), "--largest", 32, "--", path, "{}")
    assert (code, found["microbatch"], found["failed"]) == (0, 5, 6), json.dumps(found, indent=1)


def test_memory_of_forked_workers_counts(fit, steps, base, tmp_path):
    """The worker holds a sequence's memory, its parent nothing. It is ended with its parent."""
    body = f"""r, w = os.pipe()
if not (pid := os.fork()):
    held = bytearray(b"x") * ({PER_SEQUENCE} * n * MIB)
    open({str(tmp_path / "pids")!r}, "a").write(f"{{os.getpid()}} ")
    os.write(w, b".")
    time.sleep(60); os._exit(0)
os.read(r, 1)
if step < 4: os.kill(pid, 9); os.waitpid(pid, 0)"""
    code, found, _ = fit("--memory", limit_mib(base, 4), "--largest", 8, "--", steps(body), "{}")
    assert (code, found["microbatch"], found["failed"]) == (0, 4, 5), json.dumps(found, indent=1)
    states = [fit_memory.stat_fields(pid)[0] for pid in (tmp_path / "pids").read_text().split()]
    assert set(states) <= {"X", "Z"}


class Forked:
    """In the place of subprocess.Popen: the same program, forked from this warm process."""

    def __init__(self, command, env, start_new_session, stdin, stdout, stderr):
        self.returncode = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            become(Path(command[1]), command[2:], env, stdout)

    def poll(self, how=os.WNOHANG):
        if self.returncode is None:
            done, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def wait(self):
        return self.poll(0)

    def kill(self):
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def test_limit_of_a_training_script_is_found(fit, tmp_path, monkeypatch):
    """By its own account, 02_ddp/train.py stays within the memory with 3 sequences, and not with 4."""
    flags = ["--dim", 32, "--layers", 2, "--heads", 2, "--kv-heads", 1]
    flags += ["--seq-len", 2048]  # 30 MiB for a sequence

    def own_peak(microbatch):
        batch = ["--steps", 3, "--batch", 2 * microbatch, "--microbatch", microbatch]
        rows = run("02_ddp/train.py", *flags, *batch, nproc=2).check().outputs[0].splitlines()
        return float(rows[-2].split("|")[-1].split()[0])  # MiB

    usable = (own_peak(3) + own_peak(4)) / 2
    monkeypatch.setattr(subprocess, "Popen", Forked)
    words = ["--ranks", 2, "--memory", f"{usable / (1 - KEEP):.2f}MiB", "--steps", 3, "--first", 2]
    words += ["--global-batch", 16, "--accumulate", 1]
    script = [ROOT / "02_ddp" / "train.py", *flags, "--batch", "{global}", "--microbatch", "{}"]
    code, found, _ = fit(*words, "--", *script)
    assert (code, found["failed"]) == (0, found["microbatch"] + 1), json.dumps(found, indent=1)
    # Within a step of the grid: rank 0 alone gives its account, and two runs differ by 10 MiB, as the heap falls.
    assert abs(found["microbatch"] - 3) <= 1, json.dumps(found, indent=1)
    assert found["batch"]["largest"]["microbatch"] == 2 * (found["microbatch"] // 2)
    assert all(row["samples_per_s"] > 0 for row in found["tries"])


# ---- tries that fail ----
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("if n > 2: os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ('if n > 2: raise RuntimeError("can\'t allocate memory")', "out of memory"),
        ("if n > 2: kept = take(800); time.sleep(60)", "ended: it passed the limit"),
    ],
)
def test_try_that_dies_of_memory_is_a_try_that_fails(body, why, fit, steps, base):
    code, found, _ = fit("--memory", limit_mib(base, 30), "--", steps(body), "{}")
    assert (code, found["microbatch"], found["failed"]) == (0, 2, 3), json.dumps(found, indent=1)
    assert why in found["tries"][-1]["why"]
    assert not any("the script set this limit" in note for note in found["notes"])


def test_smallest_microbatch_that_does_not_fit_is_exit_code_1(fit, steps):
    code, found, _ = fit("--memory", "100MiB", "--", steps("held = take(90)"), "{}")
    assert (code, found["microbatch"], found["failed"]) == (1, None, 1)


def test_first_failure_is_the_one_that_is_told(tmp_path):
    """A rank that was killed by a signal could not say when; of the others, the one that raised first."""
    errors = {0: ("OSError: Connection closed by peer", 12.0), 2: ("KeyError: 'shard'", 11.0)}
    reports = {
        rank: dict(steps=1, error=error, out_of_memory=False, time=at, gpus=[]) for rank, (error, at) in errors.items()
    }

    def told(*codes):
        processes = [SimpleNamespace(poll=lambda code=code: code) for code in codes]
        tree = SimpleNamespace(taken=lambda: [5, 6, 7])
        ranks = SimpleNamespace(processes=processes, tree=tree, output=lambda rank: f"of rank {rank}")
        return fit_try.explain_failure(ranks, reports, 4, 5)

    assert told(1, None, 1)[1:3] == (False, "KeyError: 'shard' (after 1 of 5 optimizer steps)")
    assert (told(1, -11, 1).why, told(1, -11, 1).code) == ("signal 11 (after 0 of 5 optimizer steps)", 139)
    assert told(1, None, 1).output == "of rank 2"
    assert told(1, -9, 1).of_memory  # the kernel's way out of a lack of it


def test_script_that_refuses_a_microbatch_sets_the_limit(fit, steps):
    code, found, _ = fit("--", steps("if n > 2: raise ValueError(f'{n} is too many')"), "{}")
    assert (code, found["microbatch"], found["failed"]) == (0, 2, 3)
    assert "not memory but the script set this limit, at microbatch 3: ValueError: 3 is too many" in found["notes"][0]


def test_one_rank_that_fails_ends_the_try(fit, steps):
    body = "if rank == 1: raise KeyError('shard')\ntime.sleep(60)"
    code, _, err = fit("--ranks", 2, "--", steps(body), "{}")
    assert code == 1
    assert "KeyError: 'shard'" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("body", "expected", "told"),
    [
        ("raise ValueError('no such layer')", 1, "ValueError: no such layer (after 0 of 5 optimizer steps)"),
        ("sys.exit(3)", 3, "exit code 3 (after 0 of 5"),
        ("sys.exit('two words')", 1, "exit code 1 (after 0 of 5 optimizer steps): two words"),
        ("sys.exit()", 2, "ended (after 0 of 5 optimizer steps): if it starts its ranks itself"),
        ("os._exit(4)", 4, "exit code 4 (after 0"),
        ("os.kill(os.getpid(), 11)", 139, "signal 11 (after 0"),
        ("if step == 2: break", 2, "ended (after 2 of 5 optimizer steps)"),
        ("time.sleep(60)", 124, "not 5 optimizer steps in 1 s"),
    ],
)
def test_script_that_cannot_be_measured_gets_a_clear_answer(body, expected, told, fit, steps):
    code, found, err = fit("--timeout", 1, "--", steps(body), "{}")
    assert (code, found) == (expected, None)
    assert told in err.splitlines()[-1]
    assert ("Traceback" in err) == ("raise" in body)
    assert "fit_rank.py" not in err
    assert "script.py" in err


def test_port_in_use_is_told_at_any_try(fit, steps):
    body = """import socket
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()
if n > 1: socket.socket().bind(s.getsockname())"""
    code, _, err = fit("--", steps(body), "{}")
    assert code == 1
    assert "Address already in use" in err
    assert "a port that the script chose is taken" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "0 scripts given, 1 needed"),
        (["--", "nothing.py", "{}"], "no file nothing.py"),
        (["--", __file__], "0 places for the microbatch"),
        (["--flag=--n", "--", __file__, "{}"], "--flag --n, and {} in 1 of the script's words"),
        (["--memory", "4", "--", __file__, "{}"], "--memory 4: a number with MiB"),
        (["--keep", "1", "--", __file__, "{}"], "--keep 1.0 from 0 to 0.99"),
        (["--steps", "2", "--", __file__, "{}"], "--steps 2 at least 3"),
        (["--first", "0", "--", __file__, "{}"], "--first 0 must be above 0"),
        (["--ranks", "4", "--dp", "3", "--", __file__, "{}"], "4 ranks are not a multiple of --dp 3"),
        (["--ranks", "4", "--global-batch", "6", "--", __file__, "{}"], "not divisible by 4 ranks: use 4 or 8"),
        (["--first", "9", "--global-batch", "8", "--", __file__, "{}"], "--first 9 is above the largest microbatch, 8"),
    ],
)
def test_bad_use_is_one_line_and_exit_code_2(words, told, fit):
    code, found, err = fit(*words)
    assert (code, found) == (2, None)
    assert told in err
    assert len(err.splitlines()) == 1


def test_launcher_around_it_is_refused(fit, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    code, _, err = fit("--", __file__, "{}")
    assert code == 2
    assert "RANK is 3" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_tool(number, steps, tmp_path):
    """On SIGTERM it ends them; when it was killed, they see it at their next step."""
    body = "os.symlink(str(os.getpid()), f'pid{rank}')\nwhile True: time.sleep(0.01); optimizer.step()"
    line = [sys.executable, str(ROOT / "07_diagnostics" / "fit_batch.py"), "--ranks", "2", "--steps", "1000000"]
    env = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    process = subprocess.Popen([*line, "--", str(steps(body)), "{}"], cwd=tmp_path, env=env)
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    eventually(lambda: all(file.is_symlink() for file in files))  # a link is there whole or not at all
    pids = [int(os.readlink(file)) for file in files]
    process.send_signal(number)
    assert process.wait(10) == (143 if number == signal.SIGTERM else -9)
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    eventually(lambda: not list((tmp_path / "temporary").iterdir()))


def eventually(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("body", "note"),
    [
        ("held = take(200)", "the peak hardly grows with the microbatch: is {} in the right place?"),
        ("held = None; held = take(300 if n == 1 else 100 * n)", "microbatch 2 took 100 MiB less than 1"),
        ("held = None; held = take(100 * step)", "memory still grew by 100 MiB in the last step"),
    ],
)
def test_what_casts_doubt_on_the_answer_is_noted(body, note, fit, steps):
    _, found, _ = fit("--largest", 2, "--memory", "2GiB", "--", steps(body), "{}")
    assert any(note in one for one in found["notes"]), found["notes"]


def test_places_are_filled():
    words = ["t.py", "--batch={global}", "{}", "--a", "{accumulate}"]
    assert script.fill_words(words, 3, 4, 2) == ["t.py", "--batch=24", "3", "--a", "2"]


# ---- as a reader runs it ----
TRUE_STEPS = """
import sys
assert "torch" not in sys.modules and sys.argv[1:] == ["--n", "1"]
import torch
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
while True:
    weight.grad = torch.ones(1)
    optimizer.step()
"""


def test_script_runs_before_torch_is_imported_and_the_table_is_printed(tmp_path):
    """What a script sets before it imports torch must count. Nothing is left behind."""
    (tmp_path / "train.py").write_text(TRUE_STEPS)
    line = [sys.executable, str(ROOT / "07_diagnostics" / "fit_batch.py"), "--flag=--n", "--largest", "1"]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([*line, "--", "train.py"], capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cpu | ranks 1, dp 1 | ")
    assert "limit      microbatch 1 left 20% free, none above was tried (tries: 1)" in done.stdout
    assert sorted(file.name for file in tmp_path.iterdir()) == ["train.py"]
