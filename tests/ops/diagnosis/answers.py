"""Handlers that answer as our services do, or as they never should."""

import asyncio
from typing import Any

from aiohttp import web

from tests.ops.diagnosis.conftest import Handler


def json_of(body: Any, status: int = 200) -> Handler:
    """Always the same JSON."""

    async def handle(_request: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    return handle


def text_of(text: str | bytes, status: int = 200) -> Handler:
    """Always the same text."""

    async def handle(_request: web.Request) -> web.Response:
        body = text if isinstance(text, bytes) else text.encode()
        return web.Response(body=body, status=status, content_type="text/plain")

    return handle


def never() -> Handler:
    """No answer until the client leaves."""

    async def handle(_request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    return handle


def endless(piece: bytes = b"# x\n" * 4096) -> Handler:
    """An answer without an end."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(piece)

    return handle


def keyed(inside: Handler, key: str) -> Handler:
    """401 without the key."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": {"message": "key"}}, status=401)
        return await inside(request)

    return handle


def moved(url: str) -> Handler:
    """A redirect to elsewhere."""

    async def handle(_request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": url})

    return handle


def broken_off() -> Handler:
    """The connection ends in the middle of the answer."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"{")
        assert request.transport is not None
        request.transport.abort()
        return response

    return handle
