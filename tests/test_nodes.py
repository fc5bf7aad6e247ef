"""Training on the nodes of 06_hybrid/cluster.py: what crosses the links, and what a dead node or a bad link does."""

import json
import re
from itertools import pairwise
from math import prod

import pytest
from emulated import cluster, needs_namespaces, one_rank_each
from runner import ROOT, run
from test_hybrid import load

pytestmark = needs_namespaces
HYBRID, DDP = "06_hybrid/train.py", "02_ddp/train.py"
EXACT = 1e-9  # float64, added up in another order
HEADERS = 0.05  # of Ethernet, IP and TCP, acknowledgements, and small messages beside the large ones: 0.6 to 3.3 % seen


def read_rows(path):
    """{step: row}; of a step that was made twice, the last."""
    return {row["step"]: row for row in map(json.loads, path.read_text().splitlines())}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for step, row in expected.items():
        for name in ("loss", "grad_norm"):
            assert found[step][name] == pytest.approx(row[name], rel=EXACT), (step, name)


# ---- what crosses the links ----
B, T, D, LAYERS, STEPS = 16, 128, 64, 2, 5
SIZES = f"--batch {B} --seq-len {T} --dim {D} --layers {LAYERS} --heads 2 --kv-heads 2 --steps {STEPS} --dtype float64"
MESHES = {
    "dp": "--dp 2 --shard none",
    "tp": "--tp 2 --allow-cross-node-tp",
    "pp": "--pp 2 --microbatch 4",
}
COUNT = """
import json, os, re, runpy, sys
import torch.distributed as dist
script, folder = sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))
namespace = runpy.run_path(script)

def sent():
    return int(re.search("eth0:(.*)", open("/proc/net/dev").read())[1].split()[8])

with namespace["process_group"]("cpu", 60) as (rank, _, world_size, device):
    for name, flags in json.load(open(folder + "/runs.json")).items():
        sys.argv = [script, *flags.split(), "--metrics", f"{folder}/{name}.jsonl"]
        dist.barrier()
        before = sent()
        namespace["train_with_mesh"](namespace["parse_args"](), rank, world_size, device)
        dist.barrier()
        print("sent", name, sent() - before, flush=True)
"""


