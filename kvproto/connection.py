"""One connection as the protocol sees it: bytes in, events and bytes out; no socket, no clock.

    driver                                 Connection
    buffer = next_buffer()        <-       where the next bytes belong
    read into buffer; n bytes
    bytes_received(n)             ->       list of events
    data_to_send()                <-       buffers to write, after every call

Every fault of the peer ends in one ``Ended`` event, the last one; nothing is raised for what a
peer does. An ERROR for the peer is queued then, so the driver should still write
``data_to_send``; bytes received from then on are dropped.

The body of a WRITE goes straight into the landing's memory and is announced only once it is
complete and its frame's checks agreed. A WRITE without permission is drained and answered with
ERROR; the connection survives. Source: docs/wire.md sections 5 to 8.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvproto.buffer import Buffer, total_nbytes
from kvproto.carrier import Landing
from kvproto.errors import (
    AuthenticationFailed,
    ConnectionLost,
    ErrorCode,
    HandshakeRefused,
    KvProtoError,
    LeaseError,
    LocalProtocolError,
    Malformed,
    PeerError,
    Truncated,
    UnexpectedMessage,
)
from kvproto.events import Ended, Event, HandshakeDone, MessageReceived, WriteRefused
from kvproto.fields import MAX_U64
from kvproto.frame import encode_frame
from kvproto.handshake import (
    CANARY_NBYTES,
    AuthInput,
    Identity,
    auth_mac,
    canary_bytes,
    check_canary,
    check_hello,
    check_mac,
)
from kvproto.header import HEADER_NBYTES, Header, Kind
from kvproto.messages import (
    SENDERS,
    Auth,
    Error,
    Hello,
    Message,
    Ping,
    Placed,
    Pong,
    Write,
    encode_fields,
)
from kvproto.reader import FrameReader, ReceivedFrame
from kvproto.state import (
    CONNECTION_TRANSITIONS,
    ConnectionEvent,
    ConnectionState,
    InvalidTransition,
    advance,
)
from kvproto.write_receiver import WriteReceiver

# An unauthenticated peer cannot make us hold more than this.
HANDSHAKE_MAX_PAYLOAD_NBYTES: Final = 64 * 1024
_DROP_NBYTES: Final = 16 * 1024
_EVENTS: Final[Mapping[Kind, ConnectionEvent]] = {
    Kind.HELLO: ConnectionEvent.HELLO,
    Kind.AUTH: ConnectionEvent.AUTH,
}


class Connection:
    """Protocol state of one connection. Not thread-safe.

    Args:
        identity: this side.
        nonce: 32 fresh random bytes.
        is_server: True for the side that accepted the connection.
        landing: where WRITE bodies go; without one a WRITE is refused as unexpected.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        nonce: bytes,
        is_server: bool,
        landing: Landing | None = None,
    ) -> None:
        self._identity = identity
        self._state = ConnectionState.AWAITING_HELLO
        self._remote: Hello | None = None
        self._version = 0
        self._outgoing: list[Buffer] = []
        self._pending_pong_token: int | None = None
        self._last_refused: tuple[str, int] | None = None
        self.num_frames_sent = 0
        self.num_frames_received = 0
        self.num_writes_refused = 0
        self._write_receiver = WriteReceiver(landing)
        self._reader = FrameReader(
            self._open_body,
            self._write_receiver.received,
            max_payload_nbytes=HANDSHAKE_MAX_PAYLOAD_NBYTES,
        )
        self._canary = bytearray(CANARY_NBYTES)
        self._dropped = memoryview(bytearray(_DROP_NBYTES))

        frame = self._queue(identity.hello(nonce), [canary_bytes(identity.byte_order)])
        hello_payload = b"".join(frame)[HEADER_NBYTES:]
        self._ours = AuthInput(is_server, identity.role, nonce, hello_payload)
        self._theirs = self._ours  # replaced when their HELLO arrives

    @property
    def state(self) -> ConnectionState:
        """Where the connection stands."""
        return self._state

    # -- receiving -----------------------------------------------------------------------------

    def next_buffer(self) -> memoryview:
        """Where the next received bytes belong; never empty, valid until ``bytes_received``."""
        return self._dropped if self._is_over() else self._reader.next_buffer()

    @property
    def missing_nbytes(self) -> int:
        """Bytes of a body that certainly come before anything else can; 0 if there is no such."""
        return 0 if self._is_over() else self._reader.missing_nbytes

    def middle_received(self, nbytes: int) -> bool:
        """``bytes_received`` in short, for the many reads in the middle of a large body.

        True: there is no event and nothing to send. False: nothing was done, call the other.
        """
        return not self._is_over() and self._reader.middle_received(nbytes)

    def bytes_received(self, nbytes: int) -> list[Event]:
        """Handle the first ``nbytes`` of what ``next_buffer`` returned. Never raises for them."""
        events: list[Event] = []
        if self._is_over():
            return events
        try:
            for frame in self._reader.bytes_received(nbytes):
                self.num_frames_received += 1
                self._frame_received(frame, events)
                if self._is_over():
                    break
        except KvProtoError as exc:
            self.send_error(exc)
            events.append(Ended(exc))
        return events

    def eof_received(self) -> list[Event]:
        """The peer sends no more. Between two frames of a READY connection that is a clean end."""
        if self._is_over():
            return []
        is_ready = self._state is ConnectionState.READY
        self._advance(ConnectionEvent.EOF)
        self.transport_lost()
        if not self._reader.is_between_frames:
            return [Ended(Truncated("the stream ended inside a frame; the peer died or was cut"))]
        if not is_ready:
            return [Ended(ConnectionLost("the peer closed the connection during the handshake"))]
        return [Ended(ConnectionLost("the peer closed the connection", clean=True))]

    def close(self) -> None:
        """End on our side: nothing more is sent, what still arrives is dropped. Idempotent."""
        if not self._is_over():
            self._advance(ConnectionEvent.CLOSE)
            self.transport_lost()

    def transport_lost(self) -> None:
        """No byte can arrive any more: give up a half-received WRITE. Idempotent."""
        self._write_receiver.abandon()

    def _frame_received(self, frame: ReceivedFrame, events: list[Event]) -> None:
        message = frame.message
        if isinstance(message, Error):
            self._error_received(message, events)
        elif isinstance(message, Hello):
            self._hello_received(message, frame)
        elif isinstance(message, Auth):
            self._auth_received(message, events)
        elif isinstance(message, Ping):
            self._pending_pong_token = message.token
        elif isinstance(message, Write):
            self._counted(message, self._write_receiver.complete(frame.header), events)
        elif isinstance(message, Placed) and self._remote is not None:
            refusal = self._write_receiver.placed(message, self._remote.instance_id)
            self._counted(message, refusal, events)
        elif not isinstance(message, Pong):
            events.append(MessageReceived(message))

    def _open_body(
        self, header: Header, message: Message, body_nbytes: int
    ) -> Iterable[memoryview]:
        """Decide about a frame as soon as its descriptor is known; memory for its body."""
        self._check_expected(message)
        if isinstance(message, Write) and self._remote is not None:
            return self._write_receiver.open(header, message, body_nbytes, self._remote.instance_id)
        if header.shape_word:
            raise Malformed("shape_word", f"is set in a {message.kind.name} frame")
        expected_nbytes = CANARY_NBYTES if isinstance(message, Hello) else 0
        if body_nbytes != expected_nbytes:
            raise Malformed(
                "body",
                f"of a {message.kind.name} frame has {body_nbytes} bytes, not {expected_nbytes}",
            )
        return [memoryview(self._canary)[:body_nbytes]]

    def _check_expected(self, message: Message) -> None:
        if isinstance(message, Error):
            return  # allowed in every state: a refusal may come instead of HELLO or AUTH
        event = _EVENTS.get(message.kind, ConnectionEvent.MESSAGE)
        try:
            advance(CONNECTION_TRANSITIONS, self._state, event)
        except InvalidTransition as exc:
            raise UnexpectedMessage(f"unexpected {message.kind.name}: {exc}") from exc
        if self._remote is not None and self._remote.role not in SENDERS[message.kind]:
            raise UnexpectedMessage(f"a {self._remote.role} must not send {message.kind.name}")

    def _error_received(self, error: Error, events: list[Event]) -> None:
        is_ready = self._state is ConnectionState.READY
        if is_ready:
            events.append(MessageReceived(error))
            if error.sequence_id:
                return
        # No ERROR in answer to an ERROR.
        self._poison()
        events.append(Ended(_peer_error(error, is_ready=is_ready)))

    def _counted(
        self, write: Write | Placed, refusal: LeaseError | None, events: list[Event]
    ) -> None:
        if refusal is None:
            events.append(MessageReceived(write))
        else:
            self._refuse(write, refusal)
            events.append(WriteRefused(write, refusal))

    def _refuse(self, write: Write | Placed, refusal: LeaseError) -> None:
        """Tell the sender once per transfer, not once per frame it already had on the way."""
        self.num_writes_refused += 1
        transfer = (write.sequence_id, write.generation)
        if transfer != self._last_refused:
            self._last_refused = transfer
            self._queue(Error(refusal.code, str(refusal), "generation", write.sequence_id))

    def _hello_received(self, hello: Hello, frame: ReceivedFrame) -> None:
        check_canary(self._canary, frame.header.order)
        self._version = check_hello(self._identity, self._ours.nonce, hello)
        self._remote = hello
        self._theirs = AuthInput(
            not self._ours.is_server, hello.role, hello.nonce, frame.head + self._canary
        )
        self._advance(ConnectionEvent.HELLO)
        self._queue(Auth(auth_mac(self._identity.secret, self._ours, self._theirs)))

    def _auth_received(self, auth: Auth, events: list[Event]) -> None:
        expected = auth_mac(self._identity.secret, self._theirs, self._ours)
        check_mac(self._identity.secret, auth.mac, expected)
        self._advance(ConnectionEvent.AUTH)
        self._reader.max_payload_nbytes = self._identity.max_payload_nbytes
        assert self._remote is not None, "the state table lets AUTH follow HELLO only"
        events.append(HandshakeDone(self._remote, self._version))

    # -- sending -------------------------------------------------------------------------------

    def send(
        self,
        message: Message,
        body: Sequence[Buffer] = (),
        *,
        shape_word: int = 0,
        is_body_checked: bool = True,
    ) -> None:
        """Queue a message. ``body`` (WRITE only, in our byte order) is not copied.

        ``is_body_checked`` False leaves the body to the digests of COMMIT.

        LocalProtocolError, in this order: the connection is not READY, our role may not send this
        message, a body or shape word on anything but WRITE, a field breaks its limit, the payload
        is above the peer's ``max_payload_nbytes``. Nothing is queued then.
        """
        name = message.kind.name
        if self._state is not ConnectionState.READY or self._remote is None:
            raise LocalProtocolError(f"cannot send {name}: connection is {self._state.value}")
        if self._identity.role not in SENDERS[message.kind]:
            raise LocalProtocolError(f"cannot send {name}: a {self._identity.role} never does")
        if (body or shape_word) and message.kind is not Kind.WRITE:
            raise LocalProtocolError(f"cannot send {name} with a body: only WRITE has one")
        self._queue(message, body, shape_word, is_body_checked, self._remote.max_payload_nbytes)

    def send_error(self, error: KvProtoError) -> None:
        """Queue an ERROR about the whole connection and end it, in any state. Idempotent."""
        if not self._is_over():
            self._poison()
            self._queue(Error(error.code, str(error), error.field))

    def data_to_send(self) -> list[Buffer]:
        """Buffers to write now, in order; each is returned once."""
        token, self._pending_pong_token = self._pending_pong_token, None
        if token is not None and not self._is_over():
            # One answer per read, however many PINGs it brought: a peer cannot make us buffer.
            self._queue(Pong(token))
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def _queue(
        self,
        message: Message,
        body: Sequence[Buffer] = (),
        shape_word: int = 0,
        is_body_checked: bool = True,
        max_payload_nbytes: int = MAX_U64,
    ) -> list[Buffer]:
        order = self._identity.byte_order
        fields = encode_fields(message, order)
        frame = encode_frame(
            message.kind,
            fields,
            body,
            shape_word=shape_word,
            order=order,
            is_body_checked=is_body_checked,
        )
        payload_nbytes = total_nbytes(frame) - HEADER_NBYTES
        if payload_nbytes > max_payload_nbytes:
            raise LocalProtocolError(
                f"cannot send {message.kind.name}: its payload has {payload_nbytes} bytes, the "
                f"peer accepts {max_payload_nbytes}; send fewer tokens per frame"
            )
        self._outgoing += frame
        self.num_frames_sent += 1
        return frame

    # -- states --------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        state = self._state  # compared by identity: this is asked for every read
        return state is ConnectionState.POISONED or state is ConnectionState.ENDED

    def _advance(self, event: ConnectionEvent) -> None:
        self._state = advance(CONNECTION_TRANSITIONS, self._state, event)

    def _poison(self) -> None:
        self._advance(ConnectionEvent.FAULT)
        self.transport_lost()


def _peer_error(error: Error, *, is_ready: bool) -> KvProtoError:
    """What a connection-level ERROR means here; a refusal of the handshake keeps its type."""
    if not is_ready and error.code == ErrorCode.INCOMPATIBLE:
        return HandshakeRefused(error.field, "", "", f"refused by the peer: {error.message}")
    if not is_ready and error.code == ErrorCode.UNAUTHENTICATED:
        return AuthenticationFailed(f"refused by the peer: {error.message}")
    return PeerError(error.code, error.message, error.field, error.sequence_id)
