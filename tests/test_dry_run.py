"""06_hybrid/train.py --dry-run: fake tensors say what real ranks hold and send, formulas what a large model does."""

import json
import re

import pytest
import torch.distributed.checkpoint  # these once here, not again in each forked rank
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401
from runner import ROOT, run

TRAIN = "06_hybrid/train.py"
FLAGS = ["--steps", 2, "--batch", 8, "--microbatch", 2, "--seq-len", 32, "--dim", 64, "--layers", 4]
LAYOUTS = {  # of 4 ranks
    "pp 2 x tp 2, recomputed in bfloat16": ["--pp", 2, "--tp", 2, "--dtype", "bfloat16", "--checkpoint-activations"],
    "pp 2 x dp 2, interleaved": ["--pp", 2, "--dp", 2, "--schedule", "interleaved"],
    "dp 2 x tp 2, optimizer": ["--dp", 2, "--tp", 2, "--sequence-parallel", "--shard", "optimizer"],
    "pp 2 x tp 2, none, tied": ["--pp", 2, "--tp", 2, "--shard", "none", "--tie"],
    "2 replicas of dp 2": ["--dp", 4, "--replicas", 2],
}
# gloo keeps the last message of a stage until the next one; the fake process group keeps none.
MESSAGES = 0.02

REAL = """
import json, os, runpy, sys
out, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(script))
import parallel
from tracker import Tracker
namespace = runpy.run_path(script)
Trainer, tracker = namespace["Trainer"], None
plain = Trainer.forward_backward

def watched(self, text):  # the second step is read; in the first the library makes its buffers
    global tracker
    if tracker is None:
        groups = {axis: self.mesh[axis].get_group() for axis in parallel.AXES if self.mesh[axis].size() > 1}
        groups |= {"tied": self.tie_group} if self.tie_group else {}
        tracker = Tracker(groups).__enter__()
        return plain(self, text)
    tracker.begin(self.named.values(), self.optimizer)
    plain(self, text)
    tracker.__exit__(None, None, None)
    with open(f"{out}.{os.environ['RANK']}", "w") as file:
        held = tracker.held_bytes_by_kind()
        json.dump([held, [[*key, nbytes] for key, nbytes in tracker.sent.items()]], file)

Trainer.forward_backward = watched
namespace["main"]()
"""

FAKE = """
import json, os, runpy, sys
out, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(script))
import dry_run

def dump(found):
    with open(out, "w") as file:
        json.dump([[place, *split(values)] for place, values in found.items()], file)
    return []

def split(values):
    kinds = {key: value for key, value in values.items() if key in dry_run.KINDS}
    return kinds, [[*key, value] for key, value in values.items() if key not in kinds]

dry_run.report_lines = dump
"""
ALL = "dry_run.choose_traces = lambda schedule, num_microbatches, *_: [num_microbatches]\n"


@pytest.fixture
def traced(tmp_path):
    def traced(*flags, world, all=False):
        """Returns {place on pp: (bytes by kind, {(axis, collective): bytes})}; all: traces all microbatches."""
        (tmp_path / "fake.py").write_text(FAKE + ALL * all + 'runpy.run_path(script, run_name="__main__")\n')
        out = tmp_path / "fake.json"
        run(tmp_path / "fake.py", out, ROOT / TRAIN, *flags, "--dry-run", "--world", world, timeout=100).check()
        return {place: (held, by_key(sent)) for place, held, sent in json.loads(out.read_text())}

    return traced


def by_key(sent):
    return {(axis, name): nbytes for axis, name, nbytes in sent if axis != "all"}  # all: a few numbers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dry_run_says_what_real_ranks_hold_and_send(layout, traced, text, tmp_path):
    (tmp_path / "real.py").write_text(REAL)
    flags = [*FLAGS, *LAYOUTS[layout], "--data", text]
    run(tmp_path / "real.py", tmp_path / "real", ROOT / TRAIN, *flags, nproc=4).check()
    places = traced(*flags, world=4)
    assert list(places) == ([0, 1] if "pp" in layout else [0])
    for place, (held, sent) in places.items():
        real_held, real_sent = json.loads((tmp_path / f"real.{place * 2}").read_text())
        for kind in ("parameters", "gradients", "optimizer", "activations"):
            assert held[kind] == real_held[kind] > 0
        assert held["peak"] == pytest.approx(real_held["peak"], rel=MESSAGES)
        assert sent == by_key(real_sent) != {}


