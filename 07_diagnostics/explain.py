"""What killed this job? Reads its logs and names the root cause, not the last line.

    python 07_diagnostics/explain.py < job.log
    python 07_diagnostics/explain.py rank0.log rank1.log      several ranks
    python 07_diagnostics/explain.py logs/                    a folder: torchrun --log-dir logs --redirects 3
    python 07_diagnostics/explain.py --list                   the causes it knows; --page prints them as a page

Read the first line: the cause. Then the rank that failed first, the line that says so, what to run to be sure, and
the way out. --json prints the same as one object. Exit code 0: a cause is named, or there is no fault. 1: something
failed, and no rule names it. 2: nothing that can be read; one line.

    line -> which rules' plain text is in it? -> their patterns -> a finding: cause, level, rank, time
    findings -> the gravest of each rank -> the rank that failed by itself, the earliest -> the answer

The knowledge is causes.toml. Every line is looked at once, in bounded memory.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from judges import JUDGES, watchdogs
from logs import COLOUR, MENTION, POD, RANKS, Source, UsageError, first_number, open_all, time_in, without_prefix
from patterns import DIGITS, Pattern, Rule, finder, load
from words import ERROR, EXCEPTION, GOES_ON, reports

LEVELS = ("verdict", "cause", "shared", "user", "waiting", "ended", "secondary", "trace", "sign", "benign")  # falling
OWN = ("verdict", "cause", "shared", "user")  # this rank failed by itself; else it waits for one that did, or misses it
STARTUP = {  # who trains afterwards has met
    "env_vars_missing", "port_in_use", "rendezvous_unreachable", "hostname_resolves_wrongly", "wrong_network_interface",
    "firewall_blocks_peer_ports",
}  # fmt: skip
ALL = -1  # ranks
KINDS = 100_000  # of lines that are remembered
LOOKS = 10_000  # at lines of one kind; then at every thousandth
MESSAGE = 5  # lines of an exception's message


# ---- config ----
def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="logs, or folders of logs (default: standard input)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--list", action="store_true", help="print the causes that it knows")
    parser.add_argument("--page", action="store_true", help="print the causes as a page (CAUSES.md)")
    return parser.parse_args()


# ---- findings ----
@dataclass
class Finding:
    rule: Rule
    order: int  # position in all that was read
    source: str
    number: int  # of its line
    text: str
    rank: int | None  # that speaks
    time: float | None
    failed: int | None = None  # another rank, of which it speaks
    last: int = 0  # where it was found again
    candidates: list[str] = field(default_factory=list)  # its cause, then what else prints the same


@dataclass
class Log:
    findings: dict[tuple[Rule, int | None], Finding] = field(default_factory=dict)  # the first of each
    clues: set[tuple[str, str]] = field(default_factory=set)  # (class, pattern)
    totals: set[int] = field(default_factory=set)  # of progress bars
    finished: dict[tuple[str, int | None], int] = field(default_factory=dict)  # (source, rank) -> where it ended well
    trained: dict[str, int] = field(default_factory=dict)  # source -> where it reported its last step
    first_failed: int | None = None  # as torchrun's summary says
    forced: set[str] = field(default_factory=set)  # pids of processes that torchrun killed
    calls: dict[int, str] = field(default_factory=dict)  # rank -> the collective in which its traceback ends
    num_lines: int = 0
    num_files: int = 0


@dataclass
class Place:
    """What stands above the line that is read, in the same source."""

    header: int = -MESSAGE  # the line on which the last exception's name stood alone
    header_rank: int | None = None  # whose it was
    speaker: int | None = None  # the rank of which torchrun's summary speaks
    in_root: bool = False  # is it the first that failed?
    in_traceback: bool = False
    ignored: bool = False  # Python ignores the exception that follows
    verdict: Finding | None = None


def promising(lines: Iterable[tuple[int, bytes]], find: Callable, log: Log) -> Iterator[tuple]:
    """Counts the lines, and yields (number, line, the patterns that may match it) where there are such patterns.

    They depend on the line's text without digits: remembered, since a log repeats itself but for its numbers.
    """
    remembered: dict[bytes, list] = {}  # kind of line -> [its patterns, how often it is still looked at]
    for number, line in lines:
        log.num_lines += 1
        kind = line.translate(None, DIGITS).lower()
        possible = remembered.get(kind)
        if possible is None:
            possible = [find(kind), LOOKS]
            if len(remembered) >= KINDS:
                remembered.clear()
            if len(kind) < 1000:
                remembered[kind] = possible
        if possible[0]:
            possible[1] -= 1
            if possible[1] >= 0 or possible[1] % (LOOKS // 10) == 0:
                yield number, line, possible[0]


def speaks(rule: Rule, text: str, in_message: bool = False) -> bool:
    """True if a rule may take this line for the words of an error. in_message: an exception's name stands above it."""
    if rule.level == "benign":
        return not EXCEPTION.match(text)
    return rule.level == "trace" or not rule.errors or in_message or ERROR.search(text) is not None


