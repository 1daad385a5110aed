"""Errors a client of the HTTP interface can see, in OpenAI's JSON shape.

    ApiError                    status, type, param, code
    ├── InvalidRequestError     400 (or 405, 408, 413, 415): the client must change the request
    ├── UnauthorizedError       401: missing or wrong API key
    ├── NotFoundError           404: unknown path or model
    ├── OverloadedError         429: in-flight bound reached; Retry-After is set
    ├── UpstreamError           502: a worker broke its promise and nobody could take over
    ├── UnavailableError        503: no worker, or draining; Retry-After is set
    ├── RequestTimeoutError     504: the deadline of the request passed
    └── InternalError           500: our bug; the log has the details

Everything that leaves the router is one of these; errors of kvproto are mapped at the border
by `from_wire`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from kvproto.errors import ErrorCode

RETRY_AFTER_S: Final = 1


class ApiError(Exception):
    """One refused or failed request: `message` says what happened and what to do."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    retry_after_s: ClassVar[int | None] = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.http_status = self.status

    def body(self) -> dict[str, Any]:
        """Return the response body: ``{"error": {message, type, param, code}}``."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> Mapping[str, str]:
        """Return the HTTP headers that belong to this error."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(self.retry_after_s)}


class InvalidRequestError(ApiError):
    """The request cannot be served as it is; `param` names the field."""

    status = 400
    type = "invalid_request_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        http_status: int = 400,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.http_status = http_status


class UnauthorizedError(ApiError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"

    def headers(self) -> Mapping[str, str]:
        """Name the scheme, as RFC 9110 section 11.6.1 asks."""
        return {"WWW-Authenticate": "Bearer"}


class NotFoundError(ApiError):
    """There is no such path or model."""

    status = 404
    type = "invalid_request_error"


class OverloadedError(ApiError):
    """The bound on sequences in flight is reached."""

    status = 429
    type = "rate_limit_error"
    default_code = "overloaded"
    retry_after_s = RETRY_AFTER_S


class InternalError(ApiError):
    """A bug of ours; the text never carries details of the process."""

    status = 500
    default_code = "internal"


class UpstreamError(ApiError):
    """A worker failed and the sequence could not go on elsewhere."""

    status = 502
    default_code = "worker_failed"


class UnavailableError(ApiError):
    """Nothing can serve the request now; trying again later may work."""

    status = 503
    default_code = "unavailable"
    retry_after_s = RETRY_AFTER_S


class RequestTimeoutError(ApiError):
    """The request's own deadline, or the one for its first token, passed."""

    status = 504
    default_code = "deadline_exceeded"


_UNAVAILABLE: Final = frozenset(
    {ErrorCode.OVERLOADED, ErrorCode.SHUTTING_DOWN, ErrorCode.PREFILL_UNAVAILABLE}
)


def from_wire(code: int, message: str) -> ApiError:
    """Map a worker's error code to the error its client sees.

    `prompt_too_long` and `pool_exhausted` mean the request does not fit the worker, so the
    client has to shorten it; unknown codes become `UpstreamError`.
    """
    if code in (ErrorCode.PROMPT_TOO_LONG, ErrorCode.POOL_EXHAUSTED):
        return InvalidRequestError(
            f"The decode worker cannot hold this sequence: {message}. Shorten the prompt or "
            "lower max_tokens.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if code in _UNAVAILABLE:
        return UnavailableError(f"The worker could not serve the request: {message}")
    if code == ErrorCode.DEADLINE_EXCEEDED:
        return RequestTimeoutError(f"The deadline passed at the worker: {message}")
    return UpstreamError(f"The worker failed: {message}")
