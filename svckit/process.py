"""What a process sets for itself before it loads anything large: its CPUs, its parent watch."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from svckit.errors import ServiceError


def pin_cpus(cpus: Sequence[int]) -> int:
    """Restrict this process to ``cpus`` (empty: leave it as it is) and return how many remain.

    Threads inherit the set of the thread that starts them, so this belongs before torch is
    imported; threads that some library has started already are moved as well. Raises
    ServiceError if no CPU of the list may be used.
    """
    if cpus:
        allowed = os.sched_getaffinity(0)
        missing = sorted(set(cpus) - allowed)
        if missing:
            raise ServiceError(
                f"cpus names CPU {missing[0]}, which this process may not use "
                f"(allowed: {','.join(map(str, sorted(allowed)))})."
            )
        for task in Path("/proc/self/task").iterdir():
            try:
                os.sched_setaffinity(int(task.name), cpus)
            except ProcessLookupError:
                continue  # the thread ended meanwhile
    return len(os.sched_getaffinity(0))


def watch_parent(parent_fd: int, *, grace_s: float) -> None:
    """Stop this process when the other end of the pipe ``parent_fd`` is closed.

    The supervisor holds the writing end and never writes. However it ends, by ``kill -9`` too,
    the kernel closes that end, and the read below returns. A pipe and not PR_SET_PDEATHSIG: that
    signal follows the *thread* that forked, is lost on a change of credentials, and has a race
    before it is set. A thread and not a task: it also works while the event loop is not running
    yet or is stuck. First SIGTERM, so that the ordinary drain runs; after ``grace_s`` SIGKILL.
    """
    threading.Thread(
        target=_await_end_of_parent, args=(parent_fd, grace_s), name="parent-watch", daemon=True
    ).start()


def _await_end_of_parent(parent_fd: int, grace_s: float) -> None:
    try:
        while os.read(parent_fd, 64):
            pass  # nothing is ever written; if something is, it means nothing
    except OSError:
        return  # not an open descriptor: there is no supervisor to watch
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)
