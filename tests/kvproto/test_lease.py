"""Leases: every refusal in its order, and a random walk that must never mix two sequences."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from xxhash import xxh3_64_intdigest

from kvproto.blocks import BlockPool
from kvproto.errors import (
    DigestMismatch,
    LeaseError,
    LocalProtocolError,
    Malformed,
    Overloaded,
    PoolExhausted,
)
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.header import HOST_ORDER
from kvproto.lease import LeaseTable, Part
from kvproto.messages import Commit, Placed, Write
from kvproto.state import BlockState

BLOCK_SIZE = 4
NUM_BLOCKS = 8
SMALL = KvGeometry.uniform(2, 1, 2, "float16", ("a", "b"))


class Table:
    """A lease table with its pool and blocks."""

    def __init__(self, geometry=SMALL, **options):
        self.layout = PoolLayout(geometry, NUM_BLOCKS, BLOCK_SIZE)
        self.pool = memoryview(bytearray(self.layout.nbytes))
        self.blocks = BlockPool(NUM_BLOCKS)
        self.leases = LeaseTable(self.layout, self.pool, self.blocks, **options)

    def grant(self, sequence_id="s", generation=1, num_tokens=6, **options):
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        block_table = self.blocks.allocate(sequence_id, num_blocks)
        self.leases.grant(sequence_id, generation, block_table, num_tokens, **options)
        return block_table

    def open(self, write, body_nbytes=None, writer="p", shape_word=None):
        if body_nbytes is None:
            body_nbytes = SMALL.write_nbytes(0, write.num_tokens)
        if shape_word is None:
            shape_word = SMALL.shape_word(0, write.num_tokens)
        return self.leases.destination(write, body_nbytes, shape_word, writer)

    def land(self, write, value=1, writer="p"):
        for piece in self.open(write, writer=writer):
            piece[:] = bytes([value]) * piece.nbytes
            self.leases.received(write, piece)
        self.leases.landed(write, HOST_ORDER)

    def stats(self):
        """The counts of leases; the budget apart."""
        stats = self.leases.stats()
        return {name: stats[name] for name in ("num_leases", "num_revoked", "num_writing")}


@pytest.fixture
def table():
    return Table()


WRITE = Write("s", 1, "a", 0, 6)
NBYTES = SMALL.prompt_nbytes(6)
# Of a body of ones.
DIGESTS = [xxh3_64_intdigest(b"\1" * (NBYTES // 4))] * 4
COMMIT = Commit("s", 1, 6, NBYTES, DIGESTS, 0.0, 0.0, 0.0)


def test_a_whole_transfer(table):
    blocks = table.grant()
    assert table.blocks.stats()["writable"] == 2
    for layer in ("a", "b"):
        table.land(Write("s", 1, layer, 0, 4))
        table.land(Write("s", 1, layer, 4, 2))
    assert table.leases.landed_nbytes(1) == COMMIT.nbytes
    table.leases.check(COMMIT)
    assert table.leases.commit(COMMIT)
    assert table.leases.landed_nbytes(1) == 0
    assert set(table.stats().values()) == {0}
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
    for spans, values in zip(
        table.layout.pieces(1, block_table, 0, 7), ([1, 2], [3, 4]), strict=True
    ):
        for value, (start, nbytes) in zip(values, spans, strict=True):
            assert set(table.pool[start : start + nbytes]) == {value}


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
    assert table.leases.landed_nbytes(1) == SMALL.write_nbytes(0, 6)


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
    table.leases.landed(WRITE, HOST_ORDER)
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
    [
        (0, 4, r"generations \[0\]"),
        (1, 4, r"generations \[1\]"),
        (2, 0, "0 tokens"),
        (2, 9, "9 tokens"),
    ],
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


# -- carriers that place, and transfers without digests --------------------------------------------


PLACED = Placed("s", 1, "a", 0, 6)


def test_the_way_of_writing_is_the_granted_one(table):
    table.grant("s", 1)
    table.grant("t", 2, is_placed=True)
    with pytest.raises(LeaseError, match="s is leased for WRITE, not for PLACED") as excinfo:
        table.leases.placed(PLACED, "p")
    assert excinfo.value.sequence_id == "s"
    with pytest.raises(LeaseError, match="t is leased for PLACED, not for WRITE"):
        table.open(replace(WRITE, sequence_id="t", generation=2))
    assert {table.leases.landed_nbytes(generation) for generation in (1, 2)} == {0}


def test_placed_rows_are_digested_from_the_pool_and_counted(table):
    table.grant(is_placed=True, writer="p")
    table.pool[:] = b"\1" * table.pool.nbytes
    for layer, first_token, num_tokens in (("a", 0, 4), ("b", 0, 6), ("a", 4, 2)):
        table.leases.placed(Placed("s", 1, layer, first_token, num_tokens), "p")
    assert table.leases.landed_nbytes(1) == NBYTES
    assert table.leases.commit(COMMIT)


def test_placed_rows_that_are_not_there_are_found_by_the_digests(table):
    table.grant(is_placed=True)
    table.pool[:] = b"\1" * table.pool.nbytes
    table.pool[table.layout.start(1, 0)] = 2
    for layer in "ab":
        table.leases.placed(replace(PLACED, layer=layer), "p")
    with pytest.raises(DigestMismatch, match="region k of layer b"):
        table.leases.commit(COMMIT)


@pytest.mark.parametrize(
    ("changes", "writer", "reason"),
    [
        ({"sequence_id": "other"}, "p", "unknown sequence other"),
        ({"generation": 2}, "p", "stale generation 2"),
        ({}, "q", "leased to p, not to q"),
        ({"layer": "c"}, "p", "unknown layer 'c'"),
        ({"num_tokens": 7}, "p", "beyond the 6 granted"),
        ({"first_token": 1, "num_tokens": 1}, "p", "expects token 0 next"),
    ],
)
def test_placed_is_refused_as_a_write_is(table, changes, writer, reason):
    table.grant(writer="p", is_placed=True)
    with pytest.raises(LeaseError, match=reason):
        table.leases.placed(replace(PLACED, **changes), writer)
    assert table.leases.landed_nbytes(1) == 0
    table.leases.placed(PLACED, "p")


def test_placed_after_revoke_is_refused(table):
    table.grant(is_placed=True)
    table.leases.revoke(1)
    with pytest.raises(LeaseError, match="stale generation 1"):
        table.leases.placed(PLACED, "p")


@pytest.mark.parametrize("is_placed", [False, True])
@pytest.mark.parametrize("digests", [[], [1, 2, 3, 4], [1]])
def test_without_digests_none_are_compared(table, is_placed, digests):
    table.grant(is_placed=is_placed, is_checked=False)
    for layer in "ab":
        if is_placed:
            table.leases.placed(replace(PLACED, layer=layer), "p")
        else:
            table.land(replace(WRITE, layer=layer))
    assert table.leases.commit(replace(COMMIT, digests=digests))


@pytest.mark.parametrize(
    ("digests", "reason"),
    [([], "0 digests"), ([*DIGESTS[:3], 9], "region v of layer b"), (DIGESTS[:3], "3 digests")],
)
def test_a_checked_lease_needs_its_digests(table, digests, reason):
    table.grant()
    table.land(WRITE)
    table.land(replace(WRITE, layer="b"))
    with pytest.raises(DigestMismatch, match=reason):
        table.leases.commit(replace(COMMIT, digests=digests))
    assert table.leases.commit(COMMIT)


def test_an_abandoned_write_leaves_no_trace_in_the_digests(table):
    table.grant()
    for piece in table.open(WRITE):
        piece[:] = b"\2" * piece.nbytes
        table.leases.received(WRITE, piece)
    table.leases.abandoned(WRITE)
    table.land(WRITE)
    table.land(replace(WRITE, layer="b"))
    assert table.leases.commit(COMMIT)


def test_a_commit_that_came_early_is_complete_once_the_bytes_have_landed(table):
    table.grant()
    table.land(WRITE)
    assert not table.leases.is_complete(COMMIT)
    table.land(replace(WRITE, layer="b"))
    assert table.leases.is_complete(COMMIT)
    table.leases.commit(COMMIT)
    assert table.leases.is_complete(COMMIT), "no lease: check says what is wrong"


@pytest.mark.parametrize("shape_word", [0, SMALL.shape_word(0, 5)])
def test_a_shape_word_of_another_write_is_a_fault_and_no_refusal(table, shape_word):
    table.grant()
    with pytest.raises(Malformed) as excinfo:
        table.open(WRITE, body_nbytes=0, shape_word=shape_word)
    assert excinfo.value.field == "shape_word"
    assert table.leases.quiesced(1)


# -- bounds ----------------------------------------------------------------------------------------


def test_the_number_of_leases_is_bounded():
    table = Table(max_leases=2)
    table.grant("s", 1)
    table.grant("t", 2)
    block_table = table.blocks.allocate("u", 2)
    with pytest.raises(Overloaded, match="2 leases"):
        table.leases.grant("u", 3, block_table, 8)
    table.leases.revoke(1)
    table.leases.release(1)
    with pytest.raises(Overloaded):
        table.leases.grant_parts("u", [Part(3), Part(4)], block_table, 8)
    table.leases.grant("u", 3, block_table, 8)


def test_over_the_quarantine_budget_nothing_is_granted():
    table = Table(max_quarantined_blocks=2)
    for generation in (1, 2):
        table.grant(f"s{generation}", generation)
        table.leases.revoke(generation)
        table.leases.revoke(generation)
    assert table.leases.is_over_budget
    assert table.leases.stats() == {
        "num_leases": 2,
        "num_revoked": 2,
        "num_writing": 0,
        "num_quarantined_blocks": 4,
        "max_quarantined_blocks": 2,
    }
    block_table = table.blocks.allocate("t", 1)
    with pytest.raises(PoolExhausted, match="4 blocks wait for writers to end, the budget is 2"):
        table.leases.grant("t", 3, block_table, 4)
    table.leases.release(2)
    assert not table.leases.is_over_budget, "the budget itself is allowed"
    table.leases.grant("t", 3, block_table, 4)


# -- parts -----------------------------------------------------------------------------------------

HEADS = KvGeometry.uniform(1, 4, 2, "float32", ("a",))
ONE_HEAD, TWO_HEADS = HEADS.as_wire(num_heads=1), HEADS.as_wire(num_heads=2)


class HeadCopier:
    """Copies the heads of a part into their place; same dtype on both sides."""

    def unpack(self, wire, wire_region, wire_dtype, pool, pool_region, pool_dtype, first_head):
        assert wire_dtype == pool_dtype
        head_nbytes = 4 * pool_region.head_dim
        row_nbytes, part_nbytes = (
            region.num_heads * head_nbytes for region in (pool_region, wire_region)
        )
        sources = iter(range(0, wire.nbytes, part_nbytes))
        for piece in pool:
            for row in range(0, piece.nbytes, row_nbytes):
                source, target = next(sources), row + first_head * head_nbytes
                piece[target : target + part_nbytes] = wire[source : source + part_nbytes]
        assert next(sources, None) is None


@pytest.fixture
def parts_table():
    return Table(HEADS, converter=HeadCopier())


def grant_parts(table, parts, num_tokens=6):
    block_table = table.blocks.allocate("s", -(-num_tokens // BLOCK_SIZE))
    table.leases.grant_parts("s", parts, block_table, num_tokens)
    return block_table


def land_part(table, part, value, num_tokens=6):
    """All of a part, each byte ``value``; the COMMIT that follows."""
    write = Write("s", part.generation, "a", 0, num_tokens)
    nbytes = part.wire.write_nbytes(0, num_tokens, is_last=True)
    shape_word = part.wire.shape_word(0, num_tokens)
    for piece in table.leases.destination(write, nbytes, shape_word, part.writer):
        piece[:] = bytes([value]) * piece.nbytes
        table.leases.received(write, piece)
    table.leases.landed(write, HOST_ORDER)
    digest = xxh3_64_intdigest(bytes([value]) * (nbytes // 2))
    return Commit("s", part.generation, num_tokens, nbytes, [digest] * 2, 0.0, 0.0, 0.0)


LEFT = Part(1, "p1", ONE_HEAD, first_head=0)
MIDDLE = Part(2, "p2", TWO_HEADS, first_head=1)
RIGHT = Part(3, "p3", ONE_HEAD, first_head=3)


def test_three_writers_fill_the_heads_of_one_sequence(parts_table):
    block_table = grant_parts(parts_table, [LEFT, MIDDLE, RIGHT])
    commits = [
        land_part(parts_table, part, value) for part, value in ((MIDDLE, 2), (LEFT, 1), (RIGHT, 3))
    ]
    assert [parts_table.leases.commit(commit) for commit in commits] == [False, False, True]
    assert parts_table.blocks.stats()["committed"] == 2
    row = b"\1" * 8 + b"\2" * 16 + b"\3" * 8
    for (start, nbytes), *_ in parts_table.layout.pieces(0, block_table, 0, 6):
        assert parts_table.pool[start : start + nbytes] == row * 6


def test_a_part_is_of_its_writer_and_its_generation_alone(parts_table):
    grant_parts(parts_table, [LEFT, MIDDLE, RIGHT])
    with pytest.raises(LeaseError, match="leased to p1, not to p2"):
        land_part(parts_table, replace(LEFT, writer="p2"), 1)
    # As many heads as another part has: the shape word tells.
    with pytest.raises(Malformed, match="shape_word"):
        land_part(parts_table, replace(MIDDLE, generation=1, writer="p1"), 1)


def test_revoking_one_part_withdraws_all_of_them(parts_table):
    block_table = grant_parts(parts_table, [LEFT, MIDDLE, RIGHT])
    commit = land_part(parts_table, LEFT, 1)
    assert parts_table.leases.commit(commit) is False
    assert parts_table.leases.revoke(2) == block_table
    assert parts_table.blocks.stats()["quarantined"] == 2
    with pytest.raises(LeaseError, match="stale generation 3"):
        land_part(parts_table, RIGHT, 3)
    # A part that was committed has ended; each of the others needs proof of its own.
    assert parts_table.leases.release(1) == parts_table.leases.revoke(1) == []
    with pytest.raises(LocalProtocolError, match="generation 3: it is granted"):
        parts_table.leases.release(3)
    assert parts_table.leases.release(2) == []
    assert parts_table.leases.revoke(3) == block_table
    assert parts_table.leases.stats()["num_quarantined_blocks"] == 2
    assert parts_table.leases.release(3) == block_table
    assert parts_table.leases.stats()["num_quarantined_blocks"] == 0
    assert parts_table.blocks.num_free_blocks == NUM_BLOCKS


def test_what_lands_after_revoke_is_not_converted(parts_table):
    grant_parts(parts_table, [Part(1, "p1", HEADS.as_wire())])
    write = Write("s", 1, "a", 0, 6)
    nbytes, shape_word = HEADS.write_nbytes(0, 6), HEADS.shape_word(0, 6)
    (k, v) = parts_table.leases.destination(write, nbytes, shape_word, "p1")
    k[:], v[:] = b"\7" * k.nbytes, b"\7" * v.nbytes
    parts_table.leases.revoke(1)
    parts_table.leases.landed(write, HOST_ORDER)
    assert not any(parts_table.pool)
    assert parts_table.leases.release(1)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([], r"generations \[\]"),
        ([LEFT, replace(RIGHT, generation=1)], r"generations \[1, 1\]"),
        ([LEFT, MIDDLE], "each of the 4 heads of region k of a once"),
        ([LEFT, MIDDLE, replace(RIGHT, first_head=2)], "each of the 4 heads"),
        ([LEFT, MIDDLE, replace(RIGHT, first_head=4)], "each of the 4 heads"),
        ([Part(1), Part(2)], "each of the 4 heads"),
        ([Part(1, first_head=1)], "each of the 4 heads"),
        ([Part(1, wire=HEADS.as_wire("float16"), is_placed=True)], "nobody converts it"),
        ([replace(LEFT, is_placed=True), MIDDLE, RIGHT], "nobody converts it"),
    ],
)
def test_parts_that_are_our_fault(parts_table, parts, reason):
    block_table = parts_table.blocks.allocate("s", 2)
    with pytest.raises(LocalProtocolError, match=reason):
        parts_table.leases.grant_parts("s", parts, block_table, 6)
    assert parts_table.stats()["num_leases"] == 0
    assert parts_table.blocks.stats()["reserved"] == 2


def test_parts_need_a_converter():
    table = Table(HEADS)
    with pytest.raises(LocalProtocolError, match="there is no converter here"):
        grant_parts(table, [LEFT, MIDDLE, RIGHT])


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
            self.table.leases.received(write, piece)
        if not is_complete:
            self.table.leases.abandoned(write)
            return
        self.table.leases.landed(write, HOST_ORDER)
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
        nbytes = SMALL.prompt_nbytes(num_tokens)
        digest = xxh3_64_intdigest(bytes([generation % 256]) * (nbytes // 4))
        commit = Commit(
            f"s{generation}", generation, num_tokens, nbytes, [digest] * 4, 0.0, 0.0, 0.0
        )
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
            for layer in range(2):
                pieces = layout.pieces(layer, block_table, 0, self.sizes[generation])
                for start, nbytes in itertools.chain(*pieces):
                    assert set(self.table.pool[start : start + nbytes]) == {generation % 256}

    @invariant()
    def memory_being_written_is_never_free(self):
        for generation, _ in self.open:
            for block_id in self.tables[generation]:
                entry = self.table.blocks.block(block_id)
                assert entry.state in {BlockState.WRITABLE, BlockState.QUARANTINED}
                assert entry.owner == f"s{generation}"


TestLeaseMachine = LeaseMachine.TestCase
