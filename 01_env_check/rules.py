"""What the facts mean: equal on every rank, large enough, known to be bad, as fast as the link. Pure functions."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

try:
    import tomllib as toml
except ModuleNotFoundError:  # Python 3.10
    try:
        import tomli as toml  # type: ignore[import-not-found, no-redef]
    except ModuleNotFoundError:
        toml = None  # type: ignore[assignment]

ISSUES = Path(__file__).with_name("known_issues.toml")
Facts = dict[str, Any]  # one rank's, as facts.collect returns them

CLOCK_LIMIT_S = 1.0  # logs of different nodes no longer line up
SHM_MIB = 1024  # NCCL's and the data loader's shared memory; Docker gives 64 MiB


class Line(NamedTuple):
    """One line of the table. verdict: OK, FINDING, or info (shown, not judged). remedy: what to do about it."""

    section: str
    name: str
    verdict: str
    text: str
    remedy: str = ""


# ---- naming ranks ----
def name_ranks(ranks: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def group(values: Sequence[Any]) -> dict[str, list[int]]:
    """Value as text -> the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault("none" if value is None else str(value), []).append(rank)
    return ranks


def same(section: str, name: str, values: Sequence[Any], remedy: str) -> Line:
    """A fact that every rank must share. A difference names the ranks: "ranks 0-3: 2.13.0; rank 4: 2.12.1"."""
    ranks = group(values)
    if len(ranks) == 1:
        return Line(section, name, "OK", *ranks)
    return Line(section, name, "FINDING", "; ".join(f"{name_ranks(r)}: {v}" for v, r in ranks.items()), remedy)


# ---- facts ----
def judge(facts: Sequence[Facts]) -> list[Line]:
    """Compares the facts of all ranks (in rank order) and judges each against what training needs."""
    return [*judge_software(facts), *judge_machines(facts), *judge_network(facts), *judge_gpus(facts)]


def column(facts: Sequence[Facts], name: str) -> list[Any]:
    """One fact of all ranks."""
    return [rank[name] for rank in facts]


def nodes(facts: Sequence[Facts]) -> dict[str, list[int]]:
    """Node -> its ranks."""
    return group(column(facts, "node"))


def judge_software(facts: Sequence[Facts]) -> list[Line]:
    """Versions must be equal."""
    wheel = "install the same version on every node, best from one lock file or one container image"
    names = ["python", "torch", "numpy", "deepspeed"]
    names += [name for name in ("cuda", "driver", "nccl") if any(column(facts, name))]
    return [same("software", name, column(facts, name), wheel) for name in names]


def judge_machines(facts: Sequence[Facts]) -> list[Line]:
    """Nodes, kernel, limits, CPUs; limits are judged only where they matter."""
    by_node, on_gpu = nodes(facts), any(rank["gpu"] for rank in facts)
    names = [f"{facts[ranks[0]]['host']}: {name_ranks(ranks)}" for ranks in by_node.values()]
    lines = [
        Line("machine", "nodes", "info", f"{len(by_node)} ({'; '.join(names[:8])}{'; ...' * (len(names) > 8)})"),
        same("machine", "kernel", column(facts, "kernel"), "boot the same kernel on every node"),
    ]

    def limited(name: str, fact: str, unit: str, enough: int | None, remedy: str) -> Line:
        """Enough on every rank, and the same on every rank. enough: None where it is only shown."""
        values = column(facts, fact)
        low = [r for r, value in enumerate(values) if enough is not None and value is not None and value < enough]
        if low:
            text = f"{name_ranks(low)}: {min(values[r] for r in low)}{unit}, below {enough}{unit}"
            return Line("machine", name, "FINDING", text, remedy)
        shown = ["unlimited" if value is None else f"{value}{unit}" for value in values]
        return same("machine", name, shown, "give every node the same limit")

    registers_memory = on_gpu and any(port["state"] == "ACTIVE" for rank in facts for port in rank["infiniband"])
    sockets = 200 + 16 * len(facts)  # descriptors: Python and torch, then a few sockets for each peer
    raise_shm = "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir with medium Memory at /dev/shm"
    raise_memlock = "ulimit -l unlimited (RDMA pins its buffers); Docker: --ulimit memlock=-1"
    lines.append(limited("/dev/shm", "shm_mib", " MiB", SHM_MIB if on_gpu else None, raise_shm))
    lines.append(limited("memlock", "memlock_kib", " KiB", 1 << 20 if registers_memory else None, raise_memlock))
    lines.append(limited("open files", "open_files", "", sockets, f"ulimit -n {max(65536, sockets)}"))
    lines += [cpu_share(facts, ranks) for ranks in by_node.values()]
    for rank, own in enumerate(facts):
        if own["gpu"] and own["gpu"].get("numa") is not None and own["gpu"]["numa"] not in own["numa"]:
            text = f"rank {rank} runs on NUMA node {own['numa']}, its GPU sits on node {own['gpu']['numa']}"
            lines.append(Line("machine", "GPU affinity", "FINDING", text, "torchrun --numa-binding node, or numactl"))
    threads = [f"{rank['threads']} a rank" for rank in facts]
    return [*lines, same("machine", "threads", threads, "export the same OMP_NUM_THREADS on every node")]


