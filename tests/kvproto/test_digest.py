"""Digests by logical coordinate, of bytes that arrive in any pieces."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvproto.digest import RegionDigests, blocks_views, check_digests, digest_blocks
from kvproto.errors import DigestMismatch, LocalProtocolError
from kvproto.geometry import KvGeometry, Layer, PoolLayout, Region

# Every sort of region: a window, a latent, a state beside keys, a state alone.
MIXED = KvGeometry(
    (
        Layer("window", (Region("k", 2, 4), Region("v", 2, 4)), window_tokens=5),
        Layer("latent", (Region("latent", 1, 6),)),
        Layer("both", (Region("k", 1, 3), Region("state", 1, 7, "sequence"), Region("v", 1, 2))),
        Layer("state", (Region("state", 2, 5, "sequence"),)),
    ),
    "bfloat16",
)


@pytest.fixture
def layout(geometry):
    return PoolLayout(geometry, num_blocks=8, block_size=4)


@pytest.fixture
def pool(layout):
    return memoryview(bytearray(random.Random(1).randbytes(layout.nbytes)))


def row(layout, pool, block_table, layer, region, token):
    """One token's row, from the first principles of ``pool[layer][region][slot]``."""
    slot = block_table[token // layout.block_size] * layout.block_size + token % layout.block_size
    nbytes = layout.geometry.row_nbytes(layout.geometry.layers[layer].regions[region])
    start = layout.start(layer, region) + slot * nbytes
    return bytes(pool[start : start + nbytes])


def state_row(layout, pool, block_table, layer, region):
    nbytes = layout.geometry.row_nbytes(layout.geometry.layers[layer].regions[region])
    start = layout.start(layer, region) + block_table[0] * nbytes
    return bytes(pool[start : start + nbytes])


@pytest.mark.parametrize("block_table", [[0, 1, 2], [5, 2, 7], [3, 4, 1]])
@pytest.mark.parametrize("num_tokens", [1, 4, 11, 12])
def test_one_digest_for_each_region_over_tokens_in_order(layout, pool, block_table, num_tokens):
    assert digest_blocks(layout, pool, block_table, num_tokens) == [
        xxh3_64_intdigest(
            b"".join(
                row(layout, pool, block_table, layer, region, token) for token in range(num_tokens)
            )
        )
        for layer in range(2)
        for region in range(2)
    ]


@pytest.mark.parametrize("num_tokens", [1, 5, 6, 12])
def test_digests_of_every_sort_of_region(num_tokens):
    layout = PoolLayout(MIXED, num_blocks=8, block_size=4)
    pool = memoryview(bytearray(random.Random(2).randbytes(layout.nbytes)))
    table = [6, 1, 2]

    def rows(layer, region, first=0):
        tokens = range(first, num_tokens)
        return b"".join(row(layout, pool, table, layer, region, token) for token in tokens)

    first = max(0, num_tokens - 5)
    parts = [
        rows(0, 0, first),
        rows(0, 1, first),
        rows(1, 0),
        rows(2, 0),
        state_row(layout, pool, table, 2, 1),
        rows(2, 2),
        state_row(layout, pool, table, 3, 0),
    ]
    assert digest_blocks(layout, pool, table, num_tokens) == [xxh3_64_intdigest(p) for p in parts]


def test_views_of_a_prompt_are_its_bytes_as_they_travel():
    layout = PoolLayout(MIXED, num_blocks=8, block_size=4)
    pool = memoryview(bytearray(layout.nbytes))
    views = list(blocks_views(layout, pool, [6, 1, 2], 9))
    assert sum(view.nbytes for _, _, view in views) == MIXED.prompt_nbytes(9)
    assert [(layer, region) for layer, region, _ in views] == sorted(
        (layer, region) for layer, region, _ in views
    )


def test_the_same_tokens_in_other_blocks_have_the_same_digests(layout, pool):
    other = memoryview(bytearray(pool))
    for layer in range(2):
        for (source, nbytes), (target, _) in zip(
            (spans[0] for spans in layout.pieces(layer, [0, 1], 0, 8)),
            (spans[0] for spans in layout.pieces(layer, [4, 5], 0, 8)),
            strict=True,
        ):
            other[target : target + nbytes] = pool[source : source + nbytes]
    assert digest_blocks(layout, pool, [0, 1], 8) == digest_blocks(layout, other, [4, 5], 8)


def test_swapped_blocks_are_found(layout, pool):
    assert digest_blocks(layout, pool, [0, 1], 8) != digest_blocks(layout, pool, [1, 0], 8)


def test_incremental_digests_agree_with_those_of_the_pool(layout, pool, geometry):
    digests = RegionDigests(geometry)
    for token in range(7):
        for layer in range(2):
            for region in range(2):
                digests.update(layer, region, row(layout, pool, [6, 2], layer, region, token))
    assert digests.values() == digest_blocks(layout, pool, [6, 2], 7)


@given(data=st.data(), region_nbytes=st.lists(st.integers(0, 40), min_size=3, max_size=3))
def test_a_body_in_any_pieces_goes_to_its_regions(data, region_nbytes):
    """Piece boundaries need not be region boundaries; empty regions are passed over."""
    geometry = KvGeometry(
        (Layer("a", (Region("k", 1, 1), Region("s", 1, 1, "sequence"), Region("v", 1, 1))),),
        "float32",
    )
    body = memoryview(random.Random(3).randbytes(sum(region_nbytes)))
    digests = RegionDigests(geometry)
    digests.update(0, 0, b"before")
    taking = digests.begin(0, region_nbytes)
    left = body
    while left:
        nbytes = data.draw(st.integers(0, left.nbytes))
        taking.update(left[:nbytes])
        left = left[nbytes:]
    assert digests.values()[0] == xxh3_64_intdigest(b"before"), "not accepted yet"
    digests.accept(0, taking)
    first, second = region_nbytes[0], region_nbytes[0] + region_nbytes[1]
    assert digests.values() == [
        xxh3_64_intdigest(b"before" + body[:first].tobytes()),
        xxh3_64_intdigest(body[first:second]),
        xxh3_64_intdigest(body[second:]),
    ]


def test_a_body_that_was_given_up_leaves_no_trace(geometry):
    digests = RegionDigests(geometry)
    before = digests.values()
    digests.begin(1, [4, 4]).update(memoryview(b"12345"))
    assert digests.values() == before


@pytest.mark.parametrize(("layer", "region"), [(2, 0), (-1, 0), (0, 2), (0, -1)])
def test_there_is_no_such_region(geometry, layer, region):
    with pytest.raises(LocalProtocolError, match="no layer"):
        RegionDigests(geometry).update(layer, region, b"")


def test_a_block_table_that_is_too_short(layout, pool):
    with pytest.raises(LocalProtocolError):
        digest_blocks(layout, pool, [0], 5)


def test_equal_digests_pass(geometry):
    check_digests(geometry, [1, 2, 3, 4], [1, 2, 3, 4], sequence_id="s")


@pytest.mark.parametrize(
    ("index", "named"),
    [
        (0, "region k of layer layers.0"),
        (1, "region v of layer layers.0"),
        (3, "region v of layer layers.1"),
    ],
)
def test_the_first_region_that_differs_is_named(geometry, index, named):
    announced = [1, 2, 3, 4]
    announced[index] = 9
    with pytest.raises(DigestMismatch, match=named) as excinfo:
        check_digests(geometry, announced, [1, 2, 3, 4], sequence_id="s")
    assert excinfo.value.sequence_id == "s"


@pytest.mark.parametrize("num_digests", [0, 3, 5])
def test_the_number_of_digests_is_checked(geometry, num_digests):
    with pytest.raises(DigestMismatch, match=f"COMMIT has {num_digests} digests"):
        check_digests(geometry, [1] * num_digests, [1, 2, 3, 4], sequence_id="s")
