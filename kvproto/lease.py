"""Permission to write: which peer may write which blocks, under which generation.

A lease opens the blocks of one sequence for one handoff. Its generation is new for each handoff,
so a late frame of an earlier one never fits. Per layer the tokens must arrive in order and
without gaps: the stream keeps the order, so this is the simplest rule that makes duplicates,
overlaps and holes impossible. Completeness is counted, never inferred, and the bytes are digested
as they arrive, before anything converts them.

    grant -> destination/landed ... -> check -> commit                  blocks: committed
    grant -> ... -> revoke -> (proof that nobody writes) -> release     blocks: free

Between ``revoke`` and ``release`` the blocks are quarantined: a WRITE that was half received at
the moment of ``revoke`` still lands in them, and one that was on its way is refused. What proof
is depends on the carrier (docs/wire.md section 6.4); a writer that never gives it keeps its blocks
in quarantine, and beyond a budget of such blocks nothing more is granted.

Several writers may share one grant, each for some of the heads: that is how a prefill worker of
another tensor-parallel degree hands over. Each has a generation of its own.

Pure and synchronous: no I/O, no clock. The caller keeps the deadlines. Not thread-safe.
Source: docs/wire.md sections 6 and 7.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvproto.blocks import BlockPool
from kvproto.buffer import byte_view, swap_in_place
from kvproto.carrier import Converter
from kvproto.digest import BodyDigests, RegionDigests, check_digests
from kvproto.errors import LeaseError, LocalProtocolError, Malformed, Overloaded, PoolExhausted
from kvproto.geometry import SCALE_NBYTES, SCALED_INT8, KvGeometry, PoolLayout, Region
from kvproto.header import HOST_ORDER, ByteOrder
from kvproto.messages import Commit, Placed, Write
from kvproto.state import TRANSFER_TRANSITIONS, TransferEvent, TransferState, advance

MAX_LEASES: Final = 4096


@dataclass(frozen=True, slots=True)
class Part:
    """One writer's share of a grant.

    Args:
        generation: at least 1, new.
        writer: instance id of the one peer that may write; "" for any authenticated peer.
        wire: what the writer sends, if not the pool's geometry (``KvGeometry.as_wire``).
        first_head: where its heads begin in the pool's rows.
        is_placed: a carrier puts the bytes into the pool and PLACED counts them; else WRITE.
        is_checked: the writer's COMMIT must have digests.
    """

    generation: int
    writer: str = ""
    wire: KvGeometry | None = None
    first_head: int = 0
    is_placed: bool = False
    is_checked: bool = True


@dataclass(slots=True)
class _Grant:
    """The blocks that one or several writers fill together."""

    sequence_id: str
    block_table: list[int]
    num_tokens: int
    num_open_parts: int
    is_quarantined: bool = False


@dataclass(slots=True)
class _HalfReceived:
    """A WRITE whose body of ``nbytes`` is arriving; ``views`` per region, where it arrives."""

    nbytes: int
    views: list[list[memoryview]]
    digests: BodyDigests


@dataclass(slots=True)
class _Lease:
    """One writer's transfer. Per layer: ``next_token`` to arrive, and the write half received."""

    grant: _Grant
    part: Part
    wire: KvGeometry
    next_token: list[int]
    digests: RegionDigests
    num_landed_nbytes: int = 0
    writing: dict[int, _HalfReceived] = field(default_factory=dict)
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
        converter: turns what another dtype or head range sends into the pool's rows; without one
            such parts are refused.
        max_leases: more at a time are refused.
        max_quarantined_blocks: with more in quarantine nothing is granted; default all.
    """

    def __init__(
        self,
        layout: PoolLayout,
        pool: memoryview,
        blocks: BlockPool,
        *,
        converter: Converter | None = None,
        max_leases: int = MAX_LEASES,
        max_quarantined_blocks: int | None = None,
    ) -> None:
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
        self._converter = converter
        self._max_leases = max_leases
        self._max_quarantined_blocks = (
            layout.num_blocks if max_quarantined_blocks is None else max_quarantined_blocks
        )
        self._num_quarantined_blocks = 0
        self._layers = {name: layer for layer, name in enumerate(layout.geometry.layer_names)}
        self._leases: dict[int, _Lease] = {}

    @property
    def geometry(self) -> KvGeometry:
        """The geometry of the pool."""
        return self._layout.geometry

    @property
    def is_over_budget(self) -> bool:
        """Writers that gave no proof hold more blocks than the budget: nothing is granted."""
        return self._num_quarantined_blocks > self._max_quarantined_blocks

    # -- granting and ending -------------------------------------------------------------------

    def grant(
        self,
        sequence_id: str,
        generation: int,
        block_table: Sequence[int],
        num_tokens: int,
        *,
        writer: str = "",
        is_placed: bool = False,
        is_checked: bool = True,
    ) -> None:
        """Let one peer write everything; see ``grant_parts``."""
        part = Part(generation, writer, is_placed=is_placed, is_checked=is_checked)
        self.grant_parts(sequence_id, [part], block_table, num_tokens)

    def grant_parts(
        self, sequence_id: str, parts: Sequence[Part], block_table: Sequence[int], num_tokens: int
    ) -> None:
        """Let peers write tokens ``0 .. num_tokens - 1`` into the first blocks of the table.

        The blocks that hold these tokens must be reserved for ``sequence_id`` and become
        writable; further blocks of the table stay as they are. The blocks are committed when
        every part is.

        In this order, and nothing changes then: PoolExhausted over the quarantine budget;
        Overloaded at ``max_leases``; LocalProtocolError: a generation that is 0, in use or listed
        twice, no tokens or too few blocks, placed parts that do not hold whole rows, parts that a
        converter is needed for and is not there, parts that do not cover each head once, a block
        that is not reserved for the sequence or listed twice.
        """
        if self.is_over_budget:
            raise PoolExhausted(
                f"{self._num_quarantined_blocks} blocks wait for writers to end, the budget is "
                f"{self._max_quarantined_blocks}; end the prefill workers that hang"
            )
        if len(self._leases) + len(parts) > self._max_leases:
            raise Overloaded(f"there are {len(self._leases)} leases, the limit")
        generations = [part.generation for part in parts]
        num_distinct = len({*generations, *self._leases})
        if min(generations, default=0) < 1 or num_distinct < len(parts) + len(self._leases):
            raise LocalProtocolError(
                f"cannot grant generations {generations}: one is 0 or in use; each handoff needs "
                "a new one"
            )
        block_size = self._layout.block_size
        num_blocks = -(-num_tokens // block_size)
        if num_tokens < 1 or num_blocks > len(block_table):
            raise LocalProtocolError(
                f"cannot grant {num_tokens} tokens in {len(block_table)} blocks of {block_size}"
            )
        self._check_parts(parts)
        table = list(block_table[:num_blocks])
        self._blocks.open_for_write(table, sequence_id, generations[0])
        grant = _Grant(sequence_id, table, num_tokens, len(parts))
        next_token = [layer.first_needed_token(num_tokens) for layer in self.geometry.layers]
        for part in parts:
            wire = part.wire or self.geometry
            self._leases[part.generation] = _Lease(
                grant, part, wire, list(next_token), RegionDigests(wire)
            )

    def landed_nbytes(self, generation: int) -> int:
        """Body bytes that have landed so far; 0 without such a lease. For stall detection."""
        lease = self._leases.get(generation)
        return 0 if lease is None else lease.num_landed_nbytes

    def is_complete(self, commit: Commit) -> bool:
        """Every byte that ``commit`` announces has landed, or the lease is gone.

        False is no error yet where WRITEs travel on other connections than COMMIT.
        """
        lease = self._leases.get(commit.generation)
        return lease is None or lease.num_landed_nbytes >= commit.nbytes

    def check(self, commit: Commit) -> None:
        """Return if everything announced has landed, as it was sent; nothing changes.

        LeaseError, in this order: unknown sequence, stale generation, another number of tokens
        than granted, a layer with tokens missing, another number of bytes than landed; then
        DigestMismatch.
        """
        lease = self._find(commit.sequence_id, commit.generation)
        sequence_id, num_tokens = commit.sequence_id, lease.grant.num_tokens
        if commit.num_tokens != num_tokens:
            raise LeaseError(
                f"COMMIT of {commit.num_tokens} tokens, {num_tokens} were granted",
                sequence_id=sequence_id,
            )
        for name, next_token in zip(self.geometry.layer_names, lease.next_token, strict=True):
            if next_token != num_tokens:
                raise LeaseError(
                    f"COMMIT is incomplete: layer {name} has {next_token} of {num_tokens} tokens",
                    sequence_id=sequence_id,
                )
        if commit.nbytes != lease.num_landed_nbytes:
            raise LeaseError(
                f"COMMIT of {commit.nbytes} bytes, {lease.num_landed_nbytes} have landed",
                sequence_id=sequence_id,
            )
        if lease.part.is_checked:
            check_digests(
                lease.wire, commit.digests, lease.digests.values(), sequence_id=sequence_id
            )

    def commit(self, commit: Commit) -> bool:
        """``check``, then forget the lease; True if that made the blocks committed.

        False while other parts of the grant are open. Send COMMIT_ACK afterwards. Errors as
        ``check``.
        """
        self.check(commit)
        lease = self._leases.pop(commit.generation)
        lease.advance(TransferEvent.COMMIT)
        grant = lease.grant
        grant.num_open_parts -= 1
        if not grant.num_open_parts:
            self._blocks.commit(grant.block_table, grant.sequence_id)
        return not grant.num_open_parts

    def revoke(self, generation: int) -> list[int]:
        """Refuse every further WRITE of the grant; its blocks become quarantined and returned.

        Idempotent; [] if there is no such lease (committed or released already). The other
        parts of the grant can only be revoked and released from then on.
        """
        lease = self._leases.get(generation)
        if lease is None:
            return []
        grant = lease.grant
        if not grant.is_quarantined:
            self._blocks.quarantine(grant.block_table, grant.sequence_id)
            grant.is_quarantined = True
            self._num_quarantined_blocks += len(grant.block_table)
        lease.advance(TransferEvent.REVOKE)
        return list(grant.block_table)

    def quiesced(self, generation: int) -> bool:
        """No WRITE of the lease is half received at this moment."""
        lease = self._leases.get(generation)
        return lease is None or not lease.writing

    def release(self, generation: int) -> list[int]:
        """The caller has proof that this writer has ended: end a revoked lease, free its blocks.

        Returns the freed blocks, [] while other parts of the grant lack proof. Idempotent; [] if
        there is no such lease (committed or released already). LocalProtocolError if it was not
        revoked or a WRITE is half received: then there is no proof.
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
        grant = lease.grant
        grant.num_open_parts -= 1
        if grant.num_open_parts:
            return []
        self._blocks.release_quarantine(grant.block_table, grant.sequence_id)
        self._num_quarantined_blocks -= len(grant.block_table)
        return grant.block_table

    def stats(self) -> dict[str, int]:
        """Leases, of these revoked, writes half received, and the quarantine with its budget."""
        leases = self._leases.values()
        return {
            "num_leases": len(leases),
            "num_revoked": sum(lease.state is TransferState.REVOKED for lease in leases),
            "num_writing": sum(len(lease.writing) for lease in leases),
            "num_quarantined_blocks": self._num_quarantined_blocks,
            "max_quarantined_blocks": self._max_quarantined_blocks,
        }

    # -- Landing -------------------------------------------------------------------------------

    def destination(
        self, write: Write, body_nbytes: int, shape_word: int, writer: str
    ) -> list[memoryview]:
        """The pool's memory for the regions of the write; a scratch buffer if rows are converted.

        LeaseError, in this order: unknown sequence, stale generation, another writer or way of
        writing, unknown layer, range beyond the grant, not the next token of the layer
        (duplicate, overlap, gap); Malformed: the shape word; LeaseError: body length.
        """
        lease = self._find(write.sequence_id, write.generation)
        layer = self._check_write(lease, write, writer, is_placed=False)
        expected_word = lease.wire.shape_word(layer, write.num_tokens)
        if shape_word != expected_word:
            raise Malformed("shape_word", f"is {shape_word:#x}, must be {expected_word:#x}")
        region_nbytes = self._region_nbytes(lease, layer, write)
        if body_nbytes != sum(region_nbytes):
            raise LeaseError(
                f"the body of a WRITE of {write.num_tokens} tokens has {body_nbytes} bytes "
                f"instead of {sum(region_nbytes)}",
                sequence_id=write.sequence_id,
            )
        if lease.part.wire is None:
            views = self._pool_views(lease, layer, write)
        else:
            scratch = memoryview(bytearray(body_nbytes))
            views = []
            for nbytes in region_nbytes:
                views.append([scratch[:nbytes]])
                scratch = scratch[nbytes:]
        digests = lease.digests.begin(layer, region_nbytes)
        lease.writing[layer] = _HalfReceived(body_nbytes, views, digests)
        lease.advance(TransferEvent.WRITE)
        return [view for region_views in views for view in region_views]

    def received(self, write: Write, piece: memoryview) -> None:
        """Digest the bytes as they arrived."""
        lease = self._leases[write.generation]
        if lease.part.is_checked:
            lease.writing[self._layers[write.layer]].digests.update(piece)

    def landed(self, write: Write, order: ByteOrder) -> None:
        """Bring the rows into this host's order and the pool's form, and count the tokens.

        A grant that was revoked meanwhile counts nothing.
        """
        lease, layer = self._leases[write.generation], self._layers[write.layer]
        half_received = lease.writing.pop(layer)
        regions = lease.wire.layers[layer].regions
        if order is not HOST_ORDER:
            for region, views in zip(regions, half_received.views, strict=True):
                _swap_rows(views, region, lease.wire)
        if lease.grant.is_quarantined:
            return
        if lease.part.wire is not None:
            self._convert(lease, layer, write, half_received)
        self._count(lease, layer, write, half_received)

    def abandoned(self, write: Write) -> None:
        """The write will not be completed; its tokens are not counted.

        A lease outlives its half-received writes (see ``release``), so it is always here.
        """
        del self._leases[write.generation].writing[self._layers[write.layer]]

    def placed(self, placed: Placed, writer: str) -> None:
        """Digest and count tokens that a carrier has put into the pool.

        LeaseError as ``destination``, without the shape word and the body length.
        """
        lease = self._find(placed.sequence_id, placed.generation)
        layer = self._check_write(lease, placed, writer, is_placed=True)
        region_nbytes = self._region_nbytes(lease, layer, placed)
        views = self._pool_views(lease, layer, placed)
        digests = lease.digests.begin(layer, region_nbytes)
        half_received = _HalfReceived(sum(region_nbytes), views, digests)
        if lease.part.is_checked:
            for region_views in views:
                for view in region_views:
                    half_received.digests.update(view)
        lease.advance(TransferEvent.WRITE)
        self._count(lease, layer, placed, half_received)

    # -- inside --------------------------------------------------------------------------------

    def _check_parts(self, parts: Sequence[Part]) -> None:
        if len(parts) == 1 and parts[0].wire is None and not parts[0].first_head:
            return
        if any(part.is_placed for part in parts):
            raise LocalProtocolError(
                "cannot grant a placed part in another form than the pool's: nobody converts it"
            )
        if self._converter is None:
            raise LocalProtocolError("cannot grant a converted part: there is no converter here")
        for layer, held in enumerate(self.geometry.layers):
            for index, region in enumerate(held.regions):
                heads: list[int] = []
                for part in parts:
                    wire = part.wire or self.geometry
                    num_heads = wire.layers[layer].regions[index].num_heads
                    heads += range(part.first_head, part.first_head + num_heads)
                if sorted(heads) != list(range(region.num_heads)):
                    raise LocalProtocolError(
                        f"cannot grant: the parts do not cover each of the {region.num_heads} "
                        f"heads of region {region.name} of {held.name} once"
                    )

    def _find(self, sequence_id: str, generation: int) -> _Lease:
        lease = self._leases.get(generation)
        if (
            lease is not None
            and lease.grant.sequence_id == sequence_id
            and not lease.grant.is_quarantined
        ):
            return lease
        if all(lease.grant.sequence_id != sequence_id for lease in self._leases.values()):
            raise LeaseError(
                f"unknown sequence {sequence_id}: it has no lease here", sequence_id=sequence_id
            )
        raise LeaseError(
            f"stale generation {generation} of sequence {sequence_id}", sequence_id=sequence_id
        )

    def _check_write(
        self, lease: _Lease, write: Write | Placed, writer: str, *, is_placed: bool
    ) -> int:
        """The index of the write's layer, or LeaseError."""
        sequence_id = write.sequence_id
        if lease.part.writer not in {"", writer}:
            raise LeaseError(
                f"sequence {sequence_id} is leased to {lease.part.writer}, not to {writer}",
                sequence_id=sequence_id,
            )
        if lease.part.is_placed != is_placed:
            ways = ("WRITE", "PLACED")
            raise LeaseError(
                f"sequence {sequence_id} is leased for {ways[lease.part.is_placed]}, not for "
                f"{ways[is_placed]}",
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
        if end_token > lease.grant.num_tokens:
            raise LeaseError(
                f"tokens {write.first_token}..{end_token} of layer {write.layer} are beyond the "
                f"{lease.grant.num_tokens} granted",
                sequence_id=sequence_id,
            )
        next_token = lease.next_token[layer]
        if write.first_token != next_token or layer in lease.writing:
            raise LeaseError(
                f"layer {write.layer} expects token {next_token} next, not {write.first_token}: "
                "tokens of a layer arrive in order, each once",
                sequence_id=sequence_id,
            )
        return layer

    def _region_nbytes(self, lease: _Lease, layer: int, write: Write | Placed) -> list[int]:
        return lease.wire.region_nbytes(
            layer, write.num_tokens, is_last=_is_last(lease.grant, write)
        )

    def _pool_views(
        self, lease: _Lease, layer: int, write: Write | Placed
    ) -> list[list[memoryview]]:
        """The pool's memory for a write, per region."""
        pieces = self._layout.pieces(
            layer,
            lease.grant.block_table,
            write.first_token,
            write.num_tokens,
            is_last=_is_last(lease.grant, write),
        )
        return [
            [self._pool[offset : offset + nbytes] for offset, nbytes in spans] for spans in pieces
        ]

    def _convert(
        self, lease: _Lease, layer: int, write: Write, half_received: _HalfReceived
    ) -> None:
        converter = self._converter
        assert converter is not None, "a converted part is granted with a converter only"
        for wire_region, pool_region, source, pool in zip(
            lease.wire.layers[layer].regions,
            self.geometry.layers[layer].regions,
            half_received.views,
            self._pool_views(lease, layer, write),
            strict=True,
        ):
            converter.unpack(
                source[0],
                wire_region,
                lease.wire.dtype,
                pool,
                pool_region,
                self.geometry.dtype,
                lease.part.first_head,
            )

    def _count(
        self, lease: _Lease, layer: int, write: Write | Placed, half_received: _HalfReceived
    ) -> None:
        lease.digests.accept(layer, half_received.digests)
        lease.next_token[layer] += write.num_tokens
        lease.num_landed_nbytes += half_received.nbytes


def _is_last(grant: _Grant, write: Write | Placed) -> bool:
    return write.first_token + write.num_tokens == grant.num_tokens


def _swap_rows(views: Iterable[memoryview], region: Region, wire: KvGeometry) -> None:
    """Reverse the bytes of each element of whole rows; of scaled int8 only the scales have some."""
    row_nbytes = wire.row_nbytes(region)
    for view in views:
        if wire.dtype != SCALED_INT8:
            swap_in_place(view, wire.element_nbytes)
            continue
        for start in range(0, view.nbytes, row_nbytes):
            swap_in_place(view[start : start + region.num_heads * SCALE_NBYTES], SCALE_NBYTES)
