"""The life of a service process: STARTING, SERVING, DRAINING, STOPPED.

Theory of operation: the first SIGTERM or SIGINT asks for a drain. A service that is still
starting has nothing to drain and is cancelled at once; a serving one sees ``wait_draining``
return, fails readiness, refuses new work, finishes the old and returns. The second signal
cancels what is left, the third ends the process on the spot. ``run_service`` turns the outcome
into an exit code:

    0        started work was finished, or there was none
    1        ServiceError: one sentence on stderr, no trace
    3        the drain deadline passed and work was cancelled
    70       a defect of ours: trace in the log (EX_SOFTWARE of sysexits.h)
    128 + n  a second signal n cancelled the drain
"""

import asyncio
import enum
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import structlog
import uvloop

from svckit.errors import DrainDeadlineError, InvalidTransition, ServiceError

EXIT_OK: Final = 0
EXIT_SERVICE_ERROR: Final = 1
EXIT_DRAIN_DEADLINE: Final = 3
EXIT_DEFECT: Final = 70
_STORY_LENGTH: Final = 16
# The service keeps to drain_timeout_s itself; this much later run_service ends it anyway.
_DRAIN_BACKSTOP_S: Final = 5.0
# Cancelled work only cleans up; work that swallows its cancellation is left behind.
_CANCEL_TIMEOUT_S: Final = 10.0


class State(enum.Enum):
    """Where a service is; draining is live but not ready."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


class Step(enum.Enum):
    """What moves a service from one state to the next."""

    READY = "ready"
    DRAIN = "drain"
    STOP = "stop"


TRANSITIONS: Final[dict[tuple[State, Step], State]] = {
    (State.STARTING, Step.READY): State.SERVING,
    (State.STARTING, Step.DRAIN): State.DRAINING,
    (State.STARTING, Step.STOP): State.STOPPED,
    (State.SERVING, Step.DRAIN): State.DRAINING,
    (State.SERVING, Step.STOP): State.STOPPED,
    # A drain asked for during the start wins over the end of the start.
    (State.DRAINING, Step.READY): State.DRAINING,
    (State.DRAINING, Step.DRAIN): State.DRAINING,
    (State.DRAINING, Step.STOP): State.STOPPED,
}


class Lifecycle:
    """The state of one service and who wants to know of its changes. Not thread safe."""

    def __init__(self) -> None:
        self._state = State.STARTING
        self._story: deque[str] = deque(maxlen=_STORY_LENGTH)
        self._draining = asyncio.Event()
        self._callbacks: list[Callable[[State, State], None]] = []

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    @property
    def is_ready(self) -> bool:
        """True while new work is accepted."""
        return self._state is State.SERVING

    def advance(self, step: Step) -> State:
        """Take one step of the table and return the new state.

        Raises InvalidTransition, which is our own bug. Callbacks run only if the state changes.
        """
        old = self._state
        new = TRANSITIONS.get((old, step))
        if new is None:
            raise InvalidTransition(old.value, step.value, tuple(self._story))
        self._story.append(f"{step.value}: {old.value} -> {new.value}")
        self._state = new
        if new in (State.DRAINING, State.STOPPED):
            self._draining.set()
        if new is not old:
            for callback in self._callbacks:
                callback(old, new)
        return new

    def on_change(self, callback: Callable[[State, State], None]) -> None:
        """Call ``callback(old, new)`` after each change; it must not block or raise."""
        self._callbacks.append(callback)

    async def wait_draining(self) -> None:
        """Return once a drain was asked for; the one wait whose deadline is the process's end."""
        await self._draining.wait()


class _Run:
    """One call of ``run_service``: the task, the signals it saw, and what came of them."""

    def __init__(self, main: Callable[[Lifecycle], Awaitable[None]], drain_timeout_s: float):
        self._main = main
        self._drain_timeout_s = drain_timeout_s
        self._log = structlog.get_logger("svckit.lifecycle")
        self._task: asyncio.Task[None] | None = None
        self._num_signals = 0
        self._exit_code = EXIT_OK

    async def run(self) -> int:
        lifecycle = Lifecycle()
        lifecycle.on_change(self._log_change)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, lifecycle, number)
        try:
            self._task = asyncio.ensure_future(self._call(lifecycle))
            await self._finish(self._task, lifecycle)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            if lifecycle.state is not State.STOPPED:
                lifecycle.advance(Step.STOP)
        return self._exit_code

    async def _call(self, lifecycle: Lifecycle) -> None:
        await self._main(lifecycle)

    async def _finish(self, task: asyncio.Task[None], lifecycle: Lifecycle) -> None:
        """Wait for the service; after a drain was asked for, no longer than its deadline."""
        drained = asyncio.ensure_future(lifecycle.wait_draining())
        try:
            await asyncio.wait((task, drained), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait((task,), timeout=self._drain_timeout_s + _DRAIN_BACKSTOP_S)
            if not task.done():
                self._log.warning("drain deadline passed", drain_timeout_s=self._drain_timeout_s)
                self._exit_code = EXIT_DRAIN_DEADLINE
                task.cancel()
                await asyncio.wait((task,), timeout=_CANCEL_TIMEOUT_S)
            if not task.done():
                self._log.critical("cancelled work does not end, leaving it")
                os._exit(self._exit_code)
        finally:
            drained.cancel()
        if not task.cancelled():
            task.result()

    def _on_signal(self, lifecycle: Lifecycle, number: signal.Signals) -> None:
        self._num_signals += 1
        was = lifecycle.state
        self._log.info("signal received", signal=number.name, state=was.value)
        if self._num_signals == 1:
            lifecycle.advance(Step.DRAIN)
            if was is State.STARTING and self._task is not None:
                self._task.cancel()
        elif self._num_signals == 2 and self._task is not None:
            self._exit_code = 128 + number
            self._task.cancel()
        else:
            os._exit(128 + number)

    def _log_change(self, old: State, new: State) -> None:
        self._log.info("state changed", old=old.value, new=new.value)


def run_service(
    main: Callable[[Lifecycle], Awaitable[None]], *, drain_timeout_s: float = 30.0
) -> int:
    """Run ``main`` on uvloop until it returns and give the exit code of the module's table.

    ``main`` calls ``advance(Step.READY)`` when it serves, waits for ``wait_draining`` and returns
    when its work is finished, within ``drain_timeout_s``; a little later it is cancelled.
    """
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Run(main, drain_timeout_s).run())
    except BaseException as exc:  # the last frame: nothing above can handle it
        leaves = list(_leaves(exc))
        if all(isinstance(leaf, ServiceError) for leaf in leaves):
            print(leaves[0], file=sys.stderr, flush=True)  # noqa: T201 - the one sentence
            is_late = isinstance(leaves[0], DrainDeadlineError)
            return EXIT_DRAIN_DEADLINE if is_late else EXIT_SERVICE_ERROR
        structlog.get_logger("svckit.lifecycle").critical("defect", exc_info=exc)
        return EXIT_DEFECT


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    """The exceptions inside nested groups: a TaskGroup wraps even a single ServiceError."""
    if isinstance(exc, BaseExceptionGroup):
        for member in exc.exceptions:
            yield from _leaves(member)
    else:
        yield exc
