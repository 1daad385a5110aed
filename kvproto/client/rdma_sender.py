"""A client that writes KV by RDMA into a decode worker: its device, and the worker's offer."""

import asyncio
import contextlib

from kvproto.errors import CarrierUnavailable, ConnectionLost, DeadlineExceeded
from kvproto.geometry import KvGeometry
from kvproto.messages import Offer
from kvproto.rdma.device import Device
from kvproto.rdma.host import CARRIER as RDMA
from kvproto.rdma.writer import RdmaWriter, answer_offer
from kvproto.tcp import Peer


class RdmaSender:
    """Answers the one offer of a decode worker; then there is a writer.

    Rows lie in memory that is not registered, a file for instance, so they pass through the
    writer's staging memory.

    Args:
        device: closed by ``close``.
        peer: the decode worker.
        geometry: of the worker.
    """

    def __init__(self, device: Device, peer: Peer, geometry: KvGeometry) -> None:
        self._device = device
        self._peer = peer
        self.geometry = geometry
        self._answering: asyncio.Task[None] | None = None
        self._writer: RdmaWriter | None = None

    @property
    def is_attached(self) -> bool:
        """There is a writer, and it works."""
        return self._writer is not None and self._writer.error is None

    @property
    def reason(self) -> str:
        """Why RDMA is not used, for a sentence; "" if it is."""
        if self._writer is None:
            return "no RDMA connection was made; the logs of both sides say why"
        return "" if self._writer.error is None else str(self._writer.error)

    def answer(self, offer: Offer) -> None:
        """OFFER came: answer it in a task. There is one for each connection; others are ignored."""
        if self._answering is None:
            self._answering = asyncio.create_task(
                self._answer(offer), name=f"answer OFFER of {self._peer.name}"
            )

    async def writer(self) -> RdmaWriter:
        """What writes into the worker's memory. CarrierUnavailable: nothing does."""
        if self._answering is not None:
            # ATTACHED may be read, and PREFILL come back, before sending it has returned.
            await asyncio.wait([self._answering])
        if self._writer is None:
            raise CarrierUnavailable(f"carrier {RDMA!r} is not open towards {self._peer.name}")
        return self._writer

    async def close(self) -> None:
        """Nothing is written any more when this returns. Idempotent."""
        if self._answering is not None:
            self._answering.cancel()
            await asyncio.wait([self._answering])
        if self._writer is not None:
            await self._writer.close()
        self._device.close()

    async def _answer(self, offer: Offer) -> None:
        with contextlib.suppress(ConnectionLost, DeadlineExceeded):
            self._writer = await answer_offer(self._peer, offer, self.geometry, self._device, ())
