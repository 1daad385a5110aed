"""Leases in the client's own memory: each transfer fills one ``KvCache``.

WRITEs land in the cache itself. A carrier that writes into memory uses a ``LandingPool``, from
which the rows are copied into the cache when they are announced.
"""

from dataclasses import dataclass, field

from kvproto.blocks import BlockPool
from kvproto.client.landing_pool import LandingPool
from kvproto.errors import LeaseError, LocalProtocolError
from kvproto.geometry import KvGeometry
from kvproto.header import HOST_ORDER, ByteOrder
from kvproto.kv_cache import BLOCK_TABLE, KvCache
from kvproto.lease import LeaseTable
from kvproto.messages import Commit, Placed, Write


@dataclass(slots=True)
class _Transfer:
    """``pool`` and ``block_table``: where a carrier places the rows; None if they come as WRITE."""

    sequence_id: str
    cache: KvCache
    leases: LeaseTable
    pool: LandingPool | None = None
    block_table: list[int] = field(default_factory=list)
    has_host_order: bool = True


class CacheLanding:
    """Implements ``carrier.Landing`` for any number of caches, each with a lease of its own."""

    def __init__(self) -> None:
        self._transfers: dict[int, _Transfer] = {}

    @property
    def geometry(self) -> KvGeometry:
        """Of the cache granted last. LocalProtocolError if there is none."""
        if not self._transfers:
            raise LocalProtocolError("this client has granted no lease")
        return next(reversed(self._transfers.values())).cache.geometry

    def grant(self, sequence_id: str, generation: int, cache: KvCache, *, writer: str) -> None:
        """Let one worker fill ``cache``. LocalProtocolError: a generation in use."""
        self._check_new(generation)
        blocks = BlockPool(1)
        blocks.allocate(sequence_id, 1)
        leases = LeaseTable(cache.layout, cache.memory, blocks)
        leases.grant(sequence_id, generation, BLOCK_TABLE, cache.num_tokens, writer=writer)
        self._transfers[generation] = _Transfer(sequence_id, cache, leases)

    def grant_placed(
        self,
        sequence_id: str,
        generation: int,
        cache: KvCache,
        pool: LandingPool,
        block_table: list[int],
        *,
        writer: str,
    ) -> None:
        """Let one worker write into blocks that ``pool`` gave for this sequence.

        LocalProtocolError: a generation in use; what else ``LeaseTable.grant`` raises. The blocks
        are then still the caller's; else ``forget`` puts them back.
        """
        self._check_new(generation)
        pool.leases.grant(
            sequence_id, generation, block_table, cache.num_tokens, writer=writer, is_placed=True
        )
        self._transfers[generation] = _Transfer(
            sequence_id, cache, pool.leases, pool, list(block_table)
        )

    def landed_nbytes(self, generation: int) -> int:
        """Body bytes that have landed so far."""
        return self._transfers[generation].leases.landed_nbytes(generation)

    def commit(self, commit: Commit) -> list[int]:
        """Check counts and digests, end the lease; the digests of the rows as they lie here.

        Errors as ``LeaseTable.check``. Reads all rows if the worker has the other byte order.
        """
        transfer = self._transfers[commit.generation]
        transfer.leases.commit(commit)
        return list(commit.digests) if transfer.has_host_order else transfer.cache.digests()

    def revoke(self, generation: int) -> None:
        """Refuse every further WRITE; nothing after ``commit``."""
        self._transfers[generation].leases.revoke(generation)

    def quiesced(self, generation: int) -> bool:
        """No WRITE is half received."""
        return self._transfers[generation].leases.quiesced(generation)

    def forget(self, generation: int) -> None:
        """The transfer is over and nobody writes to its memory any more."""
        transfer = self._transfers.pop(generation)
        if transfer.pool is not None:
            transfer.pool.put_back(transfer.sequence_id, generation, transfer.block_table)

    def destination(
        self, write: Write, body_nbytes: int, shape_word: int, writer: str
    ) -> list[memoryview]:
        """See ``carrier.Landing``."""
        leases = self._transfer(write).leases
        return leases.destination(write, body_nbytes, shape_word, writer)

    def received(self, write: Write, piece: memoryview) -> None:
        """See ``carrier.Landing``."""
        self._transfers[write.generation].leases.received(write, piece)

    def landed(self, write: Write, order: ByteOrder) -> None:
        """See ``carrier.Landing``."""
        transfer = self._transfers[write.generation]
        transfer.has_host_order = transfer.has_host_order and order is HOST_ORDER
        transfer.leases.landed(write, order)

    def abandoned(self, write: Write) -> None:
        """See ``carrier.Landing``."""
        self._transfers[write.generation].leases.abandoned(write)

    def placed(self, placed: Placed, writer: str) -> None:
        """See ``carrier.Landing``; the rows are in the cache then."""
        transfer = self._transfer(placed)
        transfer.leases.placed(placed, writer)
        assert transfer.pool is not None, "other leases are for WRITE alone"
        transfer.pool.copy(transfer.block_table, placed, transfer.cache)

    def _check_new(self, generation: int) -> None:
        if generation in self._transfers:
            raise LocalProtocolError(f"generation {generation} is in use")

    def _transfer(self, write: Write | Placed) -> _Transfer:
        transfer = self._transfers.get(write.generation)
        if transfer is None:
            raise LeaseError(
                f"unknown sequence {write.sequence_id}: it has no lease here",
                sequence_id=write.sequence_id,
            )
        return transfer
