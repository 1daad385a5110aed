"""RDMA under the carrier contract: the same connections as TCP, and a queue pair beside each.

The receiver's pool is on rxe1, the writers are on rxe0, so that every byte crosses the wire between
the two. Run as a program it is the writer process of ``RdmaRig.spawn_writer``.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from kvproto.carrier import KvWriter
from kvproto.digest import RegionDigests
from kvproto.errors import (
    CarrierLost,
    CarrierUnavailable,
    ConnectionLost,
    KvProtoError,
    LocalProtocolError,
)
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.messages import AbortAck, Commit, Message, Offer
from kvproto.rdma.device import Device
from kvproto.rdma.host import RdmaHost
from kvproto.rdma.ports import choose_port, read_ports
from kvproto.rdma.posting import RemoteWrite
from kvproto.rdma.queue_pair import QueuePair
from kvproto.rdma.settings import RdmaSettings
from kvproto.rdma.verbs import load
from kvproto.rdma.writer import RdmaWriter, answer_offer
from kvproto.tcp import Peer
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

OWNER_DEVICE: Final = "rxe1"
WRITER_DEVICE: Final = "rxe0"
# A peer that is gone is noticed within half a second.
SETTINGS: Final = RdmaSettings(ack_timeout_exponent=13, retry_count=3, completion_timeout_s=5.0)


def open_device(name: str, settings: RdmaSettings = SETTINGS) -> Device:
    """A device of the machine that the rig runs on."""
    chosen = choose_port(read_ports(), device=name)
    return Device.open(load(), chosen, replace(settings, device=name))


class RdmaReceiver(PlacingReceiver):
    """Grants for RDMA. The end of a writer's connection is proof, since it is cut off then."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.keys: dict[int, list[int]] = {}

    async def open_keys(self, grant: Grant) -> list[int]:
        """Once for each lease."""
        if grant.generation not in self.keys:
            self.keys[grant.generation] = await self.attachments[grant.writer].open_keys()
        return self.keys[grant.generation]

    def writer_ended(self, name: str, error: KvProtoError) -> None:
        attachment = self.attachments.pop(name, None)
        if attachment is not None:
            attachment.cut()
        super().writer_ended(name, error)

    async def _received(self, peer: Peer, message: Message) -> None:
        await super()._received(peer, message)
        if isinstance(message, Commit | AbortAck):
            grant = self.grants[message.generation]
            attachment = self.attachments.get(grant.writer)
            is_committed = grant.outcome.done() and grant.outcome.result() is None
            if attachment is not None and (is_committed or grant.released.is_set()):
                attachment.close_keys(self.keys.pop(message.generation, []))


class HeldPair:
    """In place of a queue pair: of the first batch it posts a half, and then waits."""

    def __init__(self, pair: QueuePair) -> None:
        self._pair = pair
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    async def post(self, writes: Sequence[RemoteWrite], key: int) -> int:
        half = max(1, len(writes) // 2)
        await self._pair.wait(await self._pair.post(writes[:half], key))
        self.reached.set()
        async with asyncio.timeout(WAIT_S):
            await self.go_on.wait()
        return await self._pair.post(writes[half:], key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair, name)


class DamagingStaging:
    """In place of the staging memory: one bit is flipped on the way into it."""

    def __init__(self, staging: Any, nbytes: int) -> None:
        self._staging = staging
        self._damage = Damage(nbytes)

    def put(self, source: memoryview) -> Iterator[tuple[int, int]]:
        return self._staging.put(self._damage.of(source))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._staging, name)


class RdmaSender(PlacingSender):
    """A sender with a queue pair."""

    placing: RdmaWriter | None


