"""03_tensor_parallel's split layers and loss, each against the same layer on one process, in float64."""

import pytest
from runner import ROOT, run

FOLDER = ROOT / "03_tensor_parallel"

# Run on every rank: `check` compares what a rank has with what one process would have, and names what differs.
SCRIPT = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common.process_group import process_group
from layers import ColumnParallelLinear, RowParallelLinear, VocabParallelCrossEntropy, VocabParallelEmbedding, project
from operators import TensorParallel, gather
from shards import copies, shard, sharded, unshard
from torch import nn

EXACT = 1e-12  # float64, a sum of a few numbers in another order
B, T, D, N = 3, 8, 6, 8
torch.set_default_dtype(torch.float64)


def check(name, ours, theirs):
    assert ours.shape == theirs.shape, f"{name}: {ours.shape}, one process {theirs.shape}"
    assert torch.allclose(ours, theirs, rtol=0, atol=EXACT), f"{name} is off by {(ours - theirs).abs().max()}"


def fill(layer, whole, tp):
    for ours, theirs in zip(layer.parameters(), whole.parameters()):
        ours.data.copy_(shard(theirs.data, ours, tp))


def compare_gradients(name, layer, whole, tp):
    for (part, ours), theirs in zip(layer.named_parameters(), whole.parameters()):
        if tp.sequence_parallel and not hasattr(ours, "placement"):
            dist.all_reduce(ours.grad)  # each rank has seen 1/tp of the tokens
        check(f"gradient of {name}.{part}", unshard(ours.grad, ours, tp), theirs.grad)


def tokens_of(x, tp):  # this rank's, of the flattened batch
    if not tp.sequence_parallel:
        return x
    return x.reshape(-1, x.shape[-1]).chunk(tp.size)[tp.rank].view(x.shape[0], -1, x.shape[-1])


def pair(tp, bias=True):
    "column, then row: the halves of a block"
    torch.manual_seed(0)
    first, second, x = nn.Linear(D, N, bias), nn.Linear(N, D, bias), torch.randn(B, T, D, requires_grad=True)
    weight = torch.randn(B, T, D)
    column, row = ColumnParallelLinear(D, N, tp, bias), RowParallelLinear(N, D, tp, bias)
    fill(column, first, tp), fill(row, second, tp)
    expected = second(F.silu(first(x)))
    (expected * weight).sum().backward()
    mine = tokens_of(x.detach(), tp).clone().requires_grad_()
    out = row(F.silu(column(mine)))
    (out * tokens_of(weight, tp)).sum().backward()
    check("output", out.detach(), tokens_of(expected.detach(), tp))
    check("gradient of the input", mine.grad, tokens_of(x.grad, tp))
    compare_gradients("column", column, first, tp)
    compare_gradients("row", row, second, tp)


def gathered(tp):
    "gather_output: what follows is the same on every rank"
    torch.manual_seed(0)
    first, x, weight = nn.Linear(D, N), torch.randn(B, T, D, requires_grad=True), torch.randn(B, T, N)
    column = ColumnParallelLinear(D, N, tp, bias=True, gather_output=True)
    fill(column, first, tp)
    expected = first(x)
    (expected**2 * weight).sum().backward()
    mine = tokens_of(x.detach(), tp).clone().requires_grad_()
    out = column(mine)
    (out**2 * weight).sum().backward()
    check("output", out.detach(), expected.detach())
    check("gradient of the input", mine.grad, tokens_of(x.grad, tp))
    compare_gradients("column", column, first, tp)


