"""A record is a frozen dataclass whose fields carry their wire type: class to map and back.

    @dataclass(frozen=True, slots=True)
    class Ping:
        token: Annotated[int, UInt(MAX_U64)]

A field with a default may be absent on the wire. Unknown fields are skipped, unless their name
starts with "!": those are critical, and refused. Source: docs/wire.md section 3.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_type_hints

from kvproto.errors import Malformed
from kvproto.fields import FieldError, Spec
from kvproto.header import ByteOrder

CRITICAL_PREFIX: Final = "!"


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field: name, wire type and limit, required on the wire or not."""

    name: str
    spec: Spec
    is_required: bool


def field_infos(record: type) -> tuple[FieldInfo, ...]:
    """The fields of a record class, in declared order."""
    hints = get_type_hints(record, include_extras=True)
    return tuple(
        FieldInfo(
            item.name,
            hints[item.name].__metadata__[0],
            item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING,
        )
        for item in dataclasses.fields(record)
    )


def encode_record(record: Any, infos: Sequence[FieldInfo], order: ByteOrder) -> dict[str, Any]:
    """Map of a record. FieldError names the first field that breaks its limit."""
    values: dict[str, Any] = {}
    for info in infos:
        try:
            values[info.name] = info.spec.encode(getattr(record, info.name), order)
        except FieldError as exc:
            raise FieldError(f"{info.name}: {exc}") from exc
    return values


def decode_record(
    infos: Sequence[FieldInfo], fields: Mapping[str, Any], order: ByteOrder
) -> dict[str, Any]:
    """Arguments of a record class out of a map.

    Malformed names the first field, in declared order, that is missing or breaks its limit; then
    any unknown field whose name starts with "!".
    """
    values: dict[str, Any] = {}
    for info in infos:
        if info.name in fields:
            try:
                values[info.name] = info.spec.decode(fields[info.name], order)
            except FieldError as exc:
                raise Malformed(info.name, str(exc)) from exc
        elif info.is_required:
            raise Malformed(info.name, "is missing")
    if len(values) < len(fields):
        for name in fields:
            if name.startswith(CRITICAL_PREFIX):
                raise Malformed(name, "is a critical field that this side does not know")
    return values


@dataclass(frozen=True, slots=True)
class RecordList:
    """A list of at most ``max_items`` records, each a map with the fields of ``record``."""

    max_items: int
    record: type
    infos: tuple[FieldInfo, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "infos", field_infos(self.record))

    def __str__(self) -> str:
        names = "; ".join(f"{info.name}: {info.spec}" for info in self.infos)
        return f"array, 0..{self.max_items} items, each a map with {names}"

    def encode(self, value: Any, order: ByteOrder) -> list[dict[str, Any]]:
        """List of records to list of maps."""
        self._check_list(value)
        for item in value:
            if type(item) is not self.record:
                raise FieldError(f"has an item of type {type(item).__name__}")
        return [encode_record(item, self.infos, order) for item in value]

    def decode(self, value: Any, order: ByteOrder) -> list[Any]:
        """List of maps to list of records."""
        self._check_list(value)
        return [self._decode_item(item, order) for item in value]

    def _check_list(self, value: Any) -> None:
        if not isinstance(value, list | tuple):
            raise FieldError(f"must be a list, is {type(value).__name__}")
        if len(value) > self.max_items:
            raise FieldError(f"has {len(value)} items, above {self.max_items}")

    def _decode_item(self, value: Any, order: ByteOrder) -> Any:
        if not isinstance(value, dict):
            raise FieldError(f"has an item of type {type(value).__name__}")
        try:
            return self.record(**decode_record(self.infos, value, order))
        except Malformed as exc:
            raise FieldError(f"has an item whose {exc}") from exc
