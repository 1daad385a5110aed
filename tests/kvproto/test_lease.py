"""Leases: every refusal in its order, and a random walk that must never mix two sequences."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvproto.blocks import BlockPool
from kvproto.errors import LeaseError, LocalProtocolError, PoolExhausted
from kvproto.geometry import KvGeometry, PoolLayout, slot_runs
from kvproto.lease import LeaseTable
from kvproto.messages import Commit, Write
from kvproto.state import BlockState

BLOCK_SIZE = 4
NUM_BLOCKS = 8
SMALL = KvGeometry(2, 1, 2, "float16", ("a", "b"))


class Table:
    """A lease table with its pool and blocks."""

    def __init__(self, geometry=SMALL):
        self.layout = PoolLayout(geometry, NUM_BLOCKS, BLOCK_SIZE)
        self.pool = memoryview(bytearray(self.layout.nbytes))
        self.blocks = BlockPool(NUM_BLOCKS)
        self.leases = LeaseTable(self.layout, self.pool, self.blocks)

    def grant(self, sequence_id="s", generation=1, num_tokens=6, writer=""):
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        block_table = self.blocks.allocate(sequence_id, num_blocks)
        self.leases.grant(sequence_id, generation, block_table, num_tokens, writer=writer)
        return block_table

    def nbytes(self, write):
        return self.layout.geometry.write_nbytes(write.num_tokens)

    def open(self, write, body_nbytes=None, writer="p"):
        nbytes = self.nbytes(write) if body_nbytes is None else body_nbytes
        return self.leases.destination(write, nbytes, writer)

    def land(self, write, value=1):
        for piece in self.open(write):
            piece[:] = bytes([value]) * piece.nbytes
        self.leases.landed(write)


@pytest.fixture
def table():
    return Table()


WRITE = Write("s", 1, "a", 0, 6)
COMMIT = Commit("s", 1, 6, 2 * SMALL.write_nbytes(6), [1, 2, 3, 4], 0.0, 0.0, 0.0)


def test_a_whole_transfer(table):
    blocks = table.grant()
    assert table.blocks.stats()["writable"] == 2
    for layer in ("a", "b"):
        table.land(Write("s", 1, layer, 0, 4))
        table.land(Write("s", 1, layer, 4, 2))
    assert table.leases.landed_nbytes(1) == COMMIT.nbytes
    table.leases.check(COMMIT)
    table.leases.commit(COMMIT)
    assert table.leases.stats() == {"num_leases": 0, "num_revoked": 0, "num_writing": 0}
    assert table.blocks.stats()["committed"] == 2
    table.blocks.free(blocks, "s")


def test_the_destination_is_k_then_v_of_the_right_slots(table):
    table.blocks.allocate("x", NUM_BLOCKS)
    table.blocks.free([1, 4], "x")
    block_table = table.blocks.allocate("s", 2)
    assert block_table == [1, 4]
    table.leases.grant("s", 1, block_table, 7)
    pieces = table.open(Write("s", 1, "b", 0, 7))
    # Memory addresses by writing through the pieces.
    for value, piece in enumerate(pieces, start=1):
        piece[:] = bytes([value]) * piece.nbytes
    token_nbytes = SMALL.token_nbytes
    for region, values in ((0, [1, 2]), (1, [3, 4])):
        runs = slot_runs(block_table, 0, 7, BLOCK_SIZE)
        for value, (slot, num_tokens) in zip(values, runs, strict=True):
            start = table.layout.offset(1, region, slot)
            assert set(table.pool[start : start + num_tokens * token_nbytes]) == {value}


def test_the_destination_follows_the_block_table(table):
    table.grant("x", 9, 8)
    (first, second) = table.grant(num_tokens=8)
    assert sum(piece.nbytes for piece in table.open(replace(WRITE, num_tokens=8))) == 2 * 8 * 4
    assert (first, second) == (2, 3)


def test_blocks_behind_the_tokens_stay_reserved(table):
    block_table = table.blocks.allocate("s", 4)
    table.leases.grant("s", 1, block_table, 5)
    assert table.blocks.stats()["writable"] == 2
    assert table.blocks.stats()["reserved"] == 2


REFUSALS = [
    (replace(WRITE, sequence_id="other"), None, "p", "unknown sequence other"),
    (replace(WRITE, generation=2), None, "p", "stale generation 2"),
    (WRITE, None, "q", "leased to p, not to q"),
    (replace(WRITE, layer="c"), None, "p", "unknown layer 'c'"),
    (replace(WRITE, num_tokens=7), None, "p", "beyond the 6 granted"),
    (replace(WRITE, first_token=1 << 27), None, "p", "beyond"),
    (replace(WRITE, first_token=1, num_tokens=1), None, "p", "expects token 0 next"),
    (WRITE, 1, "p", "has 1 bytes instead of"),
]


@pytest.mark.parametrize(("write", "body_nbytes", "writer", "reason"), REFUSALS)
def test_refusals(table, write, body_nbytes, writer, reason):
    table.grant(writer="p")
    with pytest.raises(LeaseError, match=reason) as excinfo:
        table.open(write, body_nbytes, writer)
    assert excinfo.value.sequence_id == write.sequence_id
    # Nothing is being written and the right write still passes.
    assert table.leases.quiesced(1)
    table.open(WRITE)


def test_refusals_come_in_the_documented_order(table):
    """Each write has every fault from its place on; the first is reported."""
    table.grant(writer="p")
    faults = [
        {"sequence_id": "other"},
        {"generation": 2},
        {},
        {"layer": "c"},
        {"first_token": 5, "num_tokens": 9},
        {"first_token": 5, "num_tokens": 1},
        {},
    ]
    reasons = ["unknown seq", "stale", "leased to", "unknown layer", "beyond", "next", "has 0 by"]
    for place, reason in enumerate(reasons):
        changes = {}
        for fault in reversed(faults[place:]):
            changes |= fault
        write = replace(WRITE, **changes)
        with pytest.raises(LeaseError, match=reason):
            table.open(write, 0, "q" if place <= 2 else "p")


@pytest.mark.parametrize(
    ("first_token", "num_tokens"),
    [(0, 3), (0, 1), (2, 3), (2, 1), (4, 2)],
    ids=["duplicate", "part again", "overlap", "inside", "gap"],
)
def test_tokens_of_a_layer_come_once_and_in_order(table, first_token, num_tokens):
    table.grant()
    table.land(Write("s", 1, "a", 0, 3))
    with pytest.raises(LeaseError, match="expects token 3 next"):
        table.open(Write("s", 1, "a", first_token, num_tokens))
    table.land(Write("s", 1, "a", 3, 3))
    table.land(Write("s", 1, "b", 0, 6))
    table.leases.check(COMMIT)


def test_a_layer_is_written_by_one_frame_at_a_time(table):
    table.grant()
    table.open(WRITE)
    with pytest.raises(LeaseError):
        table.open(WRITE)
    table.open(replace(WRITE, layer="b"))
    assert table.leases.stats()["num_writing"] == 2


def test_an_abandoned_write_is_not_counted_and_may_come_again(table):
    table.grant()
    table.open(WRITE)
    table.leases.abandoned(WRITE)
    assert table.leases.landed_nbytes(1) == 0
    table.land(WRITE)
    assert table.leases.landed_nbytes(1) == SMALL.write_nbytes(6)


def test_any_writer_if_none_was_named(table):
    table.grant()
    table.open(WRITE, writer="anybody")


COMMIT_FAULTS = [
    (replace(COMMIT, sequence_id="other"), "unknown sequence"),
    (replace(COMMIT, generation=2), "stale generation"),
    (replace(COMMIT, num_tokens=5), "COMMIT of 5 tokens, 6 were granted"),
    (replace(COMMIT, nbytes=1), "COMMIT of 1 bytes"),
]


@pytest.mark.parametrize(("commit", "reason"), COMMIT_FAULTS)
def test_commits_that_do_not_add_up(table, commit, reason):
    table.grant()
    table.land(WRITE)
    table.land(replace(WRITE, layer="b"))
    for call in (table.leases.check, table.leases.commit):
        with pytest.raises(LeaseError, match=reason):
            call(commit)
    table.leases.commit(COMMIT)


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_a_commit_needs_every_token_of_every_layer(table, num_tokens):
    table.grant()
    table.land(WRITE)
    if num_tokens:
        table.land(Write("s", 1, "b", 0, num_tokens))
    with pytest.raises(LeaseError, match=f"layer b has {num_tokens} of 6"):
        table.leases.check(COMMIT)


def test_a_half_received_write_does_not_count_for_a_commit(table):
    table.grant()
    table.land(WRITE)
    table.open(replace(WRITE, layer="b"))
    with pytest.raises(LeaseError, match="incomplete"):
        table.leases.commit(COMMIT)


def test_revoked_blocks_wait_for_proof(table):
    blocks = table.grant()
    assert table.leases.revoke(1) == blocks
    assert table.leases.revoke(1) == blocks
    assert table.blocks.stats()["quarantined"] == 2
    with pytest.raises(LeaseError, match="stale generation 1"):
        table.open(WRITE)
    with pytest.raises(LeaseError, match="stale generation 1"):
        table.leases.commit(COMMIT)
    assert table.leases.release(1) == blocks
    assert table.leases.release(1) == table.leases.revoke(1) == []
    assert table.blocks.num_free_blocks == NUM_BLOCKS
    with pytest.raises(LeaseError, match="unknown sequence s"):
        table.open(WRITE)


def test_a_revoked_lease_is_not_released_while_a_write_is_half_received(table):
    table.grant()
    table.open(WRITE)
    assert not table.leases.quiesced(1)
    table.leases.revoke(1)
    with pytest.raises(LocalProtocolError, match="1 writes half received"):
        table.leases.release(1)
    assert table.blocks.stats()["quarantined"] == 2
    table.leases.landed(WRITE)
    assert table.leases.landed_nbytes(1) == 0
    assert table.leases.quiesced(1)
    table.leases.release(1)


def test_a_granted_lease_is_not_released(table):
    table.grant()
    with pytest.raises(LocalProtocolError, match="it is granted"):
        table.leases.release(1)


def test_a_new_generation_while_the_old_one_is_quarantined(table):
    table.grant()
    table.leases.revoke(1)
    table.grant(generation=2)
    with pytest.raises(LeaseError, match="stale generation 1"):
        table.open(WRITE)
    table.open(replace(WRITE, generation=2))


def test_the_generation_of_another_sequence_does_not_help(table):
    table.grant()
    table.grant("t", 2)
    with pytest.raises(LeaseError, match="stale generation 2 of sequence s"):
        table.open(replace(WRITE, generation=2))


def test_nothing_is_known_of_no_lease(table):
    assert table.leases.quiesced(5)
    assert table.leases.landed_nbytes(5) == 0


@pytest.mark.parametrize(
    ("generation", "num_tokens", "reason"),
    [(0, 4, "generation 0"), (1, 4, "generation 1"), (2, 0, "0 tokens"), (2, 9, "9 tokens")],
)
def test_grants_that_are_our_fault(table, generation, num_tokens, reason):
    table.grant()
    block_table = table.blocks.allocate("t", 2)
    with pytest.raises(LocalProtocolError, match=reason):
        table.leases.grant("t", generation, block_table, num_tokens)
    assert table.blocks.stats()["reserved"] == 2


def test_blocks_that_are_not_reserved_for_the_sequence(table):
    block_table = table.blocks.allocate("t", 2)
    with pytest.raises(LocalProtocolError):
        table.leases.grant("s", 1, block_table, 8)
    with pytest.raises(LocalProtocolError):
        table.leases.grant("t", 1, [0, 0], 8)
    table.leases.grant("t", 1, block_table, 8)


def test_a_pool_that_does_not_fit(geometry):
    layout = PoolLayout(SMALL, 2, BLOCK_SIZE)
    good = bytearray(layout.nbytes)
    for pool in (bytes(good), good[:-1]):
        with pytest.raises(LocalProtocolError, match="pool has"):
            LeaseTable(layout, memoryview(pool), BlockPool(2))
    with pytest.raises(LocalProtocolError, match="3 blocks kept for 2"):
        LeaseTable(layout, memoryview(good), BlockPool(3))
    assert LeaseTable(layout, memoryview(good), BlockPool(2)).geometry is SMALL


class LeaseMachine(RuleBasedStateMachine):
    """Grants, writes cut in two, revocations, releases and commits in any order.

    Every sequence writes its own number. Whatever happens, a committed sequence holds its number
    and nothing else, and no block of it was ever free meanwhile.
    """

    def __init__(self):
        super().__init__()
        self.table = Table()
        self.numbers = itertools.count(1)
        self.granted: dict[int, dict[str, int]] = {}
        self.sizes: dict[int, int] = {}
        self.open: dict[tuple[int, str], tuple[Write, list[memoryview]]] = {}
        self.revoked: set[int] = set()
        self.committed: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}

    def pick(self, data, items):
        names = sorted(items)
        return data.draw(st.sampled_from(names)) if names else None

    @rule(num_tokens=st.integers(1, 10))
    def grant(self, num_tokens):
        generation = next(self.numbers)
        try:
            self.tables[generation] = self.table.grant(f"s{generation}", generation, num_tokens)
        except PoolExhausted:
            return
        self.granted[generation] = {"a": 0, "b": 0}
        self.sizes[generation] = num_tokens

    @rule(data=st.data(), layer=st.sampled_from("ab"), num_tokens=st.integers(1, 10))
    def begin_write(self, data, layer, num_tokens):
        generation = self.pick(data, self.granted)
        if generation is None:
            return
        first_token = self.granted[generation][layer]
        write = Write(f"s{generation}", generation, layer, first_token, num_tokens)
        allowed = (
            generation not in self.revoked
            and first_token + num_tokens <= self.sizes[generation]
            and (generation, layer) not in self.open
        )
        if not allowed:
            with pytest.raises(LeaseError):
                self.table.open(write)
            return
        pieces = self.table.open(write)
        pieces[0][:] = bytes([generation % 256]) * pieces[0].nbytes
        self.open[generation, layer] = (write, pieces)

    @rule(data=st.data(), is_complete=st.booleans())
    def end_write(self, data, is_complete):
        key = self.pick(data, self.open)
        if key is None:
            return
        write, pieces = self.open.pop(key)
        for piece in pieces:
            piece[:] = bytes([key[0] % 256]) * piece.nbytes
        if not is_complete:
            self.table.leases.abandoned(write)
            return
        self.table.leases.landed(write)
        if key[0] not in self.revoked:
            self.granted[key[0]][key[1]] += write.num_tokens

    @rule(data=st.data())
    def revoke(self, data):
        generation = self.pick(data, self.granted)
        if generation is not None:
            self.table.leases.revoke(generation)
            self.revoked.add(generation)

    @rule(data=st.data())
    def release(self, data):
        generation = self.pick(data, self.granted)
        if generation is None:
            return
        is_writing = any(key[0] == generation for key in self.open)
        assert self.table.leases.quiesced(generation) is not is_writing
        if generation not in self.revoked or is_writing:
            with pytest.raises(LocalProtocolError):
                self.table.leases.release(generation)
            return
        self.table.leases.release(generation)
        self.revoked.discard(generation)
        del self.granted[generation]

    @rule(data=st.data())
    def commit(self, data):
        generation = self.pick(data, self.granted)
        if generation is None:
            return
        num_tokens = self.sizes[generation]
        nbytes = 2 * SMALL.write_nbytes(num_tokens)
        commit = Commit(f"s{generation}", generation, num_tokens, nbytes, [], 0.0, 0.0, 0.0)
        is_whole = all(landed == num_tokens for landed in self.granted[generation].values())
        if not is_whole or generation in self.revoked:
            with pytest.raises(LeaseError):
                self.table.leases.commit(commit)
            return
        self.table.leases.commit(commit)
        del self.granted[generation]
        self.committed[generation] = self.tables[generation]

    @rule(data=st.data())
    def free(self, data):
        generation = self.pick(data, self.committed)
        if generation is not None:
            self.table.blocks.free(self.committed.pop(generation), f"s{generation}")

    @invariant()
    def committed_sequences_hold_their_own_bytes(self):
        layout = self.table.layout
        for generation, block_table in self.committed.items():
            runs = slot_runs(block_table, 0, self.sizes[generation], BLOCK_SIZE)
            for layer, region in itertools.product(range(2), range(2)):
                for start, nbytes in layout.spans(layer, region, runs):
                    assert set(self.table.pool[start : start + nbytes]) == {generation % 256}

    @invariant()
    def memory_being_written_is_never_free(self):
        for generation, _ in self.open:
            for block_id in self.tables[generation]:
                entry = self.table.blocks.block(block_id)
                assert entry.state in {BlockState.WRITABLE, BlockState.QUARANTINED}
                assert entry.owner == f"s{generation}"


TestLeaseMachine = LeaseMachine.TestCase
