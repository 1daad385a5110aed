"""``modinfo MODULE``: which options a kernel module has; and the files of modprobe.d(5)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_FIELD: Final = re.compile(r"^([a-z_]+):\s*(.*)$")
_PARAMETER: Final = re.compile(r"^(\w+)(?::(.*?))?(?:\s*\((\w+(?: of \w+)*)\))?$")


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """What a module says about itself.

    Attributes:
        name: "" if modinfo is too old to print it.
        version: the driver's own, for one from outside the kernel; "" if it has none.
        vermagic: the kernel that it was built for.
        parameters: its options, in the order printed.
    """

    name: str
    version: str
    vermagic: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModuleOption:
    """One ``name=value`` of an ``options`` line."""

    module: str
    name: str
    value: str


def parse_modinfo(text: str) -> ModuleInfo:
    """Fields that matter to us; a value that goes on in the next line is not needed whole."""
    fields: dict[str, str] = {}
    parameters: list[str] = []
    for line in text.splitlines():
        match = _FIELD.match(line)
        if match is None:
            continue
        if match[1] == "parm":
            name = _PARAMETER.match(match[2].strip())
            if name is not None and name[1] not in parameters:
                parameters.append(name[1])
        else:
            fields.setdefault(match[1], match[2].strip())
    return ModuleInfo(
        fields.get("name", ""),
        fields.get("version", ""),
        fields.get("vermagic", ""),
        tuple(parameters),
    )


def parse_options(text: str) -> tuple[ModuleOption, ...]:
    """The ``options`` lines of a modprobe.d file; "-" and "_" in a module's name are one."""
    joined = re.sub(r"\\\n", " ", text)
    options = []
    for line in joined.splitlines():
        words = line.split("#", 1)[0].split()
        if len(words) < 3 or words[0] != "options":
            continue
        module = words[1].replace("-", "_")
        for word in words[2:]:
            name, equals, value = word.partition("=")
            # A word without "=" switches a bool option on.
            options.append(ModuleOption(module, name, value if equals else "1"))
    return tuple(options)


def parse_module_names(texts: Sequence[str]) -> frozenset[str]:
    """The modules that files of modules-load.d(5) load: one name a line."""
    return frozenset(
        line.strip().replace("-", "_")
        for text in texts
        for line in text.splitlines()
        if line.strip() and line.strip()[0] not in "#;"
    )
