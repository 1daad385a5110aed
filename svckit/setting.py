"""One setting of a service: a field of a frozen config dataclass with limits beside it.

A field's metadata may hold ``help``, ``min``, ``max`` (both inclusive), ``choices``, ``parse``
(text to value), ``flag`` (another flag name), ``hidden`` and ``secret``. ``option`` writes that
metadata; ``settings_of`` reads it back.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from svckit.errors import ConfigError

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
# Binary units only: a KV pool of "1 GB" that is 7 % smaller than expected helps nobody.
_NBYTES_UNITS: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_MAX_CPU: Final = 4095  # CPU_SETSIZE of large kernels


def option(
    help_text: str,
    *,
    default: Any = dataclasses.MISSING,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    parse: Callable[[str], Any] | None = None,
    flag: str | None = None,
    is_hidden: bool = False,
) -> Any:
    """A dataclass field with its help text and limits; without ``default`` it is required."""
    metadata: dict[str, Any] = {"help": help_text, "choices": choices, "hidden": is_hidden}
    optional = {"min": minimum, "max": maximum, "parse": parse, "flag": flag}
    metadata.update({key: value for key, value in optional.items() if value is not None})
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Setting:
    """What may be written into one field, and how a raw value becomes a checked one."""

    name: str
    type: Any  # bool, int, float, str, Path, or tuple[str, ...]
    is_optional: bool
    default: Any
    metadata: Mapping[str, Any]

    @property
    def flag(self) -> str:
        """The command-line flag, kebab case."""
        return str(self.metadata.get("flag") or "--" + self.name.replace("_", "-"))

    @property
    def is_required(self) -> bool:
        """True if the dataclass gives no default."""
        return self.default is dataclasses.MISSING

    @property
    def choices(self) -> tuple[str, ...]:
        """The only values allowed, empty if there is no such list."""
        return tuple(self.metadata.get("choices") or ())

    def coerce(self, raw: object, origin: str) -> Any:
        """Turn ``raw`` (text, or a value of the right type) into a checked value.

        Raises ConfigError naming field, origin, value and limit; checked in the order: type,
        choices, minimum, maximum.
        """
        if self.is_optional and (raw is None or raw == ""):
            return None
        try:
            value = self._convert(raw)
        except ValueError as exc:
            raise self._refusal(raw, origin, str(exc)) from None
        if self.choices and value not in self.choices:
            raise self._refusal(raw, origin, "one of " + ", ".join(self.choices))
        low, high = self.metadata.get("min"), self.metadata.get("max")
        if low is not None and value < low:
            raise self._refusal(raw, origin, f"at least {low}")
        if high is not None and value > high:
            raise self._refusal(raw, origin, f"at most {high}")
        return value

    def _refusal(self, raw: object, origin: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.name} from {origin} is {raw!r}, but it must be {expected}.")

    def _convert(self, raw: object) -> Any:
        """Raise ValueError whose text completes the sentence "it must be ..."."""
        parse = self.metadata.get("parse")
        if parse is not None:
            # A TOML file may hold the number itself where a flag holds text.
            is_number = isinstance(raw, int) and not isinstance(raw, bool)
            return parse(str(raw)) if isinstance(raw, str) or is_number else raw
        return _CONVERTERS[self.type](raw)


def _to_bool(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in _TRUE | _FALSE:
        return raw.lower() in _TRUE
    raise ValueError("true or false")


def _to_int(raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    # isascii: int() also accepts the digits of other scripts, and underscores.
    if isinstance(raw, str) and raw.isascii() and raw.removeprefix("-").isdigit():
        return int(raw)
    raise ValueError("a whole number")


def _to_float(raw: object) -> float:
    if isinstance(raw, int | float | str) and not isinstance(raw, bool):
        try:
            value = float(raw)
        except ValueError:
            value = math.nan
        if math.isfinite(value):
            return value
    raise ValueError("a finite number")


def _to_text(raw: object) -> str:
    if isinstance(raw, str):
        return raw
    raise ValueError("text")


def _to_path(raw: object) -> Path:
    if isinstance(raw, Path):
        return raw
    if isinstance(raw, str) and raw:
        return Path(raw).expanduser()
    raise ValueError("a path")


def _to_texts(raw: object) -> tuple[str, ...]:
    items = [item.strip() for item in raw.split(",")] if isinstance(raw, str) else raw
    if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
        return tuple(item for item in items if item)
    raise ValueError("a list of texts, separated by commas")


_CONVERTERS: Final[dict[Any, Callable[[object], Any]]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_text,
    Path: _to_path,
    tuple[str, ...]: _to_texts,
}


def settings_of(config_class: type[Any]) -> dict[str, Setting]:
    """The settings of a config dataclass by field name, in field order; secrets left out.

    TypeError: a field of a type that this kit cannot read, which is our own bug.
    """
    hints = typing.get_type_hints(config_class)
    settings = {}
    for field in dataclasses.fields(config_class):
        if field.metadata.get("secret"):
            continue
        field_type, is_optional = _without_none(hints[field.name])
        if typing.get_origin(field_type) is typing.Literal:
            choices = typing.get_args(field_type)
            metadata: Mapping[str, Any] = {**field.metadata, "choices": choices}
            field_type = str
        else:
            metadata = field.metadata
        if field_type not in _CONVERTERS and "parse" not in metadata:
            raise TypeError(f"{config_class.__name__}.{field.name}: cannot read {field_type}")
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        settings[field.name] = Setting(field.name, field_type, is_optional, default, metadata)
    return settings


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Split ``X | None`` into X and True."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        if len(members) == 1:
            return members[0], True
    return hint, False


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Read a kernel CPU list, "0", "0,2" or "0-3", into sorted CPU numbers; "" is none."""
    cpus: set[int] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        first, dash, last = part.partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not last.isdigit()):
            raise ValueError("a CPU list such as 0 or 0,2 or 0-3")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high > _MAX_CPU:
            raise ValueError(f"a CPU list with rising ranges up to {_MAX_CPU}")
        cpus.update(range(low, high + 1))  # + 1: the kernel's lists include their last CPU
    return tuple(sorted(cpus))


def parse_nbytes(text: str) -> int:
    """Read a size in bytes: "4096", "512MiB", "1.5 GiB"."""
    number = text.rstrip("BKMGi").strip()
    unit = text[len(text.rstrip("BKMGi")) :]
    if unit in _NBYTES_UNITS and number.isascii() and number.replace(".", "", 1).isdigit():
        return int(float(number) * _NBYTES_UNITS[unit])
    raise ValueError("a size such as 4096, 512MiB or 2GiB")
