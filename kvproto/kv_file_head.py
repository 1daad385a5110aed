"""The head of a KV file: what stands in front of the rows, as bytes and as a record.

    header (32): kind KV_FILE, flag BODY_UNCHECKED, shape word of the first region
    descriptor: a KvFileHead
    padding to 64
    body: the rows, in the order of kv_cache

It is framed like a message, so that one header form serves everywhere. The header is written
last: a file that begins otherwise was never finished. Nothing is believed before its bound was
checked against the size of the file. Offsets are not in the file; they follow from layers and
tokens. Pure: no file is touched here. Source: docs/wire.md section 3, docs/clients.md.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Final

import msgpack
from xxhash import xxh3_64

from kvproto.buffer import Buffer
from kvproto.description import described_geometry
from kvproto.errors import LocalProtocolError, Malformed, Truncated, UnexpectedMessage
from kvproto.fields import FieldError, PackedUInts, Real, ScalarMap, Text, UInt
from kvproto.frame import (
    PREFIX_NBYTES,
    check_padding,
    check_payload,
    decode_descriptor,
    decode_prefix,
    encode_frame,
    padding_nbytes,
)
from kvproto.geometry import MAX_LAYER_REGIONS, KvGeometry
from kvproto.header import HEADER_NBYTES, HOST_ORDER, ByteOrder, Header, Kind
from kvproto.messages import MAX_TOKENS, LayerRecord
from kvproto.record import RecordList, decode_record, encode_record, field_infos
from kvproto.shape import MAX_LAYERS, Shape

FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class KvFileHead:
    """The descriptor of a KV file.

    ``digests`` are those of the body's bytes as they lie there. ``next_tokens`` are the rest of the
    prompt, for which there are no rows: usually its last token, which decode computes itself.
    """

    kind: ClassVar[Kind] = Kind.KV_FILE
    format_version: Annotated[int, UInt(255, 1)]
    model: Annotated[str, Text(256)]
    facts: Annotated[dict[str, str | int], ScalarMap(64, allow_float=False)]
    dtype: Annotated[str, Text(16, 1, ascii_only=True)]
    layers: Annotated[list[LayerRecord], RecordList(MAX_LAYERS, LayerRecord)]
    tokens: Annotated[list[int], PackedUInts(32, MAX_TOKENS, 1)]
    digests: Annotated[list[int], PackedUInts(64, MAX_LAYER_REGIONS * MAX_LAYERS)]
    wire_error: Annotated[float, Real(1e6)] = 0.0
    next_tokens: Annotated[list[int], PackedUInts(32, MAX_TOKENS)] = field(default_factory=list)

    @property
    def geometry(self) -> KvGeometry:
        """Of the rows in the body. Malformed("layers") if no model can look like this."""
        return described_geometry(self.layers, self.dtype)


_INFOS: Final = field_infos(KvFileHead)


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """What the first bytes of a file say about it; all in bytes."""

    header: Header = field(repr=False)
    descriptor: int
    padding: int
    body: int

    @property
    def body_start(self) -> int:
        """Where the body begins."""
        return HEADER_NBYTES + PREFIX_NBYTES + self.descriptor + self.padding


def head_nbytes(head: KvFileHead) -> int:
    """Bytes in front of the body, whatever the digests and the error are.

    LocalProtocolError names the first field that breaks its limit.
    """
    descriptor_nbytes = len(msgpack.packb(_fields(head, HOST_ORDER), use_bin_type=True))
    start = HEADER_NBYTES + PREFIX_NBYTES + descriptor_nbytes
    return start + padding_nbytes(descriptor_nbytes)


def encode_head(head: KvFileHead, body: Buffer, order: ByteOrder = HOST_ORDER) -> Buffer:
    """The bytes in front of ``body``, which is not read. Errors as ``head_nbytes``."""
    frame = encode_frame(
        Kind.KV_FILE,
        _fields(head, order),
        [body],
        shape_word=_shape_word(head.geometry, len(head.tokens)),
        order=order,
        is_body_checked=False,
    )
    return frame[0]


def decode_sizes(raw: bytes, *, file_nbytes: int) -> HeadSizes:
    """Sizes out of the first 36 bytes of a file of ``file_nbytes``.

    Raises, in this order: Truncated: the file has fewer; what ``Header.decode`` raises, with
    PayloadTooLarge for a file that was cut; UnexpectedMessage: another kind; Malformed("payload")
    for a file with bytes behind its end; Malformed("descriptor_nbytes"), Malformed("flags") if the
    body is under the payload check, Malformed("body") without a body.
    """
    if len(raw) < HEADER_NBYTES + PREFIX_NBYTES:
        raise Truncated(f"a file of {file_nbytes} bytes ends inside its head")
    payload_nbytes = file_nbytes - HEADER_NBYTES
    header = Header.decode(raw[:HEADER_NBYTES], max_payload_nbytes=payload_nbytes)
    if header.kind is not Kind.KV_FILE:
        raise UnexpectedMessage(f"the file holds a {header.kind.name} frame")
    if header.payload_nbytes != payload_nbytes:
        raise Malformed(
            "payload", f"has {header.payload_nbytes} bytes, the file has {payload_nbytes}"
        )
    sizes = HeadSizes(header, *decode_prefix(raw[HEADER_NBYTES:], header))
    if header.is_body_checked:
        raise Malformed("flags", "must say that the body has digests of its own")
    if not sizes.body:
        raise Malformed("body", "is missing")
    return sizes


def decode_head(raw: bytes | bytearray, sizes: HeadSizes) -> tuple[KvFileHead, KvGeometry]:
    """Record and geometry out of everything in front of the body, ``sizes.body_start`` bytes.

    Raises, in this order: ChecksumMismatch, Malformed: the padding, the descriptor, a field, a
    later format version, the layers, the number of digests, the shape word.
    """
    payload = raw[HEADER_NBYTES : sizes.body_start]
    check_payload(xxh3_64(payload).intdigest(), sizes.header)
    descriptor_end = PREFIX_NBYTES + sizes.descriptor
    check_padding(payload[descriptor_end:])
    fields = decode_descriptor(payload[PREFIX_NBYTES:descriptor_end])
    head = KvFileHead(**decode_record(_INFOS, fields, sizes.header.order))
    if head.format_version != FORMAT_VERSION:
        raise Malformed(
            "format_version", f"is {head.format_version}, this release reads {FORMAT_VERSION}"
        )
    geometry = head.geometry
    if len(head.digests) != geometry.num_regions:
        raise Malformed(
            "digests", f"has {len(head.digests)} items for {geometry.num_regions} regions"
        )
    if sizes.header.shape_word != _shape_word(geometry, len(head.tokens)):
        raise Malformed("shape_word", "is not that of the layers and tokens")
    return head, geometry


def with_digests(head: KvFileHead, digests: list[int], wire_error: float) -> KvFileHead:
    """The same head once the body is known; its bytes keep their size."""
    return replace(head, digests=digests, wire_error=wire_error)


def _fields(head: KvFileHead, order: ByteOrder) -> dict[str, object]:
    try:
        return encode_record(head, _INFOS, order)
    except FieldError as exc:
        raise LocalProtocolError(f"cannot write a KV file: {exc}") from exc


def _shape_word(geometry: KvGeometry, num_tokens: int) -> int:
    region = geometry.layers[0].regions[0]
    return Shape(geometry.num_layers, region.num_heads, region.head_dim, num_tokens).encode()
