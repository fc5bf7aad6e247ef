"""FOLKLORE.md, claim by claim: each test runs the real thing, on real ranks where there are ranks in the claim."""

import contextlib
import functools
import importlib.util
import inspect
import json
import math
import mmap
import os
import re
import shutil
import subprocess
import sys
import warnings
from datetime import timedelta
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from runner import ROOT, run
from test_readme import PAGES, blocks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils import checkpoint, data
from torch.utils.flop_counter import FlopCounterMode

for folder in ("04_pipeline", "06_hybrid"):
    sys.path.append(str(ROOT / folder))
from plan_memory import zero_bytes
from plan_tables import Layout, load_tables
from schedules import make_schedule, peak_activations
from simulate import bubble, makespan, simulate

del sys.path[-2:]
for module in ("draw", "schedules", "simulate"):  # a script that is forked later loads its own
    del sys.modules[module]

PAGE = ROOT / "FOLKLORE.md"
CARD = 80 * 2**30  # bytes of an "80 GB" GPU
LLAMA_70B = load_tables()[0]["llama2-70b"].params
ROUNDING = 1e-9  # float64, another order of the sums
FLOAT32 = 1e-5
COUNTERS = 0.01  # beside a small model: AdamW's step counts, rotary angles
# Of a loss, in each of 6 steps of a small model. bfloat16 keeps 8 bits of a product and float16 11, and the loss
# averages over 256 tokens: at most 5e-5 and 4e-5 were found.
HALF_LOSS = {"bfloat16": 1e-3, "float16": 3e-4}
MODEL = ["--steps=1", "--batch=8", "--seq-len=16", "--dim=32", "--layers=2", "--heads=4", "--kv-heads=2"]
SCRIPT = """\
import json, sys, test_folklore
import torch.distributed as dist
dist.init_process_group("gloo")
answer = getattr(test_folklore, sys.argv[1])()
dist.destroy_process_group()
print(json.dumps(answer))
"""


@pytest.fixture
def ranks(tmp_path):
    def ranks(function, nproc=2):
        """Calls a function of this file on each rank of a gloo group; returns what each answered."""
        (tmp_path / "script.py").write_text(SCRIPT)
        result = run(tmp_path / "script.py", function.__name__, nproc=nproc).check()
        ranks.printed = result.outputs[0]
        return [json.loads(output.splitlines()[-1]) for output in result.outputs]

    return ranks


def elements_sent(tmp_path, script, *flags):
    """Elements that a rank of 2 sends for its gradients and weights; an all_reduce counts twice, as two halves."""
    run("tests/count_comm.py", tmp_path / "calls", ROOT / script, *MODEL, *flags, nproc=2).check()
    factor = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 2, "broadcast": 0}  # a gather counts one's half
    calls = json.loads((tmp_path / "calls.0").read_text())
    return sum(factor[name] * elements for name, elements in calls if elements > 2)  # 2: the log's


@functools.cache
def bytes_held(stage, nproc=8):
    """{part: bytes per parameter} that a rank holds at a stage of ZeRO with 16-bit weights, measured."""
    flags = [*MODEL, "--dtype", "bfloat16", "--stage", stage]
    output = run("05_zero/from_scratch.py", *flags, nproc=nproc).check().outputs[0].replace(",", "")
    psi = int(re.search(r"Ψ = (\d+) parameters", output)[1])
    parts = ("parameters", "gradients", "optimizer states")
    return {part: int(re.search(rf"^{part} +\| +(\d+)", output, re.MULTILINE)[1]) / psi for part in parts}


# ---- memory ----
def test_zero_2_keeps_all_weights_on_every_gpu():
    assert bytes_held(2, 2)["parameters"] == bytes_held(2, 8)["parameters"] == 2
    assert 2 * LLAMA_70B > CARD
    for num_gpus in (8, 64, 1024):
        for offload in ("none", "optimizer"):
            held = zero_bytes(LLAMA_70B, "16", Layout(dp=num_gpus, zero=2, offload=offload))
            assert held["parameters"] == 2 * LLAMA_70B
    assert bytes_held(3, 8)["parameters"] == pytest.approx(2 / 8)
    needs = {n: sum(zero_bytes(LLAMA_70B, "16", Layout(dp=n, zero=3)).values()) for n in (8, 16)}
    assert needs == {8: 2 * LLAMA_70B, 16: LLAMA_70B}
    assert needs[16] < CARD < needs[8]


