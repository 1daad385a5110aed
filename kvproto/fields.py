"""The types a message field can have on the wire, each with its limit.

A spec turns a Python value into what msgpack carries and back. Both directions check the same
rules and raise ``FieldError(reason)``; the caller knows the field's name and whose fault it is.
Lists of integers travel as one ``bin`` of packed words in the frame's byte order: a hostile
descriptor can then never claim a large msgpack array (docs/wire.md section 3).
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvproto.header import ByteOrder

_PREFIX: Final = {ByteOrder.LITTLE: "<", ByteOrder.BIG: ">"}
_WORD_FORMAT: Final = {32: "I", 64: "Q"}
MAX_U32: Final = (1 << 32) - 1
MAX_U64: Final = (1 << 64) - 1


class FieldError(ValueError):
    """A value breaks its field's type or limit; the text says which rule."""


class Spec(Protocol):
    """Type and limit of one field. ``str(spec)`` is the cell of the table in docs/wire.md."""

    def encode(self, value: Any, order: ByteOrder) -> Any:
        """Python value to msgpack value; FieldError says which rule it breaks."""

    def decode(self, value: Any, order: ByteOrder) -> Any:
        """Msgpack value to Python value; FieldError says which rule it breaks."""


@dataclass(frozen=True, slots=True)
class Text:
    """A string of ``min_nbytes..max_nbytes`` UTF-8 bytes.

    ``ascii_only``: printable ASCII only. ``is_cut``: encoding cuts a longer string instead of
    refusing it, for sentences made from errors, which must never fail in their turn.
    """

    max_nbytes: int
    min_nbytes: int = 0
    ascii_only: bool = False
    is_cut: bool = False

    def __str__(self) -> str:
        what = "printable ASCII" if self.ascii_only else "UTF-8"
        return f"str, {what}, {self.min_nbytes}..{self.max_nbytes} bytes"

    def encode(self, value: Any, order: ByteOrder) -> Any:
        """Check; strings pass through unchanged, or cut if ``is_cut``."""
        if self.is_cut and isinstance(value, str):
            raw = value.encode("utf-8", errors="replace")[: self.max_nbytes]
            # "ignore" drops a character that the cut went through.
            value = raw.decode("utf-8", errors="ignore")
        return self.decode(value, order)

    def decode(self, value: Any, _order: ByteOrder) -> str:
        """Check; strings pass through unchanged."""
        if type(value) is not str:
            raise FieldError(f"must be a str, is {type(value).__name__}")
        if self.ascii_only and not (value.isascii() and value.isprintable()):
            raise FieldError("must be printable ASCII")
        try:
            num_bytes = len(value) if value.isascii() else len(value.encode("utf-8"))
        except UnicodeEncodeError as exc:
            raise FieldError("is not valid UTF-8") from exc
        if not self.min_nbytes <= num_bytes <= self.max_nbytes:
            raise FieldError(f"has {num_bytes} bytes, outside {self.min_nbytes}..{self.max_nbytes}")
        return value


@dataclass(frozen=True, slots=True)
class Choice:
    """A string out of a closed list."""

    values: tuple[str, ...]

    def __str__(self) -> str:
        return "str, one of " + ", ".join(self.values)

    def encode(self, value: Any, order: ByteOrder) -> Any:
        """Check; strings pass through unchanged."""
        return self.decode(value, order)

    def decode(self, value: Any, _order: ByteOrder) -> str:
        """Check; strings pass through unchanged."""
        if type(value) is not str or value not in self.values:
            raise FieldError(f"must be one of {', '.join(self.values)}")
        return value


@dataclass(frozen=True, slots=True)
class UInt:
    """An integer in ``min_value..max_value``; booleans are not integers here."""

    max_value: int = MAX_U32
    min_value: int = 0

    def __str__(self) -> str:
        return f"uint, {self.min_value}..{self.max_value}"

    def encode(self, value: Any, order: ByteOrder) -> Any:
        """Check; integers pass through unchanged."""
        return self.decode(value, order)

    def decode(self, value: Any, _order: ByteOrder) -> int:
        """Check; integers pass through unchanged."""
        if not isinstance(value, int) or isinstance(value, bool):
            raise FieldError(f"must be an integer, is {type(value).__name__}")
        if not self.min_value <= value <= self.max_value:
            raise FieldError(f"is {value}, outside {self.min_value}..{self.max_value}")
        return int(value)


