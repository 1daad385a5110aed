"""Output of ``lspci -vvv -D``, run by root (others do not see capabilities).

Source: lspci(8), PCI Express Base Specification (ACS, Device Control).
"""

import re
from dataclasses import dataclass
from typing import Final

_ADDRESS: Final = re.compile(r"((?:[0-9a-f]{4,}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\s+(.*)")


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A device; None where its capability was not printed.

    Attributes:
        address: with its domain, "0000:4b:00.0".
        title: kind and name.
        redirects_requests: ACS sends peer-to-peer requests up to the root complex ("ReqRedir+").
        orders_relaxed: relaxed ordering is allowed ("RlxdOrd+").
    """

    address: str
    title: str
    redirects_requests: bool | None
    orders_relaxed: bool | None


def parse_devices(text: str) -> tuple[PciDevice, ...]:
    """All devices, in the order printed."""
    devices = []
    # A device starts in the first column, its capabilities are indented.
    for block in re.split(r"\n(?=\S)", text):
        match = _ADDRESS.match(block)
        if match is None:
            continue
        address = match[1] if match[1].count(":") == 2 else f"0000:{match[1]}"
        devices.append(
            PciDevice(
                address,
                match[2].partition("\n")[0],
                _flag(block, r"ACSCtl:.*?ReqRedir([+-])"),
                _flag(block, r"DevCtl:(?:.*\n)?.*?RlxdOrd([+-])"),
            )
        )
    return tuple(devices)


def _flag(block: str, pattern: str) -> bool | None:
    match = re.search(pattern, block)
    return None if match is None else match[1] == "+"