@dataclass
class KeyedWriter:
    """Begins the transfer of a grant with its keys, as a worker does when PREFILL comes."""

    rig: "RdmaRig"
    sender: RdmaSender
    grant: Grant
    geometry: KvGeometry

    async def write(
        self,
        sequence_id: str,
        generation: int,
        layer: int,
        first_token: int,
        num_tokens: int,
        buffers: Sequence[memoryview],
        digests: RegionDigests | None = None,
    ) -> None:
        if self.geometry != self.rig.receiver.layout.geometry:
            raise LocalProtocolError(f"the pool is not of {self.geometry.layer_names}")
        await self._begin()
        with as_connection_lost():
            await self.sender.placing.write(
                sequence_id, generation, layer, first_token, num_tokens, buffers, digests
            )

    async def flush(self) -> None:
        with as_connection_lost():
            await self.sender.placing.flush()

    async def _begin(self) -> None:
        grant, receiver = self.grant, self.rig.receiver
        # PREFILL goes to the writer that the lease names, and only while the lease is open.
        if self.sender.instance_id != grant.writer or grant.outcome.done():
            return
        if grant.writer not in receiver.attachments:
            return
        keys = await receiver.open_keys(grant)
        with contextlib.suppress(KvProtoError):  # begun already
            self.sender.placing.begin(
                grant.sequence_id, grant.generation, grant.block_table, grant.num_tokens, keys=keys
            )


@contextlib.contextmanager
def as_connection_lost() -> Iterator[None]:
    """The contract knows one word for a carrier that broke."""
    try:
        yield
    except CarrierLost as exc:
        raise ConnectionLost(str(exc)) from exc


@dataclass
class RdmaSlowWrite(SlowWrite):
    """A write of which a half is posted."""

    sender: RdmaSender
    held: HeldPair
    writing: "asyncio.Task[None]"

    async def go_on(self) -> None:
        self.held.go_on.set()
        with contextlib.suppress(ConnectionLost, CarrierLost):
            async with asyncio.timeout(WAIT_S):
                await self.writing
                await self.sender.placing.flush()


class RdmaRig(TcpRig):
    """PLACED on TCP through a fault proxy, and the bytes by RDMA WRITE."""

    name = "rdma"
    settings: ClassVar[RdmaSettings] = SETTINGS

    def __init__(
        self,
        geometry: KvGeometry = SMALL,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        keepalive_s: float = 5.0,
    ) -> None:
        self.keepalive_s = keepalive_s
        memory = self.allocate(PoolLayout(geometry, num_blocks, block_size).nbytes)
        self.receiver = RdmaReceiver(memory, geometry, num_blocks, block_size)
        self.senders: list[Sender] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._writing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await super().start()
        self._owner_device = open_device(OWNER_DEVICE, self.settings)
        self._writer_device = open_device(WRITER_DEVICE, self.settings)
        receiver = self.receiver
        receiver.host = RdmaHost(self._owner_device, receiver.layout, receiver.pool)

    async def stop(self) -> None:
        await super().stop()
        for task in self._writing:
            task.cancel()
        if self._writing:
            await asyncio.wait(self._writing)
        self.receiver.host.close()
        self._owner_device.close()
        self._writer_device.close()

    @property
    def num_writers(self) -> int:
        return super().num_writers + self.receiver.host.stats()["num_attached"]

    async def dial(
        self, name: str = "p", to_receiver: Faults | None = None, to_sender: Faults | None = None
    ) -> Sender:
        plain = await super().dial(name, to_receiver, to_sender)
        # The same connection and reading task, with a queue pair.
        plain.__class__ = RdmaSender
        plain.instance_id = name
        attaching = asyncio.create_task(self._attach(name))
        try:
            offer = await plain.answer("")
            if not isinstance(offer, Offer):  # an ERROR about what came before
                raise CarrierUnavailable(f"{offer} came in place of an offer")
            plain.placing = await answer_offer(
                plain.peer, offer, self.receiver.layout.geometry, self._writer_device, ()
            )
            if plain.placing is None:
                raise CarrierUnavailable("the offer was damaged on its way")
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

    async def _attach(self, name: str, timeout_s: float = 2.0) -> None:
        """Offer the pool to a writer that has connected."""
        receiver = self.receiver
        await until(lambda: name in receiver.peers)
        receiver.attachments[name] = await receiver.host.attach(
            receiver.peers[name], timeout_s=timeout_s
        )

    def writer(self, sender: Sender, grant: Grant, geometry: KvGeometry) -> KvWriter:
        assert isinstance(sender, RdmaSender)
        return KeyedWriter(self, sender, grant, geometry)

    def damage_kv(self, sender: Sender, nbytes: int) -> None:
        assert isinstance(sender, RdmaSender)
        sender.placing._staging = DamagingStaging(sender.placing._staging, nbytes)

    async def slow_write(self, sender: Sender, grant: Grant, kv: Kv, layer: int) -> SlowWrite:
        assert isinstance(sender, RdmaSender)
        sender.held = held = HeldPair(sender.placing.queue_pairs[0])
        sender.placing.queue_pairs[0] = held
        writing = asyncio.create_task(
            self.writer(sender, grant, kv.geometry).write(
                grant.sequence_id,
                grant.generation,
                layer,
                0,
                grant.num_tokens,
                kv.pieces(layer, 0, grant.num_tokens),
            )
        )
        self._writing.add(writing)
        async with asyncio.timeout(WAIT_S):
            await held.reached.wait()
        return RdmaSlowWrite(sender, held, writing)

    async def spawn_writer(self, grant: Grant, value: int) -> WriterProcess:
        layout = self.receiver.layout
        self._proxy.to_target = self._proxy.to_source = Faults()
        plan = {
            "port": self._proxy.port,
            "writer": grant.writer,
            "block_table": grant.block_table,
            "num_tokens": grant.num_tokens,
            "block_size": layout.block_size,
            "num_blocks": layout.num_blocks,
            "value": value,
        }
        process = self._spawn_scribbler(plan)
        async with asyncio.timeout(WAIT_S):
            link = await self._proxy.next_link()
            await self._attach(grant.writer, timeout_s=WAIT_S)
            keys = await self.receiver.open_keys(grant)
        with process.stdin:
            process.stdin.write(json.dumps(keys).encode("ascii") + b"\n")
        offset = layout.pieces(0, grant.block_table, 0, 1)[0][0][0]
        await until(lambda: self.receiver.pool[offset] == value)
        return WriterProcess(process, link)

    def _spawn_scribbler(self, plan: dict[str, Any]) -> "subprocess.Popen[bytes]":
        module = [sys.executable, "-m", "tests.rdma.rdma_rig"]
        process = subprocess.Popen([*module, json.dumps(plan)], cwd=ROOT, stdin=subprocess.PIPE)
        self.processes.append(process)
        return process


