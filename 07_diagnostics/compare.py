"""Every technique side by side: runs 02 to 06, each script and variant, on one model, and shows that nothing changed.

    python 07_diagnostics/compare.py                         two ranks, on the GPUs where there are two, else on the CPU
    python 07_diagnostics/compare.py --only 03,04 --ranks 4         these folders; layouts grow with the ranks
    python 07_diagnostics/compare.py --list                         the rows, and the command of each
Look at the column `deviation`: the largest relative difference of a loss or a gradient norm, at any step, from those of
one process. It is float32's rounding in every row, or the row is wrong, and the exit code 1. What does change:
    step ms, x DDP   median over the steps after the second, and as a multiple of 02_ddp/train.py's
    state MiB        parameters, gradients and optimizer states of the rank that holds the most
    MB sent          of the rank that sends the most, in the last step, by nccl-tests' factors: 2(n-1)/n of the size for
                     an all_reduce, (n-1)/n of the full size for all_gather and reduce_scatter, 1 for a send
The scripts run as they are: losses, times and states come from their --metrics, bytes from observe.py beside them.
"""

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import forked
from layouts import FOLDERS, RANKS, Row, UsageError, choose_rows
from observe import observe

HERE = Path(__file__).parent
LIMITS = {"float32": 1e-5, "float64": 1e-9}  # rounding, amplified by a few steps of AdamW
SKIPPED_STEPS = 2  # in the times: they build buckets, states, plans of collectives
PICTURES = (".png", ".svg", ".pdf")


# ---- config ----
def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, choices=RANKS, default=2, help="processes of every row but the first (default 2)")
    add("--only", default=",".join(FOLDERS), metavar="02,03", help="folders; one process and DDP run in any case")
    add("--list", action="store_true", help="say what would run, and end")
    for flag, size in (("--steps", 5), ("--batch", 16), ("--seq-len", 128), ("--dim", 128), ("--layers", 4)):
        add(flag, type=int, default=size, help=f"of every row (default {size})")
    for flag, size in (("--heads", 4), ("--kv-heads", 2), ("--seed", 0)):
        add(flag, type=int, default=size, help=f"of every row (default {size})")
    add("--data", help="a file or a folder of text; default: the source of Python's standard library")
    add("--dtype", choices=tuple(LIMITS), default="float32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--timeout", type=float, default=120, help="seconds for one row (default 120)")
    add("--json", metavar="FILE", help="write all figures there")
    add("--picture", metavar="FILE", help="draw there: .png, .svg or .pdf (default compare.png, with matplotlib)")
    return parser.parse_args()


def check_comparison(args: argparse.Namespace) -> list[str]:
    """Returns the folders that were asked for; refuses, before anything runs, what cannot be compared."""
    if os.environ.get("RANK"):
        raise UsageError("RANK is set, and compare.py starts its ranks itself: use python, not torchrun")
    for name in ("batch", "seq_len", "dim", "layers", "heads", "kv_heads", "timeout"):
        if not getattr(args, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} must be above 0")
    if args.steps <= SKIPPED_STEPS:
        raise UsageError(f"--steps {args.steps} leaves none after the first {SKIPPED_STEPS}, to time: use 3 or more")
    folders = args.only.split(",")
    if unknown := [number for number in folders if number not in FOLDERS]:
        raise UsageError(f"--only {args.only}: {unknown[0]!r} is none of {', '.join(FOLDERS)}; use --only 02,03, say")
    if args.picture and not find_spec("matplotlib"):
        raise UsageError(f"--picture {args.picture} needs matplotlib: pip install matplotlib")
    if not args.picture and not args.list and find_spec("matplotlib"):
        args.picture = "compare.png"
    if args.picture and Path(args.picture).suffix not in PICTURES:
        raise UsageError(f"--picture {args.picture} must end in {', '.join(PICTURES)}")
    for flag, file in (("--json", args.json), ("--picture", args.picture)):
        if file and (Path(file).is_dir() or not os.access(Path(file).absolute().parent, os.W_OK)):
            raise UsageError(f"{flag} {file} cannot be written: name a file in a folder that exists and is yours")
    return sorted(set(folders))


def find_folders(folders: list[str]) -> None:
    """The scripts lie beside this folder, or nothing can be compared."""
    root, names = HERE.resolve().parent, [FOLDERS[number][0] for number in folders]
    missing = [name for name in names if not (root / name).is_dir()]
    if not any((place / "common").is_dir() for place in (root, root / names[0])):
        missing.append("common")
    if missing:
        raise UsageError(f"{root} lacks {', '.join(missing)}: copy {' '.join(missing)} there, beside 07_diagnostics")