def together(tp):
    "several layers of one input; the second has two shards, whatever the number of ranks"
    torch.manual_seed(0)
    wholes = [nn.Linear(D, N, bias=False), nn.Linear(D, 2 * N, bias=False)]
    x, weights = torch.randn(B, T, D, requires_grad=True), [torch.randn(B, T, N), torch.randn(B, T, 2 * N)]
    shards = [tp.size, min(2, tp.size)]
    ours = [ColumnParallelLinear(D, w.out_features, tp, num_shards=n) for w, n in zip(wholes, shards)]
    for layer, whole in zip(ours, wholes):
        fill(layer, whole, tp)
    sum((whole(x) * weight).sum() for whole, weight in zip(wholes, weights)).backward()
    mine = tokens_of(x.detach(), tp).clone().requires_grad_()
    total = 0
    for y, weight, layer in zip(project(mine, *ours), weights, ours):
        n = layer.weight.placement.num_shards
        part = weight.chunk(n, -1)[tp.rank * n // tp.size]
        total = total + (y * part).sum() / copies(layer.weight, tp)  # each copy has its share of what follows
    total.backward()
    check("gradient of the input", mine.grad, tokens_of(x.grad, tp))
    for layer, whole in zip(ours, wholes):
        grad = unshard(layer.weight.grad, layer.weight, tp) * copies(layer.weight, tp)
        check("gradient of the weight", grad, whole.weight.grad)


def embedding(tp, vocab_size=11):
    torch.manual_seed(0)
    whole, tokens, weight = nn.Embedding(vocab_size, D), torch.randint(vocab_size, (B, T)), torch.randn(B, T, D)
    layer = VocabParallelEmbedding(vocab_size, D, tp)
    fill(layer, whole, tp)
    (whole(tokens) * weight).sum().backward()
    out = layer(tokens)
    (out * tokens_of(weight, tp)).sum().backward()
    check("output", out.detach(), tokens_of(whole(tokens).detach(), tp))
    compare_gradients("embedding", layer, whole, tp)


def loss(tp, vocab_size=11, scale=1.0, shift=0.0):
    torch.manual_seed(0)
    whole = (torch.randn(B * T, vocab_size) * scale + shift).requires_grad_()
    targets = torch.randint(vocab_size, (B * T,))
    like = sharded((vocab_size, B * T), 0, tp.size)  # rows of the transposed logits, padded with zeros
    part = shard(whole.detach().T, like, tp).T.clone().requires_grad_()
    expected = F.cross_entropy(whole, targets, reduction="sum")
    (expected * 3).backward()
    found = VocabParallelCrossEntropy.apply(part, targets, vocab_size, tp)
    (found * 3).backward()
    check("loss", found.detach(), expected.detach())
    check("gradient of the logits", part.grad, shard(whole.grad.T, like, tp).T)


with process_group(timeout=20) as (rank, _, world_size, _):
    for function, more in eval(sys.argv[2]):
        function(TensorParallel(None, rank, world_size, **eval(sys.argv[3])), **more)
print("equal")
"""

MODES = [
    {},
    {"overlap": False},
    {"sequence_parallel": True},
    {"sequence_parallel": True, "overlap": False},
    {"sequence_parallel": True, "regather": True},
]
each_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: "+".join(mode) or "plain")


@pytest.fixture
def check(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)

    def check(calls, nproc, mode=None, folder=FOLDER):
        return run(path, folder, f"[{calls}]", mode or {}, nproc=nproc, timeout=30)

    return check


@pytest.mark.parametrize("nproc", [1, 2, 4])
@each_mode
def test_split_layers_equal_the_whole_ones(mode, nproc, check):
    calls = "(pair, {}), (pair, {'bias': False}), (gathered, {}), (together, {}), (embedding, {})"
    assert check(calls, nproc, mode).check().outputs == ["equal\n"] * nproc


LOSSES = [
    {},
    {"vocab_size": 8},  # no padding
    {"vocab_size": 5},  # on 4 ranks one has nothing but padding
    {"scale": 1000.0},  # exp would overflow
    {"shift": -5000.0},  # the padding's zeros would be the largest, and every exp zero
]


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_loss_of_split_logits_equals_the_whole_one(nproc, check):
    calls = ", ".join(f"(loss, {case})" for case in LOSSES)
    assert check(calls, nproc).check().outputs == ["equal\n"] * nproc


FAULTS = {
    "bias before the sum": (
        "(pair, {})", {}, "layers.py",
        "y = F.linear(x, self.weight)  # this", "y = F.linear(x, self.weight, self.bias)  # this"),
    "bias not split": (
        "(pair, {})", {}, "layers.py", "self.bias = sharded((out_features,), 0, num_shards or tp.size)",
        "self.bias = nn.Parameter(torch.zeros(out_features // tp.size))"),
    "gathered output cut elsewhere": (
        "(gathered, {})", {}, "operators.py", "dim=-1)[ctx.tp.rank], None", "dim=-1)[ctx.tp.rank - 1], None"),
    "the input's gradient of the first layer only": (
        "(together, {})", {}, "operators.py", "            dx.addmm_(dy, weight)", "            pass"),
    "padding wins": (
        "(loss, {'shift': -5000.0})", {}, "layers.py", "z[:, max(0, vocab_size - start) :] = -torch.inf", "pass"),
    "gradient of a loss that counts once": (
        "(loss, {})", {}, "layers.py", "dz = softmax * dloss", "dz = softmax * 1"),
    "sequences instead of tokens": (
        "(pair, {})", {"sequence_parallel": True}, "operators.py",
        "(part.view(-1), x.reshape(-1)", "(part.view(-1), x.transpose(0, 1).reshape(-1)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_these_tests_turn_red_when_there_is(fault, plant, check):
    call, mode, file, old, new = FAULTS[fault]
    folder = plant("03_tensor_parallel/from_scratch.py", (file, old, new)).parent
    result = check(call, 2, mode, folder)
    assert all(result.codes)
    assert any("AssertionError" in output or "RuntimeError" in output for output in result.outputs)
