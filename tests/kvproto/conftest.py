"""Two connections in one process, fed by hand; a peer on a bare socket; a landing; a model."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import uvloop
from hypothesis import settings

from kvproto.buffer import Buffer
from kvproto.connection import Connection
from kvproto.errors import LeaseError, Malformed
from kvproto.events import Event, HandshakeDone
from kvproto.frame import encode_frame
from kvproto.geometry import KvGeometry
from kvproto.handshake import Identity, canary_bytes
from kvproto.header import HOST_ORDER, ByteOrder
from kvproto.messages import Message, Placed, Write, encode_fields
from tests.certificates import Authority, TlsFiles

# No deadline for one example: nothing here depends on how fast the machine is.
settings.register_profile("kvproto", deadline=None)
settings.load_profile("kvproto")

# What one scenario may take; the long mode does more of the same in it.
SCENARIO_S = 500 if os.environ.get("PD_LONG_TESTS") == "1" else 40

GEOMETRY = KvGeometry.uniform(2, 2, 4, "float32", ("layers.0", "layers.1"))


class Wire:
    """What a socket between two ``Connection`` objects would do."""

    @staticmethod
    def feed(
        connection: Connection, data: Buffer | Iterable[Buffer], piece_nbytes: int = 1 << 30
    ) -> list[Event]:
        """Deliver bytes, at most ``piece_nbytes`` for each read."""
        view = memoryview(data if isinstance(data, Buffer) else b"".join(data))
        events: list[Event] = []
        while view:
            buffer = connection.next_buffer()
            assert buffer.nbytes > 0
            nbytes = min(buffer.nbytes, view.nbytes, piece_nbytes)
            buffer[:nbytes] = view[:nbytes]
            events += connection.bytes_received(nbytes)
            view = view[nbytes:]
        return events

    @staticmethod
    def frame(
        message: Message,
        body: Iterable[Buffer] = (),
        shape_word: int = 0,
        order=HOST_ORDER,
        is_body_checked: bool = True,
    ) -> bytes:
        """The bytes of one frame."""
        buffers = encode_frame(
            message.kind,
            encode_fields(message, order),
            list(body),
            shape_word=shape_word,
            order=order,
            is_body_checked=is_body_checked,
        )
        return b"".join(buffers)

    @classmethod
    def hello_frame(
        cls, identity: Identity, nonce: bytes = b"h" * 32, order=HOST_ORDER, canary=None
    ) -> bytes:
        """A HELLO as another implementation would send it."""
        return cls.frame(identity.hello(nonce), [canary or canary_bytes(order)], order=order)

    @classmethod
    def exchange(cls, client: Connection, server: Connection) -> tuple[list[Event], list[Event]]:
        """Deliver until both sides have nothing to say."""
        client_events: list[Event] = []
        server_events: list[Event] = []
        while True:
            to_server, to_client = client.data_to_send(), server.data_to_send()
            if not to_server and not to_client:
                return client_events, server_events
            server_events += cls.feed(server, to_server)
            client_events += cls.feed(client, to_client)

    @classmethod
    def connected(
        cls,
        client: Identity,
        server: Identity,
        *,
        client_landing=None,
        server_landing=None,
    ) -> tuple[Connection, Connection]:
        """Two connections after their handshake."""
        left = Connection(client, nonce=b"c" * 32, is_server=False, landing=client_landing)
        right = Connection(server, nonce=b"s" * 32, is_server=True, landing=server_landing)
        left_events, right_events = cls.exchange(left, right)
        assert [type(event) for event in left_events] == [HandshakeDone]
        assert [type(event) for event in right_events] == [HandshakeDone]
        return left, right


class MemoryLanding:
    """A landing in one buffer; refuses the sequence "refused"."""

    def __init__(self, nbytes: int = 1 << 20, pieces: int = 2) -> None:
        self.geometry = GEOMETRY
        self.memory = memoryview(bytearray(nbytes))
        self.pieces = pieces
        self.log: list[tuple[str, Write | Placed]] = []
        # The bytes of ``received``, of all writes, and the order that ``landed`` was told.
        self.arrived = bytearray()
        self.order: ByteOrder | None = None

    def destination(
        self, write: Write, body_nbytes: int, shape_word: int, writer: str
    ) -> list[memoryview]:
        if write.sequence_id == "refused":
            raise LeaseError("no lease", sequence_id=write.sequence_id)
        if shape_word != self.geometry.shape_word(0, write.num_tokens):
            raise Malformed("shape_word", "is not that of the write")
        self.log.append(("destination", write))
        size = -(-body_nbytes // self.pieces)
        return [
            self.memory[start : min(start + size, body_nbytes)]
            for start in range(0, body_nbytes, size)
        ]

    def received(self, write: Write, piece: memoryview) -> None:
        assert self.log[-1] == ("destination", write)
        self.arrived += piece

    def landed(self, write: Write, order: ByteOrder) -> None:
        self.order = order
        self.log.append(("landed", write))

    def abandoned(self, write: Write) -> None:
        self.log.append(("abandoned", write))

    def placed(self, placed: Placed, writer: str) -> None:
        if placed.sequence_id == "refused":
            raise LeaseError("no lease", sequence_id=placed.sequence_id)
        self.log.append(("placed", placed))

    def names(self) -> list[str]:
        return [name for name, _ in self.log]


@pytest.fixture(scope="session")
def wire() -> type[Wire]:
    return Wire


@pytest.fixture(scope="session")
def geometry() -> KvGeometry:
    return GEOMETRY


@pytest.fixture(scope="session")
def memory_landing() -> type[MemoryLanding]:
    return MemoryLanding


@pytest.fixture
def decode() -> Identity:
    return Identity("decode", "d-1", GEOMETRY.facts())


@pytest.fixture
def prefill() -> Identity:
    return Identity("prefill", "p-1", GEOMETRY.facts())


@pytest.fixture(params=list(ByteOrder), ids=lambda order: order.name.lower())
def order(request: pytest.FixtureRequest) -> ByteOrder:
    return request.param


class RawPeer:
    """The other end of a socket, under full control: it reads and writes only when told to."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connection: Connection | None,
    ) -> None:
        self.reader, self.writer, self.connection = reader, writer, connection
        self.early: list[Event] = []

    @classmethod
    async def connect(cls, port: int, identity: Identity | None = None) -> "RawPeer":
        """Dial; with an identity also do the handshake."""
        # A small receive buffer, so that little is read behind our back.
        dialled = socket.socket()
        dialled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        dialled.setblocking(False)
        await asyncio.get_running_loop().sock_connect(dialled, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=dialled, limit=4096)
        if identity is None:
            return cls(reader, writer, None)
        peer = cls(reader, writer, Connection(identity, nonce=b"r" * 32, is_server=False))
        await peer.handshake()
        return peer

    @classmethod
    async def accept(
        cls, identity: Identity, count: int = 1
    ) -> tuple[int, "asyncio.Queue[RawPeer]", asyncio.Server]:
        """Listen; each connection is put into the queue after its handshake."""
        peers: asyncio.Queue[RawPeer] = asyncio.Queue(count)

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = Connection(identity, nonce=b"r" * 32, is_server=True)
            peer = cls(reader, writer, connection)
            await peer.handshake()
            peers.put_nowait(peer)

        server = await asyncio.start_server(accepted, "127.0.0.1", 0, limit=4096)
        return server.sockets[0].getsockname()[1], peers, server

    async def handshake(self) -> None:
        while not any(isinstance(event, HandshakeDone) for event in self.early):
            self.early += await self.receive()

    async def receive(self) -> list[Event]:
        """Send what is due, read once, and say what it was. [] at the end of the stream."""
        assert self.connection is not None
        async with asyncio.timeout(10):
            self.writer.writelines(self.connection.data_to_send())
            await self.writer.drain()
            data = await self.reader.read(4096)
            events = Wire.feed(self.connection, data)
            self.writer.writelines(self.connection.data_to_send())
            return events

    async def receive_until(self, kind: type) -> Message:
        """The next message of this type."""
        while True:
            # What came in one read with the end of the handshake, or with another message.
            while self.early:
                message = getattr(self.early.pop(0), "message", None)
                if isinstance(message, kind):
                    return message
            self.early += await self.receive()
            assert self.early or not self.reader.at_eof(), f"the stream ended before {kind}"

    def send(self, message: Message, body: Iterable[Buffer] = (), shape_word: int = 0) -> None:
        """Queue a frame without any check."""
        self.writer.write(Wire.frame(message, body, shape_word))

    async def write(self, data: bytes) -> None:
        async with asyncio.timeout(10):
            self.writer.write(data)
            await self.writer.drain()

    async def read_all(self) -> bytes:
        """Until the stream ends."""
        async with asyncio.timeout(10):
            return await self.reader.read(-1)

    def kill(self) -> None:
        """RST, as when a process dies with unread bytes."""
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


