"""The HTTP surface below OpenAI's client: raw bodies, keys, probes, draining."""

import asyncio
import io
import json
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from svckit.lifecycle import Step
from svckit.version import program_version

WAIT_S = 10.0
JSON = {"Content-Type": "application/json"}
GOOD = json.dumps({"model": "tiny-chat", "prompt": "x"}).encode()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(WAIT_S)) as client:
        yield client


async def post(
    session: aiohttp.ClientSession, router: Any, body: Any, headers: dict[str, str] = JSON
) -> tuple[int, dict[str, Any]]:
    url = f"{router.url}/v1/completions"
    async with session.post(url, data=body, headers=headers) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{nonsense", "invalid_json"),
        (b'{"model": "tiny-chat", "prompt": "\xff\xfe"}', "invalid_utf8"),
        (b"[]", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"model": "tiny-chat", "prompt": "\\ud800"}', "invalid_utf8"),
    ],
)
async def test_malformed_body(
    start_router: Any, session: aiohttp.ClientSession, body: bytes, code: str
) -> None:
    status, answer = await post(session, await start_router(), body)
    assert status == 400
    assert answer["error"]["code"] == code
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"]


@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/json; charset=latin-1",
    ],
)
async def test_wrong_content_type(
    start_router: Any, session: aiohttp.ClientSession, content_type: str
) -> None:
    router = await start_router()
    status, answer = await post(session, router, GOOD, {"Content-Type": content_type})
    assert status == 415
    assert answer["error"]["param"] == "content-type"


async def test_body_of_50_mb(start_router: Any, session: aiohttp.ClientSession) -> None:
    router = await start_router()
    status, answer = await post(session, router, io.BytesIO(b"x" * 50_000_000))
    assert status == 413
    assert answer["error"]["param"] == "body"
    assert "4194304" in answer["error"]["message"]


async def test_large_body_without_a_length(
    start_router: Any, session: aiohttp.ClientSession
) -> None:
    router = await start_router(max_body_nbytes=1024)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 100

    status, answer = await post(session, router, chunks())
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


async def test_body_that_does_not_arrive(start_router: Any) -> None:
    router = await start_router(body_timeout_s=0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", router.service.http_port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{"
    )
    async with asyncio.timeout(WAIT_S):
        line = await reader.readline()
    assert b"408" in line
    writer.close()
    await writer.wait_closed()


async def test_unknown_path_and_method(start_router: Any, session: aiohttp.ClientSession) -> None:
    router = await start_router()
    async with session.get(f"{router.url}/v1/embeddings") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "path_not_found"
    async with session.get(f"{router.url}/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert "GET /v1/completions" in (await response.json())["error"]["message"]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("sixteen-bytes-or-more\n", encoding="ascii")
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)
    return path


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        "Basic sixteen-bytes-or-more",
        "sixteen-bytes-or-more",
        "Bearer sixteen-bytes-or-more2",
        "Bearer schlüssel",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/nothing"])
async def test_api_key_is_needed_everywhere(
    start_router: Any,
    session: aiohttp.ClientSession,
    key_file: Path,
    path: str,
    authorization: str | None,
) -> None:
    router = await start_router(api_key_file=key_file)
    headers = {} if authorization is None else {"Authorization": authorization}
    async with session.get(router.url + path, headers=headers) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert (await response.json())["error"]["code"] == "invalid_api_key"


async def test_api_key_opens(
    start_router: Any, session: aiohttp.ClientSession, key_file: Path, cluster: Any
) -> None:
    router = await start_router(api_key_file=key_file)
    await cluster.add_decode(router)
    headers = {"Authorization": "Bearer sixteen-bytes-or-more"}
    status, _ = await post(session, router, GOOD, JSON | headers)
    assert status == 200
    async with session.get(f"{router.url}/healthz") as response:
        assert await response.json() == {"state": "serving"}
    async with session.get(f"{router.url}/healthz", headers=headers) as response:
        health = await response.json()
        assert len(health["workers"]) == 1
        assert health["version"] == program_version()


