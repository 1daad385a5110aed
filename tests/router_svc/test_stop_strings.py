"""Stop strings: the result must not depend on where the text is cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_svc.stop_strings import StopStringMatcher

TEXTS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4)


def show_all(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopStringMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces)
    if not matcher.is_matched:
        shown += matcher.flush()
    return shown, matcher.is_matched


def expected(stops: list[str], text: str) -> tuple[str, bool]:
    """The definition: read on character by character until the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@given(STOPS, TEXTS, st.data())
def test_pieces_do_not_matter(stops: list[str], text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    borders = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert show_all(stops, pieces) == expected(stops, text)
    assert show_all(stops, [text]) == expected(stops, text)


def test_text_is_held_back_only_as_long_as_needed() -> None:
    matcher = StopStringMatcher(["END"])
    assert matcher.push("go E") == "go "
    assert matcher.push("N") == ""
    assert matcher.push("x") == "ENx"
    assert matcher.push("yEN") == "y"
    assert matcher.flush() == "EN"


@pytest.mark.parametrize("stops", [["b", "abc"], ["abc", "b"]])
def test_nothing_after_a_match(stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    assert matcher.push("xabc") == "xa"
    assert matcher.is_matched
    assert matcher.push("more") == ""
    assert matcher.flush() == ""
