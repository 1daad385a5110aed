"""``pdctl chat``: ask the running system, once or in a conversation."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ops.api_client import DEFAULT_URL, ApiClient, StreamPart
from ops.timing_table import timing_table
from svckit.errors import ServiceError
from svckit.secret import read_secret


@click.command("chat")
@click.argument("question", required=False)
@click.option("--url", default=DEFAULT_URL, show_default=True, help="The router's address.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="API key, mode 0600.")
@click.option("--max-tokens", default=256, show_default=True, type=click.IntRange(min=1))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0.0, 2.0))
@click.option("--timings/--no-timings", default=False, help="Show where the time went.")
def chat_command(
    question: str | None,
    url: str,
    api_key_file: Path | None,
    max_tokens: int,
    temperature: float,
    timings: bool,
) -> None:
    """Ask QUESTION and stream the answer; without one, hold a conversation."""
    if question is not None and not question.strip():
        raise ServiceError("The question is empty.")
    options = {"max_tokens": max_tokens, "temperature": temperature}
    client = ApiClient(url, read_secret(api_key_file, {}))
    messages: list[Mapping[str, str]] = []
    for text in typed_questions() if question is None else (question,):
        messages.append({"role": "user", "content": text})
        # One loop per question: Ctrl-C while typing then finds no thread to wait for.
        answer, facts = asyncio.run(_ask(client, messages, options))
        messages.append({"role": "assistant", "content": answer})
        if timings and facts:
            click.echo("\n".join(["", *timing_table(facts)]))


async def _ask(
    client: ApiClient, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any] | None]:
    async with client:
        model = await client.model_name()
        return await show_answer(client.stream_chat(model, messages, options))


async def show_answer(
    parts: AsyncIterator[StreamPart],
) -> tuple[str, Mapping[str, Any] | None]:
    """Write the answer to stdout as it arrives; return it whole, and its timings if given."""
    pieces: list[str] = []
    timings: Mapping[str, Any] | None = None
    async for part in parts:
        pieces.append(part.text)
        timings = part.timings or timings
        sys.stdout.write(part.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return "".join(pieces), timings


def typed_questions() -> Iterator[str]:
    """Lines typed or piped in, until the end of input; empty ones are skipped."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        click.echo("Ask something; Ctrl-D ends.", err=True)
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            return
        if line.strip():
            yield line.strip()
