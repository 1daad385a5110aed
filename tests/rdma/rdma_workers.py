"""The fake prefill worker of the client's tests, on a device: it writes by RDMA."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvproto.client.kv_sender import KvSender
from kvproto.client.rdma_sender import RdmaSender
from kvproto.errors import ConnectionLost, KvProtoError
from kvproto.geometry import KvGeometry
from kvproto.messages import Abort, Offer, Prefill
from kvproto.rdma.writer import RdmaWriter
from kvproto.tcp import Peer
from tests.kvproto.client.fake_workers import GEOMETRY, FakePrefill, computed
from tests.rdma.rdma_rig import WRITER_DEVICE, open_device


class RdmaPrefill(FakePrefill):
    """Sends the rows that ``computed`` makes in whichever way it is asked to.

    ``is_deaf``: it leaves offers unanswered.
    """

    def __init__(self, geometry: KvGeometry = GEOMETRY) -> None:
        super().__init__(geometry)
        self.identity = replace(self.identity, carriers=("rdma", "tcp"))
        self.senders: dict[str, RdmaSender] = {}
        self.is_deaf = False

    async def handle(self, peer: Peer) -> None:
        try:
            await super().handle(peer)
        finally:
            for task in self.tasks.values():
                task.cancel()
            sender = self.senders.pop(peer.remote.instance_id, None)
            if sender is not None:
                await sender.close()

    def offered(self, peer: Peer, offer: Offer) -> None:
        if not self.is_deaf:
            sender = RdmaSender(open_device(WRITER_DEVICE), peer, self.geometry)
            self.senders[peer.remote.instance_id] = sender
            sender.answer(offer)

    async def settle(self, abort: Abort) -> None:
        for sender in self.senders.values():
            with contextlib.suppress(KvProtoError):
                writer = await sender.writer()
                writer.end(abort.sequence_id, abort.generation)
                await writer.flush()

    async def send(self, peer: Peer, request: Prefill) -> None:
        cache = computed(self.geometry, request.tokens)
        rdma = self.senders.get(peer.remote.instance_id)
        with contextlib.suppress(ConnectionLost):
            await KvSender(peer, request, cache, rdma=rdma).run()

    def holding(self, reached: asyncio.Event) -> Callable[[Peer, Prefill], Any]:
        """An ``answer`` that writes the first layer of other rows, and then no more."""

        async def answer(peer: Peer, request: Prefill) -> None:
            cache = computed(self.geometry, [token + 1 for token in request.tokens])
            writer = await self.senders[peer.remote.instance_id].writer()
            await write_layer(writer, request, cache)
            reached.set()
            await asyncio.Event().wait()

        return answer


async def write_layer(writer: RdmaWriter, request: Prefill, cache: Any) -> None:
    """The first layer of a transfer."""
    key = (request.sequence_id, request.generation)
    count = len(request.tokens)
    writer.begin(*key, request.block_table, count, keys=request.keys)
    await writer.write(*key, 0, 0, count, cache.views(0, 0, count))
    await writer.flush()
