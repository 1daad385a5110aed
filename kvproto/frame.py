"""A frame: header, length-prefixed msgpack descriptor, aligned body.

    header (32) | descriptor_nbytes u32 | descriptor: one msgpack map | zero padding | body

The padding makes the body start at a multiple of 64 counted from the start of the header, so that
the same bytes mapped from a file need no copy; it is present only when there is a body. A frame
without a body ends with its descriptor.

A descriptor is believed as little as a header: the map's size is bounded before msgpack sees it,
and msgpack's own limits bound what the map may claim. Source: docs/wire.md section 3.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack
from xxhash import xxh3_64

from kvproto.buffer import Buffer, byte_view
from kvproto.errors import ChecksumMismatch, LocalProtocolError, Malformed, Truncated
from kvproto.header import HEADER_NBYTES, ByteOrder, Header, Kind

ALIGNMENT: Final = 64
PREFIX_NBYTES: Final = 4
# A prompt of MAX_TOKENS is 4 MiB; nothing else comes near.
MAX_DESCRIPTOR_NBYTES: Final = 5 * 1024 * 1024
# The layers of a DESCRIPTION; the descriptor's own size bounds what nesting could claim.
MAX_ARRAY_ITEMS: Final = 4096
MAX_MAP_ITEMS: Final = 64
MAX_STR_NBYTES: Final = 1024
_LOW_32: Final = 0xFFFF_FFFF
_PREFIX: Final = {ByteOrder.LITTLE: struct.Struct("<I"), ByteOrder.BIG: struct.Struct(">I")}


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole frame in memory. ``body`` is a view into the bytes given to ``decode_frame``."""

    header: Header
    fields: dict[str, Any]
    body: memoryview


def encode_frame(
    kind: Kind,
    fields: Mapping[str, Any],
    body: Sequence[Buffer] = (),
    *,
    shape_word: int = 0,
    order: ByteOrder,
    is_body_checked: bool = True,
) -> list[Buffer]:
    """Buffers of one frame: everything before the body in one piece, then ``body`` uncopied.

    The bytes of ``body`` must not change until they are sent: the checksum is taken here, over
    the body as well unless ``is_body_checked`` is False (see ``header.BODY_UNCHECKED``).
    LocalProtocolError if the descriptor is above ``MAX_DESCRIPTOR_NBYTES``.
    """
    descriptor = msgpack.packb(fields, use_bin_type=True)
    if len(descriptor) > MAX_DESCRIPTOR_NBYTES:
        raise LocalProtocolError(
            f"cannot send {kind.name}: its descriptor has {len(descriptor)} bytes, "
            f"the limit is {MAX_DESCRIPTOR_NBYTES}"
        )
    pieces = [view for view in map(byte_view, body) if view.nbytes]
    body_nbytes = sum(view.nbytes for view in pieces)
    padding = bytes(padding_nbytes(len(descriptor))) if body_nbytes else b""
    start = _PREFIX[order].pack(len(descriptor)) + descriptor + padding
    hasher = xxh3_64(start)
    if is_body_checked:
        for view in pieces:
            hasher.update(view)
    header = Header(
        kind,
        len(start) + body_nbytes,
        hasher.intdigest() & _LOW_32,
        shape_word,
        order,
        is_body_checked,
    )
    return [header.encode() + start, *pieces]


def padding_nbytes(descriptor_nbytes: int) -> int:
    """Zero bytes between a descriptor of this size and a body."""
    return -(HEADER_NBYTES + PREFIX_NBYTES + descriptor_nbytes) % ALIGNMENT


