"""What no transfer can beat here: one copy, one pass of the checksum."""

from __future__ import annotations

from typing import ClassVar

from xxhash import xxh3_64_intdigest

from bench.transfer.channel import Channel
from bench.transfer.contestant import Contestant, Medium
from bench.transfer.memory import allocate, touch


class Memcpy(Contestant):
    """The C library's memcpy, from one buffer to another in one thread."""

    name: ClassVar[str] = "memcpy"
    medium = Medium.LIMIT
    has_receiver = False

    async def connect(self, memory: memoryview, side: Channel) -> None:
        """Memory of its own to copy to, brought in for each size."""
        self._source = memory
        self._touched_nbytes = 0
        self._target = memoryview(allocate(memory.nbytes))

    async def prepare(self, nbytes: int) -> None:
        """Every page is there before the copy."""
        if nbytes > self._touched_nbytes:
            touch(self._target[:nbytes])
            self._touched_nbytes = nbytes

    async def transfer(self, nbytes: int) -> None:
        """One memcpy."""
        self._target[:nbytes] = self._source[:nbytes]


class Checksum(Contestant):
    """xxh3-64 over the bytes, moving nothing: what a checksum costs each side."""

    name: ClassVar[str] = "xxh3-64"
    medium = Medium.LIMIT
    has_receiver = False

    async def connect(self, memory: memoryview, side: Channel) -> None:
        """Nothing but the memory is needed."""
        self._source = memory

    async def transfer(self, nbytes: int) -> None:
        """One pass."""
        xxh3_64_intdigest(self._source[:nbytes])
