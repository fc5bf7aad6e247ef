"""Keeps what the GPU lane measures: one JSON file, and a table for the terminal and for GPU.md."""

import json
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    name: str
    measured: float
    least: float | None
    most: float | None

    @property
    def ok(self) -> bool:  # a nan is within no bound
        above = self.least is None or self.measured >= self.least
        return above and (self.most is None or self.measured <= self.most)

    @property
    def cells(self) -> list[str]:
        bounds = [f"{sign} {one:.4g}" for sign, one in ((">=", self.least), ("<=", self.most)) if one is not None]
        verdict = ("ok" if self.ok else "FAILED") if bounds else "recorded"
        return [self.name, f"{self.measured:.4g}", " and ".join(bounds), verdict]


HEAD = ["name", "measured", "bound", "ok"]


class Results:
    """card: what tests/gpu_card.py tells of the machine."""

    def __init__(self, file: Path, card: dict[str, Any]):
        self.file, self.card = file, card
        self.rows: list[Row] = []

    def record(self, name: str, measured: float, least: float | None = None, most: float | None = None) -> None:
        """Writes a measurement down, then fails the test if it is out of its bounds. Without bounds it is only kept."""
        self.rows.append(row := Row(name, measured, least, most))
        rows = [one._asdict() | {"ok": one.ok} for one in self.rows]
        self.file.write_text(json.dumps({"card": self.card, "rows": rows}, indent=1) + "\n")  # now: a run may die
        assert row.ok, f"{name}: {' '.join(row.cells[1:])}"

    def heading(self) -> str:
        card = self.card
        versions = f"driver {card['driver']}, torch {card['torch']}, CUDA {card['cuda']}, NCCL {card['nccl']}"
        return f"{card['count']} x {card['name']}, {card['memory_gib']:.1f} GiB, {versions}, {card['date']}"

    def table(self) -> str:
        rows = [HEAD, *(row.cells for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([self.heading(), *lines])

    def markdown(self) -> str:
        rows = [HEAD, ["---"] * len(HEAD), *(row.cells for row in self.rows)]
        return "\n".join([f"**{self.heading()}**", "", *(f"| {' | '.join(row)} |" for row in rows)])
