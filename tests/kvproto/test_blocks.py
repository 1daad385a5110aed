"""The block pool against a simple model of it."""

import itertools

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvproto.blocks import BlockPool
from kvproto.errors import LocalProtocolError, PoolExhausted
from kvproto.state import BlockState

NUM_BLOCKS = 12


def pool_with_free(free: list[int], num_blocks: int = NUM_BLOCKS) -> BlockPool:
    """A pool in which exactly these blocks are free."""
    pool = BlockPool(num_blocks)
    pool.allocate("x", num_blocks)
    pool.free(free, "x")
    return pool


def test_blocks_after_the_last_one_are_preferred():
    pool = pool_with_free([1, 2, 5, 6, 7, 9])
    assert pool.allocate("s", 2, after=4) == [5, 6]
    assert pool.allocate("s", 1, after=6) == [7]


@pytest.mark.parametrize("after", [0, 2, 7, 10, 11])
def test_without_room_behind_the_smallest_run_is_taken(after):
    pool = pool_with_free([1, 2, 3, 5, 6, 7, 8, 10])
    assert pool.allocate("s", 3, after=after) == [1, 2, 3]


def test_a_run_that_is_too_small_is_not_taken_for_more():
    assert pool_with_free([0, 1, 4, 5, 6]).allocate("s", 3) == [4, 5, 6]


def test_of_two_runs_the_smaller_wherever_it_is():
    assert pool_with_free([0, 1, 2, 3, 6, 7]).allocate("s", 2) == [6, 7]
    assert pool_with_free([0, 1, 4, 5, 6, 7]).allocate("s", 2) == [0, 1]


def test_of_two_equal_runs_the_first():
    assert pool_with_free([0, 1, 4, 5]).allocate("s", 2) == [0, 1]


def test_without_a_run_scattered_blocks_in_order():
    assert pool_with_free([9, 1, 5, 6]).allocate("s", 3) == [1, 5, 6]


def test_nothing_for_nothing():
    assert BlockPool(1).allocate("s", 0) == []


def test_exhausted_leaves_everything_as_it_was():
    pool = pool_with_free([1, 2])
    with pytest.raises(PoolExhausted, match="3 blocks asked for and 2 of 12 free"):
        pool.allocate("s", 3)
    assert pool.num_free_blocks == 2
    assert pool.allocate("s", 2) == [1, 2]


@pytest.mark.parametrize(("owner", "num_blocks"), [("", 1), ("s", -1)])
def test_an_impossible_allocation(owner, num_blocks):
    with pytest.raises(LocalProtocolError):
        BlockPool(4).allocate(owner, num_blocks)


def test_a_pool_has_blocks():
    with pytest.raises(LocalProtocolError):
        BlockPool(0)


def test_the_life_of_a_block():
    pool = BlockPool(2)
    blocks = pool.allocate("s", 2)
    pool.open_for_write(blocks, "s", 7)
    entry = pool.block(0)
    assert (entry.state, entry.owner, entry.generation) == (BlockState.WRITABLE, "s", 7)
    pool.commit(blocks, "s")
    assert pool.block(0).generation == 0
    pool.free(blocks, "s")
    assert pool.block(0).owner == ""
    assert pool.stats() == {
        "free": 2,
        "reserved": 0,
        "writable": 0,
        "committed": 0,
        "quarantined": 0,
    }


def test_a_copy_of_an_entry_changes_nothing():
    pool = BlockPool(1)
    pool.block(0).owner = "x"
    assert pool.block(0).owner == ""


def test_a_writable_block_cannot_be_freed():
    pool = BlockPool(2)
    blocks = pool.allocate("s", 2)
    pool.open_for_write(blocks[:1], "s", 1)
    with pytest.raises(LocalProtocolError, match="free is not allowed in state writable"):
        pool.free(list(reversed(blocks)), "s")
    # All or nothing: the reserved one was not freed either.
    assert pool.block(1).state is BlockState.RESERVED


