"""A connection fed by hand: handshake, messages, writes, and every kind of bad peer."""

import struct
import tracemalloc
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvproto.connection import HANDSHAKE_MAX_PAYLOAD_NBYTES, Connection
from kvproto.errors import (
    AuthenticationFailed,
    BadMagic,
    ChecksumMismatch,
    ConnectionLost,
    ErrorCode,
    HandshakeRefused,
    KvProtoError,
    LocalProtocolError,
    Malformed,
    Overloaded,
    PayloadTooLarge,
    PeerError,
    RemoteProtocolError,
    Truncated,
    UnexpectedMessage,
)
from kvproto.events import Ended, HandshakeDone, MessageReceived, WriteRefused
from kvproto.frame import encode_frame
from kvproto.handshake import Identity, canary_bytes
from kvproto.header import HOST_ORDER, ByteOrder, Header, Kind
from kvproto.intake import DIRECT_MIN_NBYTES
from kvproto.messages import (
    SENDERS,
    Abort,
    AbortAck,
    Accepted,
    Attached,
    Auth,
    Commit,
    Describe,
    Description,
    Error,
    Heartbeat,
    LayerRecord,
    Offer,
    Ping,
    Placed,
    Pong,
    Prefill,
    Probe,
    RegionRecord,
    Started,
    Write,
)
from kvproto.state import ConnectionState

SECRET = b"0123456789abcdef"
OTHER_ORDER = next(order for order in ByteOrder if order is not HOST_ORDER)
PREFILL = Prefill("s", 1, [1, 2], 0.5)
STARTED = Started("s", 1, 0.5)
COMMIT = Commit("s", 1, 2, 0, [], 0.0, 0.0, 0.0)
WRITE = Write("s", 1, "layers.0", 0, 2)
BODY = array("f", range(32)).tobytes()


def new(identity: Identity, *, is_server: bool = True, landing=None) -> Connection:
    return Connection(identity, nonce=b"n" * 32, is_server=is_server, landing=landing)


def the_end(events) -> KvProtoError:
    """The error of the last event, which must be the only end."""
    assert [event for event in events if isinstance(event, Ended)] == events[-1:]
    return events[-1].error


def error_sent(wire, connection: Connection) -> Error:
    """The ERROR frame that a fault left to be sent, read by another connection."""
    reader = new(Identity("router", "reader"))
    seen = []
    reader._error_received = lambda error, events: seen.append(error)
    wire.feed(reader, connection.data_to_send()[-1])
    (error,) = seen
    return error


@pytest.fixture
def shape(geometry):
    return geometry.shape_word(0, 2)


# -- handshake -------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("client_order", ByteOrder)
@pytest.mark.parametrize("server_order", ByteOrder)
def test_handshake_in_all_byte_orders(wire, secret, client_order, server_order, geometry):
    client = Identity("decode", "d", geometry.facts(), secret=secret, byte_order=client_order)
    server = Identity("prefill", "p", geometry.facts(), secret=secret, byte_order=server_order)
    left, right = wire.connected(client, server)
    assert left.state is right.state is ConnectionState.READY
    left.send(Prefill("s", 1, [1, 2, 1 << 31], 0.5))
    assert wire.exchange(left, right)[1] == [MessageReceived(Prefill("s", 1, [1, 2, 1 << 31], 0.5))]


def test_each_side_learns_the_other(wire, decode, prefill):
    left = new(decode, is_server=False)
    right = Connection(prefill, nonce=b"m" * 32, is_server=True)
    (done,), _ = wire.exchange(left, right)
    assert done == HandshakeDone(prefill.hello(b"m" * 32), 1)


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "dtype", "layout"])
def test_another_model_is_refused_by_both_and_named(wire, decode, prefill, name):
    left = new(decode, is_server=False)
    right = Connection(
        replace(prefill, facts={**prefill.facts, name: "other"}), nonce=b"m" * 32, is_server=True
    )
    left_events, right_events = wire.exchange(left, right)
    for events in (left_events, right_events):
        error = the_end(events)
        assert isinstance(error, HandshakeRefused)
        assert error.field == name


