"""Where received bytes go: straight into large targets, through a bounded inbox into small ones.

The protocol always knows what it expects next, as a series of *targets* (writable memory). A
target with much left is handed to the socket itself, so a tensor is received without a copy. For
anything small one read of the inbox serves many targets, and so many frames: the copy costs less
than a system call per target. The inbox is empty whenever it is offered, because all it holds is
distributed at once.
"""

from collections.abc import Iterable, Iterator
from typing import Final

INBOX_NBYTES: Final = 64 * 1024
# Below this a copy is cheaper than a system call and two Python callbacks of its own.
DIRECT_MIN_NBYTES: Final = 32 * 1024


class Intake:
    """Fills targets in order. ``received`` then ``take`` until it returns None."""

    def __init__(self) -> None:
        self._inbox = memoryview(bytearray(INBOX_NBYTES))
        self._unread = self._inbox[:0]
        self._targets: Iterator[memoryview] = iter(())
        self._target = self._inbox[:0]
        self._is_direct = False

    @property
    def missing_nbytes(self) -> int:
        """Bytes that the present target still lacks; 0 once every target is full."""
        return self._target.nbytes

    def expect(self, targets: Iterable[memoryview]) -> None:
        """Fill these next. The present targets are complete or given up."""
        self._targets = iter(targets)
        self._next_target()

    def next_buffer(self) -> memoryview:
        """Where the next bytes belong; never empty, valid until ``received``."""
        self._is_direct = self._target.nbytes >= DIRECT_MIN_NBYTES
        return self._target if self._is_direct else self._inbox

    def received(self, nbytes: int) -> None:
        """The first ``nbytes`` of what ``next_buffer`` returned now hold received bytes."""
        self._unread = (self._target if self._is_direct else self._inbox)[:nbytes]

    def take_middle(self, nbytes: int) -> memoryview | None:
        """``received`` and ``take`` in one step, for bytes that leave the target incomplete.

        None, and nothing was done, unless the socket itself wrote into the target.
        """
        if not self._is_direct or nbytes >= self._target.nbytes:
            return None
        self._is_direct = False
        piece, self._target = self._target[:nbytes], self._target[nbytes:]
        return piece

    def take(self) -> memoryview | None:
        """Put unread bytes into the present target; the piece of it they fill, or None.

        None: nothing is unread, or every target is full (then ``expect`` is due).
        """
        nbytes = min(self._unread.nbytes, self._target.nbytes)
        if not nbytes:
            return None
        piece = self._target[:nbytes]
        if self._is_direct:
            self._is_direct = False
        else:
            piece[:] = self._unread[:nbytes]
        self._unread = self._unread[nbytes:]
        self._target = self._target[nbytes:]
        if not self._target.nbytes:
            self._next_target()
        return piece

    def _next_target(self) -> None:
        for target in self._targets:
            if target.nbytes:
                self._target = target
                return
        self._target = self._inbox[:0]
