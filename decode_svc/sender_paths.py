"""The paths of KV from clients that bring it themselves: by RDMA where they can, else by TCP.

A client is offered the pool once, with the first KV that it brings, on its own connection. No
address comes from it but that of its queue pairs, and it reaches no memory but while a lease of its
own lasts: a carrier without such keys is for workers alone. Nothing is probed: a client asks for
RDMA itself, and its first transfer shows whether that works.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from decode_svc.metrics import DecodeMetrics
from decode_svc.path import TCP, Path
from kvproto.carrier import CarrierHost
from kvproto.errors import CarrierUnavailable, ConnectionLost
from kvproto.messages import Attached
from kvproto.tcp_link import Link


@dataclass(slots=True)
class _Client:
    """One client's path once it is known; one handoff at a time finds it out."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    path: Path | None = None


class SenderPaths:
    """One path for each connection of a client.

    Args:
        hosts: what offers our memory; clients use those with keys for one lease.
        timeout_s: for attaching.
    """

    def __init__(
        self, hosts: Sequence[CarrierHost], metrics: DecodeMetrics, *, timeout_s: float
    ) -> None:
        self._hosts = tuple(host for host in hosts if host.has_lease_keys)
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._clients: dict[Link, _Client] = {}
        self._log = structlog.get_logger("decode.sender_paths")

    def add(self, peer: Link) -> None:
        """A connection begins. What it sends from now on must come to ``attached``."""
        self._clients[peer] = _Client()

    def remove(self, peer: Link) -> None:
        """It has ended: with it ends the client's hold on our memory. Idempotent."""
        client = self._clients.pop(peer, None)
        if client is not None and client.path is not None:
            client.path.let_go()

    async def get(self, peer: Link) -> Path:
        """How KV comes from this client. ConnectionLost: it has left."""
        client = self._clients.get(peer)
        if client is not None:
            async with client.lock:
                if client.path is None:
                    client.path = await self._choose(peer)
                if peer in self._clients:
                    return client.path
                client.path.let_go()  # it left while it was being attached
        raise ConnectionLost("the client closed the connection")

    def demote(self, peer: Link, reason: str) -> None:
        """RDMA failed: cut the client off, and let its KV come by TCP from now on."""
        client = self._clients.get(peer)
        if client is None or client.path is None or client.path.carrier == TCP:
            return
        client.path.let_go()
        client.path = self._by_tcp(peer, client.path.carrier, reason)

    def attached(self, peer: Link, message: Attached) -> None:
        """ATTACHED came from a client."""
        for host in self._hosts:
            host.attached(peer.control, message)

    def stats(self) -> dict[str, str]:
        """For the health answer: the carrier of each client that has brought KV."""
        return {
            peer.name: client.path.carrier
            for peer, client in self._clients.items()
            if client.path is not None
        }

    async def _choose(self, peer: Link) -> Path:
        for host in self._hosts:
            if host.carrier in peer.remote.carriers:
                try:
                    attachment = await host.attach(peer.control, timeout_s=self._timeout_s)
                except CarrierUnavailable as exc:
                    return self._by_tcp(peer, host.carrier, str(exc))
                self._log.info("client attached", peer=peer.name, carrier=host.carrier)
                return Path(host.carrier, attachment)
        return Path(TCP)

    def _by_tcp(self, peer: Link, carrier: str, reason: str) -> Path:
        self._metrics.path_fallbacks.labels(carrier=carrier).inc()
        self._log.warning("carrier is not used", peer=peer.name, carrier=carrier, reason=reason)
        return Path(TCP, passed_over={carrier: reason})
