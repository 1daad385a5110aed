"""Response bodies and stream chunks in OpenAI's shape. Pure.

`AnswerShape` knows the differences between chat and text completions; the caller decides when
to send what. Extensions (token ids, timings) appear only if they were asked for.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from router_svc.choice_stream import ChoiceStream, Delta

DONE_EVENT: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. Each prompt counts once, however many choices it has."""

    num_prompt_tokens: int
    num_output_tokens: int

    def to_json(self) -> dict[str, int]:
        """Return OpenAI's names."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
        }


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """How the answer to one request is written.

    `prompts` are the token ids of each prompt; choice i belongs to prompt ``i // num_choices``.
    """

    is_chat: bool
    response_id: str
    created_at_unix_s: int
    model: str
    prompts: tuple[tuple[int, ...], ...]
    num_choices: int
    has_token_ids: bool

    def body(
        self, choices: Sequence[ChoiceStream], usage: Usage, *, has_timings: bool
    ) -> dict[str, Any]:
        """Return the whole answer of a request that does not stream."""
        body = self._envelope("chat.completion" if self.is_chat else "text_completion")
        body["choices"] = [self._choice(choice) for choice in choices]
        body["usage"] = usage.to_json()
        if self.has_token_ids and len(self.prompts) == 1:
            body["prompt_token_ids"] = list(self.prompts[0])
        if has_timings:
            body["timings"] = timings_json(choices)
        return body

    def role_chunk(self, index: int) -> dict[str, Any]:
        """Return the first chunk of a chat choice, which carries the role alone."""
        return self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}})

    def delta_chunk(self, delta: Delta) -> dict[str, Any]:
        """Return a chunk with text, and the finish reason if it is the last one."""
        choice: dict[str, Any] = {"index": delta.index}
        if self.is_chat:
            choice["delta"] = {"content": delta.text} if delta.text else {}
        else:
            choice["text"] = delta.text
        if self.has_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        chunk = self._chunk(choice, finish_reason=delta.finish_reason)
        if self.has_token_ids and delta.is_first:
            # With several prompts, each choice tells its own.
            holder = chunk if len(self.prompts) == 1 else choice
            holder["prompt_token_ids"] = self._prompt_of(delta.index)
        return chunk

    def closing_chunk(
        self, choices: Sequence[ChoiceStream], usage: Usage | None, *, has_timings: bool
    ) -> dict[str, Any]:
        """Return the last chunk: no choices, but usage and timings as far as asked for."""
        chunk = self._envelope("chat.completion.chunk" if self.is_chat else "text_completion")
        chunk["choices"] = []
        if usage is not None:
            chunk["usage"] = usage.to_json()
        if has_timings:
            chunk["timings"] = timings_json(choices)
        return chunk

    def _choice(self, choice: ChoiceStream) -> dict[str, Any]:
        value: dict[str, Any] = {"index": choice.index}
        if self.is_chat:
            value["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            value["text"] = choice.text
        value["logprobs"] = None
        value["finish_reason"] = choice.finish_reason
        if self.has_token_ids:
            value["token_ids"] = list(choice.token_ids)
            if len(self.prompts) > 1:
                value["prompt_token_ids"] = self._prompt_of(choice.index)
        return value

    def _chunk(self, choice: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        chunk = self._envelope("chat.completion.chunk" if self.is_chat else "text_completion")
        choice["logprobs"] = None
        choice["finish_reason"] = finish_reason
        chunk["choices"] = [choice]
        return chunk

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created_at_unix_s,
            "model": self.model,
        }

    def _prompt_of(self, index: int) -> list[int]:
        return list(self.prompts[index // self.num_choices])


def timings_json(choices: Sequence[ChoiceStream]) -> Any:
    """Return the timings of a single choice, or a list of them in choice order."""
    if len(choices) == 1:
        return choices[0].timings
    return [choice.timings for choice in choices]


def sse_event(value: object) -> bytes:
    """Return one server-sent event: compact JSON holds no line break, so one data line does."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8") + b"\n\n"
