"""The control port: workers register here and renew their leases.

One connection is one registration. A worker is offered to the scheduler only after the router
has reached it; it is removed when its connection ends or its lease does.
"""

import asyncio
from typing import Final

import structlog

from kvproto.errors import ErrorCode
from kvproto.messages import Error, Register, Registered, Renew
from kvproto.tcp import Peer
from router_svc.decode_link import WorkerLostError
from router_svc.decode_pool import DecodePool
from router_svc.registry import IncompatibleWorkerError, WorkerEntry, WorkerRegistry

REGISTER_TIMEOUT_S: Final = 5.0


class ControlHandler:
    """Serves one control connection after the other; `lease_s` is what workers are granted."""

    def __init__(self, registry: WorkerRegistry, pool: DecodePool, *, lease_s: float) -> None:
        self._registry = registry
        self._pool = pool
        self._lease_s = lease_s
        self._log = structlog.get_logger("router_svc.control")

    async def handle(self, peer: Peer) -> None:
        """Register the worker behind `peer` and keep it as long as it renews."""
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT_S):
                message = await peer.receive()
        except TimeoutError:
            await _refuse(peer, ErrorCode.DEADLINE_EXCEEDED, "no REGISTER came in time", "")
            return
        if not isinstance(message, Register):
            text = f"{type(message).__name__} came where REGISTER is expected"
            await _refuse(peer, ErrorCode.UNEXPECTED_MESSAGE, text, "")
            return
        for field in ("role", "instance_id"):
            if getattr(message, field) != getattr(peer.remote, field):
                text = f"{field} in REGISTER differs from the one in HELLO; send the same"
                await _refuse(peer, ErrorCode.INCOMPATIBLE, text, field)
                return
        try:
            entry = self._registry.register(message)
        except IncompatibleWorkerError as exc:
            self._log.warning("worker refused", worker=peer.name, field=exc.field, reason=str(exc))
            await _refuse(peer, ErrorCode.INCOMPATIBLE, str(exc), exc.field)
            return
        await self._keep(peer, entry)

    async def _keep(self, peer: Peer, entry: WorkerEntry) -> None:
        is_expired = False
        try:
            try:
                await self._offer(entry)
            except WorkerLostError as exc:
                self._log.warning("worker not reachable", worker=peer.name, reason=str(exc))
                await _refuse(peer, ErrorCode.CONNECTION_LOST, str(exc), "host")
                return
            self._log.info("worker registered", worker=peer.name)
            await peer.send(Registered(self._lease_s))
            is_expired = await self._renew_until_silent(peer, entry)
        finally:
            self._forget(peer, entry, is_expired=is_expired)

    async def _renew_until_silent(self, peer: Peer, entry: WorkerEntry) -> bool:
        """Take RENEW after RENEW. Return True if the lease ran out; raise when `peer` ends."""
        while True:
            try:
                async with asyncio.timeout(self._lease_s):
                    message = await peer.receive()
            except TimeoutError:
                text = f"no RENEW within the lease of {self._lease_s:g} s; register again"
                await _refuse(peer, ErrorCode.LEASE, text, "")
                return True
            if not isinstance(message, Renew) or message.instance_id != entry.instance_id:
                text = f"{type(message).__name__} is not this worker's RENEW"
                await _refuse(peer, ErrorCode.UNEXPECTED_MESSAGE, text, "instance_id")
                return False
            self._registry.renew(entry, message)
            await self._offer_again(peer, entry)

    async def _offer(self, entry: WorkerEntry) -> None:
        """Make the worker a candidate; a decode worker must be reached first."""
        if entry.registration.role == "decode":
            await self._pool.dial(entry.registration)
        # It may have been replaced while it was dialled.
        if self._registry.find(entry.instance_id) is entry:
            self._registry.offer(entry)

    async def _offer_again(self, peer: Peer, entry: WorkerEntry) -> None:
        """Dial a live worker again whose connection broke; the next RENEW tries once more."""
        if entry.is_offered or self._registry.find(entry.instance_id) is not entry:
            return
        try:
            # Within one lease, so that this wait cannot hide a lease that runs out.
            async with asyncio.timeout(self._lease_s / 2):
                await self._offer(entry)
        except (WorkerLostError, TimeoutError) as exc:
            self._log.warning("worker still not reachable", worker=peer.name, reason=str(exc))

    def _forget(self, peer: Peer, entry: WorkerEntry, *, is_expired: bool) -> None:
        is_current = self._registry.find(entry.instance_id) is entry
        self._registry.remove(entry)
        self._log.info("worker gone", worker=peer.name, is_expired=is_expired)
        if not is_current:
            return
        if is_expired:
            self._pool.abort(entry.instance_id, "its lease ran out")
        else:
            self._pool.retire(entry.instance_id)


async def _refuse(peer: Peer, code: ErrorCode, message: str, field: str) -> None:
    """Send ERROR and close; the peer may be stuck, so both have a deadline."""
    try:
        async with asyncio.timeout(REGISTER_TIMEOUT_S):
            await peer.send(Error(code, message[:1000], field))
            await peer.close()
    except TimeoutError:
        peer.abort("it did not take the refusal in time")