def test_deepspeed_estimates_that_70b_does_not_fit(deepspeed):
    two = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2").estimate_zero2_model_states_mem_needs
    three = importlib.import_module("deepspeed.runtime.zero.stage3").estimate_zero3_model_states_mem_needs
    assert two(LLAMA_70B, 8, cpu_offload=True)[1] == 2 * LLAMA_70B > CARD
    assert two(LLAMA_70B, 8, cpu_offload=False)[1] == 2 * LLAMA_70B + 18 * LLAMA_70B // 8
    layer = 32_000 * 8192  # its largest, the embedding
    needs = {nodes: three(LLAMA_70B, layer, 8, nodes, cpu_offload=False)[1] for nodes in (1, 2)}
    assert needs[2] < CARD < needs[1]


def test_weights_are_an_eighth_of_what_training_holds():
    held = bytes_held(0, 1)
    assert held["parameters"] * 24e9 == 48e9 < CARD
    total = sum(held.values())
    assert total == pytest.approx(16, rel=COUNTERS)
    assert 4 * CARD < 16 * 24e9 < 5 * CARD


def test_zero_2_on_8_ranks_divides_all_but_the_weights():
    whole, split = bytes_held(0), bytes_held(2)
    assert whole["optimizer states"] / split["optimizer states"] == pytest.approx(8, rel=COUNTERS)
    assert bytes_held(1)["optimizer states"] == split["optimizer states"]  # stage 1 does that already
    assert sum(whole.values()) / sum(split.values()) == pytest.approx(16 / (2 + 14 / 8), rel=COUNTERS)


def activations_of_7_samples(wrap):
    """Bytes that autograd keeps of a microbatch of 7: what has 7 rows; weights have 8."""
    torch.manual_seed(0)
    model, saved = wrap(nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 8), nn.SiLU())), {}

    def pack(tensor):
        if tensor.shape[0] == 7:
            saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(7, 8)).sum().backward()
    return sum(tensor.nbytes for tensor in saved.values())


def fully_sharded_activations():
    return activations_of_7_samples(fully_shard)


def test_zero_3_splits_no_activations(ranks):
    alone = activations_of_7_samples(lambda model: model)
    assert alone == 4 * 7 * (8 + 64 + 64 + 8)
    assert ranks(fully_sharded_activations, 4) == [alone] * 4


def test_memory_follows_the_microbatch_not_the_global_batch(tmp_path):
    def peak(nproc, batch, microbatch):
        flags = [*MODEL, "--batch", batch, "--microbatch", microbatch]
        run("tests/peak_saved.py", tmp_path / "peak", ROOT / "02_ddp/train.py", *flags, nproc=nproc).check()
        return int((tmp_path / "peak.0").read_text())

    one = peak(1, 2, 2)
    assert peak(4, 8, 2) == peak(2, 16, 2) == one  # more ranks; more microbatches
    assert peak(2, 8, 4) == pytest.approx(2 * one, rel=COUNTERS)


def buckets_of_ddp():
    model = nn.Linear(1000, 1000)
    ddp = DistributedDataParallel(model)
    told = ddp._get_ddp_logging_data()
    ddp(torch.ones(1, 1000)).sum().backward()
    kept = {t.untyped_storage().data_ptr(): t.nbytes for t in (p.grad for p in model.parameters())}
    return sum(map(int, told["bucket_sizes"].split(","))), sum(kept.values())


def test_ddp_holds_a_second_copy_of_the_gradients(ranks):
    buckets, gradients = ranks(buckets_of_ddp)[0]
    assert buckets == gradients == 4 * 1_001_000


