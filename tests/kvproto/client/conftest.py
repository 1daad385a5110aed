"""Fake workers for the tests of the raw clients."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kvproto.geometry import KvGeometry
from kvproto.kv_cache import KvCache
from kvproto.tcp import Server
from tests.kvproto.client.fake_workers import PLAIN, FakeDecode, FakePrefill, computed, started

Worker = FakePrefill | FakeDecode


@pytest.fixture
async def start_worker() -> AsyncIterator[Callable[[Worker], Awaitable[Worker]]]:
    """Start fake workers; all are stopped with the test."""
    servers: list[Server] = []

    async def start(worker: Worker) -> Worker:
        servers.append(await started(worker))
        return worker

    yield start
    for server in servers:
        await server.close()


@pytest.fixture
async def prefill_worker(start_worker: Callable[[Worker], Awaitable[Worker]]) -> Worker:
    return await start_worker(FakePrefill())


@pytest.fixture
async def decode_worker(start_worker: Callable[[Worker], Awaitable[Worker]]) -> Worker:
    return await start_worker(FakeDecode())


@pytest.fixture(scope="session")
def fake_prefill() -> type[FakePrefill]:
    return FakePrefill


@pytest.fixture(scope="session")
def fake_decode() -> type[FakeDecode]:
    return FakeDecode


@pytest.fixture(scope="session")
def compute() -> Callable[..., KvCache]:
    return computed


@pytest.fixture(scope="session")
def plain() -> KvGeometry:
    return PLAIN
