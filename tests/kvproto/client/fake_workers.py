"""Workers reduced to what a raw client meets: they speak the protocol and compute nothing."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable

import numpy as np

from kvproto.blocks import BlockPool
from kvproto.client.kv_sender import KvSender
from kvproto.convert import RowConverter
from kvproto.description import describe
from kvproto.errors import ConnectionLost, ErrorCode, KvProtoError, LeaseError
from kvproto.geometry import KvGeometry, Layer, PoolLayout, Region
from kvproto.handshake import Identity
from kvproto.kv_cache import KvCache
from kvproto.lease import LeaseTable, Part
from kvproto.messages import (
    Abort,
    AbortAck,
    Accepted,
    Commit,
    CommitAck,
    Describe,
    Finished,
    Generate,
    Offer,
    Prefill,
    Tokens,
)
from kvproto.tcp import Peer, Server, serve

GEOMETRY = KvGeometry(
    (
        Layer("a", (Region("k", 2, 8), Region("v", 2, 8))),
        Layer("b", (Region("k", 2, 8), Region("v", 2, 8)), 4),
        Layer("c", (Region("state", 2, 4, "sequence"),)),
    ),
    "float32",
)
# Every row is there for every prefix, as with most models.
PLAIN = KvGeometry.uniform(3, 2, 8, "float32", ["a", "b", "c"])
FACTS = {"weights_digest": "w", "config_digest": "c"}


def computed(geometry: KvGeometry, tokens: list[int]) -> KvCache:
    """What a model would compute: a row depends on its token, layer and region alone."""
    cache = KvCache(geometry, tokens)
    for number, layer in enumerate(geometry.layers):
        for index, region in enumerate(layer.regions):
            rows = cache.region(layer.name, region.name)
            first = cache.first_token(layer.name)
            values = np.array(tokens[first:] if region.per == "token" else tokens[-1:])
            steps = np.arange(rows[0].size).reshape(rows[0].shape)
            rows[...] = np.sin(values[:, None, None] + 10 * number + index + steps)
    return cache


class FakePrefill:
    """A prefill worker: sends the rows that ``computed`` makes."""

    def __init__(self, geometry: KvGeometry = GEOMETRY) -> None:
        self.geometry = geometry
        self.identity = Identity("prefill", "p-1", {**FACTS, **geometry.facts()})
        self.server: Server | None = None
        self.requests: list[Prefill] = []
        self.acknowledged: list[str] = []
        self.aborted: list[Abort] = []
        # Set by tests to make it behave otherwise.
        self.answer: Callable[[Peer, Prefill], object] | None = None
        self.confirms_aborts = True
        self.changed_digests = False
        self.tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def port(self) -> int:
        assert self.server is not None
        return self.server.port

    async def handle(self, peer: Peer) -> None:
        with contextlib.suppress(ConnectionLost):
            async for message in peer:
                match message:
                    case Describe():
                        await peer.send(describe(self.geometry, model="tiny", max_model_len=99))
                    case Prefill():
                        self.requests.append(message)
                        work = self.answer or self.send
                        self.tasks[message.generation] = asyncio.create_task(
                            work(peer, message)  # type: ignore[arg-type]
                        )
                    case CommitAck():
                        self.acknowledged.append(message.sequence_id)
                    case Offer():
                        self.offered(peer, message)
                    case Abort():
                        self.aborted.append(message)
                        task = self.tasks[message.generation]
                        task.cancel()
                        await asyncio.wait([task])
                        await self.settle(message)
                        if self.confirms_aborts:
                            await peer.send(AbortAck(message.sequence_id, message.generation))
        for task in self.tasks.values():
            task.cancel()

    def offered(self, peer: Peer, offer: Offer) -> None:
        """A client offers its memory. TCP needs none."""

    async def settle(self, abort: Abort) -> None:
        """Nothing of an aborted transfer is under way when this returns. TCP keeps the order."""

    async def send(self, peer: Peer, request: Prefill) -> None:
        cache = computed(self.geometry, request.tokens)
        with contextlib.suppress(KvProtoError):
            await KvSender(peer, request, cache).run()


class FakeDecode:
    """A decode worker: asks for the KV, lands it in a pool and echoes tokens."""

    def __init__(self, geometry: KvGeometry = GEOMETRY) -> None:
        self.geometry = geometry
        self.identity = Identity("decode", "d-1", {**FACTS, **geometry.facts()})
        self.layout = PoolLayout(geometry, 64, 3)
        self.pool = memoryview(bytearray(self.layout.nbytes))
        self.blocks = BlockPool(64)
        self.leases = LeaseTable(self.layout, self.pool, self.blocks, converter=RowConverter())
        self.server: Server | None = None
        self.table: list[int] = []
        self.requests: list[Generate] = []
        self.commits: list[Commit] = []
        self.received: list[object] = []
        self.prefill_options: dict[str, object] = {}
        self.after_prefill: Callable[[Peer, Generate], object] | None = None
        self.tokens: Callable[[Peer, Generate], object] = self.echo
        self.num_generations = 0
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        assert self.server is not None
        return self.server.port

    async def handle(self, peer: Peer) -> None:
        with contextlib.suppress(ConnectionLost):
            async for message in peer:
                self.received.append(message)
                match message:
                    case Describe():
                        await peer.send(describe(self.geometry, model="tiny", max_model_len=99))
                    case Generate():
                        self.requests.append(message)
                        await peer.send(Accepted(message.sequence_id))
                        if message.kv_from_sender:
                            await self.ask(peer, message)
                        else:
                            self.spawn(peer, message)
                    case Commit():
                        self.commits.append(message)
                        try:
                            self.leases.commit(message)
                        except LeaseError as exc:
                            await peer.send(
                                Finished(message.sequence_id, "error", exc.code, str(exc))
                            )
                            continue
                        await peer.send(CommitAck(message.sequence_id, message.generation))
                        self.spawn(peer, self.requests[-1])
                    case Abort(generation=0):
                        await peer.send(AbortAck(message.sequence_id, 0))
                    case Abort():
                        await peer.send(
                            Finished(
                                message.sequence_id,
                                "error",
                                ErrorCode.PREFILL_UNAVAILABLE,
                                f"nobody delivered the KV ({message.message})",
                            )
                        )
        for task in self.tasks:
            task.cancel()

    async def ask(self, peer: Peer, request: Generate) -> None:
        self.num_generations += 1
        wanted = request.tokens[:-1]
        self.table = self.blocks.allocate(request.sequence_id, -(-len(wanted) // 3))
        self.table.reverse()
        wire = self.geometry.as_wire(str(self.prefill_options.get("dtype", "")))
        part = Part(
            self.num_generations,
            peer.remote.instance_id,
            None if wire == self.geometry else wire,
            is_checked=not self.prefill_options.get("is_unchecked", False),
        )
        self.leases.grant_parts(request.sequence_id, [part], self.table, len(wanted))
        options = {"timeout_s": 10.0, **self.prefill_options}
        await peer.send(Prefill(request.sequence_id, self.num_generations, wanted, **options))
        if self.after_prefill is not None:
            self.tasks.append(asyncio.create_task(self.after_prefill(peer, request)))  # type: ignore[arg-type]

    def spawn(self, peer: Peer, request: Generate) -> None:
        self.tasks.append(asyncio.create_task(self.tokens(peer, request)))  # type: ignore[arg-type]

    async def echo(self, peer: Peer, request: Generate) -> None:
        """The prompt's last tokens, in two pieces."""
        output = (request.tokens * 9)[-request.max_output_tokens :]
        key = request.sequence_id
        await peer.send(Tokens(key, 0, output[:1]))
        if output[1:]:
            await peer.send(Tokens(key, 1, output[1:]))
        await peer.send(Finished(key, "length", timings={"decode_s": 0.5}))

    def rows(self, layer: int, region: int, num_tokens: int) -> np.ndarray:
        """What has landed, in token order."""
        first = self.geometry.layers[layer].first_needed_token(num_tokens)
        spans = self.layout.pieces(layer, self.table, first, num_tokens - first, is_last=True)
        raw = b"".join(self.pool[start : start + nbytes] for start, nbytes in spans[region])
        shape = self.geometry.layers[layer].regions[region]
        return np.frombuffer(raw, np.float32).reshape(-1, shape.num_heads, shape.head_dim)


async def started(worker: FakePrefill | FakeDecode, *, tls: ssl.SSLContext | None = None) -> Server:
    """Listen on any port of the loopback."""
    landing = worker.leases if isinstance(worker, FakeDecode) else None
    worker.server = await serve(
        "127.0.0.1", 0, identity=worker.identity, handler=worker.handle, landing=landing, tls=tls
    )
    return worker.server
