"""An owner of a region and its writers, each on a real TCP connection; for tests of ``mapped``."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from kvproto.blocks import BlockPool
from kvproto.digest import RegionDigests
from kvproto.errors import ConnectionLost
from kvproto.geometry import KvGeometry, Layer, PoolLayout, Region
from kvproto.handshake import Identity
from kvproto.lease import LeaseTable
from kvproto.mapped import MappedAttachment, MappedWriter, answer_offer
from kvproto.mapped_host import Attachment, MappedHost
from kvproto.messages import Attached, Commit, Message, Offer
from kvproto.region import Region as MappedRegion
from kvproto.tcp import Peer, connect, serve

WAIT_S = 10.0
# Two regions a token in the first layer, a window in the second, a state in the third.
GEOMETRY = KvGeometry(
    (
        Layer("layers.0", (Region("k", 2, 8), Region("v", 2, 8))),
        Layer("layers.1", (Region("latent", 1, 24),), window_tokens=5),
        Layer("layers.2", (Region("state", 1, 40, "sequence"),)),
    ),
    "float32",
)
LAYOUT = PoolLayout(GEOMETRY, 16, 4)


class Kv:
    """KV of a prompt: for each layer its first token, and the bytes of each region."""

    def __init__(self, geometry: KvGeometry, num_tokens: int, seed: int) -> None:
        self.geometry, self.num_tokens = geometry, num_tokens
        self.first = [layer.first_needed_token(num_tokens) for layer in geometry.layers]
        self.regions: list[list[memoryview]] = []
        for layer, first in enumerate(self.first):
            sizes = geometry.region_nbytes(layer, num_tokens - first, is_last=True)
            self.regions.append(
                [
                    memoryview(bytearray(random.Random(f"{seed} {layer}").randbytes(n)))
                    for n in sizes
                ]
            )

    def pieces(self, layer: int, first_token: int, num_tokens: int) -> list[memoryview]:
        """Buffers of one write."""
        pieces = []
        is_last = first_token + num_tokens == self.num_tokens
        for region, view in zip(
            self.geometry.layers[layer].regions, self.regions[layer], strict=True
        ):
            if region.per == "sequence":
                pieces.append(view if is_last else view[:0])
                continue
            row = self.geometry.row_nbytes(region)
            start = (first_token - self.first[layer]) * row
            pieces.append(view[start : start + num_tokens * row])
        return pieces

    def digests(self) -> list[int]:
        """What COMMIT must say."""
        digests = RegionDigests(self.geometry)
        for layer, views in enumerate(self.regions):
            for region, view in enumerate(views):
                digests.update(layer, region, view)
        return digests.values()

    def commit(self, sequence_id: str, generation: int) -> Commit:
        """A true COMMIT."""
        nbytes = self.geometry.prompt_nbytes(self.num_tokens)
        return Commit(
            sequence_id, generation, self.num_tokens, nbytes, self.digests(), 0.0, 0.0, 0.0
        )

    def in_pool(self, layout: PoolLayout, pool: memoryview, table: list[int]) -> bool:
        """The pool holds exactly these bytes in these blocks."""
        for layer, views in enumerate(self.regions):
            first = self.first[layer]
            spans = layout.pieces(layer, table, first, self.num_tokens - first, is_last=True)
            for view, pieces in zip(views, spans, strict=True):
                if b"".join(pool[start : start + nbytes] for start, nbytes in pieces) != view:
                    return False
        return True


class Owner:
    """A decode worker reduced to its pool and the region in which it lies."""

    def __init__(self, layout: PoolLayout, directory: Path, instance_id: str = "d") -> None:
        self.layout = layout
        self.directory = directory
        self.region = MappedRegion.create(layout, instance_id)
        self.blocks = BlockPool(layout.num_blocks)
        self.leases = LeaseTable(layout, self.region.pool, self.blocks)
        self.identity = Identity(
            "decode", instance_id, layout.geometry.facts(), carriers=("mapped", "tcp")
        )
        self.peers: asyncio.Queue[Peer] = asyncio.Queue()
        # Of ``attached_pair``.
        self.peer: Peer | None = None
        self.attachment: Attachment | None = None
        self.letters: dict[tuple[str, int], asyncio.Queue[Message]] = {}
        self.generations = itertools.count(1)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["Owner"]:
        """Listen on TCP and in the directory."""
        self.host = await MappedHost.start(self.region, self.directory)
        server = await serve(
            "127.0.0.1", 0, identity=self.identity, handler=self._handle, landing=self.leases
        )
        self.port = server.port
        try:
            yield self
        finally:
            server.abort()
            await server.wait_closed()
            await self.host.close()
            # The connections that a test still names know the lease table, and it the pool.
            self.leases._pool.release()
            assert self.region.close()

    async def _handle(self, peer: Peer) -> None:
        self.peers.put_nowait(peer)
        with contextlib.suppress(ConnectionLost):
            async for message in peer:
                if isinstance(message, Attached):
                    self.host.attached(peer, message)
                elif hasattr(message, "sequence_id"):
                    key = (message.sequence_id, getattr(message, "generation", 0))
                    self.box(*key).put_nowait(message)

    def box(self, sequence_id: str, generation: int) -> "asyncio.Queue[Message]":
        """Letters about one transfer."""
        return self.letters.setdefault((sequence_id, generation), asyncio.Queue())

    async def letter(self, sequence_id: str, generation: int) -> Message:
        """The next of them."""
        return await asyncio.wait_for(self.box(sequence_id, generation).get(), WAIT_S)

    @contextlib.asynccontextmanager
    async def open_letters(
        self, sequence_id: str, generation: int
    ) -> AsyncIterator[Callable[[float], Awaitable[object]]]:
        """As ``probe.measure`` wants them."""
        box = self.box(sequence_id, generation)
        yield lambda timeout_s: asyncio.wait_for(box.get(), timeout_s)
        del self.letters[sequence_id, generation]

    def grant(self, num_tokens: int, writer: str = "p", **how: bool) -> tuple[str, int, list[int]]:
        """(sequence, generation, blocks) of a new lease for the mapped carrier."""
        generation = next(self.generations)
        sequence_id = f"s{generation}"
        table = self.blocks.allocate(sequence_id, -(-num_tokens // self.layout.block_size))
        self.leases.grant(
            sequence_id, generation, table, num_tokens, writer=writer, is_placed=True, **how
        )
        return sequence_id, generation, table


class Writer:
    """A prefill worker reduced to its connection; answers offers by itself."""

    def __init__(self, peer: Peer, geometry: KvGeometry, directory: Path) -> None:
        self.peer, self.geometry, self.directory = peer, geometry, directory
        self.offers: asyncio.Queue[MappedAttachment | None] = asyncio.Queue()
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.attachment: MappedAttachment | None = None
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def dial(
        cls,
        owner: Owner,
        directory: Path | None = None,
        geometry: KvGeometry | None = None,
        name: str = "p",
    ) -> "Writer":
        """Connect; facts are the owner's, so that nothing but the carrier can refuse."""
        identity = Identity(
            "prefill", name, owner.layout.geometry.facts(), carriers=("mapped", "tcp")
        )
        peer = await connect("127.0.0.1", owner.port, identity=identity, timeout_s=WAIT_S)
        return cls(peer, geometry or owner.layout.geometry, directory or owner.directory)

    async def _read(self) -> None:
        with contextlib.suppress(ConnectionLost):
            async for message in self.peer:
                if isinstance(message, Offer):
                    self.attachment = await answer_offer(
                        self.peer, message, self.geometry, directory=self.directory
                    )
                else:
                    self.messages.put_nowait(message)

    async def message(self) -> Message:
        """The next one that is no OFFER."""
        return await asyncio.wait_for(self.messages.get(), WAIT_S)

    async def close(self) -> None:
        """End TCP, then let go of the memory."""
        await self.peer.close()
        await self._reading
        if self.attachment is not None:
            self.attachment.close()


