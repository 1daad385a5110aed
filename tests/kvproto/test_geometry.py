"""Regions, sizes, pieces of a pool, and the digests of a config and of a geometry."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from kvproto.errors import LocalProtocolError
from kvproto.geometry import (
    DTYPE_NBYTES,
    LAYOUT,
    SCALED_INT8,
    KvGeometry,
    Layer,
    PoolLayout,
    Region,
    config_digest,
    slot_runs,
)
from kvproto.shape import MAX_SEQ_LEN, Shape

LLAMA_7B = KvGeometry.uniform(32, 32, 128, "float16", tuple(f"layers.{i}" for i in range(32)))
K_AND_V = (Region("k", 2, 4), Region("v", 2, 4))
# A window, a latent, a state beside keys, a state alone.
MIXED = KvGeometry(
    (
        Layer("window", K_AND_V, window_tokens=5),
        Layer("latent", (Region("latent", 1, 6),)),
        Layer("both", (Region("k", 1, 3), Region("state", 1, 7, "sequence"))),
        Layer("state", (Region("state", 2, 5, "sequence"),)),
    ),
    "float16",
)


def test_llama_2_7b_needs_512_kib_a_token():
    assert LLAMA_7B.row_nbytes(LLAMA_7B.layers[0].regions[0]) == 8192
    assert LLAMA_7B.kv_token_nbytes == 512 * 1024
    assert LLAMA_7B.kv_sequence_nbytes == 0
    assert LLAMA_7B.write_nbytes(0, 3) == 2 * 3 * 8192
    assert LLAMA_7B.prompt_nbytes(3) == 3 * 512 * 1024
    assert LLAMA_7B.num_regions == 64


def test_sizes_of_every_sort_of_region():
    assert MIXED.kv_token_nbytes == 2 * (8 + 8 + 6 + 3)
    assert MIXED.kv_sequence_nbytes == 2 * (7 + 10)
    assert MIXED.num_regions == 6
    assert MIXED.region_nbytes(2, 3, is_last=False) == [18, 0]
    assert MIXED.region_nbytes(2, 3, is_last=True) == [18, 14]
    assert MIXED.write_nbytes(2, 3) == 18
    assert MIXED.write_nbytes(2, 3, is_last=True) == 32
    # 8 tokens: 5 of the window, all of the latent and the keys, the states once.
    assert MIXED.prompt_nbytes(8) == 2 * (5 * 16 + 8 * 6 + 8 * 3 + 7 + 10)


@pytest.mark.parametrize(
    ("layer", "num_tokens", "first_token"),
    [
        (Layer("a", K_AND_V), 9, 0),
        (Layer("a", K_AND_V, window_tokens=4), 9, 5),
        (Layer("a", K_AND_V, window_tokens=9), 9, 0),
        (Layer("a", K_AND_V, window_tokens=10), 9, 0),
        (Layer("a", (*K_AND_V, Region("state", 1, 1, "sequence"))), 9, 0),
        # A state alone travels with the last token.
        (Layer("a", (Region("state", 1, 1, "sequence"),)), 9, 8),
        (Layer("a", (Region("state", 1, 1, "sequence"),), window_tokens=4), 9, 8),
    ],
)
def test_only_what_the_next_token_needs_travels(layer, num_tokens, first_token):
    assert layer.first_needed_token(num_tokens) == first_token


def test_a_row_of_scaled_int8_has_a_scale_for_each_head():
    geometry = KvGeometry((Layer("a", (Region("k", 3, 5),)),), SCALED_INT8)
    assert geometry.kv_token_nbytes == 3 * 4 + 3 * 5


def test_facts_do_not_tell_the_block_size(geometry):
    assert geometry.facts() == {
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 4,
        "dtype": "float32",
        "layout": LAYOUT,
        "regions_digest": geometry.regions_digest(),
    }


def test_facts_leave_out_what_the_regions_do_not_share():
    assert MIXED.facts().keys() == {"num_layers", "dtype", "layout", "regions_digest"}
    shared = KvGeometry(
        (Layer("a", (Region("k", 1, 4), Region("v", 2, 4))), Layer("b", (Region("k", 3, 4),))),
        "float16",
    )
    assert shared.facts()["head_dim"] == 4
    assert "num_kv_heads" not in shared.facts()


def test_a_count_that_differs_between_regions_has_no_value(geometry):
    assert (geometry.num_kv_heads, geometry.head_dim) == (2, 4)
    for name in ("num_kv_heads", "head_dim"):
        with pytest.raises(LocalProtocolError, match=f"different {name}"):
            getattr(MIXED, name)


def test_regions_digest_is_of_this_json():
    geometry = KvGeometry((Layer("a", (Region("k", 2, 4),), 3), Layer("b", K_AND_V)), "float32")
    text = '[["a",3,[["k",2,4,"token"]]],["b",0,[["k",2,4,"token"],["v",2,4,"token"]]]]'
    assert geometry.regions_digest() == xxh3_64_hexdigest(text.encode())
    # Fixed for ever: releases compare it.
    assert geometry.regions_digest() == "9394d5432834e961"


def test_regions_digest_depends_on_every_name_shape_and_window_and_not_on_the_dtype():
    def geometry_of(layer="a", region="k", num_heads=2, head_dim=4, per="token", window=0):
        return KvGeometry(
            (Layer(layer, (Region(region, num_heads, head_dim, per),), window),), "float32"
        )

    changes = [
        {"layer": "b"},
        {"region": "v"},
        {"num_heads": 1},
        {"head_dim": 1},
        {"per": "sequence"},
        {"window": 1},
    ]
    digests = {geometry_of(**change).regions_digest() for change in [{}, *changes]}
    assert len(digests) == 1 + len(changes)
    assert geometry_of().as_wire("float16").regions_digest() == geometry_of().regions_digest()


def test_names_that_json_escapes_are_digested_as_json_does():
    geometry = KvGeometry((Layer('a"\\', (Region("k/v", 1, 1),)),), "float32")
    text = json.dumps([['a"\\', 0, [["k/v", 1, 1, "token"]]]], separators=(",", ":"))
    assert text == r'[["a\"\\",0,[["k/v",1,1,"token"]]]]'
    assert geometry.regions_digest() == xxh3_64_hexdigest(text.encode())


def test_the_shape_word_is_of_the_first_region_of_the_layer(geometry):
    assert Shape.decode(geometry.shape_word(0, 7)) == (1, 2, 4, 7)
    assert Shape.decode(MIXED.shape_word(1, 9)) == (1, 1, 6, 9)
    with pytest.raises(LocalProtocolError, match="seq_len"):
        geometry.shape_word(0, MAX_SEQ_LEN + 1)


@pytest.mark.parametrize("dtype", DTYPE_NBYTES)
def test_every_dtype_has_its_size(dtype):
    geometry = KvGeometry.uniform(1, 3, 5, dtype, ("a",))
    scales_nbytes = 3 * 4 if dtype == "int8" else 0
    assert geometry.element_nbytes == DTYPE_NBYTES[dtype]
    assert geometry.write_nbytes(0, 1) == 2 * (15 * DTYPE_NBYTES[dtype] + scales_nbytes)


# -- what a peer of another kind sends -------------------------------------------------------------


def test_as_wire_changes_dtype_and_heads_alone(geometry):
    wire = geometry.as_wire("float16", 1)
    assert wire == KvGeometry.uniform(2, 1, 4, "float16", geometry.layer_names)
    assert geometry.as_wire() == geometry
    assert geometry.as_wire(num_heads=1).dtype == "float32"
    windows = KvGeometry.uniform(2, 2, 4, "float32", ("a", "b"), windows_tokens=(0, 8))
    assert [layer.window_tokens for layer in windows.as_wire("int8", 1).layers] == [0, 8]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("int3",), "dtype 'int3' is unknown"), (("", 3), "3 heads asked for, region k has 2")],
)
def test_as_wire_refuses_what_is_not_there(geometry, arguments, named):
    with pytest.raises(LocalProtocolError, match=named):
        geometry.as_wire(*arguments)


# -- what the wire cannot carry --------------------------------------------------------------------


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
        ({"layer_names": ("a", "")}, "layer_names: ''"),
        ({"layer_names": ("a", "b" * 129)}, "layer_names: 'bbb"),
        ({"layer_names": ("a", "ä")}, "layer_names: 'ä'"),
        ({"layer_names": ("a", "b\n")}, "layer_names"),
        ({"windows_tokens": (1,)}, "1 windows"),
        ({"windows_tokens": (1, -1)}, "window_tokens of b is -1"),
        ({"windows_tokens": (1, MAX_SEQ_LEN + 1)}, "window_tokens of b"),
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
        KvGeometry.uniform(**{**fields, **change})


@pytest.mark.parametrize(
    ("regions", "named"),
    [
        ((), "number of regions of a is 0"),
        (tuple(Region(str(i), 1, 1) for i in range(9)), "number of regions of a is 9"),
        ((Region("k", 1, 1), Region("k", 1, 1)), "region names of a has 1 distinct names for 2"),
        ((Region("", 1, 1),), "region names of a: ''"),
        ((Region("k", 4096, 1),), "num_kv_heads is 4096"),
        ((Region("k", 1, 0),), "head_dim is 0"),
        ((Region("k", 1, 1, "block"),), "region k of a is per 'block'"),
    ],
)
def test_regions_the_wire_cannot_carry_are_refused(regions, named):
    with pytest.raises(LocalProtocolError, match=named):
        KvGeometry((Layer("a", regions),), "float32")


def test_a_geometry_without_layers_is_refused():
    with pytest.raises(LocalProtocolError, match="num_layers is 0"):
        KvGeometry((), "float32")


# -- pools -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["num_blocks", "block_size"])
def test_an_empty_pool_is_refused(geometry, field):
    with pytest.raises(LocalProtocolError, match=field):
        PoolLayout(**{"geometry": geometry, "num_blocks": 1, "block_size": 1, field: 0})


@pytest.mark.parametrize("kind", [LLAMA_7B, MIXED], ids=["uniform", "mixed"])
def test_the_pieces_of_all_blocks_tile_the_pool(kind):
    layout = PoolLayout(kind, num_blocks=3, block_size=2)
    pieces = sorted(
        piece
        for layer in range(kind.num_layers)
        for block in range(3)
        for spans in layout.pieces(layer, [block], 0, 2, is_last=True)
        for piece in spans
    )
    end = 0
    for start, nbytes in pieces:
        assert start == end
        end += nbytes
    assert end == layout.nbytes


def test_regions_lie_layer_by_layer(geometry):
    layout = PoolLayout(geometry, num_blocks=3, block_size=2)
    region_nbytes = 6 * 32
    starts = [layout.start(layer, region) for layer in range(2) for region in range(2)]
    assert starts == [0, region_nbytes, 2 * region_nbytes, 3 * region_nbytes]
    assert layout.nbytes == 4 * region_nbytes
    assert layout.num_slots == 6


def test_pieces_are_runs_of_rows(geometry):
    layout = PoolLayout(geometry, num_blocks=3, block_size=2)
    assert layout.pieces(1, [2, 0], 0, 3) == [
        [(layout.start(1, region) + 4 * 32, 2 * 32), (layout.start(1, region), 32)]
        for region in range(2)
    ]


def test_a_row_per_sequence_lies_with_the_first_block_and_comes_with_the_last_token():
    layout = PoolLayout(MIXED, num_blocks=4, block_size=2)
    assert layout.pieces(2, [3, 1], 0, 2)[1] == []
    assert layout.pieces(2, [3, 1], 2, 1, is_last=True)[1] == [(layout.start(2, 1) + 3 * 14, 14)]


@given(
    st.permutations(range(5)),
    st.integers(0, 3),
    st.integers(0, 9),
    st.integers(1, 10),
    st.booleans(),
)
def test_pieces_have_the_sizes_of_the_regions(block_table, layer, first_token, num_tokens, is_last):
    layout = PoolLayout(MIXED, num_blocks=5, block_size=2)
    if first_token + num_tokens > 10:
        with pytest.raises(LocalProtocolError, match="outside"):
            layout.pieces(layer, block_table, first_token, num_tokens, is_last=is_last)
        return
    pieces = layout.pieces(layer, block_table, first_token, num_tokens, is_last=is_last)
    sizes = [sum(nbytes for _, nbytes in spans) for spans in pieces]
    assert sizes == MIXED.region_nbytes(layer, num_tokens, is_last=is_last)


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