@pytest.fixture
def train_each(tmp_path):
    """train_each(flags): 06 on each mesh, over two nodes of one rank; returns what the cluster said, the rows of each
    mesh, and the bytes that each node sent."""

    def train_each(*flags):
        (tmp_path / "count.py").write_text(COUNT)
        (tmp_path / "runs.json").write_text(json.dumps({name: f"{SIZES} {mesh}" for name, mesh in MESHES.items()}))
        script = tmp_path / "count.py", ROOT / HYBRID, tmp_path
        done = cluster(*flags, *one_rank_each(*script), timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        counts = sorted(re.findall(r"\[node(\d)\] sent (\w+) (\d+)", done.stdout))
        sent = {name: [int(size) for _, mesh, size in counts if mesh == name] for name in MESHES}
        return done.stderr, {name: read_rows(tmp_path / f"{name}.jsonl") for name in MESHES}, sent

    return train_each


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    metrics = tmp_path_factory.mktemp("alone") / "metrics.jsonl"
    run(HYBRID, *SIZES.split(), "--metrics", metrics).check()
    return read_rows(metrics)


def test_each_axis_sends_over_the_link_what_its_formula_says(train_each, alone):
    """The kernel's counters, with headers and all: where an axis is placed shows in them, without noise."""
    model = load("model")
    config = model.LlamaConfig(D, LAYERS, heads=2, kv_heads=2, hidden=3 * D, vocab_size=256)
    parameters = sum(prod(shape) for shape in model.whole_shapes(config).values())
    hidden = 8 * B * T * D  # bytes
    expected = {
        "dp": 2 * (2 - 1) / 2 * 8 * parameters,  # one all_reduce of the gradients
        "tp": 2 * (2 - 1) / 2 * (4 * LAYERS + 2) * hidden,  # four of each layer, one of the embedding, one of the head
        "pp": hidden,  # forward from node 0, backward from node 1
    }
    _, rows, sent = train_each()
    for name, size in expected.items():
        for found in sent[name]:
            assert found == pytest.approx(STEPS * size, rel=HEADERS), name
            assert found > STEPS * size, name
        assert_same(rows[name], alone)


def test_loss_of_one_percent_changes_nothing_but_the_time(train_each, alone):
    said, rows, _ = train_each("--loss", "1%")
    assert int(re.search(r"(\d+) frames lost", said)[1]) > 5
    for name in MESHES:
        assert_same(rows[name], alone)


# ---- a bad link ----
TINY = "--batch 4 --seq-len 32 --dim 32 --layers 2 --heads 2 --kv-heads 2 --dtype float64"
REPLICAS = [*TINY.split(), "--shard", "none"]


def test_link_that_is_cut_for_five_seconds_holds_the_run_and_no_more(tmp_path):
    flags = [*REPLICAS, "--steps", 30, "--metrics", tmp_path / "cut.jsonl"]
    at = ["--at", "    9 |:cut:1", "--at", "+5:heal:1"]
    done = cluster(*at, *one_rank_each(HYBRID, *flags))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "heal node1" in done.stderr
    run(HYBRID, *flags[:-1], tmp_path / "whole.jsonl").check()
    found = read_rows(tmp_path / "cut.jsonl")
    assert_same(found, read_rows(tmp_path / "whole.jsonl"))
    assert max(row["step_ms"] for row in found.values()) > 4000  # it did stand still


def test_link_that_stays_cut_ends_every_rank_after_its_timeout(tmp_path):
    flags = [*REPLICAS, "--steps", 1000, "--timeout", 4]
    done = cluster("--at", "    1 |:cut:1", *one_rank_each(HYBRID, *flags))
    assert done.returncode == 1
    for node in (0, 1):
        said = [line for line in done.stdout.splitlines() if line.startswith(f"[node{node}]")]
        # gloo says one or the other: its wait was over, or that of another collective on the same connection
        assert re.search(rf"\[rank{node}\]: RuntimeError: .*(Timed out waiting 4000ms|timeout caused)", "\n".join(said))
    seconds = float(re.search(r"cluster: ([\d.]+) s, exit", done.stderr)[1])
    assert seconds - float(re.search(r"cluster: ([\d.]+) s: cut", done.stderr)[1]) < 4 + 10


# ---- a dead node ----
# The optimizer stands still at a chosen step, until a signal comes or the node dies: no race with the training.
GATE = """
import os, runpy, signal, socket, sys
from torch.optim.optimizer import register_optimizer_step_post_hook
folder, alone, sys.argv = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
first, steps = not os.listdir(folder), 0

def gate(*_):
    global steps
    steps += 1
    if first and socket.gethostname() == "node1" and steps == 25:
        print("stands before it dies", flush=True)
        signal.pause()
    if os.environ["WORLD_SIZE"] == "1" and steps == alone:
        print("stands alone", flush=True)
        signal.pause()

register_optimizer_step_post_hook(gate)
sys.path.insert(0, os.path.dirname(sys.argv[0]))  # as `python script` does
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ELASTIC = [
    "--nnodes", "1:2", "--max-restarts", 3,
    # Soon: 3 s without a sign of life are a death, and 2 s are enough to wait for others.
    "--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3",
]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "alone", "worlds"),
    [(DDP, 8, ["2", "1", "2"]), (HYBRID, 0, ["2", "1"])],
    ids=["02, and the node comes back", "06"],
)
def test_node_that_dies_costs_the_steps_since_the_checkpoint_and_no_more(script, alone, worlds, tmp_path):
    """worlds: how many ranks there are. Those that stay go on from the last checkpoint, that of step 20; when the node
    returns, torchrun ends them by SIGTERM, on which they save, and starts all."""
    folder = tmp_path / "saved"
    folder.mkdir()
    (tmp_path / "gate.py").write_text(GATE)
    flags = [*(TINY.split() if script == DDP else REPLICAS), "--steps", 40, "--timeout", 20]
    saved = ["--save", folder, "--save-every", 10, "--resume", folder, "--metrics", tmp_path / "killed.jsonl"]
    at = ["--at", "before it dies:kill:1", *(["--at", "stands alone:start:1"] if alone else [])]
    words = [*ELASTIC, tmp_path / "gate.py", folder, alone, script, *flags, *saved]
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # without it a node that comes back waits in vain
    done = cluster("--procs", 1, "--rdzv", "c10d", *at, "--", *words, timeout=120, env=fresh)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"\| .*dp (\d)", done.stdout) == worlds
    steps = [0, *(json.loads(line)["step"] for line in (tmp_path / "killed.jsonl").read_text().splitlines())]
    begun = [step for before, step in pairwise(steps) if step != before + 1]
    assert begun == [21]  # and nothing else was made twice, or left out
    run(script, *flags, "--metrics", tmp_path / "whole.jsonl").check()
    assert_same(read_rows(tmp_path / "killed.jsonl"), read_rows(tmp_path / "whole.jsonl"))
