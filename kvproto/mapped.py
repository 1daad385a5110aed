"""The mapped-memory carrier, at the writer: attach to the receiver's region, copy KV into it.

Same host only, and never by a guess: ``attach`` looks into its own directory for a socket with the
name of the receiver that authenticated on TCP, and what it gets there is the receiver's memory
itself (see ``mapped_host``). Anything that does not fit ends in one sentence, which ATTACHED
carries, and the pair uses TCP.

A write is one copy into the pool, then PLACED on TCP. The receiver cannot refuse bytes that are
in its memory already, so the rules that ``lease.LeaseTable`` keeps are kept here before a byte is
written: a transfer that was asked for, its own blocks, tokens in order. Source: docs/wire.md
section 6.
"""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvproto.digest import RegionDigests
from kvproto.errors import (
    CarrierUnavailable,
    ConnectionLost,
    KvProtoError,
)
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.messages import NONCE_NBYTES, Attached, Offer, Placed
from kvproto.placement import Piece, PlacedTransfer, Placements
from kvproto.region import (
    ATTACH_TIMEOUT_S,
    CARRIER,
    SLOT_INDEX,
    ForeignRegion,
    unavailable_reason,
)
from kvproto.socket_directory import SocketDirectory, peer_uid, socket_name
from kvproto.tcp_peer import Peer

# An abort is noticed after as much. Large enough that memcpy writes past the cache where glibc's
# threshold for that is that of a third-level cache (2.38 and later) or was set to less.
PIECE_NBYTES: Final = 8 * 1024 * 1024
# Digested, and then copied out of the cache.
CHECKED_PIECE_NBYTES: Final = 2 * 1024 * 1024
# ``write`` waits while as much as this is queued.
MAX_QUEUED_NBYTES: Final = 32 * 1024 * 1024
# Below this the copy takes less time than another thread needs to wake up.
THREAD_MIN_NBYTES: Final = 1024 * 1024


class MappedAttachment:
    """A region that this writer has mapped, and the Unix connection that says so.

    Attributes:
        region: the receiver's memory.
    """

    def __init__(self, region: ForeignRegion, connection: socket.socket) -> None:
        self.region = region
        self._connection = connection

    def close(self) -> None:
        """Unmap, then tell the owner. Idempotent. BufferError while a copy is under way."""
        self.region.close()
        self._connection.close()


async def attach(
    owner: str,
    nonce: bytes,
    geometry: KvGeometry,
    *,
    directory: Path | None = None,
    timeout_s: float = ATTACH_TIMEOUT_S,
) -> MappedAttachment:
    """Map the region of ``owner``, whose OFFER had ``nonce``, and write the proof into it.

    ``owner`` is the instance id that the owner authenticated with, ``directory`` this side's own
    setting (None: the default one); nothing else of the peer is believed.

    CarrierUnavailable, in this order: no such system; the id cannot name a socket; the directory
    is not private or not there; nobody listens there (another host, another container, or the
    owner has another directory); another user; the nonce is refused; what
    ``ForeignRegion.map`` raises; ``timeout_s`` has passed.
    """
    reason = unavailable_reason()
    if reason:
        raise CarrierUnavailable(reason)
    name = socket_name(owner)
    opened = SocketDirectory.open(directory, is_owner=False)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    region: ForeignRegion | None = None
    try:
        connection.setblocking(False)
        async with asyncio.timeout(timeout_s):
            descriptor, slot_index = await _receive_region(connection, opened, name, nonce)
            try:
                region = ForeignRegion.map(descriptor, geometry, owner)
            finally:
                os.close(descriptor)
            region.write_slot(slot_index, nonce)
    except BaseException as exc:
        if region is not None:
            region.close()
        connection.close()
        if isinstance(exc, TimeoutError):
            raise CarrierUnavailable(
                f"the owner of {name} did not pass its memory within {timeout_s:g} s"
            ) from None
        raise
    finally:
        opened.close()
    return MappedAttachment(region, connection)


async def answer_offer(
    peer: Peer,
    offer: Offer,
    geometry: KvGeometry,
    *,
    directory: Path | None = None,
    timeout_s: float = ATTACH_TIMEOUT_S,
) -> MappedAttachment | None:
    """Answer OFFER by ATTACHED, with the reason if it cannot be done; None then.

    Raises ConnectionLost and DeadlineExceeded of ``Peer.send``; nothing is mapped then.
    """
    reason, attachment = "", None
    if offer.carrier != CARRIER:
        reason = f"this side has no carrier {offer.carrier!r}"
    else:
        owner = peer.remote.instance_id
        try:
            attachment = await attach(
                owner, offer.nonce, geometry, directory=directory, timeout_s=timeout_s
            )
        except CarrierUnavailable as exc:
            reason = str(exc)
    try:
        await peer.send(Attached(offer.carrier, offer.nonce, reason))
    except BaseException:
        if attachment is not None:
            attachment.close()
        raise
    return attachment


