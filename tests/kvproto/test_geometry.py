"""Sizes, offsets, slot runs, and the digest of a config."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.errors import LocalProtocolError
from kvproto.geometry import (
    DTYPE_NBYTES,
    LAYOUT,
    KvGeometry,
    PoolLayout,
    config_digest,
    slot_runs,
)
from kvproto.shape import Shape

LLAMA_7B = KvGeometry(32, 32, 128, "float16", tuple(f"layers.{i}" for i in range(32)))


def test_llama_2_7b_needs_512_kib_a_token():
    assert LLAMA_7B.token_nbytes == 8192
    assert LLAMA_7B.kv_token_nbytes == 512 * 1024
    assert LLAMA_7B.write_nbytes(3) == 2 * 3 * 8192


def test_facts_do_not_tell_the_block_size(geometry):
    assert geometry.facts() == {
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 4,
        "dtype": "float32",
        "layout": LAYOUT,
    }


def test_shape_word_is_of_all_layers_unless_told(geometry):
    assert Shape.decode(geometry.shape_word(7)) == (2, 2, 4, 7)
    assert Shape.decode(geometry.shape_word(7, layers=1)) == (1, 2, 4, 7)


@pytest.mark.parametrize("dtype", DTYPE_NBYTES)
def test_every_dtype_has_its_size(dtype):
    assert KvGeometry(1, 3, 5, dtype, ("a",)).token_nbytes == 15 * DTYPE_NBYTES[dtype]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": 4096}, "num_layers"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"head_dim": 4096}, "head_dim"),
        ({"dtype": "int3"}, "dtype"),
        ({"layer_names": ("a",)}, "layer_names"),
        ({"layer_names": ("a", "a")}, "layer_names"),
        ({"layer_names": ("a", "")}, "layer name"),
        ({"layer_names": ("a", "b" * 129)}, "layer name"),
        ({"layer_names": ("a", "ä")}, "layer name"),
        ({"layer_names": ("a", "b\n")}, "layer name"),
    ],
)
def test_a_geometry_the_wire_cannot_carry_is_refused(change, named):
    fields = {
        "num_layers": 2,
        "num_kv_heads": 1,
        "head_dim": 1,
        "dtype": "float32",
        "layer_names": ("a", "b"),
    }
    with pytest.raises(LocalProtocolError, match=named):
        KvGeometry(**{**fields, **change})


@pytest.mark.parametrize("field", ["num_blocks", "block_size"])
def test_an_empty_pool_is_refused(geometry, field):
    with pytest.raises(LocalProtocolError, match=field):
        PoolLayout(**{"geometry": geometry, "num_blocks": 1, "block_size": 1, field: 0})


def test_offsets_tile_the_pool(geometry):
    layout = PoolLayout(geometry, num_blocks=3, block_size=2)
    offsets = [
        layout.offset(layer, region, slot)
        for layer in range(2)
        for region in range(2)
        for slot in range(layout.num_slots)
    ]
    assert offsets == list(range(0, layout.nbytes, geometry.token_nbytes))


def test_spans_are_offsets_of_runs(geometry):
    layout = PoolLayout(geometry, num_blocks=3, block_size=2)
    assert layout.spans(1, 0, [(4, 2), (0, 1)]) == [
        (layout.offset(1, 0, 4), 2 * geometry.token_nbytes),
        (layout.offset(1, 0, 0), geometry.token_nbytes),
    ]


@given(
    st.permutations(range(12)),
    st.integers(1, 7),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_slot_runs_give_every_token_its_slot(block_table, block_size, first_token, num_tokens):
    if first_token + num_tokens > len(block_table) * block_size:
        with pytest.raises(LocalProtocolError, match="outside"):
            slot_runs(block_table, first_token, num_tokens, block_size)
        return
    runs = slot_runs(block_table, first_token, num_tokens, block_size)
    slots = [slot + i for slot, run in runs for i in range(run)]
    assert slots == [
        block_table[token // block_size] * block_size + token % block_size
        for token in range(first_token, first_token + num_tokens)
    ]
    # Neighbours are merged: no run continues the one before.
    assert all(a + n != b for (a, n), (b, _) in itertools.pairwise(runs))


def test_ascending_blocks_are_one_run():
    assert slot_runs([4, 5, 6], 3, 40, 16) == [(67, 40)]


@pytest.mark.parametrize("bounds", [(-1, 2), (0, -1)])
def test_a_negative_range_is_refused(bounds):
    with pytest.raises(LocalProtocolError):
        slot_runs([0], *bounds, 16)


def test_config_digest_is_of_the_content_not_of_the_text():
    one = config_digest({"b": [1, 2.5, None], "a": "ü"})
    assert one == config_digest({"a": "ü", "b": [1, 2.5, None]})
    assert one != config_digest({"a": "u", "b": [1, 2.5, None]})
    # Fixed for ever: workers and router of different releases compare it.
    assert config_digest({"hidden_size": 64}) == "4c174c557fa692eb"
    assert len(one) == 16


@pytest.mark.parametrize("value", [float("nan"), {1, 2}])
def test_config_digest_needs_plain_json(value):
    with pytest.raises(LocalProtocolError, match="plain JSON"):
        config_digest({"a": value})
