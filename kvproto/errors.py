"""Everything that can go wrong, and the number it has on the wire.

    KvProtoError                    every error of this package; ``.code`` is its wire code
    ├── LocalProtocolError          our caller broke the contract; nothing was sent
    │   └── ConversionError         a value that the other element type cannot hold
    ├── RemoteProtocolError         the peer broke the contract; the connection is poisoned
    │   ├── BadMagic
    │   ├── UnsupportedVersion
    │   ├── BadByteOrder
    │   ├── ChecksumMismatch
    │   ├── UnknownKind
    │   ├── PayloadTooLarge
    │   ├── Malformed               ``.field`` names the field
    │   ├── Truncated
    │   └── UnexpectedMessage
    ├── HandshakeRefused            ``.field``, ``.ours``, ``.theirs``
    ├── AuthenticationFailed
    ├── ConnectionLost              ``.reason``, ``.clean``
    ├── DeadlineExceeded
    ├── LeaseError                  a write or commit without permission; ``.sequence_id``
    │   └── DigestMismatch          the bytes landed are not the bytes sent
    ├── PoolExhausted
    ├── Overloaded                  no room for another peer
    ├── CarrierUnavailable          these two cannot use this carrier; another one may do
    ├── CarrierLost                 a carrier that worked has failed; the connection lives on
    ├── KvFileError                 a file is not the KV of a prompt, or is damaged; ``.path``
    └── PeerError                   the peer sent ERROR; ``.field``, ``.sequence_id``

Local faults stand apart from remote ones because the reaction differs: a local fault is a bug
here and the connection is still sound; after a remote fault only abort is allowed.
"""

from enum import IntEnum


class ErrorCode(IntEnum):
    """Wire codes. Append only: a number, once given, keeps its meaning. 0 is "no error"."""

    INTERNAL = 1
    MALFORMED = 2
    INCOMPATIBLE = 3
    UNAUTHENTICATED = 4
    OVERLOADED = 5
    SHUTTING_DOWN = 6
    PROMPT_TOO_LONG = 7
    PREFILL_UNAVAILABLE = 8
    CANCELLED = 9
    DEADLINE_EXCEEDED = 10
    LEASE = 11
    DIGEST_MISMATCH = 12
    POOL_EXHAUSTED = 13
    BAD_MAGIC = 14
    UNSUPPORTED_VERSION = 15
    BAD_BYTE_ORDER = 16
    CHECKSUM_MISMATCH = 17
    UNKNOWN_KIND = 18
    PAYLOAD_TOO_LARGE = 19
    TRUNCATED = 20
    UNEXPECTED_MESSAGE = 21
    CONNECTION_LOST = 22
    LOCAL = 23
    CARRIER_LOST = 24


class KvProtoError(Exception):
    """Root of the tree. ``code`` is the number an ERROR frame about it carries."""

    code: int = ErrorCode.INTERNAL

    @property
    def field(self) -> str:
        """Name of the field at fault, "" if the fault is not about one field."""
        return ""


class LocalProtocolError(KvProtoError):
    """Our own caller broke the contract; the connection is still usable."""

    code = ErrorCode.LOCAL


class ConversionError(LocalProtocolError):
    """A value of our KV has no counterpart in the element type that was asked for."""


class RemoteProtocolError(KvProtoError):
    """The peer broke the contract; abort the connection, never resume it."""

    code = ErrorCode.MALFORMED


class BadMagic(RemoteProtocolError):
    """The first four bytes are not the magic: not a kvproto peer, or the stream is torn."""

    code = ErrorCode.BAD_MAGIC


class UnsupportedVersion(RemoteProtocolError):
    """The header's version byte is not one this side reads."""

    code = ErrorCode.UNSUPPORTED_VERSION


class BadByteOrder(RemoteProtocolError):
    """The header's byte-order byte is neither 1 (little) nor 2 (big)."""

    code = ErrorCode.BAD_BYTE_ORDER


class ChecksumMismatch(RemoteProtocolError):
    """Header check or payload check differs from the bytes received."""

    code = ErrorCode.CHECKSUM_MISMATCH


class UnknownKind(RemoteProtocolError):
    """The header's kind byte names no message of this version."""

    code = ErrorCode.UNKNOWN_KIND


