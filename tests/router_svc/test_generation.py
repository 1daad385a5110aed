"""All choices of a request: side by side, failing together, ending on time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import pytest

from router_svc.choice_stream import ChoiceStream, Delta
from router_svc.errors import RequestTimeoutError, UnavailableError, UpstreamError
from router_svc.generation import Generation
from router_svc.metrics import RouterMetrics
from router_svc.sequence import EmitTokens, SequenceEnd, SequencePlan

Behaviour = Callable[[SequencePlan, EmitTokens], Awaitable[SequenceEnd]]


def detokenize(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode("utf-8", "replace")


class FakeDispatcher:
    """Runs each sequence as the test says, and notes which ones were cancelled."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.cancelled: list[str] = []

    async def run(self, plan: SequencePlan, emit: EmitTokens, *, deadline_at: float) -> SequenceEnd:
        del deadline_at
        try:
            return await self.behaviour(plan, emit)
        except asyncio.CancelledError:
            self.cancelled.append(plan.sequence_id)
            raise


def make_generation(
    behaviour: Behaviour, *, timeout_s: float = 10.0, num_choices: int = 2
) -> tuple[Generation, FakeDispatcher, RouterMetrics, list[ChoiceStream]]:
    now = asyncio.get_running_loop().time()
    metrics = RouterMetrics()
    dispatcher = FakeDispatcher(behaviour)
    plans = [
        SequencePlan(f"s{index}", (1,), 9, 1.0, 1.0, 0, 0, (), ignore_eos=False)
        for index in range(num_choices)
    ]
    choices = [
        ChoiceStream(
            index, detokenize, stop=("!",), hidden_token_ids=(), arrived_at=time.monotonic()
        )
        for index in range(num_choices)
    ]
    generation = Generation(
        dispatcher,  # type: ignore[arg-type]
        metrics,
        plans,
        choices,
        deadline_at=now + timeout_s,
    )
    return generation, dispatcher, metrics, choices


async def discard(_delta: Delta) -> None:
    return


def gauge(metrics: RouterMetrics, name: str) -> float | None:
    return metrics.metrics.registry.get_sample_value(f"pd_router_{name}")


async def test_deltas_of_all_choices() -> None:
    async def behave(plan: SequencePlan, emit: EmitTokens) -> SequenceEnd:
        assert await emit(b"a" + plan.sequence_id.encode())
        return SequenceEnd("length")

    generation, _, metrics, choices = make_generation(behave)
    seen: list[Delta] = []

    async def sink(delta: Delta) -> None:
        seen.append(delta)

    await generation.run(sink)
    assert [choice.text for choice in choices] == ["as0", "as1"]
    for index in (0, 1):
        mine = [delta for delta in seen if delta.index == index]
        assert "".join(delta.text for delta in mine) == f"as{index}"
        assert [delta.finish_reason for delta in mine] == [None, "length"]
    assert gauge(metrics, "output_tokens_count") == 2
    assert gauge(metrics, "output_tokens_sum") == 6


async def test_stop_string_tells_the_dispatcher() -> None:
    async def behave(_plan: SequencePlan, emit: EmitTokens) -> SequenceEnd:
        assert await emit(b"a")
        assert not await emit(b"b!c")
        return SequenceEnd("length")

    generation, _, _, choices = make_generation(behave)
    await generation.run(discard)
    assert [(choice.text, choice.finish_reason) for choice in choices] == [("ab", "stop")] * 2


async def test_first_failure_ends_all() -> None:
    async def behave(plan: SequencePlan, _emit: EmitTokens) -> SequenceEnd:
        if plan.sequence_id == "s1":
            raise UpstreamError("broken")
        await asyncio.Event().wait()
        return SequenceEnd("stop")

    generation, dispatcher, metrics, _ = make_generation(behave)
    with pytest.raises(UpstreamError, match="broken"):
        await generation.run(discard)
    assert dispatcher.cancelled == ["s0"]
    assert gauge(metrics, "sequences_waiting") == 0


async def test_deadline() -> None:
    async def behave(_plan: SequencePlan, emit: EmitTokens) -> SequenceEnd:
        await emit(b"a")
        await asyncio.Event().wait()
        return SequenceEnd("stop")

    generation, dispatcher, metrics, _ = make_generation(behave, timeout_s=0.05)
    with pytest.raises(RequestTimeoutError):
        await generation.run(discard)
    assert sorted(dispatcher.cancelled) == ["s0", "s1"]
    assert gauge(metrics, "sequences_running") == 0


async def test_cut_off() -> None:
    started = asyncio.Event()

    async def behave(_plan: SequencePlan, _emit: EmitTokens) -> SequenceEnd:
        started.set()
        await asyncio.Event().wait()
        return SequenceEnd("stop")

    generation, dispatcher, _, _ = make_generation(behave)
    generation.cut_off(UnavailableError("not running yet: no effect"))
    task = asyncio.create_task(generation.run(discard))
    await started.wait()
    generation.cut_off(UnavailableError("the router stops"))
    with pytest.raises(UnavailableError, match="the router stops"):
        await task
    assert len(dispatcher.cancelled) == 2
    generation.cut_off(UnavailableError("over already: no effect"))


async def test_failing_sink_is_passed_on() -> None:
    async def behave(_plan: SequencePlan, emit: EmitTokens) -> SequenceEnd:
        await emit(b"a")
        return SequenceEnd("stop")

    async def sink(_delta: Delta) -> None:
        raise ConnectionResetError("the client has gone")

    generation, _, _, _ = make_generation(behave)
    with pytest.raises(ConnectionResetError):
        await generation.run(sink)


async def test_an_error_for_the_client_wins_over_one_that_is_not() -> None:
    async def behave(plan: SequencePlan, _emit: EmitTokens) -> SequenceEnd:
        if plan.sequence_id == "s0":
            raise ConnectionResetError
        raise UpstreamError("broken")

    generation, _, _, _ = make_generation(behave)
    with pytest.raises(UpstreamError):
        await generation.run(discard)


async def test_cancelling_reaches_every_sequence() -> None:
    started = asyncio.Event()

    async def behave(_plan: SequencePlan, _emit: EmitTokens) -> SequenceEnd:
        started.set()
        await asyncio.Event().wait()
        return SequenceEnd("stop")

    generation, dispatcher, _, _ = make_generation(behave, num_choices=3)
    task = asyncio.create_task(generation.run(discard))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(dispatcher.cancelled) == ["s0", "s1", "s2"]
