"""03_tensor_parallel/crossover.py: what it times is the same block, whole and split, and what it counts is exact."""

import os
import re
import subprocess
import sys

import pytest
from runner import ROOT, run

SCRIPT = "03_tensor_parallel/crossover.py"
WIDTHS, BATCHES, SEQ_LEN = (16, 48), (1, 3), 8
FLAGS = ("--widths", *WIDTHS, "--batches", *BATCHES, "--seq-len", SEQ_LEN, "--repeats", 2)
COLUMNS = "width | sequences | tokens | one process ms |    tp ms | speed-up | communication | bytes to send"


def table(nproc, *flags):
    """Returns the rows' cells, and the last line."""
    output = run(SCRIPT, *FLAGS, *flags, nproc=nproc).check().outputs[0]
    header, columns, *rows, verdict = output.splitlines()
    assert re.fullmatch(rf"torch \S+ \| gloo \| cpu \| tp {nproc} \| \w+ \| 1 threads per rank", header)
    assert columns == COLUMNS
    assert {len(row) for row in rows} == {len(columns)}  # aligned
    return [[float(cell.strip("% ")) for cell in row.split("|")] for row in rows], verdict


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        *((nproc, flags) for nproc in (1, 2, 4) for flags in ("", "--sequence-parallel")),
        (2, "--dtype bfloat16"),
        (2, "--dtype float64"),
    ],
)
def test_table_has_a_row_for_each_size_and_the_exact_bytes(nproc, flags):
    rows, verdict = table(nproc, *flags.split())
    itemsize = {"": 4, "--dtype bfloat16": 2, "--dtype float64": 8}.get(flags, 4)
    expected = []
    for width in WIDTHS:
        for batch in BATCHES:
            payload = batch * SEQ_LEN * width * itemsize
            expected.append([width, batch, batch * SEQ_LEN, 4 * payload * 2 * (nproc - 1) / nproc])
    assert [[*row[:3], row[7]] for row in rows] == expected
    for _, _, _, one, split, speed_up, share, _ in rows:
        assert min(one, split) > 0
        assert share >= 0
        assert speed_up == pytest.approx(one / split, rel=0.1, abs=0.01)  # of the rounded figures
    if nproc == 1:
        assert verdict == "tp 1 splits nothing: use --nproc-per-node 2 or more"
    else:
        check_verdict(verdict, rows, nproc)


def check_verdict(verdict, rows, nproc):
    """A speed-up that is printed as 1.00 may have been on either side."""
    found = re.fullmatch(
        rf"tp {nproc} (?:pays in (\d+) of {len(rows)} rows, the smallest|does not pay in this table, best) "
        r"(\d+) tokens x width (\d+) = ([\d,]+) \(speed-up ([\d.]+)\)(: try larger --widths, or a faster link)?",
        verdict,
    )
    assert found, verdict
    paying, tokens, width, product, speed_up = (float(group.replace(",", "")) for group in found.groups("0")[:5])
    assert product == tokens * width
    assert speed_up in [row[5] for row in rows if [row[2], row[0]] == [tokens, width]]
    speed_ups = [row[5] for row in rows]
    if paying:
        assert sum(s > 1 for s in speed_ups) <= paying <= sum(s >= 1 for s in speed_ups)
        assert product <= min((row[0] * row[2] for row in rows if row[5] > 1), default=product)
    else:
        assert speed_up == max(speed_ups) <= 1


# Run beside the script: its two blocks give the same y, dx and dW, by the collectives that it times alone and counts.
BLOCKS_CHECK = """
import argparse, runpy, sys
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from crossover import build_blocks, communicate, forward_backward
from common.process_group import process_group
from operators import TensorParallel
from shards import shard
FLOAT64 = 1e-10  # seen: 1e-14

def profiled(call, *inputs):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        output = call(*inputs)
    events = [event for event in profiler.events() if event.name.startswith("gloo:")]
    return output, sorted((event.name, event.input_shapes[0]) for event in events)

with process_group("cpu", 30) as (rank, _, n, device):
    for sequence_parallel in (False, True):
        tp = TensorParallel(None, rank, n, sequence_parallel)
        args = argparse.Namespace(heads=4, kv_heads=4, seed=3)
        whole, part = (block.double() for block in build_blocks(48, args, tp))
        matrices = [weight for weight in whole.parameters() if weight.dim() > 1]
        assert len(matrices) == 7 and all(weight.std() > 0.01 for weight in matrices)
        assert sum(weight.numel() for weight in part.parameters()) == sum(m.numel() for m in matrices) // n + 2 * 48
        x = torch.randn(3, 8, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        mine = (lambda t: t.reshape(n, -1, 48)[rank].view(3, -1, 48)) if sequence_parallel else (lambda t: t)
        y, dx, *dws = forward_backward(whole, x)
        (part_y, part_dx, *part_dws), done = profiled(forward_backward, part, mine(x))
        _, alone = profiled(communicate, torch.zeros_like(mine(x)), tp)
        (whole(z := x.clone().requires_grad_()).square().sum() / 2).backward()
        torch.testing.assert_close(dx, z.grad, atol=FLOAT64, rtol=FLOAT64)
        assert done == alone
        if sequence_parallel:  # the name of a reduce_scatter's event is gloo's own business
            assert len(done) == 8 and done[:4] == [("gloo:all_gather", [3 * 8 * 48 // n])] * 4
        else:
            assert done == [("gloo:all_reduce", [3, 8, 48])] * 4
        torch.testing.assert_close(part_y, mine(y), atol=FLOAT64, rtol=FLOAT64)
        torch.testing.assert_close(part_dx, mine(dx), atol=FLOAT64, rtol=FLOAT64)
        for weight, got, want in zip(part.parameters(), part_dws, dws):
            if not hasattr(weight, "placement") and sequence_parallel:
                dist.all_reduce(got)  # a norm has seen 1/tp of the tokens
            torch.testing.assert_close(got, shard(want, weight, tp), atol=FLOAT64, rtol=FLOAT64)
"""


