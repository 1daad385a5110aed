"""Whole transfers through two connections: every sort of region, dtype, order and cut.

The sender is written here from docs/wire.md sections 4.1, 6.1 and 7.1, so that it agrees with the
receiver by the document and not by shared code.
"""

import itertools
import random
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64

from kvproto.blocks import BlockPool
from kvproto.convert import RowConverter
from kvproto.errors import ChecksumMismatch, DigestMismatch, ErrorCode, UnexpectedMessage
from kvproto.events import Ended, MessageReceived, WriteRefused
from kvproto.geometry import DTYPE_NBYTES, KvGeometry, Layer, PoolLayout, Region
from kvproto.handshake import Identity
from kvproto.header import HOST_ORDER, ByteOrder
from kvproto.lease import LeaseTable, Part
from kvproto.messages import Commit, Placed, Write

BLOCK_SIZE = 4
NUM_BLOCKS = 6
OTHER_ORDER = next(order for order in ByteOrder if order is not HOST_ORDER)
UNIFORM = KvGeometry.uniform(2, 2, 4, "float32", ("layers.0", "layers.1"))
MIXED = KvGeometry(
    (
        Layer("window", (Region("k", 2, 4), Region("v", 2, 4)), window_tokens=5),
        Layer("latent", (Region("latent", 1, 6),)),
        Layer("both", (Region("k", 1, 3), Region("state", 1, 7, "sequence"), Region("v", 1, 2))),
        Layer("state", (Region("state", 2, 5, "sequence"),)),
    ),
    "float32",
)
GEOMETRIES = {"uniform": UNIFORM, "mixed": MIXED}


