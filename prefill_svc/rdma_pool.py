"""The KV pool as memory that is sent from by RDMA, where this host has it."""

import structlog

from kvproto.errors import CarrierUnavailable
from kvproto.geometry import KvGeometry
from kvproto.messages import Offer
from kvproto.rdma.constants import Access
from kvproto.rdma.device import Device, open_device
from kvproto.rdma.memory import RegisteredMemory
from kvproto.rdma.settings import RdmaSettings
from kvproto.rdma.writer import RdmaWriter, answer_offer
from kvproto.tcp_peer import Peer
from prefill_svc.config import PrefillConfig


class RdmaPool:
    """``start`` to open the device and register the pool, ``close`` at the end."""

    def __init__(self, config: PrefillConfig) -> None:
        self._config = config
        self._device: Device | None = None
        self._memory: RegisteredMemory | None = None

    @property
    def is_open(self) -> bool:
        """This worker can write by RDMA."""
        return self._memory is not None

    def start(self, pool: memoryview) -> None:
        """Open it, or log why not: TCP and mapped memory are there as well."""
        config = self._config
        try:
            self._device = open_device(
                RdmaSettings.of(config), config.advertise_host or config.listen_host
            )
            # Read only: nobody may write into the pool of a prefill worker.
            self._memory = RegisteredMemory(self._device, pool, Access(0), "the KV pool")
        except CarrierUnavailable as exc:
            self.close()
            structlog.get_logger("prefill").info("no RDMA", reason=str(exc))

    async def answer(self, peer: Peer, offer: Offer, geometry: KvGeometry) -> RdmaWriter | None:
        """As ``kvproto.rdma.writer.answer_offer``. Only while ``is_open``."""
        assert self._device is not None, "is_open says so"
        assert self._memory is not None, "is_open says so"
        return await answer_offer(peer, offer, geometry, self._device, [self._memory])

    def stats(self) -> dict[str, str | int] | None:
        """For the health answer; None without RDMA."""
        return None if self._device is None else self._device.stats()

    def close(self) -> None:
        """Unregister the pool and give the device back. Idempotent."""
        if self._device is not None:
            self._device.close()
            self._device = None
