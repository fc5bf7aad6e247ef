"""02_ddp/ragged.py: batches of similar length, each sample once, and the loss column of one process."""

import json
import math
import random
import re
import runpy
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runner import ROOT, run
from torch import nn

SCRIPT = ROOT / "02_ddp" / "ragged.py"
FLOAT64 = 1e-9  # twelve steps in float64 differ by 1e-14 from rounding, by 1e-3 or more from a wrong gradient
STEPS, BATCH, LR, CLIP, SEED = 12, 8, 1e-2, 0.5, 3
FLAGS = ("--steps", STEPS, "--batch", BATCH, "--lr", LR, "--clip", CLIP, "--seed", SEED, "--dtype", "float64")


def sampler_class():
    return runpy.run_path(str(SCRIPT))["BucketBatchSampler"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """70 lines of 2 to 150 bytes: an epoch of 8 batches of 8, so that 12 steps reach the second epoch."""
    draw = random.Random(0)
    lines = ["".join(draw.choice("abcdefgh ()#") for _ in range(draw.randint(1, 149))) + "xx\n" for _ in range(70)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(lines))
    return path


@cache
def serial(path):
    """Losses and gradient norms of one process without torch.distributed: line by line, so without any padding."""
    lines = [line[:129] for line in path.read_bytes().splitlines(keepends=True)]
    sampler = sampler_class()(torch.tensor([len(line) - 1 for line in lines]), BATCH, 0, 1, SEED, True)
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    batches = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        batches += list(sampler)
    losses, norms = [], []
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        rows = [torch.tensor(list(lines[i])) for i in batch]
        tokens = sum(len(row) - 1 for row in rows)
        loss = sum(-model(row[:-1]).log_softmax(-1).gather(1, row[1:, None]).sum() for row in rows) / tokens
        loss.backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
        for p in model.parameters():
            p.grad *= min(1, CLIP / (norm + 1e-6))  # as clip_grad_norm_ documents it
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm)
    return losses, norms


def train(script, text, tmp_path, world_size, *flags):
    metrics = tmp_path / "metrics.jsonl"
    result = run(script, *FLAGS, "--data", text, "--metrics", metrics, *flags, nproc=world_size).check()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row["loss"] for row in rows], [row["grad_norm"] for row in rows], result.outputs[0]


def difference(left, right):
    assert len(left) == len(right)
    return max(abs(a - b) for a, b in zip(left, right))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_losses_and_gradient_norms_equal_one_process_without_padding(text, tmp_path, world_size):
    losses, norms, _ = train(SCRIPT, text, tmp_path, world_size)
    assert difference(losses, serial(text)[0]) < FLOAT64
    assert difference(norms, serial(text)[1]) < FLOAT64


