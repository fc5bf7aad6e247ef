"""What joins the ranks of an axis, what it should give by links.toml, and whether it does.

NVLink and PCIe are asked of the driver (nvidia-ml-py), ports and interfaces of Linux (/sys/class).
"""

import os
import re
import socket
import struct
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

try:
    import tomllib as toml
except ModuleNotFoundError:  # Python 3.10
    try:
        import tomli as toml  # type: ignore[import-not-found, no-redef]
    except ModuleNotFoundError:
        toml = None  # type: ignore[assignment]

Facts = dict[str, Any]
NVLINKS = {(7, 0): "nvlink2", (8, 0): "nvlink3", (9, 0): "nvlink4", (10, 0): "nvlink5"}  # by compute capability
INFINIBAND = {100: "infiniband-edr", 200: "infiniband-hdr", 400: "infiniband-ndr", 800: "infiniband-xdr"}
SWITCHES = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_ALGO", "NCCL_PROTO")


class UsageError(ValueError):
    """The user's mistake: one line and exit code 2."""


class Link(NamedTuple):
    """What joins two ranks, or a node to the others."""

    name: str
    gb_s: float  # nominal, all its lanes, one direction
    share: float  # of that, usual for large messages
    latency_us: float  # at most, usual for small ones
    fix: str
    source: str
    how: str  # how it was found


# ---- the table ----
def load_links() -> dict[str, Any]:
    if toml is None:
        raise UsageError("Python 3.10 has no tomllib to read links.toml: pip install tomli, or use Python 3.11")
    return toml.loads(Path(__file__).with_name("links.toml").read_text())


def make_link(name: str, lanes: float | None, how: str) -> Link:
    table = load_links()
    row = table["link"][name]
    lanes = row.get("lanes", 1) if lanes is None else lanes
    fix = table["fix"][row["kind"]]
    return Link(name, row["gb_s"] * lanes, row["share"], row["latency_us"], fix, row["source"], how)


def read_given(text: str, axes: Sequence[str]) -> dict[str, Link]:
    """Returns {axis: Link} of --link: NAME for all axes, or AXIS=NAME,..; NAME may be 8xNAME, for 8 of them."""
    names = load_links()["link"]
    given: dict[str, Link] = {}
    for part in text.split(","):
        axis, equals, link = part.rpartition("=")
        found = re.fullmatch(r"(?:(\d+)x)?(.+)", link)
        if (equals and axis not in axes) or not found or found[2] not in names:
            raise UsageError(f"--link {part!r}: use [AXIS=][8x]NAME with {', '.join(names)}; axes: {', '.join(axes)}")
        made = make_link(found[2], float(found[1]) if found[1] else None, "--link")
        given |= {axis: made} if equals else dict.fromkeys(axes, made)
    return given


# ---- facts of a rank ----
def identify_node():
    """Returns what tells this node from others: host name, kernel boot, network namespace (a container counts)."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/net"
    parts = socket.gethostname(), boot.read_text().strip() if boot.exists() else ""
    return "/".join((*parts, os.readlink(network) if os.path.islink(network) else ""))


def collect_facts(device: torch.device) -> Facts:
    """All of this rank that decides which link it uses; plain data."""
    interface = interface_used("NCCL" if device.type == "cuda" else "GLOO")
    return {
        "node": identify_node(),
        "interface": interface,
        "gbit": speed(interface) if interface and is_real(interface) else None,
        "ports": [port["gbit"] for port in infiniband() if port["state"] == "ACTIVE"],
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
        "gpu": gpu_links(device) if device.type == "cuda" else None,
    }


def read(*path: str | Path) -> str | None:
    """The text of a file, or None where there is none."""
    try:
        return Path(*path).read_text().strip()
    except OSError:
        return None


def interface_used(library: str) -> str | None:
    """The one that NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names, else the one on the way to rank 0's node."""
    own = addresses()
    named = os.environ.get(f"{library}_SOCKET_IFNAME", "").split(",")[0].lstrip("=")
    if named and (found := [name for name in own if name.startswith(named)]):
        return found[0]
    leaves = route(os.environ.get("MASTER_ADDR", ""))
    return next((name for name, address in own.items() if address and address == leaves), None)


def is_real(interface: str) -> bool:
    """A card, or several bonded. Of others (veth, bridges, tunnels) the speed that Linux shows is made up."""
    folder = Path("/sys/class/net", interface)
    return (folder / "device").exists() or (folder / "bonding").exists()


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