async def test_headers_choose_nothing(
    start_router: Any, session: aiohttp.ClientSession, cluster: Any
) -> None:
    router = await start_router()
    worker = await cluster.add_decode(router)
    headers = {
        "X-Request-Id": "___decode_addr_198.51.100.1:9___",
        "X-Decode-Host": "198.51.100.1",
        "X-Prefiller-Host-Port": "198.51.100.1:9",
        "Host": "198.51.100.1",
    }
    url = f"{router.url}/v1/completions"
    async with session.post(url, data=GOOD, headers=JSON | headers) as response:
        assert response.status == 200
        assert response.headers["X-Request-Id"].startswith("cmpl-")
    assert "198.51.100.1" not in repr(worker.generates)


async def test_sse_framing(start_router: Any, session: aiohttp.ClientSession, cluster: Any) -> None:
    router = await start_router()
    await cluster.add_decode(router)
    body = json.dumps({"model": "tiny-chat", "prompt": "x", "stream": True})
    url = f"{router.url}/v1/completions"
    async with session.post(url, data=body, headers=JSON) as response:
        assert response.content_type == "text/event-stream"
        raw = (await response.read()).decode("utf-8")
    events = raw.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_failed_stream_ends_without_done(
    start_router: Any, session: aiohttp.ClientSession, cluster: Any
) -> None:
    router = await start_router(request_timeout_s=0.3)
    await cluster.add_decode(router, pause_after=2)
    body = json.dumps({"model": "tiny-chat", "prompt": "x", "stream": True})
    url = f"{router.url}/v1/completions"
    async with session.post(url, data=body, headers=JSON) as response:
        assert response.status == 200
        raw = (await response.read()).decode("utf-8")
    last = json.loads(raw.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in raw


async def test_metrics(start_router: Any, session: aiohttp.ClientSession, cluster: Any) -> None:
    router = await start_router()
    await cluster.add_decode(router)
    await post(session, router, GOOD)
    await post(session, router, b"{")
    async with session.get(f"{router.url}/metrics") as response:
        assert response.status == 200
        lines = (await response.text()).splitlines()
    num_tokens = len(cluster.reply)
    assert "gen_ai_server_time_to_first_token_seconds_count 1.0" in lines
    assert "gen_ai_server_request_duration_seconds_count 1.0" in lines
    assert "gen_ai_server_time_per_output_token_seconds_count 1.0" in lines
    assert f"gen_ai_server_inter_token_latency_seconds_count {num_tokens - 1:.1f}" in lines
    assert f"pd_router_output_tokens_sum {num_tokens:.1f}" in lines
    assert 'pd_router_requests_total{status="200"} 1.0' in lines
    assert 'pd_router_requests_total{status="400"} 1.0' in lines
    assert 'pd_router_workers{role="decode"} 1.0' in lines
    for gauge in ("requests_in_flight", "sequences_waiting", "sequences_running"):
        assert f"pd_router_{gauge} 0.0" in lines


async def test_drain_finishes_old_work_and_refuses_new(
    start_router: Any, session: aiohttp.ClientSession, cluster: Any
) -> None:
    router = await start_router(drain_timeout_s=WAIT_S)
    worker = await cluster.add_decode(router, pause_after=1)
    old = asyncio.create_task(post(session, router, GOOD))
    await worker.wait_for(lambda: worker.generates)
    router.lifecycle.advance(Step.DRAIN)
    status, answer = await post(session, router, GOOD)
    assert status == 503
    assert "draining" in answer["error"]["message"]
    async with session.get(f"{router.url}/readyz") as response:
        assert response.status == 503
    worker.resume.set()
    assert (await old)[0] == 200
    async with asyncio.timeout(WAIT_S):
        await router.task


async def test_drain_deadline_cuts_off(
    start_router: Any, session: aiohttp.ClientSession, cluster: Any
) -> None:
    router = await start_router(drain_timeout_s=0.1)
    worker = await cluster.add_decode(router, pause_after=1)
    old = asyncio.create_task(post(session, router, GOOD))
    await worker.wait_for(lambda: worker.generates)
    router.lifecycle.advance(Step.DRAIN)
    async with asyncio.timeout(WAIT_S):
        await router.task
    status, answer = await old
    assert status == 503
    assert "stops" in answer["error"]["message"]
    await worker.wait_for(lambda: worker.aborts)
