"""A server-sent event stream to one client, begun with its first event.

Until then nothing is sent, so that a request that fails early still gets a proper status.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from aiohttp import web

from router_svc.openai_response import DONE_EVENT, sse_event

_END_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.02


class SseStream:
    """Events in the order of `send`; safe to use from several tasks.

    A client that reads slowly suspends `send`; the caller sets the deadline. Every method may
    raise ConnectionError when the client has gone.
    """

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._request = request
        self._headers = headers
        self._lock = asyncio.Lock()
        self._is_stuck = False
        self.response: web.StreamResponse | None = None

    @property
    def is_started(self) -> bool:
        """Whether the status line is out, so that errors can only be events."""
        return self.response is not None

    async def send(self, value: object) -> None:
        """Send one JSON-ready value as an event."""
        await self._write(sse_event(value))

    async def close(self, *last_values: object) -> web.StreamResponse:
        """Send the last events and ``[DONE]``, and end the stream."""
        return await self._end(b"".join(map(sse_event, last_values)) + DONE_EVENT)

    async def fail(self, value: object) -> web.StreamResponse:
        """Send an error event and end the stream without ``[DONE]``: it is not complete."""
        return await self._end(sse_event(value))

    async def _end(self, events: bytes) -> web.StreamResponse:
        """Send the last bytes; a client that does not take them in time is disconnected."""
        if self._is_stuck:
            raise self._cut_off()
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                response = await self._write(events)
                await response.write_eof()
                await self._flushed()
                return response
        except TimeoutError:
            raise self._cut_off() from None

    def _cut_off(self) -> ConnectionResetError:
        """Disconnect the client, dropping what it did not read; return the error to raise."""
        if self._request.transport is not None:
            self._request.transport.abort()
        return ConnectionResetError("the client did not take the end of the stream")

    async def _flushed(self) -> None:
        """Return when the kernel has everything: the HTTP library itself would not wait."""
        transport = self._request.transport
        while transport is not None and transport.get_write_buffer_size() > 0:  # noqa: ASYNC110
            # A transport has no event for "empty"; nearly always it is empty at once.
            await asyncio.sleep(_POLL_S)

    async def _write(self, events: bytes) -> web.StreamResponse:
        async with self._lock:
            response = self.response
            if response is None:
                response = web.StreamResponse(
                    headers={
                        "Content-Type": "text/event-stream; charset=utf-8",
                        "Cache-Control": "no-cache",
                        # Proxies must not collect events.
                        "X-Accel-Buffering": "no",
                        **self._headers,
                    }
                )
                self.response = response
                await response.prepare(self._request)
            try:
                await response.write(events)
            except asyncio.CancelledError:
                # It was waiting for the client to read. aiohttp cannot wait there a second time.
                self._is_stuck = True
                raise
            return response
