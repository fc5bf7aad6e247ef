"""06_hybrid/checkpoint.py and hf.py: what one layout saves another reads, bit for bit, and nothing torn counts."""

import importlib
import json
import shutil
import sys

import pytest
import reference
import torch
import torch.distributed.checkpoint  # these once here, not again in each forked rank
import torch.distributed.fsdp
import torch.distributed.tensor
from runner import ROOT, Result, run
from safetensors.torch import load_file, save_file

CHECKPOINT, HF = "06_hybrid/checkpoint.py", "06_hybrid/hf.py"
# 6 rows in k_proj: over tp 2 and then dp 2 they lie as 2 + 1 | 2 + 1, over dp 4 as 2 + 2 + 2 + 0. 10 in the vocabulary.
SIZES = {"dim": 12, "layers": 2, "heads": 2, "kv_heads": 1, "vocab_size": 10}
RUN = {"seed": 0, "sizes": [12, 2, 2, 1, 10]}

# Runs commands, [{"do": .., "layout": [pp, dp_replicate, dp_shard, tp, mode], ..}], on the layouts' ranks.
# mode: "full" as train.py does with FSDP2, "none" DTensors of tp alone, "plain" no DTensors. It knows of its own what
# part of which whole tensor a rank should have, and prints for each command what is not so.
HARNESS = '''
import json, os, sys, weakref, zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

code, tests, commands = sys.argv[1:]
sys.path[:0] = [code, tests]
import checkpoint as ck
import hf
import reference
from common.process_group import process_group
from model import LlamaConfig

RUN = {"seed": 0, "sizes": [12, 2, 2, 1, 10]}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def value(kind, name, shape, stamp):
    draw = torch.Generator().manual_seed(zlib.crc32(f"{kind} {name} {stamp}".encode()))
    return torch.randn(shape, generator=draw)


def tp_dim(name):
    split = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "embed_tokens": 0, "lm_head": 0}
    return (split | {"o_proj": 1, "down_proj": 1}).get(name.split(".")[-2])


def names_of(shapes, stage, pp):
    units = [["embed_tokens"], ["layers.0."], ["layers.1."], ["model.norm", "lm_head"]]
    mine = [word for i, words in enumerate(units) if i * pp // 4 == stage for word in words]
    return [name for name in shapes if any(word in name for word in mine)]


class Built:
    """tied: one weight for embedding and head; on two stages two copies, of which a checkpoint has the first."""

    def __init__(self, layout, stamp=0, dtype=torch.float32, shapes=None, names=None, tied=False):
        *sizes, self.mode = layout
        self.pp, self.rep, self.dp, self.tp = sizes
        shapes = shapes or reference.shapes(12, 2, 2, 1, 10, tied and self.pp == 1)
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))
        self.root, self.shapes = nn.Module(), shapes
        for name in names or names_of(shapes, self.mesh["pp"].get_local_rank(), self.pp):
            *path, last = name.split(".")
            owner = self.root
            for word in path:
                if not hasattr(owner, word):
                    owner.add_module(word, nn.Module())
                owner = getattr(owner, word)
            whole = value("model", name, shapes[name], stamp).to(dtype)
            if self.mode != "plain" and name != "model.norm.weight":  # that one stays plain for tp
                placement = Replicate() if tp_dim(name) is None else Shard(tp_dim(name))
                whole = distribute_tensor(whole, self.mesh["tp"], [placement], src_data_rank=None)
            owner.register_parameter(last, nn.Parameter(whole))
        if self.mode == "full":
            axes = ("dp_replicate", "dp_shard") if self.rep > 1 else "dp_shard"
            fully_shard(self.root, mesh=self.mesh[axes])
        self.weights = dict(self.root.named_parameters())
        if tied and HEAD in self.weights:
            self.weights = {EMBEDDING if name == HEAD else name: p for name, p in self.weights.items()}
        copy = EMBEDDING if tied and hasattr(self.root, "lm_head") else None
        self.written = {name: p for name, p in self.weights.items() if name != copy}
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 * (stamp + 1))
        self.scaler.scale(torch.zeros(()))

    def step(self, stamp):
        """One step of AdamW, and then values that are known, in place of those that depend on arithmetic."""
        for weight in self.weights.values():
            weight.grad = torch.ones_like(weight)
        self.optimizer.step()
        self.set(stamp)

    def set(self, stamp):
        for name, weight in self.weights.items():
            self.local(weight).copy_(self.part(name, value("model", name, self.shapes[name], stamp)))
            if state := self.optimizer.state.get(weight):
                state["step"].fill_(stamp)
                for kind in ("exp_avg", "exp_avg_sq"):
                    self.local(state[kind]).copy_(self.part(name, value(kind, name, self.shapes[name], stamp)))

    def local(self, tensor):
        return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()

    def part(self, name, whole):
        def chunk(tensor, parts, place, dim):
            pieces = tensor.chunk(parts, dim)
            return pieces[place] if place < len(pieces) else tensor.narrow(dim, 0, 0)

        if self.mode != "plain" and tp_dim(name) is not None:
            whole = chunk(whole, self.tp, self.mesh["tp"].get_local_rank(), tp_dim(name))
        return chunk(whole, self.dp, self.mesh["dp_shard"].get_local_rank(), 0) if self.mode == "full" else whole

    def differs(self, wholes):
        """wholes: (kind, name) -> whole tensor, or None where there should be nothing."""
        found = []
        for name, weight in self.weights.items():
            state = self.optimizer.state.get(weight) or {}
            for kind in ("model", "exp_avg", "exp_avg_sq"):
                whole, mine = wholes(kind, name), weight if kind == "model" else state.get(kind)
                if whole is None or mine is None:
                    found += [] if whole is mine is None else [f"{kind}.{name} is {mine}"]
                elif not torch.equal(self.local(mine), self.part(name, whole).to(mine.dtype)):
                    found.append(f"{kind}.{name}")
        return found


def save(do):
    built = Built(do["layout"], do["stamp"], tied=do.get("tied"))
    if do.get("stepped", True):
        built.step(do["stamp"])
    writer = ck.Checkpoints(do["folder"], do.get("run", RUN), 60, do.get("background", False))
    for stamp in do.get("stamps", [do["stamp"]]):
        built.set(stamp)
        torch.manual_seed(100 * stamp + dist.get_rank())
        writer.start(stamp, built.written, built.optimizer, built.scaler)
        built.set(-1)  # training goes on
        torch.rand(3)
    writer.finish()
    return []


def load(do):
    built, stamp = Built(do["layout"], -1, tied=do.get("tied")), do["stamp"]
    for weight in built.weights.values():
        built.local(weight).fill_(torch.nan)
    if do.get("stepped_before"):
        built.step(-1)
    torch.manual_seed(7)
    before, group = torch.get_rng_state(), dist.new_group(backend="gloo")
    for each in built.optimizer.param_groups:
        each["lr"] = 0.5
    step = ck.load_states(do["folder"], do.get("run", RUN), built.weights, built.optimizer, built.scaler, group)
    stepped = do.get("stepped", True)
    wanted = lambda kind, name: value(kind, name, built.shapes[name], stamp) if stepped or kind == "model" else None
    found = built.differs(wanted)
    same = dist.get_world_size() == do["ranks"]
    random = torch.Generator().manual_seed(100 * stamp + dist.get_rank()).get_state() if same else before
    found += [] if torch.equal(torch.get_rng_state(), random) else ["random state"]
    found += [] if step == stamp else [f"step {step}"]
    found += [] if built.scaler.get_scale() == 2.0 * (do.get("first", stamp) + 1) else ["scaler"]
    found += [] if built.optimizer.param_groups[0]["lr"] == 0.5 else ["learning rate"]
    counts = {float(state["step"]) for state in built.optimizer.state.values()}
    found += [] if counts == ({float(stamp)} if stepped else set()) else [f"counts {counts}"]
    for weight in built.weights.values():
        weight.grad = torch.ones_like(weight)
    built.optimizer.step()  # with what it has
    return found


def places(do):
    """own_part and gather_whole for sizes of all sorts, of which FSDP2 and tp make uneven and empty parts."""
    shapes = {f"model.layers.{i}.mlp.{kind}_proj.weight": [rows, columns]
              for i, (rows, columns) in enumerate([(8, 4), (6, 3), (5, 2), (3, 5), (2, 4), (1, 7), (7, 2), (9, 3)])
              for kind in ("up", "down")}
    shapes |= {f"model.layers.{i}.input_layernorm.weight": [i] for i in range(1, 9)}
    built, found = Built(do["layout"], 3, shapes=shapes, names=list(shapes)), []
    for name, weight in built.weights.items():
        whole = value("model", name, shapes[name], 3)
        part, where = hf.own_part(weight)
        if not (torch.equal(part, whole[where]) and torch.equal(part, built.part(name, whole))):
            found.append(f"part of {name}")
        if not torch.equal(hf.gather_whole(weight, torch.float32), whole):
            found.append(f"whole of {name}")
    return found


def hf_load(do):
    from safetensors.torch import load_file

    wholes = load_file(do["reference"])
    shapes = {name: tuple(whole.shape) for name, whole in wholes.items()}
    if tied := HEAD not in shapes and do["layout"][0] > 1:
        shapes[HEAD] = shapes[EMBEDDING]
    built = Built(do["layout"], -1, shapes=shapes, tied=tied)
    hf.load_hf(do["folder"], built.weights)
    found = built.differs(lambda kind, name: wholes[name] if kind == "model" else None)
    if "out" in do:
        how = {key: do[key] for key in ("like", "max_shard_bytes") if key in do}
        how |= {"dtype": getattr(torch, do["out_dtype"])} if "out_dtype" in do else {}
        hf.save_hf(do["out"], built.written, LlamaConfig(**hf.read_hf_config(do["folder"])), **how)
    return found


def names(do):
    return os.listdir(do["folder"])


def private_bytes():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def hf_spy(do):
    """Counts what load_hf asks of the files, and what stays in memory while it does."""
    import safetensors

    built = Built(do["layout"], -1, shapes=do["shapes"])
    own = sum(built.local(weight).nbytes for weight in built.weights.values())
    asked, alive, most = [], [], []
    real = safetensors.safe_open
    start = private_bytes()

    class Slice:
        def __init__(self, real):
            self.real = real

        def __getattr__(self, name):
            return getattr(self.real, name)

        def __getitem__(self, where):
            alive[:] = [piece for piece in alive if piece() is not None]
            piece = self.real[where]
            asked.append(piece.nbytes)
            alive.append(weakref.ref(piece))
            most.append((len(alive), private_bytes() - start))
            return piece

    class Spy:
        def __init__(self, *args):
            self.file = real(*args)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            return Slice(self.file.get_slice(name))

    safetensors.safe_open = Spy
    hf.load_hf(do["folder"], built.weights)
    safetensors.safe_open = real
    most.append((len(alive), private_bytes() - start))
    return [own, sum(asked), max(count for count, _ in most), max(grown for _, grown in most)]


def refusal(do):
    """The line in which another command ends; the group stays whole, as all ranks are refused alike."""
    try:
        globals()[do["of"]](do)
    except ck.UsageError as error:
        return [str(error)]


with process_group("cpu", 60) as (rank, _, world_size, device):
    for do in json.loads(Path(commands).read_text()):
        print("result", json.dumps({"do": do, "found": globals()[do["do"]](do)}), flush=True)
'''


