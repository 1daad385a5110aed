"""Text to token ids and back, from a local model folder. No torch, no network.

The tokenizers library is used directly: importing transformers imports torch wherever torch is
installed. Encoding goes through `encode_batch`, because `encode` keeps the interpreter lock for
the whole text and would stall every stream of the process.
"""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Final

import tokenizers

from router_svc.chat_template import ChatTemplate
from router_svc.errors import InvalidRequestError
from router_svc.openai_api import ChatMessage
from svckit.errors import ServiceError

_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """One model's tokenizer and, if it has one, its chat template. Safe to use from threads.

    `max_token_chars` is the length of the longest token: no token stands for more characters.
    """

    def __init__(self, backend: tokenizers.Tokenizer, chat_template: ChatTemplate | None) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self.max_token_chars = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

        Raises ServiceError, checked in this order: tokenizer.json, tokenizer_config.json,
        chat template.
        """
        path = model_dir / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        # The library raises a bare Exception for a file it cannot read.
        except Exception as exc:
            raise ServiceError(
                f"Cannot read {path}: {exc}. Give --model a folder with a fast tokenizer."
            ) from exc
        # A saved truncation or padding would silently change prompts.
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, _load_chat_template(model_dir))

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a raw prompt, with the special tokens the model wants."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the token ids of the rendered conversation; the template writes all specials.

        Raises InvalidRequestError naming `messages`: no chat template, or it refuses them.
        """
        if self._chat_template is None:
            raise InvalidRequestError(
                "This model has no chat template. Use /v1/completions.", param="messages"
            )
        return self._encode(self._chat_template.render(messages), add_special_tokens=False)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids` without special tokens; broken UTF-8 gives U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary with its added tokens."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        [encoding] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)


class TokenizerPool:
    """Encodes in worker threads, so that a long prompt does not hold up the event loop.

    The caller owns `executor`; each wait ends with the request's deadline, because the caller
    runs it under one.
    """

    def __init__(self, tokenizer: Tokenizer, executor: Executor) -> None:
        self._tokenizer = tokenizer
        self._executor = executor

    async def encode_text(self, text: str) -> list[int]:
        """See `Tokenizer.encode_text`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._tokenizer.encode_text, text)

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """See `Tokenizer.encode_chat`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._tokenizer.encode_chat, messages)


def _load_chat_template(model_dir: Path) -> ChatTemplate | None:
    config_path = model_dir / "tokenizer_config.json"
    config: dict[str, Any] = {}
    if config_path.exists():
        try:
            config = json.loads(config_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise ServiceError(f"Cannot read {config_path}: {exc}. Convert the model again.") from (
                exc
            )
    template_path = model_dir / "chat_template.jinja"
    source: Any
    try:
        source = template_path.read_text(encoding="utf-8")
    except FileNotFoundError:
        source = config.get("chat_template")
    except (OSError, ValueError) as exc:
        raise ServiceError(f"Cannot read {template_path}: {exc}.") from exc
    if not source:
        return None
    if not isinstance(source, str):
        raise ServiceError(
            f"{config_path} holds several chat templates. Put the one to use into {template_path}."
        )
    return ChatTemplate(source, _special_tokens(config))


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens by variable name; each is a string or an object with content."""
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
