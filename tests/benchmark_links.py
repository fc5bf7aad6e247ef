"""What an axis costs across nodes: times 06_hybrid/train.py on one emulated node and on two with a slow link between.

    python tests/benchmark_links.py --rate 100mbit

Prints the table of 06_hybrid/README.md: median step inside a node and across, their ratio, and the ratio by the formula
(t + s) / t: t the step inside, s the bytes that each node sends in a step, by the kernel's counter, over the rate. A
pipeline of m microbatches hides all of s but the first one's way there and the last one's way back: 2 s / m.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CLUSTER = Path(__file__).resolve().parents[1] / "06_hybrid" / "cluster.py"
SCRIPT = str(CLUSTER.with_name("train.py"))
WARM_UP = 2  # steps of each run that are not counted: first allocations, new connections
CASES = {
    "tp 2": ("--tp 2 --allow-cross-node-tp --batch 8 --microbatch 8", 1),
    "dp 2, one microbatch": ("--dp 2 --shard none --batch 8 --microbatch 4", 1),
    "dp 2, 8 microbatches": ("--dp 2 --shard none --batch 64 --microbatch 4", 1),
    "pp 2, 8 microbatches": ("--pp 2 --batch 8 --microbatch 1", 2 / 8),
}


def run(flags: str, steps: int, *cluster: str) -> tuple[float, float]:
    """Returns the median milliseconds of a step, and the bytes that node 0 sent to another in all steps."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        command = [sys.executable, str(CLUSTER), *cluster, "--", SCRIPT, *flags.split(), "--steps", str(steps)]
        done = subprocess.run([*command, "--metrics", str(metrics)], check=True, capture_output=True, text=True)
        times = [json.loads(line)["step_ms"] for line in metrics.read_text().splitlines()]
    (sent,) = re.findall(r"bytes sent to other nodes: node0 ([\d,]+)", done.stderr)
    return statistics.median(times[WARM_UP:]), int(sent.replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--rate", default="100mbit", help="in mbit")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    bytes_per_ms = float(args.rate.removesuffix("mbit")) * 1e6 / 8 / 1e3
    print(f"| 2 ranks | MB a step | ms inside a node | ms over {args.rate} | ratio | by the formula |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, (flags, exposed) in CASES.items():
        inside, _ = run(flags, args.steps, "--nodes", "1", "--procs", "2")
        _, start = run(flags, WARM_UP + 1, "--nodes", "2", "--procs", "1")
        across, sent = run(flags, args.steps, "--nodes", "2", "--procs", "1", "--rate", args.rate)
        sent = (sent - start) / (args.steps - WARM_UP - 1)
        formula = (inside + exposed * sent / bytes_per_ms) / inside
        print(f"| {name} | {sent / 1e6:.2f} | {inside:.0f} | {across:.0f} | {across / inside:.2f} | {formula:.2f} |")


if __name__ == "__main__":
    main()