def test_half_precision_holds_the_same_states(train):
    held = {dtype: train("02_ddp/train.py", "--dtype", dtype).rows[-1]["state_mib"] for dtype in HALF_LOSS}
    assert set(held.values()) == {train("02_ddp/train.py").rows[-1]["state_mib"]}


def test_recomputation_adds_a_third_of_the_flops():
    mlps = [nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64)) for _ in range(4)]

    def flops(recompute, early_stop=True):
        out = torch.randn(16, 64, requires_grad=True)
        with FlopCounterMode(display=False) as counter, checkpoint.set_checkpoint_early_stop(early_stop):
            for mlp in mlps:
                out = checkpoint.checkpoint(mlp, out, use_reentrant=False) if recompute else mlp(out)
            out.sum().backward()
        return counter.get_total_flops()

    assert Fraction(flops(True, early_stop=False), flops(False)) == Fraction(4, 3)
    assert Fraction(flops(True), flops(False)) == Fraction(7, 6)  # torch does not recompute a block's last product


# ---- communication ----
def sum_and_mean():
    rank = dist.get_rank()
    summed = torch.tensor([float(rank + 1)])
    dist.all_reduce(summed)
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    ddp(torch.tensor([[float(rank + 1)]])).sum().backward()
    return [summed.item(), ddp.module.weight.grad.item()]


def test_all_reduce_sums_and_ddp_divides(ranks):
    assert ranks(sum_and_mean) == [[3.0, 1.5]] * 2


def gathered_gradients():
    torch.manual_seed(0)
    column, later, x = nn.Linear(4, 3, bias=False), nn.Linear(6, 1), torch.randn(2, 4)
    y = column(x)
    outs = [torch.empty_like(y) for _ in range(2)]
    dist.all_gather(outs, y)
    later(torch.cat(outs, 1)).sum().backward()
    lost, trained = column.weight.grad is None, later.weight.grad is not None
    outs[dist.get_rank()] = y  # the usual repair
    later(torch.cat(outs, 1)).sum().backward()
    return [lost, trained, column.weight.grad is not None]


def test_all_gather_cuts_the_gradient_without_a_word(ranks):
    assert ranks(gathered_gradients) == [[True, True, True]] * 2


def deepspeed_bucket():
    """Elements of each all_reduce of the gradients of 8 x 600 float32 weights, ZeRO-2, bucket size 1200."""
    sys.path.append(str(ROOT / "05_zero"))
    import ds_engine

    ds_engine.import_early("cpu")
    deepspeed = ds_engine.join_group(torch.device("cpu"), 60)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in [(20, 30), (30, 20)] * 4))
    zero = {"stage": 2, "reduce_bucket_size": 1200, "overlap_comm": False}
    config = {"train_batch_size": 2, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config_params=config)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        engine.backward(engine(torch.ones(1, 20)).sum())
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "gloo:all_reduce"]
    return [sum(math.prod(shape) for shape in event.shapes()) for event in events]


@pytest.fixture(scope="module")
def deepspeed():
    os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which DeepSpeed still uses
        module = pytest.importorskip("deepspeed", reason="pip install deepspeed==0.19.8")
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")  # the first engine does; with inductor
    return module


def test_deepspeed_counts_buckets_in_elements(deepspeed, ranks):
    assert [size for size in ranks(deepspeed_bucket)[0] if size > 2] == [1200] * 4
    fields = deepspeed.runtime.zero.config.DeepSpeedZeroConfig.model_fields
    assert fields["allgather_bucket_size"].default == fields["reduce_bucket_size"].default == 5e8


def cap_of_ddp():
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    return ddp._get_ddp_logging_data()["bucket_cap_bytes"], dist._DEFAULT_FIRST_BUCKET_BYTES


def test_ddp_counts_buckets_in_mib(ranks):
    assert ranks(cap_of_ddp, 1) == [[25 * 2**20, 2**20]]


