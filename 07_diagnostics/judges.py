"""Where the numbers in a line decide.

Each judge returns the classes that they leave, the likeliest first; an empty list where they say nothing, and None
where they say that nothing is wrong.
"""

import re
from collections.abc import Iterable

SIZE = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def memory(text: str, rank: int | None) -> list[str]:
    """Out of memory: who holds it? torch has two forms of the message, the newer one since 2.1."""

    def size(pattern: str) -> float:
        found = re.search(pattern.replace("SIZE", r"([\d.]+) (\w)i?B"), text)
        return float(found[1]) * SIZE[found[2]] if found else 0.0

    total = size("SIZE total capacity") or size("total capacity of SIZE")
    if not total:
        return []
    free, tried = size("SIZE free") or size("SIZE is free"), size("allocate SIZE")
    allocated = size("SIZE (?:already )?allocated") or size("SIZE is allocated")
    reserved = size("SIZE (?:reserved in total|cached)") or allocated
    idle = size("SIZE is reserved by PyTorch but un") or reserved - allocated
    own = size("this process has SIZE") or reserved
    held = total - free - own  # by others, and by this process's CUDA context
    if held > max(0.25 * total, 2 * SIZE["G"]) or held > max(own, SIZE["G"]):
        on_gpu_0 = re.search(r"GPU 0\b", text)
        others = len(re.findall(r"(?<!this )process \d+ has", text, re.I))
        first = ["cuda_oom_other_process", *(["cuda_oom_all_ranks_on_gpu0"] if on_gpu_0 else [])]
        return first[::-1] if rank or others > 2 else first
    return ["cuda_oom_fragmentation" if idle >= tried and idle > 0.05 * total else "cuda_oom_capacity"]


def batch(text: str, rank: int | None) -> list[str]:
    """DeepSpeed's batch sizes: a world size of 1, where more ranks would fit, was read too early."""
    found = re.search(r"(\d+) != (\d+) \* (\d+) \* (\d+)", text)
    if not found:
        return []
    total, micro, steps, world_size = map(int, found.groups())
    early = world_size == 1 and total > micro * steps and total % (micro * steps) == 0
    return ["ds_init_order", "ds_batch_size_config"] if early else ["ds_batch_size_config"]


def fingerprint(text: str, rank: int | None) -> list[str]:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: the same operation in the same turn on both ranks, so another size?"""
    turns = re.findall(r"SequenceNumber=(\d+), OpType=(\w+)", text)
    return ["collective_size_mismatch", "rank_conditional_collective"] if len(turns) > 1 and len({*turns}) == 1 else []


def barrier(text: str, rank: int | None) -> list[str] | None:
    """The barrier in which a group is made: did more come than it has members, or did some never come?"""
    found = re.search(r"world_size=(\d+), (?:worker_count|num_workers_joined)=(\d+)", text)
    if found and int(found[2]) > int(found[1]):
        return ["rank_world_size_inconsistent"]
    late = ["slow_rank_timeout", "rendezvous_unreachable", "peer_rank_died", "rank_world_size_inconsistent"]
    return late if "Timed out" in text else None


def inplace(text: str, rank: int | None) -> list[str]:
    """A buffer is one-dimensional or holds whole numbers, and no operation of the graph made it."""
    found = re.search(r"\[torch\.(?:cuda\.)?(\w+)Tensor \[([\d, ]*)\]\]", text)
    buffer = found and (found[1] in ("Long", "Int", "Bool", "Byte") or "," not in found[2])
    if "BroadcastBackward" in text or (buffer and "is output" not in text):
        return ["ddp_buffer_inplace", "inplace_op_in_model"]
    return ["inplace_op_in_model"] if "is output" in text else []


def watchdogs(texts: Iterable[str]) -> str | None:
    """What NCCL's watchdogs of several ranks waited in: another operation, another turn, or another size?"""
    form = r"SeqNum=(\d+), OpType=(\w+)(?:, NumelIn=(\d+), NumelOut=(\d+))?"
    works = {found.groups() for text in texts if (found := re.search(form, text))}
    if len(works) < 2:
        return None
    # Sharded layers gather and scatter their own sizes: another size is another layer.
    sharded = any(operation.startswith("_") for _, operation, *_ in works)
    turns = {work[:2] for work in works}
    return "rank_conditional_collective" if sharded or len(turns) > 1 else "collective_size_mismatch"


JUDGES = {"memory": memory, "batch": batch, "fingerprint": fingerprint, "barrier": barrier, "inplace": inplace}
