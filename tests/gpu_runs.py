"""What the GPU lane runs: which scripts in which layouts, and how it starts them."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from runner import ROOT, Result

FOLDERS = ["02_ddp", "03_tensor_parallel", "04_pipeline"]
SCRIPTS = [f"{folder}/{name}.py" for folder in FOLDERS for name in ("train", "from_scratch")]
DEEPSPEED = "05_zero/train.py"
SCRIPTS += ["05_zero/from_scratch.py", "05_zero/fsdp.py", DEEPSPEED, "06_hybrid/train.py"]
SCHEDULES = (["gpipe"], ["1f1b"], ["interleaved", "--chunks", 1], ["zero-bubble"])
FORKS = 4  # runs on one GPU at a time: they are small, and most of each is its start


# ---- what ----
def layouts(script: str, nproc: int) -> list[list[object]]:
    """Returns the flags of the script's layouts on so many GPUs; the model has 4 heads and 2 layers."""
    if script.startswith("04"):
        return [["--microbatch", 1, "--pp", min(nproc, 2), "--schedule", *schedule] for schedule in SCHEDULES]
    if script.startswith("02"):
        return [["--microbatch", 1]]
    if script.startswith("05"):
        return [["--microbatch", 1, "--stage", stage] for stage in ([0] * (script == DEEPSPEED) + [1, 2, 3])]
    if script.startswith("06"):
        shard = [["--shard", shard] for shard in ("none", "optimizer", "full")]
        return [["--microbatch", 1, "--tp", 2 - nproc % 2, "--pp", 2 if nproc % 4 == 0 else 1, *more] for more in shard]
    sizes = {min(nproc, 4), 2 - nproc % 2}
    return [["--tp", tp, *more] for tp in sizes for more in ([], ["--sequence-parallel"])]


def watched() -> list[list[object]]:
    """Scripts and flags of which no step may wait for the GPU; the engine of DeepSpeed waits by itself.

    The batch has 4,096 tokens: up to 3,072, the gradient of an embedding has a kernel of its own.
    """
    more = [[f"04_pipeline/{name}.py", "--schedule", "zero-bubble"] for name in ("train", "from_scratch")]
    runs = [*([script] for script in SCRIPTS if script != DEEPSPEED), *more]
    return [[*run, "--batch", 32, "--seq-len", 128, "--steps", 13, "--dtype", "bfloat16"] for run in runs]


SMALL = ["--dim", 1024, "--layers", 4, "--heads", 8, "--kv-heads", 8, "--seq-len", 512, "--dtype", "bfloat16"]


def tools(device: str, folder: Path) -> dict[str, list[object]]:
    """The commands of 01_env_check and 07_diagnostics on one GPU, each behind `python`; files go into the folder."""
    train = [ROOT / "02_ddp/train.py", "--device", device, *SMALL]
    here, micro = ROOT / "07_diagnostics", ["--microbatch", "{}", "--batch", "{global}"]
    keep = ["--first", 2, "--largest", 4, "--steps", 3, "--json"]
    return {
        "check": [ROOT / "01_env_check/check.py", "--device", device, "--timeout", 60, "--json", folder / "check.json"],
        "diagnose": [here / "diagnose.py", "--stop", "--json", folder / "diagnose.json", *train, "--batch", 16],
        "fit_batch": [here / "fit_batch.py", *keep, "--", *train, *micro, "--metrics", folder / "metrics.jsonl"],
        "hang": [here / "hang.py", "run", "--timeout", 60, "--json", "--", *train, "--batch", 16, "--steps", 10],
    }


# ---- how ----
def python(*words: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=timeout)


def torchrun(*words: object, nproc: int = 1, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return python("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", *words, timeout=timeout)


def read_rows(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.read_text().splitlines()]


class Run(NamedTuple):
    name: str  # script and flags
    rows: list[dict[str, Any]]  # one per optimizer step
    output: str  # rank 0's
    problem: str  # "" if it ended well


class Forks:
    """Processes of gpu_forks.py, each of which runs one thing at a time."""

    def __init__(self, servers: Iterable[subprocess.Popen[str]]):
        self.servers: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        for server in servers:
            self.servers.put(server)

    def run(self, script: object, *flags: object, nproc: int = 1, timeout: float = 120) -> Result:
        server = self.servers.get()
        assert server.stdin
        assert server.stdout
        try:
            server.stdin.write(json.dumps([str(script), [*map(str, flags)], nproc, timeout]) + "\n")
            server.stdin.flush()
            return Result(*json.loads(server.stdout.readline()))
        finally:
            self.servers.put(server)

    def train(self, jobs: Sequence[Sequence[object]], folder: Path, nproc: int = 1) -> list[Run]:
        """Runs each job, [script, flags...]; one at a time where a job has several GPUs."""

        def train(number: int) -> Run:
            script, *flags = jobs[number]
            metrics = folder / f"{number}.jsonl"
            result = self.run(script, *flags, "--metrics", metrics, nproc=nproc)
            name, failed = " ".join(map(str, jobs[number])), any(result.codes)
            problem = f"{name}: exit codes {result.codes}\n" + "\n".join(result.outputs) if failed else ""
            return Run(name, [] if failed else read_rows(metrics), result.outputs[0], problem)

        with ThreadPoolExecutor(self.servers.qsize() if nproc == 1 else 1) as pool:
            return list(pool.map(train, range(len(jobs))))


@contextmanager
def start_forks(count: int = FORKS) -> Iterator[Forks]:
    # With that variable is_available() asks NVML, and so leaves CUDA alone.
    env = os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests/gpu_forks.py")]
    with ExitStack() as stack:
        how: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        yield Forks([stack.enter_context(subprocess.Popen(command, **how)) for _ in range(count)])


def deviation(found: list[float], expected: list[float]) -> float:
    """The largest relative difference; infinite for a missing step or a nan."""
    if len(found) != len(expected):
        return math.inf
    differences = [abs(ours - theirs) / abs(theirs) for ours, theirs in zip(found, expected)]
    return max(one if math.isfinite(one) else math.inf for one in differences)
