"""Fields of OpenAI's requests that the router does not implement. Pure.

Harmless fields cannot change the output and are accepted. Every other one is refused by name,
unless its value asks for nothing (null, an empty list, a zero penalty, ...).
"""

from collections.abc import Callable
from typing import Any, Final

from router_svc.errors import InvalidRequestError
from router_svc.request_fields import RequestFields, show

HARMLESS_FIELDS: Final = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "parallel_tool_calls", "prediction",
    }
)  # fmt: skip


def _asks_nothing_if_falsy(value: Any) -> bool:
    # Covers false, 0, 0.0, "", [] and {}: each is the documented "off" of its field.
    return not value


def _never_asks_nothing(value: Any) -> bool:
    del value
    return False


def _is_plain_text_format(value: Any) -> bool:
    return bool(value == {"type": "text"})


def _is_text_only(value: Any) -> bool:
    return bool(value == ["text"])


def _is_no_tool(value: Any) -> bool:
    return bool(value in ("none", "auto"))


# Field -> whether this value of it leaves the output as it is.
_ASKS_NOTHING: Final[dict[str, Callable[[Any], bool]]] = {
    "audio": _asks_nothing_if_falsy,
    "best_of": lambda value: value == 1,
    "echo": _asks_nothing_if_falsy,
    "frequency_penalty": _asks_nothing_if_falsy,
    "function_call": _is_no_tool,
    "functions": _asks_nothing_if_falsy,
    # It would let a client choose addresses; the router alone decides who talks to whom.
    "kv_transfer_params": _never_asks_nothing,
    "logit_bias": _asks_nothing_if_falsy,
    "logprobs": lambda value: value is False,
    "modalities": _is_text_only,
    "presence_penalty": _asks_nothing_if_falsy,
    "reasoning_effort": _never_asks_nothing,
    "response_format": _is_plain_text_format,
    "suffix": _asks_nothing_if_falsy,
    "tool_choice": _is_no_tool,
    "tools": _asks_nothing_if_falsy,
    "top_logprobs": lambda value: value == 0,
    "verbosity": _never_asks_nothing,
    "web_search_options": _never_asks_nothing,
}
REFUSED_FIELDS: Final = frozenset(_ASKS_NOTHING)


def refuse_unsupported(fields: RequestFields) -> None:
    """Raise InvalidRequestError naming the first field that asks for something we do not do."""
    for name, asks_nothing in _ASKS_NOTHING.items():
        value = fields.raw(name)
        if value is not None and not asks_nothing(value):
            raise InvalidRequestError(
                f"{name}={show(value)} is not supported. Remove {name}.",
                param=name,
                code="unsupported_field",
            )
