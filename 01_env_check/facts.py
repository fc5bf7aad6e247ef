"""What one rank knows about its own process, machine, network and GPU: plain data, no opinion (rules.py has those)."""

import importlib.metadata as metadata
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

try:
    import pynvml  # type: ignore[import-not-found, unused-ignore]
except ModuleNotFoundError:
    pynvml = None  # optional: `pip install nvidia-ml-py` adds GPU links, ECC and Xid

CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io")
# NVML's distance between two GPUs in the words of `nvidia-smi topo -m`, nearest first.
DISTANCES = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def collect(device: torch.device, local_rank: int) -> dict[str, Any]:
    """Every fact of this rank as JSON-ready data; None is unknown or absent. device: where this rank would train."""
    return {
        "device": device.type,
        "local_rank": local_rank,
        **software(),
        **machine(),
        **network(),
        **cards(device),
    }


# ---- software ----
def software() -> dict[str, Any]:
    """Versions. The NCCL version is asked of the library that this process really loaded."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda and torch.cuda.is_available() else None
    names = (str(dist.metadata["Name"]).lower() for dist in metadata.distributions() if dist.metadata)
    wheels = {name: metadata.version(name) for name in sorted(names) if name.startswith("nvidia-nccl-cu")}
    names_in_conda = [path.stem for path in Path(sys.prefix, "conda-meta").glob("*.json")]
    conda = [name for name in names_in_conda if re.match(r"(nccl|cuda-cudart|cudatoolkit|pytorch-cuda)-\d", name)]
    searched = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    strays = [str(path) for folder in searched if folder for path in sorted(Path(folder).glob("libnccl.so*"))]
    preloaded = [path for path in re.split("[: ]", os.environ.get("LD_PRELOAD", "")) if "libnccl" in path]
    from_pip = (metadata.distribution("torch").read_text("INSTALLER") or "").strip() != "conda"
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "nccl_wheels": ", ".join(f"{name} {version}" for name, version in wheels.items()) or None,
        "several_nccl_wheels": len(wheels) > 1,
        "nccl_differs_from_wheel": bool(nccl and wheels and all(not v.startswith(nccl) for v in wheels.values())),
        "nccl_on_library_path": ", ".join([*preloaded, *strays][:2]) or None,
        "conda_cuda_beside_pip": (", ".join(conda[:3]) or None) if torch.version.cuda and from_pip else None,
        "numpy": version("numpy"),
        "deepspeed": version("deepspeed"),
    }


def version(package: str) -> str | None:
    """The installed version of a package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# ---- machine ----
def machine() -> dict[str, Any]:
    """Kernel, limits and CPUs. KiB and MiB are powers of two; a limit of None is "unlimited"."""

    def limit(kind: int, unit: int = 1) -> int | None:
        soft = resource.getrlimit(kind)[0]
        return None if soft == resource.RLIM_INFINITY else soft // unit

    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    nodes = Path("/sys/devices/system/node").glob("node[0-9]*")
    numa = sorted({int(node.name[4:]) for node in nodes if any((node / f"cpu{cpu}").exists() for cpu in cpus)})
    shm = shutil.disk_usage("/dev/shm").total >> 20 if os.path.isdir("/dev/shm") else None
    # A machine is one kernel boot; a container with its own host name and network on it counts as a node.
    identity = [socket.gethostname(), read("/proc/sys/kernel/random/boot_id"), link("/proc/self/ns/net")]
    return {
        "host": socket.gethostname(),
        "node": "/".join(str(part) for part in identity),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "container": any(os.path.exists(mark) for mark in CONTAINER_MARKS),
        "shm_mib": shm,
        "memlock_kib": limit(getattr(resource, "RLIMIT_MEMLOCK", 8), 1024) if sys.platform == "linux" else None,
        "open_files": limit(resource.RLIMIT_NOFILE),
        "cpus": cpus,
        "cpu_count": os.cpu_count(),
        "numa": numa,
        "threads": torch.get_num_threads(),
        # nvidia-peermem without the path of its forerunner, the only one that NCCL up to 2.22.3 looks for
        "peermem": "nvidia_peermem" in (read("/proc/modules") or "")
        and not os.path.exists("/sys/kernel/mm/memory_peers/nv_mem/version"),
        "env": {name: value for name, value in sorted(os.environ.items()) if watched(name)},
    }


