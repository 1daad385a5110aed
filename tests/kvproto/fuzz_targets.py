"""Every decoder as a function of bytes that may do nothing but return, whatever the bytes are.

A target raises nothing for an input that its decoder refuses with a documented error, and
anything else for a finding. ``TARGETS`` lists them, each with valid inputs to start from and the
most memory it may take for one input; a new decoder joins by one more entry.

The first bytes of some inputs choose what is done with the rest, and checksums are mended, so that
a fuzzer reaches what lies behind them.
"""

import contextlib
import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import msgpack
from xxhash import xxh3_64_intdigest

from kvproto.blocks import BlockPool
from kvproto.connection import Connection
from kvproto.description import described_geometry, layer_records
from kvproto.digest import RegionDigests
from kvproto.errors import (
    BadByteOrder,
    BadMagic,
    CarrierUnavailable,
    ChecksumMismatch,
    HandshakeRefused,
    KvProtoError,
    LeaseError,
    Malformed,
    PayloadTooLarge,
    RemoteProtocolError,
    UnknownKind,
    UnsupportedVersion,
)
from kvproto.events import Ended, HandshakeDone, MessageReceived
from kvproto.frame import (
    MAX_DESCRIPTOR_NBYTES,
    check_padding,
    decode_descriptor,
    decode_frame,
    decode_prefix,
    encode_frame,
    padding_nbytes,
)
from kvproto.geometry import KvGeometry, Layer, PoolLayout
from kvproto.geometry import Region as RegionShape
from kvproto.handshake import CANARY_NBYTES, Identity, canary_bytes, check_canary
from kvproto.header import (
    BODY_UNCHECKED,
    CHECKED_NBYTES,
    HEADER_NBYTES,
    HOST_ORDER,
    MAGIC,
    ByteOrder,
    Header,
    Kind,
)
from kvproto.kv_file_head import KvFileHead, decode_head, decode_sizes, encode_head
from kvproto.lease import LeaseTable
from kvproto.messages import (
    MESSAGES,
    Abort,
    AbortAck,
    Accepted,
    Attached,
    Auth,
    Commit,
    CommitAck,
    Describe,
    Description,
    Error,
    Finished,
    Generate,
    Heartbeat,
    Message,
    Offer,
    Ping,
    Placed,
    Pong,
    Prefill,
    PrefillWorker,
    Probe,
    QueuePairFacts,
    Register,
    Registered,
    Renew,
    Started,
    Tokens,
    Write,
    decode_fields,
    encode_fields,
)
from kvproto.region import SLOTS_OFFSET, ForeignRegion, Region, unavailable_reason
from kvproto.shape import Shape

GEOMETRY: Final = KvGeometry.uniform(2, 1, 2, "float16", ("a", "b"))
# Two kinds of region, one of them a state, and a window.
MIXED: Final = KvGeometry(
    (
        Layer("a", (RegionShape("k", 2, 4), RegionShape("v", 2, 4)), 3),
        Layer("b", (RegionShape("latent", 1, 6),)),
        Layer("c", (RegionShape("state", 3, 2, "sequence"),)),
    ),
    "bfloat16",
)
MAX_PAYLOAD_NBYTES: Final = 64 * 1024
MIB: Final = 1024 * 1024
_LOW_32: Final = 0xFFFF_FFFF
_FACTS: Final = {"dtype": "float16", "num_layers": 2}

EXAMPLES: Final[tuple[Message, ...]] = (
    Identity("prefill", "p-1", _FACTS).hello(b"n" * 32),
    Auth(bytes(32)),
    Error(2, "words", "field", "s"),
    Ping(7),
    Pong(7),
    Register("prefill", "p-1", "127.0.0.1", 9000, "model", dict(_FACTS), 4096, 10, 16),
    Registered(5.0),
    Renew("p-1", 1, 2, 3, 4, False),
    Prefill("s", 1, [1, 2, 3], 1.0),
    Started("s", 1, 0.1),
    Write("s", 1, "a", 0, 2),
    Commit("s", 1, 2, 32, [1, 2, 3, 4], 0.0, 0.0, 0.0),
    CommitAck("s", 1),
    Abort("s", 1, 9, "words"),
    AbortAck("s", 1),
    Generate("s", [1, 2], 2, 5, 0.5, 0.9, 0, 1, [3], False, [PrefillWorker("p", "h", 1)], 9.0),
    Accepted("s"),
    Tokens("s", 0, [1, 2]),
    Finished("s", "stop", 0, "", {"ttft_s": 0.1}),
    Describe(),
    Description("model", 4096, MIXED.dtype, layer_records(MIXED)),
    Placed("s", 1, "a", 0, 2),
    Heartbeat("s", 1),
    Offer("mapped", b"n" * 32),
    Offer("rdma", b"n" * 32, [QueuePairFacts("::ffff:10.0.0.1", 17, 5, 1024)], 1, 8, 16, 4096, 9),
    Attached("mapped", b"n" * 32, "it is not there"),
    Attached("rdma", b"n" * 32, "", [QueuePairFacts("fe80::1", 18, 6, 4096)], 1),
    Probe("s", 1, 8, "mapped", [0, 1]),
    Probe("s", 1, 8, "rdma", [0, 1], [7, 8]),
    Prefill("s", 1, [1, 2, 3], 1.0, "rdma", [0], keys=[7]),
)


