"""The writer's side: connect to the owner's pool, write KV into it, announce it on TCP.

A write becomes work requests that gather its buffers straight out of registered memory; what is
not registered is copied into the staging memory first. They are posted many at a time, digested
while the device sends them, and announced by PLACED once the other side's device has acknowledged
them: all of them are counted, on every connection, so the order in which they arrive is of no
importance. Source: docs/wire.md section 6.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from kvproto.digest import RegionDigests
from kvproto.errors import (
    CarrierLost,
    CarrierUnavailable,
    ConnectionLost,
    KvProtoError,
    LeaseError,
    LocalProtocolError,
)
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.header import HOST_ORDER
from kvproto.messages import Attached, Offer, Placed, QueuePairFacts
from kvproto.placement import Piece, PlacedTransfer, Placements
from kvproto.rdma.completion import CompletionQueue
from kvproto.rdma.device import Device
from kvproto.rdma.host import CARRIER, check_byte_order
from kvproto.rdma.memory import RegisteredMemory, Staging, address_of
from kvproto.rdma.ports import choose_gid
from kvproto.rdma.posting import RemoteWrite
from kvproto.rdma.queue_pair import QueuePair, gid_address
from kvproto.tcp_peer import Peer

logger = logging.getLogger("kvproto.rdma")

# One work request; an abort is noticed after as much as is posted.
MAX_WRITE_NBYTES: Final = 1024 * 1024
# Posted and not completed; ``write`` waits above it.
MAX_QUEUED_NBYTES: Final = 64 * 1024 * 1024
STAGING_NBYTES: Final = 8 * 1024 * 1024
# Digesting less takes less time than another thread needs to wake up.
THREAD_MIN_NBYTES: Final = 1024 * 1024


@dataclass(slots=True)
class _Job:
    """A part of a write that is under way."""

    transfer: PlacedTransfer
    placed: Placed
    nbytes: int
    # Of each connection the last request that belongs to it.
    tickets: dict[int, int] = field(default_factory=dict)
    staged_position: int = 0
    is_posted: bool = False


class RdmaWriter:
    """Writes KV into a peer's pool. Implements ``carrier.PlacingWriter``; one for each attachment.

    Made by ``answer_offer``. Every transfer is begun with the block table and keys of its PREFILL,
    and ended.

    Args:
        peer: the connection on which the receiver asked for the KV, and hears of it.
        device: closed by its owner, after ``close``.
        memory: what is registered on this side: the KV pool.
        layout: of the owner's pool.
        base, key: where the pool begins and what opens it, for transfers without keys.
    """

    def __init__(
        self,
        peer: Peer,
        device: Device,
        memory: Sequence[RegisteredMemory],
        layout: PoolLayout,
        num_queue_pairs: int,
        *,
        base: int = 0,
        key: int = 0,
        staging_nbytes: int = STAGING_NBYTES,
    ) -> None:
        self._peer = peer
        self._device = device
        self._memory = tuple(memory)
        self._placements = Placements(layout)
        self._base, self._key = base, key
        self._max_write_nbytes = min(MAX_WRITE_NBYTES, device.max_message_nbytes, staging_nbytes)
        self._turn = asyncio.Lock()
        self._queue: deque[_Job] = deque()
        self._queued_nbytes = 0
        self._num_queued = self._num_done = 0
        self._filled = asyncio.Event()
        self._done = asyncio.Event()
        self._error: KvProtoError | None = None
        self._digester: ThreadPoolExecutor | None = None
        self._completions = CompletionQueue(device, num_queue_pairs * device.max_send_wr)
        self.queue_pairs: list[QueuePair] = []
        self._staging: Staging | None = None
        try:
            for _ in range(num_queue_pairs):
                self.queue_pairs.append(QueuePair(device, self._completions, is_target=False))
            self._staging = Staging(device, staging_nbytes)
        except BaseException:
            self._close_ladder()
            raise
        self._announcing = asyncio.create_task(self._announce(), name="rdma:placed")

    @property
    def error(self) -> KvProtoError | None:
        """Why nothing more can be written, if so."""
        return self._error

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
        """See ``PlacingWriter.begin``. One key for each connection, or none: that of the offer.

        LeaseError first of all if the keys are not as many, or there is none at all.
        """
        num_wanted = 0 if self._key else len(self.queue_pairs)
        if len(keys) not in (num_wanted, len(self.queue_pairs)):
            raise LeaseError(
                f"cannot write sequence {sequence_id}: it has {len(keys)} keys for "
                f"{len(self.queue_pairs)} connections",
                sequence_id=sequence_id,
            )
        self._placements.begin(
            sequence_id, generation, block_table, num_tokens, keys=keys, is_checked=is_checked
        )

    def end(self, sequence_id: str, generation: int) -> None:
        """See ``PlacingWriter.end``."""
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

        Raises, in this order, and nothing is written then: CarrierLost and ConnectionLost, also for
        what earlier writes found; LocalProtocolError: no such transfer, no such layer, not the next
        tokens, or sizes that disagree; CarrierLost. If cancelled, the transfer is ended.
        """
        async with self._turn:
            self._check_alive()
            transfer = self._placements.advance(
                sequence_id, generation, layer, first_token, num_tokens, buffers
            )
            name = self._placements.layout.geometry.layers[layer].name
            try:
                for first, count, pieces in self._placements.parts(
                    transfer, layer, first_token, num_tokens, buffers
                ):
                    placed = Placed(sequence_id, generation, name, first, count)
                    await self._post(transfer, pieces, placed)
                    if digests is not None and not transfer.is_over:
                        await self._digest(layer, pieces, digests)
            except BaseException:
                self.end(sequence_id, generation)
                raise

    async def flush(self) -> None:
        """See ``KvWriter.flush``: every write is acknowledged and announced. Errors of any."""
        num_queued = self._num_queued  # what others queue meanwhile is not waited for
        while self._num_done < num_queued:
            await self._wait_done()
        self._check_alive()
        await self._peer.flushed()

    async def close(self) -> None:
        """End every transfer and the connections: nothing is written or read any more. Idempotent.

        The registered memory stays its owner's.
        """
        self._placements.end_all()
        if self._error is None:
            self._error = ConnectionLost("this side has left the RDMA connection", clean=True)
        self._announcing.cancel()
        await asyncio.wait([self._announcing])
        self._close_ladder()
        self._drop_queue()
        if self._digester is not None:
            self._digester.shutdown()

    def abort(self) -> None:
        """As ``close``, for a writer that has written nothing: does not wait for its task."""
        self._announcing.cancel()
        self._error = ConnectionLost("this side has left the RDMA connection", clean=True)
        self._close_ladder()

    def stats(self) -> dict[str, int]:
        """How much is under way."""
        return {
            "num_queue_pairs": len(self.queue_pairs),
            "num_under_way": sum(pair.num_under_way for pair in self.queue_pairs),
            "queued_nbytes": self._queued_nbytes,
        }

    # -- inside --------------------------------------------------------------------------------

    async def _post(self, transfer: PlacedTransfer, pieces: list[Piece], placed: Placed) -> None:
        """Queue a part and post its work requests."""
        while self._queued_nbytes >= MAX_QUEUED_NBYTES:
            await self._wait_done()
            self._check_alive()
        job = _Job(transfer, placed, sum(piece.source.nbytes for piece in pieces))
        self._queue.append(job)
        self._queued_nbytes += job.nbytes
        self._num_queued += 1
        try:
            batch: list[RemoteWrite] = []
            for piece in pieces:
                offset = piece.offset
                for start in range(0, piece.source.nbytes, self._max_write_nbytes):
                    if transfer.is_over:
                        return
                    source = piece.source[start : start + self._max_write_nbytes]
                    for local in await self._local(job, batch, source):
                        self._gather(batch, offset, local)
                        offset += local[1]
            await self._post_batch(job, batch)
        finally:
            if self._staging is not None:
                job.staged_position = self._staging.position
            job.is_posted = True
            self._filled.set()

    def _gather(self, batch: list[RemoteWrite], offset: int, local: tuple[int, int, int]) -> None:
        """Add a local piece: to the last work request if it goes on there."""
        address = offset
        if batch:
            last = batch[-1]
            last_nbytes = last.nbytes
            if last.remote_address + last_nbytes == address and (
                last_nbytes + local[1] <= self._max_write_nbytes
            ):
                first = last.pieces[0]
                if len(last.pieces) == 1 and (first[0] + first[1], first[2]) == (
                    local[0],
                    local[2],
                ):
                    last.pieces[0] = (first[0], first[1] + local[1], first[2])
                    return
                # rxe's ibv_wr_set_sge_list takes all pieces to be as long as the first one, until
                # after rdma-core 59.
                if local[1] == first[1] and len(last.pieces) < self._device.max_sge:
                    last.pieces.append(local)
                    return
        batch.append(RemoteWrite(address, [local]))

    async def _local(
        self, job: _Job, batch: list[RemoteWrite], source: memoryview
    ) -> list[tuple[int, int, int]]:
        """(address, nbytes, lkey) of registered memory with these bytes, staged if need be."""
        address = address_of(source)
        for memory in self._memory:
            if address and memory.holds(address, source.nbytes):
                return [(address, source.nbytes, memory.lkey)]
        staging = self._staging
        assert staging is not None, "there is no writing after close"
        if staging.free_nbytes < source.nbytes:
            # Nothing of this job may wait for staging memory that this job itself holds.
            await self._post_batch(job, batch)
            batch.clear()
            job.staged_position = staging.position
            await self._free_staging(job, source.nbytes)
        return [(*piece, staging.memory.lkey) for piece in staging.put(source)]

    async def _free_staging(self, job: _Job, nbytes: int) -> None:
        """Wait for jobs, oldest first, until the staging memory has room."""
        staging = self._staging
        assert staging is not None, "there is no writing after close"
        for older in list(self._queue):
            if staging.free_nbytes >= nbytes:
                return
            await self._completed(older)
            staging.release(older.staged_position)
        assert staging.free_nbytes >= nbytes, f"{job.placed} asks for more than there is"

    async def _post_batch(self, job: _Job, batch: list[RemoteWrite]) -> None:
        """Spread work requests over the connections, and post them."""
        pairs, keys = self.queue_pairs, job.transfer.keys
        for index, pair in enumerate(pairs):
            share = batch[index :: len(pairs)]
            if share:
                key = keys[index] if keys else self._key
                if not keys:
                    for write in share:
                        write.remote_address += self._base
                try:
                    await pair.post(share, key)
                finally:
                    # Also of what was posted before it failed: nobody may forget that.
                    job.tickets[index] = pair.last_ticket

    async def _digest(self, layer: int, pieces: list[Piece], digests: RegionDigests) -> None:
        def update() -> None:
            for piece in pieces:
                digests.update(layer, piece.region, piece.source)

        if sum(piece.source.nbytes for piece in pieces) < THREAD_MIN_NBYTES:
            update()
            return
        if self._digester is None:
            self._digester = ThreadPoolExecutor(1, thread_name_prefix="kvproto-digest")
        # Shielded: whoever gives up must not free what a thread still reads.
        running = asyncio.get_running_loop().run_in_executor(self._digester, update)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    async def _completed(self, job: _Job) -> None:
        for index, ticket in job.tickets.items():
            await self.queue_pairs[index].wait(ticket)

    def _has_completed(self, job: _Job) -> bool:
        tickets = job.tickets.items()
        return all(self.queue_pairs[index].has_completed(ticket) for index, ticket in tickets)

    async def _announce(self) -> None:
        """Announce what was acknowledged, in order; runs until ``close``."""
        assert self._staging is not None, "made before the task"
        try:
            while True:
                while not self._queue or not self._queue[0].is_posted:
                    self._filled.clear()
                    await self._filled.wait()
                job = self._queue[0]
                await self._completed(job)
                jobs = self._completed_with(job)
                self._staging.release(jobs[-1].staged_position)
                if not job.transfer.is_over:
                    num_tokens = sum(each.placed.num_tokens for each in jobs)
                    await self._peer.send(replace(job.placed, num_tokens=num_tokens))
                for _ in jobs:
                    self._pop()
        except KvProtoError as exc:
            self._fail(exc)
        finally:
            if self._error is None:
                self._fail(CarrierLost("writing by RDMA failed, see the log"))

    def _completed_with(self, first: _Job) -> list[_Job]:
        """The first job, and those behind it that one PLACED can announce as well.

        Where the network is faster than messages are, this saves most of them.
        """
        jobs = [first]
        nbytes = first.nbytes
        for job in islice(self._queue, 1, None):
            before, placed = jobs[-1].placed, job.placed
            nbytes += job.nbytes
            if (
                job.transfer is not first.transfer
                or placed.layer != before.layer
                or placed.first_token != before.first_token + before.num_tokens
                or nbytes > first.transfer.max_placed_nbytes
                or not job.is_posted
                or not self._has_completed(job)
            ):
                break
            jobs.append(job)
        return jobs

    def _fail(self, error: KvProtoError) -> None:
        """Nothing can be written any more; what was queued is read by nobody."""
        self._error = error
        if isinstance(error, CarrierLost):
            logger.warning("RDMA to %s is lost: %s", self._peer.name, error)
        for pair in self.queue_pairs:
            pair.close()
        self._drop_queue()

    def _drop_queue(self) -> None:
        for job in self._queue:
            job.transfer.is_over = True
        while self._queue:
            self._pop()

    def _pop(self) -> None:
        """The first job is done."""
        self._queued_nbytes -= self._queue.popleft().nbytes
        self._num_done += 1
        self._done.set()

    async def _wait_done(self) -> None:
        """Until another job is done."""
        self._done.clear()
        await self._done.wait()

    def _check_alive(self) -> None:
        error = self._error
        if error is None:
            if self._peer.is_closed:
                raise ConnectionLost("the connection to the owner of the pool is gone")
            return
        if isinstance(error, CarrierLost):
            raise CarrierLost(str(error)) from error
        is_clean = isinstance(error, ConnectionLost) and error.clean
        raise ConnectionLost(str(error), clean=is_clean) from error

    def _close_ladder(self) -> None:
        """From the top: connections, their completions, the memory that they read."""
        for pair in self.queue_pairs:
            pair.close()
        self._completions.close()
        if self._staging is not None:
            self._staging.close()
            self._staging = None


