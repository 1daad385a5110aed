"""A TCP proxy that does to a byte stream what networks, middle boxes and dying hosts do.

    peer <-> FaultProxy.port <-> target port

Each direction of each connection is a ``Stream`` with its own table of ``Faults``. Offsets count
the bytes of that direction from the start of the connection, so a fault hits one exact byte; a
table may be replaced while the connection lives, its offsets stay absolute (``num_read_nbytes``
says how far the stream is). Faults at an offset that has passed do nothing.

The proxy holds little: a source that is faster than its target is slowed down by TCP itself.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

_READ_NBYTES: Final = 64 * 1024
# Small, so that a held or slow stream is felt by its sender soon.
_RECEIVE_BUFFER_NBYTES: Final = 64 * 1024
_MAX_QUEUED_PIECES: Final = 4
# struct linger of this host's kernel: on, for 0 seconds. Closing then sends RST.
_LINGER_NOT: Final = (1).to_bytes(4, sys.byteorder) + bytes(4)


@dataclass(frozen=True, slots=True)
class Faults:
    """What happens to the bytes of one direction. The default passes everything on unchanged.

    Args:
        delay_s: every byte arrives this much later; the order is kept.
        nbytes_per_s: at most this many bytes pass each second; 0 for no limit.
        piece_nbytes: gives the most bytes to pass on at once, asked again for each piece.
        hold_at: nothing from this byte on passes until ``Stream.resume``.
        cut_at: bytes before this one pass, then the connection ends for the target.
        is_reset: how ``cut_at`` ends it: RST in both directions, or FIN to the target alone.
        truncate_at: bytes from this one on vanish; the connection stays.
        duplicate: (first byte, number of bytes) that the target gets twice in a row.
        flip_at: one bit of this byte is flipped ...
        flip_bit: ... this one, 0..7.
    """

    delay_s: float = 0.0
    nbytes_per_s: float = 0.0
    piece_nbytes: Callable[[], int] = lambda: _READ_NBYTES
    hold_at: int | None = None
    cut_at: int | None = None
    is_reset: bool = True
    truncate_at: int | None = None
    duplicate: tuple[int, int] | None = None
    flip_at: int | None = None
    flip_bit: int = 0


@dataclass(slots=True)
class _Queued:
    """What the reading half hands to the writing half. ``data`` empty: the stream ends."""

    first_byte: int
    data: bytes
    due_at: float


class _ResetBySource(Exception):
    """The source sent RST: the target shall see RST as well."""


@dataclass(eq=False)
class Stream:
    """One direction of one connection.

    Attributes:
        faults: may be replaced at any time.
        num_read_nbytes: bytes taken from the source so far.
        num_passed_nbytes: bytes given to the target so far.
        held: set when ``faults.hold_at`` has been reached or ``pause`` was called.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    faults: Faults
    num_read_nbytes: int = 0
    num_passed_nbytes: int = 0
    held: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._running = asyncio.Event()
        self._running.set()
        self._queue: asyncio.Queue[_Queued] = asyncio.Queue(_MAX_QUEUED_PIECES)
        self._copied = bytearray()
        self._next_at = 0.0
        self._held_at: int | None = None

    def pause(self) -> None:
        """Pass nothing on until ``resume``."""
        self._running.clear()
        self.held.set()

    def resume(self) -> None:
        """Go on after ``pause`` or ``hold_at``, which then counts as passed."""
        self.held.clear()
        self._running.set()

    async def run(self) -> None:
        """Until the source ends (FIN is passed on). Raises ConnectionError for any other end."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read())
            tasks.create_task(self._write())

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        is_over = False
        while not is_over:
            try:
                data = await self.reader.read(_READ_NBYTES)
            except ConnectionError as exc:
                raise _ResetBySource from exc
            first_byte, self.num_read_nbytes = (
                self.num_read_nbytes,
                self.num_read_nbytes + len(data),
            )
            is_over = not data
            await self._queue.put(_Queued(first_byte, data, loop.time() + self.faults.delay_s))

    async def _write(self) -> None:
        """Pass pieces on; from a cut or a truncation on, drop what the source still sends."""
        is_cut = False
        while (queued := await self._queue.get()).data:
            first_byte, rest = queued.first_byte, queued.data
            await self._until(queued.due_at)
            while rest and not is_cut:
                await self._running.wait()
                piece = rest[: self._next_piece_nbytes(first_byte)]
                if not piece:  # exactly at hold_at
                    self._hold()
                    continue
                await self._pass(self._damaged(first_byte, piece))
                first_byte, rest = first_byte + len(piece), rest[len(piece) :]
                is_cut = self._is_cut(first_byte)
        if not is_cut:
            await self._running.wait()
            self._pass_fin()

    def _next_piece_nbytes(self, first_byte: int) -> int:
        faults = self.faults
        nbytes = max(1, faults.piece_nbytes())
        for offset in (faults.cut_at, faults.hold_at):
            if offset is not None and offset > first_byte:
                nbytes = min(nbytes, offset - first_byte)
        return 0 if first_byte == faults.hold_at != self._held_at else nbytes

    def _hold(self) -> None:
        self._held_at = self.faults.hold_at
        self.pause()

    def _is_cut(self, first_byte: int) -> bool:
        """End the connection if ``first_byte`` is where it shall end."""
        if self.faults.cut_at is None or first_byte < self.faults.cut_at:
            return False
        if self.faults.is_reset:
            raise ConnectionResetError("cut by the fault proxy")
        self._pass_fin()
        return True

    def _pass_fin(self) -> None:
        if not self.writer.transport.is_closing():
            with contextlib.suppress(OSError):
                self.writer.write_eof()

    def _damaged(self, first_byte: int, piece: bytes) -> bytes:
        """The piece as the target gets it."""
        faults, end = self.faults, first_byte + len(piece)
        damaged = bytearray(piece)
        if faults.flip_at is not None and first_byte <= faults.flip_at < end:
            damaged[faults.flip_at - first_byte] ^= 1 << faults.flip_bit
        if faults.truncate_at is not None and faults.truncate_at < end:
            del damaged[max(0, faults.truncate_at - first_byte) :]
        if faults.duplicate is not None:
            start, nbytes = faults.duplicate
            stop = start + nbytes
            self._copied += damaged[max(0, start - first_byte) : max(0, stop - first_byte)]
            if first_byte < stop <= end:
                damaged[stop - first_byte : stop - first_byte] = self._copied
        return bytes(damaged)

    async def _pass(self, data: bytes) -> None:
        if not data:
            return
        if self.faults.nbytes_per_s:
            now = asyncio.get_running_loop().time()
            self._next_at = max(now, self._next_at) + len(data) / self.faults.nbytes_per_s
            await self._until(self._next_at)
        if self.writer.transport.is_closing():
            raise ConnectionResetError("the target is gone")
        self.writer.write(data)
        self.num_passed_nbytes += len(data)
        await self.writer.drain()

    @staticmethod
    async def _until(due_at: float) -> None:
        wait_s = due_at - asyncio.get_running_loop().time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)


@dataclass(eq=False)
class Link:
    """One connection through the proxy."""

    to_target: Stream
    to_source: Stream

    async def run(self) -> None:
        """Until both directions have ended; whatever ends one badly resets both."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.to_target.run())
                tasks.create_task(self.to_source.run())
        except ExceptionGroup as failures:
            self.reset()
            if failures.split((ConnectionError, _ResetBySource))[1] is not None:
                raise
        finally:
            # What was passed on is flushed first: both directions ended by FIN, or were reset.
            for stream in (self.to_target, self.to_source):
                stream.writer.close()
            for stream in (self.to_target, self.to_source):
                with contextlib.suppress(OSError):
                    await stream.writer.wait_closed()

    def pause(self) -> None:
        """Nothing passes in either direction: a partition."""
        self.to_target.pause()
        self.to_source.pause()

    def resume(self) -> None:
        """The partition is over."""
        self.to_target.resume()
        self.to_source.resume()

    def reset(self) -> None:
        """RST to both sides, now."""
        for stream in (self.to_target, self.to_source):
            transport = stream.writer.transport
            connected = transport.get_extra_info("socket")
            if connected is not None and connected.fileno() >= 0:
                with contextlib.suppress(OSError):
                    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
            transport.abort()


