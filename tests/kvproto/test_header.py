"""The 32 bytes: golden vectors, round trips, and everything that is refused."""

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvproto.errors import (
    BadByteOrder,
    BadMagic,
    ChecksumMismatch,
    LocalProtocolError,
    Malformed,
    PayloadTooLarge,
    RemoteProtocolError,
    UnknownKind,
    UnsupportedVersion,
)
from kvproto.frame import decode_frame
from kvproto.header import (
    BODY_UNCHECKED,
    HEADER_NBYTES,
    HOST_ORDER,
    MAGIC,
    UNCHECKED_KINDS,
    VERSION,
    ByteOrder,
    Header,
    Kind,
)
from kvproto.messages import Ping

GOLDEN = json.loads((Path(__file__).parent / "golden" / "header.json").read_text("utf-8"))
MAX = (1 << 64) - 1

headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    payload_nbytes=st.integers(0, MAX),
    payload_check=st.integers(0, (1 << 32) - 1),
    shape_word=st.integers(0, MAX),
    order=st.sampled_from(ByteOrder),
)
flagged_headers = st.builds(
    Header,
    kind=st.sampled_from(sorted(UNCHECKED_KINDS)),
    payload_nbytes=st.integers(0, MAX),
    payload_check=st.integers(0, (1 << 32) - 1),
    shape_word=st.integers(0, MAX),
    order=st.sampled_from(ByteOrder),
    is_body_checked=st.just(False),
)


def sealed(raw: bytes, order: ByteOrder = HOST_ORDER) -> bytes:
    """``raw`` with a header check that agrees, as a faulty implementation would send it."""
    check = xxh3_64_intdigest(raw[:24]) & 0xFFFF_FFFF
    return raw[:24] + struct.pack("<Q" if order is ByteOrder.LITTLE else ">Q", check << 32)


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda vector: vector["name"])
def test_golden_vectors(vector):
    raw = bytes.fromhex(vector["hex"])
    expected = Header(
        Kind[vector["kind"]],
        int(vector["payload_nbytes"]),
        int(vector["payload_check"], 16),
        int(vector["shape_word"], 16),
        ByteOrder[vector["order"]],
        is_body_checked=not vector["flags"],
    )
    assert Header.decode(raw, max_payload_nbytes=MAX) == expected
    assert expected.encode() == raw


@given(headers | flagged_headers)
def test_round_trip(header):
    raw = header.encode()
    assert len(raw) == HEADER_NBYTES
    assert Header.decode(memoryview(raw), max_payload_nbytes=MAX) == header


def test_the_two_orders_differ_in_all_wide_fields_only():
    little = Header(Kind.WRITE, 0x0102030405060708, 1, 2, ByteOrder.LITTLE).encode()
    big = Header(Kind.WRITE, 0x0102030405060708, 1, 2, ByteOrder.BIG).encode()
    assert little[:5] + little[6:8] == big[:5] + big[6:8]
    assert little[8:16] == bytes(reversed(big[8:16]))
    assert little[16:24] == bytes(reversed(big[16:24]))


@given(headers | flagged_headers, st.integers(0, HEADER_NBYTES * 8 - 1))
def test_any_single_flipped_bit_is_refused_or_found_by_the_payload_check(header, bit):
    flipped = bytearray(header.encode())
    flipped[bit // 8] ^= 1 << bit % 8
    try:
        decoded = Header.decode(bytes(flipped), max_payload_nbytes=MAX)
    except RemoteProtocolError:
        return
    # Only the payload check itself lies outside the header check: the payload will not agree.
    assert decoded.payload_check != header.payload_check
    assert (decoded.payload_nbytes, decoded.kind) == (header.payload_nbytes, header.kind)


def test_every_single_bit_flip_of_one_whole_frame_header_is_refused(order, wire):
    # With the payload at hand, each of the 256 bits is found.

    frame = wire.frame(Ping(7), order=order)
    for bit in range(HEADER_NBYTES * 8):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):
            decode_frame(flipped, max_payload_nbytes=MAX)


def test_wrong_magic():
    with pytest.raises(BadMagic, match="47 45 54 20"):
        Header.decode(b"GET / HTTP/1.1\r\nHost: localhost\r\n"[:32], max_payload_nbytes=MAX)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_wrong_version(version):
    raw = bytearray(Header(Kind.PING, 1, 0).encode())
    raw[4] = version
    with pytest.raises(UnsupportedVersion, match=f"version {version}"):
        Header.decode(sealed(bytes(raw)), max_payload_nbytes=MAX)


