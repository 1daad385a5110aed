"""Kill -9 of any process in the middle of a request: the others live on, nothing leaks."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx2
import openai
import pytest

from tests.reference import greedy_reference
from tests.system.cluster import Cluster
from tests.system.completions import client_of, complete

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

_PROMPT = [(7 * i + 3) % 256 for i in range(60)]
_LONG_PROMPT = [(11 * i + 5) % 256 for i in range(1500)]
_DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def cluster(
    tiny_model_dir: Callable[[str], Path], start_cluster: Callable[..., Cluster]
) -> Cluster:
    # Chunks of four tokens: the long prompt is long enough to be hit in the middle.
    return start_cluster(
        tiny_model_dir("llama"), worker_flags={"prefill": ["--max-step-tokens", "4"]}
    )


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(cluster) as client:
        yield client


async def _stream(
    client: openai.AsyncOpenAI, max_tokens: int, on_tokens: Callable[[int], None]
) -> list[int]:
    """Output of ``_PROMPT``; ``on_tokens`` is told after each chunk how many there are."""
    tokens: list[int] = []
    stream = await client.completions.create(
        model="llama",
        prompt=_PROMPT,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    async for chunk in stream:
        for choice in chunk.model_dump()["choices"]:
            tokens += choice.get("token_ids") or []
        on_tokens(len(tokens))
    return tokens


async def _assert_serves(cluster: Cluster, client: openai.AsyncOpenAI, model_dir: Path) -> None:
    [expected] = greedy_reference(model_dir, [_PROMPT], max_tokens=8)
    output, _ = await complete(client, cluster.health("router")["model"], _PROMPT, 8)
    assert output == expected
    await cluster.wait_idle()


async def test_prefill_worker_is_killed(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    model = cluster.health("router")["model"]
    async with asyncio.timeout(_DEADLINE_S):
        request = asyncio.create_task(complete(client, model, _LONG_PROMPT, 4))
        while cluster.metrics("prefill-0")["pd_prefill_computed_tokens_total"] < 100:
            await asyncio.sleep(0.01)
        cluster.processes["prefill-0"].kill()
        with pytest.raises(openai.APIStatusError) as caught:
            await request
        assert caught.value.status_code in (502, 503, 504)
        while cluster.health("decode-0")["blocks"]["free"] != sum(
            cluster.health("decode-0")["blocks"].values()
        ):
            await asyncio.sleep(0.05)
    cluster.processes["prefill-0"].start()
    cluster.wait_ready()
    await _assert_serves(cluster, client, cluster.model_dir)


async def test_decode_worker_is_killed_and_the_stream_goes_on(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    decode = cluster.processes["decode-0"]
    num_tokens = 400

    def kill_in_the_middle(num_seen: int) -> None:
        assert decode.popen is not None
        if num_seen >= 20 and not was_killed:
            was_killed.append(num_seen)
            decode.kill()
            decode.start()

    was_killed: list[int] = []
    async with asyncio.timeout(_DEADLINE_S):
        output = await _stream(client, num_tokens, kill_in_the_middle)
    assert was_killed
    assert was_killed[0] < num_tokens
    again = await _stream(client, num_tokens, lambda _: None)
    assert output == again
    await _assert_serves(cluster, client, cluster.model_dir)


async def test_router_is_killed(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    router = cluster.processes["router"]

    def kill_in_the_middle(num_seen: int) -> None:
        if num_seen >= 20:
            router.kill()

    async with asyncio.timeout(_DEADLINE_S):
        with pytest.raises((openai.APIConnectionError, httpx2.TransportError)):
            await _stream(client, 2000, kill_in_the_middle)
        await cluster.wait_idle()
    router.start()
    cluster.wait_ready()
    await _assert_serves(cluster, client, cluster.model_dir)
