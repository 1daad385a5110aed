"""Keeps a set of processes running until it is told to stop, then stops them in order.

Theory of operation: one task per child starts it, watches its ready URL and waits for its end;
an end that nobody asked for is followed by a restart as the policy allows. When the policy says
no, or a child that was never ready refuses its settings (exit code 1 or 2), the whole set is
stopped and the reason is the error. No process outlives the supervisor: each child holds the
reading end of one pipe whose writing end is only here, and stops itself at end of file, which
the kernel delivers after ``kill -9`` too (svckit/process.py says why not otherwise).
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import aiohttp

from ops.child import Child, describe_exit
from ops.cluster import ChildSpec
from ops.restart_policy import RestartPolicy
from svckit.errors import ServiceError

_POLL_S: Final = 0.2
_PROBE_TIMEOUT_S: Final = 2.0
_STILL_WAITING_S: Final = 10.0
_KILL_TIMEOUT_S: Final = 10.0
# ServiceError and a refused command line: starting again gives the same answer.
_REFUSALS: Final = frozenset({1, 2})

Report = Callable[[str], None]


class Supervisor:
    """Runs the children of ``specs`` with their logs in ``run_dir``."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        run_dir: Path,
        report: Report,
        *,
        policy: RestartPolicy,
        ready_timeout_s: float,
        stop_timeout_s: float,
    ) -> None:
        self._report = report
        self._policy = policy
        self._ready_timeout_s = ready_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._parent_fd, self._writing_fd = os.pipe()
        self.children = [
            Child(spec, run_dir / f"{spec.name}.log", self._parent_fd) for spec in specs
        ]

    async def run(self, session: Callable[[], Awaitable[None]]) -> None:
        """Start all, wait until all are ready, run ``session``, stop all; once per supervisor.

        However it ends, by cancellation too, no child runs afterwards. Raises ServiceError:
        a child that refuses to start, is not ready in time or dies too often.
        """
        try:
            timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
            async with aiohttp.ClientSession(timeout=timeout) as http:
                await self._run_session(session, http)
        finally:
            try:
                await self._stop_all()
            finally:
                # Workers complain that the router is gone; it is, because we stopped it first.
                self._show_important(has_warnings=False)
                os.close(self._writing_fd)
                os.close(self._parent_fd)

    async def _run_session(
        self, session: Callable[[], Awaitable[None]], http: aiohttp.ClientSession
    ) -> None:
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(self._follow_logs(), name="follow-logs"),
                *(
                    group.create_task(self._keep(child, http), name=child.name)
                    for child in self.children
                ),
            ]
            await self._wait_ready()
            await session()
            for task in background:
                task.cancel()

    async def _keep(self, child: Child, http: aiohttp.ClientSession) -> None:
        """Start ``child`` and start it again after each end, until cancelled."""
        while True:
            await child.start()
            async with asyncio.TaskGroup() as group:
                probing = group.create_task(self._probe(child, http))
                code = await child.wait()
                probing.cancel()
            child.died(time.monotonic())
            # The reason is in the last lines of its log.
            self._show_important()
            if code in _REFUSALS and not child.was_ready:
                raise ServiceError(f"{child.name} cannot start: {_reason(child, code)}")
            delay_s = self._policy.delay_s(child.died_at, time.monotonic())
            if delay_s is None:
                raise ServiceError(
                    f"{child.name} ended {len(child.died_at)} times, giving up: "
                    f"{_reason(child, code)}"
                )
            self._report(
                f"{child.name} ended ({describe_exit(code)}), starting it again in {delay_s:g} s"
            )
            await asyncio.sleep(delay_s)

    async def _probe(self, child: Child, http: aiohttp.ClientSession) -> None:
        """Mark ``child`` ready once its ready URL answers 200."""
        while True:
            try:
                async with http.get(child.spec.ready_url) as response:
                    if response.status == 200:
                        break
            except (aiohttp.ClientError, TimeoutError):
                pass  # not listening yet
            await asyncio.sleep(_POLL_S)
        child.mark_ready()
        self._report(f"{child.name} ready after {time.monotonic() - child.started_at:.1f} s")

    async def _wait_ready(self) -> None:
        started_at = time.monotonic()
        while waiting := [child for child in self.children if not child.is_ready.is_set()]:
            waited_s = time.monotonic() - started_at
            if waited_s >= self._ready_timeout_s:
                raise ServiceError(
                    f"{waiting[0].name} was not ready within {self._ready_timeout_s:g} s; "
                    f"its log is {waiting[0].log_path}."
                )
            step_s = min(_STILL_WAITING_S, self._ready_timeout_s - waited_s)
            try:
                async with asyncio.timeout(step_s):
                    await waiting[0].is_ready.wait()
            except TimeoutError:
                names = ", ".join(child.name for child in waiting)
                self._report(f"still waiting for {names}")

    async def _follow_logs(self) -> None:
        while True:
            self._show_important()
            await asyncio.sleep(_POLL_S)

    def _show_important(self, *, has_warnings: bool = True) -> None:
        for child in self.children:
            for line in child.tail.poll():
                if has_warnings or not line.startswith("warning:"):
                    self._report(f"{child.name}: {line}")

    async def _stop_all(self) -> None:
        """SIGTERM in the order of the ranks, SIGKILL for what outlasts its deadline."""
        try:
            for rank in sorted({child.spec.stop_rank for child in self.children}):
                running = [
                    child
                    for child in self.children
                    if child.spec.stop_rank == rank and child.is_running
                ]
                await self._stop(running)
        except asyncio.CancelledError:
            # A second signal: the person does not want to wait for the drain.
            await self._kill([child for child in self.children if child.is_running])
            raise

    async def _stop(self, running: Sequence[Child]) -> None:
        for child in running:
            child.send(signal.SIGTERM)
        if late := await _still_running(running, self._stop_timeout_s):
            names = ", ".join(child.name for child in late)
            self._report(f"{names} did not stop within {self._stop_timeout_s:g} s, killing")
            await self._kill(late)

    async def _kill(self, running: Sequence[Child]) -> None:
        for child in running:
            child.send(signal.SIGKILL)
        await _still_running(running, _KILL_TIMEOUT_S)


async def _still_running(children: Sequence[Child], timeout_s: float) -> list[Child]:
    """Wait for the end of ``children`` and return those that are there after ``timeout_s``."""
    if not children:
        return []
    ends = {asyncio.ensure_future(child.wait()): child for child in children}
    try:
        _, pending = await asyncio.wait(ends, timeout=timeout_s)
        return [ends[end] for end in pending]
    finally:
        for end in ends:
            end.cancel()


def _reason(child: Child, code: int) -> str:
    """The child's own last word if it had one, else how it ended and where its log is."""
    said = child.tail.last_line
    return said if said else f"it ended with {describe_exit(code)}; its log is {child.log_path}."
