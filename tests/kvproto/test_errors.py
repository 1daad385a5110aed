"""The tree and its codes."""

import inspect
import re

import pytest

from kvproto import errors
from kvproto.errors import ErrorCode, HandshakeRefused, KvProtoError, Malformed, PeerError

CLASSES = [
    item
    for _, item in inspect.getmembers(errors, inspect.isclass)
    if issubclass(item, KvProtoError)
]


def test_codes_are_append_only():
    assert {code.name: code.value for code in ErrorCode} == {
        "INTERNAL": 1,
        "MALFORMED": 2,
        "INCOMPATIBLE": 3,
        "UNAUTHENTICATED": 4,
        "OVERLOADED": 5,
        "SHUTTING_DOWN": 6,
        "PROMPT_TOO_LONG": 7,
        "PREFILL_UNAVAILABLE": 8,
        "CANCELLED": 9,
        "DEADLINE_EXCEEDED": 10,
        "LEASE": 11,
        "DIGEST_MISMATCH": 12,
        "POOL_EXHAUSTED": 13,
        "BAD_MAGIC": 14,
        "UNSUPPORTED_VERSION": 15,
        "BAD_BYTE_ORDER": 16,
        "CHECKSUM_MISMATCH": 17,
        "UNKNOWN_KIND": 18,
        "PAYLOAD_TOO_LARGE": 19,
        "TRUNCATED": 20,
        "UNEXPECTED_MESSAGE": 21,
        "CONNECTION_LOST": 22,
        "LOCAL": 23,
        "CARRIER_LOST": 24,
    }


@pytest.mark.parametrize("item", CLASSES)
def test_every_error_is_in_the_drawing_and_has_a_wire_code(item):
    drawn = re.findall(r"[├└]── (\w+)|^    (KvProtoError)", errors.__doc__, re.MULTILINE)
    assert item.__name__ in {first or second for first, second in drawn}
    assert ErrorCode(item.code)


def test_an_error_without_a_field_says_so():
    assert KvProtoError("x").field == ""


def test_errors_name_their_field():
    assert Malformed("tokens", "is missing").field == "tokens"
    assert str(Malformed("tokens", "is missing")) == "tokens: is missing"
    refused = HandshakeRefused("dtype", "float32", "float16")
    assert refused.field == "dtype"
    assert "'float32' here and 'float16' at the peer" in str(refused)
    assert str(HandshakeRefused("dtype", "a", "b", "own words")) == "own words"


def test_a_peer_error_keeps_a_code_this_release_does_not_know():
    error = PeerError(999, "from the future", "x", "seq")
    assert (error.code, error.message, error.field, error.sequence_id) == (
        999,
        "from the future",
        "x",
        "seq",
    )
