"""A rank's numbers, and how those of all ranks come together: through the store of the script's own process group.

The store is there wherever the script was started, on one machine or many; torchrun's outlives a rank that dies. Each
rank writes under a prefix of its own, and nobody waits inside the store: a rank looks, every 50 ms, who has written.
"""

import json
import os
import socket
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from capture import Recorded
from lanes import LANES, Span, find_lanes, length, overlap, span_of, union, without
from loaders import Made, fetch_facts
from machine import memory_facts, nvml_between, nvml_counters, usable_cores

CHUNK = 2**20  # bytes of one value; the store refuses values of several MiB
LOOK_S = 0.05
PIXELS = 4000  # of the picture's width: what is smaller than a pixel is drawn with its neighbour
KEPT = 20  # of the longest operators, and lines
TRACED = 2  # steps in the picture and in the trace


# ---- one rank ----
def blurred(spans: list[Span], ns: int) -> list[Span]:
    """Spans without the gaps between them that are shorter than `ns`."""
    found: list[Span] = []
    for start, end in spans:
        if found and start - found[-1][1] < ns:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def rows_of(recorded: Recorded, start: int, end: int) -> list[list[Any]]:
    """Events for the trace: [name, thread or stream, start, duration, category]."""
    rows = []
    for event in recorded.events:
        if event["ts"] < end and event["ts"] + event["dur"] > start and event["cat"] != "ac2g":
            device = event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
            tid = f"stream {event['tid']}" if device else event["tid"]
            rows.append([event["name"], tid, event["ts"], event["dur"], event["cat"]])
    return rows


class Before(NamedTuple):
    """What is read when the recording begins, to be told what grew."""

    counts: dict[str, int]  # machine.counts
    nvml: dict[str, Any]
    made: list[Made]  # batches


def summarize(
    rank: int,
    recorded: Recorded,
    marks: list[int],
    unrecorded_ms: float | None,
    before: Before,
    made: list[Made],
    traced: bool,
) -> dict[str, Any]:
    """All that rank 0 needs of a rank, as JSON has it."""
    found = find_lanes(recorded, marks)
    exposed = found.lanes["comm"]
    named = [(event["name"], span_of(event)) for event in recorded.events]
    sending = [*(one.waited for one in recorded.transfers), *(span for name, span in named if "SendRecv" in name)]
    functional = [span for name, span in named if "c10d_functional" in name]
    first, last = found.windows[max(0, len(found.windows) - TRACED)][0], found.windows[-1][1]
    shown = found.lanes | {"hidden": without(found.communication, exposed)}
    shown = {lane: overlap(spans, [(first, last)]) for lane, spans in shown.items()}
    summary = dict(
        rank=rank,
        host=socket.gethostname(),
        clock=clock(),
        torch=torch.__version__,
        cuda=found.cuda,
        blind=torch.cuda.is_available() and torch.cuda.is_initialized() and not found.cuda,
        thread=recorded.thread,
        num_steps=len(found.windows),
        ns=length(found.windows),
        unrecorded_ms=unrecorded_ms,
        windows=found.windows,  # may lose one, see skew.py
        lanes={lane: [length(overlap(found.lanes[lane], [one])) for one in found.windows] for lane in LANES},
        exposed=exposed,
        communication=found.communication,
        calls=found.calls,
        transfers=found.transfers,
        groups=recorded.groups,
        group_names=recorded.group_names,
        p2p=length(overlap(union(sending), exposed)) / (length(exposed) or 1),
        functional=length(overlap(union(functional), exposed)) / (length(exposed) or 1),
        operators=found.operators[:KEPT],
        copies=found.copies,
        num_operators=found.num_operators,
        lines=dict(host=list(found.hosts.items())[:KEPT], data=list(found.makers.items())[:KEPT]),
        pageable=any("Pageable" in name for name, _ in named),
        memory=memory_facts(before.counts),
        fetch=fetch_facts(before.made, made),
        threads=torch.get_num_threads(),
        cores=usable_cores(),
        nvml=nvml_between(before.nvml, nvml_counters()),
        picture={lane: blurred(spans, (last - first) // PIXELS) for lane, spans in shown.items()},
        rows=rows_of(recorded, first, last) if traced else [],
    )
    return json.loads(json.dumps(summary))


def clock() -> str:
    """A name for the clock that this rank reads: all containers of a machine have the same."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


# ---- all ranks ----
def find_store() -> tuple[Any, int, int]:
    """(store, rank, world size); no store where nothing joins the ranks, or where there is one."""
    if dist.is_available() and dist.is_initialized():
        store, rank, world_size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    else:
        rank, world_size = (int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1)))
        store = None
        if world_size > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(*where, is_master=False, timeout=timedelta(seconds=10))
    if store is not None:
        store = dist.PrefixStore(f"diagnose.py/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    return store, rank, world_size


def put(store: Any, summary: dict[str, Any]) -> None:
    rank, packed = summary["rank"], zlib.compress(json.dumps(summary).encode(), 1)
    count = -(-len(packed) // CHUNK)
    for i in range(count):
        store.set(f"{rank}/{i}", packed[i * CHUNK : (i + 1) * CHUNK])
    store.set(f"{rank}", str(count))


def take(store: Any, rank: int) -> dict[str, Any]:
    packed = b"".join(store.get(f"{rank}/{i}") for i in range(int(store.get(f"{rank}"))))
    return json.loads(zlib.decompress(packed))


def wait_for(store: Any, ranks: set[int], patience: Callable[[], float], enough: int) -> set[int]:
    """Those of the ranks that have written, once they are `enough`, or after `patience()` seconds, which may change."""
    began, missing = time.monotonic(), set(ranks)
    while True:
        missing = {rank for rank in missing if not store.check([f"{rank}"])}
        if len(ranks - missing) >= enough or time.monotonic() - began > patience():
            return ranks - missing
        time.sleep(LOOK_S)
