"""The canonical order of one prompt's KV, as arrays and as bytes."""

import numpy as np
import pytest

from kvproto.digest import digest_blocks
from kvproto.errors import LocalProtocolError
from kvproto.geometry import KvGeometry, Layer, PoolLayout, Region
from kvproto.kv_cache import CacheLayout, KvCache

# Odd sizes, a window, two regions of different shape, a state per sequence.
GEOMETRY = KvGeometry(
    (
        Layer("a", (Region("k", 2, 3), Region("v", 1, 5))),
        Layer("b", (Region("k", 1, 3), Region("state", 2, 7, "sequence")), 4),
        Layer("c", (Region("state", 1, 3, "sequence"),)),
    ),
    "float16",
)
TOKENS = range(100, 110)


def filled(geometry=GEOMETRY, tokens=TOKENS):
    cache = KvCache(geometry, tokens)
    for start, nbytes in cache.layout.spans():
        cache.memory[start : start + nbytes] = np.random.default_rng(start).bytes(nbytes)
    return cache


def test_each_region_starts_at_a_multiple_of_64_and_the_gaps_are_the_rest():
    layout = CacheLayout(GEOMETRY, 10)
    assert list(layout.spans()) == [(0, 120), (128, 100), (256, 24), (320, 28), (384, 6)]
    assert layout.gaps() == [(120, 8), (228, 28), (280, 40), (348, 36)]
    assert layout.nbytes == 390
    assert [layout.first_token(layer) for layer in range(3)] == [0, 6, 9]


def test_a_region_is_an_array_over_the_same_memory():
    cache = filled()
    assert cache.region("a", "k").shape == (10, 2, 3)
    assert cache.region("b", "k").shape == (4, 1, 3)
    assert cache.region("b", "state").shape == (1, 2, 7)
    assert cache.region("a", "v").dtype == np.float16
    assert (cache.first_token("a"), cache.first_token("b")) == (0, 6)
    cache.region("b", "k")[2, 0, 1] = 1.5
    start, nbytes = list(cache.layout.spans())[2]
    assert np.frombuffer(cache.memory[start : start + nbytes], np.float16)[7] == 1.5
    assert (
        not KvCache(GEOMETRY, TOKENS, memory=bytes(cache.memory)).region("a", "k").flags.writeable
    )


def test_views_are_the_bytes_of_a_token_range():
    cache = filled()
    k, v = cache.views(0, 3, 4)
    assert k == cache.region("a", "k")[3:7].tobytes()
    assert v == cache.region("a", "v")[3:7].tobytes()
    [k] = cache.views(1, 6, 2)
    assert k == cache.region("b", "k")[:2].tobytes()
    k, state = cache.views(1, 8, 2)
    assert state == cache.region("b", "state").tobytes()
    assert [view.nbytes for view in cache.views(2, 9, 1)] == [6]


@pytest.mark.parametrize(("first", "count"), [(5, 2), (6, 5), (7, -1)])
def test_rows_that_are_not_here_are_refused(first, count):
    with pytest.raises(LocalProtocolError, match=r"of layer b are not here: the cache has 6\.\.10"):
        filled().views(1, first, count)


def test_digests_are_those_of_the_same_rows_in_a_pool():
    cache = filled()
    layout = PoolLayout(GEOMETRY, 5, 3)
    pool = memoryview(bytearray(layout.nbytes))
    table = [4, 0, 3, 1]
    for layer in range(3):
        first = layout.geometry.layers[layer].first_needed_token(10)
        views = cache.views(layer, first, 10 - first)
        for view, spans in zip(
            views, layout.pieces(layer, table, first, 10 - first, is_last=True), strict=True
        ):
            for start, nbytes in spans:
                pool[start : start + nbytes] = view[:nbytes]
                view = view[nbytes:]
    assert cache.digests() == digest_blocks(layout, pool, table, 10)


def test_bfloat16_is_bits_and_has_numbers():
    cache = KvCache(GEOMETRY.as_wire("bfloat16"), TOKENS)
    bits = cache.region("a", "k")
    assert bits.dtype == np.uint16
    bits[1, 1, 2] = 0x3FC0
    assert cache.numbers("a", "k").dtype == np.float32
    assert cache.numbers("a", "k")[1, 1, 2] == 1.5
    with pytest.raises(LocalProtocolError, match="bfloat16 rows have no scales"):
        cache.scales("a", "k")


def test_int8_has_scales():
    cache = KvCache(GEOMETRY.as_wire("int8"), TOKENS)
    cache.region("a", "k")[9, 1] = [1, -2, 127]
    cache.scales("a", "k")[9, 1] = 0.5
    assert cache.region("a", "k").dtype == np.int8
    assert cache.scales("a", "k").shape == (10, 2)
    assert cache.numbers("a", "k")[9, 1].tolist() == [0.5, -1.0, 63.5]


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "float8_e5m2"])
def test_swapping_twice_changes_nothing_and_once_reverses_each_number(dtype):
    cache = filled(GEOMETRY.as_wire(dtype))
    before = bytes(cache.memory)
    numbers = np.array(cache.region("a", "k"))
    cache.swap_bytes()
    assert np.array_equal(cache.region("a", "k").view(np.uint8), numbers.byteswap().view(np.uint8))
    if dtype == "int8":
        assert bytes(cache.memory) != before
    cache.swap_bytes()
    assert bytes(cache.memory) == before


def test_unknown_names_are_refused_by_name():
    with pytest.raises(LocalProtocolError, match=r"no layer 'x'; the layers are a \.\. c"):
        filled().region("x", "k")
    with pytest.raises(LocalProtocolError, match="layer b has no region 'v', only k, state"):
        filled().region("b", "v")


def test_memory_of_another_size_and_no_tokens_are_refused():
    with pytest.raises(LocalProtocolError, match="has 3 bytes, 10 tokens need 390"):
        KvCache(GEOMETRY, TOKENS, memory=bytearray(3))
    with pytest.raises(LocalProtocolError, match="block_size is 0"):
        KvCache(GEOMETRY, [])


def test_a_cache_says_what_it_belongs_to():
    cache = KvCache(GEOMETRY, TOKENS, model="m", facts={"a": 1}, wire_error=0.5)
    assert (cache.model, cache.facts, cache.wire_error) == ("m", {"a": 1}, 0.5)
    assert (cache.tokens, cache.num_tokens) == (tuple(TOKENS), 10)
    assert (cache.geometry, cache.nbytes) == (GEOMETRY, 390)
