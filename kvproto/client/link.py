"""One connection of a raw client, and the inboxes of what runs over it.

A reader task takes every message off the connection and puts it where it is awaited. An inbox has
a bound that its owner knows (a WRITE has at least one token, so has a TOKENS), and a peer that
exceeds it is cut off.
"""

import asyncio
import contextlib
import secrets
import ssl
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

from kvproto.carrier import Landing
from kvproto.description import described_geometry
from kvproto.errors import (
    ConnectionLost,
    DeadlineExceeded,
    KvProtoError,
    LocalProtocolError,
    PeerError,
    UnexpectedMessage,
)
from kvproto.geometry import KvGeometry
from kvproto.handshake import Identity
from kvproto.messages import Attached, Describe, Description, Error, Message, Offer
from kvproto.tcp import Peer, connect

CONNECT_TIMEOUT_S: Final = 5.0
# What a worker may say about a transfer beside its WRITEs or TOKENS.
MAX_EXTRA_MESSAGES: Final = 1024


class Inbox:
    """Messages about one sequence, in order, and at last the end of the connection.

    Args:
        max_messages: the peer has at most so many to say.
        accept: called for each message as it arrives; False if it is dealt with and not kept.
    """

    def __init__(self, max_messages: int, accept: Callable[[Message], bool]) -> None:
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._max_messages = max_messages
        self._accept = accept
        self._num_messages = 0
        self._end: KvProtoError | None = None
        self._arrived = asyncio.Event()

    def put(self, message: Message) -> bool:
        """False if that is more than the peer can have to say."""
        self._num_messages += 1
        if self._accept(message):
            self._messages.put_nowait(message)
            self._arrived.set()
        return self._num_messages <= self._max_messages

    def end(self, error: KvProtoError) -> None:
        """No message follows; ``error`` is raised to whoever waits, behind those before."""
        self._end = error
        self._arrived.set()

    async def get(self, timeout_s: float) -> Message:
        """The next message. TimeoutError; the error of ``end`` once all were taken."""
        async with asyncio.timeout(timeout_s):
            while self._messages.empty():
                if self._end is not None:
                    raise self._end
                self._arrived.clear()
                await self._arrived.wait()
        return self._messages.get_nowait()


class Link:
    """A connection to one worker, as an async context manager.

    Args:
        host, port: where the worker listens.
        secret: the shared secret, if the worker has one.
        tls: context for TLS towards the worker.
        landing: where WRITEs go.
        on_stray: called for each message that no inbox awaits.
        on_carrier: called for OFFER and ATTACHED.
        timeout_s: for connecting and the handshake, and for the answer to DESCRIBE.

    Entering raises what ``tcp.connect`` raises.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        secret: bytes | None = None,
        tls: ssl.SSLContext | None = None,
        landing: Landing | None = None,
        on_stray: Callable[[Message], None] = lambda _message: None,
        on_carrier: Callable[[Offer | Attached], None] = lambda _message: None,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self._address = (host, port)
        self._identity = Identity("client", f"client-{secrets.token_hex(8)}", secret=secret)
        self._tls = tls
        self._landing = landing
        self._on_stray = on_stray
        self._on_carrier = on_carrier
        self._timeout_s = timeout_s
        self._inboxes: dict[str, Inbox] = {}
        self._peer: Peer | None = None
        self._reading: asyncio.Task[None] | None = None
        self._error: KvProtoError | None = None
        self._description: Description | None = None
        self._describing = asyncio.Lock()

    def say_carriers(self, *carriers: str) -> None:
        """What HELLO says that this side can use, best first; before entering."""
        self._identity = replace(self._identity, carriers=carriers)

    async def __aenter__(self) -> Self:
        self._peer = await connect(
            *self._address,
            identity=self._identity,
            landing=self._landing,
            timeout_s=self._timeout_s,
            tls=self._tls,
        )
        self._reading = asyncio.create_task(self._read(self._peer), name="kvproto-client")
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._peer is not None:
            await self._peer.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    @property
    def peer(self) -> Peer:
        """The worker. LocalProtocolError outside the context."""
        if self._peer is None:
            raise LocalProtocolError("the client is not connected; use it in `async with`")
        return self._peer

    def open_inbox(
        self,
        sequence_id: str,
        max_messages: int,
        accept: Callable[[Message], bool] = lambda _message: True,
    ) -> Inbox:
        """Collect the messages about a sequence, or with "" those about none; see ``Inbox``."""
        inbox = Inbox(max_messages + MAX_EXTRA_MESSAGES, accept)
        self._inboxes[sequence_id] = inbox
        if self._error is not None:
            inbox.end(self._error)
        return inbox

    def close_inbox(self, sequence_id: str) -> None:
        """From now on such messages are strays."""
        del self._inboxes[sequence_id]

    async def describe(self) -> Description:
        """The worker's model and layout; asked for once.

        Raises PeerError: the worker does not answer this; DeadlineExceeded; ConnectionLost.
        """
        async with self._describing:
            self._description = self._description or await self._ask_description()
        return self._description

    async def geometry(self) -> KvGeometry:
        """The worker's KV. Raises as ``describe``; Malformed("layers") if it makes no sense."""
        description = await self.describe()
        return described_geometry(description.layers, description.dtype)

    async def _ask_description(self) -> Description:
        inbox = self.open_inbox("", 0)
        try:
            await self.peer.send(Describe())
            answer = await inbox.get(self._timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.peer.name} did not answer DESCRIBE within {self._timeout_s:g} s"
            ) from None
        finally:
            self.close_inbox("")
        if isinstance(answer, Error):
            raise peer_error(answer)
        if not isinstance(answer, Description):
            raise UnexpectedMessage(f"{answer.kind.name} instead of DESCRIPTION")
        return answer

    async def _read(self, peer: Peer) -> None:
        error = ConnectionLost(f"{peer.name} closed the connection", clean=True)
        try:
            async for message in peer:
                self._route(peer, message)
        except ConnectionLost as exc:
            error = ConnectionLost(f"the connection to {peer.name} was lost: {exc}")
        self._error = error
        for inbox in self._inboxes.values():
            inbox.end(error)

    def _route(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Offer | Attached):
            self._on_carrier(message)
            return
        inbox = self._inboxes.get(getattr(message, "sequence_id", ""))
        if inbox is None:
            with contextlib.suppress(KvProtoError):
                self._on_stray(message)
        elif not inbox.put(message):
            peer.abort(f"{peer.name} sends more about a sequence than there can be to say")


def peer_error(error: Error) -> PeerError:
    """What the peer said, to be raised."""
    return PeerError(error.code, error.message, error.field, error.sequence_id)
