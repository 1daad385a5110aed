"""Where bytes belong, and the rules that a writer keeps before it puts them there."""

from itertools import pairwise

import pytest

from kvproto import placement
from kvproto.errors import LeaseError, LocalProtocolError
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.placement import Placements
from tests.kvproto.mapped_pair import GEOMETRY, LAYOUT, Kv

NUM_TOKENS = 14
TABLE = [9, 2, 15, 0]
FIRST = (0, 9, 13)  # of the whole layer, the window of 5 tokens, the state


@pytest.fixture
def kv():
    return Kv(GEOMETRY, NUM_TOKENS, seed=1)


def begun(**options) -> Placements:
    placements = Placements(LAYOUT)
    placements.begin("s", 1, TABLE, NUM_TOKENS, **options)
    return placements


def put(pool: bytearray, placements: Placements, kv: Kv, layer: int, first: int, count: int):
    """Write as a carrier does; (first token, number of tokens) of each PLACED."""
    buffers = kv.pieces(layer, first, count)
    transfer = placements.advance("s", 1, layer, first, count, buffers)
    announced = []
    for start, num, pieces in placements.parts(transfer, layer, first, count, buffers):
        announced.append((start, num))
        for piece in pieces:
            pool[piece.offset : piece.offset + piece.source.nbytes] = piece.source
    return announced


@pytest.mark.parametrize("chunk_tokens", [1, 3, NUM_TOKENS])
def test_bytes_go_where_the_layout_has_them_and_nowhere_else(kv, chunk_tokens):
    placements, pool = begun(), bytearray(LAYOUT.nbytes)
    for layer, first in enumerate(FIRST):
        for start in range(first, NUM_TOKENS, chunk_tokens):
            count = min(chunk_tokens, NUM_TOKENS - start)
            assert put(pool, placements, kv, layer, start, count) == [(start, count)]
    assert kv.in_pool(LAYOUT, memoryview(pool), TABLE)
    # All of it was random bytes; wipe them, and nothing is left.
    for layer, first in enumerate(FIRST):
        for spans in LAYOUT.pieces(layer, TABLE, first, NUM_TOKENS - first, is_last=True):
            for offset, nbytes in spans:
                pool[offset : offset + nbytes] = bytes(nbytes)
    assert not any(pool)


@pytest.mark.parametrize("step_tokens", [1, 4])
def test_a_checked_write_is_announced_in_parts_of_bounded_size(kv, monkeypatch, step_tokens):
    limit = step_tokens * GEOMETRY.write_nbytes(0, 1)
    monkeypatch.setattr(placement, "CHECKED_PLACED_NBYTES", limit)
    placements, pool = begun(), bytearray(LAYOUT.nbytes)
    announced = put(pool, placements, kv, 0, 0, NUM_TOKENS)
    assert [count for _, count in announced[:-1]] == [step_tokens] * (len(announced) - 1)
    assert all(first + count == following for (first, count), (following, _) in pairwise(announced))
    assert sum(count for _, count in announced) == NUM_TOKENS
    for layer in (1, 2):
        put(pool, placements, kv, layer, FIRST[layer], NUM_TOKENS - FIRST[layer])
    assert kv.in_pool(LAYOUT, memoryview(pool), TABLE)


def test_a_token_that_is_larger_than_a_part_is_a_part(kv, monkeypatch):
    monkeypatch.setattr(placement, "CHECKED_PLACED_NBYTES", 1)
    announced = put(bytearray(LAYOUT.nbytes), begun(), kv, 0, 0, 3)
    assert announced == [(0, 1), (1, 1), (2, 1)]


def test_a_write_that_nobody_digests_is_announced_whole(kv, monkeypatch):
    monkeypatch.setattr(placement, "CHECKED_PLACED_NBYTES", 1)
    placements = begun(is_checked=False)
    assert put(bytearray(LAYOUT.nbytes), placements, kv, 0, 0, NUM_TOKENS) == [(0, NUM_TOKENS)]


