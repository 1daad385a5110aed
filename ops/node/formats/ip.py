"""Output of iproute2's ``ip``: JSON (4.16 and later) and one-line text (CentOS 7's 4.11).

Source: ip-address(8), ip-route(8).
"""

import json
import re
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Interface, ip_interface
from typing import Any, Final

_ONE_LINE: Final = re.compile(r"\d+:\s+(?P<netdev>\S+)\s+inet6?\s+(?P<address>\S+)")


@dataclass(frozen=True, slots=True)
class NetdevAddress:
    """An address of an interface, with its subnet."""

    netdev: str
    address: IPv4Interface | IPv6Interface


def parse_addresses(text: str) -> tuple[NetdevAddress, ...]:
    """Of ``ip -j address`` or of ``ip -o address``; what is neither gives none."""
    entries = _json_list(text)
    if entries is None:
        found = (_ONE_LINE.match(line.strip()) for line in text.splitlines())
        named = [(match["netdev"], match["address"]) for match in found if match]
    else:
        named = [
            (str(entry.get("ifname", "")), f"{info.get('local')}/{info.get('prefixlen')}")
            for entry in entries
            for info in _objects(entry.get("addr_info"))
        ]
    addresses = []
    for netdev, address in named:
        try:
            # A VLAN or a veth is printed as "eth0.5@eth0".
            addresses.append(NetdevAddress(netdev.partition("@")[0], ip_interface(address)))
        except ValueError:
            continue
    return tuple(addresses)


def parse_route_netdev(text: str) -> str:
    """The interface of ``ip -j route get ADDRESS`` or ``ip route get ADDRESS``, or ""."""
    entries = _json_list(text)
    if entries is not None:
        return str(entries[0].get("dev", "")) if entries else ""
    match = re.search(r"\bdev\s+(\S+)", text)
    return match[1] if match else ""


def _json_list(text: str) -> list[dict[str, Any]] | None:
    """The objects in a JSON list; None if it is no JSON list."""
    try:
        entries = json.loads(text)
    except ValueError:
        return None
    return _objects(entries) if isinstance(entries, list) else None


def _objects(entries: object) -> list[dict[str, Any]]:
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, dict)]