class Finding(AssertionError):
    """A decoder did something else than return or refuse."""


def _check(is_true: bool, words: str) -> None:
    """Not an assert: those vanish under -O, and a fuzzer may run so."""
    if not is_true:
        raise Finding(words)


def mended(raw: bytes) -> bytes:
    """A frame whose header is made valid where it is not about the content.

    Magic, version, order and checks are set; kind, flags, length and shape word stay.
    """
    if len(raw) < HEADER_NBYTES:
        return raw
    order = ByteOrder.LITTLE if raw[5] & 1 else ByteOrder.BIG
    prefix = "<" if order is ByteOrder.LITTLE else ">"
    payload_nbytes, shape_word = struct.unpack_from(prefix + "QQ", raw, 8)
    payload = raw[HEADER_NBYTES:]
    covered = payload
    if raw[7] & BODY_UNCHECKED and len(payload) >= 4:
        (descriptor_nbytes,) = struct.unpack_from(prefix + "I", payload)
        covered = payload[: 4 + descriptor_nbytes + padding_nbytes(descriptor_nbytes)]
    # A little off: bytes were inserted or removed. Far too much: hardly any number would be small.
    if abs(payload_nbytes - len(payload)) < 64 or payload_nbytes > 2 * MAX_PAYLOAD_NBYTES:
        payload_nbytes = len(payload)
    checked = struct.pack(
        prefix + "4sBBBBQQ",
        b"\xde\xad\xbe\xaf",
        1,
        order,
        raw[6],
        raw[7],
        payload_nbytes,
        shape_word,
    )
    check = xxh3_64_intdigest(checked[:CHECKED_NBYTES]) & _LOW_32
    payload_check = xxh3_64_intdigest(covered[:payload_nbytes]) & _LOW_32
    return checked + struct.pack(prefix + "Q", check << 32 | payload_check) + payload


def frame_bytes(
    message: Message, body: bytes = b"", shape_word: int = 0, *, is_body_checked: bool = True
) -> bytes:
    """A valid frame."""
    fields = encode_fields(message, HOST_ORDER)
    pieces = encode_frame(
        message.kind,
        fields,
        [body] if body else [],
        shape_word=shape_word,
        order=HOST_ORDER,
        is_body_checked=is_body_checked,
    )
    return b"".join(pieces)


def header(data: bytes) -> None:
    """32 bytes; an odd first byte mends the checks."""
    raw = data[1 : 1 + HEADER_NBYTES].ljust(HEADER_NBYTES, b"\0")
    if data[:1] and data[0] & 1:
        raw = mended(raw)
    try:
        decoded = Header.decode(raw, max_payload_nbytes=MAX_PAYLOAD_NBYTES)
    except (
        BadMagic,
        UnsupportedVersion,
        BadByteOrder,
        ChecksumMismatch,
        UnknownKind,
        Malformed,
        PayloadTooLarge,
    ):
        return
    _check(decoded.payload_nbytes <= MAX_PAYLOAD_NBYTES, "a length above the limit")
    _check(decoded.encode() == raw, "a header that is not what it was decoded from")


def shape(data: bytes) -> None:
    """A shape word."""
    word = int.from_bytes(data[:8].ljust(8, b"\0"), "little")
    try:
        decoded = Shape.decode(word)
    except Malformed:
        return
    _check(decoded.encode() == word, "a shape that is not its word")


