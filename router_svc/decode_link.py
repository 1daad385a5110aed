"""One connection to a decode worker, shared by all sequences that run there.

A reader task hands each message to the inbox of its sequence. An inbox is bounded by what the
worker may send for the sequence, so the reader never waits for a slow client, and one sequence
never holds up another.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from kvproto.errors import ErrorCode, KvProtoError, LocalProtocolError
from kvproto.messages import (
    Abort,
    AbortAck,
    Accepted,
    Error,
    Finished,
    Generate,
    Message,
    Tokens,
)
from kvproto.tcp import Peer

ABORT_TIMEOUT_S: Final = 2.0
# ACCEPTED and FINISHED, and one ERROR in place of either.
_NUM_CONTROL_MESSAGES: Final = 3

SequenceMessage = Accepted | Tokens | Finished | Error


class WorkerLostError(Exception):
    """The decode worker is gone, or broke the protocol; its sequences may go on elsewhere."""


class SequenceInbox:
    """Messages of one sequence, oldest first, at most `max_messages`."""

    def __init__(self, max_messages: int) -> None:
        self._max_messages = max_messages
        self._messages: deque[SequenceMessage] = deque()
        self._lost_reason: str | None = None
        self._arrived = asyncio.Event()

    def put_nowait(self, message: SequenceMessage) -> None:
        """Add a message; one too many means the worker broke its promise, and it counts as lost."""
        if len(self._messages) >= self._max_messages:
            self.lose("it sent more messages than the sequence can have")
            return
        self._messages.append(message)
        self._arrived.set()

    def lose(self, reason: str) -> None:
        """Nothing more will come. What has arrived can still be read."""
        self._lost_reason = self._lost_reason or reason
        self._arrived.set()

    async def get(self) -> SequenceMessage:
        """Return the next message; the caller sets the deadline. Raises WorkerLostError."""
        while not self._messages:
            if self._lost_reason is not None:
                raise WorkerLostError(self._lost_reason)
            self._arrived.clear()
            await self._arrived.wait()
        return self._messages.popleft()

    def __len__(self) -> int:
        return len(self._messages)


class DecodeLink:
    """The sequences of one decode worker on one `peer`.

    `on_lost` is called once, when the connection has ended.
    """

    def __init__(self, instance_id: str, peer: Peer, on_lost: Callable[["DecodeLink"], None]):
        self.instance_id = instance_id
        self.is_lost = False
        self._peer = peer
        self._on_lost = on_lost
        self._inboxes: dict[str, SequenceInbox] = {}
        self._is_retired = False
        self._log = structlog.get_logger("router_svc.decode_link").bind(worker=instance_id)

    @property
    def num_sequences(self) -> int:
        """Sequences that wait for messages of this worker."""
        return len(self._inboxes)

    async def run(self) -> None:
        """Read until the connection ends; then every sequence here is lost. Owned by the pool."""
        reason = "the connection ended"
        try:
            while True:
                # Bounded by the keepalive of the peer: a silent worker ends the connection.
                self._deliver(await self._peer.receive())
        except KvProtoError as exc:
            reason = str(exc)
        finally:
            self._lose(reason)

    async def start(self, generate: Generate) -> SequenceInbox:
        """Send a sequence to the worker and return where its messages arrive.

        Raises WorkerLostError if the connection ends meanwhile, LocalProtocolError if a field
        breaks its limit. The caller must call `forget`.
        """
        if self.is_lost:
            raise WorkerLostError("the connection ended")
        inbox = SequenceInbox(generate.max_output_tokens + _NUM_CONTROL_MESSAGES)
        self._inboxes[generate.sequence_id] = inbox
        await self._send(generate)
        return inbox

    async def cancel(self, sequence_id: str, code: ErrorCode, message: str) -> None:
        """Tell the worker to stop a sequence; a lost worker needs no telling."""
        if self.is_lost:
            return
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._send(Abort(sequence_id, generation=0, code=code, message=message))
        except TimeoutError:
            # It does not even read: whatever runs there has to go on elsewhere.
            self.abort("it did not take an ABORT in time")
        except WorkerLostError:
            pass

    def forget(self, sequence_id: str) -> None:
        """Drop a sequence's inbox; late messages of it are ignored."""
        self._inboxes.pop(sequence_id, None)
        if self._is_retired and not self._inboxes:
            self._peer.abort("no sequences left on a worker that has gone")

    def retire(self) -> None:
        """Close as soon as no sequence is left."""
        self._is_retired = True
        if not self._inboxes:
            self._peer.abort("the worker has gone")

    def abort(self, reason: str) -> None:
        """End the connection now; every sequence here is lost at once."""
        self._peer.abort(reason)
        self._lose(reason)

    async def _send(self, message: Message) -> None:
        try:
            await self._peer.send(message)
        except LocalProtocolError:
            # The message is wrong, not the worker: nothing was sent.
            raise
        except KvProtoError as exc:
            raise WorkerLostError(str(exc)) from exc

    def _deliver(self, message: Message) -> None:
        match message:
            case Accepted() | Tokens() | Finished():
                inbox = self._inboxes.get(message.sequence_id)
                if inbox is not None:
                    inbox.put_nowait(message)
            case Error(sequence_id=""):
                self.abort(f"it reported an error: {message.message}")
            case Error():
                inbox = self._inboxes.get(message.sequence_id)
                if inbox is not None:
                    inbox.put_nowait(message)
            case AbortAck():
                # The sequence is gone already; nothing of it is kept here.
                pass
            case _:
                self.abort(f"it sent an unexpected {type(message).__name__}")

    def _lose(self, reason: str) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        if self._inboxes or not self._is_retired:
            self._log.warning("decode worker lost", reason=reason, num_sequences=len(self._inboxes))
        for inbox in self._inboxes.values():
            inbox.lose(reason)
        self._on_lost(self)
