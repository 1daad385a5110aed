"""A prefill worker on real sockets: true KV, shared steps, limits, aborts, slow and lost peers."""

import asyncio
from typing import Any

import numpy as np
import pytest

from kvproto.errors import ErrorCode
from kvproto.messages import Abort, AbortAck, Commit, CommitAck, Prefill, Started
from tests.prefill_svc.conftest import kv_of_one_pass


def _prompt(seed: int, length: int) -> list[int]:
    return [(seed * 37 + i * 11 + 4) % 256 for i in range(length)]


def _assert_close(landed: list[bytes], computed: list[bytes]) -> None:
    for layer, (ours, theirs) in enumerate(zip(landed, computed, strict=True)):
        np.testing.assert_allclose(
            np.frombuffer(ours, np.float32),
            np.frombuffer(theirs, np.float32),
            rtol=1e-3,
            atol=1e-4,
            err_msg=f"layer {layer}",
        )


@pytest.mark.parametrize("max_step_tokens", [7, 64, 4096])
async def test_the_kv_that_lands_is_that_of_one_pass(
    start_worker: Any, load_engine: Any, max_step_tokens: int
) -> None:
    prompt = _prompt(1, 150)
    async with start_worker(max_step_tokens=max_step_tokens) as worker:
        decode = await worker.connect()
        await decode.ask("s", prompt, 1)
        commit = await decode.commit()
        assert commit.num_tokens == 150
        assert commit.nbytes == 150 * load_engine().facts.geometry.kv_token_nbytes
        _assert_close(decode.kv_of("s", 150), kv_of_one_pass(load_engine(), prompt))
        await worker.assert_nothing_is_left()


async def test_prompts_of_two_decode_workers_share_steps(
    start_worker: Any, load_engine: Any
) -> None:
    async with start_worker(max_step_tokens=64) as worker:
        decodes = [await worker.connect("d0"), await worker.connect("d1")]
        prompts = {f"s{i}": _prompt(i, 10 + 15 * i) for i in range(8)}
        for index, (sequence_id, prompt) in enumerate(prompts.items()):
            await decodes[index % 2].ask(sequence_id, prompt, index + 1)
        for index in range(8):
            await decodes[index % 2].commit()
        for index, (sequence_id, prompt) in enumerate(prompts.items()):
            landed = decodes[index % 2].kv_of(sequence_id, len(prompt))
            _assert_close(landed, kv_of_one_pass(load_engine(), prompt))
        await worker.assert_nothing_is_left()


async def test_two_decode_workers_may_use_the_same_ids(start_worker: Any) -> None:
    async with start_worker() as worker:
        decodes = [await worker.connect("d0"), await worker.connect("d1")]
        for decode in decodes:
            await decode.ask("same", _prompt(1, 40), 1)
        for decode in decodes:
            await decode.commit()
        await worker.assert_nothing_is_left()


async def test_started_comes_before_the_kv(start_worker: Any) -> None:
    async with start_worker() as worker:
        decode = await worker.connect()
        await decode.ask("s", _prompt(1, 40), 1)
        async with asyncio.timeout(10):
            first = await decode.peer.receive()
        assert isinstance(first, Started)
        assert first.queue_s >= 0
        await decode.commit()


async def test_abort_in_the_middle_is_acknowledged_behind_the_last_write(
    start_worker: Any,
) -> None:
    async with start_worker(max_step_tokens=2) as worker:
        decode = await worker.connect()
        await decode.ask("s", _prompt(1, 1000), 1)
        await decode.receive(Started)
        await decode.peer.send(Abort("s", 1, code=ErrorCode.CANCELLED, message="not wanted"))
        await decode.receive(AbortAck)
        # From here on nothing may come: reuse the memory at once and watch it.
        decode.leases.revoke(1)
        decode.leases.release(1)
        before = bytes(decode.engine.kv_pool.region)
        await decode.ask("t", _prompt(2, 3), 2)
        await decode.commit()
        table = decode.tables["t"]
        layout = decode.engine.kv_pool.layout
        after = bytearray(decode.engine.kv_pool.region)
        for layer in range(layout.geometry.num_layers):
            for region in range(2):
                [(start, nbytes)] = layout.pieces(layer, table, 0, 3)[region]
                after[start : start + nbytes] = before[start : start + nbytes]
        assert bytes(after) == before
        await worker.assert_nothing_is_left()


async def test_abort_of_something_unknown_is_acknowledged(start_worker: Any) -> None:
    async with start_worker() as worker:
        decode = await worker.connect()
        await decode.peer.send(Abort("never", 9, code=ErrorCode.CANCELLED, message="?"))
        ack = await decode.receive(AbortAck)
        assert (ack.sequence_id, ack.generation) == ("never", 9)


async def test_acknowledging_twice_or_out_of_nowhere_is_ignored(start_worker: Any) -> None:
    async with start_worker() as worker:
        decode = await worker.connect()
        await decode.peer.send(CommitAck("never", 9))
        await decode.ask("s", _prompt(1, 40), 1)
        await decode.commit()
        await decode.peer.send(CommitAck("s", 1))
        await decode.ask("t", _prompt(1, 40), 2)
        await decode.commit()
        await worker.assert_nothing_is_left()


async def test_a_lost_decode_worker_frees_everything(start_worker: Any) -> None:
    async with start_worker(max_step_tokens=2) as worker:
        decode = await worker.connect()
        for index in range(4):
            await decode.ask(f"s{index}", _prompt(index, 500), index + 1)
        await decode.receive(Started)
        decode.peer.abort("the test says so")
        await worker.assert_nothing_is_left()
        other = await worker.connect("other")
        await other.ask("s0", _prompt(0, 30), 1)
        await other.commit()


