"""What the carrier contract (``test_carrier_contract.py``) needs: a receiver, senders, a rig.

The tests speak of grants, writes, control messages and blocks. All that differs between carriers
is in a ``CarrierRig``; a new carrier joins by one more rig class. No test knows frames,
sockets or mappings.

    Receiver          a decode worker reduced to its pool: grants, commits, revokes, releases
    Sender            a prefill worker reduced to its connection: writes, commits, answers
    CarrierRig        brings the two together, holds writes up, kills writers, damages the path
"""

import asyncio
import contextlib
import gc
import itertools
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from kvproto.blocks import BlockPool
from kvproto.carrier import Attachment, CarrierHost, KvWriter, PlacingWriter
from kvproto.digest import RegionDigests
from kvproto.errors import (
    ConnectionLost,
    DeadlineExceeded,
    KvProtoError,
    LeaseError,
    LocalProtocolError,
    PeerError,
)
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.handshake import Identity
from kvproto.lease import LeaseTable
from kvproto.messages import Abort, AbortAck, Attached, Commit, CommitAck, Error, Message
from kvproto.tcp import Peer, Server, TcpWriter, connect, serve
from tests.kvproto.fault_proxy import FaultProxy, Faults, Link

# A bound for waits that end at once unless something is broken.
WAIT_S: Final = 20.0
ROOT: Final = Path(__file__).parents[2]
SMALL: Final = KvGeometry.uniform(3, 2, 8, "float32", ("layers.0", "layers.1", "layers.2"))
# 4 KiB for each token of one layer: a write of 256 tokens is under way for a while.
LARGE: Final = KvGeometry.uniform(2, 8, 128, "float16", ("layers.0", "layers.1"))
RENAMED: Final = KvGeometry.uniform(3, 2, 8, "float32", ("layers.0", "layers.1", "other"))


class Kv:
    """The KV of one sequence in a sender's memory.

    Args:
        geometry: of the model.
        num_tokens: how many.
        seed: of the bytes; or
        value: one byte repeated.
    """

    def __init__(
        self, geometry: KvGeometry, num_tokens: int, *, seed: int = 0, value: int | None = None
    ) -> None:
        self.geometry, self.num_tokens = geometry, num_tokens
        source = random.Random(seed)
        nbytes = num_tokens * geometry.row_nbytes(geometry.layers[0].regions[0])
        self.regions = {
            (layer, region): memoryview(
                bytearray(source.randbytes(nbytes) if value is None else bytes([value]) * nbytes)
            )
            for layer in range(geometry.num_layers)
            for region in range(2)
        }

    def pieces(self, layer: int, first_token: int, num_tokens: int) -> list[memoryview]:
        """The buffers of one write."""
        nbytes = self.geometry.row_nbytes(self.geometry.layers[0].regions[0])
        return [
            self.regions[layer, region][first_token * nbytes : (first_token + num_tokens) * nbytes]
            for region in range(2)
        ]

    def commit(self, grant: "Grant") -> Commit:
        """A true COMMIT of all of it."""
        digests = RegionDigests(self.geometry)
        for (layer, region), view in self.regions.items():
            digests.update(layer, region, view)
        nbytes = sum(view.nbytes for view in self.regions.values())
        return Commit(
            grant.sequence_id,
            grant.generation,
            self.num_tokens,
            nbytes,
            digests.values(),
            0.0,
            0.0,
            0.0,
        )


@dataclass(eq=False)
class Grant:
    """One lease, and what became of it.

    Attributes:
        expected: what must lie in the blocks at the moment of the commit.
        outcome: None for a commit, else the error for which the lease was revoked.
        released: set when the blocks were given back.
    """

    sequence_id: str
    generation: int
    writer: str
    block_table: list[int]
    num_tokens: int
    expected: Kv | None
    outcome: asyncio.Future[KvProtoError | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, error: KvProtoError | None) -> None:
        """Note the first outcome."""
        if not self.outcome.done():
            self.outcome.set_result(error)


