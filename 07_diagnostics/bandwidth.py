"""Is this link as fast as it should be? nccl-tests' table for gloo and NCCL, per axis of a mesh, with a verdict.

    torchrun --nproc-per-node 2 07_diagnostics/bandwidth.py
    torchrun --nnodes 2 --nproc-per-node 8 .. 07_diagnostics/bandwidth.py --mesh dp=2,tp=8 --json links.json

Look at the last line of each axis: what the link gives, what of it was reached, where to look when that is little.
Before it: alpha, what a message costs however small it is, and beta, what the link carries when messages are large.

    t = alpha + factor x S / beta        algbw = S / t        busbw = factor x algbw (NVIDIA/nccl-tests, PERFORMANCE.md)

All groups of an axis run at once, as in training. On every rank: gathered facts -> groups -> for each collective and
size: data, one call, #wrong; then batches of calls -> seconds, the same on all ranks -> rank 0 prints.
"""

import argparse
import importlib.util
import json
import os
import re
import sys
from datetime import timedelta
from math import inf, prod
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import wires
from transfers import FACTORS, UNITS, batch_seconds, fit_times, prepare, show_size, warm_up_transfer
from wires import Facts, Link, UsageError

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
DEFAULT_SIZES = {"cpu": "1K-16M", "cuda": "1K-1G"}
OF_THE_LINK = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")  # the verdict is on the fastest of these
FOR_PLANNING = {"pp": "send_recv", "cp": "send_recv"}  # what an axis does; others all_reduce
PLANNED = ("tp", "dp", "pp", "cp")  # axes that 06_hybrid/plan.py --links knows by name
LACKING = re.compile("not support|unsupported|not implement|does not have", re.I)


# ---- config ----
def parse_args() -> argparse.Namespace:
    add = (parser := argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)).add_argument
    add("--collectives", default=",".join(FACTORS), help="default: all; " + ", ".join(FACTORS))
    add("--sizes", help="1K-64M, or 1K,64K,1M: bytes as nccl-tests counts them; default: 1K-16M, on GPUs 1K-1G")
    add("--factor", type=int, default=4, help="from one size of a range to the next")
    add("--mesh", help="dp=2,tp=4, outermost first: measure each axis; default: all ranks together")
    add("--link", help="what the ranks are joined by, where the machine does not tell: 10gbe, dp=8xinfiniband-ndr, ..")
    add("--dtype", choices=DTYPES, default="float32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seconds", type=float, default=0.2, help="for each size of each collective, or 5 calls if they take longer")
    add("--timeout", type=float, default=600, help="seconds that a rank waits for another")
    add("--json", metavar="FILE", help="all figures; 06_hybrid/plan.py --links FILE reads it")
    add("--plot", metavar="FILE", help="draw them: FILE.png or FILE.svg")
    add("--list", action="store_true", help="the links that --link knows, and what they give")
    return parser.parse_args()


def read_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if not found or not int(found[1]):
        raise UsageError(f"--sizes {text!r} is no size: use bytes, K, M or G, as in 1K-64M or 1K,64K,1M")
    return int(found[1]) * UNITS[found[2].upper()]


def read_byte_sizes(text: str, factor: int) -> list[int]:
    """Returns the sizes of "1K-64M", by factors and the last one, or of "1K,64K"; ascending."""
    low, dash, high = text.partition("-")
    if not dash:
        return sorted({read_bytes(part) for part in text.split(",")})
    if factor < 2 or read_bytes(low) > read_bytes(high):
        raise UsageError(f"--sizes {text} --factor {factor}: use from small to large, and a factor of 2 or more")
    sizes = [read_bytes(low)]
    while sizes[-1] * factor < read_bytes(high):
        sizes.append(sizes[-1] * factor)
    return sorted({*sizes, read_bytes(high)})


def read_mesh(text: str | None, world_size: int) -> dict[str, int]:
    """Returns {axis: size}, outermost first; one axis "all" without --mesh."""
    if text is None:
        return {"all": world_size}
    pairs = [re.fullmatch(r"(\w+)=([1-9]\d*)", part.strip()) for part in text.split(",")]
    sizes = {pair[1]: int(pair[2]) for pair in pairs if pair}
    if len(sizes) != len(pairs):
        raise UsageError(f"--mesh {text!r}: use AXIS=SIZE,AXIS=SIZE with different names, as in dp=2,tp=4")
    if (product := prod(sizes.values())) != world_size:
        raise UsageError(f"--mesh {text} has {product} ranks, this job has {world_size}: use sizes of that product")
    return sizes


