"""How large may the microbatch be? The largest that keeps 20 % of the memory free, found by running your script.

    python 07_diagnostics/fit_batch.py -- train.py --microbatch {}
    python 07_diagnostics/fit_batch.py --ranks 8 --global-batch 512 -- train.py --batch {global} --microbatch {}

{} in the script's words is the microbatch of a rank, {accumulate} the microbatches per step, {global} = both x ranks.
Look at the last lines: the limit, and the microbatch beyond which memory brings no more throughput.

    try: microbatch 1, 2, 4 .. --> the ranks, in processes of their own --> a few optimizer steps --> peak, time; killed
           ^                                                                                              |
           +---------------- fit_search.py: the line through the peaks foresees the limit <---------------+

Exit code: 0 a limit was found; 1 not even the smallest microbatch fits; 2 bad use, or no optimizer steps to measure;
else the script's own: its first try failed, and not for want of memory.
"""

import argparse
import json
import math
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import fit_search
from fit_memory import host_limit
from fit_rank import run_rank
from fit_search import Try
from fit_try import Setting, run_try

MIB = 2**20
LEAST_STEPS = 3  # the second is the first with the optimizer's states; times are taken from the third on
PLACES = ("{global}", "{accumulate}", "{}")
USAGE = "-- train.py --batch {global} --microbatch {}"
GAPS = 0.1  # of the peak
NOISE = 0.01  # a difference between two peaks, or in the last step, that means nothing


class UsageError(ValueError):
    """The user's mistake: one line and exit code 2."""


class ScriptFailed(Exception):
    """The script's own failure: its output, one line, and its exit code."""