@dataclass(frozen=True, slots=True)
class _Job:
    """A part of a write that is being copied."""

    transfer: PlacedTransfer
    placed: Placed
    nbytes: int
    copying: asyncio.Future[None]


class MappedWriter:
    """Writes KV into a receiver's region. Implements ``KvWriter``; one for each attachment.

    Every transfer is begun with the block table of its PREFILL, and ended. Small writes are copied
    at once. Larger ones are queued for a thread, which then never waits for the event loop, and
    PLACED is sent as each is done.

    Args:
        peer: the connection on which the receiver asked for the KV, and hears of it.
        attachment: to its region; ``close`` ends it.
        thread_min_nbytes: copies of at least this size are made in a thread of their own.
    """

    def __init__(
        self,
        peer: Peer,
        attachment: MappedAttachment,
        *,
        thread_min_nbytes: int = THREAD_MIN_NBYTES,
    ) -> None:
        self._peer = peer
        self._attachment = attachment
        self._region = attachment.region
        self._layout: PoolLayout = attachment.region.layout
        self._thread_min_nbytes = thread_min_nbytes
        self._placements = Placements(attachment.region.layout)
        self._turn = asyncio.Lock()
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="kvproto-copy")
        self._queue: deque[_Job] = deque()
        self._queued_nbytes = 0
        self._num_queued = self._num_done = 0
        # Set when a job was queued, and when one is done.
        self._filled = asyncio.Event()
        self._done = asyncio.Event()
        self._error: KvProtoError | None = None
        self._sending = asyncio.create_task(self._send_placed(), name="mapped:placed")

    def begin(
        self,
        sequence_id: str,
        generation: int,
        block_table: Sequence[int],
        num_tokens: int,
        *,
        keys: Sequence[int] = (),
        is_checked: bool = True,
    ) -> None:
        """See ``PlacingWriter.begin``. A mapped region has no ``keys``."""
        self._placements.begin(
            sequence_id, generation, block_table, num_tokens, keys=keys, is_checked=is_checked
        )

    def end(self, sequence_id: str, generation: int) -> None:
        """The transfer was committed or aborted: nothing more of it is written. Idempotent.

        A copy that is under way stops within PIECE_NBYTES; once ``flush`` has returned it has.
        """
        self._placements.end(sequence_id, generation)

    async def write(
        self,
        sequence_id: str,
        generation: int,
        layer: int,
        first_token: int,
        num_tokens: int,
        buffers: Sequence[memoryview],
        digests: RegionDigests | None = None,
    ) -> None:
        """See ``KvWriter.write``. The bytes are in place, or dropped by ``end``, after ``flush``.

        ``digests``, if given, has taken the bytes after ``flush``.

        Raises, in this order, and nothing is written then: ConnectionLost, also for what earlier
        writes found; LocalProtocolError: no such transfer, no such layer, not the next tokens, or
        sizes that disagree; what ``Peer.send`` raises. If cancelled, the transfer is ended.
        """
        async with self._turn:
            self._check_alive()
            transfer = self._placements.advance(
                sequence_id, generation, layer, first_token, num_tokens, buffers
            )
            name = self._layout.geometry.layers[layer].name
            try:
                for first, count, pieces in self._placements.parts(
                    transfer, layer, first_token, num_tokens, buffers
                ):
                    placed = Placed(sequence_id, generation, name, first, count)
                    await self._put_or_queue(transfer, layer, pieces, digests, placed)
            except BaseException:
                self.end(sequence_id, generation)
                raise

    async def flush(self) -> None:
        """See ``KvWriter.flush``: every copy is made, digested and announced. Errors of any."""
        num_queued = self._num_queued  # what others queue meanwhile is not waited for
        while self._num_done < num_queued:
            await self._wait_done()
        self._check_alive()
        await self._peer.flushed()

    async def close(self) -> None:
        """End every transfer, unmap the region, tell the owner. Idempotent.

        Takes as long as a copy of PIECE_NBYTES.
        """
        self._placements.end_all()
        if self._error is None:
            self._error = ConnectionLost(
                "this side has detached from the mapped memory", clean=True
            )
        self._sending.cancel()
        await asyncio.wait([self._sending])
        # What is queued sees that its transfer is over.
        while self._queue:
            await self._wait_done()
        self._copier.shutdown()
        self._attachment.close()

    # -- inside --------------------------------------------------------------------------------

    async def _put_or_queue(
        self,
        transfer: PlacedTransfer,
        layer: int,
        pieces: list[Piece],
        digests: RegionDigests | None,
        placed: Placed,
    ) -> None:
        nbytes = sum(piece.source.nbytes for piece in pieces)
        if not self._queue and nbytes < self._thread_min_nbytes:
            self._put(transfer, layer, pieces, digests)
            # The copy is ordered before this send, and the receiver's read before its look.
            await self._peer.send(placed)
            return
        while self._queued_nbytes >= MAX_QUEUED_NBYTES:
            await self._wait_done()
            self._check_alive()
        loop = asyncio.get_running_loop()
        copying = loop.run_in_executor(self._copier, self._put, transfer, layer, pieces, digests)
        self._queue.append(_Job(transfer, placed, nbytes, copying))
        self._queued_nbytes += nbytes
        self._num_queued += 1
        self._filled.set()

    async def _send_placed(self) -> None:
        """Announce what was copied, in order; runs until ``close``."""
        try:
            while True:
                while not self._queue:
                    self._filled.clear()
                    await self._filled.wait()
                job = self._queue[0]
                await asyncio.shield(job.copying)
                if not job.transfer.is_over:
                    # The copy is ordered before this send, and the receiver's read before its look.
                    await self._peer.send(job.placed)
                self._pop()
        except KvProtoError as exc:
            self._error = exc
        finally:
            if self._error is None:
                self._error = ConnectionLost("writing to mapped memory failed, see the log")
            # Nobody announces them any more: their copies are of no use.
            for job in self._queue:
                job.transfer.is_over = True

    def _pop(self) -> None:
        """The first job is done."""
        self._queued_nbytes -= self._queue.popleft().nbytes
        self._num_done += 1
        self._done.set()

    async def _wait_done(self) -> None:
        """Until another job is done, or none is announced any more and the first is copied."""
        if self._sending.done():
            job = self._queue[0]
            await asyncio.wait([job.copying])
            if self._queue and self._queue[0] is job:  # several may wait
                self._pop()
            return
        self._done.clear()
        done = asyncio.ensure_future(self._done.wait())
        try:
            await asyncio.wait({done, self._sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            done.cancel()

    def _check_alive(self) -> None:
        if self._error is not None:
            is_clean = isinstance(self._error, ConnectionLost) and self._error.clean
            raise ConnectionLost(str(self._error), clean=is_clean) from self._error
        if self._peer.is_closed:
            raise ConnectionLost("the connection to the owner of the mapped memory is gone")

    def _put(
        self,
        transfer: PlacedTransfer,
        layer: int,
        pieces: list[Piece],
        digests: RegionDigests | None,
    ) -> None:
        """Digest and copy; in either thread, but one part after the other."""
        put = self._region.put
        step = PIECE_NBYTES if digests is None else CHECKED_PIECE_NBYTES
        for whole in pieces:
            offset, source = whole.offset, whole.source
            for start in range(0, source.nbytes, step):
                if transfer.is_over:
                    return
                piece = source[start : start + step]
                if digests is not None:
                    digests.update(layer, whole.region, piece)
                put(offset + start, piece)


async def _receive_region(
    connection: socket.socket, directory: SocketDirectory, name: str, nonce: bytes
) -> tuple[int, int]:
    """(descriptor, probe slot) from the owner that listens as ``name``; the caller closes it."""
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(connection, directory.address(name))
    except OSError as exc:
        raise CarrierUnavailable(
            f"no owner listens as {name} in {directory.path} ({exc.strerror or exc}): it is on "
            "another host or in another container, or has another directory"
        ) from exc
    if (uid := peer_uid(connection)) != os.geteuid():
        raise CarrierUnavailable(f"the owner of {name} runs as uid {uid}, not as {os.geteuid()}")
    try:
        await loop.sock_sendall(connection, nonce[:NONCE_NBYTES])
        await _wait_readable(loop, connection)
        raw, descriptors, flags, _ = socket.recv_fds(
            connection, SLOT_INDEX.size, 1, socket.MSG_CMSG_CLOEXEC
        )
    except OSError as exc:
        raise CarrierUnavailable(f"the owner of {name} cut the connection: {exc}") from exc
    if len(raw) != SLOT_INDEX.size or len(descriptors) != 1 or flags & socket.MSG_CTRUNC:
        for descriptor in descriptors:
            os.close(descriptor)
        raise CarrierUnavailable(
            f"the owner of {name} did not pass its memory: it made no such offer, or it is over"
        )
    (slot_index,) = SLOT_INDEX.unpack(raw)
    return descriptors[0], slot_index


async def _wait_readable(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
    readable = loop.create_future()
    loop.add_reader(connection, _set_once, readable)
    try:
        await readable
    finally:
        loop.remove_reader(connection)


def _set_once(future: asyncio.Future[None]) -> None:
    with suppress(asyncio.InvalidStateError):
        future.set_result(None)
