"""``pdctl demo``: start everything, ask one question, show where the time went, stop."""

import asyncio
import sys
from typing import Final

import click

from ops.api_client import ApiClient
from ops.chat import show_answer
from ops.cluster import ClusterWishes
from ops.model_cache import default_model_dir, fetch_model
from ops.ports import free_ports
from ops.restart_policy import RestartPolicy
from ops.timing_table import timing_table
from ops.up import report, run_cluster
from svckit.lifecycle import Lifecycle

# Long enough for a handoff to show: a short prompt is prefilled by the decode worker itself.
DEFAULT_QUESTION: Final = (
    "A server answers questions with a language model. First it reads the whole question, which "
    "keeps the arithmetic units busy; then it writes the answer one word at a time, which keeps "
    "the memory busy. Explain in two or three sentences why these two jobs disturb each other "
    "when one process does both, and what is gained by giving each its own process."
)
_READY_TIMEOUT_S: Final = 300.0
_EXIT_INTERRUPTED: Final = 130


@click.command("demo")
@click.argument("question", default=DEFAULT_QUESTION)
@click.option("--max-tokens", default=96, show_default=True, type=click.IntRange(min=1))
def demo_command(question: str, max_tokens: int) -> None:
    """Answer QUESTION with a prefill and a decode worker on free ports of this host."""
    wishes = ClusterWishes(model_dir=fetch_model(default_model_dir(), report), drain_timeout_s=10.0)
    answers: list[str] = []

    async def session(url: str, lifecycle: Lifecycle) -> None:
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(_ask(url, question, max_tokens, answers))
            # Ctrl-C ends the question as well.
            stopping = group.create_task(lifecycle.wait_draining())
            await asyncio.wait((asking, stopping), return_when=asyncio.FIRST_COMPLETED)
            asking.cancel()
            stopping.cancel()

    ports = free_ports(wishes.num_prefill + wishes.num_decode)
    code = run_cluster(wishes, ports, session, RestartPolicy(max_restarts=2), _READY_TIMEOUT_S)
    sys.exit(code if code or answers else _EXIT_INTERRUPTED)


async def _ask(url: str, question: str, max_tokens: int, answers: list[str]) -> None:
    async with ApiClient(url) as client:
        model = await client.model_name()
        click.echo(f"\n> {question}\n")
        options = {"max_tokens": max_tokens, "temperature": 0.0}
        messages = [{"role": "user", "content": question}]
        parts = client.stream_chat(model, messages, options)
        answer, timings = await show_answer(parts)
        click.echo("\n".join(["", *timing_table(timings or {}), ""]))
        answers.append(answer)
