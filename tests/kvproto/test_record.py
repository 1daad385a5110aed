"""Classes to maps and back."""

from dataclasses import dataclass
from typing import Annotated

import pytest

from kvproto.errors import Malformed
from kvproto.fields import FieldError, Text, UInt
from kvproto.header import ByteOrder
from kvproto.record import RecordList, decode_record, encode_record, field_infos

LITTLE = ByteOrder.LITTLE


@dataclass(frozen=True, slots=True)
class Point:
    x: Annotated[int, UInt(9)]
    y: Annotated[int, UInt(9)] = 5
    name: Annotated[str, Text(3)] = ""


INFOS = field_infos(Point)


def test_a_field_with_a_default_is_optional():
    assert [(info.name, info.is_required) for info in INFOS] == [
        ("x", True),
        ("y", False),
        ("name", False),
    ]


def test_round_trip():
    fields = encode_record(Point(1, 2, "a"), INFOS, LITTLE)
    assert fields == {"x": 1, "y": 2, "name": "a"}
    assert Point(**decode_record(INFOS, fields, LITTLE)) == Point(1, 2, "a")


def test_absent_optional_fields_take_their_default():
    assert Point(**decode_record(INFOS, {"x": 1}, LITTLE)) == Point(1)


def test_the_first_faulty_field_is_named():
    with pytest.raises(Malformed, match=r"^x: is missing") as excinfo:
        decode_record(INFOS, {"y": 99}, LITTLE)
    assert excinfo.value.field == "x"
    with pytest.raises(Malformed, match=r"^y: is 99"):
        decode_record(INFOS, {"x": 1, "y": 99}, LITTLE)
    with pytest.raises(FieldError, match=r"^y: is 99"):
        encode_record(Point(1, 99), INFOS, LITTLE)


def test_unknown_fields_are_skipped_unless_critical():
    assert decode_record(INFOS, {"x": 1, "future": 2, "z": []}, LITTLE) == {"x": 1}
    with pytest.raises(Malformed, match="critical") as excinfo:
        decode_record(INFOS, {"x": 1, "future": 2, "!must": 3}, LITTLE)
    assert excinfo.value.field == "!must"


def test_lists_of_records_round_trip():
    spec = RecordList(2, Point)
    value = [Point(1), Point(2, 3, "b")]
    assert spec.decode(spec.encode(value, LITTLE), LITTLE) == value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "must be a list"),
        ([Point(1)] * 3, "has 3 items"),
        ([{"x": 1}], "item of type dict"),
        ([Point(99)], "x: is 99"),
    ],
)
def test_lists_of_records_refuse_to_encode(value, reason):
    with pytest.raises(FieldError, match=reason):
        RecordList(2, Point).encode(value, LITTLE)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "must be a list"),
        ([{"x": 1}] * 3, "has 3 items"),
        ([7], "item of type int"),
        ([{"x": 99}], "whose x: is 99"),
        ([{}], "whose x: is missing"),
        ([{"x": 1, "!new": 1}], "whose !new"),
    ],
)
def test_lists_of_records_refuse_to_decode(value, reason):
    with pytest.raises(FieldError, match=reason):
        RecordList(2, Point).decode(value, LITTLE)


def test_the_text_of_a_record_list_names_its_fields():
    assert str(RecordList(2, Point)) == (
        "array, 0..2 items, each a map with x: uint, 0..9; y: uint, 0..9; "
        "name: str, UTF-8, 0..3 bytes"
    )
