"""Pieces, joined, are the text of all tokens; no piece cuts a character."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router_svc.detokenizer import Detokenizer
from router_svc.tokenizer import Tokenizer

SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def decode_bytes(token_ids: Sequence[int]) -> str:
    """A byte-level decoder: token id = byte, ids from 256 on are special and have no text."""
    return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")


def pieces_of(detokenizer: Detokenizer, token_ids: Sequence[int], step: int) -> list[str]:
    pieces = [
        detokenizer.push(token_ids[start : start + step])
        for start in range(0, len(token_ids), step)
    ]
    return [*pieces, detokenizer.flush()]


# Bytes that begin, continue, or can never be part of a character, beside plain letters.
BYTES = st.sampled_from([0x41, 0x20, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x8E, 0x89, 0xC3, 0xFF, 300])


@given(st.lists(BYTES, max_size=60), st.integers(1, 5))
def test_bytes_joined(token_ids: list[int], step: int) -> None:
    pieces = pieces_of(Detokenizer(decode_bytes), token_ids, step)
    assert "".join(pieces) == decode_bytes(token_ids)


@given(st.text(max_size=40))
def test_valid_text_never_shows_a_broken_character(text: str) -> None:
    pieces = pieces_of(Detokenizer(decode_bytes), text.encode(), 1)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_comes_when_its_last_byte_does() -> None:
    detokenizer = Detokenizer(decode_bytes)
    assert [detokenizer.push([byte]) for byte in "a€".encode()] == ["a", "", "", "€"]


def test_broken_bytes_do_not_hold_back_text_for_ever() -> None:
    detokenizer = Detokenizer(decode_bytes)
    shown = "".join(detokenizer.push([0xE2]) for _ in range(1000))
    assert len(shown) > 900


@pytest.mark.parametrize("character", ["€", "🎉", "é"])
@pytest.mark.parametrize("num_broken", range(40))
def test_a_character_after_broken_bytes_stays_whole(character: str, num_broken: int) -> None:
    token_ids = [0xE2] * num_broken + list(character.encode())
    pieces = pieces_of(Detokenizer(decode_bytes), token_ids, 1)
    assert "".join(pieces) == "\ufffd" * num_broken + character


@SHARED
@given(data=st.data())
def test_tiny_tokenizer(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.num_tokens - 1), max_size=40))
    pieces = pieces_of(Detokenizer(tokenizer.detokenize), ids, data.draw(st.integers(1, 4)))
    assert "".join(pieces) == tokenizer.detokenize(ids)


@pytest.mark.model
def test_default_model(default_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(default_model_dir)

    @settings(deadline=None, max_examples=300)
    @given(
        st.lists(st.integers(0, tokenizer.num_tokens - 1), max_size=60) | st.text(max_size=40),
        st.integers(1, 4),
    )
    def check(source: list[int] | str, step: int) -> None:
        ids = tokenizer.encode_text(source) if isinstance(source, str) else source
        pieces = pieces_of(Detokenizer(tokenizer.detokenize), ids, step)
        assert "".join(pieces) == tokenizer.detokenize(ids)

    check()
