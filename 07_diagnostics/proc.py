"""What Linux says of processes and their control groups: proc_pid_stat(5), smaps and status of /proc, cgroups(7)."""

import re
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def read_proc(pid: int | str, name: str) -> str:
    """A file of /proc/PID, empty when the process has gone."""
    try:
        return Path("/proc", str(pid), name).read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def stat_fields(pid: int) -> list[str]:
    """State, parent and so on, from the third field on."""
    return read_proc(pid, "stat").rpartition(")")[2].split() or ["X", "0"]


def kib_fields(text: str) -> dict[str, int]:
    """{"VmHWM": bytes, ..} of the lines `VmHWM:  1234 kB`."""
    return {name: 1024 * int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def memory_groups(text: str, cgroups: Path = CGROUPS) -> Iterator[tuple[Path, int]]:
    """(folder, version) of the control groups that limit a process's memory, its own first, then those above.

    text: /proc/PID/cgroup. In a container its paths may be the host's: then the folder is not there, and one above is.
    """
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        version = 1 if "memory" in controllers.split(",") else 2
        if version == 2 and controllers:
            continue
        root = cgroups / "memory" if version == 1 else cgroups
        group = root / path.strip("/")
        yield from ((folder, version) for folder in (group, *group.parents) if folder.is_relative_to(root))
