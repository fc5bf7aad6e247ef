"""06_hybrid/tracker.py: bytes by kind and communication by axis, on real tensors and on fake ones alike."""

import json
import sys

import pytest
import torch
from runner import ROOT, run
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.append(str(ROOT / "06_hybrid"))
from tracker import Tracker

sys.path.remove(str(ROOT / "06_hybrid"))
WIDTH, ROWS = 64, 512  # so many rows that activations outweigh the weights


def step_of(fake):
    """Two layers and a step of AdamW; returns what the tracker says of the second step."""
    with FakeTensorMode() if fake else torch.no_grad(), torch.enable_grad():
        first, second = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        weights = [first.weight, second.weight]
        optimizer = torch.optim.AdamW(weights, fused=True)
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        with Tracker({}) as tracker:
            tracker.begin(weights, optimizer)
            x = torch.ones(ROWS, WIDTH)
            loss = second(first(x).relu()).square().sum()
            loss.backward()
            return tracker.held_bytes_by_kind()


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_a_step_holds_the_bytes_that_one_counts_by_hand(fake):
    found = step_of(fake)
    weight, rows = WIDTH * WIDTH * 4, ROWS * WIDTH * 4
    assert found["parameters"] == found["gradients"] == 2 * weight
    assert found["optimizer"] == 2 * (2 * weight + 4)  # two averages and a count of steps
    # x, which the first layer keeps; relu's output, which relu and the second layer share; the second's, for square().
    assert found["activations"] == 3 * rows
    # The peak comes before the first weight has its gradient.
    assert found["peak"] == sum(found[kind] for kind in ("parameters", "optimizer", "activations", "buffers"))


def test_fake_tensors_hold_as_much_as_real_ones():
    assert step_of(True) == step_of(False)


def test_a_gradient_with_the_id_of_a_buffer_that_is_gone_is_not_that_buffer(monkeypatch):
    weight = torch.nn.Parameter(torch.zeros(1))
    known = weight.untyped_storage()
    # Python hands out the ids of what is gone again: here, for sure.
    monkeypatch.setattr("tracker.id", lambda storage: id(storage) if storage is known else 1, raising=False)
    with Tracker({}) as tracker:
        tracker.begin([weight], torch.optim.SGD([weight]))
        buffer = torch.zeros(1000)
        del buffer
        weight.grad = torch.zeros(1)
        assert tracker.held_bytes_by_kind()["buffers"] == 4000


def test_a_resized_storage_counts_with_its_new_size():
    optimizer = torch.optim.SGD([torch.zeros(1)])
    with Tracker({}) as tracker:
        tracker.begin([], optimizer)
        buffer = torch.zeros(1000)
        buffer.untyped_storage().resize_(0)
        assert tracker.total == 0
        buffer.untyped_storage().resize_(400)
        assert tracker.total == 400
        assert tracker.held_bytes_by_kind()["peak"] == 4000
    del buffer


SENT = """
import json, os, sys
sys.path[:0] = [{folder!r}, {root!r}]
import torch, torch.distributed as dist
from common.process_group import process_group
from tracker import Tracker
with process_group("cpu", 20) as (rank, _, world_size, device):
    pair, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with Tracker({{"tp": pair, "all": dist.group.WORLD}}) as tracker:
        dist.all_reduce(torch.ones(10), group=pair)
        gather(torch.empty(40), torch.ones(10))
        scatter(torch.empty(5), torch.ones(10), group=pair)
        if rank in (0, 1):
            dist.send(torch.ones(7), 1, group=pair) if rank == 0 else dist.recv(torch.empty(7), 0, group=pair)
    if rank == 0:
        print(json.dumps([[*key, nbytes] for key, nbytes in tracker.sent.items()]))
"""


def test_what_crosses_the_network_is_counted_by_axis_as_nccl_tests_does(tmp_path):
    script = tmp_path / "sent.py"
    script.write_text(SENT.format(folder=str(ROOT / "06_hybrid"), root=str(ROOT)))
    output = run(script, nproc=4).check().outputs[0]
    assert sorted(json.loads(output.splitlines()[-1])) == sorted(
        [
            ["tp", "all_reduce", 2 * 1 / 2 * 40],
            ["all", "all_gather", 3 / 4 * 160],
            ["tp", "reduce_scatter", 1 / 2 * 40],
            ["tp", "send", 28],
        ]
    )
