"""02_ddp/uneven.py: ranks without a batch (Join), and parameters without a gradient (find_unused_parameters)."""

import json
import math
import random
import re
from functools import cache

import pytest
import torch
from runner import ROOT, run
from torch import nn

SCRIPT = ROOT / "02_ddp" / "uneven.py"
FLOAT64 = 1e-9  # twelve steps in float64 differ by 1e-14 from rounding, by 1e-3 or more from a wrong gradient
STEPS, BATCH, LR, CLIP, SEED = 12, 8, 1e-2, 0.5, 0
FLAGS = ("--steps", STEPS, "--batch", BATCH, "--lr", LR, "--clip", CLIP, "--seed", SEED, "--dtype", "float64")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """60 lines of 2 to 60 bytes, one in six a comment."""
    draw = random.Random(0)
    starts = [draw.choice(["# ", "", "", "    ", "", "\t"]) for _ in range(60)]
    lines = [start + "".join(draw.choice("abcdefgh ()") for _ in range(draw.randint(1, 55))) + "xx" for start in starts]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def plan_of(path):
    lines = path.read_bytes().splitlines(keepends=True)
    return lines, torch.randint(len(lines), (STEPS, BATCH), generator=torch.Generator().manual_seed(SEED)).tolist()


def is_comment(line):
    return line.split()[0].startswith(b"#")


@cache
def serial(path, world_size, uneven):
    """Losses and gradient norms of one process without torch.distributed, line by line.

    uneven: at each step, without the samples of those of `world_size` ranks that have run out.
    """
    lines, plan = plan_of(path)
    torch.manual_seed(SEED)
    body = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.ReLU())
    model = nn.ModuleList([body, nn.Linear(256, 256), nn.Linear(256, 256)]).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses, norms = [], []
    for step, batch in enumerate(plan):
        there = [r for r in range(world_size) if not uneven or step < STEPS - STEPS * r // world_size]
        chosen = [lines[i] for place, i in enumerate(batch) if place % world_size in there]
        optimizer.zero_grad(set_to_none=False)
        loss = torch.zeros((), dtype=torch.float64)
        for line in chosen:
            row = torch.tensor(list(line))
            logits = model[2 if is_comment(line) else 1](body(row[:-1]))
            loss = loss - logits.log_softmax(-1).gather(1, row[1:, None]).sum() / sum(len(c) - 1 for c in chosen)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = math.sqrt(sum(grad.square().sum().item() for grad in grads))
        for grad in grads:
            grad *= min(1, CLIP / (norm + 1e-6))  # as clip_grad_norm_ documents it
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


def usage_of_comment_head(path, world_size):
    """(steps, dp): does this rank's batch have a comment?"""
    lines, plan = plan_of(path)
    return [
        [any(is_comment(lines[i]) for i in batch[rank::world_size]) for rank in range(world_size)] for batch in plan
    ]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_with_unused_parameters_losses_and_gradient_norms_equal_one_process(text, tmp_path, world_size):
    losses, norms, output = train(SCRIPT, text, tmp_path, world_size)
    assert difference(losses, serial(text, world_size, False)[0]) < FLOAT64
    assert difference(norms, serial(text, world_size, False)[1]) < FLOAT64
    usage = usage_of_comment_head(text, world_size)
    assert any(any(step) and not all(step) for step in usage) or world_size == 1  # some ranks, some steps ...
    assert not all(any(step) for step in usage)  # ... and in some steps no rank at all: else this shows nothing
    used, total = map(int, re.search(r"comment head used by (\d+) of (\d+)", output).groups())
    assert (used, total) == (sum(map(sum, usage)), STEPS * world_size)


def test_without_find_unused_ddp_refuses_the_next_forward(text):
    result = run(SCRIPT, *FLAGS, "--data", text, "--no-find-unused", nproc=2, timeout=30)
    assert all(code not in (0, -9) for code in result.codes), result
    assert "find_unused_parameters=True" in "".join(result.outputs)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_join_finishes_and_equals_one_process_without_the_missing_samples(text, tmp_path, world_size):
    losses, norms, output = train(SCRIPT, text, tmp_path, world_size, "--join")
    assert difference(losses, serial(text, world_size, True)[0]) < FLOAT64
    assert difference(norms, serial(text, world_size, True)[1]) < FLOAT64
    ends = {1: [12], 2: [12, 6], 4: [12, 9, 6, 3]}[world_size]
    idle = 1 - sum(ends) / (STEPS * world_size)
    assert f"batches per rank {ends}, {idle:.0%} of the ranks' time idle" in output


def test_plain_loop_hangs_until_the_timeout_and_every_rank_fails_by_name(text):
    """Rank 0 waits for rank 1's gradients, rank 1 for rank 0 at the log; the first to give up also ends the other."""
    result = run(SCRIPT, *FLAGS, "--data", text, "--no-join", "--timeout", 5, nproc=2, timeout=40)
    assert result.codes == [1, 1], result
    for rank, output in enumerate(result.outputs):
        assert re.search(rf"\[rank{rank}\]: .*Error: ", output), output
    assert re.search("(Timed out waiting|timeout after) 5000ms", "".join(result.outputs))


FAULTS = {
    "mean of means": ("", 'reduction="sum") / totals[step]', 'reduction="mean") / world_size'),
    "DDP's mean left in": ("", "(loss * world_size).backward()", "loss.backward()"),
    "tokens of ranks that have run out": ("--join", ".sum(1) * there)", ".sum(1))"),
    "division by the ranks that are left": ("--join", "args.join is True", "True, divide_by_initial_world_size=False"),
    "no gradient where one process has zeros": ("--join", "zero_grad(set_to_none=False)", "zero_grad()"),
    "comments sent to the wrong head": ("", "reverse=True", "reverse=False"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_equality_check_sees_a_planted(fault, text, tmp_path, plant):
    flag, *edit = FAULTS[fault]
    script = plant("02_ddp/uneven.py", edit)
    losses, norms, _ = train(script, text, tmp_path, 2, *flag.split())
    expected = serial(text, 2, flag == "--join")
    assert max(difference(losses, expected[0]), difference(norms, expected[1])) > FLOAT64


@pytest.mark.parametrize("flags", [("--batch", 7), ("--batch", 62), ("--steps", 0), ("--data", "/nowhere")])
def test_bad_input_ends_on_every_rank_in_one_line(flags, text):
    result = run(SCRIPT, "--data", text, *flags, nproc=2, timeout=20)
    assert result.codes == [2, 2]
    for rank, output in enumerate(result.outputs):
        assert output.startswith(f"[rank{rank}] error: --steps ")
        assert output.count("\n") == 1
