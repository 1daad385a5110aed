"""One connection of a router or a client: sequences come in, tokens go out.

A client that brings its KV itself is also asked for it, on the same connection, as if it were a
prefill worker.
"""

import asyncio

import structlog

from decode_svc.decoder import Decoder
from decode_svc.errors import SequenceRefused
from decode_svc.letter_box import LetterBoxes
from decode_svc.metrics import DecodeMetrics
from decode_svc.outbox import Outbox
from decode_svc.sender_paths import SenderPaths
from kvproto.errors import ConnectionLost, ErrorCode
from kvproto.messages import (
    Abort,
    AbortAck,
    Attached,
    Describe,
    Description,
    Error,
    Finished,
    Generate,
    Message,
    Placed,
    Write,
)
from kvproto.tcp_link import Link


class DecodeServer:
    """Serves routers; ``handle`` is the handler that ``kvproto.tcp.serve`` calls."""

    def __init__(
        self,
        decoder: Decoder,
        boxes: LetterBoxes,
        senders: SenderPaths,
        metrics: DecodeMetrics,
        *,
        description: Description,
    ) -> None:
        self._decoder = decoder
        self._boxes = boxes
        self._senders = senders
        self._metrics = metrics
        self._description = description
        self._outboxes: set[Outbox] = set()
        self._log = structlog.get_logger("decode.server")

    async def handle(self, peer: Link) -> None:
        """Serve ``peer`` until the connection ends; its sequences end with it."""
        outbox = Outbox(peer)
        self._outboxes.add(outbox)
        self._senders.add(peer)
        self._log.info("router connected", peer=peer.name)
        sending = asyncio.create_task(outbox.run(), name=f"send {peer.name}")
        try:
            async for message in peer:
                await self._on_message(outbox, message)
        except ConnectionLost as exc:
            self._log.warning("router lost", peer=peer.name, reason=exc.reason)
        finally:
            self._senders.remove(peer)
            self._boxes.lose(peer, "the client closed the connection")
            self._decoder.drop_owner(outbox)
            self._outboxes.discard(outbox)
            # What has been sent still leaves: the connection is closed, not aborted, on return.
            sending.cancel()
            await asyncio.wait([sending])

    async def flush(self) -> None:
        """Return when everything said so far has left the process."""
        for outbox in list(self._outboxes):
            await outbox.flush()

    def stats(self) -> dict[str, dict[str, int]]:
        """For the health answer."""
        return {outbox.peer.name: outbox.stats() for outbox in self._outboxes}

    async def _on_message(self, outbox: Outbox, message: Message) -> None:
        match message:
            case Generate():
                self._on_generate(outbox, message)
            case Describe():
                outbox.put(self._description)
            case Write() | Placed():
                pass  # its bytes have landed already
            case Attached():
                self._senders.attached(outbox.peer, message)
            case Abort(generation=0):
                self._decoder.cancel(message.sequence_id, outbox)
                # FINISHED follows between two steps, if there was something to end.
                outbox.put(AbortAck(message.sequence_id, message.generation))
            case _ if not await self._boxes.route(outbox.peer, message):
                text = f"a decode worker does not take {type(message).__name__} from a router"
                outbox.put(Error(code=ErrorCode.UNEXPECTED_MESSAGE, message=text))

    def _on_generate(self, outbox: Outbox, message: Generate) -> None:
        try:
            _check_sender(outbox.peer, message)
            self._decoder.submit(message, outbox)
        except SequenceRefused as exc:
            self._metrics.refusals.labels(code=exc.code.name.lower()).inc()
            self._log.info("sequence refused", sequence_id=message.sequence_id, reason=str(exc))
            outbox.put(
                Finished(message.sequence_id, reason="error", code=exc.code, message=str(exc))
            )


def _check_sender(peer: Link, message: Generate) -> None:
    if message.kv_from_sender and peer.remote.role != "client":
        raise SequenceRefused(
            ErrorCode.MALFORMED, "kv_from_sender: only a client brings the KV itself"
        )
    if message.prefill_workers and peer.remote.role != "router":
        # Addresses come from the router's registry, never from a client.
        raise SequenceRefused(
            ErrorCode.MALFORMED, "prefill_workers: only a router may name prefill workers"
        )
