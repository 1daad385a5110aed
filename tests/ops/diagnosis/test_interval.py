import math

import pytest

from ops.diagnosis.interval import Interval
from tests.ops.diagnosis.made_services import SECONDS, interval, snapshot

STARTED = "pd_decode_process_start_time_seconds"


def test_rates() -> None:
    made = interval(
        "decode",
        before={"c_total": 10.0, "h_sum": 1.0, "h_count": 2.0},
        after={"c_total": 18.0, "h_sum": 4.0, "h_count": 8.0},
    )
    assert made.seconds == SECONDS
    assert made.rise("c_total") == 8.0
    assert made.per_second("c_total") == 8.0 / SECONDS
    assert made.mean("h") == 0.5


def test_what_is_missing_is_unknown() -> None:
    made = interval("decode", after={"h_sum": 0.0, "h_count": 0.0})
    assert made.rise("nothing") is None
    assert made.per_second("nothing") is None
    assert made.low("nothing") is None
    assert made.mean("h") is None  # no sample has no mean
    assert made.num_within("nothing", "nothing") is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({STARTED: 100.0, "c_total": 5.0}, {STARTED: 200.0, "c_total": 9.0}),
        ({"c_total": 5.0}, {"c_total": 2.0}),
    ],
    ids=["another process", "a counter that fell"],
)
def test_a_reset_is_no_rate(before: dict[str, float], after: dict[str, float]) -> None:
    made = interval("decode", before=before, after=after)
    assert made.rise("c_total") is None
    assert made.rises("c_total", "code") == {}


def test_another_instance_at_the_same_port_is_a_restart() -> None:
    made = Interval(
        snapshot("decode", "decode-0-aaaa", metrics={"c_total": 1.0}),
        snapshot("decode", "decode-0-bbbb", at=1.0, metrics={"c_total": 2.0}),
    )
    assert made.was_restarted
    assert made.rise("c_total") is None


def test_no_time_is_no_rate() -> None:
    one = snapshot("decode", metrics={"c_total": 1.0})
    assert Interval(one, one).per_second("c_total") is None


def test_labels_that_grew() -> None:
    made = interval(
        "decode",
        before={"f_total{code=lease}": 1.0, "f_total{code=old}": 2.0},
        after={"f_total{code=lease}": 4.0, "f_total{code=old}": 2.0, "f_total{code=new}": 1.0},
    )
    assert made.rises("f_total", "code") == {"lease": 3.0, "new": 1.0}


@pytest.mark.parametrize(
    ("spent_s", "num_left", "low", "expected"),
    [
        # 8 left, each after 2 s: 16 s in 4 s.
        (16.0, 8.0, 0.0, 4.0),
        # One left that had waited for a minute; it was there for 4 s of ours at most.
        (60.0, 1.0, 0.0, 1.0),
        # Nobody left and 7 are there all the time.
        (0.0, 0.0, 7.0, 7.0),
        (2.0, 4.0, 0.0, 0.5),
    ],
)
def test_how_many_were_there(spent_s: float, num_left: float, low: float, expected: float) -> None:
    made = interval(
        "decode",
        before={"g": low + 1},
        after={"h_sum": spent_s, "h_count": num_left, "g": low},
    )
    assert made.num_within("h", "g") == pytest.approx(expected)
    assert math.isfinite(made.num_within("h") or 0.0)
