"""Output of ethtool 4 to 6: ``-k`` (features), ``-S`` (counters), ``-a`` (pause), ``-i`` (driver).

Source: ethtool(8).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Feature:
    """One line of ``ethtool -k``.

    Attributes:
        is_on: it is used.
        is_fixed: the driver does not let anybody change it.
    """

    is_on: bool
    is_fixed: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """``ethtool -a``: global flow control of IEEE 802.3x; None where the line is missing."""

    autonegotiates: bool | None
    receives: bool | None
    sends: bool | None


@dataclass(frozen=True, slots=True)
class Driver:
    """``ethtool -i``; "" where the line is missing."""

    name: str
    version: str
    firmware: str
    bus_address: str


def _entries(text: str) -> list[tuple[str, str]]:
    """``name: value`` lines without indentation and without the heading."""
    entries = []
    for line in text.splitlines():
        name, colon, value = line.strip().rpartition(": ")
        if colon:
            entries.append((name.strip(), value.strip()))
    return entries


def parse_features(text: str) -> dict[str, Feature]:
    """Features by name, as in "tcp-segmentation-offload: on" or "rx-all: off [fixed]".

    A value may be followed by "[requested on]" or "[not requested]".
    """
    features = {}
    for name, value in _entries(text):
        words = value.split(maxsplit=1)
        if words and words[0] in ("on", "off"):
            features[name] = Feature(words[0] == "on", "[fixed]" in value)
    return features


def parse_counters(text: str) -> Mapping[str, int]:
    """Counters by name; lines whose value is no number (queue headings) are skipped."""
    return {name: int(value) for name, value in _entries(text) if value.isdecimal()}


def parse_pause(text: str) -> Pause:
    """Pause parameters; the "RX negotiated" lines of newer versions do not count."""
    values = {
        name.strip().lower(): value.strip().lower() == "on"
        for name, _, value in (line.partition(":") for line in text.splitlines())
        if value.strip().lower() in ("on", "off")
    }
    return Pause(values.get("autonegotiate"), values.get("rx"), values.get("tx"))


def parse_driver(text: str) -> Driver:
    """The driver behind an interface."""
    values = {
        name: value.strip() for name, _, value in (s.partition(":") for s in text.splitlines())
    }
    return Driver(
        values.get("driver", ""),
        values.get("version", ""),
        values.get("firmware-version", ""),
        values.get("bus-info", ""),
    )