def test_zero_3_sends_half_as_much_again_for_each_microbatch(tmp_path):
    sent = {
        (script, microbatches): elements_sent(tmp_path, f"{script}", *more, "--microbatch", 4 // microbatches)
        for script, more in {"02_ddp/train.py": [], "05_zero/from_scratch.py": ["--stage", 3]}.items()
        for microbatches in (1, 4)
    }
    once = sent["02_ddp/train.py", 1]
    assert sent["02_ddp/train.py", 4] == once
    assert sent["05_zero/from_scratch.py", 1] == pytest.approx(1.5 * once, rel=COUNTERS)
    assert sent["05_zero/from_scratch.py", 4] == pytest.approx(6 * once, rel=COUNTERS)


def reductions_of_4_microbatches():
    """How often DDP reduces its bucket: the first 3 in no_sync whole, then with their backward in it only."""
    counts = []
    for whole in (True, False):
        ddp, calls = DistributedDataParallel(nn.Linear(2, 2)), []

        def hook(calls, bucket):
            calls.append(bucket.index())
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        ddp.register_comm_hook(calls, hook)
        for left in (3, 2, 1, 0):
            with ddp.no_sync() if left and whole else contextlib.nullcontext():
                loss = ddp(torch.ones(1, 2)).sum()
            with ddp.no_sync() if left else contextlib.nullcontext():
                loss.backward()
        counts.append(len(calls))
    return counts


def test_no_sync_decides_in_the_forward(ranks):
    assert ranks(reductions_of_4_microbatches) == [[1, 4]] * 2


def test_one_layer_per_device_buys_bubble_and_messages():
    # 8 equal layers, 8 devices, 16 microbatches: one pipeline of 8 stages, or four pipelines of 2 stages
    layer = {"F": 1, "B": 2}
    deep = simulate(make_schedule("1f1b", 8, 16, 1), layer)
    few = simulate(make_schedule("1f1b", 2, 4, 1), {kind: 4 * cost for kind, cost in layer.items()})
    assert (bubble(deep), bubble(few)) == (pytest.approx(7 / 23), pytest.approx(1 / 5))
    assert (makespan(deep), makespan(few)) == (69, 60)
    assert (crossings(deep), 4 * crossings(few)) == (2 * 7 * 16, 4 * 2 * 1 * 4)


def crossings(events):
    """Messages between ranks: a forward's output to the next stage, a backward's to the one before."""
    last = max(event.step.stage for event in events)
    ends = {"F": last, "B": 0}
    return sum(event.step.stage != ends[event.step.kind] for event in events)


def test_1f1b_has_the_bubble_of_gpipe_and_less_memory():
    for num_ranks, microbatches in [(2, 4), (4, 8), (8, 32)]:
        both = [make_schedule(name, num_ranks, microbatches, 1) for name in ("gpipe", "1f1b")]
        first, second = (bubble(simulate(schedule, {"F": 1, "B": 2})) for schedule in both)
        assert first == second == pytest.approx((num_ranks - 1) / (microbatches + num_ranks - 1))
        assert [peak_activations(schedule[0]) for schedule in both] == [microbatches, num_ranks]


class CountedDataParallel(nn.DataParallel):
    """Torch's, on two devices that are both the CPU; counts the copies of the model."""

    copies = 0

    def scatter(self, inputs, kwargs, device_ids):
        return [inputs] * 2, [kwargs] * 2

    def replicate(self, module, device_ids):
        self.copies += len(device_ids)
        return [module] * 2

    def parallel_apply(self, replicas, inputs, kwargs):
        return [replica(*given) for replica, given in zip(replicas, inputs)]

    def gather(self, outputs, output_device):
        return torch.cat(outputs)


def test_data_parallel_copies_the_model_in_every_forward():
    assert nn.DataParallel(nn.Linear(2, 2)).device_ids == []  # on CPUs it does nothing at all, and does not say so
    model = CountedDataParallel(nn.Linear(2, 2))
    model.device_ids, model.output_device, model.src_device_obj = [0, 1], 0, torch.device("cpu")
    for step in (1, 2, 3):
        model(torch.ones(1, 2))
        assert model.copies == 2 * step


# ---- data ----
def order(rank, epochs, set_epoch, length=12, **more):
    sampler = data.DistributedSampler(range(length), 2, rank, **more)
    shown = []
    for epoch in range(epochs):
        if set_epoch:
            sampler.set_epoch(epoch)
        shown.append(list(sampler))
    return shown


def test_without_set_epoch_ranks_differ_and_epochs_do_not():
    for set_epoch in (False, True):
        first, second = (order(rank, 2, set_epoch) for rank in (0, 1))
        assert all(set(a).isdisjoint(b) and len({*a, *b}) == 12 for a, b in zip(first, second))
        assert (first[0] == first[1]) == (not set_epoch)


def test_distributed_sampler_repeats_samples_to_fill_the_last_batch():
    for drop_last, counts in ((False, (12, 11)), (True, (10, 10))):
        seen = [i for rank in (0, 1) for i in order(rank, 1, True, length=11, drop_last=drop_last)[0]]
        assert (len(seen), len(set(seen))) == counts


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what pin_memory does without a GPU")
def test_pin_memory_without_a_gpu_pins_nothing():
    with pytest.warns(UserWarning, match="no accelerator is found"):
        batch = next(iter(data.DataLoader(torch.arange(4), pin_memory=True)))
    assert not batch.is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine shows no GPU")
def test_pin_memory_pins_where_there_is_a_gpu():
    assert next(iter(data.DataLoader(torch.arange(4), pin_memory=True))).is_pinned()
    assert not next(iter(data.DataLoader(torch.arange(4)))).is_pinned()


# ---- gradients ----
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, both):
        return self.used(x) + (self.unused(x) if both else 0)


