"""The wires: does each collective deliver the right values, how fast is it, how fast is each pair of ranks?

busbw and its factors: NVIDIA/nccl-tests, doc/PERFORMANCE.md. Sizes are bytes, speeds GB/s (1e9 bytes).
"""

import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rules import Facts, Line, backend, name_ranks, nodes

# Renamed in torch 2.13, where the old names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

WIDTH = 64  # elements that one rank sends to one other in the tests of values
LARGE = {"cpu": 8 << 20, "cuda": 256 << 20}  # bytes of a large message
SENDS = 6  # messages in each direction of a pair
SWEPT_RANKS = 64  # a larger job sweeps the pairs of one rank per node
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}

# Nominal GB/s in one direction. NVLink: per link, by compute capability; 6, 12, 4, 18 and 18 links a card make
# 150 (V100), 300 (A100), 56 (RTX 3090), 450 (H100) and 900 (B200). PCIe: a x16 slot, by generation, after encoding.
# Source: stas00/ml-engineering, network and accelerator chapters @ 744d01e; networks: their own line rate / 8.
NVLINK_GB_S = {"7.0": 25.0, "8.0": 25.0, "8.6": 14.06, "9.0": 25.0, "10.0": 50.0}
PCIE_GB_S = {3: 16.0, 4: 31.0, 5: 63.0, 6: 121.0}

# The least share of the nominal link under NCCL: below it is more than protocol overhead. Without peer-to-peer a byte
# crosses PCIe twice, and a core has to carry TCP.
LEAST_SHARE = {"NVLink": 0.5, "InfiniBand": 0.5, "PCIe": 0.25, "Ethernet": 0.25}
FLOOR_GB_S = 0.005  # gloo on the CPU: a 25th of 1 Gbit/s Ethernet; a loaded laptop's loopback is 50 x faster
SLOW_SHARE = 0.5  # of the median of all links of its kind names a bad link
LOOPBACK_SHARE = 0.25  # the same inside a machine, where two processes may have to share one CPU core
LATENCY_LIMIT_S = {"nccl": 0.01, "gloo": 0.5}

# ---- right values? ----
# In a sum every rank speaks in a row of its own, with zeros from the others, so that a wrong row names its sender; in
# the last row all speak at once. (name of the sender, what arrived, what should have):
Arrived = list[tuple[str, torch.Tensor, torch.Tensor]]


def says(source: int, to: int, like: torch.Tensor) -> torch.Tensor:
    """What rank `source` sends to rank `to`: (WIDTH,) whole numbers from 1 to 61, exact in bfloat16."""
    return ((torch.arange(WIDTH, device=like.device) * 3 + source * 7 + to * 5) % 61 + 1).to(like.dtype)


def to_sum(rank: int, to: int, rows: torch.Tensor) -> torch.Tensor:
    """(n + 1, WIDTH) that rank contributes to a sum which rank `to` receives."""
    rows = torch.zeros_like(rows)
    rows[rank] = says(rank, to, rows)
    rows[-1] = 1 if rank < 256 else 0  # bfloat16 counts in ones up to 256
    return rows


def from_sum(rows: torch.Tensor, to: int) -> Arrived:
    """Takes the sum apart again: a row for each sender, and the row of all."""
    n = len(rows) - 1
    senders = [(str(source), rows[source], says(source, to, rows)) for source in range(n)]
    return [*senders, ("all", rows[n], torch.full_like(rows[n], min(n, 256)))]


def exchange(name: str, rank: int, n: int, rows: torch.Tensor) -> Arrived:
    """Runs one collective among n ranks. rows: zeros (n + 1, WIDTH) of the data type and device to test."""
    if name == "all_reduce":
        rows = to_sum(rank, 0, rows)
        dist.all_reduce(rows)  # (n + 1, WIDTH) summed over all ranks
        return from_sum(rows, 0)
    if name == "reduce_scatter":
        full = torch.cat([to_sum(rank, to, rows) for to in range(n)])
        reduce_scatter_single(rows, full)  # (n * (n + 1), WIDTH) -> own (n + 1, WIDTH), summed over all ranks
        return from_sum(rows, rank)
    if name == "all_gather":
        all_gather_single(rows[:n].view(-1), says(rank, 0, rows))  # (WIDTH,) of each rank -> (n, WIDTH)
        return [(str(source), rows[source], says(source, 0, rows)) for source in range(n)]
    if name == "all_to_all":
        mine = torch.stack([says(rank, to, rows) for to in range(n)])
        dist.all_to_all_single(rows[:n], mine)  # row `to` of each rank -> row `source` there
        return [(str(source), rows[source], says(source, rank, rows)) for source in range(n)]
    if name == "broadcast":
        roots = range(min(n, 8))
        for root in roots:
            if rank == root:
                rows[root] = says(root, 0, rows)
            dist.broadcast(rows[root], root)  # (WIDTH,) of the root -> every rank
        return [(str(root), rows[root], says(root, 0, rows)) for root in roots]
    after, before = (rank + 1) % n, (rank - 1) % n  # send/recv, once round the ring
    for sending in (rank % 2 == 0, rank % 2 == 1) if n > 1 else ():  # even ranks send first, odd receive: no deadlock
        if sending:
            dist.send(says(rank, after, rows), after)
        else:
            dist.recv(rows[before], before)
    return [(str(before), rows[before], says(before, rank, rows))] if n > 1 else []


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send/recv")


