"""Typed access to request fields."""

import pytest

from router_svc.errors import InvalidRequestError
from router_svc.request_fields import RequestFields, check_text, show


def test_null_is_not_given() -> None:
    fields = RequestFields({"a": None})
    assert not fields.has("a")
    assert fields.integer("a", minimum=0, maximum=1) is None
    assert fields.number("a", minimum=0, maximum=1, default=0.5) == 0.5
    assert fields.boolean("a", default=True)
    assert fields.text("a") is None


def test_limits_are_inclusive() -> None:
    fields = RequestFields({"low": 1, "high": 3})
    assert fields.integer("low", minimum=1, maximum=3) == 1
    assert fields.number("high", minimum=1, maximum=3, default=2) == 3.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3.1, 0.9])
def test_number_outside(value: float) -> None:
    with pytest.raises(InvalidRequestError, match="from 1 to 3"):
        RequestFields({"a": value}).number("a", minimum=1, maximum=3, default=2)


def test_prefix_is_in_the_name() -> None:
    fields = RequestFields({"a": "x"}, "outer.")
    with pytest.raises(InvalidRequestError) as info:
        fields.boolean("a")
    assert info.value.param == "outer.a"
    assert fields.raw("a") == "x"


def test_shown_values_are_bounded() -> None:
    assert len(show("x" * 10_000)) < 100
    assert show(3) == "3"


def test_text_must_be_encodable() -> None:
    assert check_text("ä🎉", "p") == "ä🎉"
    with pytest.raises(InvalidRequestError, match="character 1"):
        check_text("a\udc80", "p")
