"""Frames out of a stream, however it is cut."""

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvproto.errors import ChecksumMismatch, Malformed, PayloadTooLarge, RemoteProtocolError
from kvproto.header import ByteOrder, Header, Kind
from kvproto.messages import Abort, Ping, Write
from kvproto.reader import FrameReader


class Sink:
    """Takes bodies of any size."""

    def __init__(self) -> None:
        self.bodies: list[memoryview] = []
        self.received = bytearray()

    def open_body(self, header, message, body_nbytes):
        self.bodies.append(memoryview(bytearray(body_nbytes)))
        return [self.bodies[-1]]

    def body_received(self, piece):
        self.received += piece


def reader_of(sink: Sink, max_payload_nbytes: int = 1 << 20) -> FrameReader:
    return FrameReader(sink.open_body, sink.body_received, max_payload_nbytes=max_payload_nbytes)


def deliver(reader: FrameReader, data: bytes, sizes=(1 << 20,)) -> list:
    frames, turn = [], 0
    while data:
        buffer = reader.next_buffer()
        nbytes = min(buffer.nbytes, len(data), sizes[turn % len(sizes)])
        buffer[:nbytes] = data[:nbytes]
        frames += reader.bytes_received(nbytes)
        data = data[nbytes:]
        turn += 1
    return frames


def raw_frame(payload: bytes, kind: Kind = Kind.PING) -> bytes:
    return Header(kind, len(payload), xxh3_64_intdigest(payload) & 0xFFFFFFFF).encode() + payload


@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=10))
def test_frames_survive_any_cutting(wire, sizes):
    messages = [Ping(1), Write("s", 1, "layers.0", 0, 1), Abort("s", 1, 9, "gone"), Ping(2)]
    bodies = [b"", b"body" * 30, b"", b""]
    orders = [ByteOrder.LITTLE, ByteOrder.BIG, ByteOrder.BIG, ByteOrder.LITTLE]
    data = b"".join(
        wire.frame(message, [body], order=order)
        for message, body, order in zip(messages, bodies, orders, strict=True)
    )
    sink = Sink()
    frames = deliver(reader_of(sink), data, sizes)
    assert [frame.message for frame in frames] == messages
    assert [bytes(body) for body in sink.bodies] == bodies
    assert sink.received == b"".join(bodies)


@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=10))
def test_unchecked_bodies_are_received_and_not_hashed(wire, sizes):
    """Bodies of both sorts in turn, one of them damaged where nobody looks."""
    write = Write("s", 1, "layers.0", 0, 1)
    plain = wire.frame(write, [b"plain" * 30])
    unchecked = bytearray(wire.frame(write, [b"other" * 30], is_body_checked=False))
    unchecked[-1] ^= 0xFF
    sink = Sink()
    frames = deliver(reader_of(sink), plain + unchecked + plain, sizes)
    assert [frame.header.is_body_checked for frame in frames] == [True, False, True]
    damaged = b"other" * 29 + b"othe" + bytes([ord("r") ^ 0xFF])
    assert sink.received == b"plain" * 30 + damaged + b"plain" * 30


@pytest.mark.parametrize("is_body_checked", [True, False])
def test_an_unchecked_body_is_opened_only_behind_a_checked_head(wire, is_body_checked):
    raw = bytearray(
        wire.frame(Write("s", 1, "layers.0", 0, 1), [b"body" * 30], is_body_checked=is_body_checked)
    )
    raw[raw.index(b"layers.0")] ^= 1
    sink = Sink()
    reader = reader_of(sink)
    if is_body_checked:
        # The body may be received; nobody acts on the descriptor before the frame is handed out.
        assert deliver(reader, bytes(raw[:-1])) == []
        assert len(sink.bodies) == 1
        raw = raw[-1:]
    with pytest.raises(ChecksumMismatch):
        deliver(reader, bytes(raw))
    assert len(sink.bodies) == is_body_checked


def test_many_frames_in_one_read(wire):
    data = b"".join(wire.frame(Ping(i)) for i in range(1000))
    frames = deliver(reader_of(Sink()), data)
    assert [frame.message.token for frame in frames] == list(range(1000))


def test_the_head_is_the_payload_up_to_the_body(wire):
    raw = wire.frame(Write("s", 1, "layers.0", 0, 1), [b"BODY"])
    (frame,) = deliver(reader_of(Sink()), raw)
    assert raw[32:] == frame.head + b"BODY"