async def test_a_missing_acknowledgement_ends_at_its_deadline(start_worker: Any) -> None:
    async with start_worker(ack_timeout_s=0.3) as worker:
        decode = await worker.connect()
        await decode.ask("s", _prompt(1, 40), 1)
        await decode.receive(Commit)
        abort = await decode.receive(Abort)
        assert abort.code == ErrorCode.DEADLINE_EXCEEDED
        await decode.receive(AbortAck)
        await worker.assert_nothing_is_left()


async def test_a_deadline_in_the_middle(start_worker: Any) -> None:
    async with start_worker(max_step_tokens=1) as worker:
        decode = await worker.connect()
        await decode.ask("s", _prompt(1, 2000), 1, timeout_s=0.4)
        abort = await decode.receive(Abort)
        assert abort.code == ErrorCode.DEADLINE_EXCEEDED
        await decode.receive(AbortAck)
        await worker.assert_nothing_is_left()


async def test_a_pool_for_one_prompt_serves_them_one_after_the_other(
    start_worker: Any, load_engine: Any
) -> None:
    block_nbytes = 16 * load_engine().facts.geometry.kv_token_nbytes
    async with start_worker(kv_pool_nbytes=4 * block_nbytes) as worker:
        decode = await worker.connect()
        for index in range(5):
            await decode.ask(f"s{index}", _prompt(index, 60), index + 1)
        order = [(await decode.commit()).sequence_id for _ in range(5)]
        assert order == ["s0", "s1", "s2", "s3", "s4"]
        await worker.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("tokens", "code", "word"),
    [
        ([1] * 2305, ErrorCode.PROMPT_TOO_LONG, "2304"),
        ([1, 2, 260], ErrorCode.MALFORMED, "260"),
    ],
)
async def test_bad_prompts_are_refused_by_name(
    start_worker: Any, tokens: list[int], code: ErrorCode, word: str
) -> None:
    async with start_worker() as worker:
        decode = await worker.connect()
        await decode.peer.send(Prefill("s", 1, tokens=tokens, timeout_s=5))
        abort = await decode.receive(Abort)
        assert abort.code == code
        assert word in abort.message
        await decode.receive(AbortAck)
        await worker.assert_nothing_is_left()


async def test_one_decode_worker_leaves_room_for_others(start_worker: Any) -> None:
    async with start_worker(max_prompts_per_peer=1, max_step_tokens=1) as worker:
        greedy, same = await worker.connect("greedy"), await worker.connect("greedy")
        other = await worker.connect("other")
        await greedy.ask("a", _prompt(1, 200), 1)
        # Another connection of the same decode worker has no room of its own.
        async with asyncio.timeout(10):
            while worker.prefiller.stats()["num_prompts"] == 0:
                await asyncio.sleep(0.01)
        await same.peer.send(Prefill("b", 2, tokens=[1, 2], timeout_s=5))
        abort = await same.receive(Abort)
        assert (abort.sequence_id, abort.code) == ("b", ErrorCode.OVERLOADED)
        assert "already has 1 prompts of greedy (max_prompts_per_peer)" in abort.message
        await same.receive(AbortAck)
        await other.ask("c", _prompt(3, 4), 3)
        assert (await other.commit()).sequence_id == "c"
        assert (await greedy.commit()).sequence_id == "a"
        await worker.assert_nothing_is_left()


async def test_gauges_tell_where_prompts_are(start_worker: Any) -> None:
    async with start_worker(max_step_prompts=1, max_step_tokens=1) as worker:
        decode = await worker.connect()
        await decode.ask("a", _prompt(1, 100), 1, timeout_s=50)
        await decode.ask("b", _prompt(2, 10), 2, timeout_s=50)

        def gauges() -> list[float]:
            names = ("waiting_prompts", "running_prompts", "pushing_prompts")
            registry = worker.metrics.registry
            return [registry.get_sample_value(f"pd_prefill_{name}") for name in names]

        async with asyncio.timeout(30):
            while gauges() != [1, 1, 0]:
                await asyncio.sleep(0)
        first = await decode.receive(Commit)
        assert gauges()[2] >= 1  # computed, and not acknowledged
        await decode.peer.send(CommitAck(first.sequence_id, first.generation))
        await decode.commit()
        await worker.assert_nothing_is_left()
        assert gauges() == [0, 0, 0]
        free = worker.metrics.registry.get_sample_value("pd_prefill_free_blocks")
        assert free == worker.prefiller.stats()["blocks"]["free"]


async def test_a_full_table_and_a_draining_worker_refuse(start_worker: Any) -> None:
    async with start_worker(max_prompts=1, max_step_tokens=1) as worker:
        decode = await worker.connect()
        await decode.ask("a", _prompt(1, 200), 1)
        await decode.peer.send(Prefill("b", 2, tokens=[1, 2], timeout_s=5))
        abort = await decode.receive(Abort)
        assert (abort.sequence_id, abort.code) == ("b", ErrorCode.OVERLOADED)
        await decode.receive(AbortAck)
        worker.prefiller.is_draining = True
        await decode.peer.send(Prefill("c", 3, tokens=[1, 2], timeout_s=5))
        abort = await decode.receive(Abort)
        assert (abort.sequence_id, abort.code) == ("c", ErrorCode.SHUTTING_DOWN)
        await decode.receive(AbortAck)
        # What was taken on before is finished.
        assert (await decode.commit()).sequence_id == "a"
        await worker.assert_nothing_is_left()
