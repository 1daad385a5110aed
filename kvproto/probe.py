"""Measuring a path: KV of a known pattern goes the way that KV will go, and is committed.

    receiver  measure: leases free blocks, PROBE ->   writer  answer_probe
                       <- WRITE or PLACED for each layer, COMMIT
    receiver  COMMIT_ACK ->, blocks free again

A commit proves the path: bytes, order and digests are those of a real transfer. Two probes, of
one token and of a size worth measuring, tell what a transfer costs at least and what each byte
adds. The same for every carrier. Source: docs/wire.md section 6.
"""

import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Final

from kvproto.blocks import BlockPool
from kvproto.carrier import Attachment, KvWriter
from kvproto.digest import RegionDigests
from kvproto.errors import ErrorCode, KvProtoError, LeaseError, PoolExhausted
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.lease import LeaseTable
from kvproto.messages import Abort, AbortAck, Commit, CommitAck, Error, Probe
from kvproto.tcp_link import Link

MAX_PROBE_NBYTES: Final = 16 * 1024 * 1024
# A probe takes at most this part of the free blocks, so that it keeps nobody waiting.
FREE_BLOCKS_DIVISOR: Final = 4
# Each layer's pattern begins elsewhere in one buffer, so that layers cannot be exchanged.
_LAYER_SHIFT_NBYTES: Final = 64

# What opens the letters about one probe, (sequence_id, generation): a context in which
# ``await next_letter(timeout_s)`` returns the next message about it or raises TimeoutError.
# Anything but Commit, Abort and AbortAck (an Error, a sign that the connection is lost) ends it.
NextLetter = Callable[[float], Awaitable[object]]
OpenLetters = Callable[[str, int], AbstractAsyncContextManager[NextLetter]]


