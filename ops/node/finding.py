"""What a check found: one line for the person, one object in ``--json``."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a finding is judged."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"
    # The fact could not be had: a tool is missing, no permission, no such hardware.
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Finding:
    """One judged fact.

    Attributes:
        check: name of the check's file: "sysctl", "mtu", …
        subject: what was looked at: "net.core.rmem_max", "mlx5_0/1", …
        verdict: OK, WARN, FAIL or UNKNOWN.
        measured: the value found, as a person would write it; "" if there is none.
        wanted: the value that is right.
        reason: one sentence: why it matters, or why it cannot be seen.
        source: where that is written: man page, kernel document, vendor's manual.
        cure: what to do, a command where there is one; "" if nothing.
    """

    check: str
    subject: str
    verdict: Verdict
    measured: str
    wanted: str
    reason: str
    source: str
    cure: str = ""
