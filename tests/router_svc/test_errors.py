"""The errors clients see."""

import pytest

from kvproto.errors import ErrorCode
from router_svc import errors
from router_svc.errors import ApiError, InvalidRequestError, UnavailableError, from_wire


def test_body_has_openais_shape() -> None:
    error = InvalidRequestError("bad", param="top_p", code="c")
    assert error.body() == {
        "error": {
            "message": "bad",
            "type": "invalid_request_error",
            "param": "top_p",
            "code": "c",
        }
    }
    assert (error.http_status, dict(error.headers())) == (400, {})
    assert InvalidRequestError("large", http_status=413).http_status == 413


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("UnauthorizedError", 401),
        ("NotFoundError", 404),
        ("OverloadedError", 429),
        ("InternalError", 500),
        ("UpstreamError", 502),
        ("UnavailableError", 503),
        ("RequestTimeoutError", 504),
    ],
)
def test_statuses(name: str, status: int) -> None:
    error = getattr(errors, name)("text")
    assert isinstance(error, ApiError)
    assert error.http_status == status
    assert ("Retry-After" in error.headers()) == (status in (429, 503))


@pytest.mark.parametrize("code", [*ErrorCode, 0, 123456])
def test_every_wire_code_is_mapped(code: int) -> None:
    error = from_wire(code, "why it was")
    assert "why it was" in error.message
    assert error.http_status in (400, 502, 503, 504)


def test_given_code_wins() -> None:
    assert UnavailableError("x").code == "unavailable"
    assert UnavailableError("x", code="y").code == "y"
