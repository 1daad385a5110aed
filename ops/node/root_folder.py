"""The tree that is changed: this machine's "/", or another one that lies in a folder of it."""

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ops.node.errors import NodeError

MAX_LINKS: Final = 40
_COMMAND_TIMEOUT_S: Final = 300.0


class RootFolder:
    """Paths of a machine as paths of this process.

    Links are followed as that machine would follow them: one to "/etc/x" leads to the root's own
    /etc/x and never out of it, so a throw-away root cannot change the machine around it.
    """

    def __init__(self, path: Path = Path("/")) -> None:
        self._path = path.resolve()
        self._lock: int | None = None

    @property
    def path(self) -> Path:
        """The folder itself."""
        return self._path

    @property
    def is_this_machine(self) -> bool:
        """True for "/"."""
        return self._path == Path("/")

    def place(self, path: str) -> Path:
        """Where ``path`` lies, its last part followed too if it is a link.

        NodeError if the links go round in circles.
        """
        done: list[str] = []
        left = _parts(path)
        num_links = 0
        while left:
            part = left.pop(0)
            if part == "..":
                del done[-1:]
                continue
            here = self._path.joinpath(*done, part)
            try:
                target = os.readlink(here)
            except OSError:
                done.append(part)
                continue
            num_links += 1
            if num_links > MAX_LINKS:
                raise NodeError(f"{path} in {self._path}: its links go round in circles")
            if target.startswith("/"):
                done = []
            left = [*_parts(target), *left]
        return self._path.joinpath(*done)

    def shown(self, place: Path) -> str:
        """The path on the machine itself of a place below the root."""
        return "/" + str(place.relative_to(self._path)) if place != self._path else "/"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else changes this root through us meanwhile; NodeError if somebody does.

        The folder itself carries the lock, so that nothing is left behind. A command that ``run``
        started keeps it as well: if we are killed, nobody rolls back under its hands.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as exc:
            raise NodeError(f"{self._path} cannot be opened: {exc}") from exc
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                raise NodeError(
                    f"another apply or rollback is at work in {self._path}; wait for its end"
                ) from exc
            self._lock = descriptor
            yield
        finally:
            self._lock = None
            os.close(descriptor)

    def run(self, command: tuple[str, ...]) -> None:
        """Run a command that changes something, in this root.

        NodeError: it is not installed there, ended with an error, or took too long.
        """
        inside = command if self.is_this_machine else ("chroot", str(self._path), *command)
        line = " ".join(inside)
        try:
            ended = subprocess.run(
                inside,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_COMMAND_TIMEOUT_S,
                env={"PATH": "/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"},
                pass_fds=() if self._lock is None else (self._lock,),
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            raise NodeError(f"`{line}` did not end within {_COMMAND_TIMEOUT_S:g} s") from exc
        except OSError as exc:
            raise NodeError(f"`{line}` cannot be run: {exc}") from exc
        if ended.returncode != 0:
            said = ended.stdout.decode("utf-8", errors="replace").strip()
            raise NodeError(f"`{line}` ended with {ended.returncode}: {said or 'no output'}")


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]
