"""One process that the supervisor starts, watches and stops."""

import asyncio
import os
import signal
import time
from pathlib import Path

from ops.cluster import ChildSpec
from ops.log_tail import LogTail
from svckit.errors import ServiceError


class Child:
    """A process made from a spec, with its log file; it can be started again after its end.

    ``is_ready`` is set while its ready URL answers 200. ``died_at`` are the monotonic instants
    of its unplanned ends.
    """

    def __init__(self, spec: ChildSpec, log_path: Path, parent_fd: int) -> None:
        self.spec = spec
        self.tail = LogTail(log_path)
        self.is_ready = asyncio.Event()
        self.was_ready = False
        self.died_at: list[float] = []
        self.started_at = 0.0
        self._log_path = log_path
        self._parent_fd = parent_fd
        self._process: asyncio.subprocess.Process | None = None

    @property
    def name(self) -> str:
        """As in the spec."""
        return self.spec.name

    @property
    def log_path(self) -> Path:
        """Where its stdout and stderr go; appended to by each start."""
        return self._log_path

    @property
    def pid(self) -> int | None:
        """The process id of the present or last process."""
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        """True between a start and the end of that process."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process; ServiceError if the program itself cannot be executed."""
        self.started_at = time.monotonic()
        with self._log_path.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(*self.spec.command, "--parent-fd", str(self._parent_fd)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self.spec.env},
                    pass_fds=(self._parent_fd,),
                    # Ctrl-C on the terminal reaches the whole foreground group. In a session of
                    # its own the child sees only our SIGTERM, in our order; two signals at once
                    # would mean "cancel" to it.
                    start_new_session=True,
                )
            except OSError as exc:
                raise ServiceError(
                    f"{self.name} cannot be started: {self.spec.command[0]}: {exc.strerror}."
                ) from exc

    async def wait(self) -> int:
        """The exit code of the started process, negative for a signal."""
        assert self._process is not None, "wait before start"
        return await self._process.wait()

    def died(self, now: float) -> None:
        """Record an end that nobody asked for."""
        self.is_ready.clear()
        self.died_at.append(now)

    def mark_ready(self) -> None:
        """Record that the ready URL answered 200."""
        self.was_ready = True
        self.is_ready.set()

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the process still runs."""
        if self._process is not None and self._process.returncode is None:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                return  # it ended, and its end has not been noticed yet


def describe_exit(code: int) -> str:
    """An exit code in words: "exit code 3" or "SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