def test_a_quarantined_block_cannot_be_freed_or_opened():
    pool = BlockPool(1)
    blocks = pool.allocate("s", 1)
    pool.open_for_write(blocks, "s", 1)
    pool.quarantine(blocks, "s")
    for forbidden in (
        lambda: pool.free(blocks, "s"),
        lambda: pool.open_for_write(blocks, "s", 2),
        lambda: pool.commit(blocks, "s"),
    ):
        with pytest.raises(LocalProtocolError):
            forbidden()
    with pytest.raises(PoolExhausted):
        pool.allocate("t", 1)
    pool.release_quarantine(blocks, "s")
    assert pool.allocate("t", 1) == blocks


@pytest.mark.parametrize("ids", [[0, 0], [4], [-1]])
def test_impossible_block_ids(ids):
    pool = BlockPool(4)
    pool.allocate("s", 4)
    with pytest.raises(LocalProtocolError):
        pool.free(ids, "s")


def test_blocks_of_somebody_else():
    pool = BlockPool(4)
    blocks = pool.allocate("s", 1)
    with pytest.raises(LocalProtocolError, match="belongs to 's'"):
        pool.free(blocks, "t")
    with pytest.raises(LocalProtocolError):
        pool.free([3], "t")


class PoolMachine(RuleBasedStateMachine):
    """Random calls, compared with a dictionary of what each block should be."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.groups: dict[tuple[str, int], str] = {}
        self.blocks: dict[tuple[str, int], list[int]] = {}
        self.numbers = itertools.count(1)

    def group(self, data, *states):
        names = sorted(name for name, state in self.groups.items() if state in states)
        return data.draw(st.sampled_from(names)) if names else None

    @rule(num_blocks=st.integers(1, 6), after=st.none() | st.integers(0, NUM_BLOCKS - 1))
    def allocate(self, num_blocks, after):
        group = ("s", next(self.numbers))
        owner = f"s{group[1]}"
        num_free = self.pool.num_free_blocks
        if num_blocks > num_free:
            with pytest.raises(PoolExhausted):
                self.pool.allocate(owner, num_blocks, after)
            return
        blocks = self.pool.allocate(owner, num_blocks, after)
        assert len(set(blocks)) == num_blocks
        self.groups[group], self.blocks[group] = "reserved", blocks

    def move(self, data, start, call, end):
        group = self.group(data, *start)
        if group is None:
            return
        owner = f"s{group[1]}"
        call(self.blocks[group], owner)
        if end == "free":
            del self.groups[group], self.blocks[group]
        else:
            self.groups[group] = end

    @rule(data=st.data())
    def open_for_write(self, data):
        self.move(
            data,
            ["reserved"],
            lambda blocks, owner: self.pool.open_for_write(blocks, owner, 5),
            "writable",
        )

    @rule(data=st.data())
    def commit(self, data):
        self.move(data, ["reserved", "writable"], self.pool.commit, "committed")

    @rule(data=st.data())
    def free(self, data):
        self.move(data, ["reserved", "committed"], self.pool.free, "free")

    @rule(data=st.data())
    def quarantine(self, data):
        self.move(data, ["writable"], self.pool.quarantine, "quarantined")

    @rule(data=st.data())
    def release_quarantine(self, data):
        self.move(data, ["quarantined"], self.pool.release_quarantine, "free")

    @precondition(lambda self: "writable" in self.groups.values())
    @rule(data=st.data())
    def freeing_what_may_be_written_fails(self, data):
        group = self.group(data, "writable", "quarantined")
        with pytest.raises(LocalProtocolError):
            self.pool.free(self.blocks[group], f"s{group[1]}")

    @invariant()
    def every_block_is_in_one_place(self):
        held = list(itertools.chain(*self.blocks.values()))
        assert len(held) == len(set(held)) == NUM_BLOCKS - self.pool.num_free_blocks
        assert sum(self.pool.stats().values()) == self.pool.num_blocks == NUM_BLOCKS
        for group, state in self.groups.items():
            for block_id in self.blocks[group]:
                entry = self.pool.block(block_id)
                assert (entry.state.value, entry.owner) == (state, f"s{group[1]}")


TestPoolMachine = PoolMachine.TestCase


def test_no_blocks_at_all_are_no_fault():
    pool = BlockPool(2)
    pool.open_for_write([], "a", 1)
    pool.free([], "a")
    assert pool.num_free_blocks == 2