def prefix(data: bytes) -> None:
    """The sizes that follow a header: 4 bytes, and 8 for the payload's length."""
    raw = data[:12].ljust(12, b"\0")
    payload_nbytes = int.from_bytes(raw[4:], "little") >> (raw[4] & 63)
    believed = Header(Kind.WRITE, payload_nbytes, 0, order=ByteOrder.LITTLE)
    try:
        sizes = decode_prefix(raw[:4], believed)
    except Malformed:
        return
    _check(sum(sizes) + 4 == payload_nbytes, "sizes that do not add up")
    _check(0 <= sizes[0] <= MAX_DESCRIPTOR_NBYTES and 0 <= sizes[1] < 64, "a size out of range")
    _check((HEADER_NBYTES + 4 + sizes[0] + sizes[1]) % 64 == 0 or not sizes[2], "not aligned")


def padding(data: bytes) -> None:
    """Padding and canary."""
    try:
        check_padding(data)
        _check(not data.strip(b"\0"), "padding that is not zero")
    except Malformed:
        pass
    order = ByteOrder.BIG if len(data) & 1 else ByteOrder.LITTLE
    with contextlib.suppress(HandshakeRefused):
        check_canary(data[:CANARY_NBYTES].ljust(CANARY_NBYTES, b"\0"), order)


def descriptor(data: bytes) -> None:
    """One msgpack map."""
    try:
        fields = decode_descriptor(data)
    except Malformed:
        return
    _check(type(fields) is dict, "a descriptor that is no map")
    _check(all(type(key) is str for key in fields), "a key that is no string")


def message(data: bytes) -> None:
    """A kind, an order, and the fields of a message as msgpack."""
    kinds = list(MESSAGES)
    kind = kinds[data[0] % len(kinds)] if data else Kind.PING
    order = ByteOrder.BIG if data[1:2] and data[1] & 1 else ByteOrder.LITTLE
    try:
        decoded = decode_fields(kind, decode_descriptor(data[2:]), order)
    except Malformed:
        return
    again = decode_fields(kind, encode_fields(decoded, order), order)
    _check(again == decoded, "a message that changes when it is sent on")


def description(data: bytes) -> None:
    """The fields of a DESCRIPTION, and the geometry that it describes."""
    try:
        decoded = decode_fields(Kind.DESCRIPTION, decode_descriptor(data), HOST_ORDER)
        assert isinstance(decoded, Description)
        geometry = described_geometry(decoded.layers, decoded.dtype)
    except Malformed:
        return
    _check(layer_records(geometry) == decoded.layers, "layers that change when they are told on")
    _check(len(geometry.regions_digest()) == 16, "no digest of the shapes")
    # Arithmetic only: no size that follows from it may be taken without asking.
    layout = PoolLayout(geometry, 4, 4)
    _check(layout.nbytes >= 4 * geometry.num_regions, "an empty pool")


def kv_file_head(data: bytes) -> None:
    """A KV file as far as its head is read; an odd first byte mends the checks."""
    raw = mended(data[1:]) if data[:1] and data[0] & 1 else data[1:]
    try:
        sizes = decode_sizes(raw[: HEADER_NBYTES + 4], file_nbytes=len(raw))
        _check(sizes.body_start + sizes.body == len(raw), "sizes that are not those of the file")
        head, geometry = decode_head(raw, sizes)
    except RemoteProtocolError:
        return
    _check(len(head.digests) == geometry.num_regions, "another number of digests")
    again = encode_head(head, raw[sizes.body_start :], sizes.header.order)
    again_sizes = decode_sizes(
        bytes(again[: HEADER_NBYTES + 4]), file_nbytes=len(again) + sizes.body
    )
    _check(decode_head(bytes(again), again_sizes) == (head, geometry), "a head that changes")


def region(data: bytes) -> None:
    """The first bytes of a region that an owner passed; an odd first byte mends the checks."""
    raw = mended(data[1:]) if data[:1] and data[0] & 1 else data[1:]
    layout = PoolLayout(GEOMETRY, 4, 4)
    ours = Region.create(layout, "d-1")
    try:
        # The owner is the one who may be damaged: any process may write what it passes.
        os.pwrite(ours.fd, raw[:SLOTS_OFFSET], 0)
        theirs = ForeignRegion.map(ours.fd, GEOMETRY, "d-1")
        _check(theirs.layout.nbytes == theirs.header.pool_nbytes, "another pool")
        theirs.put(layout.nbytes - 1, memoryview(b"x"))
        with contextlib.suppress(CarrierUnavailable):
            theirs.write_slot(255, b"n" * 32)
        theirs.close()
    except CarrierUnavailable:
        pass
    finally:
        ours.close()


