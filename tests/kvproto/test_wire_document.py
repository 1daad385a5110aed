"""docs/wire.md says what the code does: messages, fields, numbers, diagrams, codes."""

import re
from pathlib import Path

import pytest

from kvproto.errors import ErrorCode
from kvproto.frame import (
    MAX_ARRAY_ITEMS,
    MAX_DESCRIPTOR_NBYTES,
    MAX_MAP_ITEMS,
    MAX_STR_NBYTES,
    decode_frame,
)
from kvproto.header import Kind
from kvproto.kv_file_head import KvFileHead
from kvproto.messages import MESSAGES, ROLES, SENDERS
from kvproto.record import field_infos
from kvproto.region import RegionHeader
from kvproto.state import (
    BLOCK_TRANSITIONS,
    CONNECTION_TRANSITIONS,
    TRANSFER_TRANSITIONS,
    to_mermaid,
)

RECORDS = {**MESSAGES, Kind.KV_FILE: KvFileHead, Kind.REGION: RegionHeader}
TEXT = (Path(__file__).parents[2] / "docs" / "wire.md").read_text("utf-8")
SECTIONS = {
    match["name"]: match
    for match in re.finditer(
        r"^#### (?P<name>[A-Z_]+) = (?P<number>\d+)\n(?P<text>.*?)(?=^#)", TEXT, re.M | re.S
    )
}


def test_every_message_is_described_once_with_its_number():
    headings = re.findall(r"^#### ([A-Z_]+) = (\d+)$", TEXT, re.M)
    assert [(name, int(number)) for name, number in headings] == [
        (kind.name, kind.value) for kind in Kind
    ]


@pytest.mark.parametrize("kind", Kind)
def test_the_table_of_a_kind_is_its_fields(kind):
    rows = re.findall(r"^\| `(\S+)` \| (.+) \| (\w+) \|$", SECTIONS[kind.name]["text"], re.M)
    assert rows == [
        (info.name, str(info.spec), "required" if info.is_required else "optional")
        for info in field_infos(RECORDS[kind])
    ]


@pytest.mark.parametrize("kind", MESSAGES)
def test_the_senders_of_a_message(kind):
    (senders,) = re.findall(r"^Senders: (.*)\.$", SECTIONS[kind.name]["text"], re.M)
    assert senders == ", ".join(role for role in ROLES if role in SENDERS[kind])


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in MESSAGES])
def test_nobody_sends_what_lies_in_files(kind):
    assert "\nSenders: none; it must be refused on a connection.\n" in SECTIONS[kind.name]["text"]


def test_every_error_code_is_listed():
    table = TEXT[TEXT.index("## 10. Error codes") : TEXT.index("## 11. Versions")]
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|$", table, re.M)
    assert [(int(number), name) for number, name in rows] == [
        (code.value, code.name) for code in ErrorCode
    ]


@pytest.mark.parametrize("table", [CONNECTION_TRANSITIONS, TRANSFER_TRANSITIONS, BLOCK_TRANSITIONS])
def test_diagrams_are_drawn_from_the_tables(table):
    assert f"```mermaid\n{to_mermaid(table)}\n```" in TEXT


def test_the_example_is_a_frame():
    example = TEXT[TEXT.index("Example, PING") : TEXT.index("## 3.")]
    raw = bytes.fromhex("".join(re.findall(r"^    ((?:[0-9a-f]{2} )+)", example, re.M)))
    frame = decode_frame(raw, max_payload_nbytes=100)
    assert (frame.header.kind, frame.fields) == (Kind.PING, {"token": 7})
    assert f"({len(raw)} bytes)" in example


def test_limits_are_those_of_the_code():
    assert MAX_DESCRIPTOR_NBYTES == 5 << 20
    assert (
        f"a str at most {MAX_STR_NBYTES} bytes, an array at most {MAX_ARRAY_ITEMS} items, "
        f"a map at most\n  {MAX_MAP_ITEMS} pairs"
    ) in TEXT


def test_a_forbidden_word_is_absent():
    assert "native" not in TEXT.lower()


def test_the_contents_are_the_headings():
    (contents,) = re.findall(r"^Contents: (.*?)\n\n", TEXT, re.M | re.S)
    names = re.sub(r"\s+", " ", contents).split(" · ")
    headings = re.findall(r"^## (\d+)\. (.*)$", TEXT, re.M)
    assert [name.split(" ", 1)[0] for name in names] == [number for number, _ in headings]
