"""Getting the KV of one prompt from a prefill worker.

``Fetcher`` walks the ranked prefill workers until one attempt commits; a client that brings its KV
itself is the only writer of its sequence. It returns, whatever
happened, only when nobody can write to the blocks any more; so its caller may free them at once.
Proof of that is an ABORT_ACK, which the prefill worker sends behind its last write, or the end of
the connection, after which no byte can arrive.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from decode_svc.errors import FetchCancelled, FetchFailed
from decode_svc.letter_box import Cancelled, LetterBox, LetterBoxes, Lost
from decode_svc.metrics import DecodeMetrics
from decode_svc.prefill_peers import PrefillLink, PrefillPeers
from decode_svc.quarantine import Quarantine
from decode_svc.sender_paths import SenderPaths
from kvproto.blocks import BlockPool
from kvproto.errors import ErrorCode, KvProtoError
from kvproto.lease import LeaseTable, Part
from kvproto.messages import (
    Abort,
    AbortAck,
    Commit,
    CommitAck,
    Error,
    Heartbeat,
    Hello,
    Prefill,
    PrefillWorker,
    Started,
)
from kvproto.tcp_link import Link


@dataclass(frozen=True, slots=True)
class Fetched:
    """A finished handoff, for the timings: durations of the writer's and our own clock."""

    writer: str
    carrier: str
    nbytes: int
    prefill_queue_s: float
    prefill_s: float
    total_s: float
    wire_error: float = 0.0

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
    """One sequence's wish for KV: what is asked for, and the way to stop asking.

    ``sender``: the connection of a client that brings the KV; then ``workers`` are not asked.
    """

    sequence_id: str
    tokens: Sequence[int]
    block_table: list[int]  # the sequence's own list, changed in place
    workers: Sequence[PrefillWorker]
    expires_at: float
    sender: Link | None = None
    box: LetterBox | None = None
    is_cancelled: bool = False

    def cancel(self) -> None:
        """Stop as soon as possible; ``Fetcher.fetch`` then raises FetchCancelled."""
        if not self.is_cancelled:
            self.is_cancelled = True
            if self.box is not None:
                self.box.put(Cancelled())


