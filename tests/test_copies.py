"""Every numbered folder runs when it is copied out, with common/ beside it or inside it."""

import ast
import json
import os
import shutil
import subprocess
import sys

import pytest
from emulated import reason_to_skip
from runner import ROOT

MODEL = "--steps 1 --batch 2 --seq-len 8 --dim 16 --layers 2 --heads 2 --kv-heads 1"
SMALLEST = {  # the quickest flags of each script; an entry "folder/script" goes before one of the script's name alone
    "train.py": MODEL,
    "from_scratch.py": MODEL,
    "uneven.py": "--steps 1 --batch 2",
    "ragged.py": "--steps 1 --batch 2",
    "batch_norm.py": "--steps 1 --batch 2",
    "batch_size.py": "",
    "all_gather.py": "--steps 1 --batch 2 --seq-len 8 --dim 8",
    "crossover.py": "--widths 16 --batches 1 --seq-len 8 --repeats 1",
    "fsdp.py": MODEL,
    "picture.py": "--dim 8 --layers 1",
    "simulate.py": "--pp 2 --microbatches 2",
    "check.py": "--brief",
    "cluster.py": "--nodes 1 --each -- hostname",
    "plan.py": "--model gpt2 --gpus 8 --gpu a100-40gb --seq-len 1024 --batch 64",
    "explain.py": "--list",
    "hang.py": "lab --list",
    "labs.py": "well",
    "bandwidth.py": "--list",
    "compare.py": "--list",  # to run, it needs the folders that it compares
    "fit_batch.py": "--help",
    "slow.py": "list",
    "diagnose.py": "--help",
}
COMMENT = "# copied this folder out? copy common/ beside it or into it"


def is_guard(node):
    return isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)


FOLDERS = sorted(path.name for path in ROOT.glob("0[1-7]_*") if path.is_dir())
SCRIPTS = [  # the files that are run, not imported
    f"{path.parent.name}/{path.name}"
    for path in sorted(ROOT.glob("0[1-7]_*/*.py"))
    if any(map(is_guard, ast.parse(path.read_text()).body))
]


# All scripts of a folder reach common/ by the same two lines (tests/test_style.py), so inside it one of them is enough.
INSIDE = [min((s for s in SCRIPTS if s.startswith(folder)), key=lambda s: "/train.py" not in s) for folder in FOLDERS]


def copy(folder, place):
    shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns(".*", "__pycache__"))


# A stranger to this repository, who imports torch once: each script runs in a fork, as `python script flags..` would.
WARM = """
import json, os, runpy, signal, sys
import torch, torch._dynamo
torch.set_num_threads(1)
for line in sys.stdin:
    script, flags, elsewhere = json.loads(line)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            signal.alarm(120)  # one that hangs dies
            os.chdir(elsewhere)
            for number, name in enumerate(("in", "out", "err")):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
            torch.set_num_threads(1)
            os.environ["HOME"] = elsewhere
            sys.argv, sys.path[0] = [script, *flags], os.path.dirname(script)
            runpy.run_path(script, run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
ENV = {"PATH": os.defpath, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def warm():
    stranger = [sys.executable, "-c", WARM]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(stranger, cwd="/", env=ENV, **pipes) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def start(warm, tmp_path):
    """start(script): a script of tmp_path/project with its smallest flags; from elsewhere, knowing no repository.
    Returns (exit code, stdout, stderr).
    """

    def start(script):
        flags = SMALLEST.get(script, SMALLEST.get(script.split("/")[1]))
        assert flags is not None, f"{script} is new: give its quickest flags an entry in SMALLEST"
        (elsewhere := tmp_path / "elsewhere").mkdir()
        warm.stdin.write(json.dumps([str(tmp_path / "project" / script), flags.split(), str(elsewhere)]) + "\n")
        warm.stdin.flush()
        code = int(warm.stdout.readline())
        return code, (elsewhere / "out").read_text(), (elsewhere / "err").read_text()

    return start


def test_every_folder_has_a_script_to_run():
    assert sorted({script.split("/")[0] for script in SCRIPTS}) == FOLDERS
    assert FOLDERS


@pytest.mark.parametrize(
    ("script", "placement"), [*((script, "beside") for script in SCRIPTS), *((script, "inside") for script in INSIDE)]
)
def test_copied_folder_runs_with_common(script, placement, start, tmp_path):
    if script.endswith("/cluster.py") and reason_to_skip():
        pytest.skip(reason_to_skip())
    project, folder = tmp_path / "project", script.split("/")[0]
    copy(folder, project)
    copy("common", project if placement == "beside" else project / folder)
    code, stdout, stderr = start(script)
    # check.py ends with 1 where it finds a fault of this machine, which is not the copy's.
    assert code in ((0, 1) if script.endswith("/check.py") else (0,)), stderr
    assert "Traceback" not in stderr, stderr
    assert stdout.strip()


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if not folder.startswith("07")])
def test_copy_without_common_says_what_to_copy(folder, start, tmp_path):
    copy(folder, tmp_path / "project")
    code, _, stderr = start(next(script for script in INSIDE if script.startswith(folder)))
    assert code == 1
    assert COMMENT in stderr
    assert "No module named 'common'" in stderr


def test_diagnostics_need_no_common(start, tmp_path):
    copy("07_diagnostics", tmp_path / "project")
    code, _, stderr = start("07_diagnostics/explain.py")
    assert code == 0, stderr