def frame(data: bytes) -> None:
    """A whole frame in memory; an odd first byte mends the checks."""
    raw = mended(data[1:]) if data[:1] and data[0] & 1 else data[1:]
    try:
        decoded = decode_frame(raw, max_payload_nbytes=MAX_PAYLOAD_NBYTES)
    except RemoteProtocolError:
        return
    _check(decoded.body.nbytes <= len(raw), "a body larger than its frame")


class _Landing:
    """Accepts what fits into one small buffer."""

    def __init__(self) -> None:
        self.geometry = GEOMETRY
        self.memory = memoryview(bytearray(4096))
        self.num_open = 0
        self.num_missing_nbytes = 0

    def destination(
        self, write: Write, body_nbytes: int, shape_word: int, _writer: str
    ) -> list[memoryview]:
        if write.layer not in self.geometry.layer_names:
            raise LeaseError("no such layer", sequence_id=write.sequence_id)
        layer = self.geometry.layer_names.index(write.layer)
        if shape_word != self.geometry.shape_word(layer, write.num_tokens):
            raise Malformed("shape_word", "is of something else")
        if body_nbytes != self.geometry.write_nbytes(layer, write.num_tokens) or body_nbytes > 4096:
            raise LeaseError("no room", sequence_id=write.sequence_id)
        self.num_open += 1
        self.num_missing_nbytes = body_nbytes
        return [self.memory[:body_nbytes]]

    def received(self, _write: Write, piece: memoryview) -> None:
        self.num_missing_nbytes -= piece.nbytes

    def landed(self, _write: Write, _order: ByteOrder) -> None:
        _check(self.num_missing_nbytes == 0, "a body that is whole and was not shown")
        self.num_open -= 1

    def placed(self, placed: Placed, _writer: str) -> None:
        if placed.layer not in self.geometry.layer_names:
            raise LeaseError("no such layer", sequence_id=placed.sequence_id)

    def abandoned(self, _write: Write) -> None:
        self.num_open -= 1


def connection(data: bytes) -> None:
    """A byte stream from a peer: before its handshake or after it, in reads of some size."""
    mode, data = (data[0], data[1:]) if data else (0, data)
    landing = _Landing()
    ours = Identity("decode", "d-1", _FACTS, max_payload_nbytes=MAX_PAYLOAD_NBYTES)
    victim = Connection(ours, nonce=b"d" * 32, is_server=True, landing=landing)
    if mode & 1:
        peer = Connection(Identity("prefill", "p-1", _FACTS), nonce=b"p" * 32, is_server=False)
        for _ in range(2):
            _feed(victim, b"".join(peer.data_to_send()), 1 << 20)
            _feed(peer, b"".join(victim.data_to_send()), 1 << 20)
    if mode & 2:
        first, *others = data.split(MAGIC)
        data = first + b"".join(mended(MAGIC + piece) for piece in others)
    events = _feed(victim, data, 1 + (mode >> 2) * 40)
    events += victim.eof_received()
    _check(bool(events) and isinstance(events[-1], Ended), "no end")
    for event in events[:-1]:
        _check(isinstance(event, HandshakeDone | MessageReceived) or hasattr(event, "write"), "odd")
    _check(isinstance(events[-1].error, KvProtoError), "an end without a typed error")
    _check(landing.num_open == 0, "a body that is neither landed nor abandoned")
    _check(sum(map(len, victim.data_to_send())) < 4096 + 2048 * len(events), "many words")
    _check(_feed(victim, data, 1000) == [], "an event after the end")


def _feed(receiving: Connection, data: bytes, piece_nbytes: int) -> list:
    events: list = []
    view = memoryview(data)
    while view:
        buffer = receiving.next_buffer()
        nbytes = min(buffer.nbytes, view.nbytes, piece_nbytes)
        buffer[:nbytes] = view[:nbytes]
        events += receiving.bytes_received(nbytes)
        view = view[nbytes:]
    return events