def check_blocks(script, nproc):
    path = script.with_name("check_blocks.py")
    path.write_text(BLOCKS_CHECK)
    return run(path, nproc=nproc)


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_both_blocks_are_the_same_and_communicate_as_counted(nproc, plant):
    check_blocks(plant(SCRIPT), nproc).check()


FAULTS = {
    "whole MLP on every rank": ("part.mlp = ParallelMLP(", "ParallelMLP("),
    "other weights": ("init_shards(part, args.seed, tp)", "init_shards(part, args.seed + 1, tp)"),
    "collective forgotten in the measure": ("range(4)", "range(3)"),
    "gradients of other values": ("y.detach())", "x.detach())"),
    "input's gradient not summed": (
        "operators.py",
        "dx, summed = reduce(dx, tp, async_op=True)",
        "dx, summed = dx, reduce(dx.clone(), tp, async_op=True)[1]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_comparison_sees_a_planted(fault, plant):
    script = plant(SCRIPT, FAULTS[fault])
    result = check_blocks(script, 2)
    assert result.codes == [1, 1]
    assert "AssertionError" in result.outputs[0], result.outputs[0]


def can_shape():
    """Has this user a network of their own, with a link whose rate they can set?"""
    command = "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 70kb latency 1s"
    return not os.system(f"unshare -Urn sh -c '{command}' > /dev/null 2>&1")


@pytest.mark.skipif(not can_shape(), reason="needs unshare, ip and tc, and a kernel with user namespaces and tbf")
def test_command_for_a_link_of_a_given_rate_works_as_the_docstring_has_it():
    (command,) = re.findall(r"^    (unshare .*?\")$", (ROOT / SCRIPT).read_text(), re.MULTILINE | re.DOTALL)
    command = command.removesuffix('"') + " " + " ".join(map(str, FLAGS)) + '"'
    env = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == COLUMNS
    assert len(lines) == 3 + len(WIDTHS) * len(BATCHES)


@pytest.mark.parametrize(
    ("nproc", "flags", "expected"),
    [
        (2, "--heads 3 --kv-heads 3 --widths 48", "--heads 3 is not divisible by 2 ranks: use --nproc-per-node 1"),
        (3, "", "--heads 4 is not divisible by 3 ranks: use --nproc-per-node 1"),
        (2, "--widths 128 100", "--widths 100 is not divisible by 2 x 4 heads: use 8 x n"),
        (5, "--heads 5 --kv-heads 5 --widths 40", "--widths 40 with MLP width 128 is not divisible by 5 ranks"),
        (2, "--seq-len 7 --sequence-parallel", "--seq-len 7 is not divisible by 2 ranks: use --nproc-per-node 1"),
        (2, "--kv-heads 3", "--kv-heads 3 must divide 4 heads and fit 2 ranks: use 1"),
        (4, "--heads 12 --kv-heads 6 --widths 48", "--kv-heads 6 must divide 12 heads and fit 4 ranks: use 1"),
        (2, "--widths 128 0", "--widths 0 must be above 0"),
        (2, "--batches -1", "--batches -1 must be above 0"),
        (2, "--seq-len 0", "--seq-len 0 must be above 0"),
        (2, "--repeats 0", "--repeats 0 must be above 0"),
    ],
)
def test_bad_input_ends_on_every_rank_in_one_line(nproc, flags, expected):
    result = run(SCRIPT, *flags.split(), nproc=nproc, timeout=20)
    assert result.codes == [2] * nproc, result
    for rank, output in enumerate(result.outputs):
        assert output.startswith(f"[rank{rank}] error: {expected}"), output
        assert output.count("\n") == 1


def test_odd_length_needs_no_sequence_parallelism_to_be_fine():
    run(SCRIPT, *FLAGS, "--seq-len", 7, nproc=2).check()
