"""06_hybrid/train.py --dry-run: fake tensors say what real ranks hold and send, formulas what a large model does."""

import json
import re
import subprocess
import sys

import pytest
from runner import ROOT, run

TRAIN = "06_hybrid/train.py"
FLAGS = ["--steps", 2, "--batch", 8, "--microbatch", 2, "--seq-len", 32, "--dim", 64, "--layers", 4]
LAYOUTS = {
    "pp 2 x tp 2": ["--pp", 2, "--tp", 2],
    "pp 2 x dp 2": ["--pp", 2, "--dp", 2],
    "dp 2 x tp 2, optimizer": ["--dp", 2, "--tp", 2, "--sequence-parallel", "--shard", "optimizer"],
    "pp 2 x tp 2, none": ["--pp", 2, "--tp", 2, "--shard", "none"],
}

REAL = """
import json, os, runpy, sys
out, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(script))
import parallel
from tracker import Tracker
namespace = runpy.run_path(script)
Trainer, number = namespace["Trainer"], 0
plain = Trainer.forward_backward

def watched(self, text):
    global number
    number += 1
    if number == 1:
        return plain(self, text)
    groups = {axis: self.mesh[axis].get_group() for axis in parallel.AXES if self.mesh[axis].size() > 1}
    with Tracker(groups) as tracker:
        tracker.begin(self.named.values(), self.optimizer)
        plain(self, text)
        held = tracker.held_bytes_by_kind()
    with open(f"{out}.{os.environ['RANK']}", "w") as file:
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

def dump(traces):
    found = [[place, held, [[*key, nbytes] for key, nbytes in sent.items()]] for place, held, sent in traces]
    with open(out, "w") as file:
        json.dump(found, file)
    return []

dry_run.report_lines = dump
runpy.run_path(script, run_name="__main__")
"""


def traced(tmp_path, *flags, world):
    """{place on pp: (held, sent)} of a dry run."""
    (tmp_path / "fake.py").write_text(FAKE)
    command = [
        sys.executable,
        tmp_path / "fake.py",
        tmp_path / "out",
        ROOT / TRAIN,
        *flags,
        "--dry-run",
        "--world",
        world,
    ]
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL, timeout=100)
    found = json.loads((tmp_path / "out").read_text())
    return {place: (held, {(axis, name): nbytes for axis, name, nbytes in sent}) for place, held, sent in found}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dry_run_says_what_real_ranks_hold_and_send(layout, text, tmp_path):
    (tmp_path / "real.py").write_text(REAL)
    flags = [*FLAGS, *LAYOUTS[layout], "--data", text]
    run(tmp_path / "real.py", tmp_path / "real", ROOT / TRAIN, *flags, nproc=4).check()
    places = traced(tmp_path, *flags, world=4)
    assert len(places) == (2 if "pp" in layout else 1)
    for place, (held, sent) in places.items():
        real_held, real_sent = json.loads((tmp_path / f"real.{place * 2}").read_text())
        for kind in ("parameters", "gradients", "optimizer"):
            assert held[kind] == real_held[kind]
        known = {key: nbytes for key, nbytes in sent.items() if key[0] != "all"}
        assert known == {(axis, name): nbytes for axis, name, nbytes in real_sent if axis != "all"}


def test_a_dry_run_of_a_large_model_on_512_ranks_holds_what_the_formulas_say(tmp_path):
    """16 bytes for each parameter, over pp 8 x tp 8 x dp 8; with 16 of the 80 layers, two at a place, to be quick."""
    flags = ["--preset", "llama2-70b", "--layers", 16, "--pp", 8, "--tp", 8, "--seq-len", 256, "--batch", 64]
    places = traced(tmp_path, *flags, "--microbatch", 1, "--sequence-parallel", "--dtype", "bfloat16", world=512)
    assert list(places) == [0, 4, 7]
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    for place, (held, _) in places.items():
        norms, ends = 4 * 8192, 32000 * 8192 // 8 * (place in (0, 7))
        matrices = 2 * layer // 8 + ends + norms + 8192 * (place == 7)
        assert held["parameters"] == held["gradients"] == 4 * matrices // 8
        assert held["optimizer"] == pytest.approx(2 * held["parameters"], rel=1e-5)  # and counters of steps


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--pp 2 --tp 3 --world 8", "--pp 2 x --dp 1 x --tp 3 = 6 ranks, but 8 were started"),
        ("--layers 4 --pp 8 --world 8", "--layers 4 are fewer than --pp 8"),
    ],
)
def test_a_dry_run_of_an_impossible_layout_is_refused_in_one_line(flags, line):
    command = [sys.executable, str(ROOT / TRAIN), "--dry-run", *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert re.fullmatch(f"error: .*{re.escape(line)}.*\n", done.stderr)
