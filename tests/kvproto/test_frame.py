"""Layout of a frame, and descriptors that try to hurt."""

import mmap
import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvproto.errors import (
    ChecksumMismatch,
    LocalProtocolError,
    Malformed,
    PayloadTooLarge,
    RemoteProtocolError,
    Truncated,
)
from kvproto.frame import (
    ALIGNMENT,
    MAX_ARRAY_ITEMS,
    MAX_DESCRIPTOR_NBYTES,
    MAX_MAP_ITEMS,
    MAX_STR_NBYTES,
    decode_descriptor,
    decode_frame,
    encode_frame,
)
from kvproto.header import HEADER_NBYTES, ByteOrder, Header, Kind

MAX = (1 << 64) - 1
scalars = st.none() | st.booleans() | st.integers(-(1 << 63), MAX) | st.text(max_size=20)
fields_strategy = st.dictionaries(
    st.text(max_size=10), scalars | st.binary(max_size=50) | st.lists(scalars, max_size=5)
)


def payload_frame(payload: bytes, order: ByteOrder = ByteOrder.LITTLE) -> bytes:
    """A frame around any payload, with checks that agree."""
    check = xxh3_64_intdigest(payload) & 0xFFFF_FFFF
    return Header(Kind.PING, len(payload), check, 0, order).encode() + payload


@given(fields_strategy, st.lists(st.binary(max_size=70), max_size=4), st.sampled_from(ByteOrder))
def test_round_trip(fields, body, order):
    buffers = encode_frame(Kind.WRITE, fields, body, shape_word=5, order=order)
    raw = b"".join(buffers)
    frame = decode_frame(raw, max_payload_nbytes=MAX)
    assert frame.fields == fields
    assert bytes(frame.body) == b"".join(body)
    assert frame.header.shape_word == 5
    if frame.body:
        assert (len(raw) - len(frame.body)) % ALIGNMENT == 0
    else:
        (descriptor_nbytes,) = struct.unpack_from("<I" if order == 1 else ">I", raw, HEADER_NBYTES)
        assert len(raw) == HEADER_NBYTES + 4 + descriptor_nbytes


@given(st.binary(min_size=1, max_size=200), st.sampled_from(ByteOrder), st.data())
def test_an_unchecked_body_is_not_under_the_payload_check(body, order, data):
    """Every flipped bit in front of the body is found, none in the body."""
    raw = bytearray(
        b"".join(encode_frame(Kind.KV_FILE, {"a": 1}, [body], order=order, is_body_checked=False))
    )
    frame = decode_frame(bytes(raw), max_payload_nbytes=MAX)
    assert not frame.header.is_body_checked
    assert frame.body == body
    byte = data.draw(st.integers(0, len(raw) - 1))
    raw[byte] ^= 1 << data.draw(st.integers(0, 7))
    if byte >= len(raw) - len(body):
        assert decode_frame(bytes(raw), max_payload_nbytes=MAX).body == raw[-len(body) :]
    else:
        with pytest.raises(RemoteProtocolError):
            decode_frame(bytes(raw), max_payload_nbytes=MAX)


def test_a_flagged_frame_without_a_body_is_checked_whole():
    raw = b"".join(
        encode_frame(Kind.WRITE, {"a": 1}, order=ByteOrder.LITTLE, is_body_checked=False)
    )
    assert decode_frame(raw, max_payload_nbytes=MAX).fields == {"a": 1}
    damaged = raw[:-1] + b"\x02"
    with pytest.raises(ChecksumMismatch):
        decode_frame(damaged, max_payload_nbytes=MAX)


def test_the_body_is_not_copied():
    body = bytearray(b"x" * 4096)
    buffers = encode_frame(Kind.WRITE, {}, [body], order=ByteOrder.LITTLE)
    body[0] = ord("y")
    assert bytes(buffers[1][:2]) == b"yx"


