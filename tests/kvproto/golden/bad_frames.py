"""What must be refused: frames as a faulty implementation would send them."""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack

from kvproto.errors import ErrorCode
from kvproto.handshake import canary_bytes
from kvproto.header import ByteOrder, Kind
from kvproto.shape import Shape
from tests.kvproto.golden.raw_frame import PREFIX, flipped, raw_frame

MAX_PAYLOAD_NBYTES = 1 << 20
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1
_OTHER = {ByteOrder.LITTLE: ByteOrder.BIG, ByteOrder.BIG: ByteOrder.LITTLE}
_MALFORMED, _CHECKSUM = ErrorCode.MALFORMED, ErrorCode.CHECKSUM_MISMATCH
_UNEXPECTED = ErrorCode.UNEXPECTED_MESSAGE
_WRITE_SHAPE = Shape(1, 1, 2, 2).encode()
_HELLO = {
    "role": "prefill",
    "instance_id": "p-1",
    "version_min": 1,
    "version_max": 1,
    "nonce": bytes(range(32)),
    "facts": {},
    "carriers": ["tcp"],
    "max_payload_nbytes": 1 << 20,
}
_PING = msgpack.packb({"token": 7})
_STARTED = {"sequence_id": "s", "generation": 7, "queue_s": 0.5}
_WRITE_FIELDS = {
    "sequence_id": "s",
    "generation": 7,
    "layer": "layers.1",
    "first_token": 0,
    "num_tokens": 2,
}
_COMMIT_FIELDS = {
    "sequence_id": "s",
    "generation": 7,
    "num_tokens": 2,
    "nbytes": 32,
    "digests": bytes(32),
    "queue_s": 0.0,
    "prefill_s": 0.0,
    "handoff_s": 0.0,
}


_QUEUE_PAIR = {"gid": "::ffff:192.0.2.7", "qp_num": 17, "psn": 5, "mtu_nbytes": 1024}
_OFFER = {"carrier": "rdma", "nonce": bytes(32), "queue_pairs": [_QUEUE_PAIR]}
_PROBE = {"sequence_id": "s", "generation": 7, "num_tokens": 2, "carrier": "rdma"}


class BadFrame(NamedTuple):
    """One frame, and how it is refused. ``state``: of the connection that reads it."""

    name: str
    code: ErrorCode
    frame: bytes
    field: str = ""
    state: str = "ready"


def _started(order: ByteOrder, name: str, **changes: Any) -> BadFrame:
    """STARTED with one faulty field, which gives the case its field; ... leaves it out."""
    (field,) = changes
    fields = {key: value for key, value in (_STARTED | changes).items() if value is not ...}
    frame = raw_frame(order, msgpack.packb(fields), kind=Kind.STARTED)
    return BadFrame(name, _MALFORMED, frame, field)


def _write(order: ByteOrder, **options: Any) -> bytes:
    packed = msgpack.packb(_WRITE_FIELDS)
    options = {"kind": Kind.WRITE, "body": bytes(32), "shape_word": _WRITE_SHAPE} | options
    return raw_frame(order, packed, **options)


