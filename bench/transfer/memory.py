"""The memory that is moved: filled with a pattern on one side, looked at on the other."""

from __future__ import annotations

import mmap
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final

Spans = Sequence[tuple[int, int]]

# No power of two, and no multiple of any block or page: bytes in a wrong place do not fit.
PERIOD_NBYTES: Final = (1 << 20) + 61
PIECE_NBYTES: Final = 256
_NUM_PIECES: Final = 64


class Pattern:
    """A byte for every offset; the same in every process that has this object or its seed."""

    def __init__(self, seed: int = 7) -> None:
        tile = random.Random(seed).randbytes(PERIOD_NBYTES)
        self._tile = tile + tile[:PIECE_NBYTES]

    def fill(self, memory: memoryview) -> None:
        """Write the pattern over all of ``memory``, from offset 0."""
        for start in range(0, memory.nbytes, PERIOD_NBYTES):
            memory[start : start + PERIOD_NBYTES] = self._tile[
                : min(PERIOD_NBYTES, memory.nbytes - start)
            ]

    def first_difference(self, memory: memoryview, pieces: Iterable[int]) -> int | None:
        """Offset of the first of these pieces that does not hold the pattern; None if all do."""
        for start in pieces:
            piece = bytes(memory[start : start + PIECE_NBYTES])
            offset = start % PERIOD_NBYTES
            if piece != self._tile[offset : offset + len(piece)]:
                return start
        return None


def sample(spans: Spans) -> list[int]:
    """Where pieces of PIECE_NBYTES begin that are looked at: both ends of each span, and others.

    Not every byte, so that looking costs nothing. Spans have at least PIECE_NBYTES.
    """
    starts = []
    for start, nbytes in spans:
        last = start + nbytes - PIECE_NBYTES
        starts += [start, last]
        starts += [random.randint(start, last) for _ in range(_NUM_PIECES // len(spans))]
    return starts


def spoil(memory: memoryview, pieces: Iterable[int]) -> None:
    """Remove what an earlier transfer left in these pieces."""
    for start in pieces:
        memory[start : start + PIECE_NBYTES] = bytes(PIECE_NBYTES)


class Memory(ABC):
    """A receiver's memory, which holds no pages outside of its contestant's turns.

    Attributes:
        view: its bytes.
    """

    view: memoryview

    def touch(self, spans: Spans) -> None:
        """Bring every page in, and remove what an earlier turn left."""
        for start, nbytes in spans:
            touch(self.view[start : start + nbytes])

    @abstractmethod
    def release(self) -> None:
        """Give the pages back to the kernel."""


class PrivateMemory(Memory):
    """Anonymous memory of one process."""

    def __init__(self, nbytes: int, *, has_huge_pages: bool) -> None:
        self._mapping = allocate(nbytes, has_huge_pages=has_huge_pages)
        self.view = memoryview(self._mapping)

    def release(self) -> None:
        """Forget every page."""
        self._mapping.madvise(mmap.MADV_DONTNEED)


def allocate(nbytes: int, *, has_huge_pages: bool = False) -> mmap.mmap:
    """Private anonymous memory, as an allocator gives out large buffers; no page is there yet."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if has_huge_pages:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def touch(memory: memoryview) -> None:
    """Write zeros over all of ``memory``."""
    zeros = bytes(1 << 20)
    for start in range(0, memory.nbytes, len(zeros)):
        memory[start : start + len(zeros)] = zeros[: memory.nbytes - start]