def test_a_mapped_frame_is_read_without_a_copy():
    raw = b"".join(encode_frame(Kind.WRITE, {"a": 1}, [b"body" * 50], order=ByteOrder.LITTLE))
    with mmap.mmap(-1, len(raw)) as mapped:
        mapped[:] = raw
        frame = decode_frame(memoryview(mapped), max_payload_nbytes=MAX)
        assert frame.body.obj is mapped
        start = len(raw) - frame.body.nbytes
        assert start % ALIGNMENT == 0
        assert not frame.body.readonly
        frame.body.release()
        del frame


def test_bytes_laid_out_by_hand(order):
    prefix = "<" if order is ByteOrder.LITTLE else ">"
    descriptor = b"\x81\xa1a\x01"  # {"a": 1}
    payload = struct.pack(prefix + "I", 4) + descriptor + bytes(64 - 40) + b"BODY"
    header = bytes.fromhex("deadbeaf") + bytes([1, order, 18, 0])
    header += struct.pack(prefix + "QQ", len(payload), 9)
    checks = (xxh3_64_intdigest(header) & 0xFFFFFFFF) << 32 | xxh3_64_intdigest(
        payload
    ) & 0xFFFFFFFF
    expected = header + struct.pack(prefix + "Q", checks) + payload
    buffers = encode_frame(Kind.WRITE, {"a": 1}, [b"BODY"], shape_word=9, order=order)
    assert b"".join(buffers) == expected


def test_a_descriptor_above_the_limit_is_our_fault():
    with pytest.raises(LocalProtocolError, match="descriptor"):
        encode_frame(Kind.PING, {"a": bytes(MAX_DESCRIPTOR_NBYTES)}, order=ByteOrder.LITTLE)


@pytest.mark.parametrize("nbytes", [0, 1, 31])
def test_a_frame_cut_in_its_header(nbytes):
    with pytest.raises(Truncated, match="header"):
        decode_frame(payload_frame(b"\0\0\0\0\x80")[:nbytes], max_payload_nbytes=MAX)


def test_a_frame_cut_in_its_payload():
    with pytest.raises(Truncated, match="4 of 5"):
        decode_frame(payload_frame(b"\1\0\0\0\x80")[:-1], max_payload_nbytes=MAX)


def test_bytes_behind_a_frame():
    with pytest.raises(Malformed, match="payload"):
        decode_frame(payload_frame(b"\1\0\0\0\x80") + b"x", max_payload_nbytes=MAX)


def test_a_payload_without_a_prefix():
    with pytest.raises(Malformed, match="payload"):
        decode_frame(payload_frame(b"\1\0"), max_payload_nbytes=MAX)


def test_a_payload_above_the_limit():
    with pytest.raises(PayloadTooLarge):
        decode_frame(payload_frame(b"\1\0\0\0\x80"), max_payload_nbytes=4)


