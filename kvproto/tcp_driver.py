"""Drives a ``Connection`` over an asyncio transport: reading, writing, keepalive, ending.

Everything here runs in callbacks of the event loop; there is no task, so nothing is left behind
by ``abort``. Reading uses ``BufferedProtocol``: the socket writes where ``Connection`` says, for a
WRITE body the landing's own memory.

How a connection ends (each way is idempotent):

    close, fault   what is queued is flushed, FIN is sent, arriving bytes are dropped until the
                   peer's FIN or a deadline. Closing at once would make the kernel answer late
                   bytes with RST, and the peer could lose our last words.
    abort          RST, now.

With TLS (``TlsStream``) the same holds: close_notify goes before FIN, and the end of the stream is
clean only behind the peer's close_notify.
"""

import asyncio
import logging
import secrets
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable
from typing import Final, cast

from kvproto.carrier import Landing
from kvproto.connection import Connection
from kvproto.errors import ConnectionLost, DeadlineExceeded, KvProtoError
from kvproto.events import Ended, Event, HandshakeDone, MessageReceived, WriteRefused
from kvproto.handshake import Identity
from kvproto.intake import DIRECT_MIN_NBYTES
from kvproto.messages import Hello, Message, Ping
from kvproto.state import ConnectionState
from kvproto.tls_stream import TlsStream

logger = logging.getLogger("kvproto.tcp")

# Above: ``send`` waits. A few large WRITE frames keep the socket busy while the next is made.
HIGH_WATER_NBYTES: Final = 16 * 1024 * 1024
LOW_WATER_NBYTES: Final = 4 * 1024 * 1024
# Reading pauses at the first and resumes at the second number of messages. What one read of the
# inbox brought is always accepted, so the queue holds at most this plus one inbox of messages.
MAX_QUEUED_MESSAGES: Final = 64
RESUME_QUEUED_MESSAGES: Final = 32
# A peer that makes us answer but does not read our answers is aborted after this many.
MAX_UNREAD_REPLIES: Final = 1024
SILENT_KEEPALIVES: Final = 3
# While as much of a body is missing, the system wakes us for no fewer bytes: many small reads cost
# more than the bytes. Small enough that a digest still finds them in the processor's cache.
WAKE_NBYTES: Final = 512 * 1024
# Encrypted bytes of one read. All of them are decrypted at once, so this is the size of an inbox.
TLS_READ_NBYTES: Final = 64 * 1024
FAULT_LINGER_S: Final = 1.0
CLOSE_LINGER_S: Final = 5.0
# Linux wakes a reader of ``poll`` by SO_RCVLOWAT, and earlier if its buffer cannot hold as much;
# elsewhere that is not certain. Source: tcp(7), socket(7).
_CAN_WAIT_FOR_MANY: Final = sys.platform == "linux"
# struct linger of this host's kernel: on, for 0 seconds.
_LINGER_NOT: Final = (1).to_bytes(4, sys.byteorder) + bytes(4)