# llama2-70b with 6 of its 80 layers, in 3 stages of 2, on 3 x 2 x 8 ranks
LARGE = ["--preset", "llama2-70b", "--layers", 6, "--pp", 3, "--tp", 8, "--sequence-parallel", "--dtype", "bfloat16"]
DIM, KV_DIM, HIDDEN, HEADS, HEAD_DIM, VOCABULARY, TP, DP, PP = 8192, 1024, 28672, 64, 128, 32000, 8, 2, 3
LENGTH = 2048


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The dry run of LARGE, plain and with recomputation: {flags: {place on pp: bytes by kind}}."""
    folder, found = tmp_path_factory.mktemp("large"), {}
    (folder / "fake.py").write_text(FAKE + 'runpy.run_path(script, run_name="__main__")\n')
    for more in ((), ("--checkpoint-activations",)):
        sizes = ["--microbatch", 1, "--batch", PP * DP, "--seq-len", LENGTH, "--world", PP * DP * TP]
        flags = [*LARGE, *sizes, "--dry-run", *more]
        run(folder / "fake.py", folder / "out", ROOT / TRAIN, *flags, timeout=100).check()
        found[more] = {place: held for place, held, _ in json.loads((folder / "out").read_text())}
    return found


def test_states_of_a_large_model_are_zeros_formula_over_all_axes(large):
    """4 bytes of weight and of gradient and 8 of AdamW for each parameter, over pp, tp and dp; norms not over tp."""
    layer = 2 * DIM * DIM + 2 * DIM * KV_DIM + 3 * DIM * HIDDEN
    for places in large.values():
        assert list(places) == [0, 1, 2]
        for place, held in places.items():
            ends = VOCABULARY * DIM // TP * (place in (0, 2)) + DIM * (place == 2)
            shard = (2 * (layer // TP + 2 * DIM) + ends) // DP
            assert held["parameters"] == held["gradients"] == 4 * shard
            assert 0 < held["optimizer"] - 8 * shard < 100  # and counters of steps


def layer_activations():
    """Returns the bytes of a layer and a microbatch of one sequence that autograd keeps for backward.

    Counted as Korthikanti et al., section 4, do, for this layer and torch's CPU kernels. A norm in bfloat16 keeps two
    copies in float32 and a factor, on 1/tp of the tokens; q, k, v, and then gate and up, have their whole input once;
    attention keeps q, k, v, its output, and a float32 per head; the MLP four times its width.
    """
    norms = 2 * (8 * DIM + 4) / TP
    attention = 2 * DIM + (4 * DIM + 4 * KV_DIM + 4 * HEADS) / TP
    mlp = 2 * DIM + 8 * HIDDEN / TP
    positions = 4 * 4 * HEAD_DIM  # cos and sin in float32, for queries and for keys
    return LENGTH * (norms + attention + mlp + positions)


def tokens(place):
    return 8 * (LENGTH + 1) * PP if place == 0 else 0


@pytest.mark.parametrize("place", [0, 1])
def test_activations_of_a_large_model_are_those_of_the_microbatches_in_flight(place, large):
    """Stage s of p has p - s of them with 1F1B. Not the last one, which has the head's."""
    assert large[()][place]["activations"] == (PP - place) * 2 * layer_activations() + tokens(place)


@pytest.mark.parametrize("place", [0, 1])
def test_recomputation_keeps_the_input_of_each_layer_and_one_layer_whole(place, large):
    """The library keeps a stage's inputs, which it receives, for all microbatches: a buffer for each."""
    inputs = PP - place + (PP - place if place == 0 else PP)
    expected = inputs * LENGTH * 2 * DIM / TP + layer_activations() + tokens(place)
    assert large["--checkpoint-activations",][place]["activations"] == expected


FEW = ["--dim", 32, "--seq-len", 16, "--microbatch", 1, "--pp", 2, "--dp", 2]


@pytest.mark.parametrize(("schedule", "layers", "count"), [("gpipe", 2, 8), ("1f1b", 2, 8), ("interleaved", 4, 16)])
def test_a_trace_of_few_microbatches_says_what_a_trace_of_all_does(schedule, layers, count, traced):
    """count: of a replica, of which 3 and 4, or 6 and 8, are traced."""
    flags = [*FEW, "--schedule", schedule, "--layers", layers, "--batch", 2 * count]
    few = traced(*flags, world=4)
    assert few == traced(*flags, world=4, all=True)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--pp 2 --tp 3 --world 8", "--pp 2 x --dp 1 x --tp 3 = 6 ranks, but there are 8: use 6"),
        ("--world 0", "--world 0 must be above 0"),
        ("--layers 4 --pp 8 --world 8", "--layers 4 are fewer than --pp 8"),
    ],
)
def test_a_dry_run_of_an_impossible_layout_is_refused_in_one_line(flags, line):
    result = run(TRAIN, "--dry-run", *flags.split())
    assert result.codes == [2]
    assert re.fullmatch(f"error: .*{re.escape(line)}.*\n", result.outputs[0])
