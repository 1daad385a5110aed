"""A small client of the router's HTTP port: the health page, the model's name, a chat stream."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from svckit.errors import ServiceError

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_SHORT_TIMEOUT_S: Final = 10.0
# Between two events of a stream: a long prompt on a slow host comes before the first one.
_SILENCE_TIMEOUT_S: Final = 300.0
# One event holds one delta, or the timings: far below this.
_MAX_LINE_NBYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class StreamPart:
    """A piece of an answer: text, or the closing facts, or why it ended."""

    text: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    timings: Mapping[str, Any] | None = None


class ApiClient:
    """Talks to ``url``; use it as an async context manager. All failures are ServiceErrors."""

    def __init__(self, url: str, api_key: bytes | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ServiceError(f"The address {url!r} must start with http:// or https://.")
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key.decode('utf-8')}"} if api_key else {}
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "ApiClient":
        self._http = aiohttp.ClientSession(read_bufsize=_MAX_LINE_NBYTES, headers=self._headers)
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def health(self) -> dict[str, Any]:
        """The router's /healthz."""
        return await self._get_json("/healthz")

    async def model_name(self) -> str:
        """The first model that is served."""
        listing = await self._get_json("/v1/models")
        try:
            return str(listing["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ServiceError(f"{self.url}/v1/models names no model.") from None

    async def stream_chat(
        self, model: str, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]
    ) -> AsyncIterator[StreamPart]:
        """Yield the answer to ``messages`` as it arrives; the last parts hold the facts.

        ``options`` are further fields of the request, such as max_tokens.
        """
        body = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True, "include_timings": True},
            **options,
        }
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_SHORT_TIMEOUT_S, sock_read=_SILENCE_TIMEOUT_S
        )
        is_finished = False
        try:
            async with self._session.post(
                f"{self.url}/v1/chat/completions", json=body, timeout=timeout
            ) as response:
                await self._refuse_failure(response)
                async for line in response.content:
                    part = parse_event(line)
                    if part is None:
                        continue
                    is_finished = is_finished or part.finish_reason is not None
                    yield part
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            raise self._failure(exc) from exc
        if not is_finished:
            raise ServiceError("The answer ended before it was finished; ask again.")

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._http is not None, "used outside its context"
        return self._http

    async def _get_json(self, path: str) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=_SHORT_TIMEOUT_S)
        try:
            async with self._session.get(self.url + path, timeout=timeout) as response:
                await self._refuse_failure(response)
                value = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            raise self._failure(exc) from exc
        if not isinstance(value, dict):
            raise ServiceError(f"{self.url}{path} did not answer with a JSON object.")
        return value

    async def _refuse_failure(self, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            message = error_message(await response.text(errors="replace"))
            raise ServiceError(f"{self.url} answered {response.status}: {message}")

    def _failure(self, exc: Exception) -> ServiceError:
        if isinstance(exc, aiohttp.ClientConnectorError):
            return ServiceError(
                f"Nothing is listening at {self.url}; start the system with pdctl up "
                "or name another address with --url."
            )
        if isinstance(exc, TimeoutError):
            return ServiceError(f"{self.url} did not answer in time; see pdctl status.")
        return ServiceError(f"The connection to {self.url} failed: {exc}.")


def parse_event(line: bytes) -> StreamPart | None:
    """One line of a server-sent event stream; None for separators, comments and the end mark.

    Raises ServiceError for an error event and ValueError for what is not JSON.
    """
    text = line.decode("utf-8").strip()
    if not text.startswith("data:"):
        return None
    data = text.removeprefix("data:").strip()
    if data == "[DONE]":
        return None
    chunk: Any = json.loads(data)
    if "error" in chunk:
        raise ServiceError(f"The answer failed: {error_message(data)}")
    choice = chunk["choices"][0] if chunk.get("choices") else {}
    return StreamPart(
        text=choice.get("delta", {}).get("content") or "",
        finish_reason=choice.get("finish_reason"),
        usage=chunk.get("usage"),
        timings=chunk.get("timings"),
    )


def error_message(text: str) -> str:
    """The message inside an OpenAI error body, or the text itself, shortened."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()[:200] or "no explanation."