@dataclass(frozen=True, slots=True)
class Real:
    """A finite number in ``min_value..max_value``; an integer is accepted and made a float."""

    max_value: float
    min_value: float = 0.0

    def __str__(self) -> str:
        return f"float, finite, {self.min_value:g}..{self.max_value:g}"

    def encode(self, value: Any, order: ByteOrder) -> Any:
        """Check; the result is a float."""
        return self.decode(value, order)

    def decode(self, value: Any, _order: ByteOrder) -> float:
        """Check; the result is a float."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise FieldError(f"must be a number, is {type(value).__name__}")
        # The comparison is false for NaN as well.
        if not self.min_value <= value <= self.max_value:
            raise FieldError(f"is {value}, outside {self.min_value:g}..{self.max_value:g}")
        return float(value)


@dataclass(frozen=True, slots=True)
class Boolean:
    """True or false."""

    def __str__(self) -> str:
        return "bool"

    def encode(self, value: Any, order: ByteOrder) -> Any:
        """Check; booleans pass through unchanged."""
        return self.decode(value, order)

    def decode(self, value: Any, _order: ByteOrder) -> bool:
        """Check; booleans pass through unchanged."""
        if not isinstance(value, bool):
            raise FieldError(f"must be a bool, is {type(value).__name__}")
        return value


@dataclass(frozen=True, slots=True)
class Blob:
    """Exactly ``nbytes`` bytes."""

    nbytes: int

    def __str__(self) -> str:
        return f"bin, {self.nbytes} bytes"

    def encode(self, value: Any, order: ByteOrder) -> Any:
        """Check; bytes pass through unchanged."""
        return self.decode(value, order)

    def decode(self, value: Any, _order: ByteOrder) -> bytes:
        """Check; bytes pass through unchanged."""
        if type(value) is not bytes:
            raise FieldError(f"must be bytes, is {type(value).__name__}")
        if len(value) != self.nbytes:
            raise FieldError(f"has {len(value)} bytes instead of {self.nbytes}")
        return value


@dataclass(frozen=True, slots=True)
class PackedUInts:
    """A list of ``min_items..max_items`` unsigned integers of ``bits`` bits (32 or 64)."""

    bits: int
    max_items: int
    min_items: int = 0

    def __str__(self) -> str:
        return f"bin, packed u{self.bits}, {self.min_items}..{self.max_items} items"

    def encode(self, value: Any, order: ByteOrder) -> bytes:
        """List of integers to packed words in ``order``."""
        if not isinstance(value, list | tuple):
            raise FieldError(f"must be a list, is {type(value).__name__}")
        self._check_num_items(len(value))
        try:
            return struct.pack(f"{_PREFIX[order]}{len(value)}{_WORD_FORMAT[self.bits]}", *value)
        except struct.error as exc:
            raise FieldError(f"has an item that is not a u{self.bits}") from exc

    def decode(self, value: Any, order: ByteOrder) -> list[int]:
        """Packed words in ``order`` to list of integers."""
        if type(value) is not bytes:
            raise FieldError(f"must be bytes, is {type(value).__name__}")
        num_items, rest = divmod(len(value) * 8, self.bits)
        if rest:
            raise FieldError(f"has {len(value)} bytes, not a multiple of {self.bits // 8}")
        self._check_num_items(num_items)
        return list(struct.unpack(f"{_PREFIX[order]}{num_items}{_WORD_FORMAT[self.bits]}", value))

    def _check_num_items(self, num_items: int) -> None:
        if not self.min_items <= num_items <= self.max_items:
            raise FieldError(f"has {num_items} items, outside {self.min_items}..{self.max_items}")


@dataclass(frozen=True, slots=True)
class TextList:
    """A list of at most ``max_items`` strings of one kind."""

    max_items: int
    item: Text

    def __str__(self) -> str:
        return f"array, 0..{self.max_items} items, each: {self.item}"

    def encode(self, value: Any, order: ByteOrder) -> Any:
        """Check; the list is copied."""
        return self.decode(value, order)

    def decode(self, value: Any, order: ByteOrder) -> list[str]:
        """Check; the list is copied."""
        if not isinstance(value, list | tuple):
            raise FieldError(f"must be a list, is {type(value).__name__}")
        if len(value) > self.max_items:
            raise FieldError(f"has {len(value)} items, above {self.max_items}")
        return [self.item.decode(item, order) for item in value]


@dataclass(frozen=True, slots=True)
class ScalarMap:
    """A map of at most ``max_items`` names to strings and numbers.

    ``allow_float`` is off for facts: they are compared for equality.
    """

    max_items: int
    allow_float: bool

    def __str__(self) -> str:
        value = "str, integer or float" if self.allow_float else "str or integer"
        return f"map, 0..{self.max_items} items, key: {_MAP_KEY}, value: {value}"

    def encode(self, value: Any, order: ByteOrder) -> Any:
        """Check; the map is copied."""
        return self.decode(value, order)

    def decode(self, value: Any, order: ByteOrder) -> dict[str, Any]:
        """Check; the map is copied."""
        if not isinstance(value, Mapping):
            raise FieldError(f"must be a map, is {type(value).__name__}")
        if len(value) > self.max_items:
            raise FieldError(f"has {len(value)} items, above {self.max_items}")
        return {
            _MAP_KEY.decode(key, order): self._decode_item(key, item, order)
            for key, item in value.items()
        }

    def _decode_item(self, key: str, item: Any, order: ByteOrder) -> Any:
        if type(item) is int and -(1 << 63) <= item <= MAX_U64:
            return item
        if type(item) is float and self.allow_float and math.isfinite(item):
            return item
        if type(item) is str:
            return _MAP_TEXT.decode(item, order)
        raise FieldError(f"[{key}] has a value of a type or size that is not allowed")


_MAP_KEY: Final = Text(64, 1, ascii_only=True)
_MAP_TEXT: Final = Text(256)
