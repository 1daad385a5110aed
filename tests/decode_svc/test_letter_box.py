"""The letter box: in order, bounded, with a deadline."""

import pytest

from decode_svc.letter_box import Cancelled, LetterBox, Lost
from kvproto.messages import Started


async def test_letters_come_in_order() -> None:
    box = LetterBox()
    letters = [Started("s", 1, queue_s=0.0), Cancelled(), Lost("gone")]
    assert all(box.put(letter) for letter in letters)
    assert [await box.get(1.0) for _ in letters] == letters


async def test_an_empty_box_has_a_deadline() -> None:
    with pytest.raises(TimeoutError):
        await LetterBox().get(0.01)


async def test_a_full_box_says_so() -> None:
    box = LetterBox()
    num_taken = 0
    while box.put(Cancelled()):
        num_taken += 1
        assert num_taken < 1000, "the box has no bound"
    assert num_taken > 4
