"""A stand-in for the router: canned answers over real HTTP."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request], web.StreamResponse]


class FakeRouter:
    """An HTTP server with canned answers by path; remembers the JSON bodies it got."""

    def __init__(self, env: dict[str, str]) -> None:
        self.answers: dict[str, Answer] = {}
        self.bodies: list[Any] = []
        self.url = ""
        self._env = env

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.can_read_body:
            self.bodies.append(await request.json())
        return self.answers[request.path](request)

    async def pdctl(self, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
        """Run pdctl as a process while this server serves it."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ops.pdctl", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._env,
        )
        try:
            async with asyncio.timeout(40):
                output, errors = await process.communicate(typed.encode())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        code = process.returncode
        assert code is not None
        return subprocess.CompletedProcess(arguments, code, output.decode(), errors.decode())


def text_chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    """One chunk of a chat stream."""
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish_reason}]}


def stream_of(chunks: Sequence[object]) -> Answer:
    """An answer of server-sent events, ended as OpenAI ends them."""
    events = "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks)
    body = (events + "data: [DONE]\n\n").encode()
    return lambda _request: web.Response(body=body, content_type="text/event-stream")