class FaultProxy:
    """Listens on ``port`` of 127.0.0.1 and passes every connection on to a port of this host.

    An async context manager; its end resets what is still connected and leaves no task behind.

    Args:
        target_port: where to connect for each accepted connection.
        target_host: the same; a loopback address.
        to_target: faults of the direction from the dialling side, for new connections.
        to_source: faults of the direction back to it, for new connections.
    """

    def __init__(
        self,
        target_port: int,
        *,
        target_host: str = "127.0.0.1",
        to_target: Faults | None = None,
        to_source: Faults | None = None,
    ) -> None:
        self.target_port = target_port
        self.target_host = target_host
        self.to_target = to_target or Faults()
        self.to_source = to_source or Faults()
        self.port = 0
        self._links: asyncio.Queue[Link] = asyncio.Queue()
        self._tasks: dict[asyncio.Task[None], Link | None] = {}
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "FaultProxy":
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_NBYTES)
        listening.bind(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._accepted, sock=listening)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task, link in self._tasks.items():
            if link is not None:
                link.reset()
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        await self._server.wait_closed()

    async def next_link(self) -> Link:
        """The next connection that was made through the proxy, in order."""
        return await self._links.get()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection(self.target_host, self.target_port)
        except OSError:
            writer.transport.abort()
            return
        link = Link(
            Stream(reader, there[1], self.to_target), Stream(there[0], writer, self.to_source)
        )
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = link
        self._links.put_nowait(link)
        await link.run()
