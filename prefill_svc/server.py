"""The connections of a prefill worker: one session and one pusher for each."""

import asyncio

import structlog

from kvproto.errors import ConnectionLost
from kvproto.geometry import KvGeometry
from kvproto.messages import Description
from kvproto.tcp_link import Link
from prefill_svc.config import PrefillConfig
from prefill_svc.metrics import PrefillMetrics
from prefill_svc.prefiller import Prefiller
from prefill_svc.push import Pusher
from prefill_svc.rdma_pool import RdmaPool
from prefill_svc.session import Session


class PrefillServer:
    """Serves decode workers and clients; ``handle`` is what ``kvproto.tcp.serve`` calls."""

    def __init__(
        self,
        prefiller: Prefiller,
        metrics: PrefillMetrics,
        *,
        geometry: KvGeometry,
        description: Description,
        config: PrefillConfig,
        rdma: RdmaPool,
    ) -> None:
        self._prefiller = prefiller
        self._metrics = metrics
        self._geometry = geometry
        self._description = description
        self._config = config
        self._rdma = rdma
        num_layers = geometry.num_layers
        # More than two layers' worth of unsent writes: the decode worker is slower than we are.
        self._stall_items = 2 * num_layers
        # A step adds at most one write a layer for each of its prompts and is not begun for a
        # stalled connection; each prompt adds at most a Beat, a Begin, a Finish and a GiveUp.
        self._max_items = (
            self._stall_items + num_layers * config.max_step_prompts + 4 * config.max_prompts
        )
        self._log = structlog.get_logger("prefill.server")

    async def handle(self, peer: Link) -> None:
        """Serve ``peer`` until the connection ends; its prompts end with it."""
        pusher = Pusher(
            peer,
            max_items=self._max_items,
            stall_items=self._stall_items,
            ack_timeout_s=self._config.ack_timeout_s,
            on_drained=self._prefiller.wake,
            on_failed=self._prefiller.fail_transfer,
        )
        self._prefiller.add_pusher(pusher)
        self._log.info("connected", peer=peer.name)
        pushing = asyncio.create_task(pusher.run(), name=f"push {peer.name}")
        try:
            async with asyncio.TaskGroup() as tasks:
                session = Session(
                    peer,
                    self._prefiller,
                    self._metrics,
                    tasks,
                    geometry=self._geometry,
                    description=self._description,
                    mapped_dir=self._config.mapped_dir,
                    rdma=self._rdma,
                )
                try:
                    await session.read()
                except ConnectionLost as exc:
                    self._log.warning("connection lost", peer=peer.name, reason=exc.reason)
                finally:
                    # Once the connection is closed nothing reads the KV pool any more.
                    await peer.close()
                    pushing.cancel()
                    await asyncio.wait([pushing])
                    # And now nobody writes to the peer's memory either.
                    await session.close()
        finally:
            self._prefiller.remove_pusher(pusher)
            if not pushing.cancelled() and (defect := pushing.exception()) is not None:
                self._log.error("sending failed", peer=peer.name, exc_info=defect)
