"""Fixtures: `train` runs a script once per (script, world size, flags) and shares what it printed, logged and saved."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import reference
import torch
from runner import ROOT, run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail unless a test ran on a GPU")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.require_gpu and not terminalreporter.stats.get("passed"):
        terminalreporter.write_line("no GPU test ran: this lane needs a machine with a GPU", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.option.require_gpu and not (reporter and reporter.stats.get("passed")):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2}  # small, but 2 blocks: with one, some faults do not show
STEPS, BATCH, SEQ_LEN = 6, 8, 32


class Trained(NamedTuple):
    rows: list[dict[str, Any]]  # one per optimizer step
    weights: dict[str, torch.Tensor]
    folder: Path  # holds metrics.jsonl and checkpoint.pt
    output: str  # rank 0's

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of real text with 21 windows: 2 steps of 8 an epoch and 5 windows over, so that 6 steps see 3 epochs."""
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_bytes(reference.text_of(None)[5000 : 5000 + 21 * SEQ_LEN + 5])
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
            saved = torch.load(folder / "checkpoint.pt", weights_only=True)
            done[key] = Trained(rows, saved["model"], folder, result.outputs[0])
        return done[key]

    return train


@pytest.fixture(scope="session")
def serial(text: str) -> Callable[..., reference.Run]:
    """The serial reference on the same text, once per data type."""
    done: dict[torch.dtype, reference.Run] = {}

    def serial(dtype: torch.dtype) -> reference.Run:
        if dtype not in done:
            done[dtype] = reference.train(STEPS, BATCH, SEQ_LEN, text, dtype, **SIZES)
        return done[dtype]

    return serial


@pytest.fixture
def plant(tmp_path: Path) -> Callable[..., Path]:
    """Plants a fault: copies a script and common/ and replaces pieces of its text; each must be there once."""

    def plant(script: str, *edits: tuple[str, str]) -> Path:
        source = (ROOT / script).read_text()
        for old, new in edits:
            assert source.count(old) == 1, f"{script} holds {old!r} {source.count(old)} times"
            source = source.replace(old, new)
        shutil.copytree(ROOT / "common", tmp_path / "common", dirs_exist_ok=True)
        copy = tmp_path / script
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(source)
        return copy

    return plant
