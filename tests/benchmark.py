"""Times two scripts side by side: runs them in turn and prints the ratio of their median times per step.

    python tests/benchmark.py 02_ddp/from_scratch.py 02_ddp/train.py --nproc-per-node 2
    python tests/benchmark.py "02_ddp/train.py --find-unused" 02_ddp/train.py

Only the ratio is worth keeping: both scripts meet the same load, since they take turns (A B, B A, A B ..) in one run.
Flags that this program does not know go to both scripts: `--steps 60 --dim 256`.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WARM_UP = 5  # steps of each run that are not counted: first allocations, DDP's new bucket order


def step_times(script: str, nproc: int, flags: list[str]) -> list[float]:
    """Returns the milliseconds of each step of one run of `script` (with flags of its own, perhaps) under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        subprocess.run(
            [*command, *shlex.split(script), *flags, "--metrics", str(metrics)],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        )
        return [json.loads(line)["step_ms"] for line in metrics.read_text().splitlines()][WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("ours")
    parser.add_argument("theirs")
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6, help="runs of each script")
    args, flags = parser.parse_known_args()
    times: dict[str, list[float]] = {args.ours: [], args.theirs: []}
    for number in range(args.rounds):
        pair = list(times) if number % 2 == 0 else list(times)[::-1]
        for script in pair:
            times[script] += step_times(script, args.nproc_per_node, flags)
    ours, theirs = (statistics.median(times[script]) for script in (args.ours, args.theirs))
    for script, median in ((args.ours, ours), (args.theirs, theirs)):
        print(f"{script:40} {median:8.2f} ms per step, median of {len(times[script])}")
    print(f"ratio {ours / theirs:.3f} at {args.nproc_per_node} processes")


if __name__ == "__main__":
    main()