def test_a_refusal_reaches_a_peer_that_did_not_see_it_itself(wire, decode, prefill):
    refusing = new(replace(decode, facts={"dtype": "float16"}))
    wire.feed(refusing, wire.hello_frame(replace(prefill, facts={"dtype": "float32"})))
    peer = new(prefill)
    error = the_end(wire.feed(peer, refusing.data_to_send()[-1]))
    assert isinstance(error, HandshakeRefused)
    assert error.field == "dtype"
    assert "refused by the peer" in str(error)
    # No ERROR in answer to an ERROR.
    assert len(peer.data_to_send()) == 2  # HELLO and its canary


def test_a_peer_that_lies_about_its_byte_order(wire, decode, prefill, order):
    other = next(item for item in ByteOrder if item is not order)
    connection = new(decode)
    events = wire.feed(
        connection, wire.hello_frame(prefill, order=order, canary=canary_bytes(other))
    )
    error = the_end(events)
    assert isinstance(error, HandshakeRefused)
    assert error.field == "byte_order"
    assert error_sent(wire, connection).field == "byte_order"


@pytest.mark.parametrize("canary", [b"", b"x" * 63, b"x" * 65])
def test_a_hello_needs_its_canary(wire, decode, prefill, canary):
    frame = wire.frame(prefill.hello(b"h" * 32), [canary])
    error = the_end(wire.feed(new(decode), frame))
    assert isinstance(error, Malformed)
    assert error.field == "body"


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, b"x" * 16), (SECRET, None), (None, SECRET)])
def test_secrets_that_differ(wire, decode, prefill, ours, theirs):
    left = new(replace(decode, secret=ours), is_server=False)
    right = Connection(replace(prefill, secret=theirs), nonce=b"m" * 32, is_server=True)
    for events in wire.exchange(left, right):
        assert isinstance(the_end(events), AuthenticationFailed)


def test_an_authentication_refusal_reaches_the_peer(wire, decode):
    connection = new(decode)
    error = the_end(wire.feed(connection, wire.frame(Error(ErrorCode.UNAUTHENTICATED, "no"))))
    assert isinstance(error, AuthenticationFailed)


def test_a_mac_sent_back_to_its_maker_is_refused(wire, decode, prefill):
    connection = new(replace(decode, secret=SECRET))
    connection.data_to_send()
    wire.feed(connection, wire.hello_frame(prefill))
    (auth_frame,) = connection.data_to_send()
    assert isinstance(the_end(wire.feed(connection, auth_frame)), AuthenticationFailed)


def test_an_overloaded_peer_says_so_instead_of_hello(wire, decode):
    connection = new(decode, is_server=False)
    error = the_end(wire.feed(connection, wire.frame(Error(ErrorCode.OVERLOADED, "full"))))
    assert isinstance(error, PeerError)
    assert error.code == ErrorCode.OVERLOADED


def test_an_error_about_a_sequence_ends_a_handshake_too(wire, decode):
    connection = new(decode, is_server=False)
    events = wire.feed(connection, wire.frame(Error(ErrorCode.LEASE, "x", "", "seq")))
    assert isinstance(the_end(events), PeerError)


@pytest.mark.parametrize("message", [STARTED, Ping(1), Auth(bytes(32))])
def test_nothing_comes_before_hello(wire, decode, message):
    error = the_end(wire.feed(new(decode), wire.frame(message)))
    assert isinstance(error, UnexpectedMessage)
    assert "awaiting_hello" in str(error)


def test_nothing_but_auth_comes_after_hello(wire, decode, prefill):
    frames = wire.hello_frame(prefill) + wire.frame(STARTED)
    error = the_end(wire.feed(new(decode), frames))
    assert isinstance(error, UnexpectedMessage)


def test_a_second_hello(wire, decode, prefill):
    left, _ = wire.connected(decode, prefill)
    assert isinstance(the_end(wire.feed(left, wire.hello_frame(prefill))), UnexpectedMessage)