def wrong_values(name: str, rank: int, n: int, device: torch.device) -> dict[str, Any]:
    """Data type -> {"from": senders whose values arrived wrong here, "example": text}; empty if all is right."""
    wrong = {}
    for label, dtype in DTYPES.items():
        arrived = exchange(name, rank, n, torch.zeros(n + 1, WIDTH, dtype=dtype, device=device))
        bad = [(sender, got, want) for sender, got, want in arrived if not torch.equal(got, want)]
        if bad:
            _, got, want = bad[0]
            at = int((got != want).nonzero()[0])
            example = f"{got[at].item():g} instead of {want[at].item():g}"
            wrong[label] = {"from": [sender for sender, _, _ in bad], "example": example}
    return wrong


def judge_values(name: str, wrong: Sequence[dict[str, Any]]) -> Line:
    """wrong: what wrong_values found on each rank. Names the ranks that hold them, and the only sender."""
    receivers = [rank for rank, found in enumerate(wrong) if found]
    if not receivers:
        return Line("collectives", name, "OK", f"{', '.join(DTYPES)}: right on {name_ranks(range(len(wrong)))}")
    labels = [label for label in DTYPES if any(label in found for found in wrong)]
    senders = {sender for found in wrong for one in found.values() for sender in one["from"]} - {"all"}
    text = f"{', '.join(labels)}: wrong on {name_ranks(receivers)}"
    if len(receivers) > 1 and len(senders) == 1:
        text += f", in what rank {senders.pop()} sent"
    example = next(iter(wrong[receivers[0]].values()))["example"]
    remedy = "that rank's card or cable? Try another node, NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1, one at a time"
    return Line("collectives", name, "FINDING", f"{text} ({example})", remedy)