FAULTS = {
    "mean of means": ('reduction="sum") / total', 'reduction="mean") / world_size'),
    "DDP's mean left in": ("(loss * world_size).backward()", "loss.backward()"),
    "padding counted": ("padding_value=-100", "padding_value=0"),
    "set_epoch forgotten": ("sampler.set_epoch(*divmod(len(counts), len(sampler)))", "pass"),
    "a plan for each rank": ("self.seed + epoch", "self.seed + epoch + self.rank"),
    "the same part on every rank": ("self.plan[:, :, self.rank]", "self.plan[:, :, 0]"),
    "own loss reported": ("dist.all_reduce(history[0])", "pass"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_equality_check_sees_a_planted(fault, text, tmp_path, plant):
    script = plant("02_ddp/ragged.py", FAULTS[fault])
    losses, norms, _ = train(script, text, tmp_path, 2)
    assert max(difference(losses, serial(text)[0]), difference(norms, serial(text)[1])) > FLOAT64


def test_printed_padding_equals_a_count_of_every_batch_of_an_epoch(tmp_path):
    world_size, batch = 2, 32
    source = "".join(Path(path).read_text() for path in (torch.__file__, random.__file__, json.__file__))
    (tmp_path / "text.txt").write_text(source)
    result = run(SCRIPT, "--steps", 1, "--batch", batch, "--data", tmp_path, nproc=world_size).check()
    found = re.search(r"padding: (\d+)% with --bucket, (\d+)% with --no-bucket", result.outputs[0])
    assert found, result.outputs[0]
    lengths = [min(len(line), 129) - 1 for line in source.encode().splitlines(keepends=True) if len(line.strip()) > 1]
    shares = []
    for bucket in (True, False):
        computed = real = 0
        for rank in range(world_size):
            for share in sampler_class()(torch.tensor(lengths), batch, rank, world_size, 0, bucket):
                real += sum(lengths[i] for i in share)
                computed += len(share) * max(lengths[i] for i in share)
        shares.append(1 - real / computed)
    assert [f"{share:.0%}" for share in shares] == [f"{share}%" for share in found.groups()]
    assert shares[0] < shares[1] / 5  # on lines of code bucketing takes away more than four fifths of the padding


sizes = st.tuples(st.integers(1, 5), st.integers(1, 4))  # ranks, samples per rank and step


@settings(deadline=None, max_examples=60)
@given(sizes, st.lists(st.integers(1, 128), min_size=1, max_size=150), st.booleans(), st.integers(0, 9))
def test_ranks_get_equal_counts_and_together_the_global_batches_of_one_process(sizes, lengths, bucket, epoch):
    world_size, per_rank = sizes
    batch = world_size * per_rank
    ranks = [sampler_class_once()(torch.tensor(lengths), batch, r, world_size, 0, bucket) for r in range(world_size)]
    alone = sampler_class_once()(torch.tensor(lengths), batch, 0, 1, 0, bucket)
    for sampler in (alone, *ranks):
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in ranks]
    assert [[len(share) for share in rank] for rank in shares] == [[per_rank] * (len(lengths) // batch)] * world_size
    whole = list(alone)
    for step, expected in enumerate(whole):
        assert sorted(i for rank in shares for i in rank[step]) == sorted(expected)
        if bucket:  # dealt in turn from the sorted batch: no rank gets all the long ones
            dealt = [lengths[rank[step][k]] for k in range(per_rank) for rank in shares]
            assert dealt == sorted(dealt)
    used = [i for step in whole for i in step]
    assert len(used) == len(set(used)) == len(lengths) // batch * batch


@cache
def sampler_class_once():
    return sampler_class()


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("step", [0, 5, 9, 23])
def test_sampler_resumes_in_mid_epoch_at_any_world_size(step, world_size):
    lengths = torch.randint(1, 128, (83,), generator=torch.Generator().manual_seed(1))  # 10 batches of 8, 3 left over
    samplers = [sampler_class()(lengths, 8, rank, world_size, seed=5) for rank in range(world_size)]
    assert len(samplers[0]) == 10
    for sampler in samplers:
        epoch, start = divmod(step, 10)
        sampler.set_epoch(epoch)
        uninterrupted = list(sampler)
        sampler.set_epoch(epoch, start)
        assert list(sampler) == uninterrupted[start:]
        assert len(sampler.tokens) == 10 - start


def test_every_epoch_has_another_order_and_other_neighbours():
    lengths = torch.randint(1, 20, (1000,), generator=torch.Generator().manual_seed(1))  # one pool
    sampler = sampler_class()(lengths, 16, 0, 1)
    epochs = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    assert epochs[0] == epochs[2]
    assert not {frozenset(batch) for batch in epochs[0]} & {frozenset(batch) for batch in epochs[1]}
    means = [sum(lengths[i].item() for i in batch) for batch in epochs[0]]
    assert means not in (sorted(means), sorted(means, reverse=True))  # short batches do not all come first


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--batch", 7), "--batch 7"),
        (("--batch", 0), "--batch 0"),
        (("--batch", 72), "with 70 lines of text"),
        (("--steps", 0), "--steps 0"),
        (("--data", "/nowhere"), "with 0 lines of text"),
    ],
)
def test_bad_input_ends_on_every_rank_in_one_line(flags, expected, text):
    result = run(SCRIPT, "--data", text, *flags, nproc=2, timeout=20)
    assert result.codes == [2, 2]
    for rank, output in enumerate(result.outputs):
        assert output.startswith(f"[rank{rank}] error: ")
        assert output.count("\n") == 1
        assert expected in output
