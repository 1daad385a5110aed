import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from ops.api_client import ApiClient, StreamPart, error_message, parse_event
from svckit.errors import ServiceError
from tests.ops.fake_router import FakeRouter, stream_of, text_chunk

MESSAGES = [{"role": "user", "content": "q"}]


async def collect(client: ApiClient) -> list[StreamPart]:
    async with client, asyncio.timeout(30):
        return [part async for part in client.stream_chat("m", MESSAGES, {"max_tokens": 3})]


async def test_stream_gives_text_then_facts(fake_router: FakeRouter) -> None:
    closing = {"choices": [], "usage": {"completion_tokens": 2}, "timings": {"ttft_s": 0.5}}
    chunks = [text_chunk("a"), text_chunk("ß", "stop"), closing]
    fake_router.answers["/v1/chat/completions"] = stream_of(chunks)
    parts = await collect(ApiClient(fake_router.url + "/"))
    assert [part.text for part in parts] == ["a", "ß", ""]
    assert parts[1].finish_reason == "stop"
    assert parts[2].usage == {"completion_tokens": 2}
    assert parts[2].timings == {"ttft_s": 0.5}
    [request] = fake_router.bodies
    assert request == {
        "model": "m",
        "messages": MESSAGES,
        "stream": True,
        "stream_options": {"include_usage": True, "include_timings": True},
        "max_tokens": 3,
    }


async def test_a_stream_that_is_cut_is_an_error(fake_router: FakeRouter) -> None:
    fake_router.answers["/v1/chat/completions"] = stream_of([text_chunk("a")])
    with pytest.raises(ServiceError, match="ended before it was finished"):
        await collect(ApiClient(fake_router.url))


async def test_an_error_inside_the_stream(fake_router: FakeRouter) -> None:
    chunks = [text_chunk("a"), {"error": {"message": "The worker was lost."}}]
    fake_router.answers["/v1/chat/completions"] = stream_of(chunks)
    with pytest.raises(ServiceError, match=r"The answer failed: The worker was lost\."):
        await collect(ApiClient(fake_router.url))


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (lambda: web.json_response({"error": {"message": "Busy."}}, status=429), "429: Busy."),
        (lambda: web.Response(status=500, text="oops"), "500: oops"),
        (lambda: web.Response(status=502), "502: no explanation"),
    ],
)
async def test_refusals_name_status_and_reason(
    fake_router: FakeRouter, response: Callable[[], web.Response], message: str
) -> None:
    fake_router.answers["/v1/chat/completions"] = lambda _: response()
    with pytest.raises(ServiceError, match=message):
        await collect(ApiClient(fake_router.url))


async def test_key_is_sent(fake_router: FakeRouter) -> None:
    seen: list[str | None] = []

    def health(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"state": "serving"})

    fake_router.answers["/healthz"] = health
    for key in (None, b"abc"):
        async with ApiClient(fake_router.url, key) as client:
            assert await client.health() == {"state": "serving"}
    assert seen == [None, "Bearer abc"]


Use = Callable[[ApiClient], Awaitable[Any]]


@pytest.mark.parametrize(
    ("path", "body", "use", "message"),
    [
        ("/v1/models", {"data": []}, ApiClient.model_name, "names no model"),
        ("/v1/models", {"x": 1}, ApiClient.model_name, "names no model"),
        ("/healthz", [1], ApiClient.health, "did not answer with a JSON object"),
    ],
)
async def test_odd_answers(
    fake_router: FakeRouter, path: str, body: Any, use: Use, message: str
) -> None:
    fake_router.answers[path] = lambda _: web.json_response(body)
    async with ApiClient(fake_router.url) as client:
        with pytest.raises(ServiceError, match=message):
            await use(client)


async def test_not_json(fake_router: FakeRouter) -> None:
    fake_router.answers["/healthz"] = lambda _: web.Response(text="hello")
    async with ApiClient(fake_router.url) as client:
        with pytest.raises(ServiceError, match=r"The connection to .* failed"):
            await client.health()


def test_address_needs_a_scheme() -> None:
    with pytest.raises(ServiceError, match="must start with http"):
        ApiClient("localhost:8000")


def test_error_message_of_an_openai_body() -> None:
    assert error_message(json.dumps({"error": {"message": "x"}})) == "x"


@pytest.mark.parametrize("line", [b"\n", b": comment\n", b"event: x\n", b"data: [DONE]\n"])
def test_lines_without_a_part(line: bytes) -> None:
    assert parse_event(line) is None


def test_a_role_chunk_has_no_text() -> None:
    event = b'data: {"choices": [{"delta": {"role": "assistant", "content": null}}]}\n'
    assert parse_event(event) == StreamPart()