@contextlib.asynccontextmanager
async def attached_pair(
    directory: Path, layout: PoolLayout = LAYOUT, **writer_settings: int
) -> AsyncIterator[tuple[Owner, Writer, MappedWriter]]:
    """An owner, a writer that is attached to it, and what writes."""
    async with Owner(layout, directory).serving() as owner:
        writer = await Writer.dial(owner)
        owner.peer = await owner.peers.get()
        owner.attachment = attachment = await owner.host.attach(owner.peer)
        assert writer.attachment is not None
        mapped = MappedWriter(writer.peer, writer.attachment, **writer_settings)
        try:
            yield owner, writer, mapped
        finally:
            await mapped.close()
            await writer.close()
            await asyncio.wait_for(attachment.wait_gone(), WAIT_S)


async def transfer(
    owner: Owner, writer: Writer, mapped: MappedWriter, kv: Kv, chunk_tokens: int
) -> list[int]:
    """A whole transfer, committed and acknowledged; its blocks."""
    sequence_id, generation, table = owner.grant(kv.num_tokens)
    mapped.begin(sequence_id, generation, table, kv.num_tokens)
    digests = RegionDigests(kv.geometry)
    for layer, first in enumerate(kv.first):
        for start in range(first, kv.num_tokens, chunk_tokens):
            count = min(chunk_tokens, kv.num_tokens - start)
            pieces = kv.pieces(layer, start, count)
            await mapped.write(sequence_id, generation, layer, start, count, pieces, digests)
    await mapped.flush()
    commit = kv.commit(sequence_id, generation)
    assert digests.values() == commit.digests
    await writer.peer.send(commit)
    while not isinstance(letter := await owner.letter(sequence_id, generation), Commit):
        pass
    owner.leases.commit(letter)
    mapped.end(sequence_id, generation)
    return table
