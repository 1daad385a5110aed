"""Limits of a request body. Sockets and timing are in test_server.py."""

import gzip

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from router_svc.errors import InvalidRequestError
from router_svc.request_body import read_json_object

JSON = {"Content-Type": "application/json"}


async def post(body: bytes, headers: dict[str, str]) -> tuple[int, str]:
    """Return the status and text of a handler that reads at most 1000 bytes."""

    async def handle(request: web.Request) -> web.Response:
        try:
            value = await read_json_object(request, max_nbytes=1000, timeout_s=5.0)
        except InvalidRequestError as exc:
            return web.Response(status=exc.http_status, text=exc.param)
        return web.json_response(value)

    app = web.Application()
    app.router.add_post("/", handle)
    async with TestClient(TestServer(app)) as client:
        response = await client.post("/", data=body, headers=headers)
        return response.status, await response.text()


@pytest.mark.parametrize(
    ("body", "headers", "status", "text"),
    [
        (b'{"a": 1}', JSON, 200, '{"a": 1}'),
        (b'{"a": 1}', {"Content-Type": "application/json; charset=UTF-8"}, 200, '{"a": 1}'),
        (b'{"a": 1}', {"Content-Type": "text/json"}, 415, "content-type"),
        (b'{"a": 1}', {"Content-Type": "application/json; charset=utf-16"}, 415, "content-type"),
        (b" " * 998 + b"{}", JSON, 200, "{}"),
        (b" " * 999 + b"{}", JSON, 413, "body"),
        (b"{", JSON, 400, "body"),
    ],
)
async def test_limits(body: bytes, headers: dict[str, str], status: int, text: str) -> None:
    assert await post(body, headers) == (status, text)


async def test_compressed_bomb_counts_with_its_real_size() -> None:
    body = gzip.compress(b" " * 100_000 + b"{}")
    assert len(body) < 1000
    assert await post(body, JSON | {"Content-Encoding": "gzip"}) == (413, "body")


async def test_broken_compression() -> None:
    status, _ = await post(b"not gzip", JSON | {"Content-Encoding": "gzip"})
    assert status == 400