def unused_parameters():
    """Searches and finds none, which DDP says on stderr; then does not search where there is one: returns the error."""
    searching = DistributedDataParallel(Branches(), find_unused_parameters=True)
    searching(torch.ones(1, 2), True).sum().backward()
    ddp = DistributedDataParallel(Branches())
    ddp(torch.ones(1, 2), False).sum().backward()
    try:
        ddp(torch.ones(1, 2), False)
    except RuntimeError as error:
        return str(error)


def test_find_unused_parameters_is_off(ranks):
    assert inspect.signature(DistributedDataParallel).parameters["find_unused_parameters"].default is False
    for error in ranks(unused_parameters):
        assert "Expected to have finished reduction in the prior iteration" in error
    assert "did not find any unused parameters" in ranks.printed


def clip_after_and_before():
    """[norm of the step, its cosine with the right one]: clip the mean, and take the mean of what each rank clipped."""
    grads = torch.randn(1000, generator=torch.Generator().manual_seed(dist.get_rank())) * (1 + 9 * dist.get_rank())

    def clipped(gradient):
        weight = nn.Parameter(torch.zeros(1000))
        weight.grad = gradient.clone()
        nn.utils.clip_grad_norm_([weight], 1.0)
        return weight.grad

    def mean(gradient):
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()

    after, before = clipped(mean(grads.clone())), mean(clipped(grads))
    return [after.norm().item(), before.norm().item(), F.cosine_similarity(after, before, dim=0).item()]


def test_clipping_before_the_reduction_turns_the_step(ranks):
    for after, before, cosine in ranks(clip_after_and_before):
        assert after == pytest.approx(1, rel=FLOAT32)
        assert before < 0.75
        assert cosine < 0.85


def gradient(model, losses):
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(("lengths", "equal"), [((50, 50), True), ((90, 10), False)])
def test_mean_of_means_needs_equally_many_tokens(lengths, equal):
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 4).double(), torch.randn(100, 8).double(), torch.randint(4, (100,))
    parts = list(zip(x.split(lengths), y.split(lengths)))
    whole = gradient(model, [F.cross_entropy(model(x), y)])
    means = gradient(model, [F.cross_entropy(model(a), b) / 2 for a, b in parts])
    sums = gradient(model, [F.cross_entropy(model(a), b, reduction="sum") / 100 for a, b in parts])
    assert torch.allclose(sums, whole, rtol=ROUNDING, atol=ROUNDING)
    assert torch.allclose(means, whole, rtol=ROUNDING, atol=ROUNDING) == equal
    assert equal or (means - whole).norm() > 0.1 * whole.norm()