def test_pieces_are_contiguous_in_both_and_buffers_may_be_cut_anywhere(kv):
    placements = begun()
    whole = b"".join(kv.pieces(0, 0, NUM_TOKENS))
    cuts = [0, 1, 1, 30, len(whole) // 2 + 5, len(whole)]
    buffers = [memoryview(whole)[start:end] for start, end in pairwise(cuts)]
    transfer = placements.advance("s", 1, 0, 0, NUM_TOKENS, buffers)
    [(_, _, pieces)] = placements.parts(transfer, 0, 0, NUM_TOKENS, buffers)
    pool = bytearray(LAYOUT.nbytes)
    for piece in pieces:
        assert piece.source.nbytes > 0
        assert piece.region in (0, 1)
        pool[piece.offset : piece.offset + piece.source.nbytes] = piece.source
    reference = bytearray(LAYOUT.nbytes)
    put(reference, begun(), kv, 0, 0, NUM_TOKENS)
    assert pool == reference
    # One for each block of a region, and one more where a buffer ends inside.
    assert len(pieces) == 2 * len(TABLE) + 3


def test_a_transfer_keeps_its_blocks_and_keys_although_the_message_changes(kv):
    table, keys = [*TABLE, 7], [11, 12]
    placements = Placements(LAYOUT)
    placements.begin("s", 1, table, NUM_TOKENS, keys=keys)
    table[0], keys[0] = 1, 0
    transfer = placements.advance("s", 1, 0, 0, 1, kv.pieces(0, 0, 1))
    assert transfer.block_table == TABLE  # the fifth is not needed
    assert transfer.keys == (11, 12)
    assert not transfer.is_over


@pytest.mark.parametrize(
    ("table", "num_tokens", "reason"),
    [
        ([9, 2, 15], NUM_TOKENS, "14 tokens do not fit into 3 blocks"),
        ([], 1, "1 tokens do not fit into 0 blocks"),
        (TABLE, 0, "0 tokens do not fit"),
        (TABLE, -1, "-1 tokens do not fit"),
        ([9, 2, 16, 0], NUM_TOKENS, r"names blocks 0\.\.16, the region has 16"),
        ([9, 2, -1, 0], NUM_TOKENS, r"names blocks -1\.\.9"),
        ([9, 2, 9, 0], NUM_TOKENS, "names a block twice"),
        ([9, 16, 9, 0], NUM_TOKENS, r"names blocks 0\.\.16"),
    ],
)
def test_what_does_not_fit_into_the_pool_is_refused(table, num_tokens, reason):
    placements = Placements(LAYOUT)
    with pytest.raises(LeaseError, match=reason) as excinfo:
        placements.begin("s", 1, table, num_tokens)
    assert excinfo.value.sequence_id == "s"
    placements.begin("s", 1, TABLE, NUM_TOKENS)


def test_blocks_that_no_token_needs_are_not_looked_at():
    Placements(LAYOUT).begin("s", 1, [*TABLE, 99, 9], NUM_TOKENS)


def test_a_generation_is_begun_once_and_may_be_begun_again_after_its_end():
    placements = begun()
    with pytest.raises(LeaseError, match="generation 1 is being written already"):
        placements.begin("s", 1, [99], 1)
    placements.begin("s", 2, TABLE, NUM_TOKENS)
    placements.begin("t", 1, TABLE, NUM_TOKENS)
    placements.end("s", 1)
    placements.begin("s", 1, TABLE, NUM_TOKENS)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"generation": 2}, "generation 2 is not begun"),
        ({"sequence_id": "t"}, "cannot write sequence t: generation 1 is not begun"),
        ({"layer": -1}, "no layer -1"),
        ({"layer": 3}, "no layer 3"),
        ({"first_token": 1}, r"cannot write tokens 1\.\.3 .* its next token is 0 of 14"),
        ({"num_tokens": 0}, r"tokens 0\.\.0 "),
        ({"num_tokens": 15}, r"tokens 0\.\.15 "),
        ({"layer": 1}, r"tokens 0\.\.2 of layer 1 .* its next token is 9 of 14"),
        ({"buffers": [memoryview(bytes(255))]}, "the buffers have 255 bytes, its regions have 256"),
    ],
)
def test_writes_without_permission_are_refused_and_change_nothing(kv, how, reason):
    placements = begun()
    allowed = {
        "sequence_id": "s",
        "generation": 1,
        "layer": 0,
        "first_token": 0,
        "num_tokens": 2,
        "buffers": kv.pieces(0, 0, 2),
    }
    with pytest.raises(LocalProtocolError, match=reason):
        placements.advance(*(allowed | how).values())
    placements.advance(*allowed.values())
    with pytest.raises(LocalProtocolError, match="its next token is 2"):
        placements.advance(*allowed.values())


def test_after_its_end_a_transfer_is_over(kv):
    placements = begun()
    transfer = placements.advance("s", 1, 0, 0, 1, kv.pieces(0, 0, 1))
    placements.end("s", 1)
    assert transfer.is_over
    placements.end("s", 1)
    with pytest.raises(LocalProtocolError, match="is not begun"):
        placements.advance("s", 1, 0, 1, 1, kv.pieces(0, 1, 1))


def test_the_end_of_all():
    placements = begun()
    placements.begin("t", 2, [1], 1)
    state = [memoryview(bytes(LAYOUT.geometry.write_nbytes(2, 1, is_last=True)))]
    transfer = placements.advance("t", 2, 2, 0, 1, state)
    placements.end_all()
    assert transfer.is_over
    placements.begin("s", 1, TABLE, NUM_TOKENS)
    placements.end_all()
    placements.end_all()


def test_the_row_of_a_sequence_goes_to_its_first_block():
    geometry = KvGeometry((GEOMETRY.layers[2], GEOMETRY.layers[0]), "float32")
    layout = PoolLayout(geometry, 4, 4)
    placements = Placements(layout)
    placements.begin("s", 1, [3, 1], 5)
    state = memoryview(bytes(range(160)))
    transfer = placements.advance("s", 1, 0, 4, 1, [state])
    [(first, count, [piece])] = placements.parts(transfer, 0, 4, 1, [state])
    assert (first, count, piece.region) == (4, 1, 0)
    assert piece.offset == 3 * 160
    assert piece.source == state
