"""The letter boxes of handoff attempts.

What the writer of the KV says, the loss of its connection and our own wish to stop all arrive in
one box in order, so that an attempt waits in one place only. ``LetterBoxes`` finds the box of a
message, whichever connection it came on: one to a prefill worker, or that of a client which
brings its KV itself.
"""

import asyncio
from dataclasses import dataclass

from kvproto.messages import Abort, AbortAck, Commit, Error, Heartbeat, Message, Started
from kvproto.tcp_link import Link


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection to the writer is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The sequence no longer wants its KV: cancelled, expired or preempted."""


Letter = Started | Heartbeat | Commit | Abort | AbortAck | Error | Lost | Cancelled

# A well-behaved writer sends a few HEARTBEATs that are read at once, and at most STARTED, COMMIT,
# ABORT, ABORT_ACK; beside them there are one Lost and one Cancelled.
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


class LetterBoxes:
    """The boxes of all attempts in work."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[Link, str, int], LetterBox] = {}

    def open(self, peer: Link, sequence_id: str, generation: int) -> LetterBox:
        """Start to receive letters for one attempt."""
        box = self._boxes[peer, sequence_id, generation] = LetterBox()
        return box

    def close(self, peer: Link, sequence_id: str, generation: int) -> None:
        """Stop; later letters for this attempt are answered or ignored."""
        del self._boxes[peer, sequence_id, generation]

    async def route(self, peer: Link, message: Message) -> bool:
        """Put a message into the box it is for; False if it is not about a handoff at all.

        A peer that fills a box is cut off. Raises ConnectionLost, DeadlineExceeded.
        """
        match message:
            case Started() | Heartbeat() | Commit() | Abort() | AbortAck():
                box = self._boxes.get((peer, message.sequence_id, message.generation))
                if box is None:
                    if isinstance(message, Abort):
                        # Terminal messages are idempotent: nothing of ours is left to stop.
                        await peer.send(AbortAck(message.sequence_id, message.generation))
                elif not box.put(message):
                    peer.abort(f"{peer.name} floods {message.sequence_id}")
            case Error():
                for (box_peer, sequence_id, _), box in list(self._boxes.items()):
                    if box_peer is peer and message.sequence_id in ("", sequence_id):
                        box.put(message)
            case _:
                return False
        return True

    def lose(self, peer: Link, reason: str) -> None:
        """The connection is gone: tell every attempt that runs over it."""
        for (box_peer, *_), box in list(self._boxes.items()):
            if box_peer is peer:
                box.put(Lost(reason))
