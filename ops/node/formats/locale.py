"""``locale -a`` and files of variables such as /etc/locale.conf and /etc/default/locale."""

import re
from typing import Final

_VARIABLE: Final = re.compile(r"^\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*?)\s*$")


def parse_locale_names(text: str) -> frozenset[str]:
    """The locales of ``locale -a``, in the one spelling of ``normalised``."""
    return frozenset(normalised(line) for line in text.splitlines() if line.strip())


def normalised(name: str) -> str:
    """One spelling of a locale's name: glibc takes en_US.UTF-8, en_US.utf8 and en_US.UTF8.

    The charset loses its dashes and becomes lower case, as glibc's own listing has it.
    """
    base, at, modifier = name.strip().partition("@")
    language, dot, charset = base.partition(".")
    return language + dot + re.sub(r"[^A-Za-z0-9]", "", charset).lower() + at + modifier


def is_utf8(name: str) -> bool:
    """True if the name says UTF-8; one without a charset has its language's old one."""
    return normalised(name).partition("@")[0].endswith(".utf8")


def parse_variables(text: str) -> dict[str, str]:
    """Variables of a shell-like file or of the output of ``locale``; the last one wins."""
    variables = {}
    for line in text.splitlines():
        match = _VARIABLE.match(line)
        if match and not line.lstrip().startswith("#"):
            value = match[2]
            if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
                value = value[1:-1]
            variables[match[1]] = value
    return variables


def with_variable(text: str, name: str, value: str) -> str:
    """The file with ``name`` set to ``value``: its lines replaced by one, all others kept."""
    kept: list[str] = []
    is_set = False
    for line in text.splitlines():
        match = _VARIABLE.match(line)
        if match is None or match[1] != name or line.lstrip().startswith("#"):
            kept.append(line)
        elif not is_set:
            kept.append(f"{name}={value}")
            is_set = True
    if not is_set:
        kept.append(f"{name}={value}")
    return "\n".join(kept) + "\n"


def without_variable(text: str, name: str) -> str:
    """The file without lines that set ``name``."""
    kept = [
        line
        for line in text.splitlines()
        if (match := _VARIABLE.match(line)) is None
        or match[1] != name
        or line.lstrip().startswith("#")
    ]
    return "".join(line + "\n" for line in kept)