def scan(sources: Iterable[Source], patterns: list[Pattern]) -> Log:
    """Looks at every line once."""
    log, find = Log(), finder(patterns)
    for source in sources:
        log.num_files += 1
        place = Place()
        for number, line, possible in promising(source.lines, find, log):
            whole = COLOUR.sub("", line.decode("utf-8", "replace").rstrip())
            text = without_prefix(whole)
            guesses = (first_number(whole, *RANKS), place.speaker, source.rank, first_number(whole, POD))
            rank = next((guess for guess in guesses if guess is not None), None)
            in_message = number - place.header < MESSAGE and rank in (None, place.header_rank)
            if in_message:  # torch's [rank0]: stands before the first line of a message alone
                rank = place.header_rank
            for pattern in possible:
                rule, found = pattern.rule, pattern.regex.search(text)
                if not found:
                    continue
                if not rule:
                    note(pattern, found, rank, number, source.name, place, log)
                elif speaks(rule, text, in_message) and reports(text, found, rule.level, place.in_traceback):
                    if place.ignored:
                        place.ignored = not EXCEPTION.match(text)
                        break
                    time = source.time if source.time is not None else time_in(whole)
                    finding = Finding(rule, log.num_lines, source.name, number, text[:1000], rank, time)
                    if "rank" in found.groupdict():
                        finding.failed = int(found["rank"])
                    keep(log, finding)
                    if rule.level == "verdict":
                        place.verdict = finding
                    if rule.level == "benign":
                        break
    return log


def note(pattern: Pattern, found: re.Match, rank: int | None, number: int, source: str, place: Place, log: Log) -> None:
    """What a line tells beside faults."""
    match pattern.name:
        case "root" | "end":
            place.in_root, place.speaker = pattern.name == "root", None
        case "speaker" | "spawned":
            place.speaker = int(found[1])
            if log.first_failed is None and (place.in_root or pattern.name == "spawned"):
                log.first_failed = place.speaker
        case "header" | "other header":
            place.header, place.header_rank = number, rank
        case "frame" | "boxed frame":
            place.in_traceback = True
        case "ignored":
            place.ignored = True
        case "blamed":
            if place.verdict:
                place.verdict.failed = int(found[1])
        case "forced":
            log.forced.add(found[1])
        case "waits in":
            if rank is not None:
                log.calls[rank] = found[1]
        case "bar" | "slow bar":
            log.totals |= {int(found[1])} if len(log.totals) < 1000 else set()
        case "trains":
            log.trained[source] = log.num_lines
        case "finished" | "succeeded":
            log.finished[source, rank if pattern.name == "finished" else ALL] = log.num_lines
        case clue:
            log.clues.add((clue, pattern.regex.pattern))


def keep(log: Log, finding: Finding) -> None:
    """Keeps the first finding of a rule on a rank: the earliest where lines have times."""
    old, finding.last = log.findings.get((finding.rule, finding.rank)), finding.order
    if old:
        old.last = finding.order
    if old is None or (finding.time is not None and old.time is not None and finding.time < old.time):
        rule = finding.rule
        judged = JUDGES[rule.judge](finding.text, finding.rank) if rule.judge in JUDGES else []
        if judged is not None:
            finding.candidates = judged or [rule.cause, *rule.others]
            log.findings[rule, finding.rank] = finding


