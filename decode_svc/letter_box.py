"""The letter box of one handoff attempt.

What the prefill worker says, the loss of its connection and our own wish to stop all arrive here
in order, so that the attempt waits in one place only.
"""

import asyncio
from dataclasses import dataclass

from kvproto.messages import Abort, AbortAck, Commit, Error, Started


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection to the prefill worker is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The sequence no longer wants its KV: cancelled, expired or preempted."""


Letter = Started | Commit | Abort | AbortAck | Error | Lost | Cancelled

# A well-behaved prefill worker sends at most STARTED, COMMIT, ABORT, ABORT_ACK; beside them there
# are one Lost and one Cancelled.
_MAX_LETTERS = 16


class LetterBox:
    """A bounded queue of letters; one reader."""

    def __init__(self) -> None:
        self._letters: asyncio.Queue[Letter] = asyncio.Queue(_MAX_LETTERS)

    def put(self, letter: Letter) -> bool:
        """Add a letter; False if the box is full, which only a misbehaving peer brings about."""
        try:
            self._letters.put_nowait(letter)
        except asyncio.QueueFull:
            return False
        return True

    async def get(self, timeout_s: float) -> Letter:
        """The next letter. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            return await self._letters.get()