def test_wrong_gradients_train_as_well(train, plant):
    wrong = plant("02_ddp/train.py", ("scaler.scale(part * world_size).backward()", "scaler.scale(part).backward()"))
    right, halved = (train(script, "--clip", 1e9, nproc=2) for script in ("02_ddp/train.py", wrong))
    ratios = [a / b for a, b in zip(halved.column("grad_norm"), right.column("grad_norm"))]
    assert ratios[0] == pytest.approx(0.5, rel=FLOAT32)
    assert max(ratios) < 0.55
    assert halved.column("loss") == pytest.approx(right.column("loss"), rel=1e-3)  # AdamW divides the factor away
    assert halved.column("loss")[-1] < halved.column("loss")[0]


def walk(optimizer, lr, batch, samples=6400, **more):
    """How far 1000 weights get, as a root mean square, on gradients that are noise: of one epoch, in batches."""
    generator, weight = torch.Generator().manual_seed(0), nn.Parameter(torch.zeros(1000))
    optimizer = optimizer([weight], lr=lr, **more)
    for _ in range(samples // batch):
        weight.grad = torch.randn(1000, generator=generator) / batch**0.5
        optimizer.step()
    return weight.square().mean().sqrt().item()


def test_learning_rate_grows_with_the_batch_for_sgd_and_with_its_root_for_adamw():
    sgd, adamw = torch.optim.SGD, functools.partial(torch.optim.AdamW, weight_decay=0.0)
    near = 0.1  # 1000 random walks, of 1600 and 400 steps
    assert walk(sgd, 4e-3, 16) / walk(sgd, 1e-3, 4) == pytest.approx(1, rel=near)
    assert walk(adamw, 2e-3, 16) / walk(adamw, 1e-3, 4) == pytest.approx(1, rel=near)
    assert walk(adamw, 4e-3, 16) / walk(adamw, 1e-3, 4) == pytest.approx(2, rel=near)


def seeds():
    """[dropout alike under one seed, under seed + rank, weights alike under DDP with seed + rank]; 0 and 1."""

    def alike(tensor):
        first = tensor.clone()
        dist.broadcast(first, src=0)
        same = torch.tensor([int(torch.equal(first, tensor))])
        dist.all_reduce(same, op=dist.ReduceOp.MIN)
        return same.item()

    torch.manual_seed(7)
    one = alike(F.dropout(torch.ones(100), 0.5))
    torch.manual_seed(7 + dist.get_rank())
    each = alike(F.dropout(torch.ones(100), 0.5))
    model = nn.Linear(3, 3)
    before = alike(model.weight.detach())
    return [one, each, before, alike(DistributedDataParallel(model).module.weight.detach())]


def test_one_seed_gives_all_ranks_one_dropout_mask(ranks):
    assert ranks(seeds) == [[1, 0, 0, 1]] * 2


def loss_of_a_rank_and_of_all():
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 4), torch.randn(16, 8), torch.randint(4, (16,))
    rank = dist.get_rank()
    own = F.cross_entropy(model(x[rank::2]), y[rank::2]).detach()
    mean = own / 2
    dist.all_reduce(mean)
    return [own.item(), mean.item(), F.cross_entropy(model(x), y).item()]


def test_loss_of_rank_0_is_not_the_loss(ranks):
    (first, mean, whole), (second, *_) = ranks(loss_of_a_rank_and_of_all)
    assert mean == pytest.approx(whole, rel=FLOAT32)
    assert abs(first - whole) > 0.02 * whole
    assert (first + second) / 2 == pytest.approx(mean, rel=FLOAT32)