@pytest.mark.parametrize("flag", [0, 3, 255])
def test_wrong_byte_order_flag(flag):
    raw = bytearray(Header(Kind.PING, 1, 0).encode())
    raw[5] = flag
    with pytest.raises(BadByteOrder, match=str(flag)):
        Header.decode(sealed(bytes(raw)), max_payload_nbytes=MAX)


def test_the_other_byte_order_flag_does_not_pass_the_check():
    raw = bytearray(Header(Kind.PING, 1, 0, order=ByteOrder.LITTLE).encode())
    raw[5] = ByteOrder.BIG
    with pytest.raises(ChecksumMismatch):
        Header.decode(bytes(raw), max_payload_nbytes=MAX)


@pytest.mark.parametrize("kind", [0, 6, 7, 255])
def test_unknown_kind(kind):
    raw = bytearray(Header(Kind.PING, 1, 0).encode())
    raw[6] = kind
    with pytest.raises(UnknownKind, match=f"kind {kind}"):
        Header.decode(sealed(bytes(raw)), max_payload_nbytes=MAX)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("flags", [BODY_UNCHECKED, 2, 3, 0x80, 0xFF])
def test_a_flag_that_the_kind_does_not_have(kind, flags):
    raw = bytearray(Header(kind, 1, 0).encode())
    raw[7] = flags
    if flags == BODY_UNCHECKED and kind in {Kind.WRITE, Kind.KV_FILE}:
        assert not Header.decode(sealed(bytes(raw)), max_payload_nbytes=MAX).is_body_checked
        return
    with pytest.raises(Malformed, match=f"flags {flags:#04x} are not those of a {kind.name}"):
        Header.decode(sealed(bytes(raw)), max_payload_nbytes=MAX)


@pytest.mark.parametrize("kind", sorted(set(Kind) - UNCHECKED_KINDS))
def test_a_body_is_not_left_unchecked_where_nothing_else_covers_it(kind):
    with pytest.raises(LocalProtocolError, match=f"{kind.name} frame whose body is unchecked"):
        Header(kind, 1, 0, is_body_checked=False).encode()


@pytest.mark.parametrize("nbytes", [101, 1 << 31, 1 << 63, MAX])
def test_a_length_above_the_limit(nbytes, order):
    raw = Header(Kind.PING, nbytes, 0, order=order).encode()
    with pytest.raises(PayloadTooLarge, match=str(nbytes)):
        Header.decode(raw, max_payload_nbytes=100)


def test_a_length_at_the_limit_passes():
    raw = Header(Kind.PING, 100, 0).encode()
    assert Header.decode(raw, max_payload_nbytes=100).payload_nbytes == 100


def test_a_flipped_length_is_found_before_it_is_believed(order):
    raw = bytearray(Header(Kind.PING, 1, 0, order=order).encode())
    raw[8 if order is ByteOrder.BIG else 15] ^= 0x80
    with pytest.raises(ChecksumMismatch):
        Header.decode(bytes(raw), max_payload_nbytes=100)


@pytest.mark.parametrize("order_char", ["<", ">"])
def test_the_forty_byte_form_is_refused(order_char):
    # Magic word, version, flags, kind, reserved, then four 64-bit words: 40 bytes.
    raw = struct.pack(order_char + "IHHQQQQ", 0xDEADBEAF, 1, 1, 1, 2, 3, 4)
    assert len(raw) == 40
    with pytest.raises(RemoteProtocolError):
        Header.decode(raw[:32], max_payload_nbytes=MAX)


@pytest.mark.parametrize("order_char", ["<", ">"])
@pytest.mark.parametrize("magic", [MAGIC])
def test_the_forty_byte_form_with_our_first_eight_bytes_is_refused(order_char, magic):
    first = magic + bytes([VERSION, 1 if order_char == "<" else 2, Kind.PING, 0])
    raw = first + struct.pack(order_char + "QQQQ", 4, 0, 0, 0)
    assert len(raw) == 40
    with pytest.raises(ChecksumMismatch):
        Header.decode(raw[:32], max_payload_nbytes=MAX)


@pytest.mark.parametrize(
    "header",
    [
        Header(Kind.PING, 1 << 64, 0),
        Header(Kind.PING, -1, 0),
        Header(Kind.PING, 0, 0, 1 << 64),
        Header(Kind.PING, 0, 1 << 64),
    ],
)
def test_a_number_that_does_not_fit_is_our_fault(header):
    with pytest.raises(LocalProtocolError):
        header.encode()
