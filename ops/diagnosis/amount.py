"""Figures as a person reads them: three digits and a unit."""

from typing import Final

_PREFIXES: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def bytes_text(nbytes: float) -> str:
    """Such as "16.8 MB"."""
    for factor, prefix in _PREFIXES:
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.3g} {prefix}B"
    return f"{nbytes:.3g} B"


def seconds_text(seconds: float) -> str:
    """Such as "2.31 ms"."""
    if abs(seconds) >= 1:
        return f"{seconds:.3g} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"


def number_text(value: float | None) -> str:
    """Such as "12.3"."""
    if value is None:
        return "unknown"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def time_text(value: float | None) -> str:
    """``seconds_text``, if there are any."""
    return "unknown time" if value is None else seconds_text(value)


def size_text(value: float | None) -> str:
    """``bytes_text``, if there are any."""
    return "unknown bytes" if value is None else bytes_text(value)


def rate_text(bytes_per_s: float | None) -> str:
    """Such as "596 MB/s"."""
    return "an unknown rate" if bytes_per_s is None else f"{bytes_text(bytes_per_s)}/s"


def share_text(share: float | None) -> str:
    """Such as "12%"."""
    return "an unknown part" if share is None else f"{share:.0%}"
