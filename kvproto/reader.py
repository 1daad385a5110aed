"""Frames out of bytes, one part after another: header, prefix, descriptor, body.

Each part is received into memory of a size that was checked before: the header and the prefix
into their own few bytes, the descriptor into a buffer allocated below its limit, the body where
the caller's ``open_body`` says. A frame is handed out only after its payload check.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from xxhash import xxh3_64

from kvproto.errors import Malformed
from kvproto.frame import (
    PREFIX_NBYTES,
    check_padding,
    check_payload,
    decode_descriptor,
    decode_prefix,
)
from kvproto.header import HEADER_NBYTES, Header
from kvproto.intake import Intake
from kvproto.messages import Message, decode_fields


@dataclass(frozen=True, slots=True)
class ReceivedFrame:
    """A frame whose checks agreed; ``head`` is its payload up to the body."""

    header: Header
    message: Message
    head: bytes


# (header, message, body_nbytes) to the memory for the body, in order; may raise to refuse.
OpenBody = Callable[[Header, Message, int], Iterable[memoryview]]
# Each piece of a body as it lies in that memory, in order.
BodyReceived = Callable[[memoryview], None]


class _Part(Enum):
    """The part of a frame being received."""

    HEADER = auto()
    PREFIX = auto()
    DESCRIPTOR = auto()
    BODY = auto()


class FrameReader:
    """Receives frames.

    Args:
        open_body: called for every frame once its descriptor is known, also for an empty body. A
            frame with a body is not checked at that moment, so the caller must not act on it yet.
        body_received: called for each piece of a body, before its frame is handed out.
        max_payload_nbytes: larger frames are refused by their header; may be changed at any time.
    """

    def __init__(
        self, open_body: OpenBody, body_received: BodyReceived, *, max_payload_nbytes: int
    ) -> None:
        self.max_payload_nbytes = max_payload_nbytes
        self._open_body = open_body
        self._body_received = body_received
        self._intake = Intake()
        self._header_raw = memoryview(bytearray(HEADER_NBYTES))
        self._prefix = memoryview(bytearray(PREFIX_NBYTES))
        self._expect_header()

    @property
    def is_between_frames(self) -> bool:
        """No byte of an unfinished frame has arrived."""
        return self._part is _Part.HEADER and self._intake.missing_nbytes == HEADER_NBYTES

    @property
    def missing_nbytes(self) -> int:
        """Bytes of a body that certainly come before anything else; 0 between bodies."""
        return self._missing_nbytes

    def next_buffer(self) -> memoryview:
        """Where the next received bytes belong; never empty, valid until ``bytes_received``."""
        return self._intake.next_buffer()

    def middle_received(self, nbytes: int) -> bool:
        """``bytes_received`` for bytes in the middle of a body, of which nothing follows.

        False, and nothing was done, if they are something else.
        """
        if self._part is not _Part.BODY:
            return False
        piece = self._intake.take_middle(nbytes)
        if piece is None:
            return False
        self._body_piece_received(piece)
        return True

    def bytes_received(self, nbytes: int) -> Iterator[ReceivedFrame]:
        """Handle the first ``nbytes`` of that buffer; yields each frame that they complete.

        Raises RemoteProtocolError, and whatever ``open_body`` raises; the reader is then dead.
        """
        self._intake.received(nbytes)
        while (piece := self._intake.take()) is not None:
            if self._part is _Part.BODY:
                self._body_piece_received(piece)
            elif self._part is not _Part.HEADER:
                self._hasher.update(piece)
            if self._intake.missing_nbytes:
                continue
            if self._part is _Part.HEADER:
                self._header_received()
            elif self._part is _Part.PREFIX:
                self._prefix_received()
            elif self._part is _Part.DESCRIPTOR:
                self._descriptor_received()
            # Not "elif": a frame without a body is complete with its descriptor.
            if self._part is _Part.BODY and not self._intake.missing_nbytes:
                yield self._frame_received()

    def _body_piece_received(self, piece: memoryview) -> None:
        self._missing_nbytes -= piece.nbytes
        if self._header.is_body_checked:
            self._hasher.update(piece)
        self._body_received(piece)

    def _expect_header(self) -> None:
        self._part = _Part.HEADER
        self._missing_nbytes = 0
        self._hasher = xxh3_64()
        self._intake.expect([self._header_raw])

    def _header_received(self) -> None:
        self._header = Header.decode(self._header_raw, max_payload_nbytes=self.max_payload_nbytes)
        # An empty descriptor is one byte, the empty map.
        if self._header.payload_nbytes <= PREFIX_NBYTES:
            raise Malformed("payload_nbytes", f"is {self._header.payload_nbytes}: no descriptor")
        self._part = _Part.PREFIX
        self._intake.expect([self._prefix])

    def _prefix_received(self) -> None:
        descriptor_nbytes, padding, self._body_nbytes = decode_prefix(self._prefix, self._header)
        if not descriptor_nbytes:
            raise Malformed("descriptor_nbytes", "is 0: no descriptor")
        self._descriptor_nbytes = descriptor_nbytes
        self._descriptor = memoryview(bytearray(descriptor_nbytes + padding))
        self._part = _Part.DESCRIPTOR
        self._intake.expect([self._descriptor])

    def _descriptor_received(self) -> None:
        if not self._body_nbytes or not self._header.is_body_checked:
            check_payload(self._hasher.intdigest(), self._header)
        check_padding(self._descriptor[self._descriptor_nbytes :])
        fields = decode_descriptor(self._descriptor[: self._descriptor_nbytes])
        self._message = decode_fields(self._header.kind, fields, self._header.order)
        self._part = _Part.BODY
        self._intake.expect(self._open_body(self._header, self._message, self._body_nbytes))
        self._missing_nbytes = self._body_nbytes

    def _frame_received(self) -> ReceivedFrame:
        if self._body_nbytes and self._header.is_body_checked:
            check_payload(self._hasher.intdigest(), self._header)
        head = bytes(self._prefix) + bytes(self._descriptor)
        frame = ReceivedFrame(self._header, self._message, head)
        self._expect_header()
        return frame
