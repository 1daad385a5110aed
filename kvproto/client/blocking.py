"""The raw clients for programs without an event loop.

    with BlockingPrefillClient("127.0.0.1", 9100) as client:
        cache = client.prefill(tokens)

Each client has a private thread with a loop of its own, which ends with the client. The options
and errors are those of the client behind it. One thread at a time may use a client; an interrupt
(Ctrl-C) during a call cancels it, and the transfer is aborted before the call ends.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from kvproto.client.decode_client import DecodeClient, Generation
from kvproto.client.kv_sender import Progress
from kvproto.client.prefill_client import LandedRows, PrefillClient
from kvproto.errors import LocalProtocolError
from kvproto.kv_cache import KvCache
from kvproto.messages import Description

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own, from construction until ``close``."""

    def __init__(self, name: str) -> None:
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._loop, self._is_closing = self._started.result()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the loop and wait for it; interrupted, cancel it and wait for that.

        Raises what ``work`` raises, and LocalProtocolError after ``close``.
        """
        task: Future[T] = Future()

        async def run() -> None:
            try:
                task.set_result(await work)
            except BaseException as exc:
                task.set_exception(exc)

        if not self._thread.is_alive():
            work.close()
            raise LocalProtocolError("the client is closed")
        running = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return task.result()
        except KeyboardInterrupt:
            running.cancel()
            task.exception()
            raise

    def close(self) -> None:
        """End the loop and the thread. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._is_closing.set)
            self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        is_closing = asyncio.Event()
        self._started.set_result((asyncio.get_running_loop(), is_closing))
        await is_closing.wait()


class _Blocking:
    """What both clients share: the thread, and the context."""

    def __init__(self, make: Callable[[], PrefillClient | DecodeClient], name: str) -> None:
        self._thread = LoopThread(name)
        self._client = make()

    def __enter__(self) -> Self:
        try:
            self._thread.call(self._client.__aenter__())
        except BaseException:
            self._thread.close()
            raise
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        try:
            self._thread.call(self._client.__aexit__(None, None, None))
        finally:
            self._thread.close()

    @property
    def carrier(self) -> str:
        """How KV travels: "tcp" or "rdma"."""
        return self._client.carrier

    def describe(self) -> Description:
        """The worker's model and layout."""
        return self._thread.call(self._client.describe())


class BlockingPrefillClient(_Blocking):
    """``PrefillClient`` without an event loop; the same arguments. Use it in ``with``."""

    _client: PrefillClient

    def __init__(self, host: str, port: int, **options: Any) -> None:
        super().__init__(lambda: PrefillClient(host, port, **options), "kvproto-prefill-client")

    def prefill(
        self,
        prompt: Sequence[int] | str,
        *,
        next_tokens: Sequence[int] = (),
        on_progress: Progress | None = None,
    ) -> KvCache:
        """See ``PrefillClient.prefill``. ``on_progress`` is called in the private thread."""
        return self._thread.call(
            self._client.prefill(prompt, next_tokens=next_tokens, on_progress=on_progress)
        )

    def prefill_to_file(
        self,
        path: Path | str,
        prompt: Sequence[int] | str,
        *,
        next_tokens: Sequence[int] = (),
        on_progress: Progress | None = None,
    ) -> None:
        """See ``PrefillClient.prefill_to_file``."""
        self._thread.call(
            self._client.prefill_to_file(
                path, prompt, next_tokens=next_tokens, on_progress=on_progress
            )
        )

    def stream(self, prompt: Sequence[int] | str) -> Iterator[LandedRows]:
        """See ``PrefillClient.stream``."""
        rows = self._client.stream(prompt)
        try:
            while (landed := self._thread.call(_next(rows))) is not None:
                yield landed
        finally:
            self._thread.call(rows.aclose())


class BlockingGeneration:
    """``Generation`` without an event loop: an iterator of tokens, and how it ended."""

    def __init__(self, thread: LoopThread, generation: Generation) -> None:
        self._thread = thread
        self._generation = generation

    @property
    def finish_reason(self) -> str:
        """See ``Generation.finish_reason``."""
        return self._generation.finish_reason

    @property
    def timings(self) -> Mapping[str, float | int | str]:
        """See ``Generation.timings``."""
        return self._generation.timings

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        token = self._thread.call(_next(self._generation))
        if token is None:
            raise StopIteration
        return token

    def close(self) -> None:
        """See ``Generation.aclose``."""
        self._thread.call(self._generation.aclose())


class BlockingDecodeClient(_Blocking):
    """``DecodeClient`` without an event loop; the same arguments. Use it in ``with``."""

    _client: DecodeClient

    def __init__(self, host: str, port: int, **options: Any) -> None:
        super().__init__(lambda: DecodeClient(host, port, **options), "kvproto-decode-client")

    def generate(
        self, kv: KvCache | None, tokens: Sequence[int] | None = None, **options: Any
    ) -> BlockingGeneration:
        """See ``DecodeClient.generate``; the same arguments."""
        return BlockingGeneration(self._thread, self._client.generate(kv, tokens, **options))


async def _next(iterator: AsyncIterator[T]) -> T | None:
    """The next item, None at the end."""
    return await anext(iterator, None)
