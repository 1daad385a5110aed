"""Fields of messages as JSON has them."""

import dataclasses
from typing import Any

# Many JSON readers round integers from here on.
_MAX_EXACT = 1 << 53


def plain(value: Any) -> Any:
    """A field as JSON has it."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, int) and not isinstance(value, bool) and value >= _MAX_EXACT:
        return str(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    return value
