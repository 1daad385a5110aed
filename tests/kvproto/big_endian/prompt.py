"""The KV of one prompt as numbers, as one host's memory, and on its way; the same on both hosts.

Memory is made of numbers and read back as numbers with ``array``, which uses the host's own byte
order. Nothing here knows which host it runs on.
"""

from array import array
from collections.abc import Iterator
from typing import Final

from kvproto.blocks import BlockPool
from kvproto.digest import RegionDigests
from kvproto.geometry import KvGeometry, Layer, PoolLayout, Region
from kvproto.lease import LeaseTable
from kvproto.messages import Commit, Prefill
from kvproto.tcp import Peer, TcpWriter

DTYPES: Final = ("float64", "float32", "float16", "bfloat16", "int8")
SEQUENCE_ID: Final = "seq-1"
GENERATION: Final = 7
NUM_TOKENS: Final = 300
SECRET: Final = b"the same on both hosts"
# More than one read brings, and a last WRITE that is not full.
_CHUNK_TOKENS: Final = 128
_BLOCK_SIZE: Final = 16
# Python has no 16-bit floats in arrays: their bit patterns are compared, as are int8's elements.
_TYPECODES: Final = {"float64": "d", "float32": "f", "float16": "H", "bfloat16": "H", "int8": "b"}
_SCALE_TYPECODE: Final = "f"

Numbers = list[int] | list[float]


def geometry_of(dtype: str) -> KvGeometry:
    """Attention, a latent for all heads, and a state per sequence."""
    return KvGeometry(
        (
            Layer("attention", (Region("k", 2, 32), Region("v", 2, 32))),
            Layer("latent", (Region("latent", 1, 80), Region("state", 3, 8, "sequence"))),
        ),
        dtype,
    )


def columns_of(dtype: str, region: Region) -> list[tuple[str, int]]:
    """(typecode, count) of the numbers in one row, in the order in which they lie there."""
    num_elements = region.num_heads * region.head_dim
    scales = [(_SCALE_TYPECODE, region.num_heads)] if dtype == "int8" else []
    return [*scales, (_TYPECODES[dtype], num_elements)]


def row_numbers(typecode: str, count: int, seed: int) -> Numbers:
    """Numbers that the type holds exactly, others in each row."""
    indices = range(seed * 131, seed * 131 + count)
    if typecode == "b":
        return [index * 7 % 256 - 128 for index in indices]
    if typecode == "H":
        return [index * 40503 % 65536 for index in indices]
    return [(index - 5000) / 64 for index in indices]


def row_seeds(geometry: KvGeometry) -> Iterator[tuple[int, int, Region, list[int]]]:
    """(layer, region, its description, one seed for each row of it)."""
    for layer, held in enumerate(geometry.layers):
        for index, region in enumerate(held.regions):
            num_rows = NUM_TOKENS if region.per == "token" else 1
            start = 1000 * (10 * layer + index)
            yield layer, index, region, list(range(start, start + num_rows))


def memory_of(geometry: KvGeometry) -> dict[tuple[int, int], memoryview]:
    """The bytes of each region, row after row, as this host holds the numbers."""
    return {
        (layer, index): memoryview(
            b"".join(
                array(typecode, row_numbers(typecode, count, seed)).tobytes()
                for seed in seeds
                for typecode, count in columns_of(geometry.dtype, region)
            )
        )
        for layer, index, region, seeds in row_seeds(geometry)
    }


async def send(peer: Peer, geometry: KvGeometry) -> Commit:
    """Send everything as a prefill worker does, and return the COMMIT."""
    writer, digests, memory = (
        TcpWriter(peer, geometry),
        RegionDigests(geometry),
        memory_of(geometry),
    )
    nbytes = 0
    for first in range(0, NUM_TOKENS, _CHUNK_TOKENS):
        count = min(_CHUNK_TOKENS, NUM_TOKENS - first)
        for layer, held in enumerate(geometry.layers):
            pieces = []
            sizes = geometry.region_nbytes(layer, count, is_last=first + count == NUM_TOKENS)
            for index, region in enumerate(held.regions):
                start = first * geometry.row_nbytes(region) if region.per == "token" else 0
                pieces.append(memory[layer, index][start : start + sizes[index]])
                digests.update(layer, index, pieces[-1])
            await writer.write(SEQUENCE_ID, GENERATION, layer, first, count, pieces)
            nbytes += sum(sizes)
    commit = Commit(SEQUENCE_ID, GENERATION, NUM_TOKENS, nbytes, digests.values(), 0.0, 0.0, 0.0)
    await peer.send(commit)
    return commit


def request() -> Prefill:
    """What the receiver asks with."""
    return Prefill(SEQUENCE_ID, GENERATION, tokens=list(range(NUM_TOKENS)), timeout_s=60.0)


class Receiver:
    """A pool with one lease, for the prompt; ``leases`` is the landing."""

    def __init__(self, geometry: KvGeometry, *, writer: str) -> None:
        num_blocks = 40
        self.layout = PoolLayout(geometry, num_blocks, _BLOCK_SIZE)
        self.pool = memoryview(bytearray(self.layout.nbytes))
        blocks = BlockPool(num_blocks)
        self.leases = LeaseTable(self.layout, self.pool, blocks)
        # Not in ascending order, so that a body goes to several places.
        blocks.allocate("other", num_blocks)
        blocks.free([*range(1, 20, 2), *range(25, 40)], "other")
        self.table = blocks.allocate(SEQUENCE_ID, -(-NUM_TOKENS // _BLOCK_SIZE))
        self.leases.grant(SEQUENCE_ID, GENERATION, self.table, NUM_TOKENS, writer=writer)

    def differences(self) -> list[str]:
        """Rows of the pool that are not the numbers they should be, the first few in words."""
        geometry = self.layout.geometry
        found: list[str] = []
        for layer, index, region, seeds in row_seeds(geometry):
            pieces = self.layout.pieces(layer, self.table, 0, NUM_TOKENS, is_last=True)[index]
            raw = b"".join(self.pool[start : start + nbytes] for start, nbytes in pieces)
            row_nbytes = len(raw) // len(seeds)
            for row, seed in enumerate(seeds):
                rest = raw[row * row_nbytes : (row + 1) * row_nbytes]
                for typecode, count in columns_of(geometry.dtype, region):
                    numbers = array(typecode)
                    numbers.frombytes(rest[: count * numbers.itemsize])
                    rest = rest[count * numbers.itemsize :]
                    if numbers.tolist() != row_numbers(typecode, count, seed):
                        found.append(f"{region.name} row {row}: {numbers.tolist()[:3]} ...")
                if rest:
                    found.append(f"{region.name} row {row} has {len(rest)} bytes too many")
        return found[:5]