class Receiver:
    """A pool with one lease, and its side of a connection."""

    def __init__(self, geometry, num_tokens, *, wire_geometry=None, is_placed=False):
        self.layout = PoolLayout(geometry, NUM_BLOCKS, BLOCK_SIZE)
        self.pool = memoryview(bytearray(self.layout.nbytes))
        blocks = BlockPool(NUM_BLOCKS)
        # Not in ascending order where there is room for that: several pieces.
        blocks.allocate("x", NUM_BLOCKS)
        blocks.free([1, 3, 4, 5], "x")
        self.leases = LeaseTable(self.layout, self.pool, blocks, converter=RowConverter())
        self.table = blocks.allocate("s", -(-num_tokens // BLOCK_SIZE))
        self.num_tokens = num_tokens
        part = Part(1, "p", wire_geometry, is_placed=is_placed)
        self.leases.grant_parts("s", [part], self.table, num_tokens)

    def rows(self, layer, region):
        """What the pool holds for the sequence, in token order, from the first needed token."""
        first = self.layout.geometry.layers[layer].first_needed_token(self.num_tokens)
        spans = self.layout.pieces(layer, self.table, first, self.num_tokens - first, is_last=True)[
            region
        ]
        return b"".join(self.pool[start : start + nbytes] for start, nbytes in spans)


class Sender:
    """The rows of a prompt in the sender's order, as the document says they travel."""

    def __init__(self, geometry, num_tokens, seed=1):
        self.geometry, self.num_tokens = geometry, num_tokens
        self.regions = {}
        source = random.Random(seed)
        for layer, held in enumerate(geometry.layers):
            for index, region in enumerate(held.regions):
                num_rows = 1 if region.per == "sequence" else num_tokens - self.first(layer)
                nbytes = num_rows * geometry.row_nbytes(region)
                self.regions[layer, index] = source.randbytes(nbytes)

    def first(self, layer):
        held = self.geometry.layers[layer]
        if all(region.per == "sequence" for region in held.regions):
            return self.num_tokens - 1
        window = held.window_tokens
        return max(0, self.num_tokens - window) if window else 0

    def body(self, layer, first_token, num_tokens):
        pieces = []
        for index, region in enumerate(self.geometry.layers[layer].regions):
            rows = self.regions[layer, index]
            nbytes = self.geometry.row_nbytes(region)
            if region.per == "sequence":
                pieces.append(rows if first_token + num_tokens == self.num_tokens else b"")
            else:
                start = (first_token - self.first(layer)) * nbytes
                pieces.append(rows[start : start + num_tokens * nbytes])
        return b"".join(pieces)

    def frames(self, wire, order, chunk_tokens, *, is_body_checked):
        """WRITEs, chunk by chunk and in each layer by layer, as bytes."""
        for start in range(0, self.num_tokens, chunk_tokens):
            end = min(start + chunk_tokens, self.num_tokens)
            for layer, held in enumerate(self.geometry.layers):
                first = max(start, self.first(layer))
                if first >= end:
                    continue
                region = held.regions[0]
                shape_word = 1 << 52 | region.num_heads << 40 | region.head_dim << 28 | end - first
                yield wire.frame(
                    Write("s", 1, held.name, first, end - first),
                    [self.body(layer, first, end - first)],
                    shape_word,
                    order,
                    is_body_checked,
                )

    def commit(self):
        digests = [xxh3_64(rows).intdigest() for rows in self.regions.values()]
        nbytes = sum(map(len, self.regions.values()))
        return Commit("s", 1, self.num_tokens, nbytes, digests, 0.0, 0.0, 0.0)


def swapped(rows, geometry, region):
    """Rows of a host of the other order, in this host's."""
    element_nbytes = DTYPE_NBYTES[geometry.dtype]
    raw = np.frombuffer(rows, np.uint8).copy()
    if geometry.dtype == "int8":
        scales = raw.reshape(-1, geometry.row_nbytes(region))[:, : 4 * region.num_heads]
        scales[...] = scales.reshape(-1, 4)[:, ::-1].reshape(scales.shape)
        return raw.tobytes()
    return raw.reshape(-1, element_nbytes)[:, ::-1].tobytes()


def connected(wire, receiver):
    decode = Identity("decode", "d")
    return wire.connected(decode, Identity("prefill", "p"), client_landing=receiver.leases)[0]


@pytest.mark.parametrize("dtype", DTYPE_NBYTES)
@pytest.mark.parametrize("order", ByteOrder)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_dtype_lands_in_this_hosts_order(wire, name, dtype, order):
    geometry = replace(GEOMETRIES[name], dtype=dtype)
    receiver, sender = Receiver(geometry, 11), Sender(geometry, 11)
    left = connected(wire, receiver)
    frames = b"".join(sender.frames(wire, order, 4, is_body_checked=False))
    events = wire.feed(left, frames)
    assert {type(event) for event in events} == {MessageReceived}
    # The digests are those of the bytes as the sender's memory holds them.
    assert receiver.leases.commit(sender.commit())
    for (layer, index), rows in sender.regions.items():
        region = geometry.layers[layer].regions[index]
        expected = rows if order is HOST_ORDER else swapped(rows, geometry, region)
        assert receiver.rows(layer, index) == expected


@given(
    name=st.sampled_from(sorted(GEOMETRIES)),
    num_tokens=st.integers(1, 16),
    chunk_tokens=st.integers(1, 16),
    piece_nbytes=st.integers(1, 400),
    order=st.sampled_from(ByteOrder),
    is_body_checked=st.booleans(),
)
def test_however_a_transfer_is_cut(
    wire, name, num_tokens, chunk_tokens, piece_nbytes, order, is_body_checked
):
    geometry = GEOMETRIES[name]
    receiver, sender = Receiver(geometry, num_tokens), Sender(geometry, num_tokens)
    left = connected(wire, receiver)
    frames = sender.frames(wire, order, chunk_tokens, is_body_checked=is_body_checked)
    events = wire.feed(left, b"".join(frames), piece_nbytes)
    assert {type(event) for event in events} == {MessageReceived}
    commit = sender.commit()
    assert commit.nbytes == geometry.prompt_nbytes(num_tokens)
    assert receiver.leases.landed_nbytes(1) == commit.nbytes
    assert receiver.leases.commit(commit)


@pytest.mark.parametrize("sender_order", ByteOrder)
@pytest.mark.parametrize(
    ("pool_dtype", "wire_dtype"),
    [("float32", "float16"), ("float16", "float32"), ("float32", "int8")],
)
def test_a_dtype_of_the_wire_is_digested_swapped_and_then_converted(
    wire, sender_order, pool_dtype, wire_dtype
):
    geometry = KvGeometry.uniform(1, 2, 4, pool_dtype, ("a",))
    travelling = geometry.as_wire(wire_dtype)
    receiver = Receiver(geometry, 6, wire_geometry=travelling)
    sender = Sender(travelling, 6)
    prefix = "<" if sender_order is ByteOrder.LITTLE else ">"
    numbers = {}
    for key in sender.regions:
        values = np.arange(6 * 2 * 4).reshape(6, 2, 4) - 20
        if wire_dtype == "int8":
            rows = [
                struct.pack(prefix + "2f", 0.5, 2.0) + row.astype(np.int8).tobytes()
                for row in values
            ]
            sender.regions[key] = b"".join(rows)
            numbers[key] = values * np.array([[[0.5], [2.0]]])
        else:
            code = {"float16": "f2", "float32": "f4"}[wire_dtype]
            sender.regions[key] = values.astype(prefix + code).tobytes()
            numbers[key] = values
    left = connected(wire, receiver)
    wire.feed(left, b"".join(sender.frames(wire, sender_order, 4, is_body_checked=False)))
    assert receiver.leases.commit(sender.commit())
    for (layer, index), values in numbers.items():
        expected = values.astype({"float32": np.float32, "float16": np.float16}[pool_dtype])
        assert receiver.rows(layer, index) == expected.tobytes()


@pytest.mark.parametrize("is_body_checked", [True, False])
def test_a_flipped_bit_of_a_body(wire, is_body_checked):
    """Found by the frame if the frame covers its body, and else by COMMIT."""
    receiver, sender = Receiver(UNIFORM, 6), Sender(UNIFORM, 6)
    left = connected(wire, receiver)
    first, *rest = sender.frames(wire, HOST_ORDER, 6, is_body_checked=is_body_checked)
    damaged = bytearray(first)
    damaged[-1] ^= 0x10
    events = wire.feed(left, [damaged, *rest])
    if is_body_checked:
        assert isinstance(events[-1], Ended)
        assert isinstance(events[-1].error, ChecksumMismatch)
        assert receiver.leases.landed_nbytes(1) == 0
        return
    assert {type(event) for event in events} == {MessageReceived}
    with pytest.raises(DigestMismatch, match=r"region v of layer layers\.0"):
        receiver.leases.commit(sender.commit())


def test_every_flipped_bit_of_an_unchecked_head_is_found_before_its_body(wire):
    sender = Sender(UNIFORM, 1)
    (frame, _) = sender.frames(wire, HOST_ORDER, 1, is_body_checked=False)
    body_nbytes = UNIFORM.write_nbytes(0, 1)
    for bit in range((len(frame) - body_nbytes) * 8):
        receiver = Receiver(UNIFORM, 1)
        left = connected(wire, receiver)
        damaged = bytearray(frame[:-body_nbytes])
        damaged[bit // 8] ^= 1 << bit % 8
        (event,) = wire.feed(left, damaged)
        assert isinstance(event, Ended), bit
        assert receiver.leases.quiesced(1)


def test_every_flipped_bit_of_an_unchecked_body_is_found_at_commit(wire):
    sender = Sender(UNIFORM, 1)
    frames = list(sender.frames(wire, HOST_ORDER, 1, is_body_checked=False))
    body_nbytes = UNIFORM.write_nbytes(0, 1)
    for frame, bit in itertools.product(range(2), range(0, body_nbytes * 8, 7)):
        receiver = Receiver(UNIFORM, 1)
        left = connected(wire, receiver)
        damaged = [bytearray(raw) for raw in frames]
        damaged[frame][-1 - bit // 8] ^= 1 << bit % 8
        assert {type(event) for event in wire.feed(left, damaged)} == {MessageReceived}
        with pytest.raises(DigestMismatch):
            receiver.leases.commit(sender.commit())


def test_placed_is_counted_where_it_was_granted_and_refused_elsewhere(wire):
    receiver, sender = Receiver(UNIFORM, 6, is_placed=True), Sender(UNIFORM, 6)
    left = connected(wire, receiver)
    for (layer, index), rows in sender.regions.items():
        for start, nbytes in receiver.layout.pieces(layer, receiver.table, 0, 6)[index]:
            receiver.pool[start : start + nbytes], rows = rows[:nbytes], rows[nbytes:]
    write = next(sender.frames(wire, HOST_ORDER, 6, is_body_checked=False))
    (refused,) = wire.feed(left, write)
    assert isinstance(refused, WriteRefused)
    for layer in UNIFORM.layer_names:
        placed = Placed("s", 1, layer, 0, 6)
        assert wire.feed(left, wire.frame(placed)) == [MessageReceived(placed)]
    assert receiver.leases.commit(sender.commit())
    (refused,) = wire.feed(left, wire.frame(Placed("s", 1, "layers.0", 0, 6)))
    assert isinstance(refused, WriteRefused)
    assert refused.error.code == ErrorCode.LEASE
    assert left.num_writes_refused == 2


def test_placed_without_a_landing_is_unexpected(wire, decode, prefill):
    left, _ = wire.connected(decode, prefill)
    (event,) = wire.feed(left, wire.frame(Placed("s", 1, "layers.0", 0, 6)))
    assert isinstance(event.error, UnexpectedMessage)


def test_a_half_received_write_of_a_revoked_lease_lands_without_being_counted(wire):
    receiver, sender = Receiver(UNIFORM, 6), Sender(UNIFORM, 6)
    left = connected(wire, receiver)
    frame = next(sender.frames(wire, OTHER_ORDER, 6, is_body_checked=False))
    assert wire.feed(left, frame[:-1]) == []
    receiver.leases.revoke(1)
    assert not receiver.leases.quiesced(1)
    wire.feed(left, frame[-1:])
    assert receiver.leases.quiesced(1)
    assert receiver.leases.landed_nbytes(1) == 0