def batch_norm_under_ddp():
    """The inputs of 2 ranks lie around 0 and 10: mean of the output, running mean, and as the next forward finds it."""
    torch.manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(nn.BatchNorm1d(1, affine=True, momentum=1.0))
    out = ddp(torch.randn(64, 1) + 10 * dist.get_rank())
    own = ddp.module.running_mean.item()
    out.sum().backward()
    seen = []
    ddp.module.register_forward_pre_hook(lambda module, _: seen.append(module.running_mean.item()))
    ddp(torch.zeros(2, 1))
    try:
        nn.SyncBatchNorm(1)(torch.zeros(2, 1))
    except ValueError as error:
        return out.mean().item(), own, seen[0], str(error)


def test_ddp_does_not_synchronise_batch_norm(ranks):
    (out_0, mean_0, seen_0, error), (out_1, mean_1, seen_1, _) = ranks(batch_norm_under_ddp)
    assert max(abs(out_0), abs(out_1)) < FLOAT32  # each by its own mean: together they would lie around -1 and 1
    assert mean_1 - mean_0 > 9
    assert seen_0 == seen_1 == mean_0  # rank 0's buffers are sent to all; rank 1's are lost
    assert "expected input tensor to be on" in error


def test_half_precision_moves_the_loss_by_less_than_a_thousandth(train):
    exact = train("02_ddp/train.py").column("loss")
    for dtype, tolerance in HALF_LOSS.items():
        losses = train("02_ddp/train.py", "--dtype", dtype).column("loss")
        assert losses == pytest.approx(exact, rel=tolerance)
        assert losses != pytest.approx(exact, rel=1e-7)  # it was half precision


# ---- launch and environment ----
def hung_collective():
    """Rank 0 starts what rank 1 never joins, in a group with a time-out; seconds are the default group's."""
    group, store = dist.new_group(timeout=timedelta(seconds=0.2)), dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            store.set("ended", str(error))
    return store.get("ended").decode()


def test_timeout_of_the_process_group_ends_a_hang(ranks):
    assert dist.distributed_c10d._get_default_timeout("gloo") == timedelta(minutes=30)
    said = ranks(hung_collective)
    assert said[0] == said[1]
    assert re.search("200 ?ms|[Tt]imed out", said[0])


def libnccl():
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    places = spec.submodule_search_locations if spec else []
    return next((file for place in places for file in Path(place).glob("lib/libnccl.so.2")), None)


