"""``/etc/os-release``: which distribution a machine has, as os-release(5) defines it."""

import re
from dataclasses import dataclass
from typing import Final

from ops.node.facts import Facts

DEBIAN: Final = "debian"
RHEL: Final = "rhel"

_PLACES: Final = ("/etc/os-release", "/usr/lib/os-release")
_ASSIGNMENT: Final = re.compile(r"^\s*([A-Z][A-Z0-9_]*)=(.*?)\s*$")
# Names in ID and ID_LIKE that decide the family.
_FAMILIES: Final = {
    "debian": DEBIAN,
    "ubuntu": DEBIAN,
    "rhel": RHEL,
    "centos": RHEL,
    "fedora": RHEL,
    "rocky": RHEL,
    "almalinux": RHEL,
}


@dataclass(frozen=True, slots=True)
class Distribution:
    """What the machine runs.

    Attributes:
        id: as the distribution calls itself ("ubuntu", "rocky"); "" if nothing says so.
        version: its VERSION_ID ("22.04", "7"); "" if it has none.
        family: "debian" or "rhel", which decides packages and places of files; "" if unknown.
    """

    id: str
    version: str
    family: str

    @property
    def major(self) -> int:
        """The number before the first dot; 0 if there is none."""
        digits = self.version.partition(".")[0]
        return int(digits) if digits.isdecimal() else 0

    @property
    def label(self) -> str:
        """For a sentence: "rocky 9.3"."""
        return f"{self.id} {self.version}".strip() or "an unknown distribution"

    def install_line(self, debian_packages: str, rhel_packages: str) -> str:
        """The command that installs packages here, or a sentence if the family is unknown."""
        if self.family == DEBIAN:
            return f"apt-get install {debian_packages}"
        if self.family == RHEL:
            # yum is the only one on 7; from 8 on it is another name of dnf.
            return f"{'yum' if self.major == 7 else 'dnf'} install {rhel_packages}"
        return f"install {debian_packages} (Debian's name) or {rhel_packages} (Red Hat's)"


def read_distribution(facts: Facts) -> Distribution:
    """The distribution; one without names if no os-release file can be read."""
    for place in _PLACES:
        text = facts.text(place)
        if text is not None:
            return parse_os_release(text)
    return Distribution("", "", "")


def parse_os_release(text: str) -> Distribution:
    """The distribution that an os-release file names."""
    values = {}
    for line in text.splitlines():
        match = _ASSIGNMENT.match(line)
        if match:
            values[match[1]] = _unquoted(match[2])
    names = [values.get("ID", "").lower(), *values.get("ID_LIKE", "").lower().split()]
    family = next((_FAMILIES[name] for name in names if name in _FAMILIES), "")
    return Distribution(names[0], values.get("VERSION_ID", ""), family)


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
        value = value[1:-1]
    return re.sub(r'\\([\\"$`\'])', r"\1", value)
