"""Reads logs of any size, line by line: files, folders, standard input; tells rank and time of a line."""

import io
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

LONGEST = 1 << 16  # bytes of a line that are looked at
SAMPLE = 4096  # bytes that tell text from other files
LOGS = frozenset({".log", ".txt", ".out", ".err", ".json", ""})  # suffixes of the logs in a folder

PREFIX = re.compile(  # what launchers, log collectors and loggers put in front of a line
    r"""(?:\s*(?:
        \[pod/[^\]]*\] | \{"log":"                                # kubectl logs --prefix; Docker's files
      | \[?\d{4}[-/]\d\d[-/]\d\d[T_\ ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?\]?(?:\ (?:stdout|stderr)\ [FP])?(?=\s)  # Kubernetes
      | \[(?:rank|default)\ ?\d+\]: | \d{1,5}:(?=\s) | \[\d+,\d+\]<std\w+>:?  # torch, torchrun; srun --label; mpirun
      | [A-Z][a-z][a-z]\ [\ \d]\d\ \d\d:\d\d:\d\d\ \S+\ \S+:(?=\s) | [\w.-]+-\d+\s+\|(?=\s)   # syslog; docker compose
      | [\w.-]*\d:(?=\s+[A-Z\[]) | \[[a-z][\w.-]*\d\](?=\s) | \([^()]*pid=\d+[^()]*\)  # pdsh, [node1]; Ray
      | \d\d-\d\d\ [\d:.]+(?=\s) | \[\w+\.py:\d+\] | (?:ERROR|stderr|E)\b:?(?=\s) | [|\u2502]  # loggers; boxes
    ))*\s*""",
    re.VERBOSE,
)
COLOUR = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
RANKS = [  # where a line tells the rank that speaks, the most certain first
    re.compile(r"\[(?:rank|default)[ :]?(\d+)\]", re.I),
    re.compile(r"^(?:\[pod/[^\]]*\]\s*)?(?:\S+Z\s(?:(?:stdout|stderr) [FP] )?)?\s*(\d{1,5}):\s"),  # srun --label
    re.compile(r"^\[\d+,(\d+)\]<std"),  # mpirun --tag-output
    re.compile(r"\btask (\d+): |\blocal_rank: (\d+) \(pid|\bRank (\d+)\b.*\bWatchdog", re.I),
]
POD = re.compile(r"\[?pod/\S*?-(\d+)(?:/|\])")
MENTION = re.compile(r"\brank[:= ]+(\d+)\b", re.I)
RANK_OF_FILE = re.compile(
    r"rank[-_.]?(\d+)|(?:^|/)(\d+)/(?:std\w+\.log|error\.json)$|(?:^|[-_./])(\d{1,4})\.\w+$", re.I
)
TIME = re.compile(r"(?:\d{4}[-/]|\b[EWIF])(\d\d)[-/]?(\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?")


class UsageError(ValueError):
    """The user's mistake: one line and exit code 2."""


class Source(NamedTuple):
    name: str
    lines: Iterable[tuple[int, bytes]]  # numbered from 1
    rank: int | None = None
    time: float | None = None  # of all its lines


# ---- lines ----
def without_prefix(line: str) -> str:
    found = PREFIX.match(line)
    return line[found.end() :] if found else line


def first_number(text: str, *patterns: re.Pattern[str]) -> int | None:
    """The number that the first matching pattern finds."""
    for pattern in patterns:
        if found := pattern.search(text):
            return int(next(group for group in found.groups() if group))
    return None


def time_in(line: str) -> float | None:
    """Seconds since the start of the year, of the first time in the line."""
    if not (found := TIME.search(line)):
        return None
    month, day, hour, minute, second = map(int, found.groups()[:5])
    return (((month * 31 + day) * 24 + hour) * 60 + minute) * 60 + second + float(f"0.{found[6] or 0}")


# ---- reading ----
def as_text(name: str, stream: Any) -> Iterator[bytes]:
    """The stream in UTF-8, in pieces of at most LONGEST bytes that end with lines. UsageError: it is no text."""
    start = stream.peek(SAMPLE)[:SAMPLE]
    encoding = "utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    if encoding == "utf-8" and start.count(0) > len(start) / 4:
        encoding = "utf-16-le" if start[1::2].count(0) > start[::2].count(0) else "utf-16-be"
    sample = start[: len(start) // 2 * 2].decode(encoding, "replace")
    odd = sum(not (letter.isprintable() or letter in "\t\r\n\x1b\b\f") or letter == "\ufffd" for letter in sample)
    if odd > len(sample) / 5:
        raise UsageError(f"{name}: {odd} of the first {len(sample)} characters are no text: give a log, unpacked")
    if encoding == "utf-8":
        return iter(lambda: stream.readline(LONGEST), b"")
    text = io.TextIOWrapper(stream, encoding, errors="replace")
    return (piece.encode() for piece in iter(lambda: text.readline(LONGEST), ""))


def numbered(pieces: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    number, whole = 1, True  # whole: the piece begins a line
    for piece in pieces:
        if b"\r" in piece:  # progress bars
            yield from ((number, part) for part in piece.split(b"\r"))
        elif whole:
            yield number, piece
        whole = piece.endswith(b"\n")
        number += whole


def open_log(path: Path, several: bool) -> Source:
    """One log; or torchrun's error.json, a rank's call stack and message with the time of its failure."""
    rank = first_number(str(path), RANK_OF_FILE) if several else None
    if path.name == "error.json":
        try:
            message = json.loads(path.read_text(errors="replace"))["message"]
            extra = message["extraInfo"]
            lines = f"{extra['py_callstack']}\n{message['message']}".encode().splitlines()
            return Source(str(path), [*enumerate(lines, 1)], rank, float(extra["timestamp"]))
        except (ValueError, KeyError, TypeError):
            pass  # torn, or of another make: read as a log
    return Source(str(path), numbered(as_text(str(path), path.open("rb"))), rank)


def natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", str(path))]


def open_all(paths: list[str]) -> Iterator[Source]:
    """Each source when its turn comes, so that one file is open at a time."""
    if not paths:
        if sys.stdin.isatty():
            raise UsageError("0 logs given: explain.py FILE..., explain.py FOLDER, or explain.py < job.log")
        yield Source("stdin", numbered(as_text("stdin", sys.stdin.buffer)))
    for path in map(Path, paths):
        try:
            files = [path]
            if path.is_dir():
                files = [file for file in path.rglob("*") if file.suffix in LOGS and file.is_file()]
                files = sorted((file for file in files if file.stat().st_size), key=natural)
                if not files:
                    raise UsageError(f"{path}: 0 logs with content (*.log, *.txt, *.out, *.err): give another folder")
            for file in files:
                yield open_log(file, len(paths) > 1 or path.is_dir())
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}: give a log or a folder of logs") from None