class Receiver:
    """Grants leases, commits or revokes them as docs/wire.md sections 6 and 7 say.

    ``wrong`` lists committed leases whose bytes were not the expected ones; it must stay empty.
    """

    def __init__(
        self, memory: mmap.mmap, geometry: KvGeometry, num_blocks: int, block_size: int
    ) -> None:
        self.layout = PoolLayout(geometry, num_blocks, block_size)
        self.memory = memory
        self.pool = memoryview(memory)
        self.blocks = BlockPool(num_blocks)
        self.leases = LeaseTable(self.layout, self.pool, self.blocks)
        self.identity = Identity("decode", "d", geometry.facts())
        self.grants: dict[int, Grant] = {}
        self.peers: dict[str, Peer] = {}
        self.wrong: list[str] = []
        self.end_is_proof = True
        self._generations = itertools.count(1)

    def grant(self, num_tokens: int, *, writer: str = "p", expected: Kv | None = None) -> Grant:
        """A new lease in new blocks."""
        generation = next(self._generations)
        sequence_id = f"s{generation}"
        table = self.blocks.allocate(sequence_id, -(-num_tokens // self.layout.block_size))
        self.leases.grant(sequence_id, generation, table, num_tokens, writer=writer)
        grant = Grant(sequence_id, generation, writer, table, num_tokens, expected)
        self.grants[generation] = grant
        return grant

    def scatter(self, seed: int) -> None:
        """Leave half of the blocks free, in no order that suits anybody."""
        num_blocks = self.layout.num_blocks
        taken = self.blocks.allocate("elsewhere", num_blocks)
        self.blocks.free(random.Random(seed).sample(taken, num_blocks // 2), "elsewhere")

    def region_bytes(self, grant: Grant, layer: int, region: int) -> bytes:
        """What lies in the blocks now, in token order."""
        spans = self.layout.pieces(layer, grant.block_table, 0, grant.num_tokens)[region]
        return b"".join(self.pool[start : start + nbytes] for start, nbytes in spans)

    def holds(self, grant: Grant, kv: Kv) -> bool:
        """The blocks of the grant hold exactly these bytes."""
        return all(
            self.region_bytes(grant, layer, region) == sent
            for (layer, region), sent in kv.regions.items()
        )

    def revoke(self, grant: Grant, error: KvProtoError) -> None:
        """Refuse what still comes."""
        self.leases.revoke(grant.generation)
        grant.end(error)

    def release(self, grant: Grant) -> None:
        """There is proof: give the blocks back. LocalProtocolError without it."""
        if self.leases.release(grant.generation):
            grant.released.set()

    async def abort(self, grant: Grant) -> None:
        """What a decode worker does when a client goes away in mid-transfer."""
        self.revoke(grant, PeerError(9, "the client went away", sequence_id=grant.sequence_id))
        abort = Abort(grant.sequence_id, grant.generation, 9, "the client went away")
        await self.peers[grant.writer].send(abort)

    async def handle(self, peer: Peer) -> None:
        """Serve one writer until it is gone."""
        name = peer.remote.instance_id
        self.peers[name] = peer
        error: KvProtoError = ConnectionLost("the writer closed the connection", clean=True)
        try:
            async for message in peer:
                await self._received(peer, message)
        except (ConnectionLost, DeadlineExceeded) as exc:
            error = exc
        await peer.wait_closed()
        del self.peers[name]
        self.writer_ended(name, error)

    def writer_ended(self, name: str, error: KvProtoError) -> None:
        """The connection of a writer is gone: no lease of it can be completed."""
        for grant in self.grants.values():
            if grant.writer == name and not grant.released.is_set():
                self.revoke(grant, error)
                if self.end_is_proof:
                    self.release(grant)

    async def _received(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Commit):
            await self._commit(peer, message)
        elif isinstance(message, AbortAck):
            grant = self.grants[message.generation]
            if grant.outcome.done() and self.leases.quiesced(grant.generation):
                self.release(grant)
        elif isinstance(message, Abort):
            grant = self.grants[message.generation]
            self.revoke(grant, PeerError(message.code, message.message))

    async def _commit(self, peer: Peer, commit: Commit) -> None:
        grant = self.grants[commit.generation]
        try:
            self.leases.check(commit)
            self.leases.commit(commit)
        except LeaseError as exc:
            if self.leases.revoke(commit.generation) and not grant.outcome.done():
                grant.end(exc)
                await peer.send(Abort(commit.sequence_id, commit.generation, exc.code, str(exc)))
                return
            await peer.send(Error(exc.code, str(exc), "", commit.sequence_id))
            return
        # Compared in the same instant: completion must mean that the bytes are there.
        if grant.expected is not None and not self.holds(grant, grant.expected):
            self.wrong.append(grant.sequence_id)
        grant.end(None)
        await peer.send(CommitAck(commit.sequence_id, commit.generation))

    def close(self) -> None:
        """Give the memory back; BufferError if a carrier still holds a piece of it."""
        del self.leases
        # Errors keep the frames in which they were raised, and these what they looked at.
        self.grants.clear()
        self.pool.release()
        gc.collect()
        self.memory.close()


class PlacingReceiver(Receiver):
    """Grants for a carrier that writes into the pool itself.

    Proof is ABORT_ACK, or that the writer's attachment is gone.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.host: CarrierHost | None = None
        self.attachments: dict[str, Attachment] = {}
        self.acknowledged: set[int] = set()

    def grant(self, num_tokens: int, *, writer: str = "p", expected: Kv | None = None) -> Grant:
        grant_tcp = self.leases.grant
        self.leases.grant = lambda *args, **how: grant_tcp(*args, **how, is_placed=True)
        try:
            return super().grant(num_tokens, writer=writer, expected=expected)
        finally:
            self.leases.grant = grant_tcp

    def is_proven(self, grant: Grant) -> bool:
        attachment = self.attachments.get(grant.writer)
        is_gone = attachment is None or attachment.is_gone
        return is_gone or grant.generation in self.acknowledged

    def release(self, grant: Grant) -> None:
        if not self.is_proven(grant):
            raise LocalProtocolError("the writer reaches the blocks and did not let go")
        super().release(grant)

    async def _received(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Attached):
            self.host.attached(peer, message)
            return
        if isinstance(message, AbortAck):
            self.acknowledged.add(message.generation)
        await super()._received(peer, message)


class Sender:
    """One writer's connection: control messages for each sequence, and the end of it all.

    Attributes:
        link: the connection's path, to be damaged; None if there is nothing in between.
    """

    def __init__(self, peer: Peer, link: Link | None = None) -> None:
        self.peer, self.link = peer, link
        self._answers: dict[str, asyncio.Queue[Message]] = {}
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> ConnectionLost:
        try:
            async for message in self.peer:
                self._queue(getattr(message, "sequence_id", "")).put_nowait(message)
        except ConnectionLost as exc:
            return exc
        return ConnectionLost("the receiver closed the connection", clean=True)

    def _queue(self, sequence_id: str) -> asyncio.Queue[Message]:
        return self._answers.setdefault(sequence_id, asyncio.Queue())

    async def answer(self, sequence_id: str) -> Message:
        """The next control message about a sequence. Raises ConnectionLost when none can come."""
        answering = asyncio.create_task(self._queue(sequence_id).get())
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.wait({answering, self._reading}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
        finally:
            answering.cancel()
        raise self._reading.result()

    async def ended(self) -> ConnectionLost:
        """Why the connection ended, once it has."""
        return await asyncio.shield(self._reading)

    async def close(self) -> None:
        """End cleanly."""
        async with asyncio.timeout(WAIT_S):
            await self.peer.close()
            await self._reading

    async def drop(self) -> None:
        """End at once."""
        self.peer.abort("dropped by the test")
        async with asyncio.timeout(WAIT_S):
            await self._reading


class PlacingSender(Sender):
    """A sender that is attached. It ends a transfer when ABORT comes, as a worker does.

    Attributes:
        placing: writes into the receiver's memory.
        held: what holds a slow write up; ``held.go_on.set()`` ends that.
    """

    instance_id = ""
    placing: PlacingWriter | None = None
    held: Any = None

    async def answer(self, sequence_id: str) -> Message:
        try:
            message = await super().answer(sequence_id)
        except ConnectionLost:
            await self._detach()
            raise
        if isinstance(message, Abort) and self.placing is not None:
            self.placing.end(message.sequence_id, message.generation)
        return message

    async def ended(self) -> ConnectionLost:
        """A worker lets go of the memory when its connection ends."""
        error = await super().ended()
        await self._detach()
        return error

    async def close(self) -> None:
        await super().close()
        await self._detach()

    async def drop(self) -> None:
        await super().drop()
        await self._detach()

    async def _detach(self) -> None:
        if self.held is not None:
            self.held.go_on.set()
        if self.placing is not None:
            await self.placing.close()


class Damage:
    """Flips one bit of the bytes that pass, ``nbytes`` from now."""

    def __init__(self, nbytes: int) -> None:
        self._left_nbytes = nbytes

    def of(self, source: memoryview) -> memoryview:
        """What becomes of the next bytes."""
        if 0 <= self._left_nbytes < source.nbytes:
            damaged = bytearray(source)
            damaged[self._left_nbytes] ^= 1
            source = memoryview(damaged)
        self._left_nbytes -= source.nbytes
        return source


async def write_all(writer: KvWriter, grant: Grant, kv: Kv, chunk_tokens: int) -> None:
    """Chunk by chunk, in each chunk layer by layer, as a model computes it."""
    for first in range(0, grant.num_tokens, chunk_tokens):
        count = min(chunk_tokens, grant.num_tokens - first)
        for layer in range(kv.geometry.num_layers):
            pieces = kv.pieces(layer, first, count)
            await writer.write(grant.sequence_id, grant.generation, layer, first, count, pieces)
    await writer.flush()


async def transfer(
    rig: "CarrierRig", sender: Sender, grant: Grant, kv: Kv, *, chunk_tokens: int = 5
) -> Message:
    """A whole transfer; the receiver's answer to COMMIT. Acknowledges an ABORT."""
    await write_all(rig.writer(sender, grant, kv.geometry), grant, kv, chunk_tokens)
    await sender.peer.send(kv.commit(grant))
    answer = await sender.answer(grant.sequence_id)
    if isinstance(answer, Abort):
        await sender.peer.send(AbortAck(grant.sequence_id, grant.generation))
    return answer


class SlowWrite(ABC):
    """A write of one layer that has begun and does not go on before ``go_on``."""

    @abstractmethod
    async def go_on(self) -> None:
        """Let it run to its end, slowly; returns when the writer has nothing left to do."""


class WriterProcess:
    """A writer in a process of its own. It writes without end and listens to nobody."""

    def __init__(self, process: "subprocess.Popen[bytes]", link: Link | None) -> None:
        self._process, self._link = process, link

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self._process.kill()
        self._process.wait(WAIT_S)

    def stop(self) -> None:
        """SIGSTOP: alive, holding all it has, and silent."""
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """SIGCONT: it goes on where it was, knowing nothing."""
        self._process.send_signal(signal.SIGCONT)

    def unblock(self) -> None:
        """Let what it has sent so far arrive."""
        if self._link is not None:
            self._link.to_target.resume()

    async def exited(self) -> int:
        """Its exit status, once it has ended by itself."""
        async with asyncio.timeout(WAIT_S):
            while self._process.poll() is None:
                # A child's end has no event that both event loops offer.
                await asyncio.sleep(0.01)
        return self._process.returncode


class CarrierRig(ABC):
    """One carrier under test. ``async with`` serves and cleans up.

    Args:
        geometry: of the model.
        num_blocks: of the receiver's pool.
        block_size: tokens of a block.
        keepalive_s: silence is noticed after three times this.
    """

    name: ClassVar[str]
    # The end of the control connection proves that no byte of this writer arrives any more.
    end_is_proof: ClassVar[bool] = True

    def __init__(
        self,
        geometry: KvGeometry = SMALL,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        keepalive_s: float = 5.0,
    ) -> None:
        self.keepalive_s = keepalive_s
        layout = PoolLayout(geometry, num_blocks, block_size)
        self.receiver = Receiver(self.allocate(layout.nbytes), geometry, num_blocks, block_size)
        self.receiver.end_is_proof = self.end_is_proof
        self.senders: list[Sender] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    async def __aenter__(self) -> "CarrierRig":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait(WAIT_S)
        for sender in self.senders:
            await sender.drop()
        await self.stop()
        self.senders.clear()

    def allocate(self, nbytes: int) -> mmap.mmap:
        """Memory for the receiver's pool."""
        return mmap.mmap(-1, nbytes)

    @property
    @abstractmethod
    def num_writers(self) -> int:
        """Connections of writers that the receiver still has."""

    @abstractmethod
    async def start(self) -> None:
        """Let writers reach the receiver."""

    @abstractmethod
    async def stop(self) -> None:
        """Cut every writer off and stop."""

    @abstractmethod
    async def dial(
        self, name: str = "p", to_receiver: Faults | None = None, to_sender: Faults | None = None
    ) -> Sender:
        """A new writer, its path damaged as told."""

    @abstractmethod
    def writer(self, sender: Sender, grant: Grant, geometry: KvGeometry) -> KvWriter:
        """What writes into the grant."""

    @abstractmethod
    async def slow_write(self, sender: Sender, grant: Grant, kv: Kv, layer: int) -> SlowWrite:
        """Begin to write a layer; returns when a part of the bytes is under way or there."""

    @abstractmethod
    async def spawn_writer(self, grant: Grant, value: int) -> WriterProcess:
        """A process that writes ``value`` everywhere; returns when it is inside a write."""

    @abstractmethod
    def damage_kv(self, sender: Sender, nbytes: int) -> None:
        """Flip one bit of KV on its way, about ``nbytes`` from now."""

    @abstractmethod
    def cut(self, name: str) -> None:
        """Cut a writer off for good, without its consent."""


class TcpRig(CarrierRig):
    """WRITE frames on TCP, every connection through a fault proxy."""

    name = "tcp"

    async def start(self) -> None:
        self._server: Server = await serve(
            "127.0.0.1",
            0,
            identity=self.receiver.identity,
            handler=self.receiver.handle,
            landing=self.receiver.leases,
            keepalive_s=self.keepalive_s,
        )
        self._proxy = await FaultProxy(self._server.port).__aenter__()

    async def stop(self) -> None:
        await self._proxy.__aexit__()
        self._server.abort()
        await self._server.wait_closed()
        del self._server, self._proxy

    def damage_kv(self, sender: Sender, nbytes: int) -> None:
        stream = sender.link.to_target
        stream.faults = Faults(flip_at=stream.num_read_nbytes + nbytes)

    @property
    def num_writers(self) -> int:
        return self._server.num_peers

    async def dial(
        self, name: str = "p", to_receiver: Faults | None = None, to_sender: Faults | None = None
    ) -> Sender:
        self._proxy.to_target = to_receiver or Faults()
        self._proxy.to_source = to_sender or Faults()
        peer = await tcp_writer_connection(
            self._proxy.port, name, self.receiver.layout.geometry, self.keepalive_s
        )
        sender = Sender(peer, await self._proxy.next_link())
        self.senders.append(sender)
        return sender

    def writer(self, sender: Sender, grant: Grant, geometry: KvGeometry) -> KvWriter:
        return TcpWriter(sender.peer, geometry)

    async def slow_write(self, sender: Sender, grant: Grant, kv: Kv, layer: int) -> SlowWrite:
        assert sender.link is not None
        stream = sender.link.to_target
        half_nbytes = kv.geometry.write_nbytes(0, grant.num_tokens) // 2
        stream.faults = Faults(
            hold_at=stream.num_read_nbytes + half_nbytes, piece_nbytes=lambda: 20_000
        )
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
        await stream.held.wait()
        await until(lambda: not self.receiver.leases.quiesced(grant.generation))
        return TcpSlowWrite(writing, sender)

    async def spawn_writer(self, grant: Grant, value: int) -> WriterProcess:
        geometry = self.receiver.layout.geometry
        half_nbytes = geometry.write_nbytes(0, grant.num_tokens) // 2
        self._proxy.to_target = Faults(hold_at=half_nbytes)
        self._proxy.to_source = Faults()
        process = self._spawn(grant, value)
        async with asyncio.timeout(WAIT_S):
            link = await self._proxy.next_link()
            await link.to_target.held.wait()
        await until(lambda: not self.receiver.leases.quiesced(grant.generation))
        return WriterProcess(process, link)

    def _spawn(self, grant: Grant, value: int) -> "subprocess.Popen[bytes]":
        plan = {
            "carrier": self.name,
            "port": self._proxy.port,
            "sequence_id": grant.sequence_id,
            "generation": grant.generation,
            "writer": grant.writer,
            "block_table": grant.block_table,
            "num_tokens": grant.num_tokens,
            "value": value,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.kvproto.writer_process", json.dumps(plan)], cwd=ROOT
        )
        self.processes.append(process)
        return process

    def cut(self, name: str) -> None:
        self.receiver.peers[name].abort("cut by the receiver")


class TcpSlowWrite(SlowWrite):
    """A WRITE frame of which the proxy holds a half back."""

    def __init__(self, writing: "asyncio.Task[None]", sender: Sender) -> None:
        self._writing, self._sender = writing, sender

    async def go_on(self) -> None:
        assert self._sender.link is not None
        self._sender.link.to_target.resume()
        with contextlib.suppress(ConnectionLost):
            async with asyncio.timeout(WAIT_S):
                await self._writing
                await self._sender.peer.flushed()


async def tcp_writer_connection(
    port: int, name: str, geometry: KvGeometry, keepalive_s: float
) -> Peer:
    """A prefill worker's connection."""
    return await connect(
        "127.0.0.1",
        port,
        identity=Identity("prefill", name, geometry.facts()),
        timeout_s=min(WAIT_S, 5 * keepalive_s),
        keepalive_s=keepalive_s,
    )


async def until(predicate: Callable[[], bool]) -> None:
    """Until it is true, for states that have no event. Fails after ``WAIT_S``."""
    async with asyncio.timeout(WAIT_S):
        while not predicate():
            await asyncio.sleep(0.002)


def resources() -> dict[str, int]:
    """What a leak would raise: descriptors, tasks, threads, shared mappings, child processes."""
    maps = Path("/proc/self/maps").read_text("utf-8").splitlines()
    return {
        "num_descriptors": sum(map(_is_counted, os.listdir("/proc/self/fd"))),
        "num_tasks": len(asyncio.all_tasks()),
        "num_threads": threading.active_count(),
        "num_shared_mappings": sum("/dev/shm" in line or "memfd:" in line for line in maps),
        "num_children": _num_children(),
    }


def _num_children() -> int:
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    if listing.exists():
        return len(listing.read_text("utf-8").split())
    # A kernel without CONFIG_PROC_CHILDREN: ask every process who its parent is.
    num_children = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            num_children += stat.read_text("utf-8").rpartition(")")[2].split()[1] == str(
                os.getpid()
            )
    return num_children


def _is_counted(descriptor: str) -> bool:
    """Not the folder being listed, nor the spare descriptor uvloop keeps once it has listened."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}") != os.devnull
    return False


@contextlib.asynccontextmanager
async def nothing_left_behind(wait_s: float = 2.0) -> AsyncIterator[None]:
    """Fails unless all that ``resources`` counts is given back within ``wait_s`` of the end."""
    # A collection looks only at what is new: the rest of the test run has very many objects.
    gc.freeze()
    before = resources()
    try:
        yield
        gc.collect()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await until(lambda: resources() == before)
        after = resources()
        assert after == before, f"left behind: {after}, before: {before}"
    finally:
        gc.unfreeze()


Scenario = Callable[["CarrierRig"], Coroutine[Any, Any, None]]


async def watched(rig_class: type[CarrierRig], scenario: Scenario, **settings: Any) -> None:
    """Run a scenario with a new rig, and check what must hold after every one."""
    async with nothing_left_behind():
        async with rig_class(**settings) as rig:
            await scenario(rig)
        receiver = rig.receiver
        assert receiver.wrong == []
        assert receiver.leases.stats()["num_writing"] == 0
        assert sum(receiver.blocks.stats().values()) == receiver.blocks.num_blocks
        del rig
        receiver.close()
