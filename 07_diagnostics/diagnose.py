"""What is this training job bound by? Runs your script, unmodified, and looks at a few of its steps on every rank.

    torchrun --nproc-per-node 2 07_diagnostics/diagnose.py your_train.py --your --flags
    torchrun --nproc-per-node 2 07_diagnostics/diagnose.py --steps 8 --trace out --stop your_train.py --your --flags

Look at the last lines: verdict, evidence, what to try. They are printed to stderr as soon as they are measured; the
script goes on to its own end, unwatched, or ends there with --stop. Exit code: the script's own; 2 if that is 0 and
nothing could be measured, and for bad use.

    steps.py       where a step ends: the optimizer          capture.py    profiler, waits, stacks of a rank
    lanes.py       a rank's time: compute, communication ..   gather.py     the ranks' numbers, through the store
    skew.py        who waits for whom                         bottleneck.py thresholds, verdict, advice
"""

import argparse
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import gather
from bottleneck import find_bottlenecks, gather_facts
from loaders import Loaders
from machine import counts, nvml_counters
from pictures import write_pictures
from script import run_script
from skew import collective_rows, compare_ranks, leave_out_hiccup
from steps import Steps
from tables import full_report, report_object
from torch.optim.optimizer import register_optimizer_step_post_hook

PATIENCE_S = 60  # for the other ranks to have measured
PATIENCE_AT_END_S = 3  # .. when the script is over: they are, too, or are being ended


class UsageError(ValueError):
    """The user's mistake: one line and exit code 2."""


# ---- config ----
def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps that are measured (default 8)")
    about = "steps before them (default 3); one more settles the profiler"
    parser.add_argument("--skip", type=int, default=3, help=about)
    parser.add_argument("--json", metavar="FILE", help="write one JSON object; - for stdout, at the end")
    parser.add_argument("--trace", metavar="DIR", help="write trace.json.gz, for Perfetto, and timeline.png")
    parser.add_argument("--stop", action="store_true", help="end the script, with exit code 0, once it is measured")
    about = "a module --your --flags, in the place of a script"
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=about)
    parser.add_argument("script", nargs=argparse.REMAINDER, help="train.py --your --flags")
    args = parser.parse_args()
    args.script = args.script if args.module is None else ["-m", *args.module]
    return args


def check_use(args: argparse.Namespace) -> None:
    if not args.script or args.script == ["-m"]:
        raise UsageError("0 scripts given, 1 needed: diagnose.py train.py --your --flags")
    if args.script[0] != "-m" and not Path(args.script[0]).is_file():
        raise UsageError(f"no file {args.script[0]}: give the path of your script, or -m and a module")
    if args.steps < 1 or args.skip < 1:
        raise UsageError(f"--steps {args.steps} and --skip {args.skip} must be at least 1")
    if args.json not in (None, "-") and not Path(args.json).absolute().parent.is_dir():
        raise UsageError(f"--json {args.json} needs a folder that exists")
    if args.trace and Path(args.trace).is_file():
        raise UsageError(f"--trace {args.trace} is a file: give a folder")