def watched(name: str) -> bool:
    """The environment variables that steer communication."""
    others = ("OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING", "TORCHELASTIC_MAX_RESTARTS")
    return name.startswith(("NCCL_", "GLOO_", "TORCH_")) or name in others


def read(*path: str | Path) -> str | None:
    """The text of a file, or None where there is none."""
    try:
        return Path(*path).read_text().strip()
    except OSError:
        return None


def link(path: str) -> str | None:
    """Where a symbolic link points, or None where there is none."""
    return os.readlink(path) if os.path.islink(path) else None


# ---- network ----
def network() -> dict[str, Any]:
    """Addresses, the interface on the way to rank 0, and InfiniBand. Speeds in Gbit/s, or None."""
    master = os.environ.get("MASTER_ADDR")
    interfaces = addresses()
    used = next((name for name, address in interfaces.items() if address == route(master)), None) if master else None
    return {
        "host_address": resolve(socket.gethostname()),
        "master_address": resolve(master) if master else None,
        "interface": used,
        "interface_gbit": speed(used) if used else None,
        "interfaces": interfaces,
        "infiniband": infiniband(),
    }


def resolve(name: str) -> str | None:
    """The first address that a host name stands for; None if it stands for none."""
    try:
        return str(socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)[0][4][0])
    except OSError:
        return None


def route(name: str) -> str | None:
    """The own address that packets to a host leave from. Connecting a UDP socket sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def addresses() -> dict[str, str | None]:
    """Interface -> its IPv4 address, or its first IPv6 address; empty where this is not Linux."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found: dict[str, str | None] = {}
    sixes = {line.split()[5]: line.split()[0] for line in reversed((read("/proc/net/if_inet6") or "").splitlines())}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                found[name] = socket.inet_ntoa(answer[20:24])
            except OSError:
                six = sixes.get(name)
                found[name] = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(six)) if six else None
    return found


def speed(interface: str) -> float | None:
    """Gbit/s of a network interface, where its driver tells."""
    told = read("/sys/class/net", interface, "speed")
    return int(told) / 1000 if told and int(told) > 0 else None


def infiniband() -> list[dict[str, Any]]:
    """One entry per port: device, state ("ACTIVE", "DOWN", ...) and rate in Gbit/s. RoCE cards are listed here too."""
    ports = []
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        state, rate = read(port, "state") or "", read(port, "rate") or ""  # "4: ACTIVE", "400 Gb/sec (4X NDR)"
        gbit = float(rate.split()[0]) if rate else 0.0
        ports.append({"device": port.parts[4], "state": state.split()[-1] if state else "?", "gbit": gbit})
    return ports


# ---- GPU ----
def cards(device: torch.device) -> dict[str, Any]:
    """The GPU of this rank. ECC errors, links and PCIe come from NVML, where nvidia-ml-py is installed."""
    facts: dict[str, Any] = {"gpus": torch.cuda.device_count(), "gpu": None, "gpu_error": None, "driver": driver()}
    facts["fabric_manager"] = fabric_manager()
    facts["nvml"] = pynvml is not None
    if device.type != "cuda":
        return facts
    try:
        card = torch.cuda.get_device_properties(device)
        uuid = f"GPU-{card.uuid}"
        facts["gpu"] = {
            "name": card.name,
            "memory_mib": card.total_memory >> 20,
            "uuid": uuid,
            "capability": f"{card.major}.{card.minor}",
            "has_kernels": has_kernels(card.major, card.minor, torch.cuda.get_arch_list()),
            **nvml_facts(uuid),
        }
    except RuntimeError as error:
        facts["gpu_error"] = str(error).splitlines()[0]
    return facts


def driver() -> str | None:
    """The NVIDIA driver's version, read from the kernel: it is known even where CUDA fails to start."""
    found = re.search(r"Kernel Module .*?(\d+\.[\d.]+)", read("/proc/driver/nvidia/version") or "")
    return found.group(1) if found else None


