"""Mapped memory under the carrier contract: the same connections as TCP, and one region.

Run as a program it is the writer process of ``MappedRig.spawn_writer``.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvproto.carrier import KvWriter
from kvproto.errors import CarrierUnavailable, ConnectionLost, KvProtoError, LocalProtocolError
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.mapped import MappedWriter, answer_offer
from kvproto.mapped_host import Attachment, MappedHost
from kvproto.messages import Offer
from kvproto.region import Region
from tests.kvproto.carrier_contract import (
    LARGE,
    ROOT,
    SMALL,
    WAIT_S,
    Damage,
    Grant,
    Kv,
    PlacingReceiver,
    PlacingSender,
    Sender,
    SlowWrite,
    TcpRig,
    WriterProcess,
    tcp_writer_connection,
    until,
)
from tests.kvproto.fault_proxy import Faults

# Below a chunk of LARGE: slow writes are held in the copying thread.
THREAD_MIN_NBYTES = 64 * 1024


class RegionMemory:
    """The pool's memory as ``Receiver`` closes it."""

    def __init__(self, region: Region) -> None:
        self.region = region

    def close(self) -> None:
        if not self.region.close():
            raise BufferError("somebody still holds a view of the region")


class MappedReceiver(PlacingReceiver):
    """Grants for the mapped carrier; proof is ABORT_ACK or the end of an attachment."""

    def __init__(self, geometry: KvGeometry, num_blocks: int, block_size: int) -> None:
        self.region = Region.create(PoolLayout(geometry, num_blocks, block_size), "d")
        super().__init__(self.region.pool, geometry, num_blocks, block_size)
        self.memory = RegionMemory(self.region)

    def writer_ended(self, name: str, error: KvProtoError) -> None:
        super().writer_ended(name, error)
        for grant in self.grants.values():
            if grant.writer == name and not grant.released.is_set() and self.is_proven(grant):
                self.release(grant)

    async def attach(self, name: str, tasks: set["asyncio.Task[None]"]) -> None:
        """Offer the region to a writer that has connected."""
        await until(lambda: name in self.peers)
        attachment = await self.host.attach(self.peers[name], timeout_s=2)
        self.attachments[name] = attachment
        tasks.add(asyncio.create_task(self._watch(name, attachment)))

    async def _watch(self, name: str, attachment: Attachment) -> None:
        await attachment.wait_gone()
        if self.attachments.get(name) is attachment:
            self.writer_ended(name, ConnectionLost("the writer has detached"))


class HeldRegion:
    """In place of a region: from the second copy on it waits until it may go on."""

    def __init__(self, region: Any) -> None:
        self._region = region
        self._num_put = 0
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def put(self, offset: int, source: memoryview) -> None:
        if self._num_put == 1:
            self.reached.set()
            self.go_on.wait(WAIT_S)
        self._num_put += 1
        self._region.put(offset, source)


class DamagingRegion:
    """In place of a region: one bit is flipped between the digest and the copy."""

    def __init__(self, region: Any, nbytes: int) -> None:
        self._region = region
        self._damage = Damage(nbytes)

    def put(self, offset: int, source: memoryview) -> None:
        self._region.put(offset, self._damage.of(source))


class MappedSender(PlacingSender):
    """A sender that has the region mapped."""

    placing: MappedWriter | None


@dataclass
class WrongModel:
    """A writer for another model than the region's: there is none."""

    geometry: KvGeometry

    async def write(self, *_: object) -> None:
        raise LocalProtocolError(f"the region is not of {self.geometry.layer_names}")

    async def flush(self) -> None:
        """Nothing to flush."""


@dataclass
class MappedSlowWrite(SlowWrite):
    """A copy that is held in its thread."""

    sender: MappedSender
    held: HeldRegion

    async def go_on(self) -> None:
        self.held.go_on.set()
        with contextlib.suppress(ConnectionLost):
            async with asyncio.timeout(WAIT_S):
                await self.sender.placing.flush()


@dataclass
class Tasks:
    """Watching tasks of the rig."""

    all: set["asyncio.Task[None]"] = field(default_factory=set)

    async def cancel(self) -> None:
        for task in self.all:
            task.cancel()
        if self.all:
            await asyncio.wait(self.all)