# ---- speed ----
def synchronize(device: torch.device) -> None:
    """Waits until the GPU has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], Any], device: torch.device, repeats: int, budget: float = 0.3) -> list[float]:
    """Seconds of each of up to `repeats` calls, on the slowest rank; ends early when `budget` seconds are spent."""
    times: list[float] = []
    while len(times) < repeats and sum(times) < budget:
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)  # every rank sees the same time, so all stop at the same call
        times.append(taken.item())
    return times


def measure(name: str, n: int, device: torch.device) -> tuple[float, float]:
    """(seconds of a small message, busbw in GB/s of a large one) of a collective among n ranks."""

    def call(nbytes: int) -> Callable[[], Any]:
        """nbytes: the full size of the float32 array, which is a multiple of n elements."""
        full, again = torch.ones(nbytes // 4, device=device), torch.ones(nbytes // 4, device=device)
        part = torch.ones(nbytes // 4 // n, device=device)
        return {
            "all_reduce": lambda: dist.all_reduce(full, dist.ReduceOp.MAX),
            "all_gather": lambda: all_gather_single(full, part),
            "reduce_scatter": lambda: reduce_scatter_single(part, full),
            "all_to_all": lambda: dist.all_to_all_single(full, again),
        }[name]

    small, large = 8 * n, LARGE[device.type] // (4 * n) * (4 * n)
    factor = (2 if name == "all_reduce" else 1) * (n - 1) / n  # nccl-tests: from bytes per second to busbw
    latency = median(seconds_of(call(small), device, 20)[-15:])  # the first few only warm up
    return latency, large * factor / min(seconds_of(call(large), device, 4)) / 1e9


MEASURED = COLLECTIVES[:3] + COLLECTIVES[4:5]  # the four that share a factor; pairs are measured one by one below


# ---- pairs ----
Pairs = list[tuple[int, int]]
Speeds = dict[tuple[int, int], float]  # (source, destination) -> GB/s
Step = Callable[[str, Callable[[], Any]], list[Any]]


def rounds(ranks: Sequence[int]) -> list[Pairs]:
    """All pairs of ranks, in rounds. Up to 16 ranks: one pair at a time, undisturbed by others. More: a tournament
    (circle method), in which every rank meets another one in each round.
    """
    if len(ranks) <= 16:
        return [[pair] for pair in itertools.combinations(ranks, 2)]
    circle = [*ranks, -1] if len(ranks) % 2 else list(ranks)  # -1: the one who meets it sits out
    tournament = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        meetings = zip(circle[:half], reversed(circle[half:]))
        tournament.append([(min(pair), max(pair)) for pair in meetings if -1 not in pair])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return tournament


def transfer(operation: Callable[..., Any], tensor: torch.Tensor, peer: int) -> None:
    """isend or irecv. Batched, because NCCL would otherwise build a communicator for every pair."""
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):
        work.wait()


def meet_peer(rank: int, peer: int, numel: int, device: torch.device) -> dict[str, Any]:
    """Sends to a peer and receives from it: {"gb_s": the best of its sends, "right": the values that came in}."""
    payload = torch.full((numel,), float(rank + 1), device=device)
    inbox, receipt = torch.zeros_like(payload), torch.zeros(1, device=device)
    times = []
    for turn in range(2 * SENDS):  # the first message in each direction only warms up
        synchronize(device)
        begin = time.perf_counter()
        if (turn < SENDS) == (rank < peer):  # the lower rank sends first
            transfer(dist.isend, payload, peer)
            transfer(dist.irecv, receipt, peer)
            synchronize(device)
            times.append(time.perf_counter() - begin)
        else:
            transfer(dist.irecv, inbox, peer)
            transfer(dist.isend, receipt, peer)
            synchronize(device)
    right = bool((inbox == peer + 1).all())
    return {"gb_s": numel * 4 / min(times[1:]) / 1e9, "right": right}


def sweep(step: Step, rank: int, pairings: Sequence[Pairs], numel: int, device: torch.device) -> tuple[Speeds, Pairs]:
    """Measures every pair, one step a round, so that a pair that hangs is named.

    step: runs a function on every rank and returns all values (check.py). Returns the speeds, and the (source,
    destination) whose values arrived wrong.
    """
    speeds: Speeds = {}
    wrong: Pairs = []
    for number, pairs in enumerate(pairings):
        peer = next((a + b - rank for a, b in pairs if rank in (a, b)), None)
        name = f"pair {pairs[0][0]}-{pairs[0][1]}" if len(pairs) == 1 else f"pairs, round {number + 1}"

        def work(peer: int | None = peer) -> dict[str, Any] | None:
            return None if peer is None else meet_peer(rank, peer, numel, device)

        results = step(name, work)
        for source, destination in itertools.chain(pairs, [(b, a) for a, b in pairs]):
            speeds[source, destination] = results[source]["gb_s"]
            if not results[destination]["right"]:
                wrong.append((source, destination))
    return speeds, wrong


def judge_pairs(
    step: Step, rank: int, facts: Sequence[Facts], numel: int, device: torch.device
) -> tuple[list[Line], Speeds]:
    """Sweeps all pairs with messages of numel float32, then the slow ones again: a busy moment is no bad link."""
    ranks = range(len(facts)) if len(facts) <= SWEPT_RANKS else [ranks[0] for ranks in nodes(facts).values()]
    speeds, wrong = sweep(step, rank, rounds(ranks), numel, device)
    for _ in range(5):
        suspects = sorted({(min(a, b), max(a, b)) for a, b, _ in slow_pairs(speeds, facts)})
        again, _ = sweep(step, rank, [[pair] for pair in suspects], numel, device)
        speeds |= {pair: max(rate, speeds[pair]) for pair, rate in again.items()}
    slow = slow_pairs(speeds, facts)
    everywhere = [r for r in ranks if sum(r in (a, b) for a, b, _ in slow) == 2 * (len(ranks) - 1)]
    remedy = "cable, port, switch or slot? Run a job of just these two ranks, then of others on the same nodes"
    lines = []
    for r in everywhere:
        best = max(rate for pair, rate in speeds.items() if r in pair)
        text = f"every link of rank {r} is slow: {best:.3f} GB/s at best, of {max(speeds.values()):.3f}"
        lines.append(Line("pairs", f"rank {r}", "FINDING", text, "this node's network card, cable or port"))
    lines += [
        Line("pairs", f"{a} -> {b}", "FINDING", f"{speeds[a, b]:.3f} GB/s, the median is {middle:.3f}", remedy)
        for a, b, middle in slow
        if not {a, b} & set(everywhere)
    ]
    lines += [Line("pairs", f"{a} -> {b}", "FINDING", f"what rank {a} sent arrived wrong", remedy) for a, b in wrong]
    rates = f"{min(speeds.values()):.2f} to {max(speeds.values()):.2f} GB/s"
    text = f"{len(speeds)} directions, {rates} with messages of {numel * 4 >> 10} KiB"
    return lines or [Line("pairs", "sweep", "OK", text)], speeds


# ---- what should the links give? ----
def kind(a: Facts, b: Facts) -> str:
    """How two ranks are joined: net, a GPU link in the words of nvidia-smi topo (NV18, PIX, ... SYS), numa or node."""
    if a["node"] != b["node"]:
        return "net"
    if a["gpu"] and b["gpu"] and (way := a["gpu"].get("distances", {}).get(b["gpu"]["uuid"])):
        return f"NV{a['gpu']['nvlinks']}" if way == "NV" else way
    return "numa" if a["numa"] == b["numa"] else "node"


def expected(facts: Sequence[Facts]) -> tuple[float | None, str]:
    """(GB/s in one direction, name) of the slowest kind of link between these ranks; None where nothing tells.

    Between nodes: all active InfiniBand ports of a node together (NCCL uses them all), else the interface in use.
    """
    nccl = backend(facts) == "nccl"
    if len(nodes(facts)) > 1:
        rates = []
        for own in facts:
            rdma = sum(port["gbit"] for port in own["infiniband"] if port["state"] == "ACTIVE")
            if nccl and rdma and own["env"].get("NCCL_IB_DISABLE") != "1":
                rates.append((rdma / 8, "InfiniBand"))
            else:
                rates.append(((own["interface_gbit"] or 0) / 8, "Ethernet"))
        slowest = min(rates)
        return slowest if slowest[0] else (None, "network of unknown speed")
    if not nccl:
        return None, "loopback"
    kinds = {kind(a, b) for a in facts for b in facts if a is not b}
    cards = [own["gpu"] for own in facts]
    if kinds and all(name.startswith("NV") for name in kinds) and all(c["capability"] in NVLINK_GB_S for c in cards):
        return min(c["nvlinks"] * NVLINK_GB_S[c["capability"]] for c in cards), "NVLink"
    if all(card.get("pcie_generation") in PCIE_GB_S for card in cards):
        return min(PCIE_GB_S[c["pcie_generation"]] * (c["pcie_width"] or 16) / 16 for c in cards), "PCIe"
    return None, "GPU link of unknown speed (pip install nvidia-ml-py)"


def judge_speed(name: str, latency_s: float, busbw: float, facts: Sequence[Facts]) -> Line:
    """busbw: GB/s as nccl-tests counts it, of a large message. latency_s: of a small one."""
    over, (nominal, link) = backend(facts), expected(facts)
    by_node = nodes(facts)
    if nominal and name == "all_to_all" and len(by_node) > 1:
        nominal /= max(map(len, by_node.values()))  # no ring: each rank's own data leaves the node, all at once
    needed = LEAST_SHARE[link] * nominal if over == "nccl" and nominal else FLOOR_GB_S
    share = f"{busbw / nominal:.0%} of {link}'s {nominal:g}" if nominal else f"over {link}"
    text = f"8 B a rank in {latency_s * 1e6:.0f} us; large messages at {busbw:.3g} GB/s busbw, {share}"
    if busbw < needed:
        text += f", below {needed:g}"
        return Line("speed", name, "FINDING", text, "see the pairs below; NCCL_DEBUG=INFO tells the path")
    if latency_s > LATENCY_LIMIT_S[over]:
        return Line("speed", name, "FINDING", f"{text}; slow to start", "is a machine overloaded, or a VPN in the way?")
    return Line("speed", name, "OK", text)


def slow_pairs(speeds: Speeds, facts: Sequence[Facts]) -> list[tuple[int, int, float]]:
    """(source, destination, median) of each direction far below the median of its own kind of link.

    speeds: (source, destination) -> GB/s. A kind with fewer than four directions has no median to speak of.
    """
    kinds: dict[str, Speeds] = {}
    for (a, b), rate in speeds.items():
        name = kind(facts[a], facts[b])
        kinds.setdefault("NVLink" if name.startswith("NV") else name, {})[a, b] = rate
    slow = []
    for name, rates in kinds.items():
        middle = median(rates.values())
        limit = middle * (LOOPBACK_SHARE if name in ("numa", "node") else SLOW_SHARE)
        slow += [(a, b, middle) for (a, b), rate in rates.items() if len(rates) >= 4 and rate < limit]
    return slow