def choose_cuda(args: argparse.Namespace) -> bool:
    """True if every rank has a GPU of its own: one device for all rows, so that they compare."""
    import torch

    num_gpus = torch.cuda.device_count()
    if args.device == "auto" and 0 < num_gpus < args.ranks:
        print(f"note: {num_gpus} GPUs unused, {args.ranks} ranks run on the CPU", file=sys.stderr)
    if args.device == "cuda" and num_gpus < args.ranks:
        raise UsageError(f"--ranks {args.ranks} need as many GPUs, this machine shows {num_gpus}: use --device cpu")
    return args.device != "cpu" and num_gpus >= args.ranks


# ---- running ----
def run_row(row: Row, args: argparse.Namespace, cuda: bool) -> dict[str, Any]:
    """Returns what a row's script wrote, or what went wrong with it, as `problem`, and its `output`."""
    if row.deepspeed and args.dtype == "float64":
        return {"missing": "float32 only"}
    if row.deepspeed and not find_spec("deepspeed"):
        return {"missing": "pip install deepspeed"}
    with tempfile.TemporaryDirectory(prefix="compare-") as place:
        metrics, sent = Path(place, "metrics"), Path(place, "sent")
        words = [str(HERE.resolve().parent / row.folder / row.script), *row.flags.split()]
        for name in ("steps", "batch", "seq_len", "dim", "layers", "heads", "kv_heads", "seed", "dtype", "timeout"):
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        words += ["--device", "cuda" if cuda else "cpu", "--metrics", str(metrics)]
        words += ["--data", str(Path(args.data).absolute())] if args.data else []
        if cuda:
            inside = [str(HERE.resolve() / "compare.py"), "observe", str(sent), str(args.steps)]
            ended = forked.run_launched([*inside, *words], row.ranks, Path(place), args.timeout)
        else:
            if row.deepspeed:
                forked.warm(deepspeed=True)  # once; these rows come last, so that no other has it
            ended = forked.run_forked(lambda: observe(sent, args.steps, words), row.ranks, Path(place), args.timeout)
        if ended.code:
            return {"problem": ended.problem, "output": ended.output, "code": ended.code}
        if not metrics.exists() or metrics.read_text().count("\n") < args.steps:
            return {"problem": f"exit code 0 without {args.steps} lines of metrics", "output": "", "code": 1}
        steps = [json.loads(line) for line in metrics.read_text().splitlines()]
        counts = [json.loads(Path(f"{sent}.{rank}").read_text()) for rank in range(row.ranks)]
    found = {name: [step[name] for step in steps] for name in ("loss", "grad_norm")}
    found |= {name: steps[-1][name] for name in ("state_mib", "peak_mib")}
    found |= {"step_ms": statistics.median(step["step_ms"] for step in steps[SKIPPED_STEPS:])}
    return found | {"bytes_sent": None if None in counts else max(counts)}


def deviation(found: dict[str, Any], reference: dict[str, Any]) -> float:
    """The largest relative difference of a loss or a gradient norm at any step; infinite for a missing step or nan."""
    largest = 0.0
    for name in ("loss", "grad_norm"):
        if len(found[name]) != len(reference[name]):
            return math.inf
        for ours, theirs in zip(found[name], reference[name]):
            difference = abs(ours - theirs) / abs(theirs) if theirs else math.inf
            largest = max(largest, difference if math.isfinite(difference) else math.inf)  # max() passes nan over
    return largest


