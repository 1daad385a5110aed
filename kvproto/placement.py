"""Where the bytes of a write belong in the receiver's memory, for carriers that put them there.

A receiver cannot refuse bytes that are in its memory already, so the rules that
``lease.LeaseTable`` keeps are kept at the writer before a byte is written: a transfer that was
asked for, its own blocks, tokens in order. No I/O. Source: docs/wire.md section 6.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvproto.buffer import byte_view, total_nbytes
from kvproto.errors import LeaseError, LocalProtocolError
from kvproto.geometry import PER_TOKEN, PoolLayout

# With digests: the receiver digests one PLACED while the next is written, in its event loop.
CHECKED_PLACED_NBYTES: Final = 8 * 1024 * 1024


@dataclass(slots=True)
class PlacedTransfer:
    """One PREFILL: where its tokens belong, and the next token of each layer.

    ``keys`` open the receiver's memory, for a carrier that has keys.
    """

    block_table: list[int]
    num_tokens: int
    next_token: list[int]
    max_placed_nbytes: int
    keys: tuple[int, ...]
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a region of a layer, and where in the pool they belong: contiguous in both."""

    region: int
    offset: int
    source: memoryview


class Placements:
    """The transfers that one writer writes into one pool."""

    def __init__(self, layout: PoolLayout) -> None:
        self.layout = layout
        self._transfers: dict[tuple[str, int], PlacedTransfer] = {}

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
        """PREFILL or PROBE came: these are its blocks, for tokens ``0 .. num_tokens - 1``.

        ``is_checked``: COMMIT will have digests, so the receiver is to digest meanwhile.

        LeaseError, in this order: the transfer exists; no tokens, or too few blocks for them; a
        block that the pool does not have, or one twice.
        """
        name = (sequence_id, generation)
        layout = self.layout
        num_blocks = -(-num_tokens // layout.block_size)
        table = list(block_table[:num_blocks])
        reason = ""
        if name in self._transfers:
            reason = f"generation {generation} is being written already"
        elif num_tokens < 1 or num_blocks > len(table):
            reason = f"{num_tokens} tokens do not fit into {len(table)} blocks"
        elif not 0 <= min(table) <= max(table) < layout.num_blocks:
            reason = (
                f"its block table names blocks {min(table)}..{max(table)}, the region has "
                f"{layout.num_blocks}"
            )
        elif len(set(table)) != len(table):
            reason = "its block table names a block twice"
        if reason:
            raise LeaseError(
                f"cannot write sequence {sequence_id}: {reason}", sequence_id=sequence_id
            )
        next_token = [layer.first_needed_token(num_tokens) for layer in layout.geometry.layers]
        max_placed_nbytes = CHECKED_PLACED_NBYTES if is_checked else layout.nbytes
        self._transfers[name] = PlacedTransfer(
            table, num_tokens, next_token, max_placed_nbytes, tuple(keys)
        )

    def end(self, sequence_id: str, generation: int) -> None:
        """The transfer was committed or aborted: nothing more of it may be written. Idempotent."""
        transfer = self._transfers.pop((sequence_id, generation), None)
        if transfer is not None:
            transfer.is_over = True

    def end_all(self) -> None:
        """``end`` of every transfer."""
        for name in list(self._transfers):
            self.end(*name)

    def advance(
        self,
        sequence_id: str,
        generation: int,
        layer: int,
        first_token: int,
        num_tokens: int,
        buffers: Sequence[memoryview],
    ) -> PlacedTransfer:
        """These tokens are written next; the transfer they belong to.

        LocalProtocolError, in this order: no such transfer, no such layer, not the next tokens,
        sizes that disagree.
        """
        geometry = self.layout.geometry
        transfer = self._transfers.get((sequence_id, generation))
        if transfer is None:
            raise LocalProtocolError(
                f"cannot write sequence {sequence_id}: generation {generation} is not begun"
            )
        if not 0 <= layer < geometry.num_layers:
            raise LocalProtocolError(f"cannot write sequence {sequence_id}: no layer {layer}")
        end_token = first_token + num_tokens
        next_token = transfer.next_token[layer]
        if first_token != next_token or num_tokens < 1 or end_token > transfer.num_tokens:
            raise LocalProtocolError(
                f"cannot write tokens {first_token}..{end_token} of layer {layer} of sequence "
                f"{sequence_id}: its next token is {next_token} of {transfer.num_tokens}"
            )
        nbytes = total_nbytes(buffers)
        is_last = end_token == transfer.num_tokens
        expected_nbytes = geometry.write_nbytes(layer, num_tokens, is_last=is_last)
        if nbytes != expected_nbytes:
            raise LocalProtocolError(
                f"cannot write {num_tokens} tokens of layer {layer}: the buffers have {nbytes} "
                f"bytes, its regions have {expected_nbytes}"
            )
        # As of now: the next write may be queued before this one is made.
        transfer.next_token[layer] = end_token
        return transfer

    def parts(
        self,
        transfer: PlacedTransfer,
        layer: int,
        first_token: int,
        num_tokens: int,
        buffers: Sequence[memoryview],
    ) -> Iterator[tuple[int, int, list[Piece]]]:
        """(first token, number of tokens, pieces) of what one PLACED announces."""
        geometry = self.layout.geometry
        end_token = first_token + num_tokens
        is_last = end_token == transfer.num_tokens
        step = max(1, transfer.max_placed_nbytes // max(1, geometry.write_nbytes(layer, 1)))
        source = _Source(buffers)
        region_nbytes = geometry.region_nbytes(layer, num_tokens, is_last=is_last)
        starts = [sum(region_nbytes[:index]) for index in range(len(region_nbytes))]
        for first in range(first_token, end_token, step):
            count = min(step, end_token - first)
            spans_of_regions = self.layout.pieces(
                layer,
                transfer.block_table,
                first,
                count,
                is_last=is_last and first + count == end_token,
            )
            pieces: list[Piece] = []
            for index, spans in enumerate(spans_of_regions):
                region = geometry.layers[layer].regions[index]
                skipped = (first - first_token) if region.per == PER_TOKEN else 0
                start = starts[index] + skipped * geometry.row_nbytes(region)
                for offset, nbytes in spans:
                    for view in source.views(start, nbytes):
                        pieces.append(Piece(index, offset, view))
                        offset += view.nbytes
                    start += nbytes
            yield first, count, pieces


class _Source:
    """The buffers of one write as one run of bytes, without a copy."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._views: list[tuple[int, memoryview]] = []
        start = 0
        for buffer in buffers:
            view = byte_view(buffer)
            self._views.append((start, view))
            start += view.nbytes

    def views(self, start: int, nbytes: int) -> Iterator[memoryview]:
        """Bytes ``start .. start + nbytes - 1``, in as many pieces as the buffers have there."""
        end = start + nbytes
        for view_start, view in self._views:
            piece = view[max(0, start - view_start) : max(0, end - view_start)]
            if piece.nbytes:
                yield piece