def fabric_manager() -> str | None:
    """The version of Fabric Manager, which NVSwitch machines need; None where it is not installed."""
    program = shutil.which("nv-fabricmanager")
    if not program:
        return None
    try:
        text = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=3).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found.group(0) if found else None


def has_kernels(major: int, minor: int, built_for: list[str]) -> bool:
    """Whether torch was built for a GPU. sm_80 also runs on 8.6 (same major); compute_80 is PTX: on anything newer."""
    for kind, digits, suffix in re.findall(r"(sm|compute)_(\d+)([a-z]?)", " ".join(built_for)):
        built = int(digits[:-1]), int(digits[-1])
        if suffix and built != (major, minor):  # sm_90a runs on 9.0 alone
            continue
        if built <= (major, minor) and (kind == "compute" or built[0] == major):
            return True
    return False


def nvml_facts(uuid: str) -> dict[str, Any]:
    """ECC, row remapping, PCIe, NVLink and the distance to the other GPUs of the node (by UUID), or {} without NVML.

    NVML raises NotSupported for what a card lacks: that fact is None. PCIe is the highest that card and slot agree on.
    """
    if pynvml is None:
        return {}
    nvml = pynvml

    def ask(function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except nvml.NVMLError:
            return None

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # the driver or its library is not there
        return {}
    try:
        handle = ask(nvml.nvmlDeviceGetHandleByUUID, uuid)
        if handle is None:
            return {}
        bus = ask(nvml.nvmlDeviceGetPciInfo, handle)
        where = bus.busId.decode() if bus and isinstance(bus.busId, bytes) else bus.busId if bus else ""
        numa = read("/sys/bus/pci/devices", where[-12:].lower(), "numa_node") if where else None  # 0000:41:00.0
        wrong = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        remapped = ask(nvml.nvmlDeviceGetRemappedRows, handle)  # (correctable, uncorrectable, pending, failed)
        distances = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            other = ask(nvml.nvmlDeviceGetHandleByIndex, index)
            other_uuid = ask(nvml.nvmlDeviceGetUUID, other) if other else None
            if other_uuid and other_uuid != uuid:
                joined = ask(nvml.nvmlDeviceGetP2PStatus, handle, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
                level = ask(nvml.nvmlDeviceGetTopologyCommonAncestor, handle, other)
                distances[other_uuid] = "NV" if joined == nvml.NVML_P2P_STATUS_OK else DISTANCES.get(level, "SYS")
        return {
            "ecc_uncorrected": ask(nvml.nvmlDeviceGetTotalEccErrors, handle, *wrong),
            "rows_pending": bool(remapped and remapped[2]),
            "rows_failed": bool(remapped and remapped[3]),
            "pcie_generation": ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            "pcie_width": ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            "nvlinks": sum(
                ask(nvml.nvmlDeviceGetNvLinkState, handle, i) == 1 for i in range(nvml.NVML_NVLINK_MAX_LINKS)
            ),
            "numa": int(numa) if numa and int(numa) >= 0 else None,
            "distances": distances,
        }
    finally:
        nvml.nvmlShutdown()


class XidWatch:
    """Collects the Xid errors that the driver reports for one GPU while this object lives (NVML keeps no history)."""

    def __init__(self, uuid: str | None):
        self.events = None
        if pynvml is None or uuid is None:
            return
        try:
            pynvml.nvmlInit()
            self.events = pynvml.nvmlEventSetCreate()
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self.events)
        except pynvml.NVMLError:
            self.events = None  # inside some containers and virtual machines the driver offers no events

    def seen(self) -> list[int]:
        """The Xid numbers so far (NVIDIA's "XID Errors" page explains each)."""
        numbers: list[int] = []
        while self.events is not None and len(numbers) < 100:
            try:
                numbers.append(int(pynvml.nvmlEventSetWait_v2(self.events, 0).eventData))
            except pynvml.NVMLError:  # the usual end: time-out, nothing more to report
                break
        return numbers
