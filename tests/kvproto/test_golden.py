"""Checked-in frames and the code agree, in both directions and in both byte orders."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvproto.blocks import BlockPool
from kvproto.connection import Connection
from kvproto.errors import ErrorCode, KvFileError, RemoteProtocolError
from kvproto.events import Ended
from kvproto.frame import decode_frame, encode_frame
from kvproto.geometry import PoolLayout
from kvproto.header import HOST_ORDER, ByteOrder, Header, Kind
from kvproto.kv_file import KvFile, save_kv
from kvproto.kv_file_head import encode_head
from kvproto.lease import LeaseTable
from kvproto.messages import FIELDS, MESSAGES, decode_fields, encode_fields
from kvproto.record import decode_record, encode_record, field_infos
from kvproto.region import RegionHeader
from tests.kvproto.golden.bad_frames import MAX_PAYLOAD_NBYTES, STAGES
from tests.kvproto.golden.generate import FILES
from tests.kvproto.golden.plain import plain

FOLDER = Path(__file__).parent / "golden"


def vectors_of(name: str) -> list[dict]:
    return json.loads((FOLDER / name).read_text("utf-8"))


def decoded(vector: dict):
    """(frame, message) of a vector."""
    frame = decode_frame(bytes.fromhex(vector["hex"]), max_payload_nbytes=MAX_PAYLOAD_NBYTES)
    header = frame.header
    assert (header.kind.name, header.order.name) == (vector["kind"], vector["order"])
    return frame, decode_fields(header.kind, frame.fields, header.order)


def named(vectors):
    return pytest.mark.parametrize("vector", vectors, ids=lambda vector: vector["name"])


@pytest.mark.parametrize("name", FILES)
def test_the_files_are_those_of_the_generator(name):
    assert vectors_of(name) == FILES[name]()
    assert f"`{name}`" in (FOLDER / "README.md").read_text("utf-8")


@named(vectors_of("messages.json"))
def test_messages_in_both_directions(vector):
    frame, message = decoded(vector)
    assert plain(message) == vector["fields"]
    assert frame.body.hex() == vector["body"]
    assert hex(frame.header.shape_word) == vector["shape_word"]
    again = encode_frame(
        message.kind,
        encode_fields(message, frame.header.order),
        [bytes.fromhex(vector["body"])],
        shape_word=int(vector["shape_word"], 16),
        order=frame.header.order,
        is_body_checked=not vector["flags"],
    )
    assert b"".join(again).hex() == vector["hex"]


def test_messages_cover_every_kind_in_both_orders():
    vectors = vectors_of("messages.json")
    for order in ByteOrder:
        kinds = {vector["kind"] for vector in vectors if vector["order"] == order.name}
        assert kinds == {kind.name for kind in MESSAGES}
    assert {vector["name"] for vector in vectors if vector["flags"]} == {
        "write_unchecked-little",
        "write_unchecked-big",
    }


@named(vectors_of("absent_fields.json"))
def test_absent_fields_have_their_defaults(vector):
    frame, message = decoded(vector)
    assert plain(message) == vector["fields"]
    absent = {info.name for info in FIELDS[type(message)] if not info.is_required}
    assert absent
    assert not absent & frame.fields.keys()


@named(vectors_of("bad_frames.json"))
def test_bad_frames_are_refused_with_their_code(wire, decode, prefill, geometry, vector):
    layout = PoolLayout(geometry, num_blocks=1, block_size=1)
    landing = LeaseTable(layout, memoryview(bytearray(layout.nbytes)), BlockPool(1))
    decode = replace(decode, max_payload_nbytes=MAX_PAYLOAD_NBYTES)
    if vector["state"] == "ready":
        reader, _ = wire.connected(decode, prefill, client_landing=landing)
    else:
        reader = Connection(decode, nonce=b"n" * 32, is_server=True, landing=landing)
    events = wire.feed(reader, bytes.fromhex(vector["hex"]))
    assert [type(event) for event in events] == [Ended], "one end and nothing before it"
    assert ErrorCode(events[0].error.code).name == vector["code"]
    assert events[0].error.field == vector["field"]


@named([item for item in vectors_of("bad_frames.json") if item["state"] == "ready"])
def test_what_is_wrong_in_a_header_is_found_in_its_32_bytes(vector):
    assert vector["stage"] in STAGES
    raw = bytes.fromhex(vector["hex"])[:32]
    if vector["stage"] == "header":
        with pytest.raises(RemoteProtocolError):
            Header.decode(raw, max_payload_nbytes=MAX_PAYLOAD_NBYTES)
    else:
        Header.decode(raw, max_payload_nbytes=MAX_PAYLOAD_NBYTES)


def test_bad_frames_cover_every_fault_of_a_frame():
    codes = {vector["code"] for vector in vectors_of("bad_frames.json")}
    assert codes >= {
        "BAD_MAGIC",
        "UNSUPPORTED_VERSION",
        "BAD_BYTE_ORDER",
        "CHECKSUM_MISMATCH",
        "UNKNOWN_KIND",
        "PAYLOAD_TOO_LARGE",
        "MALFORMED",
        "UNEXPECTED_MESSAGE",
        "INCOMPATIBLE",
    }


@named(vectors_of("kv_files.json"))
def test_kv_files_in_both_directions(vector, tmp_path):
    raw, order = bytes.fromhex(vector["hex"]), ByteOrder[vector["order"]]
    path = tmp_path / "prompt.kv"
    path.write_bytes(raw)
    with KvFile.open(path) as file:
        file.verify()
        assert file.order is order
        assert plain(file.head.layers) == vector["layers"]
        for name in ("model", "facts", "dtype", "tokens", "next_tokens", "wire_error"):
            assert plain(getattr(file.head, name)) == vector[name]
        for name, rows in vector["rows"].items():
            assert file.cache.region(*name.split(".")).ravel().tolist() == rows
        head, body_start = file.head, file.nbytes - 208
        body = raw[body_start:]
    assert bytes(encode_head(head, body, order)) + body == raw


def test_a_kv_file_that_this_host_writes_is_the_vector(tmp_path):
    (vector,) = (item for item in vectors_of("kv_files.json") if item["order"] == HOST_ORDER.name)
    path = tmp_path / "prompt.kv"
    path.write_bytes(bytes.fromhex(vector["hex"]))
    with KvFile.open(path) as file:
        save_kv(tmp_path / "again.kv", file.cache)
    assert (tmp_path / "again.kv").read_bytes().hex() == vector["hex"]


@named(vectors_of("bad_kv_files.json"))
def test_bad_kv_files_are_refused(vector, tmp_path):
    path = tmp_path / "prompt.kv"
    path.write_bytes(bytes.fromhex(vector["hex"]))
    if vector["found_by"] == "open":
        with pytest.raises(KvFileError):
            KvFile.open(path)
        return
    with KvFile.open(path) as file, pytest.raises(KvFileError):
        file.verify()


@named(vectors_of("region.json"))
def test_the_frame_of_a_region_in_both_directions(vector):
    raw, order = bytes.fromhex(vector["hex"]), ByteOrder[vector["order"]]
    frame = decode_frame(raw, max_payload_nbytes=4096)
    assert (frame.header.kind, frame.header.order) == (Kind.REGION, order)
    assert not frame.body.nbytes
    infos = field_infos(RegionHeader)
    header = RegionHeader(**decode_record(infos, frame.fields, order))
    assert plain(header) == vector["fields"]
    again = encode_frame(Kind.REGION, encode_record(header, infos, order), order=order)
    assert b"".join(again) == raw


def test_flagged_headers_are_of_the_two_kinds_that_have_the_flag():
    flagged = {vector["kind"] for vector in vectors_of("header.json") if vector["flags"]}
    assert flagged == {Kind.WRITE.name, Kind.KV_FILE.name}