def test_an_unauthenticated_peer_cannot_announce_much(wire, decode):
    header = Header(Kind.HELLO, HANDSHAKE_MAX_PAYLOAD_NBYTES + 1, 0).encode()
    assert isinstance(the_end(wire.feed(new(decode), header)), PayloadTooLarge)


# -- messages --------------------------------------------------------------------------------------


def test_messages_of_one_read_arrive_in_order(wire, decode, prefill):
    left, right = wire.connected(decode, prefill)
    messages = [Started("s", generation, 0.0) for generation in range(300)]
    for message in messages:
        right.send(message)
    events = wire.feed(left, right.data_to_send())
    assert [event.message for event in events] == messages
    assert left.num_frames_received == right.num_frames_sent == 302


def test_messages_before_a_fault_are_delivered(wire, decode, prefill):
    left, _ = wire.connected(decode, prefill)
    events = wire.feed(left, wire.frame(STARTED) + b"\0" * 32)
    assert events[0] == MessageReceived(STARTED)
    assert isinstance(the_end(events), BadMagic)


@pytest.mark.parametrize("message", [Accepted("s"), Prefill("s", 1, [1], 1.0)])
def test_a_message_of_the_wrong_role(wire, decode, prefill, message):
    left, _ = wire.connected(decode, prefill)
    assert "prefill" not in SENDERS[message.kind]
    error = the_end(wire.feed(left, wire.frame(message)))
    assert isinstance(error, UnexpectedMessage)
    assert message.kind.name in str(error)


def test_a_ping_is_answered_once_for_each_read(wire, decode, prefill):
    left, right = wire.connected(decode, prefill)
    assert wire.feed(left, b"".join(wire.frame(Ping(i)) for i in range(100))) == []
    (pong,) = left.data_to_send()
    assert pong == wire.frame(Pong(99))
    assert wire.feed(right, pong) == []
    assert left.data_to_send() == []


def test_a_ping_is_not_answered_after_the_end(wire, decode, prefill):
    left, _ = wire.connected(decode, prefill)
    wire.feed(left, wire.frame(Ping(1)) + wire.frame(Accepted("s")))
    assert Kind(left.data_to_send()[-1][6]) is Kind.ERROR


def test_an_error_about_a_sequence_is_a_message(wire, decode, prefill):
    left, _ = wire.connected(decode, prefill)
    error = Error(ErrorCode.LEASE, "stale", "generation", "s")
    assert wire.feed(left, wire.frame(error)) == [MessageReceived(error)]
    assert left.state is ConnectionState.READY


def test_an_error_about_the_connection_is_delivered_and_ends_it(wire, decode, prefill):
    left, _ = wire.connected(decode, prefill)
    error = Error(ErrorCode.INTERNAL, "out of order", "x")
    events = wire.feed(left, wire.frame(error) + wire.frame(STARTED))
    assert events[0] == MessageReceived(error)
    assert isinstance(the_end(events), PeerError)
    assert len(events) == 2
    assert left.state is ConnectionState.POISONED
    assert left.data_to_send() == []


def test_a_body_where_none_belongs(wire, decode, prefill):
    left, _ = wire.connected(decode, prefill)
    error = the_end(wire.feed(left, wire.frame(STARTED, [b"body"])))
    assert isinstance(error, Malformed)
    assert error.field == "body"


def test_a_shape_word_where_none_belongs(wire, decode, prefill):
    left, _ = wire.connected(decode, prefill)
    error = the_end(wire.feed(left, wire.frame(STARTED, shape_word=1)))
    assert isinstance(error, Malformed)
    assert error.field == "shape_word"


