"""Rows in other element types and head ranges; torch is the reference for rounding."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvproto.blocks import BlockPool
from kvproto.convert import (
    CONVERTIBLE,
    HeadPart,
    RowConverter,
    RowView,
    WirePacker,
    bfloat16_to_float32,
    float32_to_bfloat16,
    plan_head_parts,
    rank_heads,
)
from kvproto.errors import ConversionError, LocalProtocolError
from kvproto.geometry import KvGeometry, Layer, PoolLayout, Region
from kvproto.header import HOST_ORDER
from kvproto.lease import LeaseTable, Part
from kvproto.messages import Commit, Write

REGION = Region("k", 3, 5)
FLOATS = sorted(CONVERTIBLE - {"int8"})


def rows_memory(dtype, num_rows, region=REGION):
    geometry = KvGeometry((Layer("a", (region,)),), dtype)
    return memoryview(bytearray(geometry.row_nbytes(region) * num_rows))


def random_rows(dtype, num_rows, region=REGION, seed=0):
    """Memory with normally distributed values, and the view over it."""
    memory = rows_memory(dtype, num_rows, region)
    view = RowView.over(memory, region, dtype)
    values = np.random.default_rng(seed).normal(size=view.elements.shape)
    view.assign_numbers(values)
    return memory, view


def as_torch(view):
    """The same rows as torch understands their bits."""
    array = np.ascontiguousarray(view.elements)
    if view.dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


# -- bfloat16 --------------------------------------------------------------------------------------


def test_every_bfloat16_becomes_the_float32_that_torch_makes_of_it():
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(torch.float32)
    ours = bfloat16_to_float32(bits)
    assert np.array_equal(ours.view(np.uint32), expected.numpy().view(np.uint32))
    back = float32_to_bfloat16(ours)
    is_nan = np.isnan(ours)
    assert np.array_equal(back[~is_nan], bits[~is_nan])
    assert np.isnan(bfloat16_to_float32(back[is_nan])).all()


def test_rounding_to_bfloat16_is_that_of_torch():
    # All upper halves with the lower halves around the tie.
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (upper[:, None] | lower).view(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    ours = float32_to_bfloat16(values)
    is_nan = np.isnan(values)
    assert np.array_equal(ours[~is_nan], expected.view(np.uint16)[~is_nan])
    assert np.isnan(bfloat16_to_float32(ours[is_nan])).all()


# -- floats ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [*itertools.permutations(FLOATS, 2)])
def test_floats_are_converted_as_torch_does(source, target):
    _, view = random_rows(source, 40)
    into = RowView.over(rows_memory(target, 40), REGION, target)
    into.assign(view)
    expected = as_torch(view).to(getattr(torch, target))
    assert torch.equal(as_torch(into), expected)


@pytest.mark.parametrize("dtype", [*sorted(CONVERTIBLE), "float8_e4m3fn", "float8_e5m2"])
def test_equal_types_are_copied_bit_for_bit(dtype):
    memory = rows_memory(dtype, 4)
    memory[:] = bytes(range(256)) * (memory.nbytes // 256) + bytes(memory.nbytes % 256)
    target = rows_memory(dtype, 4)
    RowConverter().unpack(memory, REGION, dtype, [target], REGION, dtype, 0)
    assert target == memory


def test_not_a_number_and_infinity_travel_between_floats():
    source = RowView.over(rows_memory("float32", 1), REGION, "float32")
    source.elements[0, 0, :3] = [np.nan, np.inf, -np.inf]
    for dtype in FLOATS:
        target = RowView.over(rows_memory(dtype, 1), REGION, dtype)
        target.assign(source)
        first, second, third = target.numbers()[0, 0, :3]
        assert (math.isnan(first), second, third) == (True, math.inf, -math.inf)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_not_read_as_numbers(dtype):
    view = RowView.over(rows_memory(dtype, 1), REGION, dtype)
    with pytest.raises(LocalProtocolError, match=f"cannot read {dtype} as numbers"):
        view.numbers()
    with pytest.raises(LocalProtocolError, match=f"cannot convert numbers to {dtype}"):
        view.assign_numbers(np.zeros((1, 3, 5), np.float32))


# -- scaled int8 -----------------------------------------------------------------------------------


def test_a_row_of_int8_is_its_scales_and_then_its_integers():
    memory = rows_memory("int8", 1, Region("k", 2, 4))
    view = RowView.over(memory, Region("k", 2, 4), "int8")
    view.assign_numbers(np.array([[[127.0, -64.0, 0.5, 1.5], [0.0, 0.0, 0.0, 0.0]]], np.float32))
    assert bytes(memory) == (
        np.array([1.0, 0.0], np.float32).tobytes()  # an all-zero head has scale 0
        + np.array([127, -64, 0, 2, 0, 0, 0, 0], np.int8).tobytes()  # ties go to even
    )
    assert view.numbers().tolist() == [[[127.0, -64.0, 0.0, 2.0], [0.0] * 4]]


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=15, max_size=15)
)
def test_int8_is_within_half_a_step_of_every_finite_number(values):
    array = np.array(values, np.float32).reshape(1, 3, 5)
    view = RowView.over(rows_memory("int8", 1), REGION, "int8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view.assign_numbers(array)
        read_back = view.numbers().astype(np.float64)
    largest = np.abs(array.astype(np.float64)).max(axis=2, keepdims=True)
    # Half a step, and what the scale's own rounding (a subnormal has few digits) adds.
    allowed = largest / 127 * 0.5001 + 128 * np.finfo(np.float32).smallest_subnormal
    assert (np.abs(read_back - array) <= allowed).all()


def test_a_receiver_takes_whatever_scales_a_peer_sends():
    memory = rows_memory("int8", 1)
    view = RowView.over(memory, REGION, "int8")
    view.scales[0] = [np.nan, np.inf, 1.0]
    pool = rows_memory("float16", 1)
    RowConverter().unpack(memory, REGION, "int8", [pool], REGION, "float16", 0)
    numbers = RowView.over(pool, REGION, "float16").numbers()
    assert np.isnan(numbers[0, :2]).all()
    assert (numbers[0, 2] == 0).all()


def test_a_pool_of_int8_takes_infinities_without_raising():
    source = RowView.over(rows_memory("float32", 1), REGION, "float32")
    source.elements[0, 0] = [np.inf, 1, 2, 3, 4]
    target = RowView.over(rows_memory("int8", 1), REGION, "int8")
    target.assign(source)
    assert not np.isfinite(target.numbers()[0, 0]).any()
    assert (target.numbers()[0, 1] == 0).all()


# -- unpacking -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire_dtype", sorted(CONVERTIBLE))
@pytest.mark.parametrize("pool_dtype", sorted(CONVERTIBLE))
def test_some_heads_land_among_others_in_any_pieces(wire_dtype, pool_dtype):
    wire_region = Region("k", 2, 5)
    pool_region = Region("k", 6, 5)
    wire, source = random_rows(wire_dtype, 7, wire_region)
    pieces = [rows_memory(pool_dtype, count, pool_region) for count in (3, 0, 4)]
    RowConverter().unpack(wire, wire_region, wire_dtype, pieces, pool_region, pool_dtype, 3)
    whole = memoryview(bytearray(b"".join(pieces)))
    landed = RowView.over(whole, pool_region, pool_dtype).numbers()
    expected = RowView.over(rows_memory(pool_dtype, 7, wire_region), wire_region, pool_dtype)
    expected.assign(source)
    assert np.array_equal(landed[:, 3:5], expected.numbers())
    assert (landed[:, :3] == 0).all()
    assert (landed[:, 5:] == 0).all()


@pytest.mark.parametrize(
    ("num_rows", "pool_rows", "first_head", "words"),
    [
        (2, [3], 0, "there are 2 rows and room for more"),
        (3, [1, 1], 0, "cannot unpack 3 rows into room for 2"),
        (2, [2], 1, r"heads 1\.\.4 are outside rows of 3 heads"),
    ],
)
def test_rows_that_do_not_fit_are_refused(num_rows, pool_rows, first_head, words):
    wire = rows_memory("float32", num_rows)
    pool = [rows_memory("float16", count) for count in pool_rows]
    with pytest.raises(LocalProtocolError, match=words):
        RowConverter().unpack(wire, REGION, "float32", pool, REGION, "float16", first_head)


def test_memory_that_is_not_whole_rows_is_refused():
    with pytest.raises(LocalProtocolError, match="7 bytes are not a multiple of 60"):
        RowView.over(memoryview(bytearray(7)), REGION, "float32")
    with pytest.raises(LocalProtocolError, match="'int4': it is unknown"):
        RowView.over(memoryview(bytearray(7)), REGION, "int4")


# -- packing ---------------------------------------------------------------------------------------

POOL = KvGeometry(
    (
        Layer("a", (Region("k", 4, 8), Region("v", 4, 8))),
        Layer("b", (Region("s", 4, 2, "sequence"),)),
    ),
    "float32",
)


def pool_buffers(num_tokens, seed=1):
    rng = np.random.default_rng(seed)
    return [
        memoryview(rng.normal(size=(num_tokens, 4, 8)).astype(np.float32)).cast("B")
        for _ in range(2)
    ]


@pytest.mark.parametrize("dtype", [*FLOATS, "int8"])
def test_what_is_packed_is_unpacked_into_the_same_values_within_its_error(dtype):
    k, v = pool_buffers(9)
    row_nbytes = POOL.row_nbytes(POOL.layers[0].regions[0])
    packer = WirePacker(POOL, POOL.as_wire(dtype, 2), first_head=1)
    assert packer.is_needed
    # The pool's pieces are cut where its blocks end; the wire does not show where.
    cut = [k[: 4 * row_nbytes], k[4 * row_nbytes :], v[:row_nbytes], v[row_nbytes:]]
    packed = packer.pack(0, 9, cut)
    assert [body.nbytes for body in packed] == packer.wire.region_nbytes(0, 9, is_last=False)
    wire_region = packer.wire.layers[0].regions[0]
    squares = []
    for body, sent in zip(packed, (k, v), strict=True):
        landed = RowView.over(body, wire_region, dtype).numbers()
        exact = np.frombuffer(sent, np.float32).reshape(9, 4, 8)[:, 1:3].astype(np.float64)
        squares.append((((landed - exact) ** 2).sum(), (exact**2).sum()))
    error = math.sqrt(sum(lost for lost, _ in squares) / sum(held for _, held in squares))
    assert packer.wire_error == pytest.approx(error, rel=1e-6, abs=1e-30)
    bounds = {"float64": 0.0, "float32": 0.0, "float16": 3e-4, "bfloat16": 3e-3, "int8": 7e-3}
    assert packer.wire_error <= bounds[dtype]
    assert (packer.wire_error > 0) == (bounds[dtype] > 0)


@pytest.mark.parametrize("size", [1e-25, 1e-3, 1e25])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_error_is_relative_whatever_the_size_of_the_values(dtype, size):
    # More rows than are packed at a time.
    k, v = pool_buffers(3000)
    for buffer in (k, v):
        buffer.cast("f")[:] = (np.frombuffer(buffer, np.float32) * np.float32(size)).data
    packer = WirePacker(POOL, POOL.as_wire(dtype))
    packed = packer.pack(0, 3000, [k, v])
    region = POOL.layers[0].regions[0]
    landed = [RowView.over(body, region, dtype).numbers().astype(np.float64) for body in packed]
    exact = [np.frombuffer(b, np.float32).reshape(3000, 4, 8).astype(np.float64) for b in (k, v)]
    lost = np.stack(landed) - np.stack(exact)
    error = np.linalg.norm(lost.ravel()) / np.linalg.norm(np.stack(exact).ravel())
    assert 1e-4 < error < 1e-2
    assert packer.wire_error == pytest.approx(error, rel=1e-4)


def test_rows_per_sequence_travel_with_the_last_token():
    state = memoryview(np.arange(8, dtype=np.float32)).cast("B")
    packer = WirePacker(POOL, POOL.as_wire("float16"))
    assert packer.pack(1, 3, []) == []
    [body] = packer.pack(1, 3, [state], is_last=True)
    assert np.frombuffer(body, np.float16).tolist() == list(range(8))


def test_nothing_is_needed_when_nothing_differs():
    packer = WirePacker(POOL, POOL.as_wire())
    assert not packer.is_needed
    assert packer.pack(0, 2, pool_buffers(2)) == pool_buffers(2)
    assert packer.wire_error == 0.0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_int8_refuses_what_has_no_integer(value):
    array = np.ones((1, 4, 8), np.float32)
    array[0, 2, 3] = value
    view = memoryview(array).cast("B")
    with pytest.raises(ConversionError, match="region k holds NaN or infinity, which int8"):
        WirePacker(POOL, POOL.as_wire("int8")).pack(0, 1, [view, view])


def test_infinities_travel_between_floats_and_do_not_count_as_an_error():
    array = np.full((1, 4, 8), 1.0, np.float32)
    array[0, 0, :2] = [np.inf, np.nan]
    view = memoryview(array).cast("B")
    packer = WirePacker(POOL, POOL.as_wire("float16"))
    packed, _ = packer.pack(0, 1, [view, view])
    landed = np.frombuffer(packed, np.float16)
    assert (landed[0], np.isnan(landed[1]), landed[2]) == (np.inf, True, 1.0)
    assert packer.wire_error == 0.0


@pytest.mark.parametrize(("dtype", "value"), [("float16", 70000.0), ("bfloat16", 3.4e38)])
def test_a_number_beyond_the_range_is_refused_instead_of_made_infinite(dtype, value):
    array = np.full((1, 4, 8), value, np.float32)
    view = memoryview(array).cast("B")
    with pytest.raises(ConversionError, match=f"beyond the range of {dtype}; ask for a wider type"):
        WirePacker(POOL, POOL.as_wire(dtype)).pack(0, 1, [view, view])


def test_sizes_that_do_not_add_up_are_refused():
    k, v = pool_buffers(2)
    packer = WirePacker(POOL, POOL.as_wire("float16"))
    with pytest.raises(LocalProtocolError, match="do not add up"):
        packer.pack(0, 2, [k])
    with pytest.raises(LocalProtocolError, match="do not add up"):
        packer.pack(0, 1, [k, v])
    with pytest.raises(LocalProtocolError, match="1 buffers are left"):
        packer.pack(0, 2, [k, v, v])


def test_impossible_wires_are_refused_at_once():
    with pytest.raises(LocalProtocolError, match=r"heads 3\.\.5 asked for, region k of a has 4"):
        WirePacker(POOL, POOL.as_wire("", 2), first_head=3)
    with pytest.raises(LocalProtocolError, match="from float32 to float8_e5m2"):
        WirePacker(POOL, POOL.as_wire("float8_e5m2"))


# -- through a lease -------------------------------------------------------------------------------


def test_two_half_senders_of_another_type_fill_one_pool_with_odd_blocks():
    pool_geometry = KvGeometry.uniform(1, 4, 8, "float32", ["a"])
    layout = PoolLayout(pool_geometry, 4, 3)
    pool = memoryview(bytearray(layout.nbytes))
    blocks = BlockPool(4)
    leases = LeaseTable(layout, pool, blocks, converter=RowConverter())
    table = [*blocks.allocate("s", 4)]
    table.reverse()
    wire = pool_geometry.as_wire("bfloat16", 2)
    parts = [Part(1, "left", wire, 0), Part(2, "right", wire, 2)]
    leases.grant_parts("s", parts, table, 10)
    held = np.random.default_rng(3).normal(size=(2, 10, 4, 8)).astype(np.float32)
    source = KvGeometry.uniform(1, 4, 8, "float32", ["a"])
    for part in parts:
        packer = WirePacker(source, wire, part.first_head)
        nbytes = 0
        for first, count in ((0, 7), (7, 3)):
            buffers = [memoryview(held[r, first : first + count].copy()).cast("B") for r in (0, 1)]
            write = Write("s", part.generation, "a", first, count)
            body = b"".join(packer.pack(0, count, buffers))
            targets = leases.destination(write, len(body), wire.shape_word(0, count), part.writer)
            unread = memoryview(body)
            for target in targets:
                target[:] = unread[: target.nbytes]
                leases.received(write, target)
                unread = unread[target.nbytes :]
            leases.landed(write, HOST_ORDER)
            nbytes += len(body)
        digests = leases._leases[part.generation].digests.values()
        leases.commit(Commit("s", part.generation, 10, nbytes, digests, 0.0, 0.0, 0.0))
    landed = [
        np.concatenate(
            [
                np.frombuffer(pool[start : start + nbytes], np.float32).reshape(-1, 4, 8)
                for start, nbytes in spans
            ]
        )
        for spans in layout.pieces(0, table, 0, 10)
    ]
    expected = bfloat16_to_float32(float32_to_bfloat16(held))
    assert np.array_equal(np.stack(landed), expected)


# -- tensor-parallel degrees -----------------------------------------------------------------------


def test_degrees_that_divide():
    assert plan_head_parts(8, 2, 0, 4) == [HeadPart(0, 0, 0, 2)]
    assert plan_head_parts(8, 2, 3, 4) == [HeadPart(1, 2, 0, 2)]
    assert plan_head_parts(8, 4, 1, 2) == [HeadPart(2, 0, 0, 2), HeadPart(3, 0, 2, 2)]
    assert plan_head_parts(8, 1, 0, 1) == [HeadPart(0, 0, 0, 8)]
    # Neither degree divides the other.
    assert plan_head_parts(12, 3, 1, 2) == [HeadPart(1, 2, 0, 2), HeadPart(2, 0, 2, 4)]


def test_more_ranks_than_heads_hold_copies_and_share_the_work():
    assert [plan_head_parts(2, 8, rank, 2)[0].sender_rank for rank in (0, 1)] == [0, 5]
    # One latent or one KV head: every receiver has it, from senders in turn.
    assert [plan_head_parts(1, 4, rank, 8) for rank in (0, 1, 6)] == [
        [HeadPart(0, 0, 0, 1)],
        [HeadPart(1, 0, 0, 1)],
        [HeadPart(2, 0, 0, 1)],
    ]
    assert plan_head_parts(2, 1, 3, 4) == [HeadPart(0, 1, 0, 1)]


@given(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), st.data())
def test_every_head_of_a_receiver_comes_once_from_a_sender_that_holds_it(num_heads, data):
    degrees = [d for d in range(1, 25) if num_heads % d == 0 or d % num_heads == 0]
    sender_degree = data.draw(st.sampled_from(degrees))
    receiver_degree = data.draw(st.sampled_from(degrees))
    for receiver_rank in range(receiver_degree):
        wanted = rank_heads(num_heads, receiver_rank, receiver_degree)
        received = []
        for part in plan_head_parts(num_heads, sender_degree, receiver_rank, receiver_degree):
            held = rank_heads(num_heads, part.sender_rank, sender_degree)
            sent = held[part.sender_first_head : part.sender_first_head + part.num_heads]
            assert len(sent) == part.num_heads
            assert part.receiver_first_head == len(received)
            received += sent
        assert received == list(wanted)


@pytest.mark.parametrize(
    "arguments",
    [(8, 3, 0, 1), (8, 1, 0, 3), (8, 2, 2, 2), (8, 2, -1, 2), (0, 1, 0, 1), (8, 0, 0, 1)],
)
def test_degrees_that_do_not_fit_are_refused(arguments):
    with pytest.raises(LocalProtocolError, match=r"KV heads cannot be split|there is no rank"):
        plan_head_parts(*arguments)
