"""How fast bytes can leave this machine at most: no true figure beats it."""

from dataclasses import dataclass
from typing import Final

from ops.node.facts import Facts

_BITS_PER_BYTE: Final = 8
_NETWORK: Final = "/sys/class/net"


@dataclass(frozen=True, slots=True)
class LineRate:
    """Bytes in a second, and where that is known from."""

    bytes_per_s: float
    origin: str


def named_line_rate(gigabits_per_s: float) -> LineRate:
    """The one that a person named."""
    return LineRate(gigabits_per_s * 1e9 / _BITS_PER_BYTE, "--line-rate-gbps")


def read_line_rate(facts: Facts) -> LineRate | None:
    """The fastest network card that is up, or None.

    Source: Linux, Documentation/ABI/testing/sysfs-class-net: ``speed`` is in Mbit/s, and -1 or an
    error where there is no link. Interfaces without a device below them (bridges, veth, loopback)
    name a speed that no wire has.
    """
    best: LineRate | None = None
    for name in facts.names(_NETWORK):
        if not facts.names(f"{_NETWORK}/{name}/device"):
            continue
        text = (facts.text(f"{_NETWORK}/{name}/speed") or "").strip()
        if not text.isdecimal() or int(text) == 0:
            continue
        rate = LineRate(int(text) * 1e6 / _BITS_PER_BYTE, f"{_NETWORK}/{name}/speed")
        if best is None or rate.bytes_per_s > best.bytes_per_s:
            best = rate
    return best
