"""Memory that a carrier writes into, in blocks, shared by the transfers of one client.

A carrier that writes into memory needs it registered, which is costly, so it is done once and
rows are copied from here into the cache of their transfer as they are announced.
"""

import asyncio
import mmap
from typing import Final

from kvproto.blocks import BlockPool
from kvproto.errors import LocalProtocolError
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.kv_cache import BLOCK_TABLE, KvCache
from kvproto.lease import LeaseTable
from kvproto.messages import Placed

BLOCK_SIZE: Final = 16


class LandingPool:
    """Blocks for as many transfers as fit; the others wait.

    Args:
        geometry: of the worker that writes.
        nbytes: at most so much memory is taken.

    LocalProtocolError: not even one block fits.

    Attributes:
        layout, memory: the pool.
        leases: who may write which block.
    """

    def __init__(self, geometry: KvGeometry, nbytes: int) -> None:
        block_nbytes = PoolLayout(geometry, 1, BLOCK_SIZE).nbytes
        num_blocks = nbytes // block_nbytes
        if num_blocks < 1:
            raise LocalProtocolError(
                f"the landing pool has {nbytes} bytes (pool_nbytes), one block of {BLOCK_SIZE} "
                f"tokens of this model needs {block_nbytes}"
            )
        self.layout = PoolLayout(geometry, num_blocks, BLOCK_SIZE)
        # Unmapped with the last view of it.
        self.memory = memoryview(
            mmap.mmap(-1, self.layout.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        )
        self._blocks = BlockPool(num_blocks)
        self.leases = LeaseTable(self.layout, self.memory, self._blocks)
        # First come, first served: a large prompt is not overtaken for ever by small ones.
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    def check(self, num_tokens: int) -> None:
        """LocalProtocolError unless so many tokens fit when nobody else uses the pool."""
        layout = self.layout
        if num_tokens > layout.num_slots:
            raise LocalProtocolError(
                f"the KV of {num_tokens} tokens does not fit into the landing pool of "
                f"{layout.num_slots} tokens ({layout.nbytes} bytes); give the client a larger "
                "pool_nbytes, or carrier tcp"
            )

    async def take(self, sequence_id: str, num_tokens: int) -> list[int]:
        """Blocks for so many tokens, once they are free. LocalProtocolError as ``check``."""
        self.check(num_tokens)
        num_blocks = -(-num_tokens // self.layout.block_size)
        async with self._turn:
            while self._blocks.num_free_blocks < num_blocks:
                self._freed.clear()
                await self._freed.wait()
            return self._blocks.allocate(sequence_id, num_blocks)

    def put_back(self, sequence_id: str, generation: int, block_table: list[int]) -> None:
        """Nobody writes to these blocks any more, if ever anybody might: they are free."""
        if self.leases.revoke(generation):
            self.leases.release(generation)
        else:
            self._blocks.free(block_table, sequence_id)
        self._freed.set()

    def copy(self, block_table: list[int], placed: Placed, cache: KvCache) -> None:
        """Bring the rows of ``placed`` into ``cache``, which has the same geometry."""
        layer = self.layout.geometry.layer_names.index(placed.layer)
        first, count = placed.first_token, placed.num_tokens
        is_last = first + count == cache.num_tokens
        sources = self.layout.pieces(layer, block_table, first, count, is_last=is_last)
        targets = cache.layout.pieces(layer, BLOCK_TABLE, first, count, is_last=is_last)
        for spans, target_spans in zip(sources, targets, strict=True):
            # In a cache the rows of a region are one piece.
            for end, _ in target_spans:
                for start, nbytes in spans:
                    cache.memory[end : end + nbytes] = self.memory[start : start + nbytes]
                    end += nbytes

    def stats(self) -> dict[str, int]:
        """Blocks per state, and leases."""
        return {**self._blocks.stats(), **self.leases.stats()}
