"""03_tensor_parallel/all_gather.py: which gradients dist.all_gather loses, by how much, and that the loss hides it."""

import math
import re
from functools import cache

import pytest
import reference
import torch
from runner import ROOT, run
from torch import nn

SCRIPT = "03_tensor_parallel/all_gather.py"
STEPS, BATCH, SEQ_LEN, DIM = 60, 4, 16, 8
FLAGS = ("--steps", STEPS, "--batch", BATCH, "--seq-len", SEQ_LEN, "--dim", DIM)
RIGHT = 1e-12  # float64 on tensors of this size differs by 1e-15 from rounding
WRONG = 0.1  # the term of one rank for the sum of all, or tp sums
PRINTED = 1.01e-4  # a loss shows four decimals, and the last may have been rounded to either side
APART = 1e-3  # seen: 0.004 and more between the losses of a wrong variant and of one process
ALONE, PUT_BACK, SUMMED, COPIED, ONE = ROWS = (
    "all_gather alone",
    "outs[rank] = y",
    "backward sums over ranks",
    "Copy, GatherOutput",
    "one process",
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_bytes(reference.text_of(None)[5000 : 5000 + 30 * BATCH * SEQ_LEN])  # 60 steps see 3 epochs
    return path


@cache
def table(script, text, nproc):
    """Returns {row: (errors of output, dW and dx; losses with AdamW, as saved, with SGD)}, and the first loss."""
    output = run(script, *FLAGS, "--data", text, nproc=nproc).check().outputs[0]
    header, titles, *lines, last = output.splitlines()
    assert header == f"torch {torch.__version__} | gloo | cpu | tp {nproc}"
    assert [title.strip() for title in titles.split("|")[1:4]] == ["output", "weight.grad", "input.grad"]
    rows = {}
    for line in lines:
        name, *cells = (cell.strip() for cell in line.split("|"))
        values = [{"None": math.inf, "-": math.nan}.get(cell) or float(cell) for cell in cells]
        rows[name] = values[:3], values[3:]
    assert tuple(rows) == ROWS
    start, gaps = re.fullmatch(r"every loss began at ([\d.]+); AdamW's end, less one process's: (.*)", last).groups()
    for name, gap in zip(ROWS, gaps.split(", ")):
        assert float(gap) == pytest.approx(rows[name][1][0] - rows[ONE][1][0], abs=PRINTED)
    return rows, float(start)


@cache
def serial(path, optimizer, lr):
    """The first and the last loss of one process: torch's modules, no torch.distributed, no code of the script."""
    text, draw = torch.tensor(list(path.read_bytes())), torch.Generator().manual_seed(0)
    layers = (
        nn.Embedding(256, DIM),
        nn.Linear(DIM, 4 * DIM, bias=False),
        nn.SiLU(),
        nn.Linear(4 * DIM, 256, bias=False),
    )
    model = nn.Sequential(*layers).double()
    for weight in model.parameters():
        weight.data = torch.randn(weight.shape, generator=draw, dtype=torch.float64) / math.sqrt(weight.shape[1])
    optimizer, losses = optimizer(model.parameters(), lr=lr), []
    num_windows = (len(text) - 1) // SEQ_LEN
    for step in range(STEPS + 1):
        epoch, place = divmod(step, num_windows // BATCH)
        order = torch.randperm(num_windows, generator=torch.Generator().manual_seed(epoch)).tolist()
        chosen = order[place * BATCH : (place + 1) * BATCH]
        tokens = torch.stack([text[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in chosen])
        loss = -model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses[0], losses[-1]


def check(rows, start, text, right):
    """The row named so has no error at all, and losses like those of one process."""
    adamw, sgd = serial(text, torch.optim.AdamW, 3e-3), serial(text, torch.optim.SGD, 1.0)
    assert start == pytest.approx(adamw[0], abs=PRINTED)
    errors, losses = rows[right]
    assert losses == pytest.approx([adamw[1], adamw[1], sgd[1]], abs=PRINTED)
    assert right == ONE or max(errors) < RIGHT


@pytest.mark.parametrize("nproc", [1, 2, 4])
@pytest.mark.parametrize("right", [COPIED, ONE])
def test_copy_and_gather_output_equal_one_process(right, nproc, text):
    check(*table(SCRIPT, text, nproc), text, right)


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_every_output_is_right_and_every_loss_falls(nproc, text):
    rows, start = table(SCRIPT, text, nproc)
    for name in ROWS[:-1]:
        assert rows[name][0][0] < RIGHT
    for _, losses in rows.values():
        assert max(losses) < start - 0.1


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_all_gather_alone_leaves_no_gradient(nproc, text):
    (_, *gradients), losses = table(SCRIPT, text, nproc)[0][ALONE]
    assert gradients == [math.inf, math.inf]
    expected = table(SCRIPT, text, nproc)[0][ONE][1]
    assert all(loss > other + APART for loss, other in zip(losses, expected))


@pytest.mark.parametrize("nproc", [2, 4])
def test_own_part_put_back_lacks_the_other_ranks_terms_of_the_inputs_gradient(nproc, text):
    rows, _ = table(SCRIPT, text, nproc)
    (_, dw, dx), (adamw, saved, sgd) = rows[PUT_BACK]
    assert dw < RIGHT
    assert WRONG < dx < math.inf
    assert abs(adamw - saved) > APART  # the ranks' embeddings have drifted apart
    assert abs(adamw - rows[ONE][1][0]) > APART
    assert abs(sgd - rows[ONE][1][2]) > APART


@pytest.mark.parametrize("nproc", [2, 4])
def test_summed_gradients_are_tp_times_too_large_and_adamw_hides_it(nproc, text):
    rows, _ = table(SCRIPT, text, nproc)
    (_, dw, dx), (adamw, saved, sgd) = rows[SUMMED]
    assert dw == dx == nproc - 1  # tp times the right one is tp - 1 times off
    assert [adamw, saved] == pytest.approx(rows[ONE][1][:2], abs=PRINTED)
    assert abs(sgd - rows[ONE][1][2]) > APART


def test_on_one_rank_all_but_the_first_are_right(text):
    for name in (PUT_BACK, SUMMED, COPIED):
        check(*table(SCRIPT, text, 1), text, name)


TORCHS_OWN = """
import sys, warnings
import torch
sys.path.append({root!r})
from common.process_group import process_group
from torch.distributed.nn.functional import all_gather
with process_group("cpu", 30) as (rank, _, world_size, device):
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 deprecates it
    y = torch.full((3,), float(rank), requires_grad=True)
    torch.cat(all_gather(y)).square().sum().backward()
    assert y.grad.tolist() == [world_size * 2.0 * rank] * 3, y.grad
    del y
"""


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_torchs_own_differentiable_all_gather_sums_over_the_ranks(nproc, tmp_path):
    """What the docstring says of torch.distributed.nn.functional.all_gather."""
    script = tmp_path / "script.py"
    script.write_text(TORCHS_OWN.format(root=str(ROOT)))
    run(script, nproc=nproc).check()


FAULTS = {
    "gradient not summed": ("operators.py", "all_reduce(dy.clone(), ctx.tp)[0], None", "dy, None"),
    "another rank's columns": (
        "operators.py",
        "chunk(ctx.tp.size, dim=-1)[ctx.tp.rank]",
        "chunk(ctx.tp.size, dim=-1)[0]",
    ),
    "the first shard on every rank": ("chunk(tp.size)[tp.rank].clone()", "chunk(tp.size)[0].clone()"),
    "columns in another order": ("operators.py", "torch.cat(parts, dim=-1)", "torch.cat(parts[::-1], dim=-1)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_equality_check_sees_a_planted(fault, text, plant):
    faulty = table(plant(SCRIPT, FAULTS[fault]), text, 2)  # it runs to the end, and prints all rows
    with pytest.raises(AssertionError):
        check(*faulty, text, COPIED)


@pytest.mark.parametrize(
    ("nproc", "flags", "expected"),
    [
        (3, "", "the hidden width 4 x --dim 32 is not divisible by 3 ranks: use --dim 3 x n, or --nproc-per-node 1"),
        (2, "--steps 0", "--steps 0 must be above 0"),
        (2, "--dim -2", "--dim -2 must be above 0"),
        (2, "--batch 0", "--batch 0 must be above 0"),
        (2, "--data /nowhere", "/nowhere has 0 bytes of text, a batch takes 513: use more --data"),
    ],
)
def test_bad_input_ends_on_every_rank_in_one_line(nproc, flags, expected):
    result = run(SCRIPT, *flags.split(), nproc=nproc, timeout=20)
    assert result.codes == [2] * nproc, result
    assert result.outputs == [f"[rank{rank}] error: {expected}\n" for rank in range(nproc)]