def decode_prefix(raw: bytes | bytearray | memoryview, header: Header) -> tuple[int, int, int]:
    """(descriptor, padding, body) sizes in bytes, from the 4 bytes after the header.

    Malformed("descriptor_nbytes") if the descriptor is above its limit or beyond the payload, or
    the payload ends inside the padding or with an empty body.
    """
    (descriptor_nbytes,) = _PREFIX[header.order].unpack(raw)
    rest_nbytes = header.payload_nbytes - PREFIX_NBYTES - descriptor_nbytes
    if descriptor_nbytes > MAX_DESCRIPTOR_NBYTES or rest_nbytes < 0:
        raise Malformed(
            "descriptor_nbytes",
            f"is {descriptor_nbytes} in a payload of {header.payload_nbytes} bytes; "
            f"the limit is {MAX_DESCRIPTOR_NBYTES}",
        )
    if rest_nbytes == 0:
        return descriptor_nbytes, 0, 0
    padding = padding_nbytes(descriptor_nbytes)
    if rest_nbytes <= padding:
        raise Malformed("descriptor_nbytes", "leaves padding without a body")
    return descriptor_nbytes, padding, rest_nbytes - padding


def decode_descriptor(raw: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The one msgpack map in ``raw``, which must hold nothing else.

    Malformed("descriptor") for anything but a map with distinct string keys, or for a nested
    claim above the limits; no extension type and no timestamp is accepted.
    """
    try:
        fields = msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_unique_map,
            ext_hook=_refuse_extension,
            max_str_len=MAX_STR_NBYTES,
            max_bin_len=MAX_DESCRIPTOR_NBYTES,
            max_array_len=MAX_ARRAY_ITEMS,
            max_map_len=MAX_MAP_ITEMS,
            max_ext_len=0,
        )
    # Everything msgpack raises on input is a ValueError, StackError and UnicodeDecodeError too.
    except ValueError as exc:
        raise Malformed("descriptor", str(exc) or type(exc).__name__) from exc
    if not isinstance(fields, dict):
        raise Malformed("descriptor", f"is a {type(fields).__name__} instead of a map")
    return fields


def check_padding(raw: bytes | bytearray | memoryview) -> None:
    """Malformed("padding") unless every byte is zero: no byte of a frame is without meaning."""
    if any(raw):
        raise Malformed("padding", "has a byte that is not zero")


def check_payload(computed: int, header: Header) -> None:
    """ChecksumMismatch unless ``computed``, xxh3-64 of the payload, agrees with the header."""
    if computed & _LOW_32 != header.payload_check:
        raise ChecksumMismatch(
            f"payload check of a {header.kind.name} frame is {header.payload_check:#010x}, its "
            f"bytes give {computed & _LOW_32:#010x}; the payload was damaged on the way"
        )


def decode_frame(raw: Buffer, *, max_payload_nbytes: int) -> Frame:
    """One whole frame, for frames that lie in memory (a mapped file); the body is not copied.

    A body under ``header.BODY_UNCHECKED`` is not read. Raises, in this order: Truncated, then
    what ``Header.decode`` raises, Truncated or Malformed("payload") if the sizes disagree, what
    ``decode_prefix`` raises, ChecksumMismatch, Malformed("padding"), Malformed("descriptor").
    """
    view = byte_view(raw)
    if view.nbytes < HEADER_NBYTES:
        raise Truncated(f"a frame of {view.nbytes} bytes ends inside its header")
    header = Header.decode(view[:HEADER_NBYTES], max_payload_nbytes=max_payload_nbytes)
    payload = view[HEADER_NBYTES:]
    if payload.nbytes < header.payload_nbytes:
        raise Truncated(f"payload has {payload.nbytes} of {header.payload_nbytes} bytes")
    if payload.nbytes > header.payload_nbytes or payload.nbytes < PREFIX_NBYTES:
        raise Malformed("payload", f"has {payload.nbytes} bytes")
    descriptor_nbytes, padding, _ = decode_prefix(payload[:PREFIX_NBYTES], header)
    descriptor_end = PREFIX_NBYTES + descriptor_nbytes
    body_start = descriptor_end + padding
    checked = payload if header.is_body_checked else payload[:body_start]
    check_payload(xxh3_64(checked).intdigest(), header)
    check_padding(payload[descriptor_end:body_start])
    fields = decode_descriptor(payload[PREFIX_NBYTES:descriptor_end])
    return Frame(header, fields, payload[body_start:])


def _unique_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a map has a key twice")
    # strict_map_key lets bytes through as well.
    if not all(type(key) is str for key in fields):
        raise ValueError("a map has a key that is not a string")
    return fields


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not part of the protocol")
