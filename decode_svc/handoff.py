"""Getting the KV of one prompt from a prefill worker.

``Fetcher`` walks the ranked prefill workers until one attempt commits. It returns, whatever
happened, only when nobody can write to the blocks any more; so its caller may free them at once.
Proof of that is an ABORT_ACK, which the prefill worker sends behind its last write, or the end of
the connection, after which no byte can arrive.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from decode_svc.errors import FetchCancelled, FetchFailed
from decode_svc.letter_box import Cancelled, LetterBox, Lost
from decode_svc.metrics import DecodeMetrics
from decode_svc.prefill_peers import PrefillPeers
from kvproto.blocks import BlockPool
from kvproto.digest import check_digests, digest_blocks
from kvproto.errors import ErrorCode, KvProtoError
from kvproto.geometry import PoolLayout
from kvproto.lease import LeaseTable
from kvproto.messages import (
    Abort,
    AbortAck,
    Commit,
    CommitAck,
    Error,
    Prefill,
    PrefillWorker,
    Started,
)
from kvproto.tcp import Peer


@dataclass(frozen=True, slots=True)
class Fetched:
    """A finished handoff, for the timings: durations of the prefill worker's and our own clock."""

    worker: str
    carrier: str
    nbytes: int
    prefill_queue_s: float
    prefill_s: float
    total_s: float

    @property
    def exposed_s(self) -> float:
        """What the handoff added to the request beyond queueing and computing."""
        return max(0.0, self.total_s - self.prefill_queue_s - self.prefill_s)


