"""Output of iproute2's ``dcb`` (5.11 and later): ``pfc``, ``app``, ``buffer``.

Source: dcb-pfc(8), dcb-app(8), dcb-buffer(8).
"""

import re
from dataclasses import dataclass
from typing import Final

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)(b|Kb|Mb|)", re.IGNORECASE)
_FACTOR_OF_UNIT: Final = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20}

# Names that dcb prints instead of numbers unless it is asked with -N: /etc/iproute2/rt_dsfield.
_DSCP_OF_NAME: Final = {
    **{"default": 0, "CS0": 0, "EF": 46, "VOICE-ADMIT": 44, "LE": 1},
    **{f"CS{number}": 8 * number for number in range(1, 8)},
    **{f"AF{row}{column}": 8 * row + 2 * column for row in range(1, 5) for column in range(1, 4)},
}


@dataclass(frozen=True, slots=True)
class Buffers:
    """``dcb buffer show``.

    Attributes:
        buffer_of_priority: index of the receive buffer of each priority.
        nbytes: size of each buffer.
    """

    buffer_of_priority: dict[int, int]
    nbytes: dict[int, int]


def _pairs(text: str, name: str) -> list[tuple[str, str]]:
    """The ``key:value`` words after the word ``name``, up to the next word without a colon."""
    words = text.split()
    if name not in words:
        return []
    pairs = []
    for word in words[words.index(name) + 1 :]:
        key, colon, value = word.rpartition(":")
        if not colon:
            break
        pairs.append((key, value))
    return pairs


def _numbers(text: str, name: str) -> dict[int, int]:
    return {
        int(key): int(value)
        for key, value in _pairs(text, name)
        if key.isdecimal() and value.isdecimal()
    }


def parse_pfc(text: str) -> frozenset[int] | None:
    """Priorities with "on" in the ``prio-pfc`` line; None if there is no such line."""
    pairs = _pairs(text, "prio-pfc")
    if not pairs:
        return None
    return frozenset(int(key) for key, value in pairs if key.isdecimal() and value == "on")


def parse_dscp_map(text: str) -> dict[int, int]:
    """DSCP → priority of ``dcb app show``, whether printed with names or with numbers."""
    priorities = {}
    for key, value in _pairs(text, "dscp-prio"):
        dscp = int(key) if key.isdecimal() else _DSCP_OF_NAME.get(key)
        if dscp is not None and value.isdecimal():
            priorities[dscp] = int(value)
    return priorities


def parse_buffers(text: str) -> Buffers:
    """Receive buffers; empty if the driver shows none."""
    # Whole Kb and Mb are printed as such, everything else in bytes: "130944b", "128Kb", "1Mb".
    sizes = {
        int(key): int(float(match[1]) * _FACTOR_OF_UNIT[match[2].lower()])
        for key, value in _pairs(text, "buffer-size")
        if key.isdecimal() and (match := _SIZE.fullmatch(value))
    }
    return Buffers(_numbers(text, "prio-buffer"), sizes)
