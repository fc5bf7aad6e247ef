"""What the machine gives a rank, and how near its limits it is: memory, cores, and NVML's counters of a GPU."""

import ctypes
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from proc import CGROUPS, kib_fields, memory_groups, read_proc

FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}  # by version


# ---- memory ----
def cgroup_memory(text: str, root: Path = CGROUPS) -> list[tuple[int, int]]:
    """(used, limit) of a process's control group and those above it; pages of files that may be dropped are free.

    text: /proc/PID/cgroup.
    """
    found = []
    for folder, version in memory_groups(text, root):
        with suppress(OSError, ValueError):  # not there, or "max": no limit
            limit, used = (int((folder / file).read_text()) for file in FILES[version])
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            found.append((used - int(stat.get("inactive_file", 0)), limit))
    return found


def machine_memory() -> list[tuple[int, int]]:
    with suppress(OSError):
        sizes = kib_fields(Path("/proc/meminfo").read_text())
        return [(sizes["MemTotal"] - sizes["MemAvailable"], sizes["MemTotal"])]
    return []


class MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2: 0 is arena, 4 hblkhd (mapped by itself), 7 uordblks (in use)."""

    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(10)]


def malloc_bytes() -> tuple[int, int]:
    """(allocated, reserved) of the C library's allocator, which is torch's on a CPU; (0, 0) where it is not glibc."""
    with suppress(OSError, AttributeError):
        function = ctypes.CDLL(None).mallinfo2
        function.restype = MallInfo
        info = function()
        return info.field7 + info.field4, info.field0 + info.field4
    return 0, 0


def memory_facts(before: dict[str, int]) -> dict[str, Any]:
    """Bytes, of the GPU if the rank has one. before: `counts()` when the recording began.

    peak; allocated: in use now; reserved: held by the allocator; used, limit, limited_by: the limit that is nearest.
    """
    status, after = kib_fields(read_proc("self", "status")), counts()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        stats = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()
        reserved, peak = torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
        facts: dict[str, Any] = dict(peak=peak, allocated=torch.cuda.memory_allocated(), reserved=reserved)
        # Blocks that are held and not in use could be given back; what others hold could not.
        facts |= dict(used=total - free - reserved + peak, limit=total, limited_by="the GPU")
        retries = stats.get("num_alloc_retries", 0) - before["retries"]
    else:
        allocated, reserved = malloc_bytes()
        facts, retries = dict(peak=status.get("VmHWM", 0), allocated=allocated, reserved=reserved), 0
        limits = [(*one, "the control group") for one in cgroup_memory(read_proc("self", "cgroup"))]
        limits += [(*one, "this machine's memory") for one in machine_memory()]
        for which, size, name in (("RLIMIT_AS", "VmPeak", "ulimit -v"), ("RLIMIT_DATA", "VmData", "ulimit -d")):
            limits.append((status.get(size, 0), resource.getrlimit(getattr(resource, which))[0], name))
        known = [one for one in limits if 0 < one[1] < 2**60]  # -1, or a number beyond any memory: no limit
        used, limit, name = max(known, key=lambda one: one[0] / one[1], default=(0, 0, ""))
        facts |= dict(used=used, limit=limit, limited_by=name)
    faults = after["faults"] - before["faults"]
    return facts | dict(retries=retries, swapped=status.get("VmSwap", 0), faults=faults)


def counts() -> dict[str, int]:
    """What only grows: pages read back from a disk, and the CUDA allocator's retries."""
    ready = torch.cuda.is_available() and torch.cuda.is_initialized()
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) if ready else 0
    return dict(faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt, retries=retries)


# ---- cores ----
def usable_cores() -> list[int]:
    """The numbers of the cores that this process may run on; fewer where its control group has a quota."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores[: max(1, round(int(quota) / int(period)))]
    return cores


# ---- NVML ----
def nvml_counters() -> dict[str, Any]:
    """Utilisation, clocks and link counters of this rank's GPU; empty without a GPU or without nvidia-ml-py."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return {"missing": "pip install nvidia-ml-py: utilisation and link counters"}
    found: dict[str, Any] = {}
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        return {"missing": f"NVML: {error}"}
    with suppress(pynvml.NVMLError):
        found["gpu_percent"] = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu  # of the last second or less
    with suppress(pynvml.NVMLError):
        found["sm_mhz"] = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        found["sm_mhz_max"] = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
    with suppress(pynvml.NVMLError):
        found["throttled"] = throttle_reasons(pynvml, pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    with suppress(pynvml.NVMLError):
        for name in ("TX", "RX"):  # KB/s over the last 20 ms
            counter = getattr(pynvml, f"NVML_PCIE_UTIL_{name}_BYTES")
            found[f"pcie_{name.lower()}_mb_s"] = pynvml.nvmlDeviceGetPcieThroughput(handle, counter) / 1e3
    with suppress(pynvml.NVMLError):
        for name in ("TX", "RX"):
            field = getattr(pynvml, f"NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_{name}")
            values = pynvml.nvmlDeviceGetFieldValues(handle, [(field, 0xFFFFFFFF)])  # all links of the GPU
            if values[0].nvmlReturn == pynvml.NVML_SUCCESS:
                found[f"nvlink_{name.lower()}_mb"] = values[0].value.ullVal * 1024 / 1e6  # since the driver began
    pynvml.nvmlShutdown()
    return found


def throttle_reasons(pynvml: Any, mask: int) -> list[str]:
    names = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
    return [name for name in names if mask & getattr(pynvml, f"nvmlClocksThrottleReason{name}", 0)]


def nvml_between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The counters after, with what grows (NVLink) as the difference."""
    grown = {name: after[name] - before[name] for name in after if name.startswith("nvlink") and name in before}
    return after | grown
