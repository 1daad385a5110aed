"""A decode worker in this process, on real sockets, and a router's end of its connection."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from decode_svc.config import DecodeConfig
from decode_svc.decoder import Decoder
from decode_svc.handoff import Fetcher
from decode_svc.letter_box import LetterBoxes
from decode_svc.metrics import DecodeMetrics
from decode_svc.path import PathChooser
from decode_svc.prefill_peers import PrefillPeers
from decode_svc.quarantine import Quarantine
from decode_svc.sender_paths import SenderPaths
from decode_svc.server import DecodeServer
from kvengine.engine import Engine
from kvproto.blocks import BlockPool
from kvproto.carrier import CarrierHost
from kvproto.convert import RowConverter
from kvproto.description import describe
from kvproto.handshake import Identity
from kvproto.lease import LeaseTable
from kvproto.messages import Accepted, Finished, Generate, Message, PrefillWorker, Tokens
from kvproto.tcp import Peer, connect, serve
from kvproto.tcp_link import Links
from tests.decode_svc.fake_prefill import Behaviour, FakePrefill

_WAIT_S = 20.0


@pytest.fixture(scope="session")
def load_engine(tiny_model_dir: Callable[[str], Path]) -> Callable[..., Engine]:
    """Engines on the tiny Llama."""

    def load(kv_pool_nbytes: int = 8 << 20) -> Engine:
        return Engine.load(tiny_model_dir("llama"), num_threads=1, kv_pool_nbytes=kv_pool_nbytes)

    return load


@dataclass
class Outcome:
    """What the router heard about one sequence."""

    tokens: list[int]
    finished: Finished


@dataclass
class Worker:
    """A decode worker and the router's connection to it."""

    decoder: Decoder
    blocks: BlockPool
    leases: LeaseTable
    peers: PrefillPeers
    router: Peer
    port: int

    async def generate(
        self, sequence_id: str, tokens: list[int], workers: list[PrefillWorker], **options: Any
    ) -> None:
        """Send GENERATE."""
        await self.router.send(make_generate(sequence_id, tokens, workers, **options))

    async def outcomes(self, num_sequences: int) -> dict[str, Outcome]:
        """Collect until ``num_sequences`` sequences have finished."""
        tokens: dict[str, list[int]] = {}
        done: dict[str, Outcome] = {}
        async with asyncio.timeout(_WAIT_S):
            while len(done) < num_sequences:
                message: Message = await self.router.receive()
                if isinstance(message, Accepted):
                    tokens[message.sequence_id] = []
                elif isinstance(message, Tokens):
                    heard = tokens[message.sequence_id]
                    heard += message.tokens
                elif isinstance(message, Finished):
                    heard = tokens.get(message.sequence_id, [])
                    done[message.sequence_id] = Outcome(heard, message)
        return done

    async def assert_nothing_is_left(self) -> None:
        """Every block is free, every lease is gone."""
        async with asyncio.timeout(_WAIT_S):
            await self.decoder.wait_idle()
        assert self.blocks.stats()["free"] == self.blocks.num_blocks
        stats = self.leases.stats()
        assert (stats["num_leases"], stats["num_writing"]) == (0, 0)
        assert stats["num_quarantined_blocks"] == 0


def make_generate(
    sequence_id: str, tokens: list[int], workers: list[PrefillWorker], **options: Any
) -> Generate:
    """A greedy GENERATE of eight tokens, unless ``options`` say otherwise."""
    defaults: dict[str, Any] = {
        "num_prompt_tokens": len(tokens),
        "max_output_tokens": 8,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 1,
        "stop_token_ids": [],
        "ignore_eos": True,
        "timeout_s": 15.0,
    }
    return Generate(sequence_id, tokens, prefill_workers=workers, **{**defaults, **options})


@pytest.fixture
def start_worker() -> Callable[..., AbstractAsyncContextManager[Worker]]:
    """Start a decode worker on an engine, with settings."""

    @asynccontextmanager
    async def start(
        engine: Engine, role: str = "router", hosts: Sequence[CarrierHost] = (), **settings: Any
    ) -> AsyncIterator[Worker]:
        settings.setdefault("max_lanes", 1)
        config = DecodeConfig(model=Path("tiny"), instance_id="decode-under-test", **settings)
        facts = engine.facts.facts()
        metrics = DecodeMetrics()
        carriers = (*(host.carrier for host in hosts), "tcp")
        identity = Identity("decode", config.instance_id, facts, carriers=carriers)
        blocks = BlockPool(engine.num_blocks)
        layout, region = engine.kv_pool.layout, engine.kv_pool.region
        leases = LeaseTable(layout, region, blocks, converter=RowConverter())
        boxes = LetterBoxes()
        quarantine = Quarantine(leases)
        new_generation = partial(next, itertools.count(1))
        paths = PathChooser(
            leases,
            blocks,
            layout,
            boxes,
            quarantine,
            metrics,
            hosts=hosts,
            only="",
            new_generation=new_generation,
            min_bandwidth=config.min_handoff_bandwidth,
            timeout_s=config.connect_timeout_s,
        )
        peers = PrefillPeers(
            identity,
            leases,
            boxes,
            paths,
            connect_timeout_s=config.connect_timeout_s,
            max_lanes=config.max_lanes,
        )
        senders = SenderPaths((), metrics, timeout_s=config.connect_timeout_s)
        fetcher = Fetcher(
            peers,
            boxes,
            leases,
            blocks,
            quarantine,
            metrics,
            senders=senders,
            new_generation=new_generation,
            wire_dtype="" if config.kv_wire_dtype == "pool" else config.kv_wire_dtype,
            stall_timeout_s=config.stall_timeout_s,
            abort_timeout_s=config.abort_timeout_s,
        )
        decoder = Decoder(engine, blocks, fetcher, config, metrics)
        description = describe(engine.facts.geometry, model="tiny", max_model_len=64)
        server = DecodeServer(decoder, boxes, senders, metrics, description=description)
        listener = await serve(
            "127.0.0.1", 0, identity=identity, handler=Links(server.handle).handle, landing=leases
        )
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(owner.run()) for owner in (peers, decoder, quarantine)]
            router = await connect(
                "127.0.0.1",
                listener.port,
                identity=Identity(role=role, instance_id="router-under-test"),
                timeout_s=10,
            )
            try:
                yield Worker(decoder, blocks, leases, peers, router, listener.port)
            finally:
                router.abort("the test is over")
                await listener.close()
                for loop in loops:
                    loop.cancel()

    return start


@pytest.fixture
async def fake_worker(
    load_engine: Callable[..., Engine],
) -> AsyncIterator[Callable[..., Awaitable[FakePrefill]]]:
    """Start fake prefill workers that end with the test."""
    fakes: list[FakePrefill] = []

    async def start(name: str, behaviour: Behaviour, **options: Any) -> FakePrefill:
        fake = FakePrefill(name, load_engine(), behaviour, **options)
        fakes.append(fake)
        await fake.start()
        return fake

    yield start
    for fake in fakes:
        await fake.close()
