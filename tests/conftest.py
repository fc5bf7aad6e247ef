"""Fixtures: `train` runs a script once per (script, world size, flags) and shares what it printed, logged and saved."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
import reference
import safetensors.torch
import torch
from gpu_results import Results
from runner import ROOT, run

hypothesis.settings.register_profile("suite", deadline=None)  # a busy machine is no fault
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail unless a test ran on a GPU")
    about = "what the GPU lane measured (default gpu_results.json)"
    parser.addoption("--gpu-results", metavar="FILE", default="gpu_results.json", help=about)


RESULTS = pytest.StashKey[Results]()


@pytest.fixture(scope="session")
def results(pytestconfig: pytest.Config) -> Results:
    """The GPU lane's recorder, headed by what the card is and what its matmuls reach."""
    card = subprocess.run([sys.executable, ROOT / "tests/gpu_card.py"], check=True, stdout=subprocess.PIPE, timeout=120)
    file = Path(pytestconfig.option.gpu_results)
    pytestconfig.stash[RESULTS] = Results(file, json.loads(card.stdout))
    return pytestconfig.stash[RESULTS]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if results := config.stash.get(RESULTS, None):
        terminalreporter.section(f"GPU lane, kept in {results.file}")
        terminalreporter.write_line(f"{results.table()}\n\nfor tests/GPU.md:\n\n{results.markdown()}\n")
    if config.option.require_gpu and not terminalreporter.stats.get("passed"):
        terminalreporter.write_line("no GPU test ran: this lane needs a machine with a GPU", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.option.require_gpu and not (reporter and reporter.stats.get("passed")):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests share what was trained: one worker runs them. A page's commands share nothing, and come last."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if "test_readme.py" in nodeid else super()._split_scope(nodeid)

    return ByFile(config, log)


SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2}  # small, but 2 blocks: with one, some faults do not show
STEPS, BATCH, SEQ_LEN = 6, 8, 32


class Trained(NamedTuple):
    rows: list[dict[str, Any]]  # one per optimizer step
    weights: dict[str, torch.Tensor]
    folder: Path  # holds metrics.jsonl and the checkpoint
    output: str  # rank 0's

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of real text with 21 windows: 2 steps of 8 an epoch and 5 windows over, so that 6 steps see 3 epochs.

    Its letters are spread over all 256 values: ASCII lies in that half of a vocabulary that the first of two ranks has.
    """
    path = tmp_path_factory.mktemp("text") / "text.py"
    letters = reference.text_of(None)[5000 : 5000 + 21 * SEQ_LEN + 5]
    path.write_bytes(bytes(letter * 37 % 256 for letter in letters))
    return str(path)


@pytest.fixture(scope="session")
def flags(text: str) -> list[object]:
    sizes = [word for name, n in SIZES.items() for word in (f"--{name.replace('_', '-')}", n)]
    return ["--steps", STEPS, "--batch", BATCH, "--seq-len", SEQ_LEN, "--data", text, *sizes]


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory, flags: list[object]) -> Callable[..., Trained]:
    done: dict[tuple, Trained] = {}

    def train(script: str | Path, *more: object, nproc: int = 1) -> Trained:
        """Runs `script flags... more...`; a flag given twice counts as given last."""
        key = (str(script), nproc, *map(str, more))
        if key not in done:
            folder = tmp_path_factory.mktemp("run")
            metrics = folder / "metrics.jsonl"
            result = run(script, *flags, "--metrics", metrics, "--save", folder, *more, nproc=nproc).check()
            rows = [json.loads(line) for line in metrics.read_text().splitlines()]
            if (folder / "model.safetensors").exists():
                weights = safetensors.torch.load_file(folder / "model.safetensors")
            else:
                weights = torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
            done[key] = Trained(rows, weights, folder, result.outputs[0])
        return done[key]

    return train


@pytest.fixture(scope="session")
def serial(text: str) -> Callable[..., reference.Run]:
    """The serial reference on the same text, once per data type, steps and sizes."""
    done: dict[tuple, reference.Run] = {}

    def serial(dtype: torch.dtype, steps: int = STEPS, **sizes: int) -> reference.Run:
        key = (dtype, steps, *sorted(sizes.items()))
        if key not in done:
            all_sizes: dict[str, Any] = SIZES | sizes
            done[key] = reference.train(steps, BATCH, SEQ_LEN, text, dtype, **all_sizes)
        return done[key]

    return serial


@pytest.fixture
def plant(tmp_path: Path) -> Callable[..., Path]:
    """Plants a fault: copies a script's folder and common/ and replaces pieces of its text; each must be there once.

    An edit is (old, new) in the script, or (file, old, new) in a module beside it.
    """

    def plant(script: str, *edits: tuple[str, ...]) -> Path:
        copy = tmp_path / script
        for folder in ("common", Path(script).parent):
            shutil.copytree(ROOT / folder, tmp_path / folder, dirs_exist_ok=True)
        for *file, old, new in edits:
            edited = copy.with_name(file[0]) if file else copy
            source = edited.read_text()
            assert source.count(old) == 1, f"{edited.name} holds {old!r} {source.count(old)} times"
            edited.write_text(source.replace(old, new))
        return copy

    return plant