class PayloadTooLarge(RemoteProtocolError):
    """An announced length is above the limit given in HELLO; nothing was allocated."""

    code = ErrorCode.PAYLOAD_TOO_LARGE


class Malformed(RemoteProtocolError):
    """A descriptor or body does not follow docs/wire.md.

    Args:
        field: name of the field at fault, or of the part of the frame.
        reason: what is wrong with it.
    """

    code = ErrorCode.MALFORMED

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self._field = field

    @property
    def field(self) -> str:
        """Name of the field at fault."""
        return self._field


class Truncated(RemoteProtocolError):
    """The stream ended inside a frame."""

    code = ErrorCode.TRUNCATED


class UnexpectedMessage(RemoteProtocolError):
    """A known message at the wrong time or from the wrong role."""

    code = ErrorCode.UNEXPECTED_MESSAGE


class HandshakeRefused(KvProtoError):
    """Both sides speak kvproto but cannot work together.

    Args:
        field: the first fact that differs.
        ours: our value, as text.
        theirs: the peer's value, as text.
        message: full sentence; made from the other three when empty.
    """

    code = ErrorCode.INCOMPATIBLE

    def __init__(self, field: str, ours: str, theirs: str, message: str = "") -> None:
        super().__init__(
            message
            or f"handshake refused: {field} is {ours!r} here and {theirs!r} at the peer; "
            f"start both sides with the same {field}"
        )
        self._field = field
        self.ours = ours
        self.theirs = theirs

    @property
    def field(self) -> str:
        """Name of the fact that differs."""
        return self._field


class AuthenticationFailed(KvProtoError):
    """The peer's AUTH does not prove that it holds our secret."""

    code = ErrorCode.UNAUTHENTICATED


class ConnectionLost(KvProtoError):
    """The connection is gone.

    Args:
        reason: full sentence, for logs.
        clean: True if it ended between two frames because one side closed it.
    """

    code = ErrorCode.CONNECTION_LOST

    def __init__(self, reason: str, *, clean: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.clean = clean


class DeadlineExceeded(KvProtoError):
    """A wait reached its deadline."""

    code = ErrorCode.DEADLINE_EXCEEDED


class LeaseError(KvProtoError):
    """A WRITE or COMMIT has no permission: unknown, stale, out of range, incomplete.

    The frame is refused and drained; the connection survives.

    Args:
        message: full sentence.
        sequence_id: the sequence the frame named.
    """

    code = ErrorCode.LEASE

    def __init__(self, message: str, *, sequence_id: str) -> None:
        super().__init__(message)
        self.sequence_id = sequence_id


class DigestMismatch(LeaseError):
    """The digests of COMMIT differ from the bytes that landed."""

    code = ErrorCode.DIGEST_MISMATCH


class PoolExhausted(KvProtoError):
    """Not enough free blocks; nothing was allocated."""

    code = ErrorCode.POOL_EXHAUSTED


class Overloaded(KvProtoError):
    """This side serves as many peers as it may."""

    code = ErrorCode.OVERLOADED


class CarrierUnavailable(KvProtoError):
    """A carrier cannot be used between these two; the sentence says why. TCP always can."""

    code = ErrorCode.INCOMPATIBLE


class CarrierLost(KvProtoError):
    """A carrier broke while it was in use; its transfers fail, messages still pass.

    The sentence says what the device or the peer reported. Open the connection anew: the next best
    carrier is then found.
    """

    code = ErrorCode.CARRIER_LOST


class KvFileError(KvProtoError):
    """A KV file cannot be read or written: not one, not complete, damaged, no room.

    Args:
        path: the file.
        reason: what is wrong and, where something helps, what to do.
    """

    code = ErrorCode.MALFORMED

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"KV file {path}: {reason}")
        self.path = path
        self.reason = reason


class PeerError(KvProtoError):
    """The peer reported an error; ``code`` is its wire code, also when unknown here.

    Args:
        code: wire code of the ERROR frame.
        message: the peer's words.
        field: field at fault, or "".
        sequence_id: the sequence that failed, or "" if the whole connection did.
    """

    def __init__(self, code: int, message: str, field: str = "", sequence_id: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self._field = field
        self.sequence_id = sequence_id

    @property
    def field(self) -> str:
        """Name of the field at fault, as the peer gave it."""
        return self._field
