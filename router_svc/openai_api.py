"""OpenAI request bodies to frozen requests. Pure: no tokenizer, no clock, no sockets.

A field is supported, or accepted because it cannot change the output, or refused by name:
nothing is silently ignored that would change what the client gets.
Source: OpenAI API reference, "Create chat completion" and "Create completion".
"""

from dataclasses import dataclass
from typing import Any, Final

from router_svc.errors import InvalidRequestError
from router_svc.request_fields import RequestFields, check_text, show
from router_svc.unsupported_fields import (
    HARMLESS_FIELDS,
    REFUSED_FIELDS,
    refuse_unsupported,
)

MAX_CHOICES: Final = 8
MAX_SEQUENCES: Final = 64
MAX_STOP_STRINGS: Final = 4
MAX_STOP_CHARS: Final = 256
MAX_MESSAGES: Final = 4096
# Far above every model's context; the exact bound needs the prompt and is checked after.
_MAX_OUTPUT_TOKENS: Final = 2**28 - 1
_MAX_TOP_K: Final = 2**20
_TOKEN_ID_LIMIT: Final = 2**32

_COMMON: Final = frozenset(
    {
        "model", "max_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop", "ignore_eos",
        "stream", "stream_options", "include_timings", "return_token_ids",
    }
)  # fmt: skip
_KNOWN: Final = _COMMON | HARMLESS_FIELDS | REFUSED_FIELDS
CHAT_FIELDS: Final = _KNOWN | {"messages", "max_completion_tokens"}
COMPLETION_FIELDS: Final = _KNOWN | {"prompt"}

# A template knows "system" only; OpenAI's newer models call the same role "developer".
_ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to sample and what to answer with.

    `max_output_tokens` is None if not given; `max_output_tokens_param` is the name it goes by in
    errors. `seed` None means "make one". `top_k` 0 is off. `temperature` 0 is greedy.
    """

    max_output_tokens: int | None
    max_output_tokens_param: str
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    num_choices: int
    stop: tuple[str, ...]
    ignore_eos: bool
    is_stream: bool
    include_usage: bool
    include_timings: bool
    return_token_ids: bool


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a chat; `role` is one the chat template knows."""

    role: str
    content: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A valid body of POST /v1/chat/completions."""

    model: str
    messages: tuple[ChatMessage, ...]
    options: GenerationOptions


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A valid body of POST /v1/completions; each prompt is text or token ids, never empty."""

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    options: GenerationOptions


def parse_chat_request(body: dict[str, Any]) -> ChatRequest:
    """Check a chat body.

    Raises InvalidRequestError, checked in this order: unknown field, unsupported field, model,
    messages, options.
    """
    fields = RequestFields(body)
    fields.refuse_unknown(CHAT_FIELDS)
    refuse_unsupported(fields)
    model = _required_text(fields, "model")
    messages = _parse_messages(fields)
    limit, limit_param = _parse_chat_limit(fields)
    return ChatRequest(model, messages, _parse_options(fields, limit, limit_param))


def parse_completion_request(body: dict[str, Any]) -> CompletionRequest:
    """Check a completions body.

    Raises InvalidRequestError, checked in this order: unknown field, unsupported field, model,
    prompt, options, number of sequences (prompts times n).
    """
    fields = RequestFields(body)
    fields.refuse_unknown(COMPLETION_FIELDS)
    refuse_unsupported(fields)
    model = _required_text(fields, "model")
    prompts = _parse_prompts(fields)
    limit = fields.integer("max_tokens", minimum=1, maximum=_MAX_OUTPUT_TOKENS)
    options = _parse_options(fields, limit, "max_tokens")
    if len(prompts) * options.num_choices > MAX_SEQUENCES:
        raise InvalidRequestError(
            f"{len(prompts)} prompts times n={options.num_choices} is more than {MAX_SEQUENCES} "
            "sequences. Send fewer prompts per request.",
            param="prompt",
        )
    return CompletionRequest(model, prompts, options)


def _required_text(fields: RequestFields, name: str) -> str:
    text = fields.text(name)
    if not text:
        raise InvalidRequestError(f"{name} is required and must not be empty.", param=name)
    return text


def _parse_chat_limit(fields: RequestFields) -> tuple[int | None, str]:
    old = fields.integer("max_tokens", minimum=1, maximum=_MAX_OUTPUT_TOKENS)
    new = fields.integer("max_completion_tokens", minimum=1, maximum=_MAX_OUTPUT_TOKENS)
    if old is not None and new is not None and old != new:
        raise InvalidRequestError(
            f"max_tokens ({old}) and max_completion_tokens ({new}) differ. Give one of them.",
            param="max_tokens",
        )
    if new is not None:
        return new, "max_completion_tokens"
    return old, "max_tokens"