class TcpDriver(asyncio.BufferedProtocol):
    """One connection. Created in the event loop's thread and used there alone.

    Args:
        identity: this side.
        is_server: True for the side that accepted.
        landing: where WRITE bodies go.
        keepalive_s: a PING is sent this often; three times as long in silence aborts.
        tls: context for this side, or None for a plain connection.
        host: what was dialled, for a context that checks host names.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        is_server: bool,
        landing: Landing | None,
        keepalive_s: float,
        tls: ssl.SSLContext | None = None,
        host: str = "",
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._keepalive_s = keepalive_s
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._received_at = self._loop.time()
        self._is_reading_paused = False
        self._wake_nbytes = 1
        self._num_flushing = 0
        self._num_unread_replies = 0
        self._num_pings = 0
        self._is_ending = False
        self._tls = None if tls is None else TlsStream(tls, is_server=is_server, host=host)
        self._encrypted = memoryview(b"" if tls is None else bytearray(TLS_READ_NBYTES))
        self.connection = Connection(
            identity, nonce=secrets.token_bytes(32), is_server=is_server, landing=landing
        )
        self.host = self.address = "?"
        self.remote: Hello | None = None
        self.inbox: deque[Message] = deque()
        self.error: KvProtoError | None = None
        self.num_bytes_received = 0
        # Set when the handshake has succeeded or failed, when ``inbox`` or ``error`` changed,
        # when the write buffer has room again, and when the transport is gone.
        self.handshaken = asyncio.Event()
        self.arrived = asyncio.Event()
        # Called when ``error`` is set, and again when the transport is gone.
        self.on_end: Callable[[], None] | None = None
        self.writable = asyncio.Event()
        self.lost = asyncio.Event()
        self.writable.set()

    # -- asyncio callbacks ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send HELLO at once, or begin the handshake of TLS."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(HIGH_WATER_NBYTES, LOW_WATER_NBYTES)
        connected = transport.get_extra_info("socket")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host, port = transport.get_extra_info("peername")[:2]
        self.address = f"{self.host}:{port}"
        self._received_at = self._loop.time()
        self._schedule_keepalive()
        if self._tls is not None:
            self._begin_tls(self._tls)
        self._write_pending()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes belong."""
        return self.connection.next_buffer() if self._tls is None else self._encrypted

    def buffer_updated(self, nbytes: int) -> None:
        """Hand received bytes to the protocol and act on what it says."""
        self._received_at = self._loop.time()
        self.num_bytes_received += nbytes
        try:
            if self._tls is None:
                if self.connection.middle_received(nbytes):
                    self._choose_wake()
                    return
                events = self.connection.bytes_received(nbytes)
                self._choose_wake()
            else:
                events = self._decrypt(self._tls, nbytes)
        except Exception:
            # A bug in the landing, never the peer. The stream is torn all the same.
            logger.exception("%s: receiving failed", self.address)
            self.abort(ConnectionLost("aborted: receiving failed, see the log"))
            return
        self._handle(events)
        if self._is_ending and self._transport is not None:
            self._end_writing(self._transport)
        if self._write_pending() and not self.writable.is_set():
            self._num_unread_replies += 1
            if self._num_unread_replies > MAX_UNREAD_REPLIES:
                self.abort(ConnectionLost("aborted: the peer does not read our answers"))
                return
        if len(self.inbox) >= MAX_QUEUED_MESSAGES and self.error is None:
            self._pause_reading()

    def eof_received(self) -> None:
        """The peer sends no more; asyncio flushes and closes when this returns None."""
        if self._tls is not None and not self._tls.is_ended_by_peer and self.error is None:
            self.connection.close()
            self._end(_cut_off(self._tls))
        self._handle(self.connection.eof_received())

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone; whatever caused it, nobody writes to our memory any more."""
        self.connection.close()
        self.connection.transport_lost()
        self._end(ConnectionLost(f"connection lost: {exc}" if exc else "connection lost"))
        self._cancel_timers()
        self.lost.set()
        if self.on_end is not None:
            self.on_end()

    def pause_writing(self) -> None:
        """The write buffer is above its high-water mark."""
        self.writable.clear()

    def resume_writing(self) -> None:
        """The write buffer is below its low-water mark."""
        self._num_unread_replies = 0
        self.writable.set()

    # -- used by Peer and Server ---------------------------------------------------------------

    def send(
        self,
        message: Message,
        body: list[memoryview],
        shape_word: int,
        *,
        is_body_checked: bool = True,
    ) -> None:
        """Give a whole frame to the transport. Raises ConnectionLost, LocalProtocolError."""
        self.check_alive()
        self.connection.send(message, body, shape_word=shape_word, is_body_checked=is_body_checked)
        self._write_pending()

    def check_alive(self) -> None:
        """Raise ConnectionLost if the connection has ended for whatever reason."""
        if self.error is not None:
            is_clean = isinstance(self.error, ConnectionLost) and self.error.clean
            raise ConnectionLost(str(self.error), clean=is_clean) from self.error
        if self._transport is not None and self._transport.is_closing():
            # The socket has failed and ``connection_lost`` is scheduled. Until it runs nothing that
            # is sent waits or leaves, so a sender in a loop would never let it run.
            raise ConnectionLost("connection lost: the socket has failed")

    async def wait_writable(self, timeout_s: float) -> None:
        """Until the buffer has room. DeadlineExceeded aborts: a frame cannot be taken back."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.writable.wait()
        except TimeoutError:
            error = DeadlineExceeded(
                f"the peer {self.address} took no bytes for {timeout_s:g} s; it is overloaded"
            )
            self.abort(error)
            raise error from None
        self.check_alive()

    async def wait_flushed(self, timeout_s: float) -> None:
        """Until the transport's write buffer is empty. Errors as ``wait_writable``."""
        self.check_alive()
        transport = self._transport
        if transport is None or not transport.get_write_buffer_size():
            return
        # With both marks at 0 the transport reports exactly the moment the buffer is empty.
        self._num_flushing += 1
        transport.set_write_buffer_limits(0, 0)
        try:
            await self.wait_writable(timeout_s)
        finally:
            self._num_flushing -= 1
            if not self._num_flushing and not self.lost.is_set():
                transport.set_write_buffer_limits(HIGH_WATER_NBYTES, LOW_WATER_NBYTES)

    def take(self) -> Message | None:
        """The next message, or None; reading resumes when the queue is short again."""
        if not self.inbox:
            return None
        message = self.inbox.popleft()
        if self._is_reading_paused and len(self.inbox) <= RESUME_QUEUED_MESSAGES:
            self._resume_reading()
        return message

    def close(self) -> None:
        """Flush, then end; ``lost`` is set within ``CLOSE_LINGER_S``."""
        self.connection.close()
        self._end(ConnectionLost("closed by this side", clean=True))
        if self._tls is None or self._tls.is_established:
            self._linger(CLOSE_LINGER_S)
        elif self._transport is not None:
            self._transport.abort()  # nothing was said yet, so nothing can be lost

    def refuse(self, error: KvProtoError) -> None:
        """Tell the peer why, then end; ``lost`` is set within ``FAULT_LINGER_S``."""
        self.connection.send_error(error)
        self._write_pending()
        self._end(error)
        self._linger(FAULT_LINGER_S)

    def abort(self, error: KvProtoError) -> None:
        """End now."""
        self.connection.close()
        self._end(error)
        self._cancel_timers()
        # A transport that has closed by itself must not be touched again (asyncio fails then).
        if self._transport is not None and not self.lost.is_set():
            self._abort_transport(self._transport)

    def stats(self) -> dict[str, int | bool]:
        """How full the queues are, and what has passed through."""
        is_open = self._transport is not None and not self.lost.is_set()
        return {
            "num_queued_messages": len(self.inbox),
            "is_reading_paused": self._is_reading_paused,
            "write_buffer_nbytes": self._write_buffer_nbytes() if is_open else 0,
            "is_encrypted": self._tls is not None,
            "num_bytes_received": self.num_bytes_received,
            "num_frames_received": self.connection.num_frames_received,
            "num_frames_sent": self.connection.num_frames_sent,
            "num_writes_refused": self.connection.num_writes_refused,
        }

    @staticmethod
    def _abort_transport(transport: asyncio.Transport) -> None:
        """RST instead of FIN: the peer must not take this end for a clean one."""
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.fileno() >= 0:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        transport.abort()

    # -- inside --------------------------------------------------------------------------------

    def _write_buffer_nbytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def _decrypt(self, tls: TlsStream, nbytes: int) -> list[Event]:
        """What the first ``nbytes`` of the encrypted bytes bring."""
        events: list[Event] = []
        if tls.is_ended:
            return events  # lingering: whatever it is, it is dropped
        tls.received(self._encrypted[:nbytes])
        try:
            while count := tls.read_into(self.connection.next_buffer()):
                events += self.connection.bytes_received(count)
        except KvProtoError as exc:
            self._handle(events)  # what was complete before the fault stays valid
            self._fail_tls(tls, exc)
            return []
        if tls.is_ended_by_peer:
            self._handle(events + self.connection.eof_received())
            tls.end()
            self._write_pending()
            self._close_transport()
            return []
        return events

    def _begin_tls(self, tls: TlsStream) -> None:
        try:
            tls.advance()
        except KvProtoError as exc:
            self._fail_tls(tls, exc)

    def _fail_tls(self, tls: TlsStream, error: KvProtoError) -> None:
        """Send the alert, or to a plain peer ERROR, then end as after any fault."""
        if tls.peer_is_plain and self._transport is not None:
            self.connection.data_to_send()  # our HELLO is not for a connection that is plain
            self.connection.send_error(error)
            self._transport.writelines(self.connection.data_to_send())
        self.connection.close()
        self._end(error)
        self._linger(FAULT_LINGER_S)

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, MessageReceived):
                self.inbox.append(event.message)
                self.arrived.set()
            elif isinstance(event, HandshakeDone):
                self.remote = event.remote
                self.handshaken.set()
            elif isinstance(event, WriteRefused):
                # Normal after ABORT for what was on its way; counted in ``stats``.
                logger.debug("%s: WRITE refused: %s", self.address, event.error)
            else:
                self._ended(event)

    def _ended(self, event: Ended) -> None:
        self._write_pending()
        self._end(event.error)
        if self.connection.state is ConnectionState.POISONED:
            self._linger(FAULT_LINGER_S)

    def _end(self, error: KvProtoError) -> None:
        """Note the first reason and wake everybody who waits."""
        is_first = self.error is None
        if is_first:
            self.error = error
        self.handshaken.set()
        self.arrived.set()
        self.writable.set()
        if is_first and self.on_end is not None:
            self.on_end()

    def _write_pending(self) -> bool:
        """Hand queued buffers to the transport; True if there were any."""
        transport, tls = self._transport, self._tls
        if tls is not None and (transport is None or not self._can_encrypt(tls, transport)):
            return False  # what is queued waits for the handshake of TLS
        buffers = self.connection.data_to_send()
        if not buffers or transport is None or transport.is_closing():
            return False
        if tls is None:
            transport.writelines(buffers)
        else:
            for data in tls.encrypt(buffers):
                transport.write(data)
        return True

    @staticmethod
    def _can_encrypt(tls: TlsStream, transport: asyncio.Transport) -> bool:
        """Send what TLS itself has to say; True if frames may follow."""
        if (data := tls.data_to_send()) and not transport.is_closing():
            transport.write(data)
        return tls.is_established and not tls.is_ended

    def _linger(self, timeout_s: float) -> None:
        transport = self._transport
        if transport is None or self.lost.is_set() or self._linger_timer is not None:
            return
        self._cancel_timers()
        self._linger_timer = self._loop.call_later(timeout_s, transport.abort)
        if transport.is_closing():
            return
        self._is_ending = True
        self._set_wake(1)
        self._end_writing(transport)
        # The peer's FIN is seen only while reading.
        self._resume_reading()

    def _end_writing(self, transport: asyncio.Transport) -> None:
        """FIN behind what is queued; with TLS as soon as its handshake lets that leave."""
        if self._tls is not None:
            if not (self._tls.is_established or self._tls.is_ended):
                return
            self._write_pending()
            self._tls.end()
            self._can_encrypt(self._tls, transport)
        self._is_ending = False
        transport.write_eof()

    def _close_transport(self) -> None:
        """The peer has ended: flush, then close; what asyncio does by itself at a plain FIN."""
        if self._transport is not None:
            self._transport.close()

    def _choose_wake(self) -> None:
        """Wait for many bytes where many must come, and never for more than must come."""
        missing_nbytes = self.connection.missing_nbytes
        if missing_nbytes < DIRECT_MIN_NBYTES:
            self._set_wake(1)
        else:
            self._set_wake(min(missing_nbytes, WAKE_NBYTES))

    def _set_wake(self, nbytes: int) -> None:
        """Have the socket count as readable from ``nbytes`` on, or at the end of the stream."""
        if nbytes == self._wake_nbytes or not _CAN_WAIT_FOR_MANY:
            return
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._wake_nbytes = nbytes
        connected = transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _pause_reading(self) -> None:
        if not self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = False
            self._received_at = self._loop.time()
            self._transport.resume_reading()

    def _schedule_keepalive(self) -> None:
        due = self._loop.time() + self._keepalive_s
        self._timer = self._loop.call_at(due, self._keep_alive, due)

    def _keep_alive(self, due: float) -> None:
        now = self._loop.time()
        # Of a slow peer, fewer bytes than we wait for are a sign of life too.
        self._set_wake(1)
        # While this process stalled or reading was paused, the silence was ours.
        self._received_at = now if self._is_reading_paused else self._received_at + (now - due)
        silence_s = now - self._received_at
        if silence_s > SILENT_KEEPALIVES * self._keepalive_s:
            self.abort(
                ConnectionLost(f"aborted: the peer {self.address} was silent for {silence_s:.1f} s")
            )
            return
        if self.connection.state is ConnectionState.READY and self.writable.is_set():
            self._num_pings += 1
            self.connection.send(Ping(self._num_pings))
            self._write_pending()
        self._schedule_keepalive()

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._linger_timer = None


def _cut_off(tls: TlsStream) -> ConnectionLost:
    """The stream of a TLS connection ended without close_notify."""
    if tls.is_established:
        return ConnectionLost("the stream ended without close_notify: the peer died or was cut")
    return ConnectionLost(
        "the peer closed the connection during the handshake of TLS; does it use TLS?"
    )
