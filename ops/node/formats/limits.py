"""Limits of a process: ``/proc/PID/limits``.

Source: proc_pid_limits(5).
"""

import re
from dataclasses import dataclass
from typing import Final

_LINE: Final = re.compile(r"(?P<name>Max .+?)\s{2,}(?P<soft>\S+)\s+(?P<hard>\S+)")


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit; None is unlimited."""

    soft: int | None
    hard: int | None


def parse_limits(text: str) -> dict[str, Limit]:
    """Limits by the kernel's name, as "Max open files" or "Max locked memory"."""
    limits = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            limits[match["name"]] = Limit(_value(match["soft"]), _value(match["hard"]))
        except ValueError:  # the heading
            continue
    return limits


def _value(word: str) -> int | None:
    return None if word == "unlimited" else int(word)
