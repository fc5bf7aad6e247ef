"""Runs a script as it is and counts, from beside it, the bytes that this rank sends in its last training step.

torch's flight recorder (on by default, TORCH_FR_BUFFER_SIZE) has every collective with its sizes and its group, those
too that DDP's reducer calls from C++. It lacks the sends of gloo, which are counted here. A step is what lies between
one optimizer.step() and the next.
"""

import json
import os
import pickle
import sys
import time
from math import prod
from pathlib import Path
from typing import Any

from script import run_script

ITEMSIZE = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Byte": 1, "Char": 1, "Bool": 1}
KINDS = {  # words in the recorder's names (gloo:all_reduce, nccl:_reduce_scatter_base) -> nccl-tests' collective
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
}


# ---- bytes ----
def operation(entry: dict[str, Any]) -> str:
    """all_reduce, all_gather, .. as the script called it: gloo makes a reduce_scatter of an all_reduce, and says so.

    The innermost function of torch.distributed on the stack is the one that was called; DDP's reducer has none there.
    """
    for frame in entry.get("frames", [])[:6]:
        if frame["filename"].endswith(("distributed_c10d.py", "_functional_collectives.py")):
            if "reduce_scatter" in frame["name"]:
                return "reduce_scatter"
            break
    name = entry["profiling_name"].partition(":")[2]
    return next((kind for word, kind in KINDS.items() if word in name), name)


def sent_bytes(op: str, given: int, group_size: int) -> float:
    """Bytes over a rank's link, by nccl-tests' factors; given: bytes of the input on this rank.

    2(n-1)/n of the size for all_reduce, (n-1)/n of the full size for all_gather, reduce_scatter and all_to_all.
    """
    n = group_size
    factors = {"all_reduce": 2 * (n - 1) / n, "all_gather": n - 1, "reduce_scatter": (n - 1) / n}
    return given * (factors | {"all_to_all": (n - 1) / n}).get(op, 1)  # broadcast, reduce, scatter, gather


class Observer:
    def __init__(self) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.ends: list[int] = []  # time of each optimizer.step(), in nanoseconds
        self.sends: list[tuple[int, int]] = []  # time, bytes
        self.sizes: dict[str, int] = {}  # of the groups, which are gone at the script's end
        send = dist.ProcessGroup.send

        def end_of_step(*_: object) -> None:
            for group, ranks in distributed_c10d._world.pg_group_ranks.items():
                if isinstance(group, dist.ProcessGroup):  # a number stands for groups without this rank
                    self.sizes[group.group_name] = len(ranks)
            self.ends.append(time.time_ns())

        def counted(group: Any, tensors: list[Any], *args: Any, **kwargs: Any) -> Any:
            self.sends.append((time.time_ns(), sum(tensor.nbytes for tensor in tensors)))
            return send(group, tensors, *args, **kwargs)

        register_optimizer_step_post_hook(end_of_step)
        dist.ProcessGroup.send = counted  # type: ignore[method-assign, assignment]

    def bytes_of_last_step(self, steps: int) -> float | None:
        """None if the script made no two steps, or if nothing was recorded."""
        import torch

        per_step = len(self.ends) // steps  # DeepSpeed may call the optimizer several times in one step
        if per_step < 1 or len(self.ends) <= per_step:
            return None
        begin, end = self.ends[-1 - per_step], self.ends[-1]
        module = torch._C._distributed_c10d
        entries = []
        for name in ("_dump_fr_trace", "_dump_nccl_trace"):  # gloo's recorder and NCCL's, where torch was built with it
            if dump := getattr(module, name, None):
                entries += pickle.loads(dump(True, True, False)).get("entries", [])
        if not entries:
            return None
        total = float(sum(size for when, size in self.sends if begin < when <= end))
        for entry in entries:
            if begin < entry["time_created_ns"] <= end and not entry["is_p2p"]:
                sizes = zip(entry["input_sizes"], entry["input_dtypes"])
                given = sum(prod(shape) * ITEMSIZE[dtype] for shape, dtype in sizes)
                total += sent_bytes(operation(entry), given, self.sizes[entry["process_group"][0]])
        return total


# ---- main ----
def observe(file: Path, steps: int, words: list[str]) -> None:
    """Runs `script flags...` as __main__, and writes the bytes of its last step to FILE.RANK."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "20000"  # calls; the default of 2,000 may be less than a run
    observer = Observer()
    try:
        if run_script(words):
            sys.exit(1)
    finally:  # a script may end with sys.exit(0)
        Path(f"{file}.{os.environ.get('RANK', 0)}").write_text(json.dumps(observer.bytes_of_last_step(steps)))