def commit(data: bytes) -> None:
    """Coordinates and digests against a lease that has all its bytes, which are zero."""
    layout = PoolLayout(GEOMETRY, 4, 4)
    pool = memoryview(bytearray(layout.nbytes))
    blocks = BlockPool(4)
    leases = LeaseTable(layout, pool, blocks)
    leases.grant("s", 1, blocks.allocate("s", 2), 8, writer="p")
    for layer in range(2):
        write = Write("s", 1, GEOMETRY.layer_names[layer], 0, 8)
        word = GEOMETRY.shape_word(layer, 8)
        for piece in leases.destination(write, GEOMETRY.write_nbytes(layer, 8), word, "p"):
            leases.received(write, piece)
        leases.landed(write, HOST_ORDER)
    kind = _COMMIT_KINDS[data[0] % len(_COMMIT_KINDS)] if data else Kind.COMMIT
    try:
        decoded = decode_fields(kind, decode_descriptor(data[1:]), HOST_ORDER)
    except Malformed:
        return
    try:
        if isinstance(decoded, Write):
            body_nbytes = GEOMETRY.write_nbytes(0, min(decoded.num_tokens, 64))
            word = GEOMETRY.shape_word(0, decoded.num_tokens)
            leases.destination(decoded, body_nbytes, word, "p")
        elif isinstance(decoded, Placed):
            leases.placed(decoded, "p")
        else:
            assert isinstance(decoded, Commit)
            leases.check(decoded)
    except LeaseError:
        return
    # Whatever follows the last byte is refused, so only the true COMMIT comes here.
    _check(isinstance(decoded, Commit), "bytes beyond the grant were accepted")
    _check(_facts_of(decoded) == _facts_of(_true_commit()), "another COMMIT than the true one")


_COMMIT_KINDS: Final = (Kind.COMMIT, Kind.WRITE, Kind.PLACED)


def _true_commit() -> Commit:
    digests = RegionDigests(GEOMETRY)
    for layer, record in enumerate(GEOMETRY.layers):
        for index, shape_of in enumerate(record.regions):
            digests.update(layer, index, bytes(8 * GEOMETRY.row_nbytes(shape_of)))
    return Commit("s", 1, 8, GEOMETRY.prompt_nbytes(8), digests.values(), 0.0, 0.0, 0.0)


def _facts_of(commit: Message) -> tuple[object, ...]:
    assert isinstance(commit, Commit)
    return (
        commit.sequence_id,
        commit.generation,
        commit.num_tokens,
        commit.nbytes,
        commit.digests,
    )


@dataclass(frozen=True, slots=True)
class Target:
    """One decoder.

    Attributes:
        run: raises for a finding.
        seeds: valid inputs to start from.
        max_nbytes: the most memory one input may take; the limit that the decoder was given and
            what the target itself needs.
    """

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    max_nbytes: int = MIB


def _frames() -> tuple[bytes, ...]:
    body = bytes(range(16))
    write, word = Write("s", 1, "a", 0, 2), GEOMETRY.shape_word(0, 2)
    return (
        frame_bytes(EXAMPLES[0], canary_bytes()),
        *(frame_bytes(example) for example in EXAMPLES[1:] if not isinstance(example, Write)),
        frame_bytes(write, body, word),
        frame_bytes(write, body, word, is_body_checked=False),
    )


def _conversation(*, is_body_checked: bool) -> bytes:
    """What a prefill worker says in one transfer."""
    body = bytes(range(32))
    parts = [
        frame_bytes(Heartbeat("s", 1)),
        frame_bytes(Started("s", 1, 0.1)),
        frame_bytes(Ping(1)),
    ]
    for layer, name in enumerate(GEOMETRY.layer_names):
        write, word = Write("s", 1, name, 0, 4), GEOMETRY.shape_word(layer, 4)
        parts.append(frame_bytes(write, body, word, is_body_checked=is_body_checked))
    parts.append(frame_bytes(Placed("s", 1, "a", 4, 4)))
    parts.append(frame_bytes(_true_commit()))
    parts.append(frame_bytes(AbortAck("s", 1)))
    return b"".join(parts)


def _descriptors() -> tuple[bytes, ...]:
    return tuple(msgpack.packb(encode_fields(example, ByteOrder.LITTLE)) for example in EXAMPLES)


def _commits() -> tuple[bytes, ...]:
    messages = (
        _true_commit(),
        Write("s", 1, "a", 8, 1),
        Write("s", 1, "b", 0, 8),
        Placed("s", 1, "b", 8, 1),
    )
    return tuple(
        bytes([_COMMIT_KINDS.index(item.kind)]) + msgpack.packb(encode_fields(item, HOST_ORDER))
        for item in messages
    )


