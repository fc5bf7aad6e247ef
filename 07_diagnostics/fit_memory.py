"""How much memory the processes of a try take, and how much there is: read from /proc, from outside.

A rank's memory is the peak of its resident set, which the kernel keeps to the page (VmHWM), plus what its children
hold beyond it, sampled. No page counts twice: a page that n processes share is in each one's proportional set size
(Pss) with 1/n, so that the sum over rank and children, less the rank's own, is theirs alone. A forked worker shares
its parent's pages, those that the allocator keeps unused among them, until one of the two writes to them.
"""

import os
from pathlib import Path

from proc import CGROUPS, kib_fields, memory_groups, read_proc, stat_fields

SHARED_MEMORY = "/dev/shm/"
GPU_FILES = ("nvidia[0-9]*", "kfd", "dxg")  # in /dev: CUDA, ROCm, WSL


# ---- what there is ----
def host_limit(cgroups: Path = CGROUPS) -> int:
    """The host's memory, or the least limit of this process's control groups if that is less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder, version in memory_groups(read_proc("self", "cgroup"), cgroups):
        file = folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")
        if file.is_file() and (text := file.read_text().strip()) != "max":
            found.append(int(text))
    return min(found)


def has_gpu() -> bool:
    return any(any(Path("/dev").glob(name)) for name in GPU_FILES)


# ---- what is taken ----
def open_files(pid: int) -> list[Path]:
    try:
        return list(Path("/proc", str(pid), "fd").iterdir())
    except OSError:
        return []


def link_target(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:
        return ""


def shared_files(pids: list[int]) -> int:
    """Bytes of shared memory that these processes hold open: batches that no process has mapped are among them."""
    sizes = {}
    for file in (file for pid in pids for file in open_files(pid) if link_target(file).startswith(SHARED_MEMORY)):
        try:
            status = file.stat()
        except OSError:
            continue
        sizes[status.st_ino] = 512 * status.st_blocks
    return sum(sizes.values())


def held_beyond(pid: int, children: list[int]) -> int:
    """Bytes that a process's children hold beyond its own pages."""
    own, *theirs = (kib_fields(read_proc(one, "smaps_rollup")) for one in (pid, *children))
    if not own:
        return 0
    anonymous = sum(one.get("Pss_Anon", 0) for one in (own, *theirs)) - own["Anonymous"]
    mapped = kib_fields(read_proc(pid, "status")).get("RssShmem", 0)
    return max(0, anonymous) + max(0, shared_files([pid, *children]) - mapped)


class Tree:
    """The ranks of a try with all that they start. A process is looked at once, when it is new, for its parent."""

    def __init__(self, ranks: list[int]):
        self.rank_of = {pid: pid for pid in ranks}
        self.strangers: set[int] = set()
        self.peaks = dict.fromkeys(ranks, 0)  # bytes of each rank alone
        self.beyond = dict.fromkeys(ranks, 0)  # and the most that its children held beyond it
        self.last = dict.fromkeys(ranks, 0)

    def refresh(self) -> None:
        alive = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self.rank_of = {pid: rank for pid, rank in self.rank_of.items() if pid in alive}
        self.strangers &= alive
        for pid in sorted(alive - self.strangers - self.rank_of.keys()):
            if (parent := int(stat_fields(pid)[1])) in self.rank_of:
                self.rank_of[pid] = self.rank_of[parent]
            else:
                self.strangers.add(pid)

    def living(self) -> list[int]:
        """Those that are there, and not only as a zombie whose exit code nobody has asked for."""
        self.refresh()
        return [pid for pid in self.rank_of if stat_fields(pid)[0] not in "ZX"]

    def sample(self) -> None:
        self.refresh()
        for rank in self.peaks:
            self.peaks[rank] = max(self.peaks[rank], kib_fields(read_proc(rank, "status")).get("VmHWM", 0))
            children = [pid for pid, its_rank in self.rank_of.items() if its_rank == rank != pid]
            now = held_beyond(rank, children) if children else 0
            # Twice in a row: a child that is about to start another program is, for a moment, its parent's double.
            self.beyond[rank] = max(self.beyond[rank], min(now, self.last[rank]))
            self.last[rank] = now

    def taken(self) -> list[int]:
        """Bytes of each rank, the most so far."""
        return [self.peaks[rank] + self.beyond[rank] for rank in self.peaks]