class Fetcher:
    """Runs handoffs over the shared connections.

    ``senders``: the paths from clients that bring their KV.
    ``wire_dtype``: in which KV travels, if not as the pool holds it.
    """

    def __init__(
        self,
        peers: PrefillPeers,
        boxes: LetterBoxes,
        leases: LeaseTable,
        blocks: BlockPool,
        quarantine: Quarantine,
        metrics: DecodeMetrics,
        *,
        senders: SenderPaths,
        new_generation: Callable[[], int],
        wire_dtype: str = "",
        stall_timeout_s: float,
        abort_timeout_s: float,
    ) -> None:
        self._peers = peers
        self._senders = senders
        self._boxes = boxes
        self._leases = leases
        self._blocks = blocks
        self._metrics = metrics
        self._quarantine = quarantine
        self._new_generation = new_generation
        self._wire_dtype = wire_dtype
        self._wire = leases.geometry.as_wire(wire_dtype) if wire_dtype else None
        self._stall_timeout_s = stall_timeout_s
        self._abort_timeout_s = abort_timeout_s
        self._log = structlog.get_logger("decode.handoff")

    async def fetch(self, handoff: Handoff) -> Fetched:
        """Fill ``handoff.block_table`` with the KV of ``handoff.tokens``.

        Raises FetchCancelled, or FetchFailed after the last worker. Either way nobody writes to
        the blocks any more.
        """
        reasons: list[str] = []
        code: int = ErrorCode.PREFILL_UNAVAILABLE
        sources: Sequence[PrefillWorker | Hello] = (
            handoff.workers if handoff.sender is None else [handoff.sender.remote]
        )
        # Each once more if its carrier broke, whichever of our handoffs found that: the new
        # connection finds the next best one.
        left = deque(sources)
        asked_again: set[str] = set()
        while left:
            source = left.popleft()
            if handoff.is_cancelled:
                raise FetchCancelled
            writer = source.instance_id
            link: PrefillLink | None = None
            try:
                link = await self._link(handoff, source)
                if handoff.is_cancelled:
                    raise FetchCancelled
                return await self._attempt(handoff, link, writer)
            except (KvProtoError, _AttemptFailed) as exc:
                self._metrics.handoff_failures.labels(code=_name(exc.code)).inc()
                self._log.warning(
                    "handoff failed",
                    sequence_id=handoff.sequence_id,
                    writer=writer,
                    reason=str(exc),
                )
                reasons.append(f"{writer}: {exc}")
                is_carrier_lost = link is not None and link.is_carrier_lost
                if is_carrier_lost and writer not in asked_again:
                    asked_again.add(writer)
                    left.appendleft(source)
                if exc.code in _FINAL_CODES:
                    code = exc.code
                    break
        if handoff.is_cancelled:
            raise FetchCancelled
        text = "; ".join(reasons) or "the router named no prefill worker"
        raise FetchFailed(code, f"nobody delivered the KV ({text})")

    async def _link(self, handoff: Handoff, source: PrefillWorker | Hello) -> PrefillLink:
        if isinstance(source, PrefillWorker):
            return await self._peers.get(source)
        assert handoff.sender is not None, "a HELLO is that of the sender"
        return PrefillLink(handoff.sender, await self._senders.get(handoff.sender))

    async def _attempt(self, handoff: Handoff, link: PrefillLink, writer: str) -> Fetched:
        peer, path = link.peer, link.path
        sequence_id, generation = handoff.sequence_id, self._new_generation()
        began_at = time.monotonic()
        attachment, keys = path.attachment, list[int]()
        is_placed = attachment is not None
        part = Part(generation, writer, wire=self._wire, is_placed=is_placed)
        self._leases.grant_parts(sequence_id, [part], handoff.block_table, len(handoff.tokens))
        handoff.box = box = self._boxes.open(peer, sequence_id, generation)
        has_proof = False
        code, reason = int(ErrorCode.CANCELLED), "no longer wanted"
        try:
            if attachment is not None:
                keys = await attachment.open_keys()
            await peer.send(
                Prefill(
                    sequence_id,
                    generation,
                    tokens=list(handoff.tokens),
                    timeout_s=max(0.0, handoff.expires_at - began_at),
                    carrier=path.carrier if is_placed else "",
                    block_table=handoff.block_table if is_placed else [],
                    dtype=self._wire_dtype,
                    heartbeat_s=self._stall_timeout_s / 3,
                    keys=keys,
                )
            )
            commit = await self._await_commit(handoff, box, generation)
            self._leases.commit(commit)
            with contextlib.suppress(KvProtoError):
                # Complete here, whether or not the prefill worker hears of it.
                await peer.send(CommitAck(sequence_id, generation))
        except _AttemptFailed as exc:
            has_proof, code, reason = exc.is_quiet, exc.code, str(exc)
            raise
        except KvProtoError as exc:
            code, reason = exc.code, str(exc)
            raise
        else:
            # COMMIT followed the last write on the same connection.
            has_proof = True
        finally:
            try:
                self._leases.revoke(generation)
                if not has_proof:
                    abort = Abort(sequence_id, generation, code=code, message=reason)
                    has_proof = await self._quiesce(link, box, abort)
                if attachment is not None:
                    attachment.close_keys(keys)
                    if code == ErrorCode.CARRIER_LOST:
                        link.is_carrier_lost = True
                        await self._leave_carrier(handoff, peer, reason)
                if not self._leases.quiesced(generation):
                    # A WRITE after ABORT_ACK: that promise is worth nothing, the end is.
                    peer.abort("a WRITE follows its ABORT_ACK")
                    await peer.wait_closed()
                self._take_back(handoff, generation, link, has_proof=has_proof)
            finally:
                handoff.box = None
                self._boxes.close(peer, sequence_id, generation)
        return Fetched(
            writer=writer,
            carrier=path.carrier,
            nbytes=commit.nbytes,
            prefill_queue_s=commit.queue_s,
            prefill_s=commit.prefill_s,
            total_s=time.monotonic() - began_at,
            wire_error=commit.wire_error,
        )

    async def _await_commit(self, handoff: Handoff, box: LetterBox, generation: int) -> Commit:
        """Wait for COMMIT; a stretch without a letter or a landed byte is a failure.

        Until STARTED a HEARTBEAT says that the prompt still waits for its turn; from then on bytes
        are the only progress.
        """
        nbytes_before = 0
        is_started = False
        silent_since = time.monotonic()
        while True:
            now = time.monotonic()
            left_s = handoff.expires_at - now
            timeout_s = min(left_s, silent_since + self._stall_timeout_s - now)
            try:
                letter = await box.get(max(0.0, timeout_s))
            except TimeoutError:
                nbytes = self._leases.landed_nbytes(generation)
                if left_s > timeout_s and nbytes > nbytes_before:
                    nbytes_before, silent_since = nbytes, time.monotonic()
                    continue
                raise _AttemptFailed(
                    ErrorCode.DEADLINE_EXCEEDED,
                    f"no KV arrived for {time.monotonic() - silent_since:.1f} s (stall_timeout_s "
                    "or request timeout)",
                ) from None
            match letter:
                case Started():
                    is_started, silent_since = True, time.monotonic()
                case Heartbeat():
                    if not is_started:
                        silent_since = time.monotonic()
                case Commit():
                    return letter
                case Abort():
                    raise _AttemptFailed(letter.code, letter.message)
                case Error():
                    raise _AttemptFailed(letter.code, letter.message)
                case Lost():
                    raise _AttemptFailed(ErrorCode.CONNECTION_LOST, letter.reason)
                case AbortAck():
                    raise _AttemptFailed(ErrorCode.INTERNAL, "aborted by itself", is_quiet=True)
                case Cancelled():
                    raise FetchCancelled

    async def _leave_carrier(self, handoff: Handoff, peer: Link, reason: str) -> None:
        """What it carries the next time will come by another one."""
        if handoff.sender is not None:
            # Its connection carries more than this KV, and is kept.
            self._senders.demote(peer, reason)
            return
        peer.abort(reason)
        await peer.wait_closed()

    def _take_back(
        self, handoff: Handoff, generation: int, link: PrefillLink, *, has_proof: bool
    ) -> None:
        """Give the sequence its blocks again, or others for those that stay in quarantine.

        With proof they pass through the free list, and taking as many at once cannot fail.
        PoolExhausted without it: the sequence then has no blocks for these tokens.
        """
        if has_proof or link.path.attachment is None:
            num_blocks = len(self._leases.release(generation))
        else:
            num_blocks = len(self._leases.revoke(generation))
            self._quarantine.keep(generation, link.path.attachment)
        table = handoff.block_table
        lost, table[:num_blocks] = table[:num_blocks], []
        table[:0] = self._blocks.allocate(handoff.sequence_id, len(lost))

    async def _quiesce(self, link: PrefillLink, box: LetterBox, abort: Abort) -> bool:
        """Return when the peer can no longer write to the blocks of this attempt; False: it may."""
        peer, attachment = link.peer, link.path.attachment
        try:
            async with asyncio.timeout(self._abort_timeout_s):
                await peer.send(abort)
                while not isinstance(letter := await box.get(self._abort_timeout_s), Lost):
                    if isinstance(letter, AbortAck):
                        return True
        except TimeoutError:
            # No promise within the deadline: cut the line, after which no byte can arrive.
            self._metrics.cut_connections.inc()
            peer.abort("no ABORT_ACK within abort_timeout_s")
            await peer.wait_closed()
        except KvProtoError:
            peer.abort("the abort could not be sent")
            await peer.wait_closed()
        if attachment is None:
            return True
        # A cut line does not keep anybody from writing to memory it has mapped; RDMA is cut here.
        attachment.cut()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._abort_timeout_s):
                await attachment.wait_gone()
        return attachment.is_gone


def _name(code: int) -> str:
    try:
        return ErrorCode(code).name.lower()
    except ValueError:
        return str(code)
