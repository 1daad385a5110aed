"""Kills apply, or rollback, before each thing it does to the disk, and rolls back in a new process.

    python -m tests.ops.node.kill_everywhere apply|rollback ROOT

Prints how many places there were; exit code 1, with what differs, if a tree is not as it was. Run
as a program of its own, so that it can fork: only a fork is quick enough for hundreds of kills.
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ops.node.apply import apply_plan
from ops.node.change import CommandChange, FileChange, ValueChange
from ops.node.plan import Plan
from ops.node.rollback import roll_back
from ops.node.root_folder import RootFolder
from tests.ops.node.fact_trees import tree_digest

# Events of the interpreter that change names, modes and owners; "open" only for writing.
EVENTS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.chown", "os.truncate")
PLAN = Plan(
    (
        FileChange("/etc/systemd/system.conf.d/new.conf", "new\n", "a new file in a new folder"),
        FileChange("/etc/default/locale", "LANG=C.UTF-8\n", "a file that is there"),
        ValueChange("/proc/sys/net/core/rmem_max", "268435456", "a value"),
        CommandChange(("make", "both"), ("/usr/lib/made", "/etc/locale.gen"), "a command"),
        ValueChange("/sys/kernel/mm/choice", "never", "a value among others"),
        # Once more: what the first step left is what this one saves.
        FileChange("/etc/default/locale", "LANG=en_US.UTF-8\n", "the same file again"),
    )
)


class Root(RootFolder):
    """A root whose command is played."""

    def run(self, command: tuple[str, ...]) -> None:
        for path in ("/usr/lib/made", "/etc/locale.gen"):
            self.place(path).write_text(" ".join(command), encoding="utf-8")


class Killer:
    """Ends this process when its turn has come."""

    def __init__(self, turn: int) -> None:
        self._left = turn
        # A kill loses nothing that was written, so the disk need not be waited for.
        os.fsync = lambda _: self._next()
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            self._next()

    def _next(self) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


def in_child(work: Callable[[], object]) -> int:
    """The wait status of a fork that does ``work``."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as exc:
            sys.stderr.write(f"{exc!r}\n")
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def applied(folder: Path, turn: int = -1) -> None:
    Killer(turn)
    apply_plan(Root(folder), PLAN, lambda _: None)


def rolled_back(folder: Path, turn: int = -1) -> None:
    Killer(turn)
    roll_back(Root(folder), lambda _: None)


def main(what: str, folder: Path) -> str | None:
    before = tree_digest(folder)
    turn = 0
    while True:
        if what == "rollback" and in_child(lambda: applied(folder)) != 0:
            return "apply failed"
        killed = applied if what == "apply" else rolled_back
        status = in_child(partial(killed, folder, turn))
        is_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not is_killed and status != 0:
            return f"{what} failed at {turn}"
        # Twice: the second has nothing left to do, and does nothing.
        if in_child(lambda: rolled_back(folder)) or in_child(lambda: rolled_back(folder)):
            return f"rollback failed after a kill at {turn}"
        after = tree_digest(folder)
        if after != before:
            return f"killed at {turn}: {set(before.items()) ^ set(after.items())}"
        if not is_killed:
            sys.stdout.write(f"{turn}\n")
            return None
        turn += 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
