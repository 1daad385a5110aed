"""Requests that tests make, through the official client."""

import asyncio
from collections.abc import Sequence
from typing import Any

import openai

from tests.system.cluster import Cluster


def client_of(cluster: Cluster) -> openai.AsyncOpenAI:
    """The official client, without its own retries: a test wants to see the first answer."""
    return openai.AsyncOpenAI(
        base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=300
    )


async def complete(
    client: openai.AsyncOpenAI, model: str, prompt: Sequence[int], max_tokens: int, **options: Any
) -> tuple[list[int], dict[str, Any]]:
    """Output token ids and timings of one completion of a token prompt."""
    extra_body = {"return_token_ids": True, "include_timings": True, **options}
    answer = await client.completions.create(
        model=model,
        prompt=list(prompt),
        max_tokens=max_tokens,
        temperature=options.pop("temperature", 0),
        extra_body=extra_body,
    )
    body = answer.model_dump()
    return body["choices"][0]["token_ids"], body["timings"]


async def complete_all(
    cluster: Cluster,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    num_in_flight: int,
) -> list[tuple[list[int], dict[str, Any]]]:
    """Complete every prompt, at most ``num_in_flight`` at a time, in order of the prompts."""
    model = cluster.health("router")["model"]
    gate = asyncio.Semaphore(num_in_flight)

    async with client_of(cluster) as client:

        async def one(prompt: Sequence[int]) -> tuple[list[int], dict[str, Any]]:
            async with gate:
                return await complete(client, model, prompt, max_tokens)

        return await asyncio.gather(*(one(prompt) for prompt in prompts))