def gpu_links(device: torch.device) -> Facts:
    """This rank's GPU, and by NVML: PCIe generation and width, NVLinks, the UUIDs of GPUs that they reach."""
    card = torch.cuda.get_device_properties(device)
    found: Facts = {"uuid": f"GPU-{card.uuid}", "capability": (card.major, card.minor)}
    try:
        import pynvml as nvml  # type: ignore[import-not-found, unused-ignore]

        nvml.nvmlInit()
    except ModuleNotFoundError:
        return found | {"lacks": "pip install nvidia-ml-py"}
    except nvml.NVMLError as error:
        return found | {"lacks": f"NVML: {error}"}

    def ask(function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except nvml.NVMLError:  # what a card lacks is not supported
            return None

    own = ask(nvml.nvmlDeviceGetHandleByUUID, found["uuid"])
    others = [ask(nvml.nvmlDeviceGetHandleByIndex, index) for index in range(nvml.nvmlDeviceGetCount())]
    by_nvlink = nvml.NVML_P2P_CAPS_INDEX_NVLINK
    joined = [one for one in others if ask(nvml.nvmlDeviceGetP2PStatus, own, one, by_nvlink) == nvml.NVML_P2P_STATUS_OK]
    lanes = [ask(nvml.nvmlDeviceGetNvLinkState, own, lane) for lane in range(nvml.NVML_NVLINK_MAX_LINKS)]
    found |= {
        "generation": ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, own),
        "width": ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, own),
        "nvlinks": lanes.count(nvml.NVML_FEATURE_ENABLED),
        "reached": [ask(nvml.nvmlDeviceGetUUID, one) for one in joined],
    }
    nvml.nvmlShutdown()
    return found


# ---- which link? ----
def find_link(groups: Sequence[Sequence[Facts]], backend: str) -> tuple[Link | None, str]:
    """The slowest link in these groups of ranks; or None, and why it is not known."""
    links = []
    for group in groups:
        across = len({one["node"] for one in group}) > 1
        for one in group:
            link, why = network_of(one, backend) if across else inside_of(one, group, backend)
            if link is None:
                return None, why
            links.append(link)
    return min(links, key=lambda link: link.gb_s), ""


def network_of(one: Facts, backend: str) -> tuple[Link | None, str]:
    """A node's way to others: NCCL takes all its active InfiniBand ports together, else one interface carries all."""
    ports = one["ports"] if backend == "nccl" and one["switches"].get("NCCL_IB_DISABLE", "0") == "0" else []
    if ports:
        gbit, number = Counter(ports).most_common(1)[0]
        if gbit not in INFINIBAND:
            return None, f"InfiniBand of {gbit:g} Gbit/s is not in links.toml"
        return make_link(INFINIBAND[gbit], number, f"{number} active ports"), ""
    if one["gbit"] is None:
        return None, f"Linux does not know the speed of interface {one['interface']}"
    name = f"{one['gbit']:g}gbe"
    if name not in load_links()["link"]:
        return None, f"{one['interface']} of {one['gbit']:g} Gbit/s is not in links.toml"
    return make_link(name, 1, one["interface"]), ""


def inside_of(one: Facts, group: Sequence[Facts], backend: str) -> tuple[Link | None, str]:
    """What joins a rank to the others on its node."""
    if backend != "nccl":
        return make_link("loopback", 1, "gloo"), ""
    gpu, others = one["gpu"], {other["gpu"]["uuid"] for other in group} - {one["gpu"]["uuid"]}
    if "lacks" in gpu:
        return None, f"the driver was not asked ({gpu['lacks']})"
    if others <= set(gpu["reached"]) and gpu["nvlinks"] and tuple(gpu["capability"]) in NVLINKS:
        return make_link(NVLINKS[tuple(gpu["capability"])], gpu["nvlinks"], f"{gpu['nvlinks']} links"), ""
    name = f"pcie{gpu['generation']}"
    if name not in load_links()["link"] or not gpu["width"]:
        return None, f"PCIe {gpu['generation']} with {gpu['width']} lanes is not in links.toml"
    return make_link(name, gpu["width"] / 16, f"{gpu['width']} lanes"), ""


def sharing(groups: Sequence[Sequence[int]], nodes: Sequence[int]) -> int:
    """How many groups at most leave one node at the same time, and share its way to others."""
    leaving = Counter(node for group in groups if len(on := {nodes[rank] for rank in group}) > 1 for node in on)
    return max(leaving.values(), default=1)


def leaving_a_node(collective: str, group: Sequence[int], nodes: Sequence[int]) -> float:
    """Bytes that leave a node over those that busbw counts: 1 in a ring; in an all_to_all all of its ranks send."""
    most = max(Counter(nodes[rank] for rank in group).values())
    return most * (len(group) - most) / (len(group) - 1) if collective == "all_to_all" and most < len(group) else 1


# ---- is it as it should be? ----
def judge_link(collective: str, busbw: float, alpha_us: float | None, link: Link, shares: float) -> Facts:
    """busbw: GB/s of a large message; alpha_us: of send_recv, where that was measured; shares: of the link's rate."""
    gives = link.gb_s / shares
    enough, late = busbw >= link.share * gives, alpha_us is not None and alpha_us > link.latency_us
    text = f"{collective} reaches {busbw:.3g} GB/s, {busbw / gives:.0%} of the {gives:.4g} that {link.name} gives"
    text += f" each of {shares:g}" if shares != 1 else ""
    faults = [] if enough else [f"slow, {link.share:.0%} is usual"]
    faults += [f"slow to start, {alpha_us:.0f} us, {link.latency_us:g} is usual"] if late else []
    return {
        "collective": collective,
        "busbw_gb_s": busbw,
        "gives_gb_s": gives,
        "reached": busbw / gives,
        "as_it_should_be": not faults,
        "text": f"{text}: {'; '.join(faults) or 'as it should be'}",
        "fix": link.fix if faults else "",
    }
