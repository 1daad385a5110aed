"""Text to token ids and back with the tokenizers library alone, from a local model folder."""

from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from svckit.errors import ServiceError


def load_tokenizer(model: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a model folder. ServiceError: there is none."""
    path = model / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    # The library raises a bare Exception for a file it cannot read.
    except Exception as exc:
        raise ServiceError(
            f"Cannot read {path}: {exc}; give --model a folder with a fast tokenizer."
        ) from exc
    # A saved truncation or padding would silently change prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenize(prompt: str, model: Path) -> list[int]:
    """Token ids of a raw prompt, with the special tokens the model wants."""
    return list(load_tokenizer(model).encode(prompt).ids)


class TokenText:
    """The text of one token after another; characters that are not complete yet wait."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = load_tokenizer(model)
        self._stream = DecodeStream(skip_special_tokens=True)

    def __call__(self, token: int) -> str:
        """What ``token`` adds."""
        return self._stream.step(self._tokenizer, token) or ""
