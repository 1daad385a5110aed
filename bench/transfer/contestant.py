"""What a contestant is: one class, of which one half lives in each of two processes."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import ClassVar

from bench.transfer.channel import Channel
from bench.transfer.memory import Memory, PrivateMemory


class Medium(Enum):
    """What carries the bytes; decides which bars and floors apply."""

    LIMIT = "limit"
    TCP = "tcp"
    MAPPED = "mapped"
    TEXT = "object"


class Unavailable(Exception):
    """This contestant cannot run here; the message says why and what to install, in one line."""


class Contestant(ABC):
    """Moves the first ``nbytes`` of the sender's memory into the receiver's, any number of times.

    The receiver's process calls ``check`` and ``serve``; the sender's calls ``check``,
    ``connect``, then for each transfer ``prepare`` and ``transfer``, and ``disconnect`` at last.
    These four run in an event loop (uvloop, as our services do) and may block it, as the peers'
    own libraries do. Only ``transfer`` is timed. It returns when the receiver has all bytes in
    its memory, in the strongest sense this contestant knows. Byte N of the sender's memory goes
    to byte N of the receiver's.

    Attributes:
        name: of the row.
        medium: see ``Medium``.
        is_ours: kvproto, not somebody it is compared with.
        has_checksum: the receiver has verified the bytes when a transfer is complete.
        has_receiver: False: everything happens in the sender's process.
        min_nbytes, max_nbytes: smallest and largest transfer it can make, or is worth waiting for.
    """

    name: ClassVar[str]
    medium: ClassVar[Medium]
    is_ours: ClassVar[bool] = False
    has_checksum: ClassVar[bool] = False
    has_receiver: ClassVar[bool] = True
    min_nbytes: ClassVar[int] = 1
    max_nbytes: ClassVar[int] = sys.maxsize

    def check(self) -> None:  # noqa: B027 - most contestants need nothing
        """Raise Unavailable if it cannot run here."""

    def spans(self, memory_nbytes: int, nbytes: int) -> Sequence[tuple[int, int]]:
        """(offset, size) of what a transfer of ``nbytes`` moves in memories of that size."""
        return [(0, nbytes)]

    def memory(self, nbytes: int, *, has_huge_pages: bool) -> Memory:
        """The receiver's memory."""
        return PrivateMemory(nbytes, has_huge_pages=has_huge_pages)

    def serve(self, memory: memoryview, side: Channel) -> None:
        """Receive into ``memory`` until ``side`` ends; runs in the receiver's main thread.

        ``side`` reaches the other half; for ports and addresses, never for the bytes.
        """
        raise NotImplementedError(f"{self.name} has no receiver")

    @abstractmethod
    async def connect(self, memory: memoryview, side: Channel) -> None:
        """Get ready to send from ``memory``, which nobody writes."""

    async def prepare(self, nbytes: int) -> None:  # noqa: B027 - most contestants need nothing
        """What precedes a transfer in a real system too: a grant of memory, its registration."""

    @abstractmethod
    async def transfer(self, nbytes: int) -> None:
        """Move the bytes; timed."""

    async def disconnect(self) -> None:  # noqa: B027 - most contestants need nothing
        """Release what ``connect`` took."""