class _AttemptFailed(Exception):
    """One attempt failed; ``is_quiet`` if the prefill worker can certainly not write any more."""

    def __init__(self, code: int, message: str, *, is_quiet: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.is_quiet = is_quiet


# What one prefill worker refuses, every other would refuse as well.
_FINAL_CODES = frozenset({ErrorCode.PROMPT_TOO_LONG, ErrorCode.MALFORMED})


@dataclass(slots=True)
class Handoff:
    """One sequence's wish for KV: what is asked for, and the way to stop asking."""

    sequence_id: str
    tokens: Sequence[int]
    block_table: list[int]  # the sequence's own list, changed in place
    workers: Sequence[PrefillWorker]
    expires_at: float
    box: LetterBox | None = None
    is_cancelled: bool = False

    def cancel(self) -> None:
        """Stop as soon as possible; ``Fetcher.fetch`` then raises FetchCancelled."""
        if not self.is_cancelled:
            self.is_cancelled = True
            if self.box is not None:
                self.box.put(Cancelled())


class Fetcher:
    """Runs handoffs over the shared connections."""

    def __init__(
        self,
        peers: PrefillPeers,
        leases: LeaseTable,
        blocks: BlockPool,
        layout: PoolLayout,
        pool: memoryview,
        metrics: DecodeMetrics,
        *,
        stall_timeout_s: float,
        abort_timeout_s: float,
    ) -> None:
        self._peers = peers
        self._leases = leases
        self._blocks = blocks
        self._layout = layout
        self._pool = pool
        self._metrics = metrics
        self._stall_timeout_s = stall_timeout_s
        self._abort_timeout_s = abort_timeout_s
        self._generation = 0
        self._log = structlog.get_logger("decode.handoff")

    async def fetch(self, handoff: Handoff) -> Fetched:
        """Fill ``handoff.block_table`` with the KV of ``handoff.tokens``.

        Raises FetchCancelled, or FetchFailed after the last worker. Either way nobody writes to
        the blocks any more.
        """
        reasons: list[str] = []
        code: int = ErrorCode.PREFILL_UNAVAILABLE
        for worker in handoff.workers:
            if handoff.is_cancelled:
                raise FetchCancelled
            try:
                peer = await self._peers.get(worker)
                if handoff.is_cancelled:
                    raise FetchCancelled
                return await self._attempt(handoff, peer, worker.instance_id)
            except (KvProtoError, _AttemptFailed) as exc:
                self._metrics.handoff_failures.labels(code=_name(exc.code)).inc()
                self._log.warning(
                    "handoff failed",
                    sequence_id=handoff.sequence_id,
                    worker=worker.instance_id,
                    reason=str(exc),
                )
                reasons.append(f"{worker.instance_id}: {exc}")
                if exc.code in _FINAL_CODES:
                    code = exc.code
                    break
        if handoff.is_cancelled:
            raise FetchCancelled
        text = "; ".join(reasons) or "the router named no prefill worker"
        raise FetchFailed(code, f"no prefill worker delivered the KV ({text})")

    async def _attempt(self, handoff: Handoff, peer: Peer, worker: str) -> Fetched:
        self._generation += 1
        sequence_id, generation = handoff.sequence_id, self._generation
        began_at = time.monotonic()
        self._leases.grant(
            sequence_id, generation, handoff.block_table, len(handoff.tokens), writer=worker
        )
        handoff.box = box = self._peers.open_box(peer, sequence_id, generation)
        is_quiet = False
        code, reason = int(ErrorCode.CANCELLED), "no longer wanted"
        try:
            await peer.send(
                Prefill(
                    sequence_id,
                    generation,
                    tokens=list(handoff.tokens),
                    timeout_s=max(0.0, handoff.expires_at - began_at),
                )
            )
            commit = await self._await_commit(handoff, box, generation)
            await self._verify(handoff, commit)
            self._leases.commit(commit)
            with contextlib.suppress(KvProtoError):
                # Complete here, whether or not the prefill worker hears of it.
                await peer.send(CommitAck(sequence_id, generation))
        except _AttemptFailed as exc:
            is_quiet, code, reason = exc.is_quiet, exc.code, str(exc)
            raise
        except KvProtoError as exc:
            code, reason = exc.code, str(exc)
            raise
        else:
            # COMMIT followed the last write on the same connection.
            is_quiet = True
        finally:
            try:
                self._leases.revoke(generation)
                if not is_quiet:
                    abort = Abort(sequence_id, generation, code=code, message=reason)
                    await self._quiesce(peer, box, abort)
                if not self._leases.quiesced(generation):
                    # A WRITE after ABORT_ACK: that promise is worth nothing, the end is.
                    peer.abort("a WRITE follows its ABORT_ACK")
                    await peer.wait_closed()
                self._take_back(handoff, generation)
            finally:
                handoff.box = None
                self._peers.close_box(peer, sequence_id, generation)
        return Fetched(
            worker=worker,
            carrier="tcp",
            nbytes=commit.nbytes,
            prefill_queue_s=commit.queue_s,
            prefill_s=commit.prefill_s,
            total_s=time.monotonic() - began_at,
        )

    async def _await_commit(self, handoff: Handoff, box: LetterBox, generation: int) -> Commit:
        """Wait for COMMIT; after STARTED, a stretch without a landed byte is a failure."""
        is_started = False
        nbytes_before = 0
        while True:
            left_s = handoff.expires_at - time.monotonic()
            timeout_s = min(left_s, self._stall_timeout_s) if is_started else left_s
            try:
                letter = await box.get(max(0.0, timeout_s))
            except TimeoutError:
                nbytes = self._leases.landed_nbytes(generation)
                if left_s > self._stall_timeout_s and nbytes > nbytes_before:
                    nbytes_before = nbytes
                    continue
                raise _AttemptFailed(
                    ErrorCode.DEADLINE_EXCEEDED,
                    f"no KV arrived for {timeout_s:.1f} s (stall_timeout_s or request timeout)",
                ) from None
            match letter:
                case Started():
                    is_started = True
                case Commit():
                    return letter
                case Abort():
                    raise _AttemptFailed(letter.code, letter.message)
                case Error():
                    raise _AttemptFailed(letter.code, letter.message)
                case Lost():
                    raise _AttemptFailed(ErrorCode.CONNECTION_LOST, letter.reason, is_quiet=True)
                case AbortAck():
                    raise _AttemptFailed(ErrorCode.INTERNAL, "aborted by itself", is_quiet=True)
                case Cancelled():
                    raise FetchCancelled

    async def _verify(self, handoff: Handoff, commit: Commit) -> None:
        """Compare counts, then the bytes in the pool with the digests of the sender."""
        self._leases.check(commit)
        # Hundreds of megabytes for a long prompt: not in the event loop.
        digests = await asyncio.to_thread(
            digest_blocks, self._layout, self._pool, handoff.block_table, commit.num_tokens
        )
        check_digests(
            self._layout.geometry, commit.digests, digests, sequence_id=handoff.sequence_id
        )

    def _take_back(self, handoff: Handoff, generation: int) -> None:
        """Nobody writes any more: the quarantined blocks, if any, belong to the sequence again.

        They pass through the free list; taking as many at once cannot fail.
        """
        num_freed = len(self._leases.release(generation))
        handoff.block_table[:num_freed] = self._blocks.allocate(handoff.sequence_id, num_freed)

    async def _quiesce(self, peer: Peer, box: LetterBox, abort: Abort) -> None:
        """Return when ``peer`` can no longer write to the blocks of this attempt."""
        try:
            async with asyncio.timeout(self._abort_timeout_s):
                await peer.send(abort)
                while not isinstance(await box.get(self._abort_timeout_s), AbortAck | Lost):
                    pass
        except TimeoutError:
            # No promise within the deadline: cut the line, after which no byte can arrive.
            self._metrics.cut_connections.inc()
            peer.abort("no ABORT_ACK within abort_timeout_s")
            await peer.wait_closed()
        except KvProtoError:
            peer.abort("the abort could not be sent")
            await peer.wait_closed()


def _name(code: int) -> str:
    try:
        return ErrorCode(code).name.lower()
    except ValueError:
        return str(code)
