"""RDMA ports of a node, with their GIDs: what the kernel shows below /sys/class/infiniband.

Source: Linux Documentation/ABI/stable/sysfs-class-infiniband; InfiniBand Architecture
Specification, annex A17 (RoCEv2).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from ops.node.facts import Facts
from ops.node.formats.ip import NetdevAddress, parse_addresses
from ops.node.formats.rdma import parse_links

CLASS_FOLDER: Final = "/sys/class/infiniband"
ROCE_V2: Final = "RoCE v2"

# So many entries that are not set end the look at a table of GIDs.
MAX_UNSET_GIDS: Final = 32


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's table.

    Attributes:
        index: what a queue pair is given.
        address: IPv4 addresses are mapped ("::ffff:192.168.1.11").
        kind: "RoCE v2", "IB/RoCE v1", or "" if the kernel does not say.
        netdev: its interface, or "".
    """

    index: int
    address: IPv6Address
    kind: str
    netdev: str

    @property
    def ipv4(self) -> IPv4Address | None:
        """The IPv4 address that it stands for."""
        return self.address.ipv4_mapped

    def __str__(self) -> str:
        return f"{self.index}: {self.ipv4 or self.address} ({self.kind}, {self.netdev})"


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port; "" where the kernel does not say.

    Attributes:
        device: "mlx5_0".
        port: counts from 1.
        netdev: the Ethernet interface below.
        state: "ACTIVE", "DOWN", …
        physical_state: "LinkUp", "Disabled", …
        link_layer: "Ethernet" or "InfiniBand".
        rate: "100 Gb/sec (4X EDR)".
        is_software: rxe or siw, no hardware behind it.
        gids: entries of the table that are set.
    """

    device: str
    port: int
    netdev: str
    state: str
    physical_state: str
    link_layer: str
    rate: str
    is_software: bool
    gids: tuple[Gid, ...]

    @property
    def name(self) -> str:
        """As ``rdma link`` writes it."""
        return f"{self.device}/{self.port}"

    @property
    def folder(self) -> str:
        """Below sysfs."""
        return f"{CLASS_FOLDER}/{self.device}/ports/{self.port}"

    @property
    def is_active(self) -> bool:
        """True if packets can be sent."""
        return self.state == "ACTIVE"

    @property
    def carries_roce(self) -> bool:
        """True if it is an active one on Ethernet."""
        return self.is_active and self.link_layer == "Ethernet"

    @property
    def rate_gbps(self) -> float:
        """Gb/s of the link; 0.0 if unknown."""
        match = re.match(r"\d+(?:\.\d+)?", self.rate)
        return float(match[0]) if match else 0.0


def read_rdma_ports(facts: Facts) -> tuple[RdmaPort, ...]:
    """All ports of all devices; none without RDMA."""
    devices = facts.names(CLASS_FOLDER)
    if not devices:
        return ()
    links = parse_links(facts.run("rdma", "link").stdout)
    named = {(link.device, link.port): link.netdev for link in links}
    return tuple(
        _port(facts, device, int(port), named.get((device, int(port)), ""))
        for device in devices
        for port in facts.names(f"{CLASS_FOLDER}/{device}/ports")
        if port.isdecimal()
    )


def _port(facts: Facts, device: str, port: int, netdev: str) -> RdmaPort:
    folder = f"{CLASS_FOLDER}/{device}/ports/{port}"

    def value(name: str) -> str:
        return (facts.text(f"{folder}/{name}") or "").strip()

    gids = _gids(facts, folder)
    if not netdev:
        named = [gid.netdev for gid in gids if gid.netdev]
        below = facts.names(f"{CLASS_FOLDER}/{device}/device/net")
        netdev = named[0] if named else below[0] if below else ""
    return RdmaPort(
        device,
        port,
        netdev,
        value("state").rpartition(":")[2].strip(),  # "4: ACTIVE"
        value("phys_state").rpartition(":")[2].strip(),
        value("link_layer"),
        value("rate"),
        # rxe and siw name the interface that they sit on; a NIC has none above it.
        facts.text(f"{CLASS_FOLDER}/{device}/parent") is not None,
        gids,
    )


def _gids(facts: Facts, folder: str) -> tuple[Gid, ...]:
    gids = []
    num_unset = 0
    for index in sorted(int(name) for name in facts.names(f"{folder}/gids") if name.isdecimal()):
        try:
            address = IPv6Address((facts.text(f"{folder}/gids/{index}") or "").strip())
        except ValueError:
            continue
        if not int(address):
            # Not set. The kernel fills the first free place, and a table may have 1024.
            num_unset += 1
            if num_unset == MAX_UNSET_GIDS:
                break
            continue
        kind = (facts.text(f"{folder}/gid_attrs/types/{index}") or "").strip()
        netdev = (facts.text(f"{folder}/gid_attrs/ndevs/{index}") or "").strip()
        gids.append(Gid(index, address, kind, netdev))
    return tuple(gids)


def read_addresses(facts: Facts) -> tuple[NetdevAddress, ...]:
    """Addresses of the interfaces; none without ``ip``."""
    output = facts.run("ip", "-j", "address")
    if not output.is_ok and not output.is_missing:  # before iproute2 4.16 there was no JSON
        output = facts.run("ip", "-o", "address")
    return parse_addresses(output.stdout)


def choose_gid(port: RdmaPort, addresses: Sequence[NetdevAddress]) -> Gid | None:
    """The entry to use: RoCE v2, IPv4, and still an address of its interface.

    The index differs from host to host and moves when addresses come and go, so it is looked up and
    never configured as a number. After IPv4 comes a routable IPv6 address, then a link-local one.
    """
    current = {(entry.netdev, str(entry.address.ip)) for entry in addresses}

    def rank(gid: Gid) -> tuple[bool, bool, bool, int]:
        is_current = (gid.netdev or port.netdev, str(gid.ipv4 or gid.address)) in current
        return (gid.ipv4 is None, gid.address.is_link_local, not is_current, gid.index)

    usable = [gid for gid in port.gids if gid.kind == ROCE_V2]
    return min(usable, key=rank, default=None)
