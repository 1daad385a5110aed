"""Output of ``mlnx_qos -i INTERFACE`` of MLNX_OFED 4.x to 24.x and DOCA-OFED.

Source: NVIDIA MLNX_OFED manual, "Quality of Service".
"""

import re
from dataclasses import dataclass
from typing import Final

_MAPPING: Final = re.compile(r"prio:(\d+)\s+dscp:([\d,]+)")


@dataclass(frozen=True, slots=True)
class MlnxQos:
    """What the driver does with priorities.

    Attributes:
        trust: "dscp", "pcp", or "" if it does not say.
        dscp_map: DSCP → priority; empty unless DSCP is trusted.
        pfc_priorities: priorities with PFC, or None if it does not say.
        buffer_of_priority: receive buffer of each priority; empty before MLNX_OFED 4.4.
        buffer_nbytes: sizes of the receive buffers.
        cable_length_m: what headroom is computed for, or None.
        dcbx_mode: "OS controlled", "Firmware controlled", "".
    """

    trust: str
    dscp_map: dict[int, int]
    pfc_priorities: frozenset[int] | None
    buffer_of_priority: dict[int, int]
    buffer_nbytes: tuple[int, ...]
    cable_length_m: int | None
    dcbx_mode: str


def parse_mlnx_qos(text: str) -> MlnxQos:
    """All that is known of; lines of traffic classes are skipped."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            values.setdefault(name.strip().lower(), value.strip())
    dscp_map = {
        int(dscp): int(priority)
        for priority, dscps in _MAPPING.findall(text)
        for dscp in dscps.split(",")
        if dscp
    }
    enabled = _row(text, "enabled")
    buffers = _row(text, "buffer")
    sizes = values.get("receive buffer size (bytes)", "").partition("max_buffer")[0]
    cable = values.get("cable len", "")
    return MlnxQos(
        trust=values.get("priority trust state", "").lower(),
        dscp_map=dscp_map,
        pfc_priorities=(
            None if not enabled else frozenset(p for p, value in enumerate(enabled) if value)
        ),
        buffer_of_priority=dict(enumerate(buffers)),
        buffer_nbytes=tuple(int(size) for size in sizes.split(",") if size.strip().isdecimal()),
        cable_length_m=int(cable) if cable.isdecimal() else None,
        dcbx_mode=values.get("dcbx mode", ""),
    )


def _row(text: str, name: str) -> list[int]:
    """The numbers of the line ``name 0 0 0 1 …`` of the PFC table."""
    match = re.search(rf"^\s*{name}((?:\s+\d+)+)\s*$", text, flags=re.MULTILINE)
    return [int(number) for number in match[1].split()] if match else []
