"""05_zero/from_scratch.py: the one loss column at every stage, what a rank holds and sends, and nothing lost."""

import json
import re
from collections import Counter

import pytest
import reference
import torch
from runner import ROOT, run
from safetensors.torch import load_file

SCRIPT = "05_zero/from_scratch.py"
# Sums in another order differ by some 1e-16 (float64) per operation, and there are thousands.
EXACT = 1e-9
FLOAT32 = 1e-5
# bfloat16 keeps 8 bits and float16 11: products are off by 4e-3 and 5e-4 each, the loss averages over many. Gradients
# are summed in the same type.
HALF_TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3}
STEPS, BATCH, SEQ_LEN = 3, 48, 16
CLIP = 0.5  # below the norms of all steps
SIZES = {"dim": 16, "layers": 3, "heads": 2, "kv_heads": 1}  # of no size that 3 divides: slices need padding
STAGES, WORLD_SIZES, ACCUMULATION = [0, 1, 2, 3], [1, 2, 3, 4], [1, 4]
BUCKETS = {"one bucket": 10**6, "buckets": 5000}  # elements; a block has 3,872, the embedding and the head 4,096 each
NUMEL = {name: torch.Size(shape).numel() for name, shape in reference.shapes(**SIZES).items()}


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of real text for this batch: as the other tests' fixture, but longer."""
    path = tmp_path_factory.mktemp("text") / "text.py"
    letters = reference.text_of(None)[5000 : 5000 + 101 * SEQ_LEN + 5]
    path.write_bytes(bytes(letter * 37 % 256 for letter in letters))
    return str(path)


@pytest.fixture(scope="session")
def base(text):
    sizes = [word for name, n in SIZES.items() for word in (f"--{name.replace('_', '-')}", n)]
    return ["--steps", STEPS, "--batch", BATCH, "--seq-len", SEQ_LEN, "--clip", CLIP, "--data", text, *sizes]


class Trained:
    def __init__(self, folder):
        self.rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.weights = load_file(folder / "model.safetensors")
        self.folder = folder

    def column(self, name):
        return [row[name] for row in self.rows]


@pytest.fixture(scope="session")
def many(base, tmp_path_factory):
    """Runs from_scratch.py with each of some lists of flags, in the same processes; returns a list of Trained."""

    def many(lists, nproc, script=ROOT / SCRIPT):
        folder = tmp_path_factory.mktemp("many")
        places = [folder / str(number) for number in range(len(lists))]
        cases = [
            [*base, "--dtype", "float64", "--metrics", place / "metrics.jsonl", "--save", place, *flags]
            for place, flags in zip(places, lists)
        ]
        for place in places:
            place.mkdir()
        (folder / "cases.json").write_text(json.dumps([[str(flag) for flag in case] for case in cases]))
        run("tests/run_many.py", script, folder / "cases.json", nproc=nproc, timeout=100).check()
        return [Trained(place) for place in places]

    return many


