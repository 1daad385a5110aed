"""Digests of a transfer: one per (layer, region), over the region's bytes in token order.

    digests[2 * layer + region] = xxh3-64 (seed 0) of token 0's bytes, token 1's bytes, ...

The key is the logical coordinate, not the slot, so that both sides compute the same numbers
whatever their blocks are. One digest runs over a whole region: swapped tokens or blocks change
it, which a sum of per-block checksums would not show. Source: docs/wire.md section 7.
"""

from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64

from kvproto.buffer import Buffer, byte_view, swap_in_place
from kvproto.errors import DigestMismatch, LocalProtocolError
from kvproto.geometry import KEY_REGION, NUM_REGIONS, KvGeometry, PoolLayout, slot_runs
from kvproto.header import HOST_ORDER, ByteOrder

_PIECE_NBYTES: Final = 64 * 1024


class RegionDigests:
    """Digests of bytes that arrive piece by piece, each region in token order."""

    def __init__(self, geometry: KvGeometry) -> None:
        self._num_layers = geometry.num_layers
        self._hashers = [xxh3_64() for _ in range(NUM_REGIONS * geometry.num_layers)]

    def update(self, layer: int, region: int, buffer: Buffer) -> None:
        """Append bytes to one region. LocalProtocolError if there is no such region."""
        if not (0 <= layer < self._num_layers and 0 <= region < NUM_REGIONS):
            raise LocalProtocolError(f"digest: no layer {layer} region {region}")
        self._hashers[NUM_REGIONS * layer + region].update(byte_view(buffer))

    def values(self) -> list[int]:
        """The digests so far: 2 * num_layers, layer-major, K then V."""
        return [hasher.intdigest() for hasher in self._hashers]


def digest_blocks(
    layout: PoolLayout,
    pool: memoryview,
    block_table: Sequence[int],
    num_tokens: int,
    *,
    order: ByteOrder = HOST_ORDER,
) -> list[int]:
    """Digests of ``num_tokens`` tokens as they lie in a pool of ``layout``.

    ``order`` is the byte order of the side whose digests these are compared with: the digest is
    of the elements as the sender's memory holds them. LocalProtocolError if the block table is
    too short. Takes as long as hashing the bytes; call it in a thread for large sequences.
    """
    runs = slot_runs(block_table, 0, num_tokens, layout.block_size)
    digests = RegionDigests(layout.geometry)
    for layer in range(layout.geometry.num_layers):
        for region in range(NUM_REGIONS):
            for offset, nbytes in layout.spans(layer, region, runs):
                view = pool[offset : offset + nbytes]
                if order is HOST_ORDER:
                    digests.update(layer, region, view)
                else:
                    _update_swapped(digests, layer, region, view, layout.geometry)
    return digests.values()


def _update_swapped(
    digests: RegionDigests, layer: int, region: int, view: memoryview, geometry: KvGeometry
) -> None:
    for start in range(0, view.nbytes, _PIECE_NBYTES):
        piece = bytearray(view[start : start + _PIECE_NBYTES])
        swap_in_place(memoryview(piece), geometry.element_nbytes)
        digests.update(layer, region, piece)


def check_digests(
    geometry: KvGeometry, announced: Sequence[int], computed: Sequence[int], *, sequence_id: str
) -> None:
    """DigestMismatch naming the first region whose bytes are not those that were sent."""
    if len(announced) != len(computed):
        raise DigestMismatch(
            f"COMMIT has {len(announced)} digests, this model needs {len(computed)}",
            sequence_id=sequence_id,
        )
    for index, (theirs, ours) in enumerate(zip(announced, computed, strict=True)):
        if theirs != ours:
            layer, region = divmod(index, NUM_REGIONS)
            raise DigestMismatch(
                f"{'K' if region == KEY_REGION else 'V'} of layer "
                f"{geometry.layer_names[layer]} has digest {ours:#018x} here, "
                f"{theirs:#018x} at the sender",
                sequence_id=sequence_id,
            )
