"""Values inside a JSON answer of a service, which may be of another version or not ours at all."""

import math
from collections.abc import Mapping
from typing import Any


def value_at(document: object, *path: str) -> object:
    """What stands at ``path``; None if any part of it is missing."""
    for name in path:
        if not isinstance(document, Mapping):
            return None
        document = document.get(name)
    return document


def number_at(document: object, *path: str) -> float | None:
    """A finite number, or None."""
    value = value_at(document, *path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def text_at(document: object, *path: str) -> str:
    """A text, "" if there is none."""
    value = value_at(document, *path)
    return value if isinstance(value, str) else ""


def mapping_at(document: object, *path: str) -> Mapping[str, Any]:
    """An object, empty if there is none."""
    value = value_at(document, *path)
    return value if isinstance(value, Mapping) else {}


def mappings_at(document: object, *path: str) -> tuple[Mapping[str, Any], ...]:
    """The objects in a list; whatever else it holds is left out."""
    value = value_at(document, *path)
    return (
        tuple(item for item in value if isinstance(item, dict)) if isinstance(value, list) else ()
    )
