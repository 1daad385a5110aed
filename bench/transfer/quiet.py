"""Whether the machine is busy with anything but us, judged while all of ours are stopped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

_LOOK_S: Final = 0.05
# Of all cores. One tick of the clock in a look is no business.
_MAX_BUSY: Final = 0.15


def busy_fraction(look_s: float = _LOOK_S) -> float:
    """Share of all cores that was in use during ``look_s`` seconds, from the kernel's count."""
    before = _ticks()
    time.sleep(look_s)
    busy, idle = (now - then for now, then in zip(_ticks(), before, strict=True))
    return busy / max(1, busy + idle)


def wait_quiet(patience_s: float) -> bool:
    """Return True at once when others rest, False when they still work after ``patience_s``."""
    end_at = time.monotonic() + patience_s
    while busy_fraction() > _MAX_BUSY:
        if time.monotonic() >= end_at:
            return False
    return True


def _ticks() -> tuple[int, int]:
    """(busy, idle) of all cores since boot; stolen time counts as busy."""
    line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    values = [int(value) for value in line.split()[1:9]]
    idle = values[3] + values[4]
    return sum(values) - idle, idle
