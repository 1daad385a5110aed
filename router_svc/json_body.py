"""Request bytes to a JSON object, with every way to be wrong refused by name. Pure."""

import json
from typing import Any, NoReturn

from router_svc.errors import InvalidRequestError


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise InvalidRequestError(
                    f"The body gives the field {name!r} twice. Give it once.", param=name
                )
            seen.add(name)
    return fields


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Return the object in `raw`.

    Raises InvalidRequestError, checked in this order: not UTF-8, not JSON (also NaN, Infinity
    and nesting too deep to read), a field given twice, not an object.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise InvalidRequestError(
            f"The body is not UTF-8: byte {exc.start} cannot be decoded. Send JSON in UTF-8.",
            param="body",
            code="invalid_utf8",
        ) from exc
    try:
        body = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_fields)
    except RecursionError as exc:
        raise InvalidRequestError(
            "The body is nested too deeply to read. Send a flat request.",
            param="body",
            code="invalid_json",
        ) from exc
    except ValueError as exc:
        raise InvalidRequestError(
            f"The body is not valid JSON: {exc}. Check the syntax there.",
            param="body",
            code="invalid_json",
        ) from exc
    if not isinstance(body, dict):
        raise InvalidRequestError(
            f"The body is a JSON {type(body).__name__}, not an object. Send one object.",
            param="body",
            code="invalid_json",
        )
    return body
