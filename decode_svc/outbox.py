"""What a decode worker has to say to one router, in order, without ever waiting for it.

The decode loop must not stand still because one router reads slowly: it puts messages here, one
task sends them. A router that falls a whole outbox behind is cut off; its sequences end.
"""

import asyncio
import contextlib

import structlog

from kvproto.errors import ConnectionLost, DeadlineExceeded
from kvproto.messages import Message
from kvproto.tcp_link import Link

# At 256 sequences and 10 steps a second this is several seconds of silence from the router.
MAX_MESSAGES = 16384


class Outbox:
    """A bounded queue of messages for one peer and the loop that sends them."""

    def __init__(self, peer: Link, max_messages: int = MAX_MESSAGES) -> None:
        self.peer = peer
        self._messages: asyncio.Queue[Message] = asyncio.Queue(max_messages)
        self._is_over = False
        self._log = structlog.get_logger("decode.outbox")

    def put(self, message: Message) -> None:
        """Queue ``message``; a full outbox ends the connection, an ended one takes nothing."""
        if self._is_over:
            return
        try:
            self._messages.put_nowait(message)
        except asyncio.QueueFull:
            self._log.error("router reads too slowly, cut off", peer=self.peer.name)
            self.peer.abort("the router reads too slowly")

    def stats(self) -> dict[str, int]:
        """How full it is, and the bound."""
        return {"num_messages": self._messages.qsize(), "max_messages": self._messages.maxsize}

    async def run(self) -> None:
        """Send until the connection is lost or the task is cancelled; then drop what is left."""
        try:
            while True:
                message = await self._messages.get()
                try:
                    await self.peer.send(message)
                finally:
                    self._messages.task_done()
        except (ConnectionLost, DeadlineExceeded):
            return  # the handler of this connection sees the end too, and cleans up
        finally:
            self._is_over = True
            while not self._messages.empty():
                self._messages.get_nowait()
                self._messages.task_done()

    async def flush(self) -> None:
        """Return when everything put so far was sent, or there is nobody left to send it to."""
        await self._messages.join()
        with contextlib.suppress(ConnectionLost, DeadlineExceeded):
            await self.peer.flushed()
