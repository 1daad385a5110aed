"""Settings as ``sysctl -a`` prints them and as files of sysctl.d(5) hold them."""

import re
from dataclasses import dataclass
from typing import Final

_SETTING: Final = re.compile(r"^(-?)\s*([A-Za-z0-9_./*?:@\[\]-]+?)\s*=\s*(.*?)\s*$")


@dataclass(frozen=True, slots=True)
class Setting:
    """One assignment.

    Attributes:
        key: with dots ("net.core.rmem_max"), also where the file has slashes.
        value: blanks and tabs between words are one blank.
        line_number: from 1.
    """

    key: str
    value: str
    line_number: int


def parse_settings(text: str) -> tuple[Setting, ...]:
    """The assignments in order. Comments (# and ;) and lines that assign nothing are skipped."""
    settings = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped[0] in "#;":
            continue
        match = _SETTING.match(stripped)
        if match:
            settings.append(Setting(dotted(match[2]), " ".join(match[3].split()), number))
    return tuple(settings)


def dotted(key: str) -> str:
    """The key with dots.

    sysctl.d(5): whichever of "." and "/" comes first is the separator, so that
    "net/ipv4/conf/eth0.5/mtu" names the interface eth0.5. Its dot is kept as "/" here.
    """
    first = re.search(r"[./]", key)
    if first is None or first[0] == ".":
        return key
    return key.translate(str.maketrans("./", "/."))


def value_path(key: str) -> str:
    """The file below /proc/sys that holds the running value."""
    return "/proc/sys/" + key.translate(str.maketrans("./", "/."))
