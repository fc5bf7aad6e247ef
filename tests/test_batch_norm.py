"""02_ddp/batch_norm.py: batch norm over all ranks equals one process; each rank by itself does not."""

import json
import math
import random
import re
import runpy
import subprocess
import sys
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from runner import ROOT, run
from torch import nn

SCRIPT = ROOT / "02_ddp" / "batch_norm.py"
FLOAT64 = 1e-9  # twelve steps in float64 differ by 1e-13 from rounding, by 1e-4 or more from wrong statistics
PRINTED = 1e-6  # the last line shows six decimals
STEPS, BATCH, LR, CLIP, SEED = 12, 16, 1e-2, 0.5, 3
FLAGS = ("--steps", STEPS, "--lr", LR, "--clip", CLIP, "--seed", SEED, "--dtype", "float64")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    draw = random.Random(0)
    path.write_text("".join(draw.choice("abcdefgh ()#\n") for _ in range(3000)))
    return path


@cache
def serial(path, batch):
    """Losses, gradient norms and the loss with running statistics: one process, torch's BatchNorm, no distributed."""
    data = path.read_bytes()
    windows = torch.tensor([list(data[i : i + 9]) for i in range(len(data) - 8)])
    torch.manual_seed(SEED)
    embedding, first = nn.Embedding(256, 16), nn.Linear(128, 128, bias=False)
    norm, last = nn.BatchNorm1d(128), nn.Linear(128, 256)
    model = nn.ModuleList([embedding, first, norm, last]).double()
    plan = torch.randint(len(windows), (STEPS, batch))

    def loss_of(rows):
        return F.cross_entropy(last(norm(first(embedding(rows[:, :8]).flatten(1))).relu()), rows[:, 8])

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses, norms = [], []
    for indices in plan:
        optimizer.zero_grad()
        loss = loss_of(windows[indices])
        loss.backward()
        total = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
        for p in model.parameters():
            p.grad *= min(1, CLIP / (total + 1e-6))  # as clip_grad_norm_ documents it
        optimizer.step()
        losses.append(loss.item())
        norms.append(total)
    model.eval()
    return losses, norms, loss_of(windows[:: len(windows) // 1000 + 1]).item()


def train(script, text, tmp_path, world_size, batch, *flags):
    metrics = tmp_path / "metrics.jsonl"
    flags = (*FLAGS, "--batch", batch, "--data", text, "--metrics", metrics, *flags)
    output = run(script, *flags, nproc=world_size).check().outputs[0]
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    evaluated = float(re.search(r"with the running statistics: loss (.*)", output)[1])
    return [row["loss"] for row in rows], [row["grad_norm"] for row in rows], evaluated


def difference(left, right):
    assert len(left) == len(right)
    return max(abs(a - b) for a, b in zip(left, right))


@pytest.mark.parametrize(
    ("world_size", "batch"),
    [(1, 16), (2, 16), (4, 16), (2, 15), (4, 6), (4, 4), (4, 3)],  # ... uneven, one sample per rank, none on rank 3
)
def test_synced_equals_one_process(world_size, batch, text, tmp_path):
    losses, norms, evaluated = train(SCRIPT, text, tmp_path, world_size, batch)
    expected = serial(text, batch)
    assert difference(losses, expected[0]) < FLOAT64
    assert difference(norms, expected[1]) < FLOAT64
    assert abs(evaluated - expected[2]) < PRINTED


def test_local_statistics_do_not_equal_one_process(text, tmp_path):
    losses, _, evaluated = train(SCRIPT, text, tmp_path, 2, BATCH, "--norm", "local")
    assert difference(losses, serial(text, BATCH)[0]) > 1e-3
    assert abs(evaluated - serial(text, BATCH)[2]) > 1e-3


def test_one_sample_per_rank_is_refused_with_local_statistics(text):
    result = run(SCRIPT, *FLAGS, "--data", text, "--batch", 2, "--norm", "local", nproc=2, timeout=30)
    assert all(code not in (0, -9) for code in result.codes), result
    assert "Expected more than 1 value per channel" in "".join(result.outputs)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--norm", "torch", "--device", "cpu"), "works on GPUs only: use --norm synced"),
        (("--batch", 1), "--batch 1,"),
        (("--steps", 0), "--steps 0 "),
        (("--data", "/nowhere"), "0 bytes"),
    ],
)
def test_bad_input_ends_on_every_rank_in_one_line(flags, expected, text):
    result = run(SCRIPT, "--data", text, *flags, nproc=2, timeout=20)
    assert result.codes == [2, 2]
    for rank, output in enumerate(result.outputs):
        assert output.startswith(f"[rank{rank}] error: ")
        assert output.count("\n") == 1
        assert expected in output


