"""The bound on requests in flight, and the way to wait until none is left."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from router_svc.errors import OverloadedError


class Admission:
    """At most `max_requests` at once; one too many is refused, not queued."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_in_flight(self) -> int:
        """Requests admitted and not yet answered."""
        return self._num_in_flight

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one place. Raises OverloadedError if all are taken."""
        if self._num_in_flight >= self._max_requests:
            raise OverloadedError(
                f"{self._num_in_flight} requests are in flight, the most this router takes "
                "(max_requests). Try again shortly."
            )
        self._num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Return when no request is in flight; the caller sets the deadline."""
        await self._idle.wait()