async def answer_offer(
    peer: Peer,
    offer: Offer,
    geometry: KvGeometry,
    device: Device,
    memory: Sequence[RegisteredMemory],
) -> RdmaWriter | None:
    """Answer OFFER by ATTACHED, with the reason if it cannot be done; None then.

    Raises ConnectionLost and DeadlineExceeded of ``Peer.send``; nothing is connected then.
    """
    writer: RdmaWriter | None = None
    try:
        writer, ends = _attach(peer, offer, geometry, device, memory)
    except CarrierUnavailable as exc:
        answer = Attached(offer.carrier, offer.nonce, str(exc))
    else:
        answer = Attached(offer.carrier, offer.nonce, queue_pairs=ends, byte_order=int(HOST_ORDER))
    try:
        await peer.send(answer)
    except BaseException:
        if writer is not None:
            await writer.close()
        raise
    return writer


def _attach(
    peer: Peer,
    offer: Offer,
    geometry: KvGeometry,
    device: Device,
    memory: Sequence[RegisteredMemory],
) -> tuple[RdmaWriter, list[QueuePairFacts]]:
    """The writer, connected, and its ends for the owner. CarrierUnavailable."""
    if offer.carrier != CARRIER:
        raise CarrierUnavailable(f"this side has no carrier {offer.carrier!r}")
    check_byte_order(offer.byte_order, peer.name)
    if not offer.queue_pairs:
        raise CarrierUnavailable("the offer names no end of a connection")
    try:
        layout = PoolLayout(geometry, offer.num_blocks, offer.block_size)
    except LocalProtocolError as exc:
        raise CarrierUnavailable(f"the offered pool makes no sense: {exc}") from exc
    gid = device.chosen.gid
    if device.settings.gid_index < 0:
        gid = choose_gid(device.chosen.port, gid_address(offer.queue_pairs[0].gid))
    writer = RdmaWriter(
        peer,
        device,
        memory,
        layout,
        len(offer.queue_pairs),
        base=offer.base,
        key=offer.key,
    )
    try:
        for queue_pair, remote in zip(writer.queue_pairs, offer.queue_pairs, strict=True):
            queue_pair.connect(remote, gid)
    except BaseException:
        writer.abort()
        raise
    return writer, [pair.facts(gid) for pair in writer.queue_pairs]
