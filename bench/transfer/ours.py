"""kvproto's own carriers.

A transfer is what a prefill worker sends for one prompt: each layer's K and V in token order, as
WRITE frames or into the receiver's mapped region, then COMMIT; it is complete when COMMIT_ACK
arrives, which the receiver sends after it has checked counts and digests. The grant of the blocks
precedes it, as everywhere.
"""

from __future__ import annotations

import asyncio
import mmap
import tempfile
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import uvloop

from bench.transfer.channel import Channel
from bench.transfer.contestant import Contestant, Medium, Unavailable
from bench.transfer.memory import Memory
from kvproto.blocks import BlockPool
from kvproto.carrier import KvWriter
from kvproto.digest import RegionDigests
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.handshake import Identity
from kvproto.lease import LeaseTable
from kvproto.mapped import MappedWriter, answer_offer
from kvproto.mapped_host import MappedHost
from kvproto.messages import Attached, Commit, CommitAck, Offer
from kvproto.region import POOL_OFFSET, Region, unavailable_reason
from kvproto.tcp import serve
from kvproto.tcp_link import Link, Links, open_link

# K and V heads, head size and element of Llama 3 8B and Qwen3 8B; few layers, so that a small
# transfer is possible: 16 KiB a token.
GEOMETRY = KvGeometry.uniform(4, 8, 128, "bfloat16", [f"layers.{layer}" for layer in range(4)])
TOKEN_NBYTES = GEOMETRY.kv_token_nbytes
BLOCK_SIZE = 16
BLOCK_NBYTES = BLOCK_SIZE * TOKEN_NBYTES
# Body bytes of one call of ``KvWriter.write``; what a chunk of prefill brings a layer.
WRITE_NBYTES = 8 << 20
TIMEOUT_S = 60.0


