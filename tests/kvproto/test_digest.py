"""Digests by logical coordinate."""

import random

import pytest
from xxhash import xxh3_64_intdigest

from kvproto.buffer import swap_in_place
from kvproto.digest import RegionDigests, check_digests, digest_blocks
from kvproto.errors import DigestMismatch, LocalProtocolError
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.header import HOST_ORDER, ByteOrder

OTHER_ORDER = next(order for order in ByteOrder if order is not HOST_ORDER)


@pytest.fixture
def layout(geometry):
    return PoolLayout(geometry, num_blocks=8, block_size=4)


@pytest.fixture
def pool(layout):
    return memoryview(bytearray(random.Random(1).randbytes(layout.nbytes)))


def token_bytes(layout, pool, block_table, layer, region, token):
    slot = block_table[token // layout.block_size] * layout.block_size + token % layout.block_size
    start = layout.offset(layer, region, slot)
    return bytes(pool[start : start + layout.geometry.token_nbytes])


@pytest.mark.parametrize("block_table", [[0, 1, 2], [5, 2, 7], [3, 4, 1]])
@pytest.mark.parametrize("num_tokens", [1, 4, 11, 12])
def test_one_digest_for_each_region_over_tokens_in_order(layout, pool, block_table, num_tokens):
    assert digest_blocks(layout, pool, block_table, num_tokens) == [
        xxh3_64_intdigest(
            b"".join(
                token_bytes(layout, pool, block_table, layer, region, token)
                for token in range(num_tokens)
            )
        )
        for layer in range(2)
        for region in range(2)
    ]


def test_the_same_tokens_in_other_blocks_have_the_same_digests(layout, pool):
    other = memoryview(bytearray(pool))
    for layer in range(2):
        for region in range(2):
            for slot in range(8):
                source = layout.offset(layer, region, slot)
                target = layout.offset(layer, region, slot + 16)
                nbytes = layout.geometry.token_nbytes
                other[target : target + nbytes] = pool[source : source + nbytes]
    assert digest_blocks(layout, pool, [0, 1], 8) == digest_blocks(layout, other, [4, 5], 8)


def test_swapped_blocks_are_found(layout, pool):
    assert digest_blocks(layout, pool, [0, 1], 8) != digest_blocks(layout, pool, [1, 0], 8)


def test_incremental_digests_agree_with_those_of_the_pool(layout, pool, geometry):
    digests = RegionDigests(geometry)
    for token in range(7):
        for layer in range(2):
            for region in range(2):
                digests.update(
                    layer, region, token_bytes(layout, pool, [6, 2], layer, region, token)
                )
    assert digests.values() == digest_blocks(layout, pool, [6, 2], 7)


def test_digests_of_a_sender_with_the_other_byte_order():
    # Large enough for more than one piece.
    geometry = KvGeometry(1, 32, 128, "float32", ("a",))
    layout = PoolLayout(geometry, num_blocks=2, block_size=16)
    theirs = memoryview(bytearray(random.Random(2).randbytes(layout.nbytes)))
    ours = memoryview(bytearray(theirs))
    swap_in_place(ours, 4)
    announced = digest_blocks(layout, theirs, [0, 1], 30)
    assert digest_blocks(layout, ours, [0, 1], 30) != announced
    assert digest_blocks(layout, ours, [0, 1], 30, order=OTHER_ORDER) == announced


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
    [(0, "K of layer layers.0"), (1, "V of layer layers.0"), (3, "V of layer layers.1")],
)
def test_the_first_region_that_differs_is_named(geometry, index, named):
    announced = [1, 2, 3, 4]
    announced[index] = 9
    with pytest.raises(DigestMismatch, match=named) as excinfo:
        check_digests(geometry, announced, [1, 2, 3, 4], sequence_id="s")
    assert excinfo.value.sequence_id == "s"


def test_the_number_of_digests_is_checked(geometry):
    with pytest.raises(DigestMismatch, match="3 digests"):
        check_digests(geometry, [1, 2, 3], [1, 2, 3, 4], sequence_id="s")
