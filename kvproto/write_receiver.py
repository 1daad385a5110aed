"""The WRITE being received on one connection: permission, memory, and what became of it."""

from collections.abc import Iterable, Iterator
from typing import Final

from kvproto.buffer import swap_in_place
from kvproto.carrier import Landing
from kvproto.errors import LeaseError, Malformed, UnexpectedMessage
from kvproto.header import HOST_ORDER, Header
from kvproto.messages import Write

_SCRATCH_NBYTES: Final = 64 * 1024


class WriteReceiver:
    """At most one WRITE at a time. ``open`` then ``complete``, or ``abandon`` at any time.

    Args:
        landing: where bodies go; None refuses every WRITE as unexpected.
    """

    def __init__(self, landing: Landing | None) -> None:
        self._landing = landing
        self._scratch = memoryview(bytearray(_SCRATCH_NBYTES))
        self._write: Write | None = None
        self._destination: list[memoryview] = []
        self._refusal: LeaseError | None = None

    def open(
        self, header: Header, write: Write, body_nbytes: int, writer: str
    ) -> Iterable[memoryview]:
        """Memory for the body, the landing's own; scratch if the landing refuses.

        Raises UnexpectedMessage without a landing, Malformed("shape_word").
        """
        if self._landing is None:
            raise UnexpectedMessage("unexpected WRITE: this side has granted no lease")
        expected = self._landing.geometry.shape_word(write.num_tokens, layers=1)
        if header.shape_word != expected:
            raise Malformed("shape_word", f"is {header.shape_word:#x}, must be {expected:#x}")
        try:
            destination = self._landing.destination(write, body_nbytes, writer)
        except LeaseError as exc:
            # Answered in ``complete``: until the payload check this may be a damaged descriptor.
            self._refusal = exc
            return self._drain(body_nbytes)
        self._write = write
        self._destination = destination
        return destination

    def complete(self, header: Header) -> LeaseError | None:
        """The body arrived and its check agreed: count it, or return why it was refused."""
        refusal, self._refusal = self._refusal, None
        write, self._write = self._write, None
        destination, self._destination = self._destination, []
        if write is not None and self._landing is not None:
            if header.order is not HOST_ORDER:
                for piece in destination:
                    swap_in_place(piece, self._landing.geometry.element_nbytes)
            self._landing.landed(write)
        return refusal

    def abandon(self) -> None:
        """No byte of the body arrives any more. Idempotent."""
        write, self._write = self._write, None
        if write is not None and self._landing is not None:
            self._landing.abandoned(write)

    def _drain(self, nbytes: int) -> Iterator[memoryview]:
        for start in range(0, nbytes, _SCRATCH_NBYTES):
            yield self._scratch[: nbytes - start]