@pytest.fixture(scope="session")
def harness(tmp_path_factory):
    path = tmp_path_factory.mktemp("harness") / "layouts.py"
    path.write_text(HARNESS)

    def harness(nproc, *commands, code=CHECKPOINT, before="") -> Result:
        """Runs the commands on nproc ranks. before: more of the program, to plant a fault."""
        script = tmp_path_factory.mktemp("commands") / "program.py"
        script.write_text(HARNESS.replace("\nwith process_group", f"{before}\nwith process_group"))
        (script.parent / "commands.json").write_text(json.dumps(commands, default=str))
        words = ((ROOT / code).parent, ROOT / "tests", script.parent / "commands.json")
        return run(script, *words, nproc=nproc, timeout=120)

    return harness


def found(result):
    """Returns for each command what any rank found wrong."""
    lists = [
        [json.loads(line[7:])["found"] for line in output.splitlines() if line.startswith("result ")]
        for output in result.check().outputs
    ]
    return [sorted({str(word) for rank in ranks for word in rank}) for ranks in zip(*lists)]


def last_line(result, rank):
    return result.outputs[rank].strip().splitlines()[-1]


def refused(result, *words):
    """True if every rank ended with exit code 2 and one line that holds all the words."""
    assert result.codes == [2] * len(result.codes), result.outputs
    for rank, output in enumerate(result.outputs):
        line = last_line(result, rank)
        assert line.startswith(f"[rank{rank}] error: ")
        assert all(str(word) in line for word in words), line
        assert "Traceback" not in output
    return True