@pytest.fixture(scope="session")
def matrix(many):
    """Returns {(stage, microbatches, bucket size): Trained} at a number of ranks."""
    done = {}

    def matrix(nproc):
        if nproc not in done:
            cases = [(s, m, b) for s in STAGES for m in ACCUMULATION for b in BUCKETS if s < 3 or b == "buckets"]
            flags = [
                ["--stage", s, "--microbatch", BATCH // nproc // m, "--bucket-size", BUCKETS[b]] for s, m, b in cases
            ]
            done[nproc] = dict(zip(cases, many(flags, nproc)))
        return done[nproc]

    return matrix


@pytest.fixture(scope="session")
def one(text):
    """The serial reference, once per data type."""
    done = {}

    def one(dtype=torch.float64):
        if dtype not in done:
            done[dtype] = reference.train(STEPS, BATCH, SEQ_LEN, text, dtype, clip=CLIP, **SIZES)
        return done[dtype]

    return one


def differs(trained, expected, tolerance=EXACT):
    """Returns what is not equal to the reference: a list of words, empty when all is."""
    found = []
    for name, column in (("loss", expected.losses), ("grad_norm", expected.grad_norms)):
        if trained.column(name) != pytest.approx(column, rel=tolerance):
            found.append(name)
    assert trained.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        bound = tolerance * (1 + (expected.drift[name] if tolerance == FLOAT32 else 0))  # AdamW amplifies: reference.py
        if not ((trained.weights[name] - weight).abs() <= bound).all():
            found.append(name)
    return found


# ---- equality ----
@pytest.mark.parametrize("buckets", BUCKETS)
@pytest.mark.parametrize("microbatches", ACCUMULATION)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("nproc", WORLD_SIZES)
def test_losses_gradient_norms_and_weights_equal_the_serial_reference(nproc, stage, microbatches, buckets, matrix, one):
    trained = matrix(nproc)[stage, microbatches, buckets if stage < 3 else "buckets"]
    assert trained.column("step") == list(range(1, STEPS + 1))
    assert min(trained.column("grad_norm")) > CLIP
    assert differs(trained, one()) == []


def test_losses_in_float32_equal_the_serial_reference(many, one):
    for trained in many([["--dtype", "float32", "--stage", stage] for stage in STAGES], 2):
        assert differs(trained, one(torch.float32), FLOAT32) == []


def test_norm_of_a_long_slice_loses_no_digits(text, many):
    """The small model's slices are too short to show it: torch sums float32 one by one, and a long sum loses digits."""
    sizes = {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 2}
    flags = [word for name, n in sizes.items() for word in (f"--{name.replace('_', '-')}", n)]
    (trained,) = many([["--stage", 1, "--dtype", "float32", "--steps", 1, *flags]], 2)
    expected = reference.train(1, BATCH, SEQ_LEN, text, torch.float64, clip=CLIP, **sizes)
    assert trained.column("grad_norm") == pytest.approx(expected.grad_norms, rel=FLOAT32)


@pytest.mark.parametrize("dtype", HALF_TOLERANCE)
def test_16_bit_parameters_follow_the_reference(dtype, many, one):
    flags = [["--dtype", dtype, "--stage", stage, "--microbatch", 12] for stage in STAGES]
    for stage, trained in enumerate(many(flags, 2)):
        assert trained.column("loss") == pytest.approx(one().losses, rel=HALF_TOLERANCE[dtype]), stage
        assert trained.weights["lm_head.weight"].dtype == torch.float32  # the masters


def test_updates_below_the_last_bit_of_a_16_bit_parameter_are_not_lost(many):
    """At a weight of 1 bfloat16's last bit is 2**-7, and three steps of 1e-4 change it by less than a tenth of that."""
    (trained,) = many([["--dtype", "bfloat16", "--lr", 1e-4]], 2)
    assert ((trained.weights["model.norm.weight"] - 1).abs() > 1e-4).all()


def test_an_overflow_on_one_rank_makes_all_ranks_skip_the_step(plant, many):
    hit = "        if dist.get_rank() == 1 and len(optimizer.state) and not getattr(self, 'hit', 0):\n"
    hit += "            self.hit, self.units[-1].grad[-1] = 1, float('inf')\n"
    script = plant(SCRIPT, ("zero.py", "        self.settle(0)\n", "        self.settle(0)\n" + hit))
    for trained in many([["--dtype", "float16", "--stage", stage] for stage in (1, 3)], 2, script):
        assert [row["grad_norm"] < 100 for row in trained.rows] == [True, False, True]  # inf or nan in the second step
        states = load_file(next(trained.folder.glob("optimizer-*")))
        assert states["step"] == STEPS - 1
        assert all(torch.isfinite(weight).all() for weight in trained.weights.values())


# ---- bytes ----
WHOLE, SLICE = 1, 0


def padded(sizes, n):
    return sum(-(-size // n) * n for size in sizes)


def units(stage, buckets):
    """The elements of each unit, written down by hand for these sizes."""
    embedding, block, head = 4096, 3872, 4096 + 16
    if stage == 3 or buckets == "buckets":
        return [embedding, block, block, block, head]  # no two fit into 5,000
    return [embedding + 3 * block + head]


def test_the_sizes_written_down_here_are_those_of_the_model():
    assert sum(units(3, "buckets")) == sum(NUMEL.values()) == sum(units(2, "one bucket"))


COUNT = """
import json, os, runpy, sys
import torch.distributed as dist
out, many = sys.argv[1:3]
sys.argv = sys.argv[2:]
calls = {}  # flags -> [operation, elements of what a rank gives]

def counted(name):
    plain = getattr(dist, name)
    def call(*tensors, **how):
        calls.setdefault(" ".join(sys.argv[1:]), []).append([name.removesuffix("_single"), tensors[-1].numel()])
        return plain(*tensors, **how)
    return call

for name in ("all_reduce", "all_gather_single", "reduce_scatter_single"):
    setattr(dist, name, counted(name))
runpy.run_path(many, run_name="__main__")
with open(f"{out}.{os.environ['RANK']}", "w") as file:
    json.dump([*calls.values()], file)
"""


def calls_of_a_step(nproc, stage, microbatches):
    """What the paper says, in calls: Counter of (operation, elements of what a rank gives)."""
    expected = Counter({("all_reduce", 2): 1})  # the log's loss, and the gradient norm
    for size in units(stage, "buckets"):
        whole = padded([size], nproc if stage else 1)
        expected["all_reduce", whole] += stage == 0
        expected["reduce_scatter", whole] += {0: 0, 1: 1}.get(stage, microbatches)
        expected["all_gather", whole // nproc] += {0: 0, 1: 1, 2: 1, 3: 2 * microbatches}[stage]
    return +expected


@pytest.mark.parametrize("nproc", [2, 3])
def test_bytes_sent_are_those_of_the_paper(nproc, base, tmp_path):
    """2Ψ, 2Ψ, 2Ψ and 3Ψ with one microbatch; with 4, stage 2 reduces and stage 3 also gathers each time."""
    (tmp_path / "count.py").write_text(COUNT)
    cases = [(stage, microbatches) for stage in STAGES for microbatches in ACCUMULATION]
    flags = [["--stage", s, "--microbatch", BATCH // nproc // m, "--bucket-size", 5000] for s, m in cases]
    (tmp_path / "cases.json").write_text(json.dumps([[str(word) for word in [*base, *more]] for more in flags]))
    words = [tmp_path / "calls", ROOT / "tests/run_many.py", ROOT / SCRIPT, tmp_path / "cases.json"]
    run(tmp_path / "count.py", *words, nproc=nproc).check()
    for rank in range(nproc):
        found = json.loads((tmp_path / f"calls.{rank}").read_text())
        assert len(found) == len(cases)
        for (stage, microbatches), calls in zip(cases, found):
            expected = calls_of_a_step(nproc, stage, microbatches)
            assert Counter(map(tuple, calls)) == Counter({call: STEPS * times for call, times in expected.items()})
            # An all_reduce is a reduce_scatter and an all_gather.
            factor = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": nproc}
            elements = sum(factor[name] * size * times for (name, size), times in expected.items() if size > 2)
            psi = padded(units(stage, "buckets"), nproc if stage else 1)
            assert elements == psi * {0: 2, 1: 2, 2: microbatches + 1, 3: 3 * microbatches}[stage]


def test_the_profiler_sees_no_other_collectives(base, tmp_path):
    flags = [*base, "--steps", 1, "--stage", 3, "--microbatch", 12]
    run("tests/count_comm.py", tmp_path / "calls", ROOT / SCRIPT, *flags, nproc=2).check()
    assert Counter(map(tuple, json.loads((tmp_path / "calls.0").read_text()))) == calls_of_a_step(2, 3, 2)


HELD = """
import gc, os, runpy, sys, torch
out, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(script))
import zero
zero_grad, use = zero.Zero.zero_grad, zero.Zero.use

def flat_buffers():
    gc.collect()
    flat = [t for t in gc.get_objects() if torch.is_tensor(t) and t.dim() == 1 and t.is_floating_point()]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in flat if t.numel() > 2}

gc.freeze()  # objects of the tests are not looked at

def count(self):  # at the end of a step
    found = sum(flat_buffers().values())
    with open(f"{out}.{os.environ['RANK']}", "w") as file:
        print(found, max(whole), file=file)
    zero_grad(self)

whole = []  # units that are whole at a time
def used(self, *numbers):
    use(self, *numbers)
    whole.append(sum(unit.flat.untyped_storage().nbytes() > 0 for unit in self.units))

zero.Zero.zero_grad, zero.Zero.use = count, used
runpy.run_path(script, run_name="__main__")
"""


def formula(stage, n, buckets, itemsize):
    """Bytes of parameters, gradients and AdamW's states; itemsize: of a parameter. A step counter has 4."""
    parts, sizes, high = n if stage else 1, units(stage, buckets), max(itemsize, 4)
    psi, slice_ = padded(sizes, parts), padded(sizes, parts) // parts
    parameters = itemsize * (slice_ if stage == 3 else psi)
    gradients = itemsize * (slice_ if stage >= 2 else psi)
    return parameters, gradients, slice_ * (2 * high + (high if high > itemsize else 0)) + 4 * len(sizes)


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_holds_what_the_formulas_say_to_the_byte(stage, dtype, itemsize, base, tmp_path):
    """By its own table, and by all flat tensors that Python can find."""
    (tmp_path / "held.py").write_text(HELD)
    flags = [*base, "--stage", stage, "--dtype", dtype, "--bucket-size", 5000, "--metrics", tmp_path / "metrics.jsonl"]
    result = run(tmp_path / "held.py", tmp_path / "held", ROOT / SCRIPT, *flags, nproc=3).check()
    expected = formula(stage, 3, "buckets", itemsize)
    table = re.findall(r"^(\w[\w ]+?) +\| +([\d,]+) \| .* = ([\d,]+)$", result.outputs[0], re.MULTILINE)
    measured, computed = ([int(row[column].replace(",", "")) for row in table] for column in (1, 2))
    assert [row[0] for row in table] == ["parameters", "gradients", "optimizer states", "elements sent"]
    assert measured == computed
    assert tuple(measured[:3]) == expected
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["state_mib"] == sum(expected) / 2**20
    for rank in range(3):
        found, whole = map(int, (tmp_path / f"held.{rank}").read_text().split())
        cast = 2 * expected[1] // (3 if stage == 1 else 1) if itemsize == 2 else 0  # the masters' gradients, in float32
        counters = 4 * len(units(stage, "buckets"))  # no flat tensors
        assert found == sum(expected) + cast - counters
        assert whole <= (2 if stage == 3 else 5)  # stage 3: the unit that computes, and the next


ORDER = """
import os, runpy, sys
script = sys.argv[1]
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))
import torch, zero
gather, log = zero.Zero.gather, []

def note(self, unit):
    log.append(f"gather {self.units.index(unit)}")
    gather(self, unit)

scaled = torch.nn.functional.scaled_dot_product_attention
def attend(*args, **kwargs):
    log.append("block")
    return scaled(*args, **kwargs)

zero.Zero.gather = note
torch.nn.functional.scaled_dot_product_attention = attend
runpy.run_path(script, run_name="__main__")
if os.environ["RANK"] == "0":
    print(" ".join(log))
"""


def test_stage_3_gathers_each_block_before_the_one_ahead_of_it_computes(base, tmp_path):
    (tmp_path / "order.py").write_text(ORDER)
    output = run(tmp_path / "order.py", ROOT / SCRIPT, *base, "--steps", 1, nproc=2).check().outputs[0]
    forward = "gather 0 gather 1 gather 2 block gather 3 block gather 4 block"
    backward = "gather 4 gather 3 gather 2 gather 1 gather 0"
    assert output.splitlines()[-1] == f"{forward} {backward}"


# ---- checkpoint ----
def flags_of(stage, *more):
    return ["--stage", stage, "--dtype", "float64", *more]


@pytest.mark.parametrize(
    ("first", "second"),
    [((3, 2), (3, 2)), ((3, 2), (1, 1)), ((1, 1), (3, 3)), ((2, 3), (0, 2)), ((0, 2), (2, 4))],
    ids=lambda half: f"stage {half[0]} on {half[1]}",
)
def test_a_run_goes_on_at_another_stage_and_number_of_ranks(first, second, base, one, tmp_path):
    (stage, nproc), (next_stage, next_nproc) = first, second
    more = ["--save", tmp_path, "--metrics", tmp_path / "metrics.jsonl"]
    run(SCRIPT, *base, *flags_of(stage), *more, "--steps", 1, nproc=nproc).check()
    run(SCRIPT, *base, *flags_of(next_stage), *more, "--resume", tmp_path, nproc=next_nproc).check()
    assert differs(Trained(tmp_path), one()) == []


def test_a_resumed_run_holds_no_more_than_an_uninterrupted_one(base, tmp_path):
    rows = []
    for folder in ([], ["--resume", tmp_path]):
        metrics = tmp_path / "metrics.jsonl"
        run(
            SCRIPT, *base, "--save", tmp_path, *folder, "--metrics", metrics, "--steps", 1 + len(folder), nproc=2
        ).check()
        rows.append(json.loads(metrics.read_text().splitlines()[-1]))
    assert rows[0]["state_mib"] == rows[1]["state_mib"]


def test_float16_goes_on_with_its_loss_scale(base, tmp_path):
    more = ["--dtype", "float16", "--save", tmp_path, "--metrics", tmp_path / "metrics.jsonl"]
    run(SCRIPT, *base, *more, nproc=2).check()
    whole = Trained(tmp_path).column("loss")
    run(SCRIPT, *base, *more, "--steps", 1, nproc=2).check()
    run(SCRIPT, *base, *more, "--resume", tmp_path, nproc=2).check()
    assert Trained(tmp_path).column("loss") == whole


DIE = """    global renames
    if renames == {}:
        os.kill(os.getpid(), 9)
    renames += 1
    os.replace(aside, path)"""


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_run_killed_while_it_writes_leaves_the_last_whole_checkpoint(renames, plant, base, one, tmp_path):
    """Killed after so many of its three files have their names: the folder is still that of the step before."""
    save = ["--save", tmp_path / "save", "--metrics", tmp_path / "save/metrics.jsonl"]
    (tmp_path / "save").mkdir()
    run(SCRIPT, *base, *flags_of(3), *save, "--steps", 1, nproc=2).check()
    killed = plant(
        SCRIPT,
        ("checkpoint.py", "def require_safetensors", "renames = 0\n\n\ndef require_safetensors"),
        ("checkpoint.py", "    os.replace(aside, path)", DIE.format(renames)),
    )
    flags = [*base, *flags_of(3), "--resume", tmp_path / "save", "--save", tmp_path / "save"]
    assert run(killed, *flags, "--steps", 2, "--timeout", 5, nproc=2).codes[0] == -9
    run(SCRIPT, *flags, *save, nproc=2).check()
    assert differs(Trained(tmp_path / "save"), one()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer-1.safetensors"])
def test_a_torn_checkpoint_is_refused_by_name(name, base, tmp_path):
    run(SCRIPT, *base, "--save", tmp_path, "--steps", 1).check()
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    result = run(SCRIPT, *base, "--resume", tmp_path, nproc=2)
    assert result.codes == [2, 2]
    for rank, output in enumerate(result.outputs):
        assert output.startswith(f"[rank{rank}] error: --resume another folder than {tmp_path}: SafetensorError")
        assert len(output.splitlines()) == 1


# ---- faults ----
def test_a_part_of_the_model_without_a_gradient_is_an_error_that_names_it(plant, base):
    script = plant(
        SCRIPT, ("from_scratch.py", "            x = layer(x)\n", "            x = layer(x) if x is None else x\n")
    )
    result = run(script, *base, "--bucket-size", 5000, "--stage", 2, nproc=2)
    assert result.codes == [1, 1]
    assert "no gradient for one or more of ['model.layers.0.input_layernorm.weight'" in result.outputs[0]


SENT = "dist.all_reduce(totals := torch.stack((loss, squares)))"
LOCAL = "dist.all_reduce(loss)\n        totals = torch.stack((loss, squares))"
PREFETCH = "flat.nbytes)\n                "
FAULTS = {  # stage, and what to replace in which file
    "mean instead of sum": (
        1,
        "zero.py",
        "            work.wait()\n",
        "            work.wait()\n            own /= 2\n",
    ),
    "slice off by one": (3, "units.py", "self.flat[self.slice]", "self.flat.roll(-1)[self.slice]"),
    "prefetched, never filled": (3, "zero.py", PREFETCH, f"{PREFETCH}if unit is self.units[number]: "),
    "step before the last bucket arrived": (2, "zero.py", "        self.settle(0)\n", "        self.settle(1)\n"),
    "norm of the local slice": (3, "zero.py", SENT, LOCAL),
    "last microbatch alone": (1, "zero.py", "unit.whole_grad.add_(flat)", "flat"),
    "gradients kept over steps": (2, "zero.py", "unit.grad = master.grad = None", "master.grad = None"),
    "new parameters not sent": (1, "zero.py", "if self.stage in (1, 2)", "if False"),
    "a mean of means": (2, "from_scratch.py", 'reduction="sum") / tokens', 'reduction="mean") / len(texts)'),
    "the same data on every rank": (2, "from_scratch.py", "[rank::world_size]", "[::world_size]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_turns_equality_red(fault, plant, base, one, tmp_path):
    stage, *edit = FAULTS[fault]
    script = plant(SCRIPT, edit)
    more = ["--microbatch", 6, "--stage", stage, "--bucket-size", 5000, "--dtype", "float64"]
    more += ["--save", tmp_path, "--metrics", tmp_path / "metrics.jsonl", "--timeout", 10]
    result = run(script, *base, *more, nproc=2)
    assert any(result.codes) or differs(Trained(tmp_path), one())


# ---- the picture ----
def test_the_picture_shows_the_bytes_that_every_rank_holds(tmp_path):
    """A bar for each rank, stage and kind of state; its length is the bytes that were measured there."""
    pictures = [tmp_path / name for name in ("a.svg", "b.svg", "a.png")]
    for picture in pictures:
        output = run("05_zero/picture.py", "--save", picture, "--dim", 16, "--layers", 1, nproc=2).check().outputs[0]
    numbers = [[int(n.replace(",", "")) for n in re.findall(r"[\d,]+(?= bytes)", row)] for row in output.splitlines()]
    psi = 2 * 4096 + 3872 + 16
    assert numbers == [
        [2 * psi, 2 * psi, 12 * psi + 4],
        [2 * psi, 2 * psi, 6 * psi + 4],
        [2 * psi, psi, 6 * psi + 4],
        [psi, psi, 6 * psi + 3 * 4],
    ]
    assert pictures[0].read_bytes() == pictures[1].read_bytes()  # the same file from the same bytes
    assert pictures[2].read_bytes().startswith(b"\x89PNG")
    for colour in ("#56b4e9", "#e69f00", "#009e73"):
        bars = re.findall(rf'<path d="([^"]+)" clip-path[^>]+style="fill: {colour}"', pictures[0].read_text())
        widths = [max(xs) - min(xs) for bar in bars if (xs := [float(x) for x in re.findall(r"[ML] ([\d.]+) ", bar)])]
        assert len(widths) == 4 * 2  # stages x ranks
        kind = ["#56b4e9", "#e69f00", "#009e73"].index(colour)
        ratios = [stage[kind] / numbers[0][kind] for stage in numbers for _ in range(2)]
        assert [width / widths[0] for width in widths] == pytest.approx(ratios, rel=1e-3)


# ---- arithmetic ----
def test_a_70b_model_fits_8_gpus_of_80_gb_at_no_stage():
    """The README's figures: 16-bit parameters and gradients, 12 bytes of states for each parameter."""
    dim, layers, hidden, kv_dim, vocab = 8192, 80, 28672, 1024, 32000
    psi = 2 * vocab * dim + dim + layers * (2 * dim * dim + 2 * dim * kv_dim + 3 * dim * hidden + 2 * dim)
    stage_1, stage_2 = 4 * psi + 12 * psi // 8, 2 * psi + 14 * psi // 8
    page = (ROOT / "05_zero/README.md").read_text()
    for number in (psi, stage_1, stage_2, 2 * psi, 16 * psi // 8, 16 * psi // 16, 80 * 2**30):
        assert f"{number:,}" in page
    assert min(stage_1, stage_2, 2 * psi, 16 * psi // 8) > 80 * 2**30 > 16 * psi // 16
