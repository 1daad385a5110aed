"""Digests of a transfer: one per region of each layer, over the region's bytes in token order.

    digests[region of layer, counted over all layers] = xxh3-64 (seed 0) of its first row, ...

For ordinary attention that is K of layer 0, V of layer 0, K of layer 1, and so on. The key is the
logical coordinate, not the slot, so that both sides compute the same numbers whatever their blocks
are. One digest runs over a whole region: swapped tokens or blocks change it, which a sum of
per-block checksums would not show. The bytes are those that travel, in the sender's byte order.
Source: docs/wire.md section 7.
"""

from collections.abc import Iterator, Sequence

from xxhash import xxh3_64

from kvproto.buffer import Buffer, byte_view
from kvproto.errors import DigestMismatch, LocalProtocolError
from kvproto.geometry import KvGeometry, PoolLayout


class RegionDigests:
    """Digests of bytes that go piece by piece, each region in token order.

    A WRITE is taken in two steps, because it may be given up half-way: ``begin``, then its bytes
    into the ``BodyDigests``, then ``accept``.
    """

    def __init__(self, geometry: KvGeometry) -> None:
        self._layers = [[xxh3_64() for _ in layer.regions] for layer in geometry.layers]

    def begin(self, layer: int, region_nbytes: Sequence[int]) -> "BodyDigests":
        """Digests of the regions of one layer, to be continued by a body of these sizes."""
        return BodyDigests([hasher.copy() for hasher in self._layers[layer]], region_nbytes)

    def accept(self, layer: int, body: "BodyDigests") -> None:
        """The body is complete: its bytes belong to the regions."""
        self._layers[layer] = body.hashers

    def update(self, layer: int, region: int, buffer: Buffer) -> None:
        """Append bytes to one region. LocalProtocolError if there is no such region."""
        if not (0 <= layer < len(self._layers) and 0 <= region < len(self._layers[layer])):
            raise LocalProtocolError(f"digest: no layer {layer} region {region}")
        self._layers[layer][region].update(byte_view(buffer))

    def values(self) -> list[int]:
        """The digests so far, layer by layer, region by region."""
        return [hasher.intdigest() for hashers in self._layers for hasher in hashers]


class BodyDigests:
    """The bytes of one body, in order, each into the digest of its region."""

    def __init__(self, hashers: list[xxh3_64], region_nbytes: Sequence[int]) -> None:
        self.hashers = hashers
        self._left = list(region_nbytes)
        self._region = 0

    def update(self, piece: memoryview) -> None:
        """Take bytes; the pieces of a body add up to its regions, the caller has checked that."""
        while piece.nbytes:
            taken = piece[: self._left[self._region]]
            self.hashers[self._region].update(taken)
            self._left[self._region] -= taken.nbytes
            piece = piece[taken.nbytes :]
            if piece.nbytes:
                self._region += 1


def digest_blocks(
    layout: PoolLayout, pool: memoryview, block_table: Sequence[int], num_tokens: int
) -> list[int]:
    """Digests of ``num_tokens`` tokens as they lie in a pool of ``layout``.

    Each layer from its first needed token on, as it travels. LocalProtocolError if the block
    table is too short. Takes as long as hashing the bytes; call it in a thread for large
    sequences.
    """
    digests = RegionDigests(layout.geometry)
    for layer, region, view in blocks_views(layout, pool, block_table, num_tokens):
        digests.update(layer, region, view)
    return digests.values()


def blocks_views(
    layout: PoolLayout, pool: memoryview, block_table: Sequence[int], num_tokens: int
) -> Iterator[tuple[int, int, memoryview]]:
    """(layer, region, bytes) of a prompt in a pool, in the order in which they are digested."""
    for index, layer in enumerate(layout.geometry.layers):
        first = layer.first_needed_token(num_tokens)
        pieces = layout.pieces(index, block_table, first, num_tokens - first, is_last=True)
        for region, spans in enumerate(pieces):
            for offset, nbytes in spans:
                yield index, region, pool[offset : offset + nbytes]


def check_digests(
    geometry: KvGeometry, announced: Sequence[int], computed: Sequence[int], *, sequence_id: str
) -> None:
    """DigestMismatch naming the first region whose bytes are not those that were sent."""
    if len(announced) != len(computed):
        raise DigestMismatch(
            f"COMMIT has {len(announced)} digests, this model needs {len(computed)}",
            sequence_id=sequence_id,
        )
    names = [(layer.name, region.name) for layer in geometry.layers for region in layer.regions]
    for (layer, region), theirs, ours in zip(names, announced, computed, strict=True):
        if theirs != ours:
            raise DigestMismatch(
                f"region {region} of layer {layer} has digest {ours:#018x} here, "
                f"{theirs:#018x} at the sender",
                sequence_id=sequence_id,
            )
