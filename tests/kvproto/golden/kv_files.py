"""What lies in files and in mapped memory: a small KV file, bad ones, and the frame of a region.

Put together from bytes, after docs/wire.md sections 6.5 and 13 and not the code.
"""

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any

import msgpack
from xxhash import xxh3_64_intdigest

from kvproto.header import ByteOrder, Kind
from kvproto.messages import LayerRecord, RegionRecord
from kvproto.shape import Shape
from tests.kvproto.golden.plain import plain
from tests.kvproto.golden.raw_frame import PREFIX, flipped, raw_frame

_FILE_LAYERS = [
    LayerRecord("a", [RegionRecord("k", 1, 2, "token"), RegionRecord("v", 1, 2, "token")]),
    LayerRecord("w", [RegionRecord("latent", 1, 3, "token")], 2),
    LayerRecord("s", [RegionRecord("state", 2, 2, "sequence")]),
]
_FILE_TOKENS, _FILE_NEXT_TOKENS = [5, 6, 151643], [7]
# Rows of each region: three tokens of layer a, the last two of layer w, the one state.
FILE_ROWS = {
    "a.k": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "a.v": [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0],
    "w.latent": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5],
    "s.state": [10.0, 20.0, 30.0, 40.0],
}


def _packed(order: ByteOrder, code: str, items: list[Any]) -> bytes:
    return struct.pack(f"{PREFIX[order]}{len(items)}{code}", *items)


def kv_file(order: ByteOrder, **changes: Any) -> bytes:
    """A whole KV file. Written after docs/wire.md section 13, not the code."""
    body, digests = b"", []
    for rows in FILE_ROWS.values():
        raw = _packed(order, "f", rows)
        body += bytes(-len(body) % 64) + raw
        digests.append(xxh3_64_intdigest(raw))
    fields = {
        "format_version": 1,
        "model": "Modell ü",
        "facts": {"num_layers": 3},
        "dtype": "float32",
        "layers": [dataclasses.asdict(layer) for layer in _FILE_LAYERS],
        "tokens": _packed(order, "I", _FILE_TOKENS),
        "digests": _packed(order, "Q", digests),
        "wire_error": 0.25,
        "next_tokens": _packed(order, "I", _FILE_NEXT_TOKENS),
    }
    options: dict[str, Any] = {
        "kind": Kind.KV_FILE,
        "flags": 1,
        "shape_word": Shape(3, 1, 2, 3).encode(),
        "body": body,
    }
    fields |= {key: value for key, value in changes.items() if key in fields}
    options |= {key: value for key, value in changes.items() if key not in fields}
    return raw_frame(order, msgpack.packb(fields), **options)


def kv_file_vectors() -> list[dict[str, Any]]:
    """kv_files.json."""
    return [
        {
            "name": f"float32-{order.name.lower()}",
            "order": order.name,
            "model": "Modell ü",
            "facts": {"num_layers": 3},
            "dtype": "float32",
            "layers": plain(_FILE_LAYERS),
            "tokens": _FILE_TOKENS,
            "next_tokens": _FILE_NEXT_TOKENS,
            "wire_error": 0.25,
            "rows": FILE_ROWS,
            "hex": kv_file(order).hex(),
        }
        for order in ByteOrder
    ]


def bad_kv_files(order: ByteOrder) -> Iterator[tuple[str, str, bytes]]:
    """(name, found by, file) of everything that is no KV file."""
    good = kv_file(order)
    yield "empty", "open", b""
    yield "unfinished", "open", bytes(32) + good[32:]
    yield "cut", "open", good[:-1]
    yield "cut_in_its_head", "open", good[:35]
    yield "bytes_behind", "open", good + b"\0"
    yield "another_kind", "open", raw_frame(order, msgpack.packb({"token": 7}))
    yield "body_under_the_check", "open", kv_file(order, flags=0)
    yield "no_body", "open", kv_file(order, body=b"")
    yield "head_flipped", "open", flipped(good, 60)
    yield "padding", "open", kv_file(order, padding=b"\1" * (-(36 + _descriptor_nbytes(good)) % 64))
    yield "format_version", "open", kv_file(order, format_version=2)
    yield "dtype", "open", kv_file(order, dtype="int3")
    yield "no_layers", "open", kv_file(order, layers=[])
    yield "digests", "open", kv_file(order, digests=bytes(8))
    yield "shape_word", "open", kv_file(order, shape_word=Shape(3, 1, 2, 4).encode())
    yield "body_too_short", "open", kv_file(order, body=bytes(204))
    yield "row_flipped", "verify", flipped(good, len(good) - 1)
    body_start = len(good) - 208
    yield "gap_not_zero", "verify", flipped(good, body_start + 24)


def _descriptor_nbytes(frame: bytes) -> int:
    return int.from_bytes(frame[32:36], "little" if frame[5] == ByteOrder.LITTLE else "big")


def bad_kv_file_vectors() -> list[dict[str, Any]]:
    """bad_kv_files.json."""
    return [
        {"name": f"{name}-{order.name.lower()}", "found_by": found_by, "hex": raw.hex()}
        for order in ByteOrder
        for name, found_by, raw in bad_kv_files(order)
    ]


def region_vectors() -> list[dict[str, Any]]:
    """region.json: the frame in front of mapped memory."""
    fields = {
        "instance_id": "d-1",
        "dtype": "bfloat16",
        "regions_digest": "9394d5432834e961",
        "num_blocks": 512,
        "block_size": 16,
        "slots_offset": 4096,
        "num_slots": 256,
        "pool_offset": 65536,
        "pool_nbytes": 1 << 53,
    }
    return [
        {
            "name": f"region-{order.name.lower()}",
            "order": order.name,
            "fields": plain(fields),
            "hex": raw_frame(order, msgpack.packb(fields), kind=Kind.REGION).hex(),
        }
        for order in ByteOrder
    ]
