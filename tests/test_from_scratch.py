"""02_ddp/from_scratch.py: DataParallel on models that the training script does not have."""

import pytest
from runner import ROOT, run

# A model with branches: `chosen` says which heads a rank uses. Each rank computes what one process would have: the
# gradients of the sum of all ranks' losses, on a copy of the model.
SCRIPT = """
import copy, importlib.util, sys
import torch
import torch.distributed as dist

spec = importlib.util.spec_from_file_location("from_scratch", sys.argv[1])
from_scratch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(from_scratch)


EXACT = 1e-12  # float64, a sum of a few numbers in another order


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 4)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in range(3))
        self.register_buffer("mean", torch.full((4,), float(dist.get_rank())))

    def forward(self, x, chosen):
        return sum(self.heads[i](self.body(x - self.mean)).sum() for i in chosen)


def main(chosen, find_unused, microbatches=2):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # replicas that start apart
    model = Branches().double()
    replica = from_scratch.DataParallel(model, bucket_mb=1e-5, find_unused=find_unused)
    assert model.mean.eq(0).all(), "the buffer is rank 0's"
    one_process = copy.deepcopy(model)
    for step in range(3):
        for _, p in model.named_parameters():
            p.grad = None
        for _, p in one_process.named_parameters():
            p.grad = None
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(microbatches, world_size, 5, 4, dtype=torch.double, generator=generator)
        for i in range(microbatches):
            last = i == microbatches - 1
            if last:
                model.mean += rank  # buffers that parted: the next synchronised forward brings them together
            with torch.enable_grad() if last else replica.no_sync():
                replica(x[i, rank], chosen[rank][i]).backward()
            for other in range(world_size):
                if chosen[other][i]:
                    one_process(x[i, other], chosen[other][i]).backward()
        replica.finish_gradients()
        assert model.mean.eq(0).all(), "buffers are rank 0's after a forward"
        for (name, mine), other in zip(model.named_parameters(), one_process.parameters()):
            assert (mine.grad is None) == (other.grad is None), f"{name} in step {step}: {mine.grad} {other.grad}"
            if mine.grad is not None:
                assert torch.allclose(mine.grad, other.grad, rtol=0, atol=EXACT), f"{name} in step {step}"


with from_scratch.process_group(timeout=20):
    for chosen in eval(sys.argv[2]):
        main(chosen, find_unused="find_unused" in sys.argv)
        print("equal to one process with", chosen)
"""

FROM_SCRATCH = ROOT / "02_ddp/from_scratch.py"
ALL = [[0, 1, 2], [0, 1, 2]]  # the heads that a rank uses in each of two microbatches
SOME_UNUSED = [
    [ALL, [[0, 1], [0, 1]]],  # head 2 on rank 0 only
    [[[0], [0]], [[0, 1], [0, 1]]],  # head 1 on rank 1 only, head 2 nowhere
    [[[0, 2], [0]], [[0], [0, 1]]],  # head 2 in a microbatch that is not synchronised
    [[[1], [1]], [[2], [2]]],  # no head in common
]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_buckets_of_any_size_buffers_and_accumulation_equal_one_process(script):
    run(script, FROM_SCRATCH, [[ALL, ALL]], nproc=2).check()


def test_parameters_unused_on_some_ranks_or_on_all_equal_one_process(script):
    result = run(script, FROM_SCRATCH, SOME_UNUSED, "find_unused", nproc=2).check()
    assert [output.count("equal") for output in result.outputs] == [len(SOME_UNUSED)] * 2


def test_unused_parameter_without_the_flag_ends_the_job_and_is_named(script):
    result = run(script, FROM_SCRATCH, SOME_UNUSED[:1], nproc=2, timeout=30)
    assert result.codes == [1, 1]
    assert "rank 1 has no gradient for ['heads.2.weight', 'heads.2.bias']: use --find-unused" in result.outputs[1]


def test_backward_after_the_all_reduce_is_refused(script):
    broken = script.with_name("all_synchronised.py")
    broken.write_text(SCRIPT.replace("if last else replica.no_sync()", "if True else replica.no_sync()"))
    result = run(broken, FROM_SCRATCH, [[ALL, ALL]], nproc=1)
    assert result.codes == [1]
    assert "all but the last belong inside no_sync()" in result.outputs[0]


FAULTS = {
    "a rank without gradient adds what its bucket held": (
        "            self.view[p].zero_()  # this",
        "            pass  # this",
    ),
    "unused parameters get zeros": ("p.grad = view if num_ranks else None", "p.grad = view"),
    "gradients of other ranks are dropped": ("p.grad = view if num_ranks else None", "p.grad = p.grad"),
    "buffers are not sent": ("self.module.buffers() if self.sync else ()", "()"),
    "weights are not sent": ("            dist.broadcast(tensor.detach(), src=0)", "            pass"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_these_tests_turn_red_when(fault, plant, script):
    result = run(script, plant("02_ddp/from_scratch.py", FAULTS[fault]), SOME_UNUSED[1:2], "find_unused", nproc=2)
    assert any(result.codes)
    assert any("AssertionError" in output for output in result.outputs)
