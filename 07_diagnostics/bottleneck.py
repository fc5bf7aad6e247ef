"""From the numbers of all ranks to a verdict: what the job is bound by, the evidence, and what to try.

Every threshold stands here, with its reason. `find_bottlenecks` is a pure function of `Facts`.
"""

import math
from typing import Any, NamedTuple

from skew import Late, Skew

# A share of the step: without it, the step would be a quarter shorter. What is smaller is listed, and is no verdict.
BOUND = 0.25
LISTED = 0.05  # what is smaller than this is not worth a line
NEAR_LIMIT = 0.90  # of a memory limit: the allocator's own blocks and the next larger batch do not fit into the rest
FRAGMENTED = 0.30  # of the reserved memory, unused: as much as a microbatch more
SMALL_KB = 256  # a collective below this is mostly latency: at 1 GB/s it transfers in 0.25 ms
MANY_CALLS = 8  # collectives of one kind in a step
HIDDEN = 0.3  # of the communication: less than this, and it hardly overlaps
MOSTLY = 0.5  # of the exposed communication
GATHERED = 0.2  # of the time of collectives in all_gather: no replicas; gloo's reduce_scatter is an all_reduce inside
SHORT_KERNEL_US = 20  # launching a kernel takes the host 5 to 10 microseconds


class Facts(NamedTuple):
    shares: dict[str, float]  # data, compute, comm, waiting, copy, host: means over the ranks, which sum to 1
    late: Late
    charged: dict[str, float]  # waiting for no steady rank, by what the late ones did
    hidden: float  # communication that something hides, of a step
    memory: list[dict[str, Any]]  # by rank, see machine.py
    collectives: list[dict[str, Any]]  # see skew.collective_rows
    p2p: float  # of the exposed communication, sends and receives
    functional: float  # .. and DTensor's collectives, for which the next operator waits
    cuda: bool
    cores: int  # of the first rank's machine, that its ranks may use
    local_ranks: int
    threads: int
    launches: float  # kernels or operators a step
    launch_us: float  # .. and how long one takes
    operators: list[tuple[str, float]]  # the longest: name, share of the step
    lines: dict[str, list[tuple[str, float]]]  # lane -> lines of the user's code, share of the step
    late_lines: list[str]  # of the straggler, in the lane that makes it late
    workers: int  # processes of a DataLoader
    fetch_ms: float | None  # what a batch takes there, or in the training thread
    step_ms: float
    pageable: bool  # copies to the GPU from memory that is not pinned


class Bottleneck(NamedTuple):
    verdict: str
    share: float
    evidence: str
    advice: list[str]


# ---- each kind ----
def memory_bound(facts: Facts) -> Bottleneck | None:
    for rank, one in enumerate(facts.memory):
        full = one["used"] / one["limit"] if one["limit"] else 0.0
        why = ""
        if one["retries"]:
            why = f"the allocator had to free and try again {one['retries']} times"
        elif one["swapped"] and one["faults"]:
            why = f"{one['swapped'] / 2**20:,.0f} MiB in swap, {one['faults']} pages read back in the measured steps"
        elif full >= NEAR_LIMIT:
            why = f"{one['used'] / 2**20:,.0f} of {one['limit'] / 2**20:,.0f} MiB ({full:.0%}) of {one['limited_by']}"
        if why:
            advice = ["a smaller microbatch, with accumulation for the same batch", "checkpoint activations"]
            advice += ["shard the states: 05_zero, FSDP"]
            if one["reserved"] and 1 - one["allocated"] / one["reserved"] >= FRAGMENTED:
                advice.insert(0, "PYTORCH_ALLOC_CONF=expandable_segments:True: blocks are held and not used")
            return Bottleneck("memory-bound", full, f"rank {one.get('rank', rank)}: {why}", advice)
    return None


def straggler(facts: Facts) -> Bottleneck | None:
    late = facts.late
    if late.rank is None:
        return None
    line = f", {facts.late_lines[0]}" if facts.late_lines else ""
    evidence = f"the others wait {late.share:.0%} of a step for rank {late.rank}, the latest in {late.steps:.0%}"
    evidence += f" of them: {late.ms:.1f} ms more of {late.lane}{line}"
    advice = {
        "data": ["rank {}: its shard, its disk, its sizes: equal work for every rank", "more DataLoader workers"],
        "compute": ["rank {}: its clock, its temperature, other processes on its machine", "equal work for every rank"],
        "host": ["rank {}: what it alone does: logging, saving, `if rank ==`; on another thread or less often"],
        "copy": ["rank {}: its PCIe link, its NUMA node, pinned memory"],
    }[late.lane]
    return Bottleneck("straggler", late.share, evidence, [one.format(late.rank) for one in advice])


