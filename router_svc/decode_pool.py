"""The connections to all registered decode workers: one for each, dialled by the router."""

import asyncio
import ssl
from typing import Any, Final, Self

import structlog

from kvproto.errors import KvProtoError
from kvproto.handshake import Identity
from kvproto.messages import Register
from kvproto.tcp import connect
from router_svc.decode_link import DecodeLink, WorkerLostError
from router_svc.registry import WorkerEntry, WorkerRegistry

# Below the time a worker waits for the answer to REGISTER, so that it learns the reason.
DIAL_TIMEOUT_S: Final = 3.0


class DecodePool:
    """Owns every `DecodeLink` and its reader task; use it as an async context manager."""

    def __init__(
        self,
        registry: WorkerRegistry,
        identity: Identity,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._registry = registry
        self._identity = identity
        self._tls = tls
        self._links: dict[str, DecodeLink] = {}
        # Links of workers that have gone; they stay until their sequences have ended.
        self._retired: set[DecodeLink] = set()
        self._tasks = asyncio.TaskGroup()
        self._log = structlog.get_logger("router_svc.decode_pool")

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        for link in [*self._links.values(), *self._retired]:
            link.abort("the router stops")
        await self._tasks.__aexit__(*exc_info)

    def find(self, instance_id: str) -> DecodeLink | None:
        """Return the live link to a worker."""
        return self._links.get(instance_id)

    async def dial(self, registration: Register) -> DecodeLink:
        """Connect to a decode worker at its registered address and start its reader.

        A link of the same id is retired. Raises WorkerLostError, checked in this order: no
        connection, refused handshake, another worker behind that address.
        """
        where = f"{registration.host}:{registration.port}"
        try:
            peer = await connect(
                registration.host,
                registration.port,
                identity=self._identity,
                timeout_s=DIAL_TIMEOUT_S,
                tls=self._tls,
            )
        except (KvProtoError, OSError, TimeoutError) as exc:
            raise WorkerLostError(f"cannot reach the decode worker at {where}: {exc}") from exc
        if (peer.remote.role, peer.remote.instance_id) != ("decode", registration.instance_id):
            peer.abort("another worker is listening at this address")
            raise WorkerLostError(
                f"{peer.remote.role} {peer.remote.instance_id} answers at {where}, not decode "
                f"{registration.instance_id}"
            )
        link = DecodeLink(registration.instance_id, peer, self._on_lost)
        self.retire(registration.instance_id)
        self._links[registration.instance_id] = link
        self._tasks.create_task(link.run(), name=f"decode-link-{registration.instance_id}")
        return link

    def retire(self, instance_id: str) -> None:
        """The worker left on its own: send it nothing new, let its sequences end."""
        link = self._links.pop(instance_id, None)
        if link is not None:
            self._retired.add(link)
            link.retire()

    def abort(self, instance_id: str, reason: str) -> None:
        """The worker is dead: its sequences must go on elsewhere now."""
        link = self._links.get(instance_id)
        if link is not None:
            link.abort(reason)

    def stats(self) -> dict[str, int]:
        """Return how many links and sequences there are."""
        return {
            "num_links": len(self._links),
            "num_retired_links": len(self._retired),
            "num_sequences": sum(
                link.num_sequences for link in [*self._links.values(), *self._retired]
            ),
        }

    def _on_lost(self, link: DecodeLink) -> None:
        self._retired.discard(link)
        if self._links.get(link.instance_id) is link:
            del self._links[link.instance_id]
            entry: WorkerEntry | None = self._registry.find(link.instance_id)
            if entry is not None:
                self._registry.withdraw(entry)
