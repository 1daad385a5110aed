"""The KV pool as memory that prefill workers on this host may map, where that is wanted."""

import structlog

from decode_svc.config import POOL_DTYPE, DecodeConfig
from kvengine.memory import available_nbytes
from kvproto.errors import CarrierUnavailable
from kvproto.geometry import PoolLayout
from kvproto.mapped_host import MappedHost
from kvproto.region import CARRIER as MAPPED
from kvproto.region import Region, unavailable_reason
from svckit.errors import ServiceError


class SharedPool:
    """``take`` memory while the engine is loaded, ``start`` to offer it, ``close`` at the end."""

    def __init__(self, config: DecodeConfig) -> None:
        self._config = config
        self._region: Region | None = None
        self._host: MappedHost | None = None

    @property
    def is_wanted(self) -> bool:
        """The pool is to be shared, and this system can."""
        config = self._config
        # Converted KV passes through a buffer of its own, which nobody else may write.
        return (
            config.kv_carrier in ("auto", MAPPED)
            and config.kv_wire_dtype == POOL_DTYPE
            and not unavailable_reason()
        )

    def take(self, layout: PoolLayout) -> memoryview:
        """The pool's memory, all of it taken now; LocalProtocolError if there is too little."""
        self._region = Region.create(
            layout, self._config.instance_id, available_nbytes=available_nbytes()
        )
        return self._region.pool

    async def start(self) -> MappedHost | None:
        """Offer it; None if that cannot be. ServiceError if ``kv_carrier`` insists."""
        reason = unavailable_reason() or "kv_wire_dtype converts the KV, which needs TCP"
        if self._region is not None:
            try:
                self._host = await MappedHost.start(self._region, self._config.mapped_dir)
            except CarrierUnavailable as exc:
                reason = str(exc)
            else:
                return self._host
        if self._config.kv_carrier == MAPPED:
            raise ServiceError(f"kv_carrier is mapped, but {reason}.")
        if self._config.kv_carrier == "auto":
            structlog.get_logger("decode").info("no mapped memory", reason=reason)
        return None

    async def close(self) -> None:
        """Stop offering it. The memory goes with the last view of it. Idempotent."""
        if self._host is not None:
            await self._host.close()
        if self._region is not None:
            self._region.close()
