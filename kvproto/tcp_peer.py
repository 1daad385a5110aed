"""A peer on TCP: send and receive messages once the handshake is done."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

from kvproto.buffer import Buffer, byte_view
from kvproto.errors import ConnectionLost, KvProtoError
from kvproto.messages import Hello, Message
from kvproto.tcp_driver import TcpDriver

# A peer that takes no byte for this long is lost: its process hangs or its handler does.
SEND_TIMEOUT_S: Final = 60.0


class Peer:
    """The other side of a connection whose handshake succeeded.

    Not for several threads; several tasks may use it at once.

    Attributes:
        remote: the peer's HELLO.
        name: ``role/instance_id@host:port``, for logs.
    """

    def __init__(self, driver: TcpDriver, remote: Hello) -> None:
        self._driver = driver
        # One frame at a time above the high-water mark, in the order of the calls.
        self._turn = asyncio.Lock()
        self.remote = remote
        self.name = f"{remote.role}/{remote.instance_id}@{driver.address}"

    @property
    def is_closed(self) -> bool:
        """The socket is gone: no byte can arrive any more."""
        return self._driver.lost.is_set()

    async def send(
        self,
        message: Message,
        body: Sequence[Buffer] = (),
        *,
        shape_word: int = 0,
        is_body_checked: bool = True,
        timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        """Send one frame; return when the write buffer is below its high-water mark again.

        Frames of several tasks never interleave. ``body`` is not copied: it must not change until
        ``flushed`` returns. If cancelled while waiting, the frame is either sent whole or not at
        all. Returning says nothing about arrival.

        Raises, in this order: ConnectionLost; LocalProtocolError as ``Connection.send``, with the
        connection still usable; DeadlineExceeded if no room comes within ``timeout_s``, after
        which the connection is aborted; ConnectionLost if it ends meanwhile.
        """
        async with self._turn:
            views = [byte_view(piece) for piece in body]
            self._driver.send(message, views, shape_word, is_body_checked=is_body_checked)
            if not self._driver.writable.is_set():
                await self._driver.wait_writable(timeout_s)

    async def flushed(self, *, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Return when everything sent so far has left this process; bodies may change again.

        Raises ConnectionLost, DeadlineExceeded (the connection is then aborted).
        """
        await self._driver.wait_flushed(timeout_s)

    async def receive(self) -> Message:
        """The next message. Messages received before the end are delivered first.

        ERROR is delivered as a message. Raises ConnectionLost, whose ``__cause__`` is the reason.
        The keepalive bounds the wait for a peer that died; a deadline for an answer is the
        caller's.
        """
        while (message := self._driver.take()) is None:
            self._driver.check_alive()
            self._driver.arrived.clear()
            await self._driver.arrived.wait()
        return message

    def take(self) -> Message | None:
        """The next message that has arrived, or None; does not wait."""
        return self._driver.take()

    @property
    def error(self) -> KvProtoError | None:
        """What ended the connection, or None while it is usable."""
        return self._driver.error

    def report_to(self, arrived: asyncio.Event, on_end: Callable[[], None]) -> None:
        """For ``Link``, which reads several peers: whom to tell of arrivals and of the end.

        ``on_end`` is called when the connection ends and again when its socket is gone; at once
        if either has happened. ``receive`` must not be used from now on.
        """
        self._driver.arrived = arrived
        self._driver.on_end = on_end
        arrived.set()
        if self._driver.error is not None:
            on_end()

    def __aiter__(self) -> AsyncIterator[Message]:
        """Messages until the connection ends cleanly; raises ConnectionLost if it does not."""
        return messages_until_end(self.receive)

    async def close(self) -> None:
        """Flush what was sent, then close; takes at most ``CLOSE_LINGER_S``. Idempotent."""
        self._driver.close()
        await self._driver.lost.wait()

    def abort(self, reason: str) -> None:
        """Close at once, dropping what was not sent yet. Idempotent, leaves no task behind."""
        self._driver.abort(ConnectionLost(f"aborted by this side: {reason}"))

    async def wait_closed(self) -> None:
        """Return when the socket is gone; from then on nobody writes to our memory."""
        await self._driver.lost.wait()

    def stats(self) -> dict[str, int | bool]:
        """How full the queues are, and what has passed through."""
        return self._driver.stats()


async def messages_until_end(receive: Callable[[], Awaitable[Message]]) -> AsyncIterator[Message]:
    """What ``receive`` gives until it ends cleanly; raises ConnectionLost if it does not."""
    while True:
        try:
            message = await receive()
        except ConnectionLost as exc:
            if exc.clean:
                return
            raise
        yield message
