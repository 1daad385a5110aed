"""One connection of a decode worker: its requests go to the prefiller, its KV comes back."""

import asyncio

import structlog

from kvproto.errors import ConnectionLost, ErrorCode
from kvproto.geometry import KvGeometry
from kvproto.messages import Abort, AbortAck, CommitAck, Error, Message, Prefill
from kvproto.tcp import Peer, TcpWriter
from prefill_svc.config import PrefillConfig
from prefill_svc.errors import PromptRefused
from prefill_svc.metrics import PrefillMetrics
from prefill_svc.prefiller import Prefiller
from prefill_svc.push import Pusher


class PrefillServer:
    """Serves decode workers; ``handle`` is the handler that ``kvproto.tcp.serve`` calls."""

    def __init__(
        self,
        prefiller: Prefiller,
        metrics: PrefillMetrics,
        *,
        geometry: KvGeometry,
        config: PrefillConfig,
    ) -> None:
        self._prefiller = prefiller
        self._metrics = metrics
        self._geometry = geometry
        self._config = config
        num_layers = geometry.num_layers
        # More than two layers' worth of unsent writes: the decode worker is slower than we are.
        self._stall_items = 2 * num_layers
        # A step adds at most one write a layer for each of its prompts and is not begun for a
        # stalled connection; each prompt adds at most a Begin, a Finish and a GiveUp.
        self._max_items = (
            self._stall_items + num_layers * config.max_step_prompts + 3 * config.max_prompts
        )
        self._log = structlog.get_logger("prefill.server")

    async def handle(self, peer: Peer) -> None:
        """Serve ``peer`` until the connection ends; its prompts end with it."""
        pusher = Pusher(
            peer,
            TcpWriter(peer, self._geometry),
            max_items=self._max_items,
            stall_items=self._stall_items,
            ack_timeout_s=self._config.ack_timeout_s,
            on_drained=self._prefiller.wake,
        )
        self._prefiller.add_pusher(pusher)
        self._log.info("decode worker connected", peer=peer.name)
        pushing = asyncio.create_task(pusher.run(), name=f"push {peer.name}")
        try:
            async for message in peer:
                await self._on_message(peer, message)
        except ConnectionLost as exc:
            self._log.warning("decode worker lost", peer=peer.name, reason=exc.reason)
        finally:
            # Once the connection is closed nothing reads the KV pool any more.
            await peer.close()
            pushing.cancel()
            await asyncio.wait([pushing])
            self._prefiller.remove_pusher(pusher)
            if not pushing.cancelled() and (defect := pushing.exception()) is not None:
                self._log.error("sending failed", peer=peer.name, exc_info=defect)

    async def _on_message(self, peer: Peer, message: Message) -> None:
        match message:
            case Prefill():
                await self._on_prefill(peer, message)
            case CommitAck():
                self._prefiller.acknowledge(peer, message.sequence_id, message.generation)
            case Abort():
                known = self._prefiller.cancel(peer, message.sequence_id, message.generation)
                if not known:
                    # Finished, released or never seen: certainly nothing will be written.
                    await peer.send(AbortAck(message.sequence_id, message.generation))
            case AbortAck():
                pass  # the decode worker heard that we gave up
            case Error() if message.sequence_id:
                # A write came after the lease was withdrawn; the ABORT that explains it follows.
                self._log.debug("write refused", peer=peer.name, reason=message.message)
            case _:
                code = ErrorCode.UNEXPECTED_MESSAGE
                text = f"a prefill worker does not take {type(message).__name__}"
                await peer.send(Error(code=code, message=text))

    async def _on_prefill(self, peer: Peer, message: Prefill) -> None:
        try:
            self._prefiller.submit(message, peer)
        except PromptRefused as exc:
            self._metrics.refusals.labels(code=exc.code.name.lower()).inc()
            self._log.info("prompt refused", sequence_id=message.sequence_id, reason=str(exc))
            await peer.send(
                Abort(message.sequence_id, message.generation, code=exc.code, message=str(exc))
            )
            await peer.send(AbortAck(message.sequence_id, message.generation))
