"""The knowledge of causes.toml, ready to be searched for: `load` reads it, `finder` finds what a line may match.

A pattern's longest plain piece of text stands in every line that it matches. One search tree of all these pieces
passes over most lines; only where a piece is found is its regular expression tried.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from logs import UsageError

try:
    import tomllib as toml
except ModuleNotFoundError:  # Python 3.10
    try:
        import tomli as toml  # type: ignore[import-not-found, no-redef]
    except ModuleNotFoundError:
        toml = None  # type: ignore[assignment]

DIGITS = b"0123456789"
CAUSES = Path(__file__).with_name("causes.toml")
NOTES = {  # what else is read from a line, beside the causes
    "root": r"Root Cause \(first observed failure\)",  # torchrun's summary
    "speaker": r"rank +: (\d+) \(local_rank",  # in it, and in what torch.multiprocessing.spawn raises
    "spawned": r"Process (\d+) terminated with the following error",
    "end": "=====",
    "frame": 'File "',  # of a traceback
    "boxed frame": r"\.py:\d+ in ",
    "ignored": "Exception ignored in",
    "forced": r"Unable to shutdown process (\d+) via",  # torchrun itself sends SIGKILL to who ignores SIGTERM
    "waits in": r'distributed_c10d\.py", line \d+, in (all_\w+|broadcast|reduce\w*|gather|scatter|barrier)$',
    "blamed": r"^rank {6}(\d+)",  # below hang.py's verdict
    "header": r"^[\w.]*Error:$",  # the message is on the lines below
    "other header": r"^[\w.]*Exception:$",
    "bar": r"\d+/(\d+) \[.*it/s",  # a progress bar
    "slow bar": r"\d+/(\d+) \[.*s/it",
}


# ---- rules ----
class Rule(NamedTuple):
    cause: str
    level: str
    others: tuple[str, ...]  # classes that print the same
    judge: str  # the function that decides by the numbers, or ""
    errors: bool  # looks only at lines of errors
    check: str = ""  # else that of the class


class Pattern(NamedTuple):
    plain: bytes  # a piece of it, in lower case and without digits: no line without it can match
    regex: re.Pattern[str]
    name: str  # a class, or one of NOTES
    rule: Rule | None  # None: a clue of that class, or a note


def plain(pattern: str) -> bytes:
    """The longest piece of a regular expression that stands in every match, in lower case."""
    pattern = re.sub(r"\\.", "\0", pattern)
    while (shorter := re.sub(r"\((?:\?[:P]\w*)?[^()]*\)[?*+]?|\[[^\]]*\][?*+]?|\{[^}]*\}", "\0", pattern)) != pattern:
        pattern = shorter
    pieces = re.split(r".[?*]|\0|[.^$+\d]", pattern) if "|" not in pattern else [""]
    return max(pieces, key=len).lower().encode()


def load() -> tuple[dict[str, dict[str, Any]], list[Pattern]]:
    """Returns {class: its table} and all patterns: notes first, then those of harmless lines."""
    if toml is None:
        raise UsageError("Python 3.10 has no tomllib to read causes.toml: pip install tomli, or use Python 3.11")
    causes = toml.loads(CAUSES.read_text())
    words = ("finished", "succeeded", "trains")
    notes = [*NOTES.items(), *((name, text) for name in words for text in causes["none"][name])]
    patterns = [Pattern(plain(text), re.compile(text, re.I), name, None) for name, text in notes]
    for name, cause in causes.items():
        patterns += [Pattern(plain(text), re.compile(text, re.I), name, None) for text in cause.get("clues", [])]
        for table in cause.get("rule", []):
            level, others, judge = table.get("level", "cause"), tuple(table.get("or", ())), table.get("judge", "")
            rule = Rule(name, level, others, judge, table.get("errors", False), table.get("check", ""))
            patterns += [Pattern(plain(text), re.compile(text, re.I), name, rule) for text in table["says"]]
    if vague := [pattern.regex.pattern for pattern in patterns if len(pattern.plain) < 3]:
        raise UsageError(f"causes.toml: {vague[0]!r} holds no plain text of 3 letters: add some that every match has")
    harmful = {one: one.rule is None or one.rule.level != "benign" for one in patterns}
    return causes, sorted(patterns, key=lambda one: (one.name not in NOTES, harmful[one]))


# ---- search ----
def finder(patterns: list[Pattern]) -> Callable[[bytes], list[Pattern]]:
    """Returns the function that finds, of many patterns, those whose plain text is in a line: one search, not many."""
    tree: dict[Any, Any] = {}  # letter -> the letters that may follow; None: a text ends here
    for pattern in patterns:
        node = tree
        for letter in pattern.plain:
            node = node.setdefault(letter, {})
        node[None] = {}

    def alternatives(node: dict[Any, Any]) -> bytes:
        if None in node:
            return b""  # longer texts that begin alike are told apart below
        return b"(?:" + b"|".join(re.escape(bytes([letter])) + alternatives(node[letter]) for letter in node) + b")"

    stems = re.compile(alternatives(tree))
    by_stem = defaultdict(list)
    for number, pattern in enumerate(patterns):
        by_stem[stems.match(pattern.plain)[0]].append((number, pattern))  # type: ignore[index]  # it begins with one

    def find(line: bytes) -> list[Pattern]:
        seen, found = set(), stems.search(line)
        while found:
            seen.add(found[0])
            found = stems.search(line, found.start() + 1)
        hits = [pair for stem in seen for pair in by_stem[stem] if pair[1].plain in line]
        return [pattern for _, pattern in sorted(hits, key=lambda pair: pair[0])]

    return find
