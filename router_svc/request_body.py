"""Reading one HTTP request body within its limits of size, time and type."""

import asyncio
from typing import Any

from aiohttp import web

from router_svc.errors import InvalidRequestError
from router_svc.json_body import parse_json_object


async def read_json_object(
    request: web.Request, *, max_nbytes: int, timeout_s: float
) -> dict[str, Any]:
    """Return the JSON object in the body.

    Raises InvalidRequestError, checked in this order: content type (415), announced length
    (413), real length after decompression (413), time (408), then what `parse_json_object` checks.
    """
    if request.content_type != "application/json":
        raise InvalidRequestError(
            f"The content type is {request.content_type}. Send application/json.",
            param="content-type",
            http_status=415,
        )
    charset = (request.charset or "utf-8").lower().replace("_", "-")
    if charset not in ("utf-8", "utf8"):
        raise InvalidRequestError(
            f"The charset is {charset}. Send JSON in UTF-8.", param="content-type", http_status=415
        )
    if request.content_length is not None and request.content_length > max_nbytes:
        raise _too_large(max_nbytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.content.iter_any():
                if len(body) + len(chunk) > max_nbytes:
                    raise _too_large(max_nbytes)
                body += chunk
    except TimeoutError:
        raise InvalidRequestError(
            f"The body did not arrive within {timeout_s:g} s. Send it faster.",
            param="body",
            http_status=408,
        ) from None
    except web.RequestPayloadError as exc:
        raise InvalidRequestError(
            "The body ended early or its encoding is broken. Send it again.", param="body"
        ) from exc
    return parse_json_object(bytes(body))


def _too_large(max_nbytes: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"The body is larger than {max_nbytes} bytes. Send less at once.",
        param="body",
        code="body_too_large",
        http_status=413,
    )