def _of_header(order: ByteOrder) -> Iterator[BadFrame]:
    """Found in the 32 bytes, in the order in which they are checked."""
    other = _OTHER[order]
    ping = raw_frame(order, _PING)
    yield BadFrame("magic", ErrorCode.BAD_MAGIC, raw_frame(order, _PING, magic=b"GET "))
    yield BadFrame(
        "magic_reversed", ErrorCode.BAD_MAGIC, raw_frame(order, _PING, magic=b"\xaf\xbe\xad\xde")
    )
    yield BadFrame("version", ErrorCode.UNSUPPORTED_VERSION, raw_frame(order, _PING, version=2))
    yield BadFrame("byte_order", ErrorCode.BAD_BYTE_ORDER, raw_frame(order, _PING, byte_order=3))
    yield BadFrame("other_byte_order", _CHECKSUM, raw_frame(order, _PING, byte_order=other))
    # The header check is the high half of the last word.
    for byte in (6, 7, 8, 15, 16, 23, 31 if order is ByteOrder.LITTLE else 24):
        yield BadFrame(f"header_byte_{byte}_flipped", _CHECKSUM, flipped(ping, byte))
    yield BadFrame(
        "forty_byte_header",
        _CHECKSUM,
        b"\xde\xad\xbe\xaf"
        + bytes([1, order, 4, 0])
        + struct.pack(f"{PREFIX[order]}4Q", 4, 0, 0, 0),
    )
    yield BadFrame("kind", ErrorCode.UNKNOWN_KIND, raw_frame(order, _PING, kind=255))
    yield BadFrame("unknown_flag", _MALFORMED, raw_frame(order, _PING, flags=0x80), "flags")
    yield BadFrame("flag_of_another_kind", _MALFORMED, raw_frame(order, _PING, flags=1), "flags")
    yield BadFrame("unknown_flag_of_write", _MALFORMED, _write(order, flags=3), "flags")
    for name, nbytes in (("limit", MAX_PAYLOAD_NBYTES + 1), ("half", 1 << 63), ("all", _U64)):
        frame = raw_frame(order, _PING, payload_nbytes=nbytes)
        yield BadFrame(f"payload_above_{name}", ErrorCode.PAYLOAD_TOO_LARGE, frame)


def _of_payload(order: ByteOrder) -> Iterator[BadFrame]:
    """Found by the payload check."""
    ping = raw_frame(order, _PING)
    low_byte = 24 if order is ByteOrder.LITTLE else 31
    yield BadFrame("payload_check_flipped", _CHECKSUM, flipped(ping, low_byte))
    yield BadFrame("payload_flipped", _CHECKSUM, flipped(ping, len(ping) - 1))
    yield BadFrame("unchecked_head_flipped", _CHECKSUM, flipped(_write(order, flags=1), 60))
    yield BadFrame("check_without_body_and_flag", _CHECKSUM, _write(order, num_checked=-32))


def _of_descriptor(order: ByteOrder) -> Iterator[BadFrame]:
    """Found in the prefix, the descriptor or the padding."""
    yield BadFrame("no_payload", _MALFORMED, raw_frame(order, b"", payload=b""), "payload_nbytes")
    yield BadFrame(
        "no_descriptor", _MALFORMED, raw_frame(order, b"", payload=bytes(8)), "descriptor_nbytes"
    )
    for name, nbytes in (("by_one", len(_PING) + 1), ("by_far", _U32)):
        payload = struct.pack(f"{PREFIX[order]}I", nbytes) + _PING
        frame = raw_frame(order, b"", payload=payload)
        yield BadFrame(f"descriptor_too_long_{name}", _MALFORMED, frame, "descriptor_nbytes")
    yield BadFrame(
        "padding_without_body",
        _MALFORMED,
        raw_frame(order, _PING, padding=bytes(20)),
        "descriptor_nbytes",
    )
    for name, flags in (("checked", 0), ("unchecked", 1)):
        gap = -(36 + len(msgpack.packb(_WRITE_FIELDS))) % 64
        frame = _write(order, padding=bytes(gap - 1) + b"\x01", flags=flags)
        # Of a checked body the padding is believed no earlier than the body.
        yield BadFrame(f"padding_of_{name}_body", _MALFORMED, frame, "padding")
    descriptors = {
        "array": b"\x93\x01\x02\x03",
        "nil": b"\xc0",
        "cut": b"\x81\xa5token",
        "bytes_behind": _PING + b"\xc0",
        "key_twice": b"\x82\xa5token\x07\xa5token\x08",
        "key_integer": b"\x81\x01\x07",
        "key_bin": b"\x81\xc4\x05token\x07",
        "nested_key_twice": b"\x82\xa5token\x07\xa1x\x82\xa1a\x01\xa1a\x02",
        "extension": b"\x82\xa5token\x07\xa1x\xd4\x05\x00",
        "timestamp": b"\x82\xa5token\x07\xa1x\xd6\xff\x00\x00\x00\x00",
        "not_utf8": b"\x82\xa5token\x07\xa1x\xa2\xff\xfe",
        "surrogate": b"\x82\xa5token\x07\xa1x\xa3\xed\xa0\x80",
        "deep": b"\x82\xa5token\x07\xa1x" + b"\x91" * 2000 + b"\xc0",
        "array_claim": b"\x82\xa5token\x07\xa1x\xdd\xff\xff\xff\xff",
        "array_above_limit": b"\x82\xa5token\x07\xa1x\xdc\x10\x01" + b"\xc0" * 4097,
        "map_above_limit": msgpack.packb({"token": 7, **{f"x{i}": 0 for i in range(64)}}),
        "str_above_limit": msgpack.packb({"token": 7, "x": "a" * 1025}),
        "bin_claim": b"\x82\xa5token\x07\xa1x\xc6\xff\xff\xff\xff",
    }
    for name, descriptor in descriptors.items():
        yield BadFrame(f"descriptor_{name}", _MALFORMED, raw_frame(order, descriptor), "descriptor")