# ---- the answer ----
def weigh(log: Log) -> None:
    """Orders each finding's candidates: those with more clues in the logs first, else as the rule lists them."""
    clues = Counter(name for name, _ in log.clues)
    totals = sorted(log.totals)
    if any(0 < after - before <= max(5, after // 100) for before, after in pairwise(totals)):
        clues["uneven_inputs"] += 3  # progress bars of the ranks end at different steps
    if len({*log.calls.values()}) > 1:
        clues["rank_conditional_collective"] += 9
    if differ := watchdogs(finding.text for finding in log.findings.values() if finding.rule.judge == "watchdogs"):
        clues[differ] += 9
    for finding in log.findings.values():
        finding.candidates.sort(key=lambda cause: (cause != "unknown", -clues[cause]))


def gravest(findings: Iterable[Finding]) -> Finding:
    return min(findings, key=lambda finding: (LEVELS.index(finding.rule.level), finding.order))


def first_to_fail(findings: list[Finding], first_failed: int | None) -> Finding | None:
    """The rank that failed by itself, the earliest where times are known; else one that only waits or reports."""
    ranks: dict[int | None, list[Finding]] = {}
    for finding in findings:
        ranks.setdefault(finding.rank, []).append(finding)
    worst = [gravest(findings) for findings in ranks.values()]
    own = [finding for finding in worst if finding.rule.level in OWN]
    if own and gravest(own).rule.level == "verdict":
        return gravest(own)
    if not own:
        order = ("trace", "sign", "waiting", "ended", "secondary", "benign")
        return min(worst, key=lambda finding: (order.index(finding.rule.level), finding.order), default=None)
    times = [finding.time for finding in own if finding.time is not None]
    if len(times) == len(own):
        return min(own, key=lambda finding: (finding.time, finding.order))
    return next((finding for finding in own if finding.rank is not None and finding.rank == first_failed), gravest(own))


def overcome(finding: Finding, log: Log) -> bool:
    """What a job got over: a warning or a bad start, before it trains or fails otherwise; what precedes a good end."""
    source, rank, pid = finding.source, finding.rank, re.search(r"\bpid:? (\d+)", finding.text, re.IGNORECASE)
    if pid and pid[1] in log.forced:
        return True
    trains = finding.order < log.trained.get(source, 0)
    elsewhere = bool(log.trained) and source not in log.trained  # another rank's file has the steps
    if finding.rule.level != "benign" and GOES_ON.search(finding.text) and (trains or elsewhere):
        return True
    if finding.rule.cause in STARTUP and not EXCEPTION.match(finding.text):
        own = (one for one in log.findings.values() if one.rule.level in OWN and one.rule.cause not in STARTUP)
        if trains or (GOES_ON.search(finding.text) and any(one.order > finding.order for one in own)):
            return True
    end = max(log.finished.get((source, who), 0) for who in (rank, ALL))
    later = (one for one in log.findings.values() if one.source == source and one.rank in (rank, None))
    return finding.order < end and not any(one.last > end and one.rule.level != "benign" for one in later)


def explain(sources: Iterable[Source]) -> dict[str, Any]:
    """The answer as --json prints it. cause: a class of causes.toml, "unknown", or "none" where nothing failed."""
    causes, patterns = load()
    log = scan(sources, patterns)
    weigh(log)
    findings = [finding for finding in log.findings.values() if not overcome(finding, log)]
    finding = first_to_fail(findings, log.first_failed)
    cause, *others = finding.candidates if finding else ["none"]
    answer: dict[str, Any] = {"cause": cause, "family": causes[cause]["family"], "alternatives": [], "rank": None}
    if finding:
        graver = sorted(findings, key=lambda one: (LEVELS.index(one.rule.level), one.order))
        others += [*finding.rule.others, *(one.candidates[0] for one in graver if one.rule.level in LEVELS[:-2])]
        others = [other for other in dict.fromkeys(others) if other not in (cause, "unknown", "benign_warning")]
        same = (one.rank for one in graver if one.candidates[0] == cause and one.rank is not None)
        guesses = (finding.failed, finding.rank, next(same, log.first_failed), first_number(finding.text, MENTION))
        rank = next((guess for guess in guesses if guess is not None), None)
        answer |= {"alternatives": others[:5], "rank": rank, "evidence": finding.text}
        answer["where"] = f"{finding.source}:{finding.number}"
    else:
        answer |= {"evidence": "", "where": ""}
    answer |= {key: causes[cause][key] for key in ("means", "check", "fix", "source")}
    answer["check"] = (finding and finding.rule.cause == cause and finding.rule.check) or answer["check"]
    return answer | {"lines": log.num_lines, "files": log.num_files}


# ---- report ----
def report(answer: dict[str, Any]) -> str:
    size = f"{answer['lines']:,} lines of {answer['files']} file{'s' * (answer['files'] > 1)}"
    if answer["cause"] == "none":
        return f"no fault found in {size}"
    evidence = answer["evidence"] if len(answer["evidence"]) <= 240 else answer["evidence"][:240] + " ..."
    rows = {"cause": answer["cause"], "why": answer["means"], "rank": answer["rank"]}
    rows |= {"evidence": f"{answer['where']}: {evidence}", "check": answer["check"], "fix": answer["fix"]}
    rows |= {"or": ", ".join(answer["alternatives"]), "source": answer["source"], "read": size}
    return "\n".join(f"{name:<9} {text}" for name, text in rows.items() if text not in (None, ""))


def page(causes: dict[str, dict[str, Any]]) -> str:
    """CAUSES.md: what each cause says, why, how to be sure, and what to do."""
    lines = ["# Causes", "", "`python 07_diagnostics/explain.py --page` wrote this page from causes.toml.", ""]
    for family in dict.fromkeys(cause["family"] for cause in causes.values()):
        lines += [f"## {family}", ""]
        for name, cause in causes.items():
            if cause["family"] == family:
                lines += [f"### {name}", f"{cause['means'][0].upper()}{cause['means'][1:]}.", ""]
                shown = [table["yes"][0].splitlines()[-1].strip()[:200] for table in cause.get("rule", [])]
                lines += ["```text", *shown, "```"] if shown else []
                lines += [f"- Check: `{cause['check']}`", f"- Fix: {cause['fix']}", f"- Source: {cause['source']}", ""]
    return "\n".join(lines)


# ---- main ----
def main() -> int:
    args = parse_args()
    try:
        if args.list or args.page:
            causes, _ = load()
            print(page(causes) if args.page else "\n".join(f"{name:<32} {causes[name]['means']}" for name in causes))
            return 0
        answer = explain(open_all(args.paths))
        if not answer["lines"]:
            raise UsageError("0 lines read: keep what the job writes to standard error (torchrun --redirects 3)")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(answer, indent=1) if args.json else report(answer))
    return int(answer["cause"] == "unknown")


if __name__ == "__main__":
    raise SystemExit(main())