def cpu_share(facts: Sequence[Facts], ranks: list[int]) -> Line:
    """The CPUs that the ranks of one node may use: pinned to too few, or asked for more threads than there are."""
    allowed = {cpu for rank in ranks for cpu in facts[rank]["cpus"]}
    first = facts[ranks[0]]
    threads = sum(facts[rank]["threads"] for rank in ranks)
    text = f"{len(allowed)} of {first['cpu_count']} CPUs for {name_ranks(ranks)} on {first['host']}"
    if len(allowed) < min(len(ranks), first["cpu_count"]):
        return Line("machine", "affinity", "FINDING", text, "pin each rank to CPUs of its own, or drop taskset/numactl")
    if len(ranks) > 1 and threads > max(len(allowed), len(ranks)):
        return Line("machine", "affinity", "FINDING", f"{text}, {threads} threads", "export OMP_NUM_THREADS=1")
    return Line("machine", "affinity", "OK", text)


def judge_network(facts: Sequence[Facts]) -> list[Line]:
    """Host name, interface, InfiniBand, variables."""
    many = len(nodes(facts)) > 1
    lines = []
    found = [f"-> {address or 'nothing'}" for address in column(facts, "host_address")]
    text = "; ".join(f"{name_ranks(ranks)} {address}" for address, ranks in group(found).items())
    # The loopback trap: gloo and torchrun offer their peers the address of the host name, and it leads back home.
    loops = [(own["host_address"] or "127.").startswith(("127.", "::1")) for own in facts]
    bad = [r for r, own in enumerate(facts) if many and loops[r] and "GLOO_SOCKET_IFNAME" not in own["env"]]
    mend = "give the host name its network address in /etc/hosts, or set GLOO_SOCKET_IFNAME"
    verdict = "FINDING" if bad else "OK" if many else "info"
    lines.append(Line("network", "host name", verdict, f"{text} (loopback)" if bad else text, mend if bad else ""))
    used = [f"{rank['interface']}, {rank['interface_gbit'] or 'unknown'} Gbit/s" for rank in facts]
    if any(column(facts, "interface")):
        speeds = [f"{gbit} Gbit/s" for gbit in column(facts, "interface_gbit")]
        slow = same("network", "interface", speeds, "the same kind of network card on every node")
        ways = "; ".join(f"{name_ranks(ranks)} {way}" for way, ranks in group(used).items())
        lines.append(slow if slow.verdict == "FINDING" else Line("network", "interface", "info", ways))
    ports = [", ".join(f"{p['device']} {p['state']} {p['gbit']:g}" for p in rank["infiniband"]) for rank in facts]
    if any(ports):
        down = "ibstat; compare cables and switch ports of the nodes that differ"
        lines.append(same("network", "InfiniBand", [text or "none" for text in ports], down))
    for name in sorted({name for rank in facts for name in rank["env"]}):
        unlike = "export it on every node (torchrun passes on what its own shell had)"
        lines.append(same("network", name, [rank["env"].get(name, "(unset)") for rank in facts], unlike))
    return lines


def judge_gpus(facts: Sequence[Facts]) -> list[Line]:
    """One healthy card of the same kind for each rank."""
    lines = []
    for rank, own in enumerate(facts):
        if own["gpu_error"]:
            lines.append(Line("gpu", "start", "FINDING", f"rank {rank}: {own['gpu_error']}", "run nvidia-smi there"))
    crowded = [r for r, own in enumerate(facts) if own["gpus"] and own["device"] == "cpu" and own["asked"] == "auto"]
    if crowded:
        seen = facts[crowded[0]]["gpus"]
        text = f"{name_ranks(crowded)} fell back to the CPU: {seen} GPUs for more local ranks"
        remedy = f"--nproc-per-node {seen}; every rank must see all GPUs of its node (CUDA_VISIBLE_DEVICES)"
        lines.append(Line("gpu", "ranks per GPU", "FINDING", text, remedy))
    if not any(own["gpu"] for own in facts):
        return lines or [Line("gpu", "gpu", "info", "none in use: the ranks train on the CPU, over gloo")]
    for fact, remedy in {
        "name": "a job runs at the pace of its slowest card",
        "memory_mib": "the batch must fit the smallest card",
        "capability": "kernels and data types differ between these cards",
    }.items():
        lines.append(same("gpu", fact, [(own["gpu"] or {}).get(fact) for own in facts], remedy))
    fewer = "CUDA_VISIBLE_DEVICES differs, or a card fell off the bus"
    lines.append(same("gpu", "count", column(facts, "gpus"), fewer))
    for uuid, ranks in group([(own["gpu"] or {}).get("uuid") for own in facts]).items():
        if len(ranks) > 1 and uuid != "none":
            text = f"{name_ranks(ranks)} share {uuid}"
            remedy = "torch.cuda.set_device(local_rank); one rank a GPU"
            lines.append(Line("gpu", "ranks per GPU", "FINDING", text, remedy))
    for fact, text, remedy in (
        ("ecc_uncorrected", "uncorrected ECC errors", "reset the card (nvidia-smi -r); if they return, replace it"),
        ("rows_pending", "memory rows wait to be remapped", "reset the card to finish it"),
        ("rows_failed", "row remapping failed", "replace the card"),
    ):
        bad = [rank for rank, own in enumerate(facts) if own["gpu"] and own["gpu"].get(fact)]
        if bad:
            lines.append(Line("gpu", "memory health", "FINDING", f"{name_ranks(bad)}: {text}", remedy))
    if not all(own["nvml"] for own in facts):
        lines.append(Line("gpu", "NVML", "info", "links, ECC and Xid not read: pip install nvidia-ml-py"))
    return lines