def _of_field(order: ByteOrder) -> Iterator[BadFrame]:
    """Found in a field of a message."""
    yield _started(order, "field_missing", generation=...)
    yield _started(order, "field_nil", generation=None)
    yield _started(order, "uint_bool", generation=True)
    yield _started(order, "uint_negative", generation=-1)
    yield _started(order, "uint_above_limit", generation=1 << 32)
    yield _started(order, "uint_float", generation=7.0)
    yield _started(order, "float_nan", queue_s=float("nan"))
    yield _started(order, "float_infinite", queue_s=float("inf"))
    yield _started(order, "float_negative", queue_s=-0.5)
    yield _started(order, "str_empty", sequence_id="")
    yield _started(order, "str_above_limit", sequence_id="s" * 65)
    yield _started(order, "str_control_character", sequence_id="s\n")
    yield _started(order, "str_not_ascii", sequence_id="ß")
    yield _started(order, "str_bin", sequence_id=b"s")
    for name, digests in (("array", [0] * 4), ("cut", bytes(31))):
        fields = msgpack.packb(_COMMIT_FIELDS | {"digests": digests})
        frame = raw_frame(order, fields, kind=Kind.COMMIT)
        yield BadFrame(f"packed_{name}", _MALFORMED, frame, "digests")
    yield from _of_rdma_field(order)
    fields = msgpack.packb(_STARTED | {"!must": 1})
    yield BadFrame(
        "critical_field", _MALFORMED, raw_frame(order, fields, kind=Kind.STARTED), "!must"
    )


def _of_rdma_field(order: ByteOrder) -> Iterator[BadFrame]:
    """Found in what an owner and a writer say of their queue pairs and keys."""
    pairs: dict[str, Any] = {
        "psn_above_limit": {"psn": 1 << 24},
        "qp_num_above_limit": {"qp_num": 1 << 24},
        "mtu_below_limit": {"mtu_nbytes": 255},
        "mtu_above_limit": {"mtu_nbytes": 4097},
        "gid_above_limit": {"gid": "0" * 40},
        "gid_raw": {"gid": bytes(16)},
    }
    for name, change in pairs.items():
        fields = _OFFER | {"queue_pairs": [_QUEUE_PAIR, _QUEUE_PAIR | change]}
        frame = raw_frame(order, msgpack.packb(fields), kind=Kind.OFFER)
        yield BadFrame(f"queue_pair_{name}", _MALFORMED, frame, "queue_pairs")
    offers: dict[str, Any] = {
        "queue_pairs_above_limit": {"queue_pairs": [_QUEUE_PAIR] * 17},
        "queue_pairs_map": {"queue_pairs": _QUEUE_PAIR},
        "byte_order_above_limit": {"byte_order": 3},
        "key_above_limit": {"key": 1 << 32},
    }
    for name, change in offers.items():
        (field,) = change
        frame = raw_frame(order, msgpack.packb(_OFFER | change), kind=Kind.OFFER)
        yield BadFrame(f"offer_{name}", _MALFORMED, frame, field)
    for name, keys in (("array", [1]), ("cut", bytes(5)), ("above_limit", bytes(17 * 4))):
        frame = raw_frame(order, msgpack.packb(_PROBE | {"keys": keys}), kind=Kind.PROBE)
        yield BadFrame(f"keys_{name}", _MALFORMED, frame, "keys")


