"""Whether the clock is kept by NTP: ``timedatectl``, ``chronyc tracking``, ``adjtimex --print``.

Source: timedatectl(1), chronyc(1), adjtimex(8).
"""

import re
from typing import Final

# STA_UNSYNC in the status bits: adjtimex(2).
_STA_UNSYNC: Final = 0x40


def parse_timedatectl(text: str) -> bool | None:
    """True if synchronized; None if it does not say.

    systemd 219 (CentOS 7) writes "NTP synchronized: yes", 239 and later "System clock
    synchronized: yes", ``timedatectl show`` "NTPSynchronized=yes".
    """
    match = re.search(r"(?:synchronized:\s*|NTPSynchronized=)(yes|no)\b", text)
    return None if match is None else match[1] == "yes"


def parse_chronyc(text: str) -> bool | None:
    """True if chronyd follows a source; None if it does not say."""
    match = re.search(r"^Leap status\s*:\s*(.+?)\s*$", text, flags=re.MULTILINE)
    return None if match is None else match[1] != "Not synchronised"


def parse_adjtimex(text: str) -> bool | None:
    """True if the kernel counts its clock as synchronized; None if it does not say."""
    match = re.search(r"^\s*status:\s*(\d+)", text, flags=re.MULTILINE)
    return None if match is None else not int(match[1]) & _STA_UNSYNC