@dataclass
class Scribbler:
    """The worst writer: it asks nobody, and goes on until its queue pair breaks."""

    writer: RdmaWriter
    layout: PoolLayout
    plan: dict[str, Any]
    memory: bytearray = field(default_factory=bytearray)

    async def run(self) -> None:
        # From the writer's own staging memory, which is registered.
        staging = self.writer._staging
        keys = json.loads(await asyncio.to_thread(sys.stdin.readline))
        writes = []
        for layer in range(self.layout.geometry.num_layers):
            for spans in self.layout.pieces(
                layer, self.plan["block_table"], 0, self.plan["num_tokens"]
            ):
                for offset, nbytes in spans:
                    source = memoryview(bytes([self.plan["value"]]) * nbytes)
                    pieces = [(*piece, staging.memory.lkey) for piece in staging.put(source)]
                    staging.release(staging.position)
                    writes.append(RemoteWrite(offset, pieces))
        pair = self.writer.queue_pairs[0]
        with contextlib.suppress(CarrierLost):
            while True:
                await pair.wait(await pair.post(writes, keys[0]))


async def main(plan: dict[str, Any]) -> None:
    """Attach, then write one value into the blocks again and again until it can no longer."""
    # First what takes long: the owner may be impatient with a silent connection.
    device = open_device(WRITER_DEVICE)
    layout = PoolLayout(LARGE, plan["num_blocks"], plan["block_size"])
    peer = await tcp_writer_connection(plan["port"], plan["writer"], LARGE, keepalive_s=5.0)
    scribbling: asyncio.Task[None] | None = None
    writer: RdmaWriter | None = None
    with contextlib.suppress(ConnectionLost):
        async for message in peer:
            if isinstance(message, Offer):
                writer = await answer_offer(peer, message, LARGE, device, ())
                assert writer is not None
                scribbling = asyncio.create_task(Scribbler(writer, layout, plan).run())
    if scribbling is not None:
        await scribbling
    if writer is not None:
        await writer.close()
    device.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