@pytest.fixture(scope="session")
def raw_peer() -> type[RawPeer]:
    return RawPeer


async def wait_until(predicate: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Until it is true; a failure after the deadline. For states that have no event."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not predicate():
        assert loop.time() < deadline, "the awaited state did not come"
        await asyncio.sleep(0.005)


@pytest.fixture(scope="session")
def until() -> Callable[..., Awaitable[None]]:
    return wait_until


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a scenario on one event loop after the other; no task may be left at its end."""
    factories = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

    async def watched(scenario: Coroutine[Any, Any, None]) -> None:
        async with asyncio.timeout(SCENARIO_S):
            await scenario
        await wait_until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    def run_scenario(scenario: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factories[request.param]) as runner:
            runner.run(watched(scenario))

    return run_scenario


@dataclass(frozen=True)
class Tls:
    """Contexts for both ends, and the files they were made from."""

    client: ssl.SSLContext
    server: ssl.SSLContext
    files: TlsFiles


def tls_contexts(files: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For the dialling and for the accepting end."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.verify_mode = ssl.CERT_REQUIRED
    server.num_tickets = 0
    for context in (client, server):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(files.cert, files.key)
        context.load_verify_locations(files.ca)
    return client, server


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="session")
def tls(authority: Authority) -> Tls:
    files = authority.issue()
    return Tls(*tls_contexts(files), files)


@pytest.fixture(scope="session")
def wrong_tls(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[ssl.SSLContext, ssl.SSLContext]]:
    """Contexts that trust the right CA and whose own certificate nobody accepts."""

    def make(wrong: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        if wrong == "alien":
            files = Authority(tmp_path_factory.mktemp("alien")).issue()
        else:
            files = authority.issue(days=(-9, -5) if wrong == "expired" else (5, 9))
        return tls_contexts(replace(files, ca=authority.ca_file))

    return make