def layout_of(nbytes: int) -> PoolLayout:
    """The pool that fills ``nbytes``, a multiple of BLOCK_NBYTES."""
    return PoolLayout(GEOMETRY, nbytes // BLOCK_NBYTES, BLOCK_SIZE)


class RegionMemory(Memory):
    """The pool of a region that writers may map."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.view = region.pool
        # A mapping of our own, because the region's is not ours to give pages back with.
        self._mapping = mmap.mmap(region.fd, 0)

    def release(self) -> None:
        """Cut the pool's pages out of the file; the writer's mapping loses them too."""
        nbytes = len(self._mapping) - POOL_OFFSET
        self._mapping.madvise(mmap.MADV_REMOVE, POOL_OFFSET, nbytes)


class DecodeSide:
    """The receiver: grants blocks, takes what is written, checks COMMIT and acknowledges it."""

    def __init__(
        self, memory: memoryview, side: Channel, *, region: Region | None, has_checksum: bool
    ) -> None:
        self._side = side
        self._region = region
        self._has_checksum = has_checksum
        self._generation = 0
        layout = layout_of(memory.nbytes)
        self._blocks = BlockPool(layout.num_blocks)
        self._leases = LeaseTable(layout, memory, self._blocks)
        self._tables: dict[int, list[int]] = {}
        self._host: MappedHost | None = None

    async def run(self) -> None:
        """Serve until ``side`` ends."""
        loop = asyncio.get_running_loop()
        server = await serve(
            "127.0.0.1",
            0,
            identity=Identity("decode", "bench-decode", facts=GEOMETRY.facts()),
            handler=Links(self._serve, is_complete=self._leases.is_complete).handle,
            landing=self._leases,
        )
        with tempfile.TemporaryDirectory() as directory:
            if self._region is not None:
                self._host = await MappedHost.start(self._region, Path(directory))
            self._side.send(port=server.port, directory=directory)
            await loop.run_in_executor(None, self._side.receive)
        # From here on nothing needs the directory: both processes are killed in the end.
        self._side.send(done=True)
        while True:
            order = await loop.run_in_executor(None, self._side.receive)
            generation, table = self._grant(order["num_tokens"])
            self._side.send(generation=generation, block_table=table)

    def _grant(self, num_tokens: int) -> tuple[int, list[int]]:
        self._generation += 1
        generation, sequence_id = self._generation, f"sequence-{self._generation}"
        table = self._blocks.allocate(sequence_id, -(-num_tokens // BLOCK_SIZE))
        self._leases.grant(
            sequence_id,
            generation,
            table,
            num_tokens,
            writer="bench-prefill",
            is_placed=self._region is not None,
            is_checked=self._has_checksum,
        )
        self._tables[generation] = table
        return generation, table

    async def _serve(self, link: Link) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self._host is not None:
                tasks.create_task(self._host.attach(link.control))
            async for message in link:
                if isinstance(message, Commit):
                    self._leases.commit(message)
                    await link.send(CommitAck(message.sequence_id, message.generation))
                    table = self._tables.pop(message.generation)
                    self._blocks.free(table, message.sequence_id)
                elif isinstance(message, Attached) and self._host is not None:
                    self._host.attached(link.control, message)


class Ours(Contestant):
    """What both carriers share.

    Args:
        write_nbytes: body bytes of one write.
    """

    is_ours = True
    min_nbytes = TOKEN_NBYTES
    num_connections: ClassVar[int] = 1
    # What writers map, if the carrier has such a thing; made by ``memory``.
    _region: Region | None = None

    def __init__(self, write_nbytes: int = WRITE_NBYTES) -> None:
        self._step = max(1, write_nbytes // GEOMETRY.write_nbytes(0, 1))

    def spans(self, memory_nbytes: int, nbytes: int) -> list[tuple[int, int]]:
        """The first tokens of each region of the pool."""
        layout = layout_of(memory_nbytes)
        table = list(range(layout.num_blocks))
        return [
            span
            for layer in range(GEOMETRY.num_layers)
            for spans in layout.pieces(layer, table, 0, nbytes // TOKEN_NBYTES)
            for span in spans
        ]

    def serve(self, memory: memoryview, side: Channel) -> None:
        """A decode worker's data plane on uvloop, as the service runs it."""
        decode = DecodeSide(memory, side, region=self._region, has_checksum=self.has_checksum)
        uvloop.run(decode.run())

    async def connect(self, memory: memoryview, side: Channel) -> None:
        """Connect, and attach where there is something to attach to."""
        self._memory = memory
        self._layout = layout_of(memory.nbytes)
        self._side = side
        decode = side.receive()
        self._link = await open_link(
            "127.0.0.1",
            decode["port"],
            identity=Identity("prefill", "bench-prefill", facts=GEOMETRY.facts()),
            timeout_s=TIMEOUT_S,
            num_lanes=self.num_connections,
        )
        self._writer = await self.open_writer(self._link, Path(decode["directory"]))
        side.ask(attached=True)

    @abstractmethod
    async def open_writer(self, link: Link, directory: Path) -> KvWriter:
        """What writes KV to the receiver."""

    async def prepare(self, nbytes: int) -> None:
        """Have the blocks granted."""
        self._num_tokens = nbytes // TOKEN_NBYTES
        granted = self._side.ask(num_tokens=self._num_tokens)
        self._generation, self._table = granted["generation"], granted["block_table"]
        self._sequence_id = f"sequence-{self._generation}"

    async def disconnect(self) -> None:
        """Close the connection."""
        await self._link.close()

    async def transfer(self, nbytes: int) -> None:
        """From the first write to COMMIT_ACK."""
        digests = RegionDigests(GEOMETRY) if self.has_checksum else None
        for first_token in range(0, self._num_tokens, self._step):
            num_tokens = min(self._step, self._num_tokens - first_token)
            for layer in range(GEOMETRY.num_layers):
                await self._writer.write(
                    self._sequence_id,
                    self._generation,
                    layer,
                    first_token,
                    num_tokens,
                    self._buffers(layer, first_token, num_tokens),
                    digests,
                )
        # Digests are complete then, as a prefill worker needs them.
        await self._writer.flush()
        commit = Commit(
            sequence_id=self._sequence_id,
            generation=self._generation,
            num_tokens=self._num_tokens,
            nbytes=GEOMETRY.prompt_nbytes(self._num_tokens),
            digests=[] if digests is None else digests.values(),
            queue_s=0.0,
            prefill_s=0.0,
            handoff_s=0.0,
        )
        await self._link.send(commit)
        ack = await self._link.receive()
        if ack != CommitAck(self._sequence_id, self._generation):
            raise ConnectionError(f"COMMIT was answered by {ack}")

    def _buffers(self, layer: int, first_token: int, num_tokens: int) -> Sequence[memoryview]:
        """Our pool's memory of these tokens; our blocks have the numbers that theirs have."""
        pieces = self._layout.pieces(layer, self._table, first_token, num_tokens)
        return [self._memory[start : start + size] for spans in pieces for start, size in spans]


class TcpUnchecked(Ours):
    """One connection; nothing covers the bodies but TCP's own sum."""

    name: ClassVar[str] = "ours TCP x1 unchecked"
    medium = Medium.TCP

    async def open_writer(self, link: Link, directory: Path) -> KvWriter:
        """Frames."""
        return link.writer(GEOMETRY)


class TcpChecked(TcpUnchecked):
    """One connection; digests on both sides."""

    name: ClassVar[str] = "ours TCP x1 checked"
    has_checksum = True


class TcpX2Unchecked(TcpUnchecked):
    """Two connections; each layer has its own."""

    name: ClassVar[str] = "ours TCP x2 unchecked"
    num_connections = 2


class TcpX2Checked(TcpX2Unchecked):
    """Two connections; digests on both sides."""

    name: ClassVar[str] = "ours TCP x2 checked"
    has_checksum = True


class TcpX4Unchecked(TcpUnchecked):
    """Four connections."""

    name: ClassVar[str] = "ours TCP x4 unchecked"
    num_connections = 4


class TcpX4Checked(TcpX4Unchecked):
    """Four connections; digests on both sides."""

    name: ClassVar[str] = "ours TCP x4 checked"
    has_checksum = True


class MappedUnchecked(Ours):
    """The sender writes into the receiver's region."""

    name: ClassVar[str] = "ours mapped unchecked"
    medium = Medium.MAPPED

    def check(self) -> None:
        """Needs the system's support."""
        if reason := unavailable_reason():
            raise Unavailable(reason)

    def memory(self, nbytes: int, *, has_huge_pages: bool) -> RegionMemory:
        """A region; huge pages are its own affair."""
        self._region = Region.create(layout_of(nbytes), "bench-decode")
        memory = RegionMemory(self._region)
        memory.release()
        return memory

    async def open_writer(self, link: Link, directory: Path) -> KvWriter:
        """Attach to the region that is offered."""
        offer = await link.receive()
        attachment = None
        if isinstance(offer, Offer):
            attachment = await answer_offer(link.control, offer, GEOMETRY, directory=directory)
        if attachment is None:
            raise Unavailable("the region could not be attached")
        return MappedWriter(link.control, attachment)

    async def prepare(self, nbytes: int) -> None:
        """Have the blocks granted; the writer knows them then."""
        await super().prepare(nbytes)
        self._mapped.begin(
            self._sequence_id,
            self._generation,
            self._table,
            self._num_tokens,
            is_checked=self.has_checksum,
        )

    async def transfer(self, nbytes: int) -> None:
        """As on TCP; then the transfer is over."""
        await super().transfer(nbytes)
        self._mapped.end(self._sequence_id, self._generation)

    @property
    def _mapped(self) -> MappedWriter:
        writer: Any = self._writer
        assert isinstance(writer, MappedWriter), "open_writer makes one"
        return writer


class MappedChecked(MappedUnchecked):
    """Digests on both sides."""

    name: ClassVar[str] = "ours mapped checked"
    has_checksum = True