# ---- from layout to layout ----
LAYOUTS = {  # number of ranks -> [pp, dp_replicate, dp_shard, tp, mode]
    4: [
        [2, 1, 1, 2, "full"], [1, 1, 4, 1, "full"], [4, 1, 1, 1, "full"], [1, 1, 2, 2, "full"],
        [1, 2, 1, 2, "full"], [1, 1, 2, 2, "none"], [2, 1, 2, 1, "plain"],
    ],
    2: [[1, 1, 1, 2, "none"], [2, 1, 1, 1, "plain"], [1, 1, 2, 1, "full"]],
    1: [[1, 1, 1, 1, "plain"], [1, 1, 1, 1, "full"]],
}  # fmt: skip
FIRST = LAYOUTS[4][0]
ALL = [(nproc, layout) for nproc, layouts in LAYOUTS.items() for layout in layouts]
MOVES = [((4, FIRST), other) for other in ALL] + [(other, (4, FIRST)) for other in ALL[1:4] + ALL[-5::2]]
MOVES += [((4, LAYOUTS[4][1]), (4, LAYOUTS[4][3])), ((2, LAYOUTS[2][2]), (1, LAYOUTS[1][0]))]


def key(nproc, layout):
    return f"{nproc} {layout}"


@pytest.fixture(scope="session")
def saved(harness, tmp_path_factory):
    """Every layout's checkpoint, {key: folder}; every other one written in the background."""
    folder, folders = tmp_path_factory.mktemp("saved"), {}
    for nproc, layouts in LAYOUTS.items():
        commands = []
        for i, layout in enumerate(layouts):
            folders[key(nproc, layout)] = place = folder / key(nproc, layout)
            commands.append(dict(do="save", layout=layout, folder=place, stamp=3, background=i % 2 == 1))
        assert found(harness(nproc, *commands)) == [[]] * len(commands)
    return folders


def load_of(saver, nproc, layout, **more):
    ranks = int(str(saver.name).split()[0])
    return dict(do="load", layout=layout, folder=saver, stamp=3, ranks=ranks) | more


@pytest.fixture(scope="session")
def moved(harness, saved):
    results = {}
    for nproc in LAYOUTS:
        moves = [move for move in MOVES if move[1][0] == nproc]
        commands = [load_of(saved[key(*one)], *two, stepped_before=i % 2) for i, (one, two) in enumerate(moves)]
        for (one, two), wrong in zip(moves, found(harness(nproc, *commands))):
            results[key(*one), key(*two)] = wrong
    return results


