"""Errors of a decode worker.

KvProtoError
├── SequenceRefused    a GENERATE that is not taken on
└── FetchFailed        no prefill worker delivered the KV
FetchCancelled         the sequence no longer wants its KV (an outcome, not a fault)
"""

from kvproto.errors import ErrorCode, KvProtoError


class SequenceRefused(KvProtoError):
    """The sequence is not taken on; ``code`` says why on the wire, the message to a person."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code


class FetchFailed(KvProtoError):
    """No prefill worker delivered; the message lists what each said."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class FetchCancelled(Exception):
    """The sequence no longer wants its KV."""