@pytest.mark.parametrize("kind", [Kind.KV_FILE, Kind.REGION])
@pytest.mark.parametrize("body", [b"", b"x" * 100])
def test_what_belongs_in_a_file_is_refused(wire, decode, prefill, memory_landing, kind, body):
    landing = memory_landing()
    left, _ = wire.connected(decode, prefill, client_landing=landing)
    frame = encode_frame(kind, {}, [body], order=HOST_ORDER)
    error = the_end(wire.feed(left, frame))
    assert isinstance(error, UnexpectedMessage)
    assert kind.name in str(error)
    assert landing.log == []


def test_a_whole_conversation_of_the_newer_messages(wire, decode, prefill):
    """Both ways, with a client that brings its KV on the connection it asks on."""
    nonce = bytes(32)
    layers = [LayerRecord("a", [RegionRecord("k", 1, 2, "token")])]
    to_prefill = [Describe(), Offer("mapped", nonce), Probe("q", 2, 16, "mapped", [0]), PREFILL]
    to_decode = [
        Description("m", 100, "float32", layers),
        Attached("mapped", nonce),
        Heartbeat("s", 1),
        STARTED,
        COMMIT,
    ]
    left, right = wire.connected(decode, prefill)
    for message in to_prefill:
        left.send(message)
    for message in to_decode:
        right.send(message)
    left_events, right_events = wire.exchange(left, right)
    assert [event.message for event in right_events] == to_prefill
    assert [event.message for event in left_events] == to_decode
    client, server = wire.connected(Identity("client", "c"), decode)
    server.send(PREFILL)
    for message in (STARTED, Heartbeat("s", 1), COMMIT):
        client.send(message)
    client_events, server_events = wire.exchange(client, server)
    assert [event.message for event in client_events] == [PREFILL]
    assert [event.message for event in server_events] == [STARTED, Heartbeat("s", 1), COMMIT]


# -- sending ---------------------------------------------------------------------------------------


def test_nothing_is_sent_before_the_handshake(decode):
    with pytest.raises(LocalProtocolError, match="awaiting_hello"):
        new(decode).send(Abort("s", 1, 9, ""))


def test_a_role_cannot_send_what_is_not_its_own(wire, decode, prefill):
    left, _ = wire.connected(decode, prefill)
    with pytest.raises(LocalProtocolError, match="a decode never does"):
        left.send(STARTED)


@pytest.mark.parametrize(("body", "shape_word"), [([b"x"], 0), ([], 1)])
def test_only_a_write_has_a_body(wire, decode, prefill, body, shape_word):
    _, right = wire.connected(decode, prefill)
    with pytest.raises(LocalProtocolError, match="only WRITE"):
        right.send(STARTED, body, shape_word=shape_word)


def test_only_a_write_leaves_its_body_unchecked(wire, decode, prefill):
    _, right = wire.connected(decode, prefill)
    with pytest.raises(LocalProtocolError, match="STARTED frame whose body is unchecked"):
        right.send(STARTED, is_body_checked=False)
    assert right.data_to_send() == []


def test_a_faulty_message_is_not_queued(wire, decode, prefill):
    _, right = wire.connected(decode, prefill)
    with pytest.raises(LocalProtocolError, match="queue_s"):
        right.send(Started("s", 1, -1.0))
    assert right.data_to_send() == []
    right.send(STARTED)


def test_the_limit_of_the_peer_is_kept(wire, decode, prefill):
    _, right = wire.connected(replace(decode, max_payload_nbytes=1000), prefill)
    with pytest.raises(LocalProtocolError, match="the peer accepts 1000"):
        right.send(WRITE, [bytes(1000)])
    assert right.data_to_send() == []


def test_send_error_ends_in_any_state(wire, decode):
    connection = new(decode)
    connection.send_error(Overloaded("full"))
    connection.send_error(Overloaded("full"))
    assert error_sent(wire, connection).code == ErrorCode.OVERLOADED
    assert connection.state is ConnectionState.POISONED


# -- WRITE -----------------------------------------------------------------------------------------


