"""The KV pool as memory that prefill workers may write by RDMA, where that is wanted."""

import structlog

from decode_svc.config import POOL_DTYPE, DecodeConfig
from kvproto.errors import CarrierUnavailable
from kvproto.geometry import PoolLayout
from kvproto.rdma.device import Device, open_device
from kvproto.rdma.host import CARRIER as RDMA
from kvproto.rdma.host import RdmaHost
from kvproto.rdma.settings import RdmaSettings
from svckit.errors import ServiceError


class RdmaPool:
    """``start`` to register the pool and offer it, ``close`` at the end."""

    def __init__(self, config: DecodeConfig) -> None:
        self._config = config
        self._device: Device | None = None
        self._host: RdmaHost | None = None

    def start(self, layout: PoolLayout, pool: memoryview) -> RdmaHost | None:
        """Offer the pool; None if that cannot be. ServiceError if ``kv_carrier`` insists."""
        config = self._config
        if config.kv_carrier not in ("auto", RDMA):
            return None
        # Converted KV passes through a buffer of its own, which nobody else may write.
        reason = "kv_wire_dtype converts the KV, which needs TCP"
        if config.kv_wire_dtype == POOL_DTYPE:
            host = config.advertise_host or config.listen_host
            try:
                self._device = open_device(RdmaSettings.of(config), host)
                self._host = RdmaHost(self._device, layout, pool)
            except CarrierUnavailable as exc:
                self.close()
                reason = str(exc)
            else:
                return self._host
        if config.kv_carrier == RDMA:
            raise ServiceError(f"kv_carrier is rdma, but {reason}.")
        structlog.get_logger("decode").info("no RDMA", reason=reason)
        return None

    def close(self) -> None:
        """Cut every writer off and give the device back. Idempotent."""
        if self._host is not None:
            self._host.close()
        if self._device is not None:
            self._device.close()
            self._device = None