def test_between_frames(wire):
    reader = reader_of(Sink())
    assert reader.is_between_frames
    raw = wire.frame(Ping(1))
    for cut in range(1, len(raw)):
        deliver(reader, raw[cut - 1 : cut])
        assert not reader.is_between_frames
    deliver(reader, raw[-1:])
    assert reader.is_between_frames


def test_the_limit_holds_at_the_header():
    reader = reader_of(Sink(), max_payload_nbytes=100)
    with pytest.raises(PayloadTooLarge):
        deliver(reader, Header(Kind.PING, 1 << 63, 0).encode())


@pytest.mark.parametrize("nbytes", range(5))
def test_a_payload_without_a_descriptor(nbytes):
    with pytest.raises(Malformed, match="no descriptor"):
        deliver(reader_of(Sink()), raw_frame(bytes(nbytes)))


def test_an_empty_descriptor():
    with pytest.raises(Malformed, match="descriptor_nbytes: is 0"):
        deliver(reader_of(Sink()), raw_frame(bytes(4) + bytes(28) + b"body"))


def test_a_descriptor_beyond_the_payload_is_not_allocated():
    sink = Sink()
    with pytest.raises(Malformed, match="descriptor_nbytes"):
        deliver(reader_of(sink), raw_frame(struct.pack("<I", (1 << 32) - 1) + b"\x80"))
    assert not sink.bodies


@pytest.mark.parametrize("body", [b"", b"body"])
def test_a_damaged_payload_yields_no_frame(wire, body):
    raw = bytearray(wire.frame(Write("s", 1, "layers.0", 0, 1), [body]))
    raw[-1] ^= 1
    with pytest.raises((ChecksumMismatch, Malformed)):
        deliver(reader_of(Sink()), bytes(raw))


def test_a_damaged_descriptor_without_a_body_is_a_damaged_payload(wire):
    raw = bytearray(wire.frame(Ping(1)))
    raw[37] ^= 1
    with pytest.raises(ChecksumMismatch):
        deliver(reader_of(Sink()), bytes(raw))


@given(st.binary(max_size=400), st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_random_bytes_raise_remote_faults_only(data, sizes):
    reader = reader_of(Sink())
    try:
        assert deliver(reader, data, sizes) == []
    except RemoteProtocolError:
        assert len(data) >= 32


@given(payload=st.binary(min_size=5, max_size=300), kind=st.sampled_from(Kind))
def test_random_payloads_behind_a_good_header(payload, kind):
    with contextlib.suppress(RemoteProtocolError):
        deliver(reader_of(Sink()), raw_frame(payload, kind))


@pytest.mark.parametrize("is_body_checked", [True, False])
def test_the_middle_of_a_body_in_short_and_in_full_is_the_same(wire, is_body_checked):
    body = bytes(range(256)) * 1024
    message = Write("s", 1, "layers.0", 0, 1)
    raw = wire.frame(message, [body], 0, is_body_checked=is_body_checked)
    sink = Sink()
    reader = reader_of(sink)
    frames, num_short, data = [], 0, memoryview(raw)
    while data:
        buffer = reader.next_buffer()
        nbytes = min(buffer.nbytes, len(data), 40_000)
        buffer[:nbytes] = data[:nbytes]
        data = data[nbytes:]
        if reader.middle_received(nbytes):
            num_short += 1
            assert reader.missing_nbytes == len(data)
        else:
            frames += reader.bytes_received(nbytes)
    assert num_short > 1
    assert [frame.message for frame in frames] == [message]
    assert bytes(sink.bodies[0]) == bytes(sink.received) == body
    assert reader.missing_nbytes == 0


def test_a_large_descriptor_is_no_body():
    sink = Sink()
    reader = reader_of(sink)
    # A map of one key whose value is a bin of 40,000 bytes; cut in the middle of it.
    descriptor = b"\x81\xa1x\xc5" + struct.pack(">H", 40_000) + bytes(40_000)
    raw = raw_frame(struct.pack("<I", len(descriptor)) + descriptor)
    deliver(reader, raw[:36])
    buffer = reader.next_buffer()
    buffer[:100] = raw[36:136]
    assert not reader.middle_received(100)
    assert reader.missing_nbytes == 0
