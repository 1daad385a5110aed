"""Permission to write: which peer may write which blocks, under which generation.

A lease opens the blocks of one sequence for one handoff. Its generation is new for each handoff,
so a late frame of an earlier one never fits. Per layer the tokens must arrive in order and
without gaps: the stream keeps the order, so this is the simplest rule that makes duplicates,
overlaps and holes impossible. Completeness is counted, never inferred.

    grant -> destination/landed ... -> check -> commit                  blocks: committed
    grant -> ... -> revoke -> (ABORT_ACK or connection end) -> release  blocks: free

Between ``revoke`` and ``release`` the blocks are quarantined: a WRITE that was half received at
the moment of ``revoke`` still lands in them, and one that was on its way is refused.

Pure and synchronous: no I/O, no clock, no digest (see ``digest.digest_blocks``). The caller keeps
the deadlines. Not thread-safe. Source: docs/wire.md sections 6 and 7.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvproto.blocks import BlockPool
from kvproto.buffer import byte_view
from kvproto.errors import LeaseError, LocalProtocolError
from kvproto.geometry import NUM_REGIONS, KvGeometry, PoolLayout, slot_runs
from kvproto.messages import Commit, Write
from kvproto.state import TRANSFER_TRANSITIONS, TransferEvent, TransferState, advance


@dataclass(slots=True)
class _Lease:
    """One granted transfer. ``num_landed_tokens`` per layer; ``writing``: layers half received."""

    sequence_id: str
    generation: int
    writer: str
    block_table: list[int]
    num_tokens: int
    num_landed_tokens: list[int]
    num_landed_nbytes: int = 0
    writing: set[int] = field(default_factory=set)
    state: TransferState = TransferState.GRANTED

    def advance(self, event: TransferEvent) -> None:
        """Follow the table."""
        self.state = advance(TRANSFER_TRANSITIONS, self.state, event)


class LeaseTable:
    """All leases of one pool; a ``carrier.Landing``.

    Args:
        layout: of the pool.
        pool: the pool's memory, writable, ``layout.nbytes`` bytes.
        blocks: the pool's bookkeeping; grant, commit, revoke and release move its blocks.
    """

    def __init__(self, layout: PoolLayout, pool: memoryview, blocks: BlockPool) -> None:
        self._pool = byte_view(pool)
        if self._pool.readonly or self._pool.nbytes != layout.nbytes:
            raise LocalProtocolError(
                f"lease table: the pool has {self._pool.nbytes} bytes "
                f"(read-only: {self._pool.readonly}), the layout needs {layout.nbytes} writable"
            )
        if blocks.num_blocks != layout.num_blocks:
            raise LocalProtocolError(
                f"lease table: {blocks.num_blocks} blocks kept for {layout.num_blocks} in the pool"
            )
        self._layout = layout
        self._blocks = blocks
        self._layers = {name: layer for layer, name in enumerate(layout.geometry.layer_names)}
        self._leases: dict[int, _Lease] = {}

    @property
    def geometry(self) -> KvGeometry:
        """The geometry of the pool."""
        return self._layout.geometry

    # -- granting and ending -------------------------------------------------------------------

    def grant(
        self,
        sequence_id: str,
        generation: int,
        block_table: Sequence[int],
        num_tokens: int,
        *,
        writer: str = "",
    ) -> None:
        """Let a peer write tokens ``0 .. num_tokens - 1`` into the first blocks of the table.

        The blocks that hold these tokens must be reserved for ``sequence_id`` and become
        writable; further blocks of the table stay as they are. ``writer``: instance id of the one
        peer that may write; "" for any authenticated peer.

        LocalProtocolError, in this order: generation 0 or in use, no tokens or too few blocks, a
        block that is not reserved for the sequence or listed twice. Nothing changes then.
        """
        if generation < 1 or generation in self._leases:
            raise LocalProtocolError(
                f"cannot grant generation {generation}: it is 0 or in use; each handoff needs a "
                "new one"
            )
        block_size = self._layout.block_size
        num_blocks = -(-num_tokens // block_size)
        if num_tokens < 1 or num_blocks > len(block_table):
            raise LocalProtocolError(
                f"cannot grant {num_tokens} tokens in {len(block_table)} blocks of {block_size}"
            )
        table = list(block_table[:num_blocks])
        self._blocks.open_for_write(table, sequence_id, generation)
        num_landed_tokens = [0] * self.geometry.num_layers
        self._leases[generation] = _Lease(
            sequence_id, generation, writer, table, num_tokens, num_landed_tokens
        )

    def landed_nbytes(self, generation: int) -> int:
        """Body bytes that have landed so far; 0 without such a lease. For stall detection."""
        lease = self._leases.get(generation)
        return 0 if lease is None else lease.num_landed_nbytes

    def check(self, commit: Commit) -> None:
        """Return if everything announced has landed; nothing changes.

        LeaseError, in this order: unknown sequence, stale generation, another number of tokens
        than granted, a layer with tokens missing, another number of bytes than landed. Digests
        are the caller's to compare (``digest.check_digests``).
        """
        lease = self._find(commit.sequence_id, commit.generation)
        sequence_id = commit.sequence_id
        if commit.num_tokens != lease.num_tokens:
            raise LeaseError(
                f"COMMIT of {commit.num_tokens} tokens, {lease.num_tokens} were granted",
                sequence_id=sequence_id,
            )
        for name, num_tokens in zip(
            self.geometry.layer_names, lease.num_landed_tokens, strict=True
        ):
            if num_tokens != lease.num_tokens:
                raise LeaseError(
                    f"COMMIT is incomplete: layer {name} has {num_tokens} of "
                    f"{lease.num_tokens} tokens",
                    sequence_id=sequence_id,
                )
        if commit.nbytes != lease.num_landed_nbytes:
            raise LeaseError(
                f"COMMIT of {commit.nbytes} bytes, {lease.num_landed_nbytes} have landed",
                sequence_id=sequence_id,
            )

    def commit(self, commit: Commit) -> None:
        """``check`` again, then make the blocks committed and forget the lease.

        Call it when the digests agree, then send COMMIT_ACK. Errors as ``check``: a lease
        revoked while the digests were computed is refused here.
        """
        self.check(commit)
        lease = self._leases.pop(commit.generation)
        lease.advance(TransferEvent.COMMIT)
        self._blocks.commit(lease.block_table, lease.sequence_id)

    def revoke(self, generation: int) -> list[int]:
        """Refuse every further WRITE of the lease; its blocks become quarantined and returned.

        Idempotent; [] if there is no such lease (committed or released already).
        """
        lease = self._leases.get(generation)
        if lease is None:
            return []
        if lease.state is not TransferState.REVOKED:
            self._blocks.quarantine(lease.block_table, lease.sequence_id)
        lease.advance(TransferEvent.REVOKE)
        return list(lease.block_table)

    def quiesced(self, generation: int) -> bool:
        """No WRITE of the lease is half received at this moment."""
        lease = self._leases.get(generation)
        return lease is None or not lease.writing

    def release(self, generation: int) -> list[int]:
        """The caller has proof that no writer remains: end a revoked lease, free its blocks.

        Proof is ABORT_ACK for this generation or the end of the writer's connection. Returns the
        freed blocks. Idempotent; [] if there is no such lease (committed or released already).
        LocalProtocolError if it was not revoked or a WRITE is half received: then there is no
        proof.
        """
        lease = self._leases.get(generation)
        if lease is None:
            return []
        if lease.state is not TransferState.REVOKED or lease.writing:
            raise LocalProtocolError(
                f"cannot release generation {generation}: it is "
                f"{lease.state.value} with {len(lease.writing)} writes half received; commit or "
                "revoke it, and wait for proof that nobody writes"
            )
        del self._leases[generation]
        lease.advance(TransferEvent.PROOF)
        self._blocks.release_quarantine(lease.block_table, lease.sequence_id)
        return lease.block_table

    def stats(self) -> dict[str, int]:
        """Leases, of these revoked, and writes half received."""
        leases = self._leases.values()
        return {
            "num_leases": len(leases),
            "num_revoked": sum(lease.state is TransferState.REVOKED for lease in leases),
            "num_writing": sum(len(lease.writing) for lease in leases),
        }

    # -- Landing -------------------------------------------------------------------------------

    def destination(self, write: Write, body_nbytes: int, writer: str) -> list[memoryview]:
        """The pool's memory for K then V of the write.

        LeaseError, in this order: unknown sequence, stale generation, another writer, unknown
        layer, range beyond the grant, not the next token of the layer (duplicate, overlap, gap),
        body length.
        """
        lease = self._find(write.sequence_id, write.generation)
        layer = self._check_write(lease, write, body_nbytes, writer)
        lease.writing.add(layer)
        lease.advance(TransferEvent.WRITE)
        runs = slot_runs(
            lease.block_table, write.first_token, write.num_tokens, self._layout.block_size
        )
        return [
            self._pool[offset : offset + nbytes]
            for region in range(NUM_REGIONS)
            for offset, nbytes in self._layout.spans(layer, region, runs)
        ]

    def landed(self, write: Write) -> None:
        """Count the tokens, unless the lease was revoked meanwhile."""
        lease, layer = self._stop_writing(write)
        if lease.state is not TransferState.REVOKED:
            lease.num_landed_tokens[layer] += write.num_tokens
            lease.num_landed_nbytes += self.geometry.write_nbytes(write.num_tokens)

    def abandoned(self, write: Write) -> None:
        """The write will not be completed; its tokens are not counted."""
        self._stop_writing(write)

    # -- inside --------------------------------------------------------------------------------

    def _find(self, sequence_id: str, generation: int) -> _Lease:
        lease = self._leases.get(generation)
        if (
            lease is not None
            and lease.sequence_id == sequence_id
            and lease.state is not TransferState.REVOKED
        ):
            return lease
        if all(lease.sequence_id != sequence_id for lease in self._leases.values()):
            raise LeaseError(
                f"unknown sequence {sequence_id}: it has no lease here", sequence_id=sequence_id
            )
        raise LeaseError(
            f"stale generation {generation} of sequence {sequence_id}", sequence_id=sequence_id
        )

    def _check_write(self, lease: _Lease, write: Write, body_nbytes: int, writer: str) -> int:
        sequence_id = write.sequence_id
        if lease.writer not in {"", writer}:
            raise LeaseError(
                f"sequence {sequence_id} is leased to {lease.writer}, not to {writer}",
                sequence_id=sequence_id,
            )
        layer = self._layers.get(write.layer)
        if layer is None:
            raise LeaseError(
                f"unknown layer {write.layer!r}: this model's layers are "
                f"{self.geometry.layer_names[0]} .. {self.geometry.layer_names[-1]}",
                sequence_id=sequence_id,
            )
        end_token = write.first_token + write.num_tokens
        if end_token > lease.num_tokens:
            raise LeaseError(
                f"tokens {write.first_token}..{end_token} of layer {write.layer} are beyond the "
                f"{lease.num_tokens} granted",
                sequence_id=sequence_id,
            )
        num_landed = lease.num_landed_tokens[layer]
        if write.first_token != num_landed or layer in lease.writing:
            raise LeaseError(
                f"layer {write.layer} expects token {num_landed} next, not {write.first_token}: "
                "tokens of a layer arrive in order, each once",
                sequence_id=sequence_id,
            )
        expected_nbytes = self.geometry.write_nbytes(write.num_tokens)
        if body_nbytes != expected_nbytes:
            raise LeaseError(
                f"the body of a WRITE of {write.num_tokens} tokens has {body_nbytes} bytes "
                f"instead of {expected_nbytes}",
                sequence_id=sequence_id,
            )
        return layer

    def _stop_writing(self, write: Write) -> tuple[_Lease, int]:
        """A lease outlives its half-received writes (see ``release``), so it is always here."""
        lease = self._leases[write.generation]
        layer = self._layers[write.layer]
        lease.writing.remove(layer)
        return lease, layer
