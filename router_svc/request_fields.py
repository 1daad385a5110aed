"""Typed access to the fields of one JSON request body. Pure.

`null` counts as "not given", as OpenAI's clients send it. Every refusal names the field, what
was given and what is allowed. A bool is never accepted as a number.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from router_svc.errors import InvalidRequestError

_MAX_SHOWN_CHARS = 60


def show(value: object) -> str:
    """Return `value` for an error message: its repr, cut to a bounded length."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."


def check_text(value: object, param: str) -> str:
    """Return `value` if it is a string that UTF-8 can carry (no lone surrogates)."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{param} must be a string, not {show(value)}.", param=param)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise InvalidRequestError(
            f"{param} has a lone surrogate at character {exc.start}; it is not valid text. "
            "Send complete Unicode characters.",
            param=param,
            code="invalid_utf8",
        ) from exc
    return value


@dataclass(frozen=True, slots=True)
class RequestFields:
    """The object `body`, whose fields are called ``prefix + name`` in error messages."""

    body: dict[str, Any]
    prefix: str = ""

    def param(self, name: str) -> str:
        """Return the name a client knows this field by."""
        return self.prefix + name

    def has(self, name: str) -> bool:
        """Return whether the field is given and not null."""
        return self.body.get(name) is not None

    def raw(self, name: str) -> Any:
        """Return the field unchecked, None if it is not given."""
        return self.body.get(name)

    def integer(self, name: str, *, minimum: int, maximum: int) -> int | None:
        """Return an integer in ``minimum..maximum``, or None if the field is not given."""
        value = self.body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._refusal(name, value, f"an integer from {minimum} to {maximum}")
        if not minimum <= value <= maximum:
            raise self._refusal(name, value, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, name: str, *, minimum: float, maximum: float, default: float) -> float:
        """Return a finite number in ``minimum..maximum``."""
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._refusal(name, value, f"a number from {minimum:g} to {maximum:g}")
        # False for NaN and the infinities too.
        if not minimum <= value <= maximum:
            raise self._refusal(name, value, f"a number from {minimum:g} to {maximum:g}")
        return float(value)

    def boolean(self, name: str, *, default: bool = False) -> bool:
        """Return true or false."""
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._refusal(name, value, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """Return a string that UTF-8 can carry, or None if the field is not given."""
        value = self.body.get(name)
        return None if value is None else check_text(value, self.param(name))

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Refuse the first field that is not in `known`, naming the nearest one that is."""
        names = sorted(known)
        for name in self.body:
            if name in names:
                continue
            near = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else " Remove it."
            shown = show(name)
            raise InvalidRequestError(
                f"Unknown field {shown}.{hint}",
                param=self.param(name[:_MAX_SHOWN_CHARS]),
                code="unknown_field",
            )

    def _refusal(self, name: str, value: object, allowed: str) -> InvalidRequestError:
        param = self.param(name)
        return InvalidRequestError(f"{param} must be {allowed}, not {show(value)}.", param=param)
