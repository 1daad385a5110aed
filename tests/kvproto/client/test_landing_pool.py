"""Memory for a carrier that places rows; the carrier itself is in tests/rdma."""

import asyncio

import numpy as np
import pytest

from kvproto.client.landing import CacheLanding
from kvproto.client.landing_pool import BLOCK_SIZE, LandingPool
from kvproto.errors import DigestMismatch, LeaseError, LocalProtocolError
from kvproto.geometry import PoolLayout
from kvproto.kv_cache import KvCache
from kvproto.messages import Commit, Placed, Write

TOKENS = [(5 * index + 3) % 97 for index in range(40)]
pytestmark = pytest.mark.timeout(30)


def pool_of(geometry, num_blocks):
    """One byte more than the blocks need."""
    return LandingPool(geometry, PoolLayout(geometry, num_blocks, BLOCK_SIZE).nbytes + 1)


def place(pool, table, source, layer, first, count):
    """What a writer by RDMA does."""
    is_last = first + count == source.num_tokens
    spans = pool.layout.pieces(layer, table, first, count, is_last=is_last)
    raw = memoryview(b"".join(source.views(layer, first, count)))
    for start, nbytes in (span for region in spans for span in region):
        pool.memory[start : start + nbytes] = raw[:nbytes]
        raw = raw[nbytes:]


def commit_of(source, name, generation, **changes):
    fields = {
        "num_tokens": source.num_tokens,
        "nbytes": source.geometry.prompt_nbytes(source.num_tokens),
        "digests": source.digests(),
        "queue_s": 0.0,
        "prefill_s": 0.0,
        "handoff_s": 0.0,
        **changes,
    }
    return Commit(name, generation, **fields)


@pytest.mark.parametrize("count", [1, 3, 5, 16, 17, 40])
async def test_placed_rows_are_in_the_cache_when_they_are_counted(compute, fake_prefill, count):
    geometry = fake_prefill().geometry
    source = compute(geometry, TOKENS[:count])
    cache = KvCache(geometry, TOKENS[:count])
    pool, landing = pool_of(geometry, 7), CacheLanding()
    # Blocks that are no neighbours, and not in order.
    others = [await pool.take(f"o{index}", 1) for index in range(7)]
    for index in (5, 1, 3):
        pool.put_back(f"o{index}", 9, others[index])
    table = (await pool.take("s", count))[::-1]
    landing.grant_placed("s", 1, cache, pool, table, writer="w")
    for layer, held in enumerate(geometry.layers):
        first = held.first_needed_token(count)
        while first < count:
            step = min(7, count - first)
            place(pool, table, source, layer, first, step)
            landing.placed(Placed("s", 1, held.name, first, step), "w")
            first += step
    assert landing.landed_nbytes(1) == geometry.prompt_nbytes(count)
    assert landing.commit(commit_of(source, "s", 1)) == source.digests()
    landing.forget(1)
    assert cache.memory == source.memory
    assert (pool.stats()["free"], pool.stats()["num_leases"]) == (3, 0)


async def test_what_does_not_hold_is_refused_and_the_blocks_come_back(compute, plain):
    source = compute(plain, TOKENS)
    pool, landing = pool_of(plain, 3), CacheLanding()
    table = await pool.take("s", 40)
    landing.grant_placed("s", 1, KvCache(plain, TOKENS), pool, table, writer="w")
    with pytest.raises(LocalProtocolError, match="generation 1 is in use"):
        landing.grant_placed("s", 1, KvCache(plain, TOKENS), pool, table, writer="w")
    with pytest.raises(LeaseError, match="leased for PLACED, not for WRITE"):
        landing.destination(Write("s", 1, "a", 0, 1), 128, plain.shape_word(0, 1), "w")
    with pytest.raises(LeaseError, match="leased to w, not to x"):
        landing.placed(Placed("s", 1, "a", 0, 40), "x")
    for layer, name in enumerate("abc"):
        place(pool, table, source, layer, 0, 40)
        if name == "b":
            pool.memory[pool.layout.start(layer, 0)] ^= 1
        landing.placed(Placed("s", 1, name, 0, 40), "w")
    with pytest.raises(DigestMismatch):
        landing.commit(commit_of(source, "s", 1))
    landing.revoke(1)
    assert pool.stats()["num_quarantined_blocks"] == 3
    assert landing.quiesced(1)
    landing.forget(1)
    assert pool.stats()["free"] == 3
    with pytest.raises(LeaseError, match="unknown sequence s"):
        landing.placed(Placed("s", 1, "a", 0, 1), "w")


async def test_transfers_wait_for_blocks_in_turn(plain):
    pool = pool_of(plain, 3)
    first = await pool.take("a", 33)
    large = asyncio.create_task(pool.take("b", 48))
    small = asyncio.create_task(pool.take("c", 1))
    given_up = asyncio.create_task(pool.take("d", 48))
    await asyncio.sleep(0)
    given_up.cancel()
    pool.put_back("a", 1, first)
    assert sorted(await large) == [0, 1, 2]
    assert not small.done()
    pool.put_back("b", 2, large.result())
    assert len(await small) == 1
    with pytest.raises(asyncio.CancelledError):
        await given_up
    pool.put_back("c", 3, small.result())
    assert pool.stats()["free"] == 3


def test_what_cannot_fit_is_said(plain):
    with pytest.raises(LocalProtocolError, match=r"has 6143 bytes \(pool_nbytes\), .* needs 6144"):
        LandingPool(plain, 6143)
    pool = LandingPool(plain, 2 * 6144)
    pool.check(32)
    with pytest.raises(LocalProtocolError, match=r"33 tokens .* 32 tokens \(12288 bytes\); give"):
        pool.check(33)


async def test_the_rows_of_a_cache_outlive_the_pool(compute, plain):
    source, cache = compute(plain, TOKENS[:4]), KvCache(plain, TOKENS[:4])
    pool, landing = pool_of(plain, 1), CacheLanding()
    table = await pool.take("s", 4)
    landing.grant_placed("s", 1, cache, pool, table, writer="w")
    for layer, name in enumerate("abc"):
        place(pool, table, source, layer, 0, 4)
        landing.placed(Placed("s", 1, name, 0, 4), "w")
    landing.commit(commit_of(source, "s", 1))
    landing.forget(1)
    pool.memory[:] = bytes(pool.memory.nbytes)
    assert np.array_equal(cache.region("b", "k"), source.region("b", "k"))
