"""Small JSON messages between two processes of the benchmark, outside what is timed."""

from __future__ import annotations

import json
import socket
from typing import Any


class Channel:
    """One end of a socket pair; one message a line."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lines = end.makefile("rb")

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends, to be shared by ``fork``."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def send(self, **message: Any) -> None:
        """Raises OSError if the other process is gone."""
        self._end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Wait for a message; EOFError if the other process has ended."""
        line = self._lines.readline()
        if not line:
            raise EOFError("the other process has ended")
        message: dict[str, Any] = json.loads(line)
        return message

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send, then wait for the answer."""
        self.send(**message)
        return self.receive()

    def set_timeout(self, timeout_s: float | None) -> None:
        """Bound every later wait; TimeoutError then."""
        self._end.settimeout(timeout_s)

    def close(self) -> None:
        """The other end reads EOF once every process has closed this one."""
        self._lines.close()
        self._end.close()