def data_bound(facts: Facts) -> Bottleneck:
    share = facts.shares["data"] + facts.shares["copy"] + facts.charged.get("data", 0) + facts.charged.get("copy", 0)
    evidence = f"{facts.shares['data']:.0%} of a step waits for the next batch"
    evidence += said_lines(facts, "data")
    advice = []
    if facts.shares["copy"] >= LISTED:
        evidence += f", {facts.shares['copy']:.0%} copies and does nothing else"
        advice = ["pin_memory=True and .to(device, non_blocking=True)"] if facts.pageable else ["fewer, larger copies"]
    if facts.fetch_ms:
        where = f"each of {facts.workers} workers" if facts.workers else "the training thread"
        evidence += f"; a batch takes {facts.fetch_ms:.1f} ms in {where}"
        rest = max(facts.step_ms * (1 - facts.shares["data"]), facts.step_ms / 20)
        wanted, spare = math.ceil(facts.fetch_ms / rest), max(1, facts.cores // facts.local_ranks)
        more = f": its share of the cores; {wanted} would keep up, if they wait for a disk" if wanted > spare else ""
        advice.append(f"DataLoader(num_workers={min(wanted, spare)}, pin_memory=True){more}")
    advice += ["a cheaper transform, or one that is done once and stored", "a larger prefetch_factor if batches vary"]
    return Bottleneck("data-bound", share, evidence, advice)


def communication_bound(facts: Facts) -> Bottleneck:
    share = facts.shares["comm"]
    if facts.late.rank is None:  # waiting that nobody is charged with
        share += max(0.0, facts.shares["waiting"] - sum(facts.charged.values()))
    evidence = f"{facts.shares['comm']:.0%} of a step is exposed communication, {facts.hidden:.0%} is hidden"
    if facts.p2p >= MOSTLY:
        evidence += f", {facts.shares['waiting']:.0%} waits for another rank, most of it in send and recv"
        advice = ["a pipeline's bubble: more microbatches, an interleaved schedule", "stages of equal time"]
        return Bottleneck("communication-bound", share, evidence, advice)
    if not facts.collectives:
        return Bottleneck("communication-bound", share, evidence, ["is the link as fast as it should be? bandwidth.py"])
    top = facts.collectives[0]
    speed = f" at {top['busbw']:.3f} GB/s busbw" if top["busbw"] else ""
    evidence += f"; {top['calls']:.0f} {top['op']} a step of {top['mean_kb']:,.0f} KB{speed}"
    gathered = sum(row["ms"] for row in facts.collectives if row["op"] in ("all_gather", "reduce_scatter"))
    if facts.functional >= MOSTLY:
        advice = [
            "tensor parallelism inside a node only, or over fewer ranks",
            "sequence parallelism; more work per rank",
        ]
    elif gathered >= GATHERED * sum(row["ms"] for row in facts.collectives):
        advice = ["prefetch (FSDP), larger units", "keep the weights: reshard_after_forward=False, ZeRO 1 or 2"]
        advice.append("a larger microbatch")
    elif top["calls"] >= MANY_CALLS and top["mean_kb"] < SMALL_KB:
        advice = ["latency: larger buckets (DDP bucket_cap_mb)", "accumulate under no_sync, a larger microbatch"]
    elif facts.hidden < HIDDEN * (facts.hidden + facts.shares["comm"]):
        advice = [
            "no overlap: smaller buckets, begun during backward",
            "accumulate under no_sync, gradients in bfloat16",
        ]
    else:
        advice = ["fewer bytes per sample: accumulate under no_sync, a larger microbatch", "gradients in bfloat16"]
    advice.append("is the link as fast as it should be? bandwidth.py")
    return Bottleneck("communication-bound", share, evidence, advice)


def host_bound(facts: Facts) -> Bottleneck:
    share = facts.shares["host"] + facts.charged.get("host", 0.0)
    if facts.cuda:
        evidence = f"the GPU has no work {facts.shares['host']:.0%} of a step: {facts.launches:,.0f} kernels"
        evidence += f" of {facts.launch_us:.0f} us" + said_lines(facts, "host")
        advice = ["no .item(), .cpu() or print of a tensor in every step"]
        if facts.launch_us < SHORT_KERNEL_US:
            advice = ["torch.compile, CUDA graphs, fused optimizer (fused=True)", "a larger microbatch", *advice]
    else:
        evidence = f"{facts.shares['host']:.0%} of a step is Python, between operators" + said_lines(facts, "host")
        advice = ["move that line out of the loop, or to another thread", "a larger microbatch, torch.compile"]
    return Bottleneck("host-bound", share, evidence, advice)


def compute_bound(facts: Facts) -> Bottleneck:
    names = ", ".join(f"{name} {share:.0%}" for name, share in facts.operators[:3])
    evidence = f"{facts.shares['compute']:.0%} of a step computes: {names}"
    if facts.cuda:
        advice = ["bfloat16 autocast, TF32", "torch.compile, fused kernels", "more GPUs: 02_ddp"]
    elif facts.local_ranks * facts.threads < facts.cores:
        evidence += f"; {facts.local_ranks} x {facts.threads} threads on {facts.cores} cores"
        advice = [f"OMP_NUM_THREADS={facts.cores // facts.local_ranks}", "more ranks on this machine"]
    elif facts.local_ranks * facts.threads > facts.cores:
        evidence += f"; {facts.local_ranks} x {facts.threads} threads share {facts.cores} cores"
        advice = ["as many ranks as cores, OMP_NUM_THREADS=1; no taskset that puts them on one"]
    else:
        advice = [
            "the cores are busy: torch.compile, bfloat16 where the CPU has it",
            "a smaller model, or more machines",
        ]
    return Bottleneck("compute-bound", facts.shares["compute"] + facts.charged.get("compute", 0.0), evidence, advice)


def said_lines(facts: Facts, lane: str) -> str:
    lines = [f"{where} {share:.0%}" for where, share in facts.lines[lane][:2] if share >= LISTED and where]
    return f": {', '.join(lines)}" if lines else ""


# ---- the verdict ----
def find_bottlenecks(facts: Facts) -> list[Bottleneck]:
    """The verdict first; then what else takes a share worth a line.

    Memory at its limit comes before all else, as nothing can grow there. Of the rest the largest share that is not
    compute decides, if it is a quarter of the step; else the job computes, which is what it is there for.
    """
    found = [data_bound(facts), communication_bound(facts), host_bound(facts)]
    if late := straggler(facts):
        found.append(late)
    found.sort(key=lambda one: -one.share)
    compute = compute_bound(facts)
    found.insert(0 if found[0].share < BOUND else 1, compute)
    found = [one for i, one in enumerate(found) if i == 0 or one.share >= LISTED]
    memory = memory_bound(facts)
    return [memory, *found] if memory else found


def gather_facts(summaries: dict[int, dict[str, Any]], skew: Skew, collectives: list[dict[str, Any]]) -> Facts:
    first = summaries[min(summaries)]
    num = len(summaries)
    recorded_ns = sum(one["ns"] for one in summaries.values())
    local = [one for one in summaries.values() if one["clock"] == first["clock"]]

    def mean_lines(lane: str) -> list[tuple[str, float]]:
        sums: dict[str, float] = {}
        for one in summaries.values():
            for where, ns in one["lines"][lane]:
                sums[where] = sums.get(where, 0.0) + ns / recorded_ns
        return sorted(sums.items(), key=lambda item: -item[1])

    sums: dict[str, float] = {}
    for one in summaries.values():
        for name, _, ns in one["operators"]:
            sums[name] = sums.get(name, 0.0) + ns / recorded_ns
    steps = sum(one["num_steps"] for one in summaries.values())
    late = summaries.get(skew.late.rank) if skew.late.rank is not None else None  # type: ignore[arg-type]
    launches = sum(one["num_operators"] for one in summaries.values())
    busy = sum(sum(one["lanes"]["compute"]) for one in summaries.values())
    return Facts(
        shares={lane: sum(one[lane] for one in skew.shares.values()) / num for lane in skew.shares[min(summaries)]},
        late=skew.late,
        charged=skew.charged,
        hidden=sum(skew.hidden.values()) / num,
        memory=[one["memory"] | {"rank": rank} for rank, one in sorted(summaries.items())],
        collectives=collectives,
        p2p=sum(one["p2p"] for one in summaries.values()) / num,
        functional=sum(one["functional"] for one in summaries.values()) / num,
        cuda=first["cuda"],
        cores=len({core for one in local for core in one["cores"]}),
        local_ranks=len(local),
        threads=first["threads"],
        launches=launches / steps,
        launch_us=busy / max(launches, 1) / 1e3,
        operators=sorted(sums.items(), key=lambda item: -item[1]),
        lines={lane: mean_lines(lane) for lane in ("data", "host")},
        late_lines=[where for where, _ in late["lines"].get(skew.late.lane, []) if where] if late else [],
        workers=max(one["fetch"]["workers"] for one in summaries.values()),
        fetch_ms=max((one["fetch"]["ms"] or 0 for one in summaries.values()), default=0) or None,
        step_ms=recorded_ns / steps / 1e6,
        pageable=any(one["pageable"] for one in summaries.values()),
    )