# ---- a rank ----
class Diagnosis:
    """Measures this rank, tells the others, and reports if it is the first of those that could be measured."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.steps = Steps(args.skip, args.steps, self.begin, self.measured)
        self.store, self.rank, self.world_size = None, int(os.environ.get("RANK", 0)), 1
        self.loaders = Loaders()
        self.thread: threading.Thread | None = None
        self.failed = False  # to report
        self.text = ""
        self.over = False  # the script has ended

    def begin(self) -> None:
        self.store, self.rank, self.world_size = gather.find_store()
        self.before = gather.Before(counts(), nvml_counters(), self.loaders.made())

    def measured(self) -> None:
        steps = self.steps
        assert steps.recorded
        made, traced = self.loaders.made(), self.args.trace is not None
        own = self.rank, steps.recorded, steps.counted, steps.unrecorded_ms
        summary = gather.summarize(*own, self.before, made, traced)
        if self.store is not None:
            gather.put(self.store, summary)
        if self.rank == 0 or self.over:
            self.thread = threading.Thread(target=self.collect, args=(summary,), daemon=True)
            self.thread.start()
        if self.args.stop and not self.over:  # where all ranks are at one point: another may still need this one now
            register_optimizer_step_post_hook(self.end)

    def end(self, *_: Any) -> None:
        sys.exit(0)

    def collect(self, own: dict[str, Any]) -> None:
        """Waits for the others, and reports if no rank before this one has measured anything."""
        self.failed = True
        summaries = {self.rank: own}
        if self.store is not None:
            before = set(range(self.rank))
            if not (before and gather.wait_for(self.store, before, self.patience, 1)):
                after = set(range(self.rank + 1, self.world_size))
                there = gather.wait_for(self.store, after, self.patience, len(after))
                self.report(summaries | {rank: gather.take(self.store, rank) for rank in there})
        else:
            self.report(summaries)
        self.failed = False

    def patience(self) -> float:
        return PATIENCE_AT_END_S if self.over else PATIENCE_S

    def report(self, summaries: dict[int, dict[str, Any]]) -> None:
        hiccup = leave_out_hiccup(summaries)
        skew = compare_ranks(summaries)
        rows = collective_rows(summaries, skew)
        facts = gather_facts(summaries, skew, rows)
        found, notes = find_bottlenecks(facts), [hiccup] if hiccup else []
        if missing := sorted(set(range(self.world_size)) - summaries.keys()):
            notes.append(f"no word from rank {', '.join(map(str, missing))}: what follows is of the others")
        if blind := [rank for rank, one in summaries.items() if one["blind"]]:
            why = "the profiler saw no kernel: shares are the host's; is CUPTI allowed?"
            notes.append(f"rank {blind[0]} uses CUDA, and {why}")
        if (steps := summaries[min(summaries)]["num_steps"]) < self.args.steps:
            notes.append(f"{steps} of {self.args.steps} steps: the script ended")
        if self.args.trace:
            folder = Path(self.args.trace)
            folder.mkdir(parents=True, exist_ok=True)
            title = f"{found[0].verdict}: {found[0].evidence}"
            notes += write_pictures(folder, summaries, skew, title)
        print("\n".join(full_report(summaries, skew, facts, found, rows, notes)), file=sys.stderr, flush=True)
        if self.args.json:
            text = json.dumps(report_object(summaries, skew, found, rows, notes), indent=1)
            if self.args.json == "-":
                self.text = text  # for the end: the script may be writing
            else:
                Path(self.args.json).write_text(text + "\n")

    def finish(self) -> str:
        """After the script: reports what was measured of it. Returns why nothing was, or ""."""
        self.over = True
        if self.steps.capture and len(self.steps.counted) > 1:
            self.steps.finish()
        self.steps.detach()
        if self.thread:
            self.thread.join()
        if self.text:
            print(self.text, flush=True)
        return "" if self.steps.recorded else self.steps.why_not()


# ---- main ----
def own_modules() -> set[str]:
    """Names of the modules beside this one that are loaded."""
    files = [Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
    return {file.stem for file in files if file.parent == Path(__file__).parent}


def hide_own_frames(trace: TracebackType | None, own: set[str]) -> TracebackType | None:
    """A traceback without the frames of these modules, as the script would have had it."""
    entries = []
    while trace:
        file = Path(trace.tb_frame.f_code.co_filename)
        if file.parent != Path(__file__).parent or file.stem not in own:
            entries.append(trace)
        trace = trace.tb_next
    shown = None
    for one in reversed(entries):
        shown = TracebackType(shown, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return shown


def main() -> int | str | None:
    args = parse_args()
    try:
        check_use(args)
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return 2
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "20000")  # collectives that torch's flight recorder keeps, of 2000
    diagnosis = Diagnosis(args)
    diagnosis.steps.attach()
    own, shown = own_modules(), sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        trace = hide_own_frames(trace, own)
        shown(kind, error.with_traceback(trace), trace)

    sys.excepthook = show
    code: int | str | None = 0
    try:
        code = 1 if run_script(args.script) else 0
    except SystemExit as end:
        code = end.code
    finally:
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the other ranks when one fails
        why = diagnosis.finish()
    if why and diagnosis.rank == 0:
        print(f"diagnose.py: {why}", file=sys.stderr)
    if diagnosis.failed and not code:
        return 1
    return 2 if why and not code else code


if __name__ == "__main__":
    sys.exit(main())
