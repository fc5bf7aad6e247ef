"""What diagnose.py prints: a line for each rank, operators and collectives, then evidence, verdict, advice."""

from typing import Any

from bottleneck import Bottleneck, Facts
from skew import SHARES, Skew, some_ranks

MIB = 2**20
SHOWN = 5  # of the longest operators, and collectives
NAME = 40  # letters


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows as lines; columns are as wide as their widest cell, the first one begins at the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [" | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def rank_lines(summaries: dict[int, dict[str, Any]], skew: Skew) -> list[str]:
    words = "step ms|data|compute|exposed comm|waiting|copies|host|sum|hidden comm"
    rows = [["", *words.split("|")]]
    for rank, one in sorted(summaries.items()):
        mean = sum(end - start for start, end in one["windows"]) / len(one["windows"]) / 1e6
        shares = [skew.shares[rank][lane] for lane in SHARES]
        rows.append([f"rank {rank}", f"{mean:.1f}", *(f"{100 * share:.1f}" for share in shares)])
        rows[-1] += [f"{100 * sum(shares):.0f}", f"{100 * skew.hidden[rank]:.1f}"]
    return aligned(rows)


def memory_lines(summaries: dict[int, dict[str, Any]]) -> list[str]:
    rows = [["", "peak MiB", "allocated", "reserved", "unused of it", "nearest limit"]]
    for rank, one in sorted(summaries.items()):
        memory = one["memory"]
        limit = f"{memory['used'] / MIB:,.0f} of {memory['limit'] / MIB:,.0f} MiB, {memory['limited_by']}"
        unused = f"{1 - memory['allocated'] / memory['reserved']:.0%}" if memory["reserved"] else "-"
        sizes = [f"{memory[name] / MIB:,.0f}" for name in ("peak", "allocated", "reserved")]
        rows.append([f"rank {rank}", *sizes, unused, limit if memory["limit"] else "none"])
    return aligned(rows)


def operator_lines(facts: Facts, first: dict[str, Any]) -> list[str]:
    steps = first["num_steps"]
    rows = [["kernels" if facts.cuda else "operators", "a step", "ms a step"]]
    for name, count, ns in [*first["operators"][:SHOWN], first["copies"]]:
        rows.append([name[:NAME], f"{count / steps:.0f}", f"{ns / 1e6 / steps:.2f}"])
    return aligned(rows)


def collective_lines(collectives: list[dict[str, Any]]) -> list[str]:
    rows = [["collectives", "a step", "ms a step", "MB a step", "busbw GB/s"]]
    for one in collectives[:SHOWN]:
        name = f"{one['op']} of {one['group']}, {one['ranks']} ranks"
        speed = f"{one['busbw']:.3f}" if one["busbw"] else "-"
        rows.append([name[:NAME], f"{one['calls']:.1f}", f"{one['ms']:.2f}", f"{one['mb']:.3f}", speed])
    return aligned(rows) if collectives else []


def nvml_lines(summaries: dict[int, dict[str, Any]]) -> list[str]:
    lines = []
    for rank, one in sorted(summaries.items()):
        if counters := one["nvml"]:
            text = ", ".join(f"{name} {value}" for name, value in counters.items() if value not in ([], None))
            lines.append(f"NVML of rank {rank}: {text}")
    return lines


def verdict_lines(found: list[Bottleneck]) -> list[str]:
    lines = []
    for i, one in enumerate(found):
        lines.append(f"{'verdict' if i == 0 else 'then':<9} {one.verdict}, {one.share:.0%}")
        lines.append(f"evidence  {one.evidence}")
        lines += [f"{'try this' if j == 0 else '':<9} {text}" for j, text in enumerate(one.advice)]
    return lines


def full_report(
    summaries: dict[int, dict[str, Any]],
    skew: Skew,
    facts: Facts,
    found: list[Bottleneck],
    collectives: list[dict[str, Any]],
    notes: list[str],
) -> list[str]:
    first = summaries[min(summaries)]
    steps = len(first["windows"])
    mean = sum(end - start for start, end in first["windows"]) / steps / 1e6
    device = "cuda" if facts.cuda else "cpu"
    head = f"torch {first['torch']} | {device} | {len(summaries)} ranks | {steps} steps | {mean:.1f} ms a step"
    if first["unrecorded_ms"]:
        head += f", {first['unrecorded_ms']:.1f} without the profiler"
    some = some_ranks(summaries, skew.late.rank)
    lines = [head, *rank_lines(some, skew), "", *memory_lines(some), ""]
    if len(some) < len(summaries):
        notes = [f"{len(some)} of {len(summaries)} ranks are shown; --json has all", *notes]
    lines += [*operator_lines(facts, first), "", *collective_lines(collectives)]
    lines += nvml_lines(some)
    for host, (offset, spread, count) in list(skew.clocks.items())[1:]:
        lines.append(f"clock of {host}: {offset:+.3f} ms, within {spread:.3f} ms, from {count} collectives")
    return [*lines, *notes, "", *verdict_lines(found)]


def report_object(
    summaries: dict[int, dict[str, Any]],
    skew: Skew,
    found: list[Bottleneck],
    collectives: list[dict[str, Any]],
    notes: list[str],
) -> dict[str, Any]:
    ranks = []
    for rank, one in sorted(summaries.items()):
        steps = [(end - start) / 1e6 for start, end in one["windows"]]
        row = dict(rank=rank, host=one["host"], cuda=one["cuda"], step_ms=steps, unrecorded_ms=one["unrecorded_ms"])
        row |= dict(shares=skew.shares[rank], hidden=skew.hidden[rank], memory=one["memory"], nvml=one["nvml"])
        row["operators"] = [dict(name=name, count=count, ms=ns / 1e6) for name, count, ns in one["operators"]]
        ranks.append(row | dict(lines=one["lines"]))
    answer: dict[str, Any] = dict(verdict=found[0].verdict, evidence=found[0].evidence, advice=found[0].advice)
    answer |= dict(bottlenecks=[one._asdict() for one in found], late=skew.late._asdict(), ranks=ranks)
    return answer | dict(collectives=collectives, clocks=skew.clocks, notes=notes)
