"""A client that KV is written to by RDMA: its device, its landing pool, its one writer."""

import logging

from kvproto.client.landing_pool import LandingPool
from kvproto.geometry import KvGeometry
from kvproto.messages import Attached
from kvproto.rdma.device import Device
from kvproto.rdma.host import RdmaAttachment, RdmaHost
from kvproto.tcp import Peer

logger = logging.getLogger("kvproto.client")


class RdmaReceiver:
    """Offers a landing pool to one prefill worker.

    Args:
        device: closed by ``close``.
        geometry: of the worker.
        pool_nbytes: at most so much memory is registered.

    LocalProtocolError: not even one block fits. CarrierUnavailable: it cannot be registered.

    Attributes:
        pool: where the rows land.
    """

    def __init__(self, device: Device, geometry: KvGeometry, pool_nbytes: int) -> None:
        self._device = device
        self.pool = LandingPool(geometry, pool_nbytes)
        self._host = RdmaHost(device, self.pool.layout, self.pool.memory)
        self._attachment: RdmaAttachment | None = None

    async def attach(self, peer: Peer, *, timeout_s: float) -> None:
        """Connect the worker to the pool; its ATTACHED must come to ``attached`` meanwhile.

        CarrierUnavailable and ConnectionLost as ``RdmaHost.attach``.
        """
        self._attachment = await self._host.attach(peer, timeout_s=timeout_s)

    def attached(self, peer: Peer, message: Attached) -> None:
        """ATTACHED came from the worker."""
        self._host.attached(peer, message)

    async def open_keys(self) -> list[int]:
        """Keys for one transfer, see ``RdmaAttachment.open_keys``. CarrierLost."""
        assert self._attachment is not None, "attached before it is used"
        return await self._attachment.open_keys()

    def close_keys(self, keys: list[int]) -> None:
        """They open nothing any more when this returns."""
        assert self._attachment is not None, "attached before it is used"
        self._attachment.close_keys(keys)

    def cut(self) -> None:
        """End the connection: the worker can write nothing more when this returns. Idempotent."""
        if self._attachment is not None:
            self._attachment.cut()

    def stats(self) -> dict[str, str | int]:
        """The device, and what is in use."""
        return {**self._host.stats(), **self.pool.stats()}

    def close(self) -> None:
        """Cut the worker off, unregister the pool, give the device back. Idempotent."""
        self._host.close()
        self._device.close()