def _descriptions() -> tuple[bytes, ...]:
    return tuple(
        msgpack.packb(encode_fields(Description("m", 9, g.dtype, layer_records(g)), HOST_ORDER))
        for g in (GEOMETRY, MIXED, MIXED.as_wire("int8"))
    )


def _kv_files() -> tuple[bytes, ...]:
    files = []
    for geometry in (GEOMETRY, MIXED, MIXED.as_wire("int8")):
        head = KvFileHead(
            format_version=1,
            model="model",
            facts=geometry.facts(),
            dtype=geometry.dtype,
            layers=layer_records(geometry),
            tokens=[1, 2, 3, 4],
            digests=list(range(geometry.num_regions)),
            next_tokens=[5],
        )
        body = bytes(geometry.prompt_nbytes(4))
        files += [b"\1" + encode_head(head, body, order) + body for order in ByteOrder]
    return tuple(files)


def _regions() -> tuple[bytes, ...]:
    ours = Region.create(PoolLayout(GEOMETRY, 4, 4), "d-1")
    raw = os.pread(ours.fd, 512, 0)
    ours.close()
    return b"\0" + raw, b"\1" + raw[
        : HEADER_NBYTES
        + Header.decode(raw[:HEADER_NBYTES], max_payload_nbytes=SLOTS_OFFSET).payload_nbytes
    ]


_KINDS: Final = list(MESSAGES)
TARGETS: Final[dict[str, Target]] = {
    "header": Target(header, tuple(b"\1" + raw[:HEADER_NBYTES] for raw in _frames())),
    "shape": Target(shape, (GEOMETRY.shape_word(0, 8).to_bytes(8, "little"),)),
    "prefix": Target(prefix, (b"\x10\0\0\0" + (4096).to_bytes(8, "little"), b"\xff" * 12)),
    "padding": Target(padding, (bytes(60), canary_bytes())),
    "descriptor": Target(descriptor, _descriptors()),
    "message": Target(
        message,
        tuple(
            bytes([_KINDS.index(example.kind), 0]) + raw
            for example, raw in zip(EXAMPLES, _descriptors(), strict=True)
        ),
    ),
    "frame": Target(frame, tuple(b"\1" + raw for raw in _frames()), MIB + MAX_PAYLOAD_NBYTES),
    "connection": Target(
        connection,
        (
            *(bytes([mode]) + _frames()[0] for mode in (0, 2, 90)),
            *(
                bytes([mode]) + _conversation(is_body_checked=is_body_checked)
                for mode in (1, 3, 91)
                for is_body_checked in (True, False)
            ),
            *(b"\x0f" + raw for raw in _frames()),
        ),
        2 * MIB + 2 * MAX_PAYLOAD_NBYTES,
    ),
    "commit": Target(commit, _commits()),
    "description": Target(description, _descriptions()),
    "kv_file_head": Target(kv_file_head, _kv_files()),
}
if not unavailable_reason():
    TARGETS["region"] = Target(region, _regions())
_NUMBERS: Final = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 1 << 31, _LOW_32, 1 << 63, (1 << 64) - 1)


def mutations(seeds: tuple[bytes, ...], source: random.Random) -> Iterator[bytes]:
    """Endless inputs: each a seed, or two joined, changed in a few places."""
    while True:
        data = bytearray(source.choice(seeds))
        for _ in range(source.choice((1, 1, 2, 4, 8))):
            at = source.randrange(len(data) + 1)
            choice = source.randrange(7)
            if choice == 0 and at < len(data):
                data[at] ^= 1 << source.randrange(8)
            elif choice == 1 and at < len(data):
                data[at] = source.randrange(256)
            elif choice == 2:
                number, size = source.choice(_NUMBERS), source.choice((1, 2, 4, 8))
                order = source.choice(("little", "big"))
                data[at : at + size] = (number & ((1 << 8 * size) - 1)).to_bytes(size, order)
            elif choice == 3:
                data[at:at] = source.randbytes(source.randrange(1, 20))
            elif choice == 4:
                del data[at : at + source.randrange(1, 20)]
            elif choice == 5:
                other = source.choice(seeds)
                start = source.randrange(len(other) + 1)
                data[at:at] = other[start : start + source.randrange(1, 60)]
            else:
                data[at:at] = data[at : at + source.randrange(1, 30)] * source.randrange(1, 30)
        yield bytes(data[:8192])
