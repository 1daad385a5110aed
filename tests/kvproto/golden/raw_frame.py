"""Frames put together from bytes, after docs/wire.md and not the code: also faulty ones."""

import struct

from xxhash import xxh3_64_intdigest

from kvproto.header import ByteOrder, Kind

PREFIX = {ByteOrder.LITTLE: "<", ByteOrder.BIG: ">"}
_LOW_32 = (1 << 32) - 1


def raw_frame(
    order: ByteOrder,
    descriptor: bytes,
    *,
    kind: int = Kind.PING,
    padding: bytes | None = None,
    body: bytes = b"",
    payload: bytes | None = None,
    magic: bytes = b"\xde\xad\xbe\xaf",
    version: int = 1,
    byte_order: int | None = None,
    flags: int = 0,
    shape_word: int = 0,
    payload_nbytes: int | None = None,
    num_checked: int | None = None,
) -> bytes:
    """A frame whose checks agree, whatever it holds.

    ``num_checked``: bytes of the payload under its check; all, or up to the body with flag 1.
    """
    prefix = PREFIX[order]
    if payload is None:
        head = struct.pack(prefix + "I", len(descriptor)) + descriptor
        if padding is None:
            padding = bytes(-(32 + len(head)) % 64) if body else b""
        head += padding
        payload = head + body
        if num_checked is None and flags & 1:
            num_checked = len(head)
    header = magic + bytes([version, order if byte_order is None else byte_order, kind, flags])
    header += struct.pack(
        prefix + "QQ", len(payload) if payload_nbytes is None else payload_nbytes, shape_word
    )
    checks = (xxh3_64_intdigest(header) & _LOW_32) << 32
    checks |= xxh3_64_intdigest(payload[:num_checked]) & _LOW_32
    return header + struct.pack(prefix + "Q", checks) + payload


def flipped(frame: bytes, byte: int) -> bytes:
    """The same with the lowest bit of one byte changed."""
    damaged = bytearray(frame)
    damaged[byte] ^= 1
    return bytes(damaged)
