"""The pusher: order, and what happens when a prompt is given up while its last writes leave."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvproto.errors import CarrierLost, ConnectionLost, ErrorCode
from kvproto.messages import Abort, AbortAck, Commit, Prefill
from prefill_svc.job import Job, JobEvent, JobState
from prefill_svc.push import Finish, GiveUp, LayerWrite, Pusher
from prefill_svc.transfer import Transfer
from tests.prefill_svc.test_job import _GEOMETRY


class _Peer:
    """Remembers what was sent; ``fault`` is raised by the next send."""

    name = "decode/test"

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.fault: Exception | None = None
        self.is_aborted = False

    async def send(self, message: object) -> None:
        if self.fault is not None:
            raise self.fault
        self.sent.append(message)

    async def flushed(self) -> None:
        pass

    def abort(self, _reason: str) -> None:
        self.is_aborted = True


class _Writer:
    """A carrier whose flush takes until the test says so."""

    def __init__(self) -> None:
        self.num_writes = 0
        self.flushing = asyncio.Event()
        self.may_flush = asyncio.Event()
        self.write_fault: Exception | None = None
        self.flush_fault: Exception | None = None

    async def write(self, *_: object) -> None:
        if self.write_fault is not None:
            raise self.write_fault
        self.num_writes += 1

    async def flush(self) -> None:
        self.flushing.set()
        await self.may_flush.wait()
        if self.flush_fault is not None:
            raise self.flush_fault


class _Bench:
    """A pusher between a fake peer and a fake writer, and one job in state PUSHING."""

    def __init__(self) -> None:
        self.peer, self.writer = _Peer(), _Writer()
        self.released: list[Job] = []
        self.failures: list[tuple[Job, ErrorCode, str]] = []
        self.pusher = Pusher(
            cast("Any", self.peer),
            max_items=8,
            stall_items=2,
            ack_timeout_s=5.0,
            on_drained=lambda: None,
            on_failed=self._failed,
        )
        request = Prefill("s", 1, tokens=[1, 2], timeout_s=1.0)
        self.job = Job(
            request=request,
            peer=cast("Any", self.peer),
            arrived_at=0.0,
            expires_at=1e9,
            transfer=self._transfer(request),
            on_release=self.released.append,
            state=JobState.PUSHING,
        )

    def _failed(self, job: Job, code: ErrorCode, reason: str) -> None:
        """As the prefiller does."""
        self.failures.append((job, code, reason))
        job.give_up_code, job.give_up_reason = code, reason
        self.pusher.put_nowait(GiveUp(job))
        job.advance(JobEvent.GIVEN_UP)

    def _transfer(self, request: Prefill) -> Transfer:
        peer = SimpleNamespace(remote=SimpleNamespace(facts={}), writer=lambda _: self.writer)
        return Transfer(request, _GEOMETRY, cast("Any", peer))

    def layer_write(self) -> LayerWrite:
        piece: Sequence[memoryview] = (memoryview(bytes(8)), memoryview(bytes(8)))
        return LayerWrite(self.job, 0, 0, 2, tuple(piece))


@pytest.fixture
def bench() -> _Bench:
    return _Bench()


async def test_given_up_while_the_last_writes_leave(bench: _Bench) -> None:
    running = asyncio.create_task(bench.pusher.run())
    bench.pusher.put_nowait(Finish(bench.job))
    async with asyncio.timeout(5):
        await bench.writer.flushing.wait()
        bench.job.give_up_code = ErrorCode.DEADLINE_EXCEEDED
        bench.pusher.put_nowait(GiveUp(bench.job))
        bench.job.advance(JobEvent.GIVEN_UP)
        bench.writer.may_flush.set()
        while not bench.released:
            await asyncio.sleep(0)
    kinds = [type(message) for message in bench.peer.sent]
    assert kinds == [Abort, AbortAck]
    assert not running.done(), "the pusher lives on for the other prompts"
    running.cancel()


async def test_commit_follows_the_writes_and_starts_the_acknowledgement_clock(
    bench: _Bench,
) -> None:
    bench.writer.may_flush.set()
    running = asyncio.create_task(bench.pusher.run())
    bench.pusher.put_nowait(bench.layer_write())
    bench.pusher.put_nowait(Finish(bench.job))
    async with asyncio.timeout(5):
        while not bench.peer.sent:
            await asyncio.sleep(0)
    assert bench.writer.num_writes == 1
    [commit] = bench.peer.sent
    assert isinstance(commit, Commit)
    assert commit.nbytes == 16
    assert bench.job.state is JobState.COMMITTED
    assert bench.job.expires_at < 1e9
    running.cancel()


async def test_writes_of_a_prompt_that_is_over_are_skipped(bench: _Bench) -> None:
    bench.writer.may_flush.set()
    bench.pusher.put_nowait(bench.layer_write())
    bench.job.advance(JobEvent.GIVEN_UP)
    running = asyncio.create_task(bench.pusher.run())
    async with asyncio.timeout(5):
        while not bench.released:
            await asyncio.sleep(0)
    assert bench.writer.num_writes == 0
    running.cancel()


async def test_a_lost_connection_ends_the_pusher_quietly(bench: _Bench) -> None:
    bench.writer.may_flush.set()
    bench.peer.fault = ConnectionLost("gone")
    bench.pusher.put_nowait(Finish(bench.job))
    async with asyncio.timeout(5):
        await bench.pusher.run()
    assert not bench.peer.is_aborted


async def test_a_defect_ends_the_connection(bench: _Bench) -> None:
    bench.writer.may_flush.set()
    bench.peer.fault = RuntimeError("a bug")
    bench.pusher.put_nowait(Finish(bench.job))
    with pytest.raises(RuntimeError, match="a bug"):
        async with asyncio.timeout(5):
            await bench.pusher.run()
    assert bench.peer.is_aborted


async def test_what_was_queued_is_dropped_with_the_connection(bench: _Bench) -> None:
    bench.pusher.put_nowait(bench.layer_write())
    bench.pusher.put_nowait(bench.layer_write())
    bench.pusher.put_nowait(bench.layer_write())
    assert bench.pusher.is_stalled
    bench.job.advance(JobEvent.GIVEN_UP)
    bench.pusher.discard()
    assert bench.released == [bench.job]
    assert bench.pusher.stats()["num_items"] == 0


async def _released(bench: _Bench) -> None:
    running = asyncio.create_task(bench.pusher.run())
    async with asyncio.timeout(5):
        while not bench.released:
            await asyncio.sleep(0)
    assert not running.done(), "messages still pass, and the other prompts may use another carrier"
    running.cancel()


async def test_a_carrier_that_breaks_while_writing_fails_its_prompt_alone(bench: _Bench) -> None:
    bench.writer.write_fault = CarrierLost("retries exceeded")
    bench.writer.flush_fault = CarrierLost("it had failed before")
    bench.writer.may_flush.set()
    for _ in range(3):
        bench.pusher.put_nowait(bench.layer_write())
    await _released(bench)
    assert bench.failures == [(bench.job, ErrorCode.CARRIER_LOST, "retries exceeded")]
    assert bench.peer.sent == [
        Abort("s", 1, code=ErrorCode.CARRIER_LOST, message="retries exceeded"),
        AbortAck("s", 1),
    ]
    assert not bench.peer.is_aborted


async def test_a_carrier_that_breaks_before_the_commit_commits_nothing(bench: _Bench) -> None:
    bench.writer.flush_fault = CarrierLost("retries exceeded")
    bench.writer.may_flush.set()
    bench.pusher.put_nowait(bench.layer_write())
    bench.pusher.put_nowait(Finish(bench.job))
    await _released(bench)
    assert bench.writer.num_writes == 1
    assert [code for _, code, _ in bench.failures] == [ErrorCode.CARRIER_LOST]
    assert [type(message) for message in bench.peer.sent] == [Abort, AbortAck]


async def test_the_promise_of_an_abort_waits_for_the_end_of_the_carrier(bench: _Bench) -> None:
    """What was posted may still be written until then."""
    bench.writer.write_fault = bench.writer.flush_fault = CarrierLost("retries exceeded")
    running = asyncio.create_task(bench.pusher.run())
    bench.pusher.put_nowait(bench.layer_write())
    async with asyncio.timeout(5):
        await bench.writer.flushing.wait()
        assert bench.peer.sent == []
        bench.writer.may_flush.set()
        while len(bench.peer.sent) < 2:
            await asyncio.sleep(0)
    assert isinstance(bench.peer.sent[-1], AbortAck)
    running.cancel()
