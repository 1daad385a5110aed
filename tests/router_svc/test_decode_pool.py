"""Links to workers on real sockets: dialling, replacing, retiring."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvproto.handshake import Identity
from router_svc.decode_link import WorkerLostError
from router_svc.decode_pool import DecodePool
from router_svc.registry import WorkerRegistry

ROUTER = Identity(role="router", instance_id="r")


@pytest.fixture
async def registry(cluster: Any) -> WorkerRegistry:
    clock = asyncio.get_running_loop().time
    return WorkerRegistry(cluster.facts["config_digest"], clock=clock)


@pytest.fixture
async def pool(registry: WorkerRegistry) -> AsyncIterator[DecodePool]:
    async with DecodePool(registry, ROUTER) as pool:
        yield pool


async def test_lost_link_withdraws_its_worker(
    pool: DecodePool, registry: WorkerRegistry, cluster: Any
) -> None:
    worker = await cluster.listen_decode("d")
    entry = registry.register(worker.register_message())
    link = await pool.dial(entry.registration)
    registry.offer(entry)
    assert pool.find("d") is link
    assert pool.stats() == {"num_links": 1, "num_retired_links": 0, "num_sequences": 0}
    changed = registry.changed
    pool.abort("d", "the test says so")
    await changed.wait()
    assert not entry.is_offered
    assert pool.find("d") is None
    await worker.wait_for(lambda: worker.num_disconnects == 1)
    pool.abort("d", "nobody is there")


async def test_dialling_again_retires_the_old_link(pool: DecodePool, cluster: Any) -> None:
    worker = await cluster.listen_decode("d")
    old = await pool.dial(worker.register_message())
    new = await pool.dial(worker.register_message())
    assert pool.find("d") is new
    await worker.wait_for(lambda: worker.num_disconnects == 1)
    assert old.is_lost
    assert not new.is_lost


async def test_nobody_listens(pool: DecodePool, cluster: Any) -> None:
    worker = await cluster.listen_decode("d")
    register = worker.register_message()
    await worker.server.close()
    with pytest.raises(WorkerLostError, match=f"127.0.0.1:{register.port}"):
        await pool.dial(register)
    assert pool.stats()["num_links"] == 0


async def test_somebody_else_listens(pool: DecodePool, cluster: Any) -> None:
    worker = await cluster.listen_decode("d")
    worker.instance_id = "e"
    with pytest.raises(WorkerLostError, match="decode d answers"):
        await pool.dial(worker.register_message())
    await worker.wait_for(lambda: worker.num_disconnects == 1)


async def test_leaving_closes_every_link(registry: WorkerRegistry, cluster: Any) -> None:
    workers = [await cluster.listen_decode(name) for name in ("d", "e")]
    async with DecodePool(registry, ROUTER) as pool:
        for worker in workers:
            await pool.dial(worker.register_message())
    for worker in workers:
        await worker.wait_for(lambda worker=worker: worker.num_disconnects == 1)
