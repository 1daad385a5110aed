"""A prefill worker in this process, on real sockets, and a decode worker's end of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvengine.engine import Engine
from kvengine.span import Span
from kvproto.blocks import BlockPool
from kvproto.description import describe
from kvproto.digest import digest_blocks
from kvproto.handshake import Identity
from kvproto.lease import LeaseTable
from kvproto.messages import Abort, AbortAck, Commit, CommitAck, Message, Prefill
from kvproto.tcp import Peer, connect, serve
from kvproto.tcp_link import Links
from prefill_svc.config import PrefillConfig
from prefill_svc.metrics import PrefillMetrics
from prefill_svc.prefiller import Prefiller
from prefill_svc.rdma_pool import RdmaPool
from prefill_svc.server import PrefillServer

_WAIT_S = 20.0
_POOL_NBYTES = 8 << 20


@pytest.fixture(scope="session")
def load_engine(tiny_model_dir: Callable[[str], Path]) -> Callable[..., Engine]:
    """Engines on the tiny Llama."""

    def load(kv_pool_nbytes: int = _POOL_NBYTES) -> Engine:
        return Engine.load(tiny_model_dir("llama"), num_threads=1, kv_pool_nbytes=kv_pool_nbytes)

    return load


@dataclass
class Decode:
    """The decode side of one connection: a pool with leases, and letters by sequence."""

    peer: Peer
    leases: LeaseTable
    blocks: BlockPool
    engine: Engine
    tables: dict[str, list[int]] = field(default_factory=dict)

    async def ask(
        self, sequence_id: str, tokens: list[int], generation: int, timeout_s: float = 15.0
    ) -> None:
        """Grant a lease and send PREFILL."""
        num_blocks = -(-len(tokens) // self.engine.kv_pool.layout.block_size)
        table = self.tables[sequence_id] = self.blocks.allocate(sequence_id, num_blocks)
        self.leases.grant(sequence_id, generation, table, len(tokens))
        await self.peer.send(Prefill(sequence_id, generation, tokens=tokens, timeout_s=timeout_s))

    async def receive(self, kind: type[Message]) -> Any:
        """The next message of a kind; WRITEs and STARTED in between are passed over."""
        async with asyncio.timeout(_WAIT_S):
            while True:
                message = await self.peer.receive()
                if isinstance(message, kind):
                    return message
                assert not isinstance(message, Commit | Abort | AbortAck), message

    async def commit(self) -> Commit:
        """Wait for a COMMIT, check counts and digests, and acknowledge."""
        commit: Commit = await self.receive(Commit)
        self.leases.check(commit)
        table = self.tables[commit.sequence_id]
        pool = self.engine.kv_pool
        assert commit.digests == digest_blocks(pool.layout, pool.region, table, commit.num_tokens)
        self.leases.commit(commit)
        await self.peer.send(CommitAck(commit.sequence_id, commit.generation))
        return commit

    def kv_of(self, sequence_id: str, num_tokens: int) -> list[bytes]:
        """What landed, by layer and region."""
        pool = self.engine.kv_pool
        return [
            b"".join(map(bytes, pool.buffers(layer, self.tables[sequence_id], 0, num_tokens)))
            for layer in range(pool.layout.geometry.num_layers)
        ]


@dataclass
class Worker:
    """A prefill worker and how to reach it."""

    prefiller: Prefiller
    metrics: PrefillMetrics
    port: int
    facts: dict[str, str | int]
    load_engine: Callable[..., Engine]
    decodes: list[Decode] = field(default_factory=list)

    async def connect(self, name: str = "decode-under-test") -> Decode:
        """A decode worker's connection with an empty pool."""
        engine = self.load_engine()
        blocks = BlockPool(engine.num_blocks)
        leases = LeaseTable(engine.kv_pool.layout, engine.kv_pool.region, blocks)
        identity = Identity(role="decode", instance_id=name, facts=self.facts)
        peer = await connect(
            "127.0.0.1", self.port, identity=identity, landing=leases, timeout_s=10
        )
        decode = Decode(peer, leases, blocks, engine)
        self.decodes.append(decode)
        return decode

    async def assert_nothing_is_left(self) -> None:
        """No prompt, and every block is free."""
        async with asyncio.timeout(_WAIT_S):
            await self.prefiller.wait_idle()
        blocks: Any = self.prefiller.stats()["blocks"]
        assert blocks["free"] == sum(blocks.values())


@pytest.fixture
def start_worker(
    load_engine: Callable[..., Engine],
) -> Callable[..., AbstractAsyncContextManager[Worker]]:
    """Start a prefill worker with settings."""

    @asynccontextmanager
    async def start(
        *, kv_pool_nbytes: int = _POOL_NBYTES, rdma: RdmaPool | None = None, **settings: Any
    ) -> AsyncIterator[Worker]:
        engine = load_engine(kv_pool_nbytes)
        config = PrefillConfig(model=Path("tiny"), instance_id="prefill-under-test", **settings)
        metrics = PrefillMetrics()
        prefiller = Prefiller(engine, config, metrics)
        server = PrefillServer(
            prefiller,
            metrics,
            geometry=engine.facts.geometry,
            description=describe(engine.facts.geometry, model="tiny", max_model_len=4096),
            config=config,
            rdma=rdma or RdmaPool(config),
        )
        facts = engine.facts.facts()
        identity = Identity(role="prefill", instance_id=config.instance_id, facts=facts)
        listener = await serve(
            "127.0.0.1", 0, identity=identity, handler=Links(server.handle).handle
        )
        worker = Worker(prefiller, metrics, listener.port, facts, load_engine)
        async with asyncio.TaskGroup() as tasks:
            loop = tasks.create_task(prefiller.run())
            try:
                yield worker
            finally:
                for decode in worker.decodes:
                    decode.peer.abort("the test is over")
                await listener.close()
                loop.cancel()

    return start


def kv_of_one_pass(engine: Engine, tokens: list[int]) -> list[bytes]:
    """The KV of a prompt computed alone in one forward, by layer: K then V."""
    blocks = list(range(-(-len(tokens) // engine.kv_pool.layout.block_size)))
    engine.forward([Span(tokens, 0, blocks, needs_logits=False)])
    return [
        b"".join(map(bytes, engine.kv_pool.buffers(layer, blocks, 0, len(tokens))))
        for layer in range(engine.facts.geometry.num_layers)
    ]
