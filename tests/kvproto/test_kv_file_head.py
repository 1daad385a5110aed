"""The head of a KV file, as bytes: what is accepted, and every way to be refused."""

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.description import layer_records
from kvproto.errors import (
    ChecksumMismatch,
    KvProtoError,
    LocalProtocolError,
    Malformed,
    PayloadTooLarge,
    RemoteProtocolError,
    Truncated,
    UnexpectedMessage,
)
from kvproto.frame import encode_frame
from kvproto.geometry import KvGeometry
from kvproto.header import ByteOrder, Header, Kind
from kvproto.kv_file_head import (
    KvFileHead,
    decode_head,
    decode_sizes,
    encode_head,
    head_nbytes,
    with_digests,
)
from kvproto.messages import Ping, encode_fields

GEOMETRY = KvGeometry.uniform(2, 2, 8, "float32", ["a", "b"])
HEAD = KvFileHead(
    1, "m", {"weights_digest": "w"}, "float32", layer_records(GEOMETRY), [1, 2, 3], [5, 6, 7, 8]
)
BODY = bytes(2 * 2 * 3 * 2 * 8 * 4)


def decode(raw, file_nbytes=None):
    sizes = decode_sizes(raw[:36], file_nbytes=len(raw) if file_nbytes is None else file_nbytes)
    return decode_head(raw[: sizes.body_start], sizes)[0]


def encoded(head=HEAD, order=ByteOrder.LITTLE, body=BODY):
    return bytes(encode_head(head, body, order)) + body


def by_hand(order=ByteOrder.LITTLE, shape_word=None, is_body_checked=False, body=BODY, **fields):
    """A file whose descriptor has other fields than a writer would give it."""
    raw = encoded()
    descriptor = msgpack.unpackb(raw[36 : 36 + int.from_bytes(raw[32:36], "little")]) | fields
    word = decode_sizes(raw[:36], file_nbytes=len(raw)).header.shape_word
    pieces = encode_frame(
        Kind.KV_FILE,
        descriptor,
        [body],
        shape_word=word if shape_word is None else shape_word,
        order=order,
        is_body_checked=is_body_checked,
    )
    return b"".join(pieces)


@pytest.mark.parametrize("order", list(ByteOrder))
def test_a_head_comes_back_in_both_orders_and_its_body_is_aligned(order):
    raw = encoded(order=order)
    sizes = decode_sizes(raw[:36], file_nbytes=len(raw))
    assert decode_head(raw[: sizes.body_start], sizes) == (HEAD, GEOMETRY)
    assert sizes.header.order is order
    assert (sizes.body_start % 64, sizes.body) == (0, len(BODY))
    assert HEAD.geometry == GEOMETRY


def test_the_size_of_the_head_is_known_before_the_digests():
    blank = replace(HEAD, digests=[0] * 4)
    done = with_digests(blank, [2**64 - 1] * 4, 0.25)
    assert head_nbytes(blank) == head_nbytes(done) == len(bytes(encode_head(done, BODY)))
    assert (done.digests, done.wire_error) == ([2**64 - 1] * 4, 0.25)


def test_fields_beyond_their_limits_are_our_own_fault():
    with pytest.raises(LocalProtocolError, match="cannot write a KV file: tokens: has 0 items"):
        head_nbytes(replace(HEAD, tokens=[]))


@pytest.mark.parametrize(
    ("raw", "error", "words"),
    [
        (b"", Truncated, "of 0 bytes ends inside its head"),
        (encoded()[:35], Truncated, "of 35 bytes ends inside"),
        (encoded()[:-1], PayloadTooLarge, "announces"),
        (encoded() + b"\0", Malformed, "payload: has"),
        (by_hand(is_body_checked=True), Malformed, "flags: must say"),
        (by_hand(body=b""), Malformed, "body: is missing"),
        (by_hand(format_version=2), Malformed, "format_version: is 2, this release reads 1"),
        (by_hand(tokens=b""), Malformed, "tokens: has 0 items"),
        (by_hand(layers=[]), Malformed, "layers: describe no KV cache"),
        (by_hand(dtype="int4"), Malformed, "layers: .*int4"),
        (by_hand(digests=b"12345678"), Malformed, "digests: has 1 items for 4 regions"),
        (by_hand(shape_word=7), Malformed, "shape_word: is not that"),
        (by_hand(**{"!new": 1}), Malformed, "!new: is a critical field"),
    ],
)
def test_what_is_not_a_whole_kv_file_is_refused(raw, error, words):
    with pytest.raises(error, match=words):
        decode(raw)


def test_a_frame_of_another_kind_is_refused():
    fields = encode_fields(Ping(7), ByteOrder.LITTLE)
    raw = b"".join(encode_frame(Kind.PING, fields, order=ByteOrder.LITTLE))
    with pytest.raises(UnexpectedMessage, match="holds a PING frame"):
        decode(raw)


def test_unknown_fields_are_skipped():
    assert decode(by_hand(comment="made by hand")) == HEAD


def test_a_huge_claim_is_refused_by_the_size_of_the_file():
    header = Header(Kind.KV_FILE, 1 << 62, 0, is_body_checked=False).encode()
    with pytest.raises(PayloadTooLarge):
        decode(header + bytes(4))
    header = Header(Kind.KV_FILE, 8, 0, is_body_checked=False).encode()
    with pytest.raises(Malformed, match="descriptor_nbytes"):
        decode(header + b"\xff" * 8)


def test_every_flipped_bit_of_the_head_is_found():
    raw = encoded()
    head = len(raw) - len(BODY)
    for bit in range(head * 8):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):
            decode(bytes(damaged))


def test_padding_that_is_not_zero_is_refused():
    fields = {"a": 1}
    frame = encode_frame(
        Kind.KV_FILE, fields, [BODY], order=ByteOrder.LITTLE, is_body_checked=False
    )
    raw = bytearray(b"".join(frame))
    sizes = decode_sizes(bytes(raw[:36]), file_nbytes=len(raw))
    raw[sizes.body_start - 1] = 1
    with pytest.raises(ChecksumMismatch):
        decode_head(raw[: sizes.body_start], sizes)


@given(st.binary(max_size=300))
def test_noise_is_refused_and_nothing_else_happens(noise):
    for raw in (noise, encoded()[:36] + noise):
        try:
            decode(raw)
        except KvProtoError:
            continue
        raise AssertionError("noise was accepted")
