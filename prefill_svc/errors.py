"""Errors of a prefill worker.

KvProtoError
└── PromptRefused    a PREFILL that is not taken on
"""

from kvproto.errors import ErrorCode, KvProtoError


class PromptRefused(KvProtoError):
    """The prompt is not taken on; ``code`` says why on the wire, the message to a person."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
