"""A stream begins late, ends clearly, and never mixes events."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router_svc.sse_stream import SseStream

WAIT_S = 10.0
Scenario = Callable[[SseStream], Awaitable[web.StreamResponse]]


@pytest.fixture
async def fetch() -> AsyncIterator[Callable[[Scenario], Awaitable[tuple[int, str]]]]:
    """Run a scenario in a handler and return the status and text its client got."""
    servers: list[TestServer] = []

    async def run(scenario: Scenario) -> tuple[int, str]:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await scenario(SseStream(request, {"X-Request-Id": "r1"}))

        app = web.Application()
        app.router.add_get("/", handle)
        server = TestServer(app)
        servers.append(server)
        await server.start_server()
        timeout = aiohttp.ClientTimeout(WAIT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(server.make_url("/")) as response,
        ):
            if response.status == 200:
                assert response.content_type == "text/event-stream"
                assert response.headers["X-Request-Id"] == "r1"
            return response.status, await response.text()

    yield run
    for server in servers:
        await server.close()


async def test_nothing_is_sent_before_the_first_event(
    fetch: Callable[[Scenario], Awaitable[tuple[int, str]]],
) -> None:
    async def scenario(stream: SseStream) -> web.StreamResponse:
        assert not stream.is_started
        return web.Response(status=503)

    assert (await fetch(scenario))[0] == 503


async def test_events_then_done(
    fetch: Callable[[Scenario], Awaitable[tuple[int, str]]],
) -> None:
    async def scenario(stream: SseStream) -> web.StreamResponse:
        await stream.send({"a": 1})
        assert stream.is_started
        return await stream.close({"b": 2})

    text = (await fetch(scenario))[1]
    assert text == 'data: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]\n\n'


async def test_failure_has_no_done(
    fetch: Callable[[Scenario], Awaitable[tuple[int, str]]],
) -> None:
    async def scenario(stream: SseStream) -> web.StreamResponse:
        await stream.send(1)
        return await stream.fail({"error": {}})

    assert (await fetch(scenario))[1] == 'data: 1\n\ndata: {"error":{}}\n\n'


async def test_events_of_several_tasks_do_not_mix(
    fetch: Callable[[Scenario], Awaitable[tuple[int, str]]],
) -> None:
    async def scenario(stream: SseStream) -> web.StreamResponse:
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(stream.send([number] * 500))
        return await stream.close()

    events = (await fetch(scenario))[1].split("\n\n")[:-2]
    values = [json.loads(event.removeprefix("data: ")) for event in events]
    assert sorted(value[0] for value in values) == list(range(50))
    assert all(value == [value[0]] * 500 for value in values)


@pytest.mark.parametrize("is_stuck_before_the_end", [True, False])
async def test_client_that_does_not_read_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, is_stuck_before_the_end: bool
) -> None:
    monkeypatch.setattr("router_svc.sse_stream._END_TIMEOUT_S", 0.05)
    # Far more than all socket buffers hold.
    huge = "x" * 50_000_000
    outcome: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def handle(request: web.Request) -> web.StreamResponse:
        stream = SseStream(request, {})
        if is_stuck_before_the_end:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await stream.send(huge)
        try:
            return await stream.fail({"error": huge})
        except ConnectionError as exc:
            outcome.set_result(exc)
            raise

    app = web.Application()
    app.router.add_get("/", handle)
    async with TestServer(app) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            assert "did not take the end" in str(await outcome)
            with contextlib.suppress(ConnectionError):
                while await reader.read(1 << 16):
                    pass
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
