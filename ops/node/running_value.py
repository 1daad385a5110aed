"""Values below /proc/sys and /sys: compared and put back as the kernel writes and takes them."""

import re
from pathlib import Path
from typing import Final

_CHOSEN: Final = re.compile(r"\[([^\]]+)\]")


def is_same_value(shown: str, wanted: str) -> bool:
    """True if ``shown`` means ``wanted``.

    Blanks and tabs are the same, and of a list such as "always [madvise] never" the word in
    brackets counts.
    """
    if " ".join(shown.split()) == " ".join(wanted.split()):
        return True
    chosen = _CHOSEN.search(shown)
    return chosen is not None and chosen[1] == wanted.strip()


def write_value(place: Path, value: bytes) -> None:
    """One write, as the kernel wants it. OSError if it refuses."""
    with place.open("wb", buffering=0) as file:
        file.write(value)


def restore_value(place: Path, shown: bytes) -> None:
    """Make ``place`` show again what it showed. OSError if the kernel refuses.

    A list with brackets is chosen from by its word; only a plain file takes the whole text.
    """
    chosen = _CHOSEN.search(shown.decode("utf-8", errors="replace"))
    if chosen is not None:
        write_value(place, chosen[1].encode())
        if place.read_bytes() == shown:
            return
    write_value(place, shown)