class MappedRig(TcpRig):
    """PLACED on TCP through a fault proxy, and the bytes in a region."""

    name = "mapped"
    end_is_proof = False

    def __init__(
        self,
        geometry: KvGeometry = SMALL,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        keepalive_s: float = 5.0,
    ) -> None:
        self.keepalive_s = keepalive_s
        self.receiver = MappedReceiver(geometry, num_blocks, block_size)
        self.receiver.end_is_proof = False
        self.senders: list[Sender] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._tasks = Tasks()
        self._folder = tempfile.TemporaryDirectory(prefix="mapped-rig-")
        self.directory = Path(self._folder.name) / "sockets"

    async def start(self) -> None:
        await super().start()
        self.receiver.host = await MappedHost.start(self.receiver.region, self.directory)

    async def stop(self) -> None:
        await super().stop()
        await until(lambda: not self.receiver.host.stats()["num_connections"])
        await self._tasks.cancel()
        await self.receiver.host.close()
        self._folder.cleanup()

    @property
    def num_writers(self) -> int:
        return super().num_writers + self.receiver.host.stats()["num_connections"]

    async def dial(
        self, name: str = "p", to_receiver: Faults | None = None, to_sender: Faults | None = None
    ) -> Sender:
        plain = await super().dial(name, to_receiver, to_sender)
        # The same connection and reading task, with a region.
        plain.__class__ = MappedSender
        plain.instance_id = name
        attaching = asyncio.create_task(self.receiver.attach(name, self._tasks.all))
        try:
            offer = await plain.answer("")
            if not isinstance(offer, Offer):  # an ERROR about what came before
                raise CarrierUnavailable(f"{offer} came in place of an offer")
            attachment = await answer_offer(
                plain.peer, offer, self.receiver.layout.geometry, directory=self.directory
            )
            if attachment is None:
                raise CarrierUnavailable("the offer was damaged on its way")
            plain.placing = MappedWriter(
                plain.peer, attachment, thread_min_nbytes=THREAD_MIN_NBYTES
            )
            async with asyncio.timeout(WAIT_S):
                await attaching
        except (KvProtoError, TimeoutError) as exc:
            attaching.cancel()
            await asyncio.wait([attaching])
            await plain.drop()
            if isinstance(exc, TimeoutError):
                raise CarrierUnavailable("the owner did not attach in time") from exc
            raise
        return plain

    def writer(self, sender: Sender, grant: Grant, geometry: KvGeometry) -> KvWriter:
        assert isinstance(sender, MappedSender)
        if geometry != self.receiver.layout.geometry:
            return WrongModel(geometry)
        # PREFILL goes to the writer that the lease names, and only while the lease is open.
        if sender.instance_id == grant.writer and not grant.outcome.done():
            with contextlib.suppress(KvProtoError):  # begun already
                sender.placing.begin(
                    grant.sequence_id, grant.generation, grant.block_table, grant.num_tokens
                )
        return sender.placing

    def damage_kv(self, sender: Sender, nbytes: int) -> None:
        assert isinstance(sender, MappedSender)
        assert sender.placing is not None
        region: Any = sender.placing._region
        sender.placing._region = DamagingRegion(region, nbytes)  # type: ignore[assignment]

    async def slow_write(self, sender: Sender, grant: Grant, kv: Kv, layer: int) -> SlowWrite:
        assert isinstance(sender, MappedSender)
        writer = self.writer(sender, grant, kv.geometry)
        sender.held = held = HeldRegion(sender.placing._region)
        sender.placing._region = held
        await writer.write(
            grant.sequence_id,
            grant.generation,
            layer,
            0,
            grant.num_tokens,
            kv.pieces(layer, 0, grant.num_tokens),
        )
        await until(held.reached.is_set)
        return MappedSlowWrite(sender, held)

    async def spawn_writer(self, grant: Grant, value: int) -> WriterProcess:
        layout = self.receiver.layout
        self._proxy.to_target = self._proxy.to_source = Faults()
        plan = {
            "port": self._proxy.port,
            "directory": str(self.directory),
            "writer": grant.writer,
            "block_table": grant.block_table,
            "num_tokens": grant.num_tokens,
            "block_size": layout.block_size,
            "num_blocks": layout.num_blocks,
            "value": value,
        }
        process = self._spawn_mapped(plan)
        async with asyncio.timeout(WAIT_S):
            link = await self._proxy.next_link()
            await self.receiver.attach(grant.writer, self._tasks.all)
        offset = layout.pieces(0, grant.block_table, 0, 1)[0][0][0]
        await until(lambda: self.receiver.pool[offset] == value)
        return WriterProcess(process, link)

    def _spawn_mapped(self, plan: dict[str, Any]) -> "subprocess.Popen[bytes]":
        module = [sys.executable, "-m", "tests.kvproto.mapped_rig"]
        process = subprocess.Popen([*module, json.dumps(plan)], cwd=ROOT)
        self.processes.append(process)
        return process


async def main(plan: dict[str, Any]) -> None:
    """Attach, then write one value into the blocks again and again until the connection ends."""
    peer = await tcp_writer_connection(plan["port"], plan["writer"], LARGE, keepalive_s=5.0)
    layout = PoolLayout(LARGE, plan["num_blocks"], plan["block_size"])
    stop = threading.Event()
    threads: list[threading.Thread] = []
    attachment = None
    with contextlib.suppress(ConnectionLost):
        async for message in peer:
            if isinstance(message, Offer):
                attachment = await answer_offer(
                    peer, message, LARGE, directory=Path(plan["directory"])
                )
                assert attachment is not None
                arguments = (attachment.region, layout, plan, stop)
                threads.append(threading.Thread(target=scribble, args=arguments))
                threads[-1].start()
    stop.set()
    for thread in threads:
        thread.join()
    if attachment is not None:
        attachment.close()


def scribble(region: Any, layout: PoolLayout, plan: dict[str, Any], stop: threading.Event) -> None:
    """The worst writer: it asks nobody."""
    table, num_tokens = plan["block_table"], plan["num_tokens"]
    pieces: Sequence[tuple[int, memoryview]] = [
        (offset, memoryview(bytearray([plan["value"]]) * nbytes))
        for layer in range(layout.geometry.num_layers)
        for spans in layout.pieces(layer, table, 0, num_tokens)
        for offset, nbytes in spans
    ]
    while not stop.is_set():
        for offset, piece in pieces:
            region.put(offset, piece)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