@dataclass(frozen=True, slots=True)
class PathReport:
    """What a path can do, measured by this host's clock.

    Args:
        carrier: "tcp", "mapped", ...
        nbytes: body bytes of the larger probe.
        elapsed_s: from asking until it was committed, without making the pattern.
        fixed_s: the same for one token: what a transfer costs at least.
        fixed_nbytes: body bytes of that one.
    """

    carrier: str
    nbytes: int
    elapsed_s: float
    fixed_s: float
    fixed_nbytes: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second of what the larger probe has more; 0.0 if noise hides it."""
        more_s, more_nbytes = self.elapsed_s - self.fixed_s, self.nbytes - self.fixed_nbytes
        return more_nbytes / more_s if more_s > 0 else 0.0


class ProbeFailed(KvProtoError):
    """A path was not proven; use another.

    Args:
        message: full sentence.
        code: why, see ``ErrorCode``.
        generation: the lease that stays revoked, its blocks quarantined, because the writer gave
            no proof that it has ended: ``LeaseTable.release`` it and free nothing else once there
            is one. 0 if nothing was left behind.
    """

    def __init__(self, message: str, code: int, generation: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.generation = generation


def max_probe_tokens(layout: PoolLayout, num_free_blocks: int) -> int:
    """Tokens of a probe: MAX_PROBE_NBYTES and a quarter of the free blocks at most; 0 for none."""
    geometry = layout.geometry
    first_nbytes = geometry.prompt_nbytes(1)
    token_nbytes = max(1, geometry.kv_token_nbytes)
    num_tokens = (num_free_blocks // FREE_BLOCKS_DIVISOR) * layout.block_size
    if first_nbytes > MAX_PROBE_NBYTES:
        return 0
    return min(num_tokens, 1 + (MAX_PROBE_NBYTES - first_nbytes) // token_nbytes)


async def answer_probe(peer: Link, writer: KvWriter, geometry: KvGeometry, probe: Probe) -> None:
    """The writer's side of PROBE: write the pattern, then COMMIT. COMMIT_ACK is the caller's.

    ``writer`` is the one of ``probe.carrier``; a carrier that writes into memory has begun the
    transfer already (``MappedWriter.begin``).

    Raises LeaseError: more than MAX_PROBE_NBYTES are asked for, and nothing was sent. Else what
    ``writer.write``, ``writer.flush`` and ``Peer.send`` raise.
    """
    num_tokens = probe.num_tokens
    began_at = time.monotonic()
    nbytes = geometry.prompt_nbytes(num_tokens)
    if nbytes > MAX_PROBE_NBYTES:
        raise LeaseError(
            f"a probe of {num_tokens} tokens has {nbytes} bytes, the limit is {MAX_PROBE_NBYTES}",
            sequence_id=probe.sequence_id,
        )
    bodies = _pattern(geometry, probe)
    digests = RegionDigests(geometry)
    written_at = time.monotonic()
    for layer, (first, body) in enumerate(bodies):
        sizes = geometry.region_nbytes(layer, num_tokens - first, is_last=True)
        body_digests = digests.begin(layer, sizes)
        body_digests.update(body)
        digests.accept(layer, body_digests)
        await writer.write(
            probe.sequence_id, probe.generation, layer, first, num_tokens - first, [body]
        )
    await writer.flush()
    await peer.send(
        Commit(
            probe.sequence_id,
            probe.generation,
            num_tokens=num_tokens,
            nbytes=nbytes,
            digests=digests.values(),
            queue_s=0.0,
            prefill_s=written_at - began_at,
            handoff_s=time.monotonic() - written_at,
        )
    )


async def measure(
    peer: Link,
    leases: LeaseTable,
    blocks: BlockPool,
    layout: PoolLayout,
    *,
    carrier: str,
    attachment: Attachment | None,
    sequence_id: str,
    new_generation: Callable[[], int],
    open_letters: OpenLetters,
    timeout_s: float,
) -> PathReport:
    """Prove and measure the way from ``peer`` into the pool over ``carrier``.

    Takes at most a quarter of the free blocks, and gives them back. ``attachment``: of a carrier
    that writes into memory; None for TCP. ``sequence_id`` owns the blocks meanwhile;
    ``timeout_s`` bounds each of the two probes, and the wait for ABORT_ACK after a failed one.

    Raises PoolExhausted (too few free blocks, or over the quarantine budget) and ProbeFailed. If
    cancelled, the lease of the last ``new_generation`` stays revoked, as after ProbeFailed.
    """
    num_tokens = max_probe_tokens(layout, blocks.num_free_blocks)
    if not num_tokens:
        raise PoolExhausted(
            f"no probe over {carrier}: {blocks.num_free_blocks} blocks are free, a probe takes a "
            f"{FREE_BLOCKS_DIVISOR}th and {MAX_PROBE_NBYTES} bytes at most"
        )
    runs: list[tuple[int, float]] = []
    # The first transfer warms the path up and is not counted.
    for probe_tokens in (1, 1, num_tokens):
        table = blocks.allocate(sequence_id, -(-probe_tokens // layout.block_size))
        generation = new_generation()
        try:
            leases.grant(
                sequence_id,
                generation,
                table,
                probe_tokens,
                writer=peer.remote.instance_id,
                is_placed=attachment is not None,
            )
        except KvProtoError:
            blocks.free(table, sequence_id)
            raise
        keys = await _open_keys(attachment, leases, generation)
        probe = Probe(sequence_id, generation, probe_tokens, carrier, table, keys)
        try:
            runs.append(await _run(peer, leases, probe, open_letters, timeout_s))
        finally:
            # The writer is done with them, or it has failed and they must not stay open.
            if attachment is not None:
                attachment.close_keys(keys)
        blocks.free(table, sequence_id)
    (_, _), (fixed_nbytes, fixed_s), (nbytes, elapsed_s) = runs
    return PathReport(carrier, nbytes, elapsed_s, fixed_s, fixed_nbytes)


async def _open_keys(
    attachment: Attachment | None, leases: LeaseTable, generation: int
) -> list[int]:
    """The keys of a lease that nobody was told of yet; it is taken back if there are none."""
    if attachment is None:
        return []
    try:
        return await attachment.open_keys()
    except BaseException as exc:
        leases.revoke(generation)
        leases.release(generation)
        if isinstance(exc, KvProtoError):
            raise ProbeFailed(str(exc), exc.code) from exc
        raise


async def _run(
    peer: Link, leases: LeaseTable, probe: Probe, open_letters: OpenLetters, timeout_s: float
) -> tuple[int, float]:
    """One probe: (bytes, seconds). The lease is committed, or as ProbeFailed says."""
    sequence_id, generation = probe.sequence_id, probe.generation
    async with open_letters(sequence_id, generation) as next_letter:
        began_at = time.monotonic()
        code, reason, is_quiet = int(ErrorCode.INTERNAL), "", False
        try:
            await peer.send(probe)
            letter = await next_letter(timeout_s)
            if isinstance(letter, Commit):
                leases.commit(letter)
                elapsed_s = time.monotonic() - began_at - letter.prefill_s - letter.queue_s
                with suppress(KvProtoError):
                    await peer.send(CommitAck(sequence_id, generation))
                return letter.nbytes, max(0.0, elapsed_s)
            code, reason, is_quiet = _failure(letter)
        except TimeoutError:
            code = ErrorCode.DEADLINE_EXCEEDED
            reason = f"no COMMIT came within {timeout_s:g} s"
        except LeaseError as exc:
            # COMMIT follows the last write: this writer is done with these blocks.
            code, reason, is_quiet = exc.code, str(exc), True
        except KvProtoError as exc:
            code, reason = exc.code, str(exc)
        finally:
            # Nothing to revoke if it was committed.
            leases.revoke(generation)
        if not is_quiet:
            abort = Abort(sequence_id, generation, code=code, message=reason)
            is_quiet = await _quiesce(peer, next_letter, abort, timeout_s)
        if is_quiet and leases.quiesced(generation):
            leases.release(generation)
            generation = 0
    raise ProbeFailed(
        f"the path over {probe.carrier or 'tcp'} from {peer.name} is not proven: {reason}",
        code,
        generation,
    )


def _failure(letter: object) -> tuple[int, str, bool]:
    """(code, reason, the writer is done) of a letter that is no COMMIT."""
    if isinstance(letter, AbortAck):
        return ErrorCode.INTERNAL, "the writer aborted it", True
    if isinstance(letter, Abort | Error):
        return letter.code, letter.message, False
    return ErrorCode.CONNECTION_LOST, f"it ended meanwhile ({letter})", False


async def _quiesce(peer: Link, next_letter: NextLetter, abort: Abort, timeout_s: float) -> bool:
    """True if the writer promised, within ``timeout_s``, that it writes no more."""
    deadline = time.monotonic() + timeout_s
    try:
        await peer.send(abort)
        while True:
            letter = await next_letter(max(0.0, deadline - time.monotonic()))
            if isinstance(letter, AbortAck):
                return True
            if not isinstance(letter, Commit | Abort | Error):
                return False
    except (TimeoutError, KvProtoError):
        return False


def _pattern(geometry: KvGeometry, probe: Probe) -> list[tuple[int, memoryview]]:
    """(first token, body) for each layer: bytes without a period, other ones for each probe."""
    sizes = []
    for index, layer in enumerate(geometry.layers):
        first = layer.first_needed_token(probe.num_tokens)
        count = probe.num_tokens - first
        sizes.append((first, geometry.write_nbytes(index, count, is_last=True)))
    num_shifts = len(sizes)
    longest = max(nbytes for _, nbytes in sizes) + num_shifts * _LAYER_SHIFT_NBYTES
    source = memoryview(bytearray(random.Random(probe.generation).randbytes(longest)))
    return [
        (first, source[index * _LAYER_SHIFT_NBYTES : index * _LAYER_SHIFT_NBYTES + nbytes])
        for index, (first, nbytes) in enumerate(sizes)
    ]
