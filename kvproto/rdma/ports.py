"""Which RDMA ports this host has, and which of them and which of its addresses to use.

Read from sysfs, so that a host without RDMA needs no library to say so. ``choose_port`` is a pure
function of what was read. Source: Linux, Documentation/ABI/stable/sysfs-class-infiniband.
"""

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvproto.errors import CarrierUnavailable
from kvproto.rdma.verbs import NODE_CHECK_HINT

SYSFS: Final = Path("/sys/class/infiniband")
NODES: Final = Path("/sys/devices/system/node")
ROCE_V2: Final = "RoCE v2"
_ACTIVE: Final = "ACTIVE"
_NO_GID: Final = "0000:0000:0000:0000:0000:0000:0000:0000"


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's address table; ``netdev`` is the network interface it belongs to."""

    index: int
    address: ipaddress.IPv6Address
    kind: str
    netdev: str

    @property
    def rank(self) -> int:
        """0 for an IPv4 address, 1 for a global IPv6 address, 2 for a link-local one."""
        if self.address.ipv4_mapped is not None:
            return 0
        return 2 if self.address.is_link_local else 1

    def shared_bits(self, other: ipaddress.IPv6Address) -> int:
        """How many leading bits two addresses share; 128 for the same."""
        return 128 - (int(self.address) ^ int(other)).bit_length()


@dataclass(frozen=True, slots=True)
class Port:
    """One port as sysfs shows it. ``numa_node`` -1: unknown, or there is only one."""

    device: str
    number: int
    state: str
    link_layer: str
    numa_node: int
    gids: tuple[Gid, ...]

    @property
    def name(self) -> str:
        """As a person writes it in the setting: "mlx5_0:1"."""
        return f"{self.device}:{self.number}"

    @property
    def is_active(self) -> bool:
        """The link is up."""
        return self.state == _ACTIVE

    @property
    def roce_v2_gids(self) -> tuple[Gid, ...]:
        """Addresses that RoCE v2 can use, best first."""
        usable = (gid for gid in self.gids if gid.kind == ROCE_V2)
        return tuple(sorted(usable, key=lambda gid: (gid.rank, gid.index)))


@dataclass(frozen=True, slots=True)
class ChosenPort:
    """The port to use, and its address."""

    port: Port
    gid: Gid


def read_ports(sysfs: Path = SYSFS) -> tuple[Port, ...]:
    """Every port of every device, by name; none on a host without RDMA."""
    ports = []
    for device in sorted(_names(sysfs)):
        numa_node = _text(sysfs / device / "device" / "numa_node")
        for number in _numbers(sysfs / device / "ports"):
            folder = sysfs / device / "ports" / str(number)
            ports.append(
                Port(
                    device=device,
                    number=number,
                    state=_text(folder / "state").partition(":")[2].strip(),
                    link_layer=_text(folder / "link_layer"),
                    numa_node=int(numa_node) if numa_node.lstrip("-").isdigit() else -1,
                    gids=tuple(_gids(folder)),
                )
            )
    return tuple(ports)


def _gids(folder: Path) -> list[Gid]:
    gids = []
    for index in _numbers(folder / "gids"):
        raw = _text(folder / "gids" / str(index))
        if raw == _NO_GID:
            continue
        try:
            address = ipaddress.IPv6Address(raw)
        except ValueError:
            continue  # an entry that cannot be read holds nothing to use
        kind = _text(folder / "gid_attrs" / "types" / str(index))
        netdev = _text(folder / "gid_attrs" / "ndevs" / str(index))
        gids.append(Gid(index, address, kind, netdev))
    return gids


def own_numa_node(nodes: Path = NODES) -> int:
    """The NUMA node of the CPUs that this process may use; -1 if they are on several, or unknown.

    Memory is taken from the node of the CPU that first touches it.
    """
    mine = os.sched_getaffinity(0)
    for number in _numbers(nodes, "node"):
        if mine <= _cpus(_text(nodes / f"node{number}" / "cpulist")):
            return number
    return -1


