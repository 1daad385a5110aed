r"""The 32-byte frame header: the one thing every carrier agrees on.

    offset size field           meaning
    0      4    magic           DE AD BE AF, a byte string: the same in both byte orders
    4      1    version         wire version, 1
    5      1    byte_order      1 little, 2 big: order of every wider field and of the payload
    6      1    kind            a Kind
    7      1    flags           BODY_UNCHECKED or 0; an unknown flag is refused
    8      8    payload_nbytes  bytes that follow this header
    16     8    shape_word      see shape.py; 0 in frames that carry no tensor
    24     8    checksum        high 32 bits: header check, low 32 bits: payload check

    header check  = low 32 bits of xxh3-64 of bytes 0..23 of this header
    payload check = low 32 bits of xxh3-64 of the payload_nbytes that follow; with BODY_UNCHECKED
                    only of those in front of the body, which digests elsewhere cover

The checksum is split so that a flipped bit in ``payload_nbytes`` is found before the length is
believed (docs/decisions/0001-split-checksum.md). Everything up to byte 7 is one byte wide, so the
order is known before anything wider is read.

Pure: no I/O, no clock, no logging. Source: docs/wire.md section 2.
"""

import struct
import sys
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from xxhash import xxh3_64_intdigest

from kvproto.errors import (
    BadByteOrder,
    BadMagic,
    ChecksumMismatch,
    LocalProtocolError,
    Malformed,
    PayloadTooLarge,
    UnknownKind,
    UnsupportedVersion,
)

MAGIC: Final = b"\xde\xad\xbe\xaf"
VERSION: Final = 1
HEADER_NBYTES: Final = 32
# The payload check ends where the body begins; for kinds whose bodies have digests of their own.
BODY_UNCHECKED: Final = 0x01
# The header check covers everything before the checksum word.
CHECKED_NBYTES: Final = 24
_LOW_32: Final = 0xFFFF_FFFF
# How every connection of TLS begins.
_TLS_HANDSHAKE: Final = b"\x16\x03"


class ByteOrder(IntEnum):
    """Order of the bytes of every field wider than one byte."""

    LITTLE = 1
    BIG = 2


HOST_ORDER: Final = ByteOrder.LITTLE if sys.byteorder == "little" else ByteOrder.BIG


class Kind(IntEnum):
    """What a frame is. Append only; numbers are those of docs/wire.md section 4."""

    HELLO = 1
    AUTH = 2
    ERROR = 3
    PING = 4
    PONG = 5
    REGISTER = 8
    REGISTERED = 9
    RENEW = 10
    DESCRIBE = 11
    DESCRIPTION = 12
    PREFILL = 16
    STARTED = 17
    WRITE = 18
    COMMIT = 19
    COMMIT_ACK = 20
    ABORT = 21
    ABORT_ACK = 22
    PLACED = 23
    HEARTBEAT = 24
    OFFER = 25
    ATTACHED = 26
    PROBE = 27
    GENERATE = 32
    ACCEPTED = 33
    TOKENS = 34
    FINISHED = 35
    KV_FILE = 48
    REGION = 49


# Kinds whose bodies are covered by digests: of COMMIT, of the file's own descriptor.
UNCHECKED_KINDS: Final = frozenset({Kind.WRITE, Kind.KV_FILE})
# Look-ups by plain int: calling an enum class costs three times as much.
_ORDERS: Final = {int(order): order for order in ByteOrder}
_KINDS: Final = {int(kind): kind for kind in Kind}
_CHECKED: Final = {
    ByteOrder.LITTLE: struct.Struct("<4sBBBBQQ"),
    ByteOrder.BIG: struct.Struct(">4sBBBBQQ"),
}
_WORDS: Final = {ByteOrder.LITTLE: struct.Struct("<QQQ"), ByteOrder.BIG: struct.Struct(">QQQ")}
_CHECKSUM: Final = {ByteOrder.LITTLE: struct.Struct("<Q"), ByteOrder.BIG: struct.Struct(">Q")}


