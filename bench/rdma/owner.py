"""The process that owns the pool: grants leases as the bench asks, acknowledges commits."""

import asyncio
import itertools
import json
import mmap
import sys
from typing import Any

from kvproto.blocks import BlockPool
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.handshake import Identity
from kvproto.lease import LeaseTable
from kvproto.messages import Attached, Commit, CommitAck
from kvproto.rdma.device import open_device
from kvproto.rdma.host import RdmaAttachment, RdmaHost
from kvproto.rdma.settings import RdmaSettings
from kvproto.tcp import Peer, serve

# K and V of 1 KiB each: 2 KiB for a token.
GEOMETRY = KvGeometry.uniform(1, 8, 64, "float16", ("layers.0",))
BLOCK_SIZE = 16


class Owner:
    """One pool, one writer at a time.

    Args:
        device: where it is reached by RDMA.
        num_tokens: that the pool holds.
        num_queue_pairs: connections.
    """

    def __init__(self, device: str, num_tokens: int, num_queue_pairs: int) -> None:
        self.layout = PoolLayout(GEOMETRY, num_tokens // BLOCK_SIZE, BLOCK_SIZE)
        # Private and anonymous, as the pool of a decode worker.
        memory = mmap.mmap(-1, self.layout.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.pool = memoryview(memory)
        self.blocks = BlockPool(self.layout.num_blocks)
        self.leases = LeaseTable(self.layout, self.pool, self.blocks)
        self._generations = itertools.count(1)
        settings = RdmaSettings(device=device, num_queue_pairs=num_queue_pairs)
        self._device = open_device(settings)
        self._host = RdmaHost(self._device, self.layout, self.pool)
        self._attachment: RdmaAttachment | None = None
        self._attached = asyncio.Event()
        self._keys: dict[int, list[int]] = {}
        self._tables: dict[int, list[int]] = {}

    async def serve(self) -> None:
        """Say the port, then answer each line of the bench until it closes our input."""
        server = await serve(
            "127.0.0.1",
            0,
            identity=Identity("decode", "owner", GEOMETRY.facts()),
            handler=self._handle,
            landing=self.leases,
        )
        _say({"port": server.port})
        while line := await asyncio.to_thread(sys.stdin.readline):
            _say(await self._grant(json.loads(line)))
        server.abort()
        await server.wait_closed()
        self._host.close()
        self._device.close()

    async def _grant(self, wish: dict[str, Any]) -> dict[str, Any]:
        """A lease of ``num_tokens`` tokens for the writer, by RDMA or TCP."""
        await self._attached.wait()
        generation = next(self._generations)
        name = f"s{generation}"
        table = self.blocks.allocate(name, -(-wish["num_tokens"] // BLOCK_SIZE))
        self._tables[generation] = table
        self.leases.grant(
            name,
            generation,
            table,
            wish["num_tokens"],
            writer="writer",
            is_placed=wish["is_placed"],
            is_checked=wish["is_checked"],
        )
        keys = []
        if wish["is_placed"] and self._attachment is not None:
            keys = self._keys[generation] = await self._attachment.open_keys()
        return {"sequence_id": name, "generation": generation, "table": table, "keys": keys}

    async def _handle(self, peer: Peer) -> None:
        attaching = asyncio.create_task(self._host.attach(peer))
        async for message in peer:
            if isinstance(message, Attached):
                self._host.attached(peer, message)
                self._attachment = await attaching
                self._attached.set()
            elif isinstance(message, Commit):
                self.leases.commit(message)
                await peer.send(CommitAck(message.sequence_id, message.generation))
                keys = self._keys.pop(message.generation, [])
                if self._attachment is not None:
                    self._attachment.close_keys(keys)
                self.blocks.free(self._tables.pop(message.generation), message.sequence_id)
        if self._attachment is not None:
            self._attachment.cut()


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


async def main(device: str, num_tokens: str, num_queue_pairs: str) -> None:
    """Arguments as of the command line."""
    await Owner(device, int(num_tokens), int(num_queue_pairs)).serve()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
