"""A prefill worker that computes true KV and then behaves as badly as a test asks."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from kvengine.engine import Engine
from kvengine.span import Span
from kvproto.carrier import KvWriter
from kvproto.convert import WirePacker
from kvproto.digest import RegionDigests
from kvproto.errors import ErrorCode
from kvproto.geometry import KvGeometry
from kvproto.handshake import Identity
from kvproto.messages import (
    Abort,
    AbortAck,
    Commit,
    Message,
    Prefill,
    PrefillWorker,
    Probe,
    Started,
)
from kvproto.probe import answer_probe
from kvproto.tcp import Peer, Server, serve
from kvproto.tcp_link import Link, Links
from tests.decode_svc.made_rdma import MadeHost, MadeWriter

Behaviour = Callable[["FakePrefill", Link, Prefill], Awaitable[None]]


@dataclass
class FakePrefill:
    """One fake worker; ``behaviour`` answers each PREFILL."""

    name: str
    engine: Engine
    behaviour: Behaviour
    acks_aborts: bool = True
    answers_probes: str = "truly"  # "truly", "not at all", "refuses"
    takes_lanes: bool = True
    made_rdma: MadeHost | None = None  # the decode worker's, if this fake reaches it
    seen: list[Message] = field(default_factory=list)
    server: Server | None = None
    num_connections: int = 0

    @property
    def address(self) -> PrefillWorker:
        """What the router would name."""
        assert self.server is not None, "not started"
        return PrefillWorker(self.name, "127.0.0.1", self.server.port)

    async def start(self) -> None:
        """Listen."""
        carriers = ("tcp",) if self.made_rdma is None else (self.made_rdma.carrier, "tcp")
        facts = self.engine.facts.facts()
        identity = Identity("prefill", self.name, facts, carriers=carriers)
        handler = Links(self._handle).handle if self.takes_lanes else self._without_lanes
        self.server = await serve("127.0.0.1", 0, identity=identity, handler=handler)

    async def close(self) -> None:
        """Cut every connection and stop listening."""
        if self.server is not None:
            self.server.abort()
            await self.server.wait_closed()

    async def _without_lanes(self, peer: Peer) -> None:
        if peer.remote.lane:
            peer.abort("this fake has one lane")
        else:
            await self._handle(Link(peer))

    async def _handle(self, peer: Link) -> None:
        self.num_connections += 1
        async with asyncio.TaskGroup() as tasks:
            async for message in peer:
                if not getattr(message, "sequence_id", "").startswith("probe-"):
                    self.seen.append(message)
                if isinstance(message, Prefill):
                    tasks.create_task(self.behaviour(self, peer, message))
                elif isinstance(message, Probe):
                    await self._on_probe(peer, message, tasks)
                elif isinstance(message, Abort) and self.acks_aborts:
                    await peer.send(AbortAck(message.sequence_id, message.generation))

    async def _on_probe(self, peer: Link, probe: Probe, tasks: asyncio.TaskGroup) -> None:
        key = (probe.sequence_id, probe.generation)
        if self.answers_probes == "truly":
            geometry = self.engine.facts.geometry
            writer = self.writer(peer, probe, geometry)
            tasks.create_task(answer_probe(peer, writer, geometry, probe))
        elif self.answers_probes == "refuses":
            await peer.send(Abort(*key, code=ErrorCode.OVERLOADED, message="no probes here"))
            await peer.send(AbortAck(*key))

    def writer(self, peer: Link, request: Prefill | Probe, wire: KvGeometry) -> KvWriter:
        """Over the carrier that was asked for."""
        if request.carrier in ("", "tcp"):
            return peer.writer(wire)
        assert self.made_rdma is not None, request.carrier
        return MadeWriter(self.made_rdma, peer, request)

    def count(self, kind: type[Message]) -> int:
        """How many messages of a kind came."""
        return sum(isinstance(message, kind) for message in self.seen)

    async def push(self, peer: Link, request: Prefill, *, num_layers: int | None = None) -> Commit:
        """Send STARTED and the KV of the first ``num_layers`` layers; return a true COMMIT."""
        geometry = self.engine.facts.geometry
        num_tokens = len(request.tokens)
        block_size = self.engine.kv_pool.layout.block_size
        blocks = list(range(-(-num_tokens // block_size)))
        self.engine.forward([Span(list(request.tokens), 0, blocks, needs_logits=False)])
        wire = geometry.as_wire(request.dtype)
        packer = WirePacker(geometry, wire)
        writer = self.writer(peer, request, wire)
        digests = RegionDigests(wire)
        await peer.send(Started(request.sequence_id, request.generation, queue_s=0.0))
        for layer in range(geometry.num_layers if num_layers is None else num_layers):
            buffers = self.engine.kv_pool.buffers(layer, blocks, 0, num_tokens)
            # A copy: the next request may compute into the same blocks at once.
            copies = [
                memoryview(bytes(buffer)) for buffer in packer.pack(layer, num_tokens, buffers)
            ]
            for region, copy in enumerate(copies):
                digests.update(layer, region, copy)
            await writer.write(
                request.sequence_id, request.generation, layer, 0, num_tokens, copies
            )
        return Commit(
            request.sequence_id,
            request.generation,
            num_tokens=num_tokens,
            nbytes=wire.kv_token_nbytes * num_tokens,
            digests=digests.values(),
            queue_s=0.0,
            prefill_s=0.0,
            handoff_s=0.0,
            wire_error=packer.wire_error,
        )


async def good(fake: FakePrefill, peer: Link, request: Prefill) -> None:
    """As it should be."""
    await peer.send(await fake.push(peer, request))


async def lies_about_digests(fake: FakePrefill, peer: Link, request: Prefill) -> None:
    """The last digest is off by one: the bytes in the pool are not those announced."""
    commit = await fake.push(peer, request)
    digests = [*commit.digests[:-1], commit.digests[-1] ^ 1]
    await peer.send(replace(commit, digests=digests))


async def leaves_out_a_layer(fake: FakePrefill, peer: Link, request: Prefill) -> None:
    """COMMIT without the last layer."""
    await peer.send(await fake.push(peer, request, num_layers=3))


async def hangs_up_in_the_middle(fake: FakePrefill, peer: Link, request: Prefill) -> None:
    """Half the layers, then the connection is cut."""
    await fake.push(peer, request, num_layers=2)
    await peer.flushed()
    peer.abort("the test says so")


async def stalls_in_the_middle(fake: FakePrefill, peer: Link, request: Prefill) -> None:
    """Half the layers, then silence."""
    await fake.push(peer, request, num_layers=2)


async def says_nothing(fake: FakePrefill, peer: Link, request: Prefill) -> None:
    """Accepts, and never answers."""


async def refuses(fake: FakePrefill, peer: Link, request: Prefill) -> None:
    """Overloaded."""
    key = (request.sequence_id, request.generation)
    await peer.send(Abort(*key, code=ErrorCode.OVERLOADED, message="too much to do"))
    await peer.send(AbortAck(*key))


async def loses_its_carrier(fake: FakePrefill, peer: Link, request: Prefill) -> None:
    """Half the layers, then the device fails; by TCP all is well."""
    if not request.carrier:
        await good(fake, peer, request)
        return
    await fake.push(peer, request, num_layers=2)
    key = (request.sequence_id, request.generation)
    await peer.send(Abort(*key, code=ErrorCode.CARRIER_LOST, message="retries exceeded"))
    await peer.send(AbortAck(*key))


async def commits_and_hangs_up(fake: FakePrefill, peer: Link, request: Prefill) -> None:
    """Everything is delivered, but nobody is left to take the acknowledgement."""
    await peer.send(await fake.push(peer, request))
    await peer.close()
