"""Output of ``ibv_devinfo`` with and without ``-v``, of libibverbs 1.1 to rdma-core 59.

Source: ibv_devinfo(1).
"""

import re
from dataclasses import dataclass
from typing import Final

_DEVICE: Final = re.compile(r"hca_id:\s*(\S+)")
_PORT: Final = re.compile(r"port:\s*(\d+)\s*$")
_NUMBER_IN_BRACKETS: Final = re.compile(r"\s*\(\d+\)$")


@dataclass(frozen=True, slots=True)
class DevicePort:
    """A port of a device; "" or 0 where the line is missing.

    Attributes:
        device: "mlx5_0".
        port: counts from 1.
        firmware: of the device.
        state: "PORT_ACTIVE", …
        link_layer: "Ethernet", "InfiniBand".
        max_mtu: largest payload of a packet that the device can send, in bytes.
        active_mtu: the one that is used.
    """

    device: str
    port: int
    firmware: str
    state: str
    link_layer: str
    max_mtu: int
    active_mtu: int


def parse_devinfo(text: str) -> tuple[DevicePort, ...]:
    """All ports of all devices, in the order printed."""
    ports: list[DevicePort] = []
    device, firmware = "", ""
    port: dict[str, str] | None = None

    def finish() -> None:
        if port is not None:
            ports.append(
                DevicePort(
                    device,
                    int(port["port"]),
                    firmware,
                    _NUMBER_IN_BRACKETS.sub("", port.get("state", "")),
                    port.get("link_layer", ""),
                    _mtu(port.get("max_mtu", "")),
                    _mtu(port.get("active_mtu", "")),
                )
            )

    for line in text.splitlines():
        stripped = line.strip()
        if match := _DEVICE.match(stripped):
            finish()
            device, firmware, port = match[1], "", None
        elif match := _PORT.match(stripped):
            finish()
            port = {"port": match[1]}
        else:
            name, colon, value = stripped.partition(":")
            if not colon:
                continue
            if name == "fw_ver":
                firmware = value.strip()
            elif port is not None:
                port.setdefault(name, value.strip())
    finish()
    return tuple(ports)


def _mtu(value: str) -> int:
    """Of "4096 (5)"; 0 for "invalid MTU (0)" and the like."""
    word = value.partition(" ")[0]
    return int(word) if word.isdecimal() else 0