FAULTS = {
    "gradient of own loss only": ("return AllReduceSum.apply(grad)", "return grad"),
    "statistics not summed": ("dist.all_reduce(total := x.clone())", "total = x.clone()"),
    "biased running variance": ("var * count / (count - 1)", "var"),
    "running mean not updated": ("self.running_mean += momentum", "self.running_mean += 0"),
    "own count": ("/ count\n", "/ x.shape[0]\n"),
    "DDP's mean left in": ("(loss * world_size).backward()", "loss.backward()"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_equality_check_sees_a_planted(fault, text, tmp_path, plant):
    script = plant("02_ddp/batch_norm.py", FAULTS[fault])
    losses, norms, evaluated = train(script, text, tmp_path, 2, 15)
    expected = serial(text, 15)
    equal = max(difference(losses, expected[0]), difference(norms, expected[1])) < FLOAT64
    assert not (equal and abs(evaluated - expected[2]) < PRINTED)


# Each rank holds a slice of x, and compares what it gets with torch's own BatchNorm over the whole of x.
MODULE_CHECK = """
import runpy, sys
import torch, torch.distributed as dist
from torch import nn
sys.path.append({root!r})
from common.process_group import process_group
script = runpy.run_path({script!r})
FLOAT64 = 1e-12  # sums of a few numbers in another order
FLOAT32_AT_1E4 = 2e-2  # float32 holds 1e4 to 1e-3 only, and the rounded mean enters each normalised value
with process_group("cpu", 30) as (rank, _, world_size, device):
    torch.manual_seed(0)
    for dtype, offset, tolerance in ((torch.float64, 0, FLOAT64), (torch.float32, 1e4, FLOAT32_AT_1E4)):
        for make, shape in ((nn.BatchNorm1d, ()), (nn.BatchNorm1d, (7,)), (nn.BatchNorm2d, (3, 5))):
            for options in ({{}}, {{"affine": False}}, {{"momentum": None, "eps": 1e-2}}):
                sizes = [0, 3, 1, 4][:world_size]  # uneven, one rank has none
                expected = make(6, **options, dtype=torch.float64)
                if expected.affine:
                    nn.init.normal_(expected.weight), nn.init.normal_(expected.bias)
                norm = script["convert"](make(6, **options, dtype=dtype))
                norm.load_state_dict(expected.state_dict())
                for _ in range(3):
                    whole = torch.randn(sum(sizes), 6, *shape, dtype=torch.float64) + offset
                    whole = whole.to(dtype).double().requires_grad_()  # the same numbers in both precisions
                    part = whole.split(sizes)[rank].detach().to(dtype).requires_grad_()
                    y, upstream = expected(whole), torch.randn_like(whole)
                    y.backward(upstream)
                    mine = norm(part)
                    mine.backward(upstream.split(sizes)[rank].to(dtype))
                    for got, want in ((mine, y.split(sizes)[rank]), (part.grad, whole.grad.split(sizes)[rank])):
                        torch.testing.assert_close(got, want.to(dtype), atol=tolerance, rtol=tolerance)
                    got, want = norm.state_dict(), expected.state_dict()
                    assert got.keys() == want.keys() and norm.num_batches_tracked == expected.num_batches_tracked
                    for name in ("running_mean", "running_var"):
                        torch.testing.assert_close(got[name].double(), want[name], atol=tolerance, rtol=tolerance)
                    if expected.affine:
                        got, want = norm.weight.grad.clone(), expected.weight.grad.to(dtype)
                        dist.all_reduce(got)  # as DDP would
                        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
                norm.eval(), expected.eval()  # the running statistics, and no collective: rank 0 alone
                sample = torch.randn(1, 6, *shape, dtype=dtype) + offset
                if rank == 0:
                    want = expected(sample.double()).to(dtype)
                    torch.testing.assert_close(norm(sample), want, atol=tolerance, rtol=tolerance)
    half = norm.train()(torch.randn(4, 6, 3, 5, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16
"""


@pytest.mark.parametrize("world_size", [2, 4])
def test_module_equals_torch_on_the_whole_batch(world_size, tmp_path):
    """Outputs, gradients, running statistics; 1d and 2d; uneven and empty parts; a mean 10,000 times the deviation."""
    script = tmp_path / "check.py"
    script.write_text(MODULE_CHECK.format(root=str(ROOT), script=str(SCRIPT)))
    run(script, nproc=world_size).check()


def test_one_value_per_channel_in_all_is_refused(tmp_path):
    script = tmp_path / "check.py"
    script.write_text(
        "import runpy, sys, torch\n"
        f"sys.path.append({str(ROOT)!r})\n"
        "from common.process_group import process_group\n"
        f"convert = runpy.run_path({str(SCRIPT)!r})['convert']\n"
        "with process_group('cpu', 30):\n"
        "    convert(torch.nn.BatchNorm1d(3))(torch.ones(1, 3))\n"
    )
    result = run(script)
    assert result.codes == [1]
    assert "Expected more than 1 value per channel" in result.outputs[0]


def test_convert_replaces_every_batch_norm_and_keeps_names_weights_and_mode():
    script = runpy.run_path(str(SCRIPT))
    inner = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ModuleList([nn.BatchNorm3d(4)]))
    model = nn.ModuleDict({"a": inner, "b": nn.BatchNorm1d(3).eval(), "c": nn.LayerNorm(3)})
    names, weight = list(model.state_dict()), inner[1].weight
    model = script["convert"](model)
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("SyncedBatchNorm") == 3
    assert not any(kind.startswith("BatchNorm") for kind in kinds)
    assert list(model.state_dict()) == names
    assert model["a"][1].weight is weight
    assert not model["b"].training
    assert model["a"][1].training


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.nn.SyncBatchNorm refuses the CPU")
def test_synced_equals_torch_sync_batch_norm_on_gpus(text, tmp_path):
    world_size = min(torch.cuda.device_count(), 2)
    rows = {}
    for norm in ("synced", "torch"):
        metrics = tmp_path / f"{norm}.jsonl"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            world_size,
            SCRIPT,
        ]
        command += [*FLAGS, "--batch", BATCH, "--data", text, "--metrics", metrics, "--norm", norm, "--device", "cuda"]
        subprocess.run([str(word) for word in command], check=True, timeout=120)
        rows[norm] = [json.loads(line) for line in metrics.read_text().splitlines()]
    for key in ("loss", "grad_norm"):
        assert difference([r[key] for r in rows["synced"]], [r[key] for r in rows["torch"]]) < FLOAT64