@pytest.mark.parametrize(("one", "two"), [(key(*one), key(*two)) for one, two in MOVES])
def test_weights_and_averages_move_between_layouts_bit_for_bit(one, two, moved):
    assert moved[one, two] == []


def test_checkpoint_holds_each_element_once(saved):
    """Of replicas one writes: 4 ranks that all have everything write no more than one does, but its random states."""
    size = sum(torch.Size(shape).numel() for shape in reference.shapes(**SIZES).values())
    for nproc, layout in ALL:
        folder = saved[key(nproc, layout)] / "step-3"
        items = torch.distributed.checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
        chunks = [
            chunk for name, item in items.items() if not name.startswith(("step", "random")) for chunk in item.chunks
        ]
        assert sum(chunk.sizes.numel() for chunk in chunks) == 3 * size


def test_run_that_never_stepped_is_saved_and_resumed(harness, tmp_path):
    layouts = LAYOUTS[2]
    commands = [
        dict(do="save", layout=layouts[0], folder=tmp_path, stamp=0, stepped=False),
        *(dict(do="load", layout=to, folder=tmp_path, stamp=0, ranks=2, stepped=False) for to in layouts),
    ]
    assert found(harness(2, *commands)) == [[]] * 4


def test_two_copies_of_a_tied_weight_are_written_once_and_both_read(harness, tmp_path):
    tied = dict(stamp=3, tied=True)
    both, one = ([2, 1, 1, 1, "full"], [1, 1, 1, 2, "none"])
    commands = [
        dict(do="save", layout=both, folder=tmp_path / "both", **tied),
        dict(do="save", layout=one, folder=tmp_path / "one", **tied),
        *(dict(do="load", layout=to, folder=tmp_path / which, ranks=2, **tied)
          for which in ("both", "one") for to in (both, one)),
    ]  # fmt: skip
    assert found(harness(2, *commands)) == [[]] * 6


# ---- which checkpoint counts ----
def steps_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_saves_in_a_row_wait_for_each_other_and_the_last_two_stay(background, harness, tmp_path):
    layout = LAYOUTS[2][0]
    (tmp_path / "step-1").mkdir()  # what a run has left that died
    (tmp_path / "step-1" / "__0_0.distcp").write_text("half")
    commands = [
        dict(do="save", layout=layout, folder=tmp_path, stamp=1, stamps=[1, 2, 3], background=background),
        *(dict(do="load", layout=layout, folder=tmp_path / where, stamp=stamp, ranks=2, first=1)
          for where, stamp in (("", 3), ("step-2", 2), ("step-3", 3))),
    ]  # fmt: skip
    assert found(harness(2, *commands)) == [[]] * 4
    assert steps_in(tmp_path) == ["step-2", "step-3"]