def backend(facts: Sequence[Facts]) -> str:
    """nccl where every rank has a working GPU of its own, else gloo."""
    cards = [own["gpu"]["uuid"] if own["gpu"] else None for own in facts]
    return "nccl" if None not in cards and len(set(cards)) == len(cards) else "gloo"


def judge_clock(offsets: Sequence[tuple[float, float]]) -> Line:
    """offsets: (seconds from rank 0's clock, +- seconds) of each rank."""
    far = [rank for rank, (offset, error) in enumerate(offsets) if abs(offset) - error > CLOCK_LIMIT_S]
    widest, error = max(abs(offset) for offset, _ in offsets), max(error for _, error in offsets)
    if far:
        text = f"{name_ranks(far)}: {widest:.1f} s from rank 0"
        return Line("machine", "clock", "FINDING", text, "run chrony or ntpd: logs of these nodes do not line up")
    return Line("machine", "clock", "OK", f"at most {widest * 1e3:.1f} ms from rank 0, +- {error * 1e3:.1f} ms")


# ---- known-bad versions ----
def load_issues() -> list[dict[str, Any]]:
    """The rules of known_issues.toml. Raises ModuleNotFoundError on a Python 3.10 without tomli."""
    if toml is None:
        raise ModuleNotFoundError("Python 3.10 cannot read TOML: pip install tomli")
    return toml.loads(ISSUES.read_text(encoding="utf-8"))["issue"]


def version_key(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13, 0, 0); pre-releases count as their release."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in found.group(0).split(".")] if found else [0]
    return tuple((numbers + [0] * 4)[:4])


def in_range(version: str, bounds: str) -> bool:
    """Whether a version satisfies all of ">=2.25, <2.26.2"."""
    have = version_key(version)
    for operator, bound in re.findall(r"(<=|>=|==|<|>)\s*([\d.]+)", bounds):
        want = version_key(bound)
        if not {"<": have < want, "<=": have <= want, ">": have > want, ">=": have >= want, "==": have == want}[
            operator
        ]:
            return False
    return True


def conditions(own: Facts, facts: Sequence[Facts]) -> dict[str, Any]:
    """The facts of one rank under the names that the rules of known_issues.toml use."""
    peers = [other for other in facts if other["node"] == own["node"]]
    card = own["gpu"] or {}
    differs = bool(own["fabric_manager"] and own["driver"]) and own["fabric_manager"] != own["driver"]
    return {
        **own,
        **{f"env.{name}": value for name, value in own["env"].items()},
        "backend": backend(facts),
        "capability": card.get("capability"),
        "kernels_missing": card.get("has_kernels") is False,
        "multi_node": len(nodes(facts)) > 1,
        "several_gpus": sum(bool(peer["gpu"]) for peer in peers) > 1,
        "has_infiniband": bool(own["infiniband"]),
        "fabric_manager_differs": differs,
    }


def fits(fact: Any, wanted: Any) -> bool:
    """One condition. wanted: true or false; "*" for any value; a range as in in_range; or the value itself."""
    if isinstance(wanted, bool):
        return bool(fact) is wanted
    if fact is None:
        return False
    if wanted[0] in "<>=":
        return in_range(str(fact), wanted)
    return wanted in ("*", str(fact))


def match(issues: Sequence[dict[str, Any]], facts: Sequence[Facts]) -> list[Line]:
    """A line for each rule that fits at least one rank, naming the ranks."""
    known = [conditions(own, facts) for own in facts]
    lines = []
    for issue in issues:
        hit = [r for r, own in enumerate(known) if all(fits(own.get(f), want) for f, want in issue["when"].items())]
        if hit:
            verdict = "info" if issue.get("level") == "note" else "FINDING"
            text = f"{name_ranks(hit)}: {issue['symptom']}"
            lines.append(Line("known issues", issue["id"], verdict, text, f"{issue['remedy']} ({issue['source']})"))
    return lines