def is_in_libnccl(*names):
    """For each name, whether NCCL's library holds it: it reads its variables by their full names."""
    with open(libnccl(), "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        return [library.find(name.encode()) >= 0 for name in names]


needs_nccl = pytest.mark.skipif(not libnccl(), reason="no libnccl: pip install nvidia-nccl-cu13")


@needs_nccl
def test_libnccl_reads_these_names_and_not_those():
    real = "SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SOCKET_POLL_TIMEOUT_MSEC IB_TIMEOUT IB_RETRY_CNT TOPO_FILE"
    assert all(is_in_libnccl(*(f"NCCL_{name}" for name in [*real.split(), "TOPO_DUMP_FILE", "DEBUG_SUBSYS"])))
    assert not any(is_in_libnccl("NCCL_SOCKET_TIMEOUT", "NCCL_ASYNC_ERROR_HANDLING", "nccl-topo", "MASTER_ADDR"))


LAUNCHED = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
LAUNCH = """\
import sys, warnings
from torch.distributed.launch import main
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    main(sys.argv[1:])
print(*(f"{warning.category.__name__}: {warning.message}" for warning in caught))
"""


def launch(tmp_path, *flags):
    """Runs torch.distributed.launch, as python -m does; returns the script's flags and variables, and what it said."""
    for name, text in (("launch.py", LAUNCH), ("launched.py", LAUNCHED)):
        (tmp_path / name).write_text(text)
    flags = ["--standalone", *flags, "--redirects", 1, "--log-dir", tmp_path / "logs", tmp_path / "launched.py"]
    output = run(tmp_path / "launch.py", *flags).check().outputs[0]
    return *json.loads(next((tmp_path / "logs").rglob("stdout.log")).read_text()), output


def test_launch_warns_and_passes_a_flag_that_torchrun_does_not(tmp_path):
    words, env, output = launch(tmp_path, "--nproc_per_node", 1)
    assert words == ["--local-rank=0"]
    assert env["LOCAL_RANK"] == "0"
    assert "FutureWarning: The module torch.distributed.launch is deprecated" in output


def test_launcher_sets_the_new_name_of_async_error_handling(tmp_path):
    _, env, _ = launch(tmp_path, "--nproc-per-node", 1, "--use-env")
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "NCCL_ASYNC_ERROR_HANDLING" not in env


def rendezvous_by_file():
    rank, file = dist.get_rank(), Path(sys.argv[0]).with_name("rendezvous")
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    number = torch.tensor([rank + 1])
    dist.all_reduce(number)
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    dist.barrier()
    return [number.item(), type(store).__name__, file.stat().st_size]


def test_init_method_file_is_a_meeting_point_of_any_backend(ranks):
    for number, store, size in ranks(rendezvous_by_file):
        assert (number, store) == (3, "FileStore")
        assert size > 0


def test_cuda_amp_names_warn_and_torch_amp_names_do_not():
    for call, name in ((torch.cuda.amp.GradScaler, "GradScaler"), (torch.cuda.amp.autocast, "autocast")):
        with pytest.warns(FutureWarning, match=re.escape(f"torch.amp.{name}('cuda'")):
            call(enabled=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.amp.GradScaler("cuda", enabled=False)
        torch.amp.autocast("cuda", enabled=False)


def test_deepspeed_takes_config_params_as_config(deepspeed, ranks):
    parameters = inspect.signature(deepspeed.initialize).parameters
    assert parameters["config"].default is parameters["config_params"].default is None
    assert ranks(deepspeed_bucket, 1)[0] is not None


# ---- NVIDIA's tools ----
def nvidia_smi(*words):
    done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


needs_nvidia_smi = pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="no nvidia-smi on this machine")


@pytest.mark.gpu
@needs_nvidia_smi
def test_nvidia_smi_prints_the_topology_and_nccl_topo_is_no_command():
    assert shutil.which("nccl-topo") is None
    assert re.search(r"GPU0.*\n.*GPU0\s+X", nvidia_smi("topo", "-m"))


@pytest.mark.gpu
@needs_nvidia_smi
def test_nvlink_counters_are_asked_for_with_gt():
    text = nvidia_smi("nvlink", "-h")
    assert "--getthroughput" in text
    assert re.search(r"-g \| --getcounters\W+.*deprecated", text, re.IGNORECASE) or "--getcounters" not in text


@pytest.mark.gpu
@needs_nvidia_smi
def test_dmon_names_its_columns_in_its_first_line():
    header = nvidia_smi("dmon", "-s", "u", "-c", "1").splitlines()[0].lstrip("# ").split()
    assert header[:5] == ["gpu", "sm", "mem", "enc", "dec"]
    assert set(header[5:]) <= {"jpg", "ofa"}


# ---- the page ----
def entries():
    """{claim: the names of tests in its text}, of FOLKLORE.md."""
    _, *parts = re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)
    return {part.split("\n")[0]: part for part in parts}


def test_every_entry_has_a_verdict_a_source_and_something_that_shows_it():
    for claim, text in entries().items():
        assert re.search(r"^\*\*(False|Half true|Outdated|True|True, up to the unit)\.\*\* ", text, re.M), claim
        assert "Source: " in text, claim
        assert re.search("^Shown by:", text, re.M), claim
        assert re.findall(r"`(test_\w+)`", text) or blocks(text), claim
    assert PAGE in PAGES  # tests/test_readme.py runs the commands


def test_page_names_every_test_and_no_other():
    named = {name for text in entries().values() for name in re.findall(r"`(test_\w+)`", text)}
    about_the_page = {
        "test_every_entry_has_a_verdict_a_source_and_something_that_shows_it",
        "test_page_names_every_test_and_no_other",
    }
    assert named | about_the_page == {name for name in globals() if name.startswith("test_")}