@dataclass(frozen=True, slots=True)
class Header:
    """One header. Integers are unsigned; widths are those of the module table.

    Args:
        kind: what the frame is.
        payload_nbytes: bytes that follow the header.
        payload_check: low 32 bits of xxh3-64 of those bytes, see ``is_body_checked``.
        shape_word: see ``Shape``; 0 for frames without tensors.
        order: byte order of this header and of its payload.
        is_body_checked: False if the payload check ends where the body begins.
    """

    kind: Kind
    payload_nbytes: int
    payload_check: int
    shape_word: int = 0
    order: ByteOrder = HOST_ORDER
    is_body_checked: bool = True

    def encode(self) -> bytes:
        """Serialise to 32 bytes.

        LocalProtocolError: a flag that the kind does not have, a number that does not fit.
        """
        flags = 0 if self.is_body_checked else BODY_UNCHECKED
        if flags and self.kind not in UNCHECKED_KINDS:
            raise LocalProtocolError(
                f"cannot encode a {self.kind.name} frame whose body is unchecked: no digests "
                "elsewhere cover it"
            )
        try:
            checked = _CHECKED[self.order].pack(
                MAGIC, VERSION, self.order, self.kind, flags, self.payload_nbytes, self.shape_word
            )
            header_check = xxh3_64_intdigest(checked) & _LOW_32
            return checked + _CHECKSUM[self.order].pack(header_check << 32 | self.payload_check)
        except struct.error as exc:
            raise LocalProtocolError(f"cannot encode {self}: {exc}") from exc

    @classmethod
    def decode(cls, raw: memoryview | bytes, *, max_payload_nbytes: int) -> "Header":
        """Parse ``raw``, exactly 32 bytes; no wide field is believed before the header check.

        ``max_payload_nbytes`` has no default, so that no announced length goes unbounded.
        Raises, checked in this order: BadMagic, UnsupportedVersion, BadByteOrder,
        ChecksumMismatch, UnknownKind, Malformed("flags"), PayloadTooLarge. After any of them the
        stream cannot be followed further. The payload is not checked here.
        """
        raw = bytes(raw)  # slices of bytes cost half of those of a memoryview
        if raw[:4] != MAGIC:
            raise BadMagic(
                f"a frame starts with {raw[:4].hex(' ')} instead of {MAGIC.hex(' ')}; "
                + (
                    "the peer uses TLS and this side does not; start both with TLS or both without"
                    if raw[:2] == _TLS_HANDSHAKE
                    else "the peer does not speak kvproto, or the stream is torn"
                )
            )
        if raw[4] != VERSION:
            raise UnsupportedVersion(
                f"a frame has wire version {raw[4]}, this side reads {VERSION}; "
                "run the same release on both sides"
            )
        order = _ORDERS.get(raw[5])
        if order is None:
            raise BadByteOrder(
                f"a frame has byte-order flag {raw[5]}; only 1 (little) and 2 (big) exist"
            )
        payload_nbytes, shape_word, checksum = _WORDS[order].unpack_from(raw, 8)
        computed = xxh3_64_intdigest(raw[:CHECKED_NBYTES]) & _LOW_32
        if checksum >> 32 != computed:
            raise ChecksumMismatch(
                f"header check is {checksum >> 32:#010x}, the header's bytes give "
                f"{computed:#010x}; the header was damaged on the way"
            )
        kind = _KINDS.get(raw[6])
        if kind is None:
            raise UnknownKind(f"a frame has kind {raw[6]}, which wire version {VERSION} lacks")
        flags = raw[7]
        if flags and (flags != BODY_UNCHECKED or kind not in UNCHECKED_KINDS):
            raise Malformed("flags", f"flags {flags:#04x} are not those of a {kind.name} frame")
        if payload_nbytes > max_payload_nbytes:
            raise PayloadTooLarge(
                f"a {kind.name} frame announces {payload_nbytes} payload bytes, the limit here is "
                f"{max_payload_nbytes}"
            )
        return cls(kind, payload_nbytes, checksum & _LOW_32, shape_word, order, not flags)
