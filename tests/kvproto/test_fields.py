"""Types and limits of fields, in both directions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.fields import (
    MAX_U64,
    Blob,
    Boolean,
    Choice,
    FieldError,
    PackedUInts,
    Real,
    ScalarMap,
    Text,
    TextList,
    UInt,
)
from kvproto.header import ByteOrder

LITTLE = ByteOrder.LITTLE

GOOD = [
    (Text(4), ""),
    (Text(4), "üü"),
    (Text(4, 1, ascii_only=True), "a-b"),
    (Choice(("a", "b")), "b"),
    (UInt(9, 1), 9),
    (UInt(), 0),
    (UInt(MAX_U64), MAX_U64),
    (Real(1.0), 0.5),
    (Boolean(), True),
    (Blob(2), b"ab"),
    (TextList(2, Text(3)), ["a", "b"]),
    (ScalarMap(2, allow_float=False), {"a": 1, "b": "x"}),
    (ScalarMap(2, allow_float=True), {"a": 1.5}),
    (ScalarMap(1, allow_float=False), {"a": -(1 << 63)}),
]
BAD = [
    (Text(4), 1, "must be a str"),
    (Text(4), b"a", "must be a str"),
    (Text(3), "üü", "has 4 bytes"),
    (Text(3, 1), "", "has 0 bytes"),
    (Text(9), "\ud800", "not valid UTF-8"),
    (Text(9, ascii_only=True), "ü", "printable ASCII"),
    (Text(9, ascii_only=True), "a\nb", "printable ASCII"),
    (Choice(("a",)), "b", "one of a"),
    (Choice(("a",)), 1, "one of a"),
    (UInt(9), 10, "outside 0..9"),
    (UInt(9), -1, "outside"),
    (UInt(9), True, "must be an integer"),
    (UInt(9), 1.0, "must be an integer"),
    (Real(1.0), 1.5, "outside"),
    (Real(1.0), float("nan"), "outside"),
    (Real(1.0), float("inf"), "outside"),
    (Real(1.0), True, "must be a number"),
    (Real(1.0), "1", "must be a number"),
    (Boolean(), 1, "must be a bool"),
    (Blob(2), b"abc", "has 3 bytes"),
    (Blob(2), "ab", "must be bytes"),
    (TextList(1, Text(3)), ["a", "b"], "has 2 items"),
    (TextList(1, Text(3)), "a", "must be a list"),
    (TextList(1, Text(3)), [1], "must be a str"),
    (ScalarMap(1, allow_float=False), {"a": 1, "b": 2}, "has 2 items"),
    (ScalarMap(1, allow_float=False), [], "must be a map"),
    (ScalarMap(1, allow_float=False), {"a": 1.5}, r"\[a\]"),
    (ScalarMap(1, allow_float=True), {"a": float("nan")}, r"\[a\]"),
    (ScalarMap(1, allow_float=True), {"a": True}, r"\[a\]"),
    (ScalarMap(1, allow_float=True), {"a": None}, r"\[a\]"),
    (ScalarMap(1, allow_float=True), {"a": 1 << 64}, r"\[a\]"),
    (ScalarMap(1, allow_float=True), {"a": "x" * 257}, "has 257 bytes"),
    (ScalarMap(1, allow_float=True), {"": 1}, "has 0 bytes"),
]


@pytest.mark.parametrize(("spec", "value"), GOOD)
def test_good_values_pass_both_ways(spec, value, order):
    assert spec.decode(spec.encode(value, order), order) == value


@pytest.mark.parametrize(("spec", "value", "reason"), BAD)
def test_bad_values_are_refused_both_ways(spec, value, reason):
    with pytest.raises(FieldError, match=reason):
        spec.encode(value, LITTLE)
    with pytest.raises(FieldError, match=reason):
        spec.decode(value, LITTLE)


def test_an_integer_is_a_number_and_becomes_a_float():
    assert type(Real(9.0).decode(3, LITTLE)) is float


def test_a_sentence_is_cut_not_refused_and_never_inside_a_character():
    spec = Text(5, is_cut=True)
    assert spec.encode("üüü", LITTLE) == "üü"
    assert spec.encode("abcdefgh", LITTLE) == "abcde"
    assert spec.encode("\ud800x", LITTLE) == "?x"
    with pytest.raises(FieldError):
        spec.encode(1, LITTLE)
    with pytest.raises(FieldError):
        spec.decode("abcdefgh", LITTLE)


@given(
    st.sampled_from([32, 64]), st.sampled_from(ByteOrder), st.lists(st.integers(0, (1 << 32) - 1))
)
def test_packed_integers_round_trip(bits, order, values):
    spec = PackedUInts(bits, 1000)
    raw = spec.encode(values, order)
    assert len(raw) == len(values) * bits // 8
    assert spec.decode(raw, order) == values
    assert raw == b"".join(
        value.to_bytes(bits // 8, "little" if order is LITTLE else "big") for value in values
    )


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1 << 32], "not a u32"),
        ([-1], "not a u32"),
        ([1.5], "not a u32"),
        (["a"], "not a u32"),
        ([1, 2, 3], "has 3 items"),
        ([], "has 0 items"),
        (b"\0\0\0\0", "must be a list"),
    ],
)
def test_packed_integers_refuse_to_encode(value, reason):
    with pytest.raises(FieldError, match=reason):
        PackedUInts(32, 2, 1).encode(value, LITTLE)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1], "must be bytes"),
        (b"\0\0\0\0\0", "multiple of 4"),
        (b"", "has 0 items"),
        (bytes(12), "has 3 items"),
    ],
)
def test_packed_integers_refuse_to_decode(value, reason):
    with pytest.raises(FieldError, match=reason):
        PackedUInts(32, 2, 1).decode(value, LITTLE)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (Text(4), "str, UTF-8, 0..4 bytes"),
        (Text(4, 1, ascii_only=True), "str, printable ASCII, 1..4 bytes"),
        (Choice(("a", "b")), "str, one of a, b"),
        (UInt(9, 1), "uint, 1..9"),
        (Real(1e6), "float, finite, 0..1e+06"),
        (Boolean(), "bool"),
        (Blob(2), "bin, 2 bytes"),
        (PackedUInts(64, 5), "bin, packed u64, 0..5 items"),
        (TextList(2, Text(3)), "array, 0..2 items, each: str, UTF-8, 0..3 bytes"),
        (
            ScalarMap(2, allow_float=True),
            "map, 0..2 items, key: str, printable ASCII, 1..64 bytes, value: str, integer or float",
        ),
    ],
)
def test_the_text_of_a_spec_is_the_cell_in_the_document(spec, text):
    assert str(spec) == text
