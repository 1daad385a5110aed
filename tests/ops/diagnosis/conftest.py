"""Real HTTP servers for what the doctor asks."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
StartService = Callable[[dict[str, Handler]], Awaitable[str]]


@pytest.fixture
async def start_service() -> AsyncIterator[StartService]:
    """Serve handlers by path and return the address; stopped with the test."""
    servers: list[TestServer] = []

    async def start(handlers: dict[str, Handler]) -> str:
        app = web.Application()
        for path, handler in handlers.items():
            app.router.add_get(path, handler)
        server = TestServer(app)
        await server.start_server()
        servers.append(server)
        return f"http://127.0.0.1:{server.port}"

    yield start
    for server in servers:
        await server.close()
