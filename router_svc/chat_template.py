"""A model's chat template: messages to prompt text, in the sandbox the template expects.

The environment is the one Hugging Face templates are written for (block trimming, `tojson`
without HTML escapes, `raise_exception`, `strftime_now`); a test compares the result with
transformers. transformers itself is not imported, because it imports torch wherever torch is
installed, and takes seconds.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router_svc.errors import InvalidRequestError
from router_svc.openai_api import ChatMessage
from svckit.errors import ServiceError


class _GenerationBlock(Extension):
    """Accept ``{% generation %}``, which marks the assistant's text for training, as plain text."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are jinja2's

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    # Local wall-clock time is what templates mean by "today".
    return datetime.now().astimezone().strftime(form)


class ChatTemplate:
    """A compiled template. `special_tokens` are the variables bos_token, eos_token, ...

    Raises ServiceError if `source` does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template: Template = environment.from_string(source)
        except TemplateError as exc:
            raise ServiceError(
                f"The model's chat template does not compile: {exc}. Convert the model again."
            ) from exc
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Return the prompt text, up to and with the start of the assistant's turn.

        Raises InvalidRequestError naming `messages` if the template refuses the conversation.
        """
        turns = [
            {"role": message.role, "content": message.content}
            | ({} if message.name is None else {"name": message.name})
            for message in messages
        ]
        try:
            return self._template.render(
                messages=turns,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        # A template is a program of the model's maker: a TypeError in it is the same refusal.
        except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as exc:
            raise InvalidRequestError(
                f"The model's chat template refuses these messages: {exc}.", param="messages"
            ) from exc