def _parse_options(
    fields: RequestFields, max_output_tokens: int | None, max_output_tokens_param: str
) -> GenerationOptions:
    is_stream = fields.boolean("stream")
    include_usage, include_timings = _parse_stream_options(fields, is_stream=is_stream)
    top_p = fields.number("top_p", minimum=0.0, maximum=1.0, default=1.0)
    if top_p == 0.0:
        raise InvalidRequestError(
            "top_p must be above 0. For greedy output set temperature to 0.", param="top_p"
        )
    top_k = fields.integer("top_k", minimum=-1, maximum=_MAX_TOP_K) or 0
    num_choices = fields.integer("n", minimum=1, maximum=MAX_CHOICES)
    return GenerationOptions(
        max_output_tokens=max_output_tokens,
        max_output_tokens_param=max_output_tokens_param,
        temperature=fields.number("temperature", minimum=0.0, maximum=2.0, default=1.0),
        top_p=top_p,
        top_k=max(top_k, 0),
        seed=fields.integer("seed", minimum=-(2**63), maximum=2**63 - 1),
        num_choices=1 if num_choices is None else num_choices,
        stop=_parse_stop(fields),
        ignore_eos=fields.boolean("ignore_eos"),
        is_stream=is_stream,
        include_usage=include_usage,
        include_timings=include_timings or fields.boolean("include_timings"),
        return_token_ids=fields.boolean("return_token_ids"),
    )


def _parse_stream_options(fields: RequestFields, *, is_stream: bool) -> tuple[bool, bool]:
    raw = fields.raw("stream_options")
    if raw is None:
        return False, False
    if not isinstance(raw, dict):
        raise InvalidRequestError(
            f"stream_options must be an object, not {show(raw)}.", param="stream_options"
        )
    if not is_stream:
        raise InvalidRequestError(
            "stream_options needs stream=true. Set stream, or remove stream_options.",
            param="stream_options",
        )
    options = RequestFields(raw, "stream_options.")
    options.refuse_unknown(("include_usage", "include_timings", "include_obfuscation"))
    options.boolean("include_obfuscation")
    return options.boolean("include_usage"), options.boolean("include_timings")


def _parse_stop(fields: RequestFields) -> tuple[str, ...]:
    raw = fields.raw("stop")
    if raw is None:
        return ()
    items = raw if isinstance(raw, list) else [raw]
    if not 1 <= len(items) <= MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop must hold 1 to {MAX_STOP_STRINGS} strings, not {len(items)}.", param="stop"
        )
    for item in items:
        if not 1 <= len(check_text(item, "stop")) <= MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"Each stop string must have 1 to {MAX_STOP_CHARS} characters, not {len(item)}.",
                param="stop",
            )
    return tuple(dict.fromkeys(items))


def _parse_messages(fields: RequestFields) -> tuple[ChatMessage, ...]:
    raw = fields.raw("messages")
    if not isinstance(raw, list) or not raw:
        raise InvalidRequestError(
            "messages is required: a list with at least one message.", param="messages"
        )
    if len(raw) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages has {len(raw)} entries; at most {MAX_MESSAGES} are allowed.",
            param="messages",
        )
    return tuple(_parse_message(item, f"messages[{i}]") for i, item in enumerate(raw))


def _parse_message(raw: object, param: str) -> ChatMessage:
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"{param} must be an object, not {show(raw)}.", param=param)
    fields = RequestFields(raw, f"{param}.")
    role = fields.text("role")
    if role not in _ROLES:
        allowed = ", ".join(_ROLES)
        raise InvalidRequestError(
            f"{param}.role must be one of {allowed}, not {show(role)}.", param=f"{param}.role"
        )
    for name in ("tool_calls", "function_call", "audio", "refusal"):
        if fields.raw(name):
            raise InvalidRequestError(
                f"{param}.{name} is not supported. Remove it.", param=f"{param}.{name}"
            )
    fields.refuse_unknown(
        ("role", "content", "name", "tool_calls", "function_call", "audio", "refusal")
    )
    content = _parse_content(fields.raw("content"), f"{param}.content")
    return ChatMessage(_ROLES[role], content, fields.text("name"))


def _parse_content(raw: object, param: str) -> str:
    """Return a message's text; text parts are joined as they are."""
    if not isinstance(raw, list):
        return check_text(raw, param)
    texts: list[str] = []
    for i, part in enumerate(raw):
        where = f"{param}[{i}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequestError(
                f"{where}.type must be 'text', not {show(kind)}; this model reads text only.",
                param=f"{where}.type",
            )
        texts.append(check_text(part.get("text"), f"{where}.text"))
    return "".join(texts)


def _parse_prompts(fields: RequestFields) -> tuple[str | tuple[int, ...], ...]:
    raw = fields.raw("prompt")
    if isinstance(raw, str):
        return (_check_prompt(raw, "prompt"),)
    if not isinstance(raw, list) or not raw:
        raise InvalidRequestError(
            "prompt is required and must not be empty: a string, a list of strings, a list of "
            "token ids, or a list of lists of token ids.",
            param="prompt",
        )
    if isinstance(raw[0], int):
        return (_check_prompt(raw, "prompt"),)
    if len(raw) > MAX_SEQUENCES:
        raise InvalidRequestError(
            f"prompt holds {len(raw)} prompts; at most {MAX_SEQUENCES} are allowed.",
            param="prompt",
        )
    return tuple(_check_prompt(item, f"prompt[{i}]") for i, item in enumerate(raw))


def _check_prompt(raw: object, param: str) -> str | tuple[int, ...]:
    if isinstance(raw, str) and raw:
        return check_text(raw, param)
    if not isinstance(raw, list) or not raw:
        raise InvalidRequestError(
            f"{param} must be a non-empty string or list of token ids, not {show(raw)}.",
            param=param,
        )
    for i, token_id in enumerate(raw):
        is_integer = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_integer or not 0 <= token_id < _TOKEN_ID_LIMIT:
            raise InvalidRequestError(
                f"{param}[{i}] must be a token id, not {show(token_id)}.", param=param
            )
    return tuple(raw)