def check_flags(
    args: argparse.Namespace, world_size: int
) -> tuple[list[str], dict[str, int], dict[str, Link], list[int]]:
    """Returns (collectives, mesh, given links, sizes); refuses what cannot be measured, on every rank alike."""
    if world_size < 2:
        raise UsageError("1 rank has nobody to send to: use torchrun --nproc-per-node 2 bandwidth.py, or more")
    for name in ("seconds", "timeout"):
        if not 0 < getattr(args, name) < inf:
            raise UsageError(f"--{name} {getattr(args, name):g} must be above 0")
    names = [name.strip() for name in args.collectives.split(",")]
    if unknown := [name for name in names if name not in FACTORS]:
        raise UsageError(f"--collectives {unknown[0]!r} is none of {len(FACTORS)}: use {', '.join(FACTORS)}")
    mesh = read_mesh(args.mesh, world_size)
    given = wires.read_given(args.link, list(mesh)) if args.link else {}
    return names, mesh, given, read_byte_sizes(args.sizes, args.factor) if args.sizes else []


def mistake_in_files(args: argparse.Namespace) -> str:
    """What is wrong with the files that rank 0 has to write; "" if nothing is."""
    for flag, file in (("--json", args.json), ("--plot", args.plot)):
        if file and (not Path(file).resolve().parent.is_dir() or Path(file).is_dir()):
            return f"{flag} {file} cannot be written: use a file in a folder that exists"
    if args.plot and Path(args.plot).suffix not in (".png", ".svg"):
        return f"--plot {args.plot}: use FILE.png or FILE.svg"
    if args.plot and not importlib.util.find_spec("matplotlib"):
        return f"--plot {args.plot} needs matplotlib: pip install matplotlib"
    return ""


# ---- joining ----
def read_launcher() -> tuple[int, int, int, int]:
    """Returns (rank, world size, local rank, local ranks) as torchrun set them; (0, 1, 0, 1) without it."""
    given = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    if not any(given.values()):
        return 0, 1, 0, 1
    if not all(value.isdecimal() for value in given.values()) or not os.environ.get("MASTER_ADDR"):
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        raise UsageError(f"{shown} and MASTER_ADDR must be set, 3 of them to numbers: use torchrun")
    rank, world_size = int(given["RANK"]), int(given["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return rank, world_size, *local


def join_ranks(asked: str, timeout: float, local_rank: int, local_ranks: int, mistake: str) -> tuple[torch.device, str]:
    """Joins the process group, by NCCL where each local rank has a GPU, else by gloo; returns (device, backend).

    mistake: what rank 0 has to refuse. It tells the others before they wait for it.
    """
    gpus, device = torch.cuda.device_count(), torch.device("cpu")
    if asked == "cuda" and gpus < local_ranks:
        raise UsageError(f"{local_ranks} local ranks need as many GPUs, this node shows {gpus}: use --device cpu")
    if asked != "cpu" and gpus >= local_ranks:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)  # before init: NCCL uses the current device
    elif gpus and local_rank == 0:
        print(f"note: {gpus} GPUs unused, {local_ranks} ranks run on the CPU", file=sys.stderr)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timedelta(0, timeout))))
    except dist.DistError:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UsageError(f"0 answers at {where} in {timeout:g} s: is rank 0 up, and is that port its own?") from None
    store.set(f"bandwidth{rank}", mistake or backend)
    if mistake:
        raise UsageError(mistake)
    if (theirs := store.get("bandwidth0").decode()) not in ("gloo", "nccl"):
        raise UsageError(theirs)
    if theirs != backend:
        raise UsageError(f"this rank has {backend}, rank 0 {theirs}: mend its GPUs, or use --device cpu")
    device_id = device if backend == "nccl" else None
    dist.init_process_group(backend, None, timedelta(0, timeout), world_size, rank, store, device_id=device_id)
    return device, backend