def _of_connection(order: ByteOrder) -> Iterator[BadFrame]:
    """Bodies and shape words of other kinds; messages at the wrong time, from the wrong role."""
    other = _OTHER[order]
    ping = raw_frame(order, _PING)
    yield BadFrame("body_of_ping", _MALFORMED, raw_frame(order, _PING, body=b"x"), "body")
    yield BadFrame(
        "shape_word_of_ping", _MALFORMED, raw_frame(order, _PING, shape_word=1), "shape_word"
    )
    hello = msgpack.packb(_HELLO)
    canary = canary_bytes(order)
    again = raw_frame(order, hello, kind=Kind.HELLO, body=canary)
    mac = msgpack.packb({"mac": bytes(32)})
    accepted = raw_frame(order, msgpack.packb({"sequence_id": "s"}), kind=Kind.ACCEPTED)
    nothing = msgpack.packb({})
    yield BadFrame("second_hello", _UNEXPECTED, again)
    yield BadFrame("second_auth", _UNEXPECTED, raw_frame(order, mac, kind=Kind.AUTH))
    yield BadFrame("role", _UNEXPECTED, accepted)
    yield BadFrame("kv_file", _UNEXPECTED, raw_frame(order, nothing, kind=Kind.KV_FILE))
    yield BadFrame(
        "kv_file_with_body",
        _UNEXPECTED,
        raw_frame(order, nothing, kind=Kind.KV_FILE, body=b"x", flags=1),
    )
    yield BadFrame("region", _UNEXPECTED, raw_frame(order, nothing, kind=Kind.REGION))
    before = "awaiting_hello"
    yield BadFrame("ping_first", _UNEXPECTED, ping, state=before)
    yield BadFrame("auth_first", _UNEXPECTED, raw_frame(order, mac, kind=Kind.AUTH), state=before)
    above = raw_frame(order, hello, kind=Kind.HELLO, payload_nbytes=65537)
    yield BadFrame("hello_above_limit", ErrorCode.PAYLOAD_TOO_LARGE, above, state=before)
    lie = raw_frame(order, hello, kind=Kind.HELLO, body=canary_bytes(other))
    yield BadFrame("canary_of_the_other_order", ErrorCode.INCOMPATIBLE, lie, "byte_order", before)
    for name, body in (("no_canary", b""), ("short_canary", canary[:-1])):
        frame = raw_frame(order, hello, kind=Kind.HELLO, body=body)
        yield BadFrame(name, _MALFORMED, frame, "body", before)
    later = msgpack.packb(_HELLO | {"version_min": 2, "version_max": 3})
    frame = raw_frame(order, later, kind=Kind.HELLO, body=canary)
    yield BadFrame("no_common_version", ErrorCode.INCOMPATIBLE, frame, "version", before)
    rdma = msgpack.packb(_HELLO | {"carriers": ["none"]})
    frame = raw_frame(order, rdma, kind=Kind.HELLO, body=canary)
    yield BadFrame("no_common_carrier", ErrorCode.INCOMPATIBLE, frame, "carriers", before)


STAGES = {
    "header": _of_header,
    "payload": _of_payload,
    "descriptor": _of_descriptor,
    "field": _of_field,
    "connection": _of_connection,
}


def bad_frame_vectors() -> list[dict[str, Any]]:
    """bad_frames.json."""
    return [
        {
            "name": f"{bad.name}-{order.name.lower()}",
            "order": order.name,
            "state": bad.state,
            "stage": stage,
            "code": bad.code.name,
            "field": bad.field,
            "hex": bad.frame.hex(),
        }
        for order in ByteOrder
        for stage, frames in STAGES.items()
        for bad in frames(order)
    ]
