"""Text, ends and times of one choice."""

from collections.abc import Sequence

import pytest

from router_svc.choice_stream import ChoiceStream, Delta
from router_svc.sequence import SequenceEnd


def detokenize(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode("utf-8", "replace")


def make_choice(stop: Sequence[str] = ()) -> ChoiceStream:
    return ChoiceStream(0, detokenize, stop=stop, hidden_token_ids=(0,), arrived_at=10.0)


def test_deltas_and_text() -> None:
    choice = make_choice()
    assert choice.push(b"ab", 11.0) == Delta(0, "ab", (97, 98), is_first=True)
    assert choice.push(b"\xe2\x82", 12.0) == Delta(0, "", (0xE2, 0x82), is_first=False)
    end = choice.finish(SequenceEnd("length"))
    assert end == Delta(0, "\ufffd", (), is_first=False, finish_reason="length")
    assert choice.text == "ab\ufffd"
    assert choice.token_ids == list(b"ab\xe2\x82")


def test_stop_string_drops_later_tokens() -> None:
    choice = make_choice(["cd"])
    delta = choice.push(b"abcdef", 11.0)
    assert (delta.text, delta.token_ids) == ("ab", tuple(b"abcd"))
    assert choice.is_matched
    assert choice.finish(SequenceEnd("length")).finish_reason == "stop"
    assert choice.text == "ab"


def test_held_back_text_comes_at_the_end() -> None:
    choice = make_choice(["cd"])
    assert choice.push(b"abc", 11.0).text == "ab"
    assert choice.finish(SequenceEnd("length")).text == "c"


def test_stop_string_in_the_flushed_tail() -> None:
    choice = make_choice(["\ufffd"])
    choice.push(b"a\xe2", 11.0)
    end = choice.finish(SequenceEnd("length"))
    assert (end.text, end.finish_reason) == ("", "stop")
    assert choice.text == "a"


def test_hidden_token_counts_and_has_no_text() -> None:
    choice = make_choice()
    choice.push(b"a\x00", 11.0)
    choice.finish(SequenceEnd("stop"))
    assert (choice.text, choice.token_ids) == ("a", [97, 0])


def test_times() -> None:
    choice = make_choice()
    choice.push(b"a", 11.0)
    choice.push(b"bc", 14.0)
    choice.push(b"d", 15.0)
    assert (choice.ttft_s, choice.e2e_s) == (1.0, 5.0)
    assert choice.itls_s == [3.0, 0.0, 1.0]
    assert choice.tpot_s == pytest.approx(4.0 / 3)
    choice.finish(SequenceEnd("length", {"decode_s": 2.0, "ttft_s": 99.0}, num_resumes=1))
    assert choice.timings["decode_s"] == 2.0
    # The router's own word on its own times.
    assert choice.timings["ttft_s"] == 1.0
    assert choice.timings["itl_s"] == {
        "num": 3,
        "mean": pytest.approx(4.0 / 3),
        "p50": 1.0,
        "p99": 3.0,
        "max": 3.0,
    }
    assert (choice.timings["num_output_tokens"], choice.timings["num_resumes"]) == (4, 1)


def test_percentiles_are_nearest_rank() -> None:
    choice = make_choice()
    choice.push(b"a", 0.0)
    for number in range(1, 101):
        now = number * (number + 1) / 2
        choice.push(b"a", now)
    choice.finish(SequenceEnd("length"))
    summary = choice.timings["itl_s"]
    assert (summary["p50"], summary["p99"], summary["max"]) == (50.0, 99.0, 100.0)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_undefined_times_are_none(num_tokens: int) -> None:
    choice = make_choice()
    if num_tokens:
        choice.push(b"a", 11.0)
    assert (choice.tpot_s, choice.itls_s) == (None, [])
    assert (choice.ttft_s is None) == (num_tokens == 0)
    choice.finish(SequenceEnd("length"))
    assert choice.timings["itl_s"] is None