def groups_along(sizes, axis):
    """Returns the lists of ranks that differ only in their place on that axis."""
    names = list(sizes)
    step = prod(sizes[name] for name in names[names.index(axis) + 1 :])
    starts = [rank for rank in range(prod(sizes.values())) if rank // step % sizes[axis] == 0]
    return [[start + i * step for i in range(sizes[axis])] for start in starts]


def number_nodes(identities):
    """Returns (node number of each rank, [host name of each node]); nodes count in the order of their first rank."""
    order = list(dict.fromkeys(identities))
    return [order.index(identity) for identity in identities], [identity.split("/")[0] for identity in order]


# ---- measuring ----
def row_of(name: str, size: int, group: dist.ProcessGroup, like: torch.Tensor, budget: float) -> Facts:
    """Checks and times a collective with one size, on all groups of the axis at once; returns the same on all ranks."""
    transfer = prepare(name, size, group, like)
    for _ in transfer.calls(1):
        pass
    wrong = torch.tensor(transfer.wrong(), device=like.device)
    dist.all_reduce(wrong)  # over all ranks: () -> elements that are wrong anywhere
    batches = batch_seconds(name, transfer, group, budget, like.device)
    seconds = median(batches)
    return {
        "size": transfer.size,
        "time_us": seconds * 1e6,
        "quartile_us": sorted(batches)[len(batches) // 4] * 1e6,
        "spread": (max(batches) - min(batches)) / seconds,
        "algbw_gb_s": transfer.size / seconds / 1e9,
        "busbw_gb_s": transfer.size * FACTORS[name](group.size()) / seconds / 1e9,
        "wrong": int(wrong),
    }


def fit_of(name: str, rows: list[Facts], n: int) -> Facts:
    """alpha and beta of a collective, from the lower quartile of each size's batches.

    A disturbance only adds, so the median is high on a busy machine; the fastest may have met a full token bucket.
    """
    if len({row["size"] for row in rows}) < 2:
        return {"alpha_us": rows[0]["quartile_us"], "beta_gb_s": None, "off": None}
    line = fit_times([row["size"] * FACTORS[name](n) for row in rows], [row["quartile_us"] / 1e6 for row in rows])
    return {"alpha_us": line.alpha * 1e6, "beta_gb_s": line.beta / 1e9 if line.beta < inf else None, "off": line.off}


def measure_axis(
    names: list[str], sizes: list[int], group: dist.ProcessGroup, like: torch.Tensor, budget: float
) -> Facts:
    """Prints the table; returns {collective: {rows, alpha_us, beta_gb_s, off}}, or {rows: [], lacks} of one that the
    backend has not."""
    print_once(" collective     |     size |    time us |     ± | algbw GB/s | busbw GB/s | #wrong")
    found: Facts = {}
    for name in names:
        try:
            # TCP opens its window by what it has sent: the largest first, so that small messages do not pay for that.
            warm_up_transfer(name, prepare(name, sizes[-1], group, like), group, like.device)
        except (RuntimeError, NotImplementedError) as error:  # on all ranks alike, before anything is sent
            if not LACKING.search(str(error)):
                raise
            found[name] = {"rows": [], "lacks": str(error).splitlines()[0]}
            print_once(f" {name:<14} | {dist.get_backend()} lacks it: {found[name]['lacks']}")
            continue
        rows = []
        for size in sizes if name != "barrier" else [0]:
            rows.append(row := row_of(name, size, group, like, budget))
            cells = f" {name:<14} | {show_size(row['size']):>8} | {row['time_us']:10.1f} | {row['spread']:5.0%}"
            rates = f" | {row['algbw_gb_s']:10.4g} | {row['busbw_gb_s']:10.4g} | {row['wrong']:6}"
            print_once(cells + (rates if row["size"] else ""))
        found[name] = {"rows": rows, **fit_of(name, rows, group.size())}
    return found


# ---- answer ----
def print_once(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def answer_axis(axis: str, groups: list[list[int]], nodes: list[int], found: Facts, link: Link | None) -> Facts:
    """An axis as --json has it. plan.py --links reads of it: axis, or link where that is null; alpha_us, busbw_gb_s."""
    crossing = [group for group in groups if len({nodes[rank] for rank in group}) > 1]
    answer: Facts = {
        "axis": axis if axis in PLANNED else None,
        "name": axis,
        "link": "network" if crossing else "node",
        "alpha_us": None,
        "busbw_gb_s": None,
        "groups": groups,
        "nodes": nodes,
        "shared_by": wires.sharing(groups, nodes),
        "hardware": link._asdict() if link else None,
        "verdict": None,
        "collectives": found,
    }
    rated = {name: one for name, one in found.items() if one["rows"] and one["rows"][-1]["size"]}
    if rated:
        judged = [name for name in OF_THE_LINK if name in rated] or [*rated]
        best = max(judged, key=lambda name: rated[name]["rows"][-1]["busbw_gb_s"])
        busbw = rated[best]["rows"][-1]["busbw_gb_s"]
        planned = rated.get(FOR_PLANNING.get(axis, "all_reduce"), rated[best])
        rate = planned["beta_gb_s"] or planned["rows"][-1]["busbw_gb_s"]
        answer |= {"alpha_us": planned["alpha_us"], "busbw_gb_s": rate}
        if link:
            shares = answer["shared_by"] * wires.leaving_a_node(best, (crossing or groups)[0], nodes)
            answer["verdict"] = wires.judge_link(best, busbw, rated.get("send_recv", {}).get("alpha_us"), link, shares)
    return answer


def fit_line(name: str, one: Facts, n: int, gives: float | None) -> str:
    steps = f" = {2 * (n - 1)} steps of {one['alpha_us'] / 2 / (n - 1):.1f}" if name == "all_reduce" else ""
    parts = [f" {name:<14}", f"alpha {one['alpha_us']:.1f} us{steps}"]
    if one["beta_gb_s"]:
        share = f", {one['beta_gb_s'] / gives:.0%} of the link" if gives else ""
        parts += [f"beta {one['beta_gb_s']:.4g} GB/s{share}", f"fit off by {one['off']:.0%} at most"]
    elif name != "barrier":
        parts += ["no beta: its times do not grow with the size" if one["off"] is not None else "no beta: 1 size"]
    return " | ".join(parts)


def lines_of(answer: Facts, why: str) -> list[str]:
    """The lines below an axis' table. why: the link is not known."""
    link, verdict, n = answer["hardware"], answer["verdict"], len(answer["groups"][0])
    gives = link["gb_s"] / answer["shared_by"] if link else None
    lines = [fit_line(name, one, n, gives) for name, one in answer["collectives"].items() if one["rows"]]
    if not link:
        return [*lines, f" link: unknown, {why}: name it with --link; --list has the names"]
    lines += [f" link: {link['name']} ({link['how']}), {link['gb_s']:g} GB/s each way"]
    lines += [f" verdict: {verdict['text']}"] if verdict else []
    return [*lines, *([f" try: {verdict['fix']}"] if verdict and verdict["fix"] else [])]


def head_line(axis: str, groups: list[list[int]], nodes: list[int]) -> str:
    across = any(len({nodes[rank] for rank in group}) > 1 for group in groups)
    shown = "; ".join(",".join(map(str, group)) for group in groups[:4]) + ("; .." if len(groups) > 4 else "")
    where = "across nodes" if across else "inside a node"
    return f"\n{axis} {len(groups[0])}, {where}: ranks {shown}" + (" at once" if len(groups) > 1 else "")


# ---- main ----
def measure_mesh(mesh, names, sizes, given, device, backend, args) -> list[Facts]:
    """Prints a table and a verdict for each axis; returns what --json has, on every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    facts: list[Facts] = [{}] * world_size
    dist.all_gather_object(facts, wires.collect_facts(device))
    nodes, hosts = number_nodes([one["node"] for one in facts])
    number = f"{world_size} ranks on {len(hosts)} node{'s' * (len(hosts) > 1)}"
    print_once(f"torch {torch.__version__} | {backend} | {device.type} | {number} | {args.dtype}")
    about = dict(torch=str(torch.__version__), backend=backend, device=device.type, dtype=args.dtype)
    about |= dict(world_size=world_size, hosts=hosts)
    like, answers = torch.zeros(1, dtype=DTYPES[args.dtype], device=device), []
    for axis, n in mesh.items():
        if n == 1:
            print_once(f"\n{axis} 1: nothing to measure")
            continue
        groups = groups_along(mesh, axis)
        print_once(head_line(axis, groups, nodes))
        made = [dist.new_group(ranks, timedelta(0, args.timeout)) for ranks in groups]  # each on every rank, in order
        mine = next(group for group, ranks in zip(made, groups) if rank in ranks)
        found = measure_axis(names, sizes, mine, like, args.seconds)
        link, why = given.get(axis), ""
        if link is None:
            link, why = wires.find_link([[facts[other] for other in group] for group in groups], backend)
        answers.append(answer_axis(axis, groups, nodes, found, link) | about)
        print_once("\n".join(lines_of(answers[-1], why)))
    return answers


def measure_job(args: argparse.Namespace) -> int:
    """Returns the exit code: 1 if an element was wrong."""
    rank, world_size, local_rank, local_ranks = read_launcher()
    names, mesh, given, sizes = check_flags(args, world_size)
    mistake = mistake_in_files(args) if rank == 0 else ""
    device, backend = join_ranks(args.device, args.timeout, local_rank, local_ranks, mistake)
    sizes = sizes or read_byte_sizes(DEFAULT_SIZES[device.type], args.factor)
    answers = measure_mesh(mesh, names, sizes, given, device, backend, args)
    if rank == 0 and args.json:
        Path(args.json).write_text(json.dumps(answers, indent=1))
    if rank == 0 and args.plot:
        from bandwidth_draw import draw_links

        draw_links(args.plot, answers)
    dist.destroy_process_group()  # no group of an axis is held any more: the last to hold one would wait for its thread
    return int(any(row["wrong"] for answer in answers for one in answer["collectives"].values() for row in one["rows"]))


def main() -> int:
    args = parse_args()
    try:
        if args.list:
            for name, row in wires.load_links()["link"].items():
                link = wires.make_link(name, None, "")
                print(f"{name:<15} {link.gb_s:6g} GB/s, {link.share:.0%} usual, {link.latency_us:4} us  {row['about']}")
            return 0
        return measure_job(args)
    except UsageError as error:
        print(f"[rank{os.environ.get('RANK', 0)}] error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