@contextmanager
def progress(total: int) -> Iterator[Callable[[int, str], None]]:
    """Yields a function that takes how many rows are done and what runs next; silent where stderr is no terminal."""
    seen, bar = sys.stderr.isatty(), None
    if seen and find_spec("tqdm"):
        tqdm = import_module("tqdm").tqdm
        tqdm.monitor_interval = 0  # its thread might hold a lock while this process forks
        bar = tqdm(total=total, unit="row", leave=False)

    def show(done: int, name: str) -> None:
        if bar is not None:
            bar.n = done
            bar.set_description(name)
        elif seen:
            print(f"\r{done} of {total} rows, {name:70}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
        elif seen:
            print(f"\r{'':90}\r", end="", file=sys.stderr, flush=True)


def run_all(rows: list[Row], args: argparse.Namespace, cuda: bool) -> list[dict[str, Any]]:
    """Runs the rows, those of DeepSpeed last, and returns what was found in the order of the rows."""
    found: dict[int, dict[str, Any]] = {}
    order = sorted(range(len(rows)), key=lambda i: rows[i].deepspeed)
    with progress(len(rows)) as show:
        for done, i in enumerate(order):
            show(done, rows[i].command)
            found[i] = run_row(rows[i], args, cuda)
            if i == 0 and "problem" in found[0]:
                break
    if "problem" in found[0]:
        text = found[0]["output"]
        said = [line.partition("error: ")[2] for line in text.splitlines() if "] error: " in line]
        if found[0]["code"] == 2 and said:
            raise UsageError(said[0])
        print(f"{text}\none process failed, there is nothing to compare with: {found[0]['problem']}", file=sys.stderr)
        sys.exit(1)
    for i in order:
        if "loss" in found[i]:
            found[i]["deviation"] = deviation(found[i], found[0])
    return [found[i] for i in range(len(rows))]


# ---- report ----
def is_well(found: dict[str, Any], limit: float) -> bool:
    return found.get("deviation", math.inf) <= limit


def table_line(row: Row, found: dict[str, Any], ddp: dict[str, Any], limit: float, widths: tuple[int, int]) -> str:
    start = f"  {f'{row.script} {row.flags}'.strip():{widths[0]}} | {row.layout:{widths[1]}} |"
    if "loss" not in found:
        return f"{start} {found.get('missing') or 'FAILED: ' + found['problem']}"
    deviates = "reference" if row.ranks == 1 else f"{found['deviation']:.1e}"
    ratio = f"{found['step_ms'] / ddp['step_ms']:5.2f}" if "step_ms" in ddp else "    -"
    peak = "" if found["peak_mib"] is None else f" | {found['peak_mib']:8.1f}"
    sent = "      -" if found["bytes_sent"] is None else f"{found['bytes_sent'] / 1e6:7.2f}"
    figures = f"{found['loss'][-1]:6.4f} | {found['grad_norm'][-1]:9.4f} | {deviates:>9} | {found['step_ms']:7.1f}"
    wrong = "" if is_well(found, limit) else f" <-- above {limit:g}"
    return f"{start} {figures} | {ratio} | {found['state_mib']:9.2f}{peak} | {sent}{wrong}"


def print_rows(rows: list[Row], found: list[dict[str, Any]], limit: float) -> None:
    widths = max(len(f"{row.script} {row.flags}") for row in rows), max(len(row.layout) for row in rows)
    peak = " | peak MiB" if found[0]["peak_mib"] is not None else ""
    columns = f"{'layout':{widths[1]}} |   loss | grad_norm | deviation | step ms | x DDP | state MiB{peak} | MB sent"
    print(f"{'':{widths[0] + 2}} | {columns}")
    about = dict(FOLDERS.values())
    for i, (row, one) in enumerate(zip(rows, found)):
        if i == 0 or row.folder != rows[i - 1].folder:
            print(f"{row.folder}: {about[row.folder]}")
        print(table_line(row, one, found[1], limit, widths))


def print_verdict(rows: list[Row], found: list[dict[str, Any]], limit: float) -> bool:
    """Prints what failed, and how many rows are equal to one process; returns True if all are."""
    for row, one in zip(rows, found):
        if "problem" in one:
            print(f"\n{row.command} ({row.layout}) failed: {one['problem']}\n{one['output']}")
    compared = [one for row, one in zip(rows, found) if row.ranks > 1 and "missing" not in one]
    well = sum(is_well(one, limit) for one in compared)
    missing = [one["missing"] for one in found if "missing" in one]
    more = f"; {len(missing)} did not run: {missing[0]}" if missing else ""
    print(f"{well} of {len(compared)} rows within {limit:g} of one process, losses and gradient norms{more}")
    return well == len(compared)


# ---- main ----
def compare(args: argparse.Namespace) -> int:
    rows = choose_rows(args.ranks, check_comparison(args), args.batch, args.layers, args.heads)
    if args.list:
        for row in rows:
            print(f"{row.layout:18}  torchrun --nproc-per-node {row.ranks} {row.command}")
        return 0
    find_folders(sorted({row.folder[:2] for row in rows}))
    cuda = choose_cuda(args)
    if not cuda:
        forked.warm()
    import torch

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no rank is left behind
    device, model = "cuda" if cuda else "cpu", f"dim {args.dim}, {args.layers} layers, {args.dtype}"
    print(f"torch {torch.__version__} | {device} | {args.ranks} ranks | {model} | batch {args.batch} x {args.seq_len}")
    limit, found = LIMITS[args.dtype], run_all(rows, args, cuda)
    print_rows(rows, found, limit)
    all_well = print_verdict(rows, found, limit)
    if args.json:
        about = dict(torch=torch.__version__, device=device, limit=limit)
        lines = [row._asdict() | {"command": row.command} | one for row, one in zip(rows, found)]
        Path(args.json).write_text(json.dumps(about | {"arguments": vars(args), "rows": lines}, indent=1))
    if args.picture:
        from compare_draw import draw_comparison

        draw_comparison(args.picture, rows, found, limit)
    print(f"picture: {args.picture}" if args.picture else "no picture: pip install matplotlib")
    return 0 if all_well else 1


def main() -> int:
    if sys.argv[1:2] == ["observe"]:  # in the place of `python script`, under torchrun
        file, steps = sys.argv[2:4]
        observe(Path(file), int(steps), sys.argv[4:])
        return 0
    try:
        return compare(parse_args())
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    raise SystemExit(main())