# ---- config ----
def parse_args() -> argparse.Namespace:
    how = dict(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = (parser := argparse.ArgumentParser(**how)).add_argument  # type: ignore[arg-type]
    add("--ranks", type=int, help="processes on this machine, as torchrun would start them; default: python alone")
    add("--dp", type=int, help="data-parallel ranks among them (default: all)")
    add("--flag", help="the script's flag for the microbatch, e.g. --flag=--microbatch; or put {} into its words")
    add("--keep", type=float, default=0.2, help="share of the memory to keep free (default 0.2)")
    add("--memory", help="4GiB, say: of a rank; default: its GPU's, else its share of the host's (or of its limit)")
    about = "samples per optimizer step that you want. A script with neither {global} nor {accumulate} in its words "
    add("--global-batch", type=int, help=about + "is to make them up by itself; only what divides them is tried")
    add("--accumulate", type=int, help="what {accumulate} is in a try (default 1; 2 with --global-batch)")
    about = "optimizer steps of a try (default 5); the time is the median from the third on"
    add("--steps", type=int, default=5, help=about)
    add("--first", type=int, default=1, help="microbatch of the first try (default 1)")
    add("--largest", type=int, default=4096, help="microbatch at which to stop (default 4096)")
    add("--grid", type=int, help="find the limit to so many samples; default: to 1 up to 16, then to an eighth or less")
    add("--timeout", type=float, default=600, help="seconds for a try (default 600)")
    add("--json", action="store_true", help="print one JSON object")
    add("script", nargs=argparse.REMAINDER, help=f"{USAGE}, or -- -m module ..")
    return parser.parse_args()


def parse_bytes(text: str) -> int:
    if not (match := re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(i?)B", text)):
        raise UsageError(f"--memory {text}: a number with MiB, GiB, MB or GB, such as 16GiB")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** (1 + "KMGT".index(prefix)))


def check_words(words: list[str], flag: str | None) -> list[str]:
    """The script's words, with a place for the microbatch."""
    words = words[1:] if words[:1] == ["--"] else words
    if not words or words == ["-m"]:
        raise UsageError(f"0 scripts given, 1 needed: fit_batch.py {USAGE}")
    if words[0] != "-m" and not Path(words[0]).is_file():
        raise UsageError(f"no file {words[0]}: give the path of your script, or -m and a module")
    places = sum("{}" in word for word in words[1:])
    if flag and places:
        raise UsageError(f"--flag {flag}, and {{}} in {places} of the script's words: use one of them")
    if not flag and not places:
        raise UsageError(f"0 places for the microbatch: put {{}} there ({USAGE}), or give --flag=--microbatch")
    return [*words, flag, "{}"] if flag else words


def check_numbers(args: argparse.Namespace) -> None:
    if "RANK" in os.environ:
        raise UsageError(f"RANK is {os.environ['RANK']}: without torchrun; --ranks N starts N ranks, anew for each try")
    for name in ("ranks", "dp", "global_batch", "accumulate", "first", "grid", "timeout"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} must be above 0")
    if not 0 <= args.keep < 1 or args.steps < LEAST_STEPS:
        raise UsageError(f"--keep {args.keep} from 0 to 0.99, --steps {args.steps} at least {LEAST_STEPS}")
    ranks, args.dp = args.ranks or 1, args.dp or args.ranks or 1
    if ranks % args.dp:
        raise UsageError(f"{ranks} ranks are not a multiple of --dp {args.dp}")
    if args.global_batch:
        if args.global_batch % args.dp:
            below = args.global_batch // args.dp * args.dp
            near = " or ".join(str(batch) for batch in (below, below + args.dp) if batch)
            raise UsageError(f"--global-batch {args.global_batch} is not divisible by {args.dp} ranks: use {near}")
        args.largest = min(args.largest, args.global_batch // args.dp)
    if args.first > args.largest:
        raise UsageError(f"--first {args.first} is above the largest microbatch, {args.largest}")


def has_batch(words: list[str]) -> bool:
    return any(place in word for place in ("{global}", "{accumulate}") for word in words)


def fill_words(words: list[str], microbatch: int, dp_size: int, accumulate: int) -> list[str]:
    values = (microbatch * dp_size * accumulate, accumulate, microbatch)
    for place, value in zip(PLACES, values):
        words = [word.replace(place, str(value)) for word in words]
    return words


# ---- search ----
def run_search(args: argparse.Namespace, words: list[str], setting: Setting) -> list[Try]:
    """All tries. The script's own failure ends the search at the first try, and is a limit at a later one."""
    count, terminal = 0, sys.stderr.isatty()
    # A script that makes up the global batch by itself takes only what divides it.
    divided = args.global_batch // args.dp if args.global_batch and not has_batch(words) else None
    points = fit_search.grid_points(args.largest, args.grid, divided)

    def attempt(microbatch: int) -> Try:
        nonlocal count
        count += 1
        if terminal:
            print(f"\rtry {count}: microbatch {microbatch:<12}", end="", file=sys.stderr, flush=True)
        one = run_try(fill_words(words, microbatch, args.dp, args.accumulate), microbatch, setting)
        in_use = "address already in use" in one.output.lower()
        if not one.of_memory and (count == 1 or in_use):
            way_out = ": a port that the script chose is taken; let it use MASTER_PORT" if in_use else ""
            starts = ": if it starts its ranks itself, leave that to --ranks" if one.code == 0 else ""
            text = f"{words[0]} at microbatch {microbatch}: {one.why}{way_out}{starts}"
            raise ScriptFailed(text, one.output, one.code or 2)
        return one

    try:
        return fit_search.search_limit(attempt, points, args.keep, args.first)
    finally:
        if terminal:
            print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)


# ---- report ----
def samples_per_s(one: Try, dp_size: int) -> float:
    return 1e3 * one.microbatch * dp_size * one.per_step / one.step_ms


def answer_of(tries: list[Try], args: argparse.Namespace) -> dict[str, Any]:
    """All that was found, as JSON has it; None is unknown."""
    limit, failed = fit_search.find_limit(tries)
    best = max((samples_per_s(one, args.dp) for one in tries if one.fits), default=math.inf)
    rows = []
    for one in sorted(tries):
        row: dict[str, Any] = dict(microbatch=one.microbatch, fits=one.fits, why=one.why, complete=one.complete)
        row |= dict(peak_bytes=one.peak or None, memory_bytes=None, free=None, per_step=None, step_ms=None)
        row |= dict(samples_per_s=None, of_best=None)
        if one.complete:
            speed = samples_per_s(one, args.dp)
            row |= dict(memory_bytes=one.total, free=one.free, per_step=one.per_step, step_ms=one.step_ms)
            row |= dict(samples_per_s=speed, of_best=speed / best if one.fits else None)
        rows.append(row)
    line, enough, batch = fit_search.peak_line(tries), None, None
    if limit:
        enough = fit_search.smallest_enough(tries, lambda one: 1 / samples_per_s(one, args.dp)).microbatch
        batch = split_batch(enough, limit.microbatch, args) if args.global_batch else None
    return dict(
        microbatch=limit and limit.microbatch,
        failed=failed and failed.microbatch,
        enough=enough,
        device="cuda" if any(one.on_gpu for one in tries) else "cpu",
        ranks=args.ranks or 1,
        dp=args.dp,
        keep=args.keep,
        fixed_bytes=line and line[0],
        bytes_per_sample=line and line[1],
        foreseen=fit_search.foresee(tries, args.keep),
        batch=batch,
        tries=rows,
        notes=notes_on(tries, limit, failed, batch),
    )


def split_batch(enough: int, limit: int, args: argparse.Namespace) -> dict[str, Any]:
    """The global batch as ranks x microbatch x accumulation: with the largest, and with one that is enough."""

    def split(microbatch: int) -> dict[str, int]:
        return dict(microbatch=microbatch, accumulate=args.global_batch // (args.dp * microbatch))

    largest = fit_search.largest_divisor(args.global_batch, args.dp, limit)
    smallest = fit_search.smallest_divisor(args.global_batch, args.dp, enough, limit)
    near = fit_search.near_batches(args.global_batch, args.dp, enough, limit) if largest < enough else []
    return dict(global_batch=args.global_batch, largest=split(largest), enough=split(smallest), near=near)


def notes_on(tries: list[Try], limit: Try | None, failed: Try | None, batch: dict[str, Any] | None) -> list[str]:
    notes = []
    if failed and not failed.of_memory:
        notes.append(f"not memory but the script set this limit, at microbatch {failed.microbatch}: {failed.why}")
    for small, large in fit_search.inversions(tries):
        if small.peak - large.peak > NOISE * small.peak:
            less = f"{(small.peak - large.peak) / MIB:,.0f} MiB less than {small.microbatch}"
            notes.append(f"microbatch {large.microbatch} took {less}: peaks vary by as much from run to run")
    if limit and not failed:
        notes.append(f"up to microbatch {limit.microbatch} none failed; --largest and --global-batch allow no more")
        if len(tries) > 1 and max(tries).peak - min(tries).peak < NOISE * limit.peak:
            notes.append("the peak hardly grows with the microbatch: is {} in the right place?")
    if limit and limit.gaps > GAPS * limit.peak:
        share = f"{limit.gaps / MIB:,.0f} MiB of the peak were reserved and not allocated"
        notes.append(f"{share}: PYTORCH_ALLOC_CONF=expandable_segments:True leaves fewer gaps")
    if limit and limit.grew > NOISE * limit.total:
        notes.append(f"memory still grew by {limit.grew / MIB:,.0f} MiB in the last step: use more --steps")
    if limit and batch and batch["largest"]["accumulate"] > limit.per_step == 1:
        notes.append("this batch accumulates, the tries did not: its gradients take memory; use {global}, {accumulate}")
    return notes


def print_answer(found: dict[str, Any], words: list[str], setting: Setting) -> None:
    total = max(row["memory_bytes"] or 0 for row in found["tries"]) or setting.memory or setting.host
    usable = f"{(1 - found['keep']) * total / MIB:,.0f} of {total / MIB:,.0f} MiB a rank may be used"
    print(f"{found['device']} | ranks {found['ranks']}, dp {found['dp']} | {usable}")
    print("microbatch | per step |  peak MiB |   free |  step ms | samples/s | of best |")
    for row in found["tries"]:
        cells = ["", f">{row['peak_bytes'] / MIB:,.1f}" if row["peak_bytes"] else "", *[""] * 4]
        if row["complete"]:
            cells = [f"x {row['per_step']}", cells[1][1:], f"{row['free']:.1%}", f"{row['step_ms']:.1f}"]
            cells += [f"{row['samples_per_s']:.1f}", f"{row['of_best']:.0%}" if row["fits"] else ""]
        shown = " | ".join(f"{cell:>{width}}" for cell, width in zip(cells, (8, 9, 6, 8, 9, 7)))
        print(f"{row['microbatch']:10} | {shown} | {row['why']}")
    lines = [("limit", say_limit(found))]
    if found["foreseen"]:
        line = f"peak = {found['fixed_bytes'] / MIB:,.1f} + {found['bytes_per_sample'] / MIB:,.2f} x microbatch MiB"
        lines += [("line", f"{line}, which is all that may be used at {found['foreseen']:.1f}")]
    if found["enough"]:
        share = {row["microbatch"]: f"{row['of_best']:.0%}" for row in found["tries"] if row["fits"]}
        text = f"microbatch {found['enough']} has {share[found['enough']]} of the best samples/s"
        lines += [("enough", f"{text}: more memory buys no more")]
    if batch := found["batch"]:
        splits = [batch["largest"], batch["enough"]]
        for one in splits[: 1 + (splits[0] != splits[1])]:
            product = f"{found['dp']} ranks x microbatch {one['microbatch']} x {one['accumulate']} accumulated"
            command = " ".join(fill_words(words, one["microbatch"], found["dp"], one["accumulate"]))
            lines += [(f"batch {batch['global_batch']}", f"{product}: {command}")]
        if near := " or ".join(map(str, batch["near"])):
            lines += [("", f"no microbatch from {found['enough']} on divides it; a global batch of {near} would do")]
    lines += [("note", note) for note in found["notes"]]
    print("\n".join(f"{name:<10} {text}" for name, text in lines))


def say_limit(found: dict[str, Any]) -> str:
    if not found["microbatch"]:
        ways = "shorter sequences, recomputed activations (02_ddp), ZeRO (05_zero), or another layout (06_hybrid)"
        return f"not even microbatch {found['failed']} fits: {ways}"
    failed = f"{found['failed']} did not" if found["failed"] else "none above was tried"
    return f"microbatch {found['microbatch']} left {found['keep']:.0%} free, {failed} (tries: {len(found['tries'])})"


# ---- main ----
def main() -> int:
    if sys.argv[1:2] == ["rank"]:  # in the place of `python script`
        run_rank(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
        return 0
    args = parse_args()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # on the way out the ranks are ended
    try:
        words = check_words(args.script, args.flag)
        check_numbers(args)
        args.accumulate = args.accumulate or (2 if args.global_batch and has_batch(words) else 1)
        memory = parse_bytes(args.memory) if args.memory else None
        host = host_limit() // (args.ranks or 1)
        setting = Setting(args.ranks, args.steps, args.keep, memory, host, args.timeout)
        tries = run_search(args, words, setting)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ScriptFailed as failure:
        text, output, code = failure.args
        print(f"{output}\nerror: {text}", file=sys.stderr)
        return code
    found = answer_of(tries, args)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print_answer(found, words, setting)
    return 0 if found["microbatch"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
