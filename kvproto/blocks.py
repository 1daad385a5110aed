"""Which block of a KV pool belongs to whom, and who may write it.

    free -> reserved -> writable -> committed -> free
                            └-> quarantined -> free         see state.BLOCK_TRANSITIONS

A block is *reserved* for its owner, *writable* from the moment a peer may write it, *committed*
once its contents are complete, *quarantined* while a peer that lost its permission might still
write. Allocation prefers neighbours, because neighbouring blocks are one piece of memory on the
wire (``geometry.slot_runs``). Pure bookkeeping, no memory is touched. Not thread-safe.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvproto.errors import LocalProtocolError, PoolExhausted
from kvproto.state import BLOCK_TRANSITIONS, BlockEvent, BlockState, InvalidTransition, advance


@dataclass(slots=True)
class Block:
    """One block. ``owner`` is a sequence id, "" when free; ``generation`` 0 unless writable."""

    state: BlockState = BlockState.FREE
    owner: str = ""
    generation: int = 0


class BlockPool:
    """All blocks of one pool.

    Args:
        num_blocks: blocks ``0 .. num_blocks - 1``, at least 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise LocalProtocolError(f"block pool: num_blocks is {num_blocks}, must be positive")
        self._blocks = [Block() for _ in range(num_blocks)]
        # Ascending: a bisection finds the block after ``after``, a scan finds the runs.
        self._free = list(range(num_blocks))

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that ``allocate`` can give out now."""
        return len(self._free)

    def allocate(self, owner: str, num_blocks: int, after: int | None = None) -> list[int]:
        """Reserve ``num_blocks`` for ``owner``; the ids in the order to use them.

        Prefers the blocks that directly follow block ``after``, else the smallest free run that
        holds all, else the free blocks in ascending order. All or nothing: PoolExhausted leaves
        everything as it was. LocalProtocolError if ``owner`` is empty or ``num_blocks`` negative.
        """
        if not owner or num_blocks < 0:
            raise LocalProtocolError(f"cannot allocate {num_blocks} blocks for owner {owner!r}")
        if num_blocks > len(self._free):
            raise PoolExhausted(
                f"{num_blocks} blocks asked for and {len(self._free)} of {len(self._blocks)} free"
            )
        if num_blocks == 0:
            return []
        start = self._start_index(num_blocks, after)
        block_ids = self._free[start : start + num_blocks]
        del self._free[start : start + num_blocks]
        self._move_all(block_ids, BlockEvent.ALLOCATE, "")
        for block_id in block_ids:
            self._blocks[block_id].owner = owner
        return block_ids

    def open_for_write(self, block_ids: Sequence[int], owner: str, generation: int) -> None:
        """Let a peer write reserved blocks of ``owner`` under ``generation``. All or nothing."""
        self._move_all(block_ids, BlockEvent.OPEN, owner)
        for block_id in block_ids:
            self._blocks[block_id].generation = generation

    def commit(self, block_ids: Sequence[int], owner: str) -> None:
        """The contents are complete: writable or reserved (filled here) becomes committed."""
        self._move_all(block_ids, BlockEvent.COMMIT, owner)
        for block_id in block_ids:
            self._blocks[block_id].generation = 0

    def free(self, block_ids: Sequence[int], owner: str) -> None:
        """Give back reserved or committed blocks of ``owner``. All or nothing.

        LocalProtocolError for writable or quarantined ones: a peer might still write them.
        """
        self._move_all(block_ids, BlockEvent.FREE, owner)
        self._put_back(block_ids)

    def quarantine(self, block_ids: Sequence[int], owner: str) -> None:
        """Withdraw write permission of writable blocks; they wait for proof. All or nothing."""
        self._move_all(block_ids, BlockEvent.QUARANTINE, owner)

    def release_quarantine(self, block_ids: Sequence[int], owner: str) -> None:
        """Nobody can write these quarantined blocks any more: free them. All or nothing."""
        self._move_all(block_ids, BlockEvent.RELEASE, owner)
        self._put_back(block_ids)

    def block(self, block_id: int) -> Block:
        """A copy of one block's entry. LocalProtocolError if there is no such block."""
        self._check_id(block_id)
        entry = self._blocks[block_id]
        return Block(entry.state, entry.owner, entry.generation)

    def stats(self) -> dict[str, int]:
        """Blocks per state; the values add up to ``num_blocks``."""
        counts = Counter(block.state for block in self._blocks)
        return {state.value: counts[state] for state in BlockState}

    def _start_index(self, num_blocks: int, after: int | None) -> int:
        """Index in the free list from which to take; see ``allocate``."""
        free = self._free
        if after is not None:
            index = bisect_left(free, after + 1)
            last = index + num_blocks - 1
            # Ascending and distinct: the run is unbroken if its ends are that far apart.
            if last < len(free) and free[index] == after + 1 and free[last] == after + num_blocks:
                return index
        best_start, best_run = 0, 0
        start = 0
        for index in range(1, len(free) + 1):
            if index < len(free) and free[index] == free[index - 1] + 1:
                continue
            run = index - start
            if run >= num_blocks and (not best_run or run < best_run):
                best_start, best_run = start, run
            start = index
        return best_start

    def _move_all(self, block_ids: Sequence[int], event: BlockEvent, owner: str) -> None:
        if len(set(block_ids)) != len(block_ids):
            raise LocalProtocolError(f"cannot {event.value}: a block is listed twice")
        if block_ids:
            self._check_id(min(block_ids))
            self._check_id(max(block_ids))
        entries = [self._blocks[block_id] for block_id in block_ids]
        next_states: list[BlockState] = []
        state: BlockState | None = None
        for block_id, entry in zip(block_ids, entries, strict=True):
            if entry.owner != owner:
                raise LocalProtocolError(
                    f"cannot {event.value} block {block_id} for {owner!r}: it belongs to "
                    f"{entry.owner!r}"
                )
            # Most often all have the same state: the table is asked once.
            if entry.state is not state:
                state = entry.state
                next_state = self._next_state(block_id, event)
            next_states.append(next_state)
        for entry, next_state in zip(entries, next_states, strict=True):
            entry.state = next_state

    def _next_state(self, block_id: int, event: BlockEvent) -> BlockState:
        try:
            return advance(BLOCK_TRANSITIONS, self._blocks[block_id].state, event)
        except InvalidTransition as exc:
            raise LocalProtocolError(f"block {block_id}: {exc}") from exc

    def _put_back(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            entry = self._blocks[block_id]
            entry.owner, entry.generation = "", 0
        # Two ascending runs, most often: sorting only merges them.
        self._free += block_ids
        self._free.sort()

    def _check_id(self, block_id: int) -> None:
        if not 0 <= block_id < len(self._blocks):
            raise LocalProtocolError(f"there is no block {block_id} of {len(self._blocks)}")
