"""The WRITE being received on one connection: permission, memory, and what became of it."""

from collections.abc import Iterable, Iterator
from typing import Final

from kvproto.carrier import Landing
from kvproto.errors import LeaseError, UnexpectedMessage
from kvproto.header import Header
from kvproto.messages import Placed, Write

_SCRATCH_NBYTES: Final = 64 * 1024


class WriteReceiver:
    """At most one WRITE at a time. ``open``, ``received``, then ``complete`` or ``abandon``.

    Args:
        landing: where bodies go; None refuses every WRITE as unexpected.
    """

    def __init__(self, landing: Landing | None) -> None:
        self._landing = landing
        self._scratch = memoryview(bytearray(_SCRATCH_NBYTES))
        self._write: Write | None = None
        self._refusal: LeaseError | None = None

    def open(
        self, header: Header, write: Write, body_nbytes: int, writer: str
    ) -> Iterable[memoryview]:
        """Memory for the body, the landing's own; scratch if the landing refuses.

        Raises UnexpectedMessage without a landing, Malformed("shape_word").
        """
        landing = self._require_landing("WRITE")
        try:
            destination = landing.destination(write, body_nbytes, header.shape_word, writer)
        except LeaseError as exc:
            # Answered in ``complete``: until the payload check this may be a damaged descriptor.
            self._refusal = exc
            return self._drain(body_nbytes)
        self._write = write
        return destination

    def received(self, piece: memoryview) -> None:
        """Bytes of the body, if a WRITE is being received and was not refused."""
        if self._write is not None and self._landing is not None:
            self._landing.received(self._write, piece)

    def complete(self, header: Header) -> LeaseError | None:
        """The body arrived and its check agreed: count it, or return why it was refused."""
        refusal, self._refusal = self._refusal, None
        write, self._write = self._write, None
        if write is not None and self._landing is not None:
            self._landing.landed(write, header.order)
        return refusal

    def placed(self, placed: Placed, writer: str) -> LeaseError | None:
        """Count tokens that a carrier has placed, or return why they do not count.

        Raises UnexpectedMessage without a landing.
        """
        try:
            self._require_landing("PLACED").placed(placed, writer)
        except LeaseError as exc:
            return exc
        return None

    def abandon(self) -> None:
        """No byte of the body arrives any more. Idempotent."""
        write, self._write = self._write, None
        if write is not None and self._landing is not None:
            self._landing.abandoned(write)

    def _require_landing(self, name: str) -> Landing:
        if self._landing is None:
            raise UnexpectedMessage(f"unexpected {name}: this side has granted no lease")
        return self._landing

    def _drain(self, nbytes: int) -> Iterator[memoryview]:
        for start in range(0, nbytes, _SCRATCH_NBYTES):
            yield self._scratch[: nbytes - start]