@pytest.fixture(scope="session")
def steps_2_and_3(harness, tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    assert found(harness(2, dict(do="save", layout=LAYOUTS[2][0], folder=folder, stamp=2, stamps=[2, 3]))) == [[]]
    return folder


@pytest.fixture
def two(steps_2_and_3, tmp_path):
    """A folder with the checkpoints of steps 2 and 3."""
    return shutil.copytree(steps_2_and_3, tmp_path / "two")


def loads(folder, stamp, **more):
    return dict(do="load", layout=LAYOUTS[2][2], folder=folder, stamp=stamp, ranks=2, first=2) | more


def test_run_that_goes_on_from_an_older_one_writes_the_newest(harness, two):
    again = dict(do="save", layout=LAYOUTS[2][0], folder=two, stamp=2)
    assert found(harness(2, again, loads(two, 2))) == [[], []]
    assert steps_in(two) == ["step-2-again", "step-3"]


DIE = """
def die(*_, **__):
    os.kill(os.getpid(), 9)


if os.environ["RANK"] == "{rank}":
    {where} = die
"""


@pytest.mark.parametrize(
    ("rank", "where", "background"),
    [
        (1, "dcp.FileSystemWriter.write_data", False),
        (1, "dcp.FileSystemWriter.write_data", True),
        (0, "dcp.FileSystemWriter.finish", True),
        (0, "ck.write_aside", False),
        (0, "ck.Checkpoints.remove_all_but_the_last", True),
    ],
)
def test_rank_killed_while_it_saves_leaves_the_checkpoint_before(rank, where, background, harness, two):
    save = dict(do="save", layout=LAYOUTS[2][0], folder=two, stamp=4, background=background)
    result = harness(2, save, before=DIE.format(rank=rank, where=where))
    assert result.codes[rank] == -9
    assert result.codes[1 - rank] == 1
    done = "remove" in where  # it died later: the new one counts, nothing is removed yet
    assert steps_in(two) == ["step-2", "step-3", "step-4"]
    after = harness(2, loads(two, 4 if done else 3, first=4 if done else 2), save | dict(stamp=5))
    assert found(after) == [[], []]
    assert ("step-4 was never finished: going on from" in after.outputs[0]) is not done
    assert "never finished" not in after.outputs[1]
    assert steps_in(two) == [f"step-{4 if done else 3}", "step-5"]


@pytest.fixture(scope="session")
def refusals(harness, steps_2_and_3, tmp_path_factory):
    """{damage: (the torn file of step 3, what all ranks say)}"""
    folder, torn = tmp_path_factory.mktemp("torn"), {}
    for damage in ("cut", "gone", "garbled", "note cut"):
        name = {"garbled": ".metadata", "note cut": "checkpoint.json"}.get(damage, "__1_0.distcp")
        torn[damage] = file = shutil.copytree(steps_2_and_3, folder / damage) / "step-3" / name
        content = file.read_bytes()
        file.unlink() if damage == "gone" else file.write_bytes(content[: len(content) // 2])
        if damage == "garbled":  # of the right length
            file.write_bytes(bytes(len(content)))
    lines = found(harness(2, *(loads(folder / damage, 3, do="refusal", of="load") for damage in torn)))
    return {damage: (file, line) for (damage, file), line in zip(torn.items(), lines)}


@pytest.mark.parametrize("damage", ["cut", "gone", "garbled", "note cut"])
def test_torn_checkpoint_is_refused_by_name_and_the_whole_one_named(damage, refusals):
    torn, (line,) = refusals[damage]
    assert line.startswith(f"--resume {torn.parents[1] / 'step-2'}, which is whole: ")
    assert str(torn if damage in ("cut", "gone") else torn.parent) in line
    assert "\n" not in line


def test_checkpoint_before_a_torn_one_is_resumed_when_asked_for(harness, two):
    (two / "step-3" / "__0_0.distcp").unlink()
    assert refused(harness(2, loads(two, 3)), f"--resume {two / 'step-2'}, which is whole: torn: ")
    assert found(harness(2, loads(two / "step-2", 2))) == [[]]


def test_folder_without_its_note_is_refused_when_asked_for(harness, two):
    (two / "step-3" / "checkpoint.json").unlink()
    assert refused(harness(2, loads(two / "step-3", 3)), f"{two / 'step-3'} has no checkpoint.json", two / "step-2")
    assert found(harness(2, loads(two, 2))) == [[]]


def test_last_whole_checkpoint_outlives_the_torn_one(harness, two):
    (two / "step-3" / "__0_0.distcp").unlink()
    save = dict(do="save", layout=LAYOUTS[2][0], folder=two, stamp=4)
    assert found(harness(2, save)) == [[]]
    assert steps_in(two) == ["step-2", "step-4"]


def test_empty_folder_and_other_run_are_refused(harness, two, tmp_path):
    (tmp_path / "empty").mkdir()
    folders, how = [tmp_path / "empty", tmp_path / "nowhere"], dict(do="refusal", of="load")
    commands = [loads(folder, 3, **how) for folder in folders]
    *missing, (other,) = found(harness(2, *commands, loads(two, 3, run=RUN | {"seed": 7}, **how)))
    for folder, (line,) in zip(folders, missing):
        assert f"no step-*/checkpoint.json in {folder}" in line
    assert all(word in other for word in ("'seed': 0", "'seed': 7", str(two / "step-3")))


def test_save_into_a_folder_that_cannot_be_made_is_refused_on_every_rank(harness, tmp_path):
    (tmp_path / "file").write_text("")
    save = dict(do="save", layout=LAYOUTS[2][0], folder=tmp_path / "file" / "x", stamp=4)
    assert refused(harness(2, save), "--save another folder than", "Not a directory")


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_error_of_one_ranks_thread_ends_the_run(background, harness, two):
    fault = DIE.replace("os.kill(os.getpid(), 9)", 'raise OSError("disk full")')
    save = dict(do="save", layout=LAYOUTS[2][0], folder=two, stamp=4, background=background)
    result = harness(2, save, before=fault.format(rank=1, where="dcp.FileSystemWriter.write_data"))
    assert result.codes == [1, 1]
    assert all("disk full" in output for output in result.outputs)
    assert found(harness(2, loads(two, 3))) == [[]]


# ---- Hugging Face ----
def test_parts_and_wholes_of_even_and_uneven_sizes(harness):
    commands = [dict(do="places", layout=layout) for layout in LAYOUTS[4]]
    assert found(harness(4, *commands)) == [[]] * len(commands)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
KINDS = {  # name -> (changes of the config, dtype of the files, bytes per file)
    "one file": ({}, "float32", None),
    "sharded": ({"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}, "float32", 3000),
    "tied": ({"tie_word_embeddings": True}, "float32", None),
    "bfloat16": ({"max_position_embeddings": 77, "eos_token_id": 9}, "bfloat16", 3000),
}
HF_LAYOUTS = {
    1: [[1, 1, 1, 1, "plain"]],
    2: [[1, 1, 1, 2, "none"], [1, 1, 2, 1, "full"]],
    4: [[1, 1, 2, 2, "full"], [2, 1, 1, 2, "full"], [1, 2, 2, 1, "full"]],
}
CASES = [(kind, nproc, layout) for kind in KINDS for nproc in HF_LAYOUTS for layout in HF_LAYOUTS[nproc]]


@pytest.fixture(scope="session")
def llamas(tmp_path_factory):
    """{kind: (folder, file of its whole tensors)}, made here by transformers."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    made = {}
    for kind, (changes, dtype, shard) in KINDS.items():
        sizes = dict(hidden_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=10)
        torch.manual_seed(len(kind))
        config = transformers.LlamaConfig(**sizes | dict(intermediate_size=64, initializer_range=0.5) | changes)
        model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
        folder = tmp_path_factory.mktemp("llama") / "hf"
        model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
        assert (folder / "model.safetensors.index.json").exists() is bool(shard)
        wholes = {n: p.detach().clone() for n, p in model.named_parameters()}  # those of a tied head once
        save_file(wholes, folder.parent / "wholes.safetensors")
        made[kind] = folder, folder.parent / "wholes.safetensors"
    return made


@pytest.fixture(scope="session")
def read(harness, llamas, tmp_path_factory):
    """Each case read into float32 shards and written back as the type of its files: {case: (found, folder)}."""
    results, out = {}, tmp_path_factory.mktemp("out")
    for nproc in HF_LAYOUTS:
        cases, commands = [case for case in CASES if case[1] == nproc], []
        for kind, _, layout in cases:
            folder, wholes = llamas[kind]
            place = out / f"{kind} {layout}"
            how = dict(reference=wholes, folder=folder, out=place, out_dtype=KINDS[kind][1], like=folder)
            how |= dict(max_shard_bytes=KINDS[kind][2]) if KINDS[kind][2] else {}
            commands.append(dict(do="hf_load", layout=layout, **how))
        for (kind, _, layout), wrong in zip(cases, found(harness(nproc, *commands))):
            results[key(kind, layout)] = wrong, out / f"{kind} {layout}"
    return results


@pytest.mark.parametrize(("kind", "layout"), [(kind, layout) for kind, _, layout in CASES], ids=str)
def test_llama_is_read_into_shards_and_written_back_bit_for_bit(kind, layout, read, llamas):
    wrong, folder = read[key(kind, layout)]
    assert wrong == []
    files = sorted(folder.glob("*.safetensors"))
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    wholes = load_file(llamas[kind][1])
    assert written.keys() == wholes.keys()
    assert all(
        written[name].dtype == whole.dtype and torch.equal(written[name], whole) for name, whole in wholes.items()
    )
    one = KINDS[kind][2] is None and layout[0] == 1
    if one:
        assert steps_in(folder) == ["config.json", "model.safetensors"]
    else:
        names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
        assert steps_in(folder) == ["config.json", *names, "model.safetensors.index.json"]
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(whole.nbytes for whole in wholes.values())
        assert {name: file.name for file in files for name in load_file(file)} == index["weight_map"]
        for file in files:
            tensors = load_file(file)
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= (KINDS[kind][2] or 5e9)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_what_is_written_and_computes_the_same(kind, read, llamas):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    folders = llamas[kind][0], read[key(kind, [2, 1, 1, 2, "full"])][1]
    model, theirs = (transformers.LlamaForCausalLM.from_pretrained(folder) for folder in folders)
    tokens = torch.arange(40)[None] * 7 % 10
    assert torch.equal(theirs(tokens).logits, model(tokens).logits)
    assert theirs.dtype == model.dtype
    for name in ("rope_parameters", "rms_norm_eps", "max_position_embeddings", "eos_token_id", "tie_word_embeddings"):
        assert getattr(theirs.config, name) == getattr(model.config, name)


def test_what_stood_there_before_is_replaced_and_leaves_nothing_behind(harness, llamas, tmp_path):
    folder, wholes = llamas["one file"]
    how = dict(do="hf_load", layout=[1, 1, 1, 1, "plain"], folder=folder, reference=wholes, out=tmp_path / "out")
    again = how | dict(folder=tmp_path / "out", out=tmp_path / "other")
    look = dict(do="names", folder=tmp_path / "out")
    sizes = (3000, 9000, 10**9, 5000)
    results = found(harness(1, *(one for size in sizes for one in (how | dict(max_shard_bytes=size), again, look))))
    assert results[0::3] == results[1::3] == [[]] * len(sizes)
    for size, names in zip(sizes, results[2::3]):
        files = [name for name in names if name.endswith(".safetensors")]
        assert (len(files) == 1) is (size == 10**9)
        assert len(names) == len(files) + 1 + (len(files) > 1)


DIE_RENAMING = """
renames, replace = [], os.replace


def count(*paths):
    renames.append(paths)
    if len(renames) == 4:
        os.kill(os.getpid(), 9)
    replace(*paths)


os.replace = count
"""


def test_killed_while_it_renames_leaves_no_mix_of_old_and_new(harness, llamas, tmp_path):
    """Killed with 2 of the new files in place; the old ones had the same names."""
    folder, wholes = llamas["sharded"]
    how = dict(do="hf_load", layout=[1, 1, 1, 1, "plain"], folder=folder, reference=wholes, max_shard_bytes=3000)
    assert found(harness(1, how | dict(out=tmp_path / "out"))) == [[]]
    assert harness(1, how | dict(out=tmp_path / "out"), before=DIE_RENAMING).codes == [-9]
    assert refused(harness(1, how | dict(folder=tmp_path / "out")), "neither model.safetensors nor")
    again = how | dict(folder=tmp_path / "out")
    assert found(harness(1, how | dict(out=tmp_path / "out"), again)) == [[], []]
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_reading_holds_no_more_than_the_own_shards_and_one_slice(harness, tmp_path):
    """16 MiB per matrix, 4 of them: a rank asks for its quarter of each and no byte more, a slice at a time."""
    names = [f"model.layers.{i}.mlp.{kind}_proj.weight" for i in (0, 1) for kind in ("up", "down")]
    save_file({name: torch.ones(2048, 2048) for name in names}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(GOOD))
    shapes = {name: [2048, 2048] for name in names}
    result = harness(4, dict(do="hf_spy", layout=[1, 1, 2, 2, "full"], folder=tmp_path, shapes=shapes))
    for output in result.check().outputs:
        own, asked, at_once, grown = json.loads(output.split("result ")[1].splitlines()[0])["found"]
        assert own == asked == 4 * 4 * 2**20
        assert at_once == 1
        assert grown < 4 * 2**20  # the shards' memory is there before: one slice, at most


GOOD = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 12, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 10,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS = {  # what is changed -> what the line says
    "model_type": ("mistral", "of type 'mistral'"),
    "architectures": (["LlamaForSequenceClassification"], "LlamaForSequenceClassification"),
    "attention_bias": (True, "attention_bias is True"),
    "mlp_bias": (True, "mlp_bias is True"),
    "quantization_config": ({"bits": 4}, "quantization_config is {'bits': 4}"),
    "hidden_act": ("gelu", "hidden_act is 'gelu'"),
    "head_dim": (8, "head_dim is 8: only hidden_size 12 / 2 heads"),
    "num_attention_heads": (5, "only hidden_size 12 / 5 heads"),
    "vocab_size": ("10", "vocab_size is '10', not a whole number"),
    "hidden_size": (None, "hidden_size is None, not a whole number"),
    "rope_scaling": ({"type": "linear", "factor": 2.0}, "'linear'"),
    "rope_parameters": ({"rope_type": "llama3", "factor": 8.0}, "lack 'low_freq_factor'"),
}


@pytest.fixture(scope="session")
def hf(tmp_path_factory):
    """The module, imported as 06_hybrid's scripts do, and unloaded again."""
    names = ("checkpoint", "model", "parallel", "hf")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "06_hybrid"))
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module("hf")
        for name in names:  # a script that is forked later loads its own
            del sys.modules[name]
    return module


def test_config_gives_the_sizes(hf, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GOOD))
    sizes = dict(dim=12, layers=2, heads=2, kv_heads=1, hidden=64, vocab_size=10)
    rest = dict(rope_theta=10000.0, norm_eps=1e-6, tied=False, rope_scaling=None)
    assert hf.read_hf_config(tmp_path) == sizes | rest
    path.write_text(json.dumps({k: v for k, v in GOOD.items() if k not in ("num_key_value_heads", "rope_theta")}))
    assert hf.read_hf_config(tmp_path) == sizes | rest | {"kv_heads": 2}
    numbers = {k: v for k, v in LLAMA3.items() if k not in ("rope_type", "rope_theta")}
    for rope in ({"rope_parameters": LLAMA3}, {"rope_theta": 5e5, "rope_scaling": numbers | {"rope_type": "llama3"}}):
        path.write_text(json.dumps(GOOD | rope))
        found = hf.read_hf_config(tmp_path)
        assert found["rope_theta"] == 5e5
        assert found["rope_scaling"]._asdict() == numbers


@pytest.mark.parametrize("name", CONFIGS)
def test_config_of_another_model_is_refused_with_the_reason(name, hf, tmp_path):
    value, words = CONFIGS[name]
    config = {key: value for key, value in (GOOD | {name: value}).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: ") as refusal:
        hf.read_hf_config(tmp_path)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"rope_scaling": 3}'])
def test_what_is_no_config_is_refused(content, hf, tmp_path):
    if content:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json: "):
        hf.read_hf_config(tmp_path)


def test_files_are_full_but_not_overfull_and_each_name_is_in_one(hf):
    first, last = {"a": 4, "b": 4, "big": 30, "c": 2}, {"d": 9, "e": 1}
    files = [[0, ["a", "b"], 8], [0, ["big"], 30], [0, ["c"], 2], [2, ["d", "e"], 10]]
    assert hf.plan_files([first, first, last, last], 10) == files
    assert hf.plan_files([first, first, last | {"a": 4}, last], 10) == files  # a tied weight's second copy
    assert hf.plan_files([first, first], 40) == [[0, [*first], 40]]


NEED = """
def need(do):
    sys.modules["safetensors"] = None  # Python's own way to say: not there
    hf.need_safetensors()
"""


def test_missing_safetensors_ends_in_one_line_that_says_what_to_install(harness):
    assert refused(harness(2, dict(do="need"), before=NEED), "need safetensors: pip install safetensors")


def rewrite(folder, change):
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})


