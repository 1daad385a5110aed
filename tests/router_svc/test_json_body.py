"""Bytes that are not a JSON object."""

import pytest

from router_svc.errors import InvalidRequestError
from router_svc.json_body import parse_json_object


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b'{"a": "\xff"}', "invalid_utf8"),
        ('{"a": 1}'.encode("utf-16"), "invalid_utf8"),
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"a": NaN}', "invalid_json"),
        (b'{"a": -Infinity}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b"null", "invalid_json"),
    ],
)
def test_refused(raw: bytes, code: str) -> None:
    with pytest.raises(InvalidRequestError) as info:
        parse_json_object(raw)
    assert (info.value.param, info.value.code) == ("body", code)


def test_field_given_twice() -> None:
    with pytest.raises(InvalidRequestError, match="twice") as info:
        parse_json_object(b'{"seed": 1, "seed": 2}')
    assert info.value.param == "seed"


def test_object() -> None:
    assert parse_json_object('{"a": ["ä", 1]}'.encode()) == {"a": ["ä", 1]}