def _cpus(text: str) -> set[int]:
    """CPUs of a list such as "0-3,8"."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _numbers(folder: Path, prefix: str = "") -> list[int]:
    """The numbers that name entries of a folder, behind ``prefix``."""
    names = [name.removeprefix(prefix) for name in _names(folder) if name.startswith(prefix)]
    return sorted(int(name) for name in names if name.isdigit())


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def _text(path: Path) -> str:
    """The file's text; "" if it is not there. Some entries cannot be read while they are empty."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def choose_port(
    ports: Sequence[Port],
    *,
    device: str = "",
    gid_index: int = -1,
    near: ipaddress.IPv6Address | None = None,
    numa_node: int = -1,
) -> ChosenPort:
    """The port and address to use.

    ``device`` and ``gid_index`` are a person's choice. Else: an active RoCE v2 port that has
    ``near`` among its addresses (the address this host listens on), else one on ``numa_node``
    (where the memory is), else the first by name; of its addresses an IPv4 one, else a global IPv6
    one, else a link-local one.

    CarrierUnavailable, in this order: no device at all; not the device that was asked for; none
    with Ethernet; none with an active link; none with a RoCE v2 address; nothing at ``gid_index``.
    """
    if not ports:
        raise CarrierUnavailable(
            "this host has no RDMA device (/sys/class/infiniband is empty): load the driver, or "
            "for a try without hardware: rdma link add rxe0 type rxe netdev eth0; "
            f"{NODE_CHECK_HINT}"
        )
    wanted = [port for port in ports if device in ("", port.device, port.name)]
    if not wanted:
        known = ", ".join(port.name for port in ports)
        raise CarrierUnavailable(f"there is no RDMA port {device}; this host has {known}")
    usable = [port for port in wanted if port.link_layer == "Ethernet"]
    if not usable:
        layers = ", ".join(f"{port.name} ({port.link_layer or 'unknown'})" for port in wanted)
        raise CarrierUnavailable(f"RoCE needs a port with link layer Ethernet; there is {layers}")
    active = [port for port in usable if port.is_active]
    if not active:
        states = ", ".join(f"{port.name} is {port.state or 'unknown'}" for port in usable)
        raise CarrierUnavailable(
            f"no RDMA port is active ({states}): bring its network interface up; {NODE_CHECK_HINT}"
        )

    def order(port: Port) -> tuple[bool, bool, str]:
        is_near = near is not None and any(gid.address == near for gid in port.roce_v2_gids)
        return not is_near, numa_node >= 0 and port.numa_node != numa_node, port.name

    active.sort(key=order)
    if gid_index >= 0:
        return _at_index(active, gid_index)
    addressed = [port for port in active if port.roce_v2_gids]
    if not addressed:
        names = ", ".join(port.name for port in active)
        raise CarrierUnavailable(
            f"{names} has no RoCE v2 address: give its network interface an IP address; "
            f"{NODE_CHECK_HINT}"
        )
    port = addressed[0]
    return ChosenPort(port, next((g for g in port.roce_v2_gids if g.address == near), _first(port)))


def choose_gid(port: Port, toward: ipaddress.IPv6Address) -> Gid:
    """The RoCE v2 address of ``port`` that has most in common with the peer's: its subnet."""
    return max(port.roce_v2_gids, key=lambda gid: (gid.shared_bits(toward), -gid.rank, -gid.index))


def _first(port: Port) -> Gid:
    return port.roce_v2_gids[0]


def _at_index(ports: Sequence[Port], gid_index: int) -> ChosenPort:
    for port in ports:
        for gid in port.gids:
            if gid.index == gid_index:
                return ChosenPort(port, gid)
    tables = "; ".join(
        f"{port.name} has "
        + (", ".join(f"{gid.index}: {gid.address} ({gid.kind})" for gid in port.gids) or "none")
        for port in ports
    )
    raise CarrierUnavailable(
        f"GID index {gid_index} has no address ({tables}): leave rdma_gid_index at -1, or give the "
        f"network interface an IP address; {NODE_CHECK_HINT}"
    )
