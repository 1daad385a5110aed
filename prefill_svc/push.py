"""Sending one decode worker the KV of its prompts, layer by layer, while others are computed.

One ``Pusher`` for each connection: a bounded queue in, one task that empties it in order. Because
the order is kept, COMMIT follows the last write of its prompt and ABORT_ACK promises truly that
no more writes will come.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvproto.errors import (
    CarrierLost,
    ConnectionLost,
    ConversionError,
    DeadlineExceeded,
    ErrorCode,
)
from kvproto.messages import Abort, AbortAck, Commit, Heartbeat, Started
from kvproto.tcp_link import Link
from prefill_svc.job import Job, JobEvent, JobState


@dataclass(frozen=True, slots=True)
class LayerWrite:
    """K and V of ``num_tokens`` tokens of one layer; ``buffers`` are views of the KV pool."""

    job: Job
    layer: int
    first_token: int
    num_tokens: int
    buffers: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """The prompt's first step begins: tell the decode worker, whose deadline starts here."""

    job: Job


@dataclass(frozen=True, slots=True)
class Beat:
    """The prompt still waits for its first step: say so. At most one a prompt is queued."""

    job: Job


@dataclass(frozen=True, slots=True)
class Finish:
    """All layers of all tokens were queued: commit."""

    job: Job


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No more writes of this prompt: say so once the ones before have left."""

    job: Job


Item = LayerWrite | Begin | Beat | Finish | GiveUp


class Pusher:
    """The sending side of one connection to a decode worker.

    Every queued item holds its job's blocks (``Job.hold``) until it was handled, so that no block
    is reused while the connection may still read it.
    """

    def __init__(
        self,
        peer: Link,
        *,
        max_items: int,
        stall_items: int,
        ack_timeout_s: float,
        on_drained: Callable[[], None],
        on_failed: Callable[[Job, ErrorCode, str], None],
    ) -> None:
        self.peer = peer
        self._queue: asyncio.Queue[Item] = asyncio.Queue(max_items)
        self._stall_items = stall_items
        self._ack_timeout_s = ack_timeout_s
        self._on_drained = on_drained
        self._on_failed = on_failed

    @property
    def is_stalled(self) -> bool:
        """True while the decode worker reads more slowly than this worker computes."""
        return self._queue.qsize() > self._stall_items

    def stats(self) -> dict[str, int]:
        """Items that wait, and the bound."""
        return {"num_items": self._queue.qsize(), "max_items": self._queue.maxsize}

    def put_nowait(self, item: Item) -> None:
        """Queue ``item``; asyncio.QueueFull cannot happen while stalled prompts are not run."""
        item.job.hold()
        try:
            self._queue.put_nowait(item)
        except asyncio.QueueFull:
            item.job.drop()
            raise

    async def run(self) -> None:
        """Handle items until the connection is lost or the task is cancelled."""
        while True:
            item = await self._queue.get()
            try:
                await self._handle(item)
            except (ConnectionLost, DeadlineExceeded):
                return  # the handler of this connection sees the end too, and cleans up
            except Exception:
                # Nobody would send for this connection any more: end it, so that all is cleaned up.
                self.peer.abort("sending failed")
                raise
            finally:
                item.job.drop()
                if self._queue.qsize() == self._stall_items:
                    self._on_drained()

    def discard(self) -> None:
        """Drop what is queued; only after the connection has ended."""
        while not self._queue.empty():
            self._queue.get_nowait().job.drop()

    async def _handle(self, item: Item) -> None:
        job = item.job
        if isinstance(item, GiveUp):
            await self._give_up(job)
        elif job.state in (JobState.ABORTED, JobState.DONE):
            return
        elif isinstance(item, LayerWrite):
            await self._write(item)
        elif isinstance(item, Beat):
            job.has_beat_queued = False
            await self.peer.send(Heartbeat(*job.key))
        elif isinstance(item, Begin):
            await self.peer.send(
                Started(*job.key, queue_s=job.started_at - job.arrived_at),
            )
        else:
            await self._commit(job)

    async def _write(self, item: LayerWrite) -> None:
        job = item.job
        if not job.first_write_at:
            job.first_write_at = time.monotonic()
        try:
            await job.transfer.send(item.layer, item.first_token, item.num_tokens, item.buffers)
        except (ConversionError, CarrierLost) as exc:
            self._on_failed(job, ErrorCode(exc.code), str(exc))

    async def _commit(self, job: Job) -> None:
        try:
            await job.transfer.flush()
        except CarrierLost as exc:
            self._on_failed(job, ErrorCode(exc.code), str(exc))
            return
        if job.is_over:
            return  # given up while the writes left; its GiveUp is queued behind
        job.advance(JobEvent.COMMIT_SENT)
        job.expires_at = min(job.expires_at, time.monotonic() + self._ack_timeout_s)
        await self.peer.send(
            Commit(
                *job.key,
                num_tokens=job.num_tokens,
                nbytes=job.transfer.nbytes,
                digests=job.transfer.digests(),
                queue_s=job.started_at - job.arrived_at,
                prefill_s=job.computed_at - job.started_at,
                handoff_s=time.monotonic() - job.first_write_at,
                wire_error=job.transfer.wire_error,
            )
        )

    async def _give_up(self, job: Job) -> None:
        # Only when the connection has let go of the memory may ABORT_ACK promise anything.
        with contextlib.suppress(CarrierLost):  # its end is the best of promises
            await job.transfer.flush()
        await self.peer.flushed()
        if not job.is_cancelled_by_peer:
            await self.peer.send(Abort(*job.key, code=job.give_up_code, message=job.give_up_reason))
        await self.peer.send(AbortAck(*job.key))