Q = "model.layers.1.self_attn.q_proj.weight"
BAD = {  # what is done to a folder -> words of the line
    "no weights": (lambda f: [p.unlink() for p in f.glob("model*")], "neither model.safetensors nor"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: No such file"),
    "file missing": (
        lambda f: sorted(f.glob("*.safetensors"))[-1].unlink(),
        "is missing: model.safetensors.index.json",
    ),
    "file cut": (lambda f: cut(sorted(f.glob("*.safetensors"))[-1]), "cannot be read: SafetensorError"),
    "index cut": (lambda f: cut(f / "model.safetensors.index.json"), "cannot be read: JSONDecodeError"),
    "tensor missing": (lambda f: edit_index(f, lambda m: m.pop(Q)), f"lacks {Q}, and 0 more of 21"),
    "index lies": (lambda f: rewrite(f, lambda t: t.pop(Q, None)), f"lacks {Q}: model.safetensors.index.json says"),
    "surplus": (
        lambda f: edit_index(f, lambda m: m.update({"model.bias": m[Q]})),
        "has model.bias, and 0 more tensors",
    ),
    "shape": (lambda f: rewrite(f, lambda t: Q in t and t.update({Q: t[Q][:4].clone()})), f"{Q} is (4, 12), this"),
    "type": (lambda f: rewrite(f, lambda t: Q in t and t.update({Q: t[Q].to(torch.int8)})), f"{Q} is of type I8"),
}


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.fixture(scope="session")
def bad_lines(harness, llamas, tmp_path_factory):
    """{bad: what all ranks say}"""
    (folder, wholes), place, commands = llamas["sharded"], tmp_path_factory.mktemp("bad"), []
    for bad, (damage, _) in BAD.items():
        damage(shutil.copytree(folder, place / bad))
        how = dict(do="refusal", of="hf_load", layout=[2, 1, 1, 1, "plain"], reference=wholes)
        commands.append(how | dict(folder=place / bad))
    return dict(zip(BAD, found(harness(2, *commands))))


@pytest.mark.parametrize("bad", BAD)
def test_bad_folder_is_refused_in_one_line_alike_on_every_rank(bad, bad_lines):
    (line,) = bad_lines[bad]
    assert BAD[bad][1] in line
    assert f"/{bad}" in line
    assert "\n" not in line


def test_bad_folder_ends_every_rank(harness, llamas, tmp_path):
    folder, wholes = llamas["sharded"]
    BAD["file cut"][0](shutil.copytree(folder, tmp_path / "hf"))  # only one of the two stages reads it
    how = dict(do="hf_load", layout=[2, 1, 1, 1, "plain"], folder=tmp_path / "hf", reference=wholes)
    assert refused(harness(2, how), tmp_path / "hf", BAD["file cut"][1])


def test_buffers_and_a_tied_models_head_in_the_files_are_left_out(harness, llamas, tmp_path):
    folder, wholes = llamas["tied"]
    shutil.copytree(folder, tmp_path / "hf")
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path / "hf", lambda t: t.update({buffer: torch.ones(3), "lm_head.weight": torch.ones(10, 12)}))
    how = dict(do="hf_load", layout=[2, 1, 1, 1, "plain"], folder=tmp_path / "hf", reference=wholes)
    assert found(harness(2, how)) == [[]]