def test_a_write_lands_before_it_is_announced(wire, decode, prefill, memory_landing, shape):
    landing = memory_landing()
    left, right = wire.connected(decode, prefill, client_landing=landing)
    right.send(WRITE, [BODY[:50], BODY[50:]], shape_word=shape)
    data = b"".join(right.data_to_send())
    assert wire.feed(left, data[:-1]) == []
    assert landing.names() == ["destination"]
    assert wire.feed(left, data[-1:]) == [MessageReceived(WRITE)]
    assert landing.names() == ["destination", "landed"]
    assert landing.memory[: len(BODY)] == BODY


def test_a_large_body_is_received_into_the_landing_itself(
    wire, decode, prefill, memory_landing, geometry
):
    landing = memory_landing(pieces=1)
    left, right = wire.connected(decode, prefill, client_landing=landing)
    num_tokens = 4096
    body = bytes(range(256)) * (geometry.write_nbytes(0, num_tokens) // 256)
    write = Write("s", 1, "layers.0", 0, num_tokens)
    right.send(write, [body], shape_word=geometry.shape_word(0, num_tokens))
    data = b"".join(right.data_to_send())
    head_nbytes = len(data) - len(body)
    assert wire.feed(left, data[:head_nbytes]) == []
    buffer = left.next_buffer()
    assert buffer.obj is landing.memory.obj
    assert buffer.nbytes == len(body) > DIRECT_MIN_NBYTES
    assert wire.feed(left, data[head_nbytes:], 100_000) == [MessageReceived(write)]
    assert landing.memory[: len(body)] == body


@pytest.mark.parametrize("sender_order", ByteOrder)
def test_the_landing_learns_the_order_of_a_body(
    wire, decode, prefill, memory_landing, shape, sender_order
):
    landing = memory_landing()
    sender = replace(prefill, byte_order=sender_order)
    left, right = wire.connected(decode, sender, client_landing=landing)
    right.send(WRITE, [BODY], shape_word=shape)
    assert wire.feed(left, right.data_to_send()) == [MessageReceived(WRITE)]
    assert landing.order is sender_order
    # As they came: swapping is the landing's business, after the digests.
    assert landing.memory[: len(BODY)] == landing.arrived == BODY


def test_a_write_without_a_landing(wire, decode, prefill, shape):
    left, _ = wire.connected(decode, prefill)
    error = the_end(wire.feed(left, wire.frame(WRITE, [BODY], shape)))
    assert isinstance(error, UnexpectedMessage)


def test_a_refused_write_is_drained_and_answered_once(wire, decode, prefill, memory_landing, shape):
    landing = memory_landing()
    left, right = wire.connected(decode, prefill, client_landing=landing)
    refused = replace(WRITE, sequence_id="refused")
    for _ in range(3):
        right.send(refused, [BODY], shape_word=shape)
    right.send(replace(refused, generation=2), [BODY], shape_word=shape)
    right.send(WRITE, [BODY], shape_word=shape)
    events = wire.feed(left, right.data_to_send())
    assert [type(event) for event in events] == [WriteRefused] * 4 + [MessageReceived]
    assert left.num_writes_refused == 4
    answers = wire.feed(right, left.data_to_send())
    assert [(answer.message.code, answer.message.sequence_id) for answer in answers] == [
        (ErrorCode.LEASE, "refused")
    ] * 2
    assert left.state is right.state is ConnectionState.READY


def test_a_damaged_write_poisons_and_is_not_counted(wire, decode, prefill, memory_landing, shape):
    landing = memory_landing()
    left, right = wire.connected(decode, prefill, client_landing=landing)
    right.send(WRITE, [BODY], shape_word=shape)
    data = bytearray(b"".join(right.data_to_send()))
    data[-1] ^= 1
    assert isinstance(the_end(wire.feed(left, data)), ChecksumMismatch)
    assert landing.names() == ["destination", "abandoned"]
    assert error_sent(wire, left).code == ErrorCode.CHECKSUM_MISMATCH


def test_placed_is_a_message_once_it_is_counted(wire, decode, prefill, memory_landing):
    landing = memory_landing()
    left, right = wire.connected(decode, prefill, client_landing=landing)
    placed, refused = (Placed(name, 1, "layers.0", 0, 2) for name in ("s", "refused"))
    for message in (placed, refused, refused):
        right.send(message)
    events = wire.feed(left, right.data_to_send())
    assert events[0] == MessageReceived(placed)
    assert [(type(event), event.write) for event in events[1:]] == [(WriteRefused, refused)] * 2
    assert landing.names() == ["placed"]
    # One answer for a run of refusals.
    (answer,) = wire.feed(right, left.data_to_send())
    assert (answer.message.code, answer.message.sequence_id) == (ErrorCode.LEASE, "refused")


@pytest.mark.parametrize("is_body_checked", [True, False])
def test_a_refusal_is_sent_behind_the_whole_frame(
    wire, decode, prefill, memory_landing, shape, is_body_checked
):
    left, right = wire.connected(decode, prefill, client_landing=memory_landing())
    refused = replace(WRITE, sequence_id="refused")
    right.send(refused, [BODY], shape_word=shape, is_body_checked=is_body_checked)
    data = b"".join(right.data_to_send())
    assert wire.feed(left, data[:-1]) == []
    assert left.data_to_send() == []
    (event,) = wire.feed(left, data[-1:])
    assert isinstance(event, WriteRefused)


def test_a_damaged_descriptor_is_not_answered_as_a_refusal(
    wire, decode, prefill, memory_landing, shape
):
    landing = memory_landing()
    left, _ = wire.connected(decode, prefill, client_landing=landing)
    data = bytearray(wire.frame(replace(WRITE, sequence_id="refusee"), [BODY], shape))
    data[data.index(b"refusee") + 6] ^= ord("e") ^ ord("d")  # now it reads "refused"
    assert isinstance(the_end(wire.feed(left, data)), ChecksumMismatch)
    assert landing.log == []


# -- the end ---------------------------------------------------------------------------------------


def test_a_clean_end(wire, decode, prefill):
    left, _ = wire.connected(decode, prefill)
    error = the_end(left.eof_received())
    assert isinstance(error, ConnectionLost)
    assert error.clean
    assert left.state is ConnectionState.ENDED
    assert left.eof_received() == []


@pytest.mark.parametrize("cut", [1, 31, 32, 35, 36, 60])
def test_an_end_inside_a_frame(wire, decode, prefill, cut):
    left, _ = wire.connected(decode, prefill)
    wire.feed(left, wire.frame(STARTED)[:cut])
    assert isinstance(the_end(left.eof_received()), Truncated)


def test_an_end_inside_a_body_gives_the_write_up(wire, decode, prefill, memory_landing, shape):
    landing = memory_landing()
    left, _ = wire.connected(decode, prefill, client_landing=landing)
    wire.feed(left, wire.frame(WRITE, [BODY], shape)[:-1])
    assert isinstance(the_end(left.eof_received()), Truncated)
    assert landing.names() == ["destination", "abandoned"]


def test_an_end_during_the_handshake(decode):
    error = the_end(new(decode).eof_received())
    assert isinstance(error, ConnectionLost)
    assert not error.clean


def test_a_poisoned_connection_drops_what_still_comes(wire, decode, prefill):
    left, _ = wire.connected(decode, prefill)
    wire.feed(left, b"\0" * 32)
    left.data_to_send()
    assert wire.feed(left, wire.frame(STARTED)) == []
    assert left.eof_received() == []
    assert left.data_to_send() == []
    with pytest.raises(LocalProtocolError, match="poisoned"):
        left.send(AbortAck("s", 1))


def test_close_gives_a_half_received_write_up(wire, decode, prefill, memory_landing, shape):
    landing = memory_landing()
    left, _ = wire.connected(decode, prefill, client_landing=landing)
    frame = wire.frame(WRITE, [BODY], shape)
    wire.feed(left, frame[:-1])
    left.close()
    left.close()
    assert wire.feed(left, frame[-1:]) == []
    assert landing.names() == ["destination", "abandoned"]
    assert left.state is ConnectionState.ENDED


def test_a_fault_of_our_own_landing_ends_the_connection(
    wire, decode, prefill, memory_landing, shape
):
    landing = memory_landing()

    def broken(*_):
        raise LocalProtocolError("a bug here")

    landing.destination = broken
    left, _ = wire.connected(decode, prefill, client_landing=landing)
    assert isinstance(
        the_end(wire.feed(left, wire.frame(WRITE, [BODY], shape))), LocalProtocolError
    )


# -- random bytes ----------------------------------------------------------------------------------


@given(st.binary(max_size=600), st.integers(1, 600), st.booleans())
def test_random_bytes_end_in_a_remote_fault_or_wait_for_more(wire, data, piece_nbytes, is_ready):
    decode, prefill = Identity("decode", "d"), Identity("prefill", "p")
    connection = wire.connected(decode, prefill)[0] if is_ready else new(decode)
    events = wire.feed(connection, data, piece_nbytes)
    if len(data) >= 32:
        assert isinstance(the_end(events), RemoteProtocolError)
    else:
        assert events == []


@given(
    payload=st.binary(max_size=300),
    kind=st.sampled_from(Kind),
    order=st.sampled_from(ByteOrder),
    nbytes=st.sampled_from([None, 0, 3, 1 << 31, 1 << 63, (1 << 64) - 1]),
)
def test_random_payloads_never_raise_nor_allocate(
    wire, memory_landing, payload, kind, order, nbytes
):
    landing = memory_landing(64)
    left, _ = wire.connected(
        Identity("decode", "d", max_payload_nbytes=4096),
        Identity("prefill", "p"),
        client_landing=landing,
    )
    check = xxh3_64_intdigest(payload) & 0xFFFFFFFF
    header = Header(kind, len(payload) if nbytes is None else nbytes, check, 0, order)
    events = wire.feed(left, header.encode() + payload)
    assert all(isinstance(event, Ended) for event in events)
    for event in events:
        assert isinstance(event.error, RemoteProtocolError)
    assert landing.log == []


def test_claims_of_size_are_not_believed(wire, decode, prefill):
    claims = [
        struct.pack("<I", (1 << 32) - 1) + b"\x80",
        struct.pack("<I", 17) + b"\x81\xa1a\xdd\xff\xff\xff\xff" + b"\xc0" * 9,
        struct.pack("<I", 2000) + b"\x81\xa1a" + b"\xdd\x00\x0f\xff\xff" * 400,
    ]
    tracemalloc.start()
    try:
        for payload in claims:
            victim, _ = wire.connected(decode, prefill)
            check = xxh3_64_intdigest(payload) & 0xFFFFFFFF
            header = Header(Kind.PING, len(payload), check, order=ByteOrder.LITTLE)
            error = the_end(wire.feed(victim, header.encode() + payload) or victim.eof_received())
            assert isinstance(error, RemoteProtocolError)
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 4 << 20


@given(st.data())
def test_damaged_conversations_end_without_raising(wire, memory_landing, geometry, data):
    landing = memory_landing()
    left, right = wire.connected(
        Identity("decode", "d"), Identity("prefill", "p"), client_landing=landing
    )
    right.send(STARTED)
    right.send(WRITE, [BODY], shape_word=geometry.shape_word(0, 2))
    right.send(AbortAck("s", 1))
    raw = bytearray(b"".join(right.data_to_send()))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    events = wire.feed(left, raw, data.draw(st.integers(1, 200)))
    events += left.eof_received()
    assert isinstance(the_end(events), KvProtoError)
    assert landing.names().count("destination") == landing.names().count(
        "landed"
    ) + landing.names().count("abandoned")


def test_the_forty_byte_header_is_refused_on_a_connection(wire, decode):
    raw = struct.pack(">IHHQQQQ", 0xDEADBEAF, 1, 2, 3, 4, 5, 6) + b"payload"
    assert isinstance(the_end(wire.feed(new(decode), raw)), RemoteProtocolError)