@given(st.integers(0, 36 * 8 + 7))
def test_a_flipped_bit_anywhere_is_found(bit):
    raw = bytearray(payload_frame(b"\1\0\0\0\x80"))
    raw[bit // 8 % len(raw)] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError):
        decode_frame(raw, max_payload_nbytes=MAX)


@pytest.mark.parametrize("descriptor_nbytes", [2, 1 << 31, (1 << 32) - 1])
def test_a_descriptor_beyond_the_payload(descriptor_nbytes, order):
    prefix = struct.pack("<I" if order == 1 else ">I", descriptor_nbytes)
    with pytest.raises(Malformed) as excinfo:
        decode_frame(payload_frame(prefix + b"\x80", order), max_payload_nbytes=MAX)
    assert excinfo.value.field == "descriptor_nbytes"


def test_a_descriptor_above_the_limit():
    nbytes = MAX_DESCRIPTOR_NBYTES + 1
    with pytest.raises(Malformed, match="descriptor_nbytes"):
        decode_frame(
            payload_frame(struct.pack("<I", nbytes) + bytes(nbytes)), max_payload_nbytes=MAX
        )


@pytest.mark.parametrize("rest_nbytes", [1, 27])
def test_padding_without_a_body(rest_nbytes):
    payload = struct.pack("<I", 1) + b"\x80" + bytes(rest_nbytes)
    with pytest.raises(Malformed, match="padding without a body"):
        decode_frame(payload_frame(payload), max_payload_nbytes=MAX)


def test_padding_that_is_not_zero():
    payload = struct.pack("<I", 1) + b"\x80" + bytes(26) + b"\1" + b"body"
    with pytest.raises(Malformed, match="padding"):
        decode_frame(payload_frame(payload), max_payload_nbytes=MAX)


def test_a_wrong_payload_check():
    raw = bytearray(payload_frame(b"\1\0\0\0\x80"))
    raw[-1] ^= 1
    with pytest.raises(ChecksumMismatch, match="payload check of a PING"):
        decode_frame(raw, max_payload_nbytes=MAX)


BOMBS = {
    "empty": b"",
    "not a map": b"\x93\x01\x02\x03",
    "nil": b"\xc0",
    "two objects": b"\x80\x80",
    "cut": b"\x81\xa1a",
    "never used byte": b"\xc1",
    "deep arrays": b"\x81\xa1a" + b"\x91" * 100_000 + b"\xc0",
    "deep maps": b"\x81\xa1a" * 2000 + b"\xc0",
    "array claims 4 G": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "nested claims": b"\x81\xa1a" + b"\xdd\x00\x10\x00\x00" * 400,
    "map claims 4 G": b"\xdf\xff\xff\xff\xff",
    "str claims 4 G": b"\x81\xa1a\xdb\xff\xff\xff\xff",
    "bin claims 4 G": b"\x81\xa1a\xc6\xff\xff\xff\xff",
    "ext claims 4 G": b"\x81\xa1a\xc9\xff\xff\xff\xff\x01",
    "ext": b"\x81\xa1a\xd4\x05\x00",
    "empty ext": b"\x81\xa1a\xc7\x00\x05",
    "timestamp": b"\x81\xa1a\xd6\xff\x00\x00\x00\x00",
    "empty timestamp": b"\x81\xa1a\xc7\x00\xff",
    "key is an integer": b"\x81\x01\x01",
    "key is bytes": b"\x81\xc4\x01a\x01",
    "key is nil": b"\x81\xc0\x01",
    "key is an array": b"\x81\x90\x01",
    "key is a float": b"\x81\xcb" + bytes(8) + b"\x01",
    "key twice": b"\x82\xa1a\x01\xa1a\x02",
    "nested key twice": b"\x81\xa1a\x82\xa1b\x01\xa1b\x02",
    "not UTF-8": b"\x81\xa1a\xa2\xff\xfe",
    "surrogate": b"\x81\xa1a\xa3\xed\xa0\x80",
    "overlong UTF-8": b"\x81\xa1a\xa2\xc0\xaf",
    "key is not UTF-8": b"\x81\xa1\xff\x01",
    "too many items": msgpack.packb({"a": [0] * (MAX_ARRAY_ITEMS + 1)}),
    "too many keys": msgpack.packb({str(i): 0 for i in range(MAX_MAP_ITEMS + 1)}),
    "long string": msgpack.packb({"a": "x" * (MAX_STR_NBYTES + 1)}),
}


@pytest.mark.parametrize("raw", BOMBS.values(), ids=BOMBS.keys())
def test_msgpack_that_tries_to_hurt(raw):
    with pytest.raises(Malformed) as excinfo:
        decode_descriptor(raw)
    assert excinfo.value.field == "descriptor"
    assert str(excinfo.value) != "descriptor: "


@given(st.binary(max_size=200))
def test_random_descriptors_are_maps_or_malformed(raw):
    try:
        fields = decode_descriptor(raw)
    except Malformed:
        return
    assert all(type(name) is str for name in fields)


@given(st.binary(max_size=200))
def test_random_bytes_are_frames_or_remote_faults(raw):
    with pytest.raises(RemoteProtocolError):
        decode_frame(raw, max_payload_nbytes=MAX)