# ---- proof that these tests see ----
FAULTS = {  # edits, and the ranks and layouts between which they show
    "averages left out": (CHECKPOINT, '{"state": averages, ', '{"state": {}, '),
    "averages exchanged": (CHECKPOINT, "{k: states[k][name] for k in ADAMW}",
                           "{k: states[o][name] for k, o in zip(ADAMW, (ADAMW[1], ADAMW[0], ADAMW[2]))}"),
    "random states left out": (CHECKPOINT, "same and f", "not same and f"),
    "learning rate of the checkpoint": (CHECKPOINT, "groups = optimizer.state_dict()",
                                        "groups = torch.optim.AdamW(weights.values()).state_dict()"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_moving_between_layouts_turns_red_when_there_is(fault, plant, harness, saved):
    code = plant(FAULTS[fault][0], FAULTS[fault][1:])
    saver = saved[key(4, FIRST)]
    (wrong,) = found(harness(4, load_of(saver, 4, LAYOUTS[4][3]), code=code))
    assert wrong


def test_killed_run_turns_red_when_a_folder_counts_without_its_note(plant, harness, two):
    code = plant(CHECKPOINT, ('if (path / NOTE).exists()), key', 'if (path / ".metadata").exists()), key'))  # fmt: skip
    save = dict(do="save", layout=LAYOUTS[2][0], folder=two, stamp=4)
    harness(2, save, before=DIE.format(rank=0, where="ck.write_aside"))
    assert harness(2, loads(two, 3), code=code).codes == [2, 2]  # and not the step before
    assert found(harness(2, loads(two, 3))) == [[]]


PARTS = {
    "every rank's first rows": (("parallel.py", "slice(start, min(start + size, stop))", "slice(0, size)"), "part of"),
    "the parts of tp not put together": ((".full_tensor()", ".to_local()"), "whole of"),
}


@pytest.mark.parametrize("fault", PARTS)
def test_reading_turns_red_with(fault, plant, harness):
    edit, word = PARTS[fault]
    (wrong,) = found(harness(4, dict(do="places", layout=LAYOUTS[4][3]), code=plant(HF, edit)))
    assert word in " ".join(wrong)
