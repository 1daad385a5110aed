"""All choices of one request, generated side by side."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from router_svc.choice_stream import ChoiceStream, Delta
from router_svc.dispatch import Dispatcher
from router_svc.errors import ApiError, RequestTimeoutError
from router_svc.metrics import RouterMetrics
from router_svc.sequence import SequencePlan

# Takes what a choice gained, in order within a choice; may suspend while the client is slow.
DeltaSink = Callable[[Delta], Awaitable[None]]


class Generation:
    """Runs the `plans` of one request; `choices[i]` belongs to ``plans[i]``.

    `deadline_at` is on the event loop's clock.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        plans: Sequence[SequencePlan],
        choices: Sequence[ChoiceStream],
        *,
        deadline_at: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._plans = plans
        self._choices = choices
        self._deadline_at = deadline_at
        self._is_running = False
        self._timeout = asyncio.timeout_at(deadline_at)
        self._timeout_error: ApiError = RequestTimeoutError(
            "The request did not finish within its time limit. Lower max_tokens, or raise "
            "request_timeout_s of the router."
        )

    def cut_off(self, error: ApiError) -> None:
        """End the generation now if it is running; `run` raises `error`."""
        if self._is_running:
            self._timeout_error = error
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def run(self, sink: DeltaSink) -> None:
        """Generate everything, once; `sink` gets each delta, the last of a choice with its reason.

        The first failure ends all choices. Raises ApiError, or what `sink` raised. Cancelling it
        stops all sequences at their workers.
        """
        try:
            async with self._timeout, asyncio.TaskGroup() as group:
                self._is_running = True
                for plan, choice in zip(self._plans, self._choices, strict=True):
                    group.create_task(
                        self._run_choice(plan, choice, sink), name=f"sequence-{plan.sequence_id}"
                    )
        except TimeoutError:
            raise self._timeout_error from None
        except ExceptionGroup as group_error:
            raise _most_telling(group_error) from group_error
        finally:
            self._is_running = False

    async def _run_choice(self, plan: SequencePlan, choice: ChoiceStream, sink: DeltaSink) -> None:
        # Not the event loop's clock: uvloop's counts whole milliseconds.
        clock = time.monotonic
        metrics = self._metrics
        stage = metrics.sequences_waiting
        stage.inc()

        async def emit(token_ids: Sequence[int]) -> bool:
            nonlocal stage
            delta = choice.push(token_ids, clock())
            if delta.is_first:
                stage.dec()
                stage = metrics.sequences_running
                stage.inc()
            await sink(delta)
            return not choice.is_matched

        try:
            end = await self._dispatcher.run(plan, emit, deadline_at=self._deadline_at)
            last = choice.finish(end)
        finally:
            stage.dec()
        self._observe(plan, choice)
        await sink(last)

    def _observe(self, plan: SequencePlan, choice: ChoiceStream) -> None:
        metrics = self._metrics
        metrics.input_tokens.observe(len(plan.prompt_token_ids))
        metrics.output_tokens.observe(len(choice.token_ids))
        for histogram, value in (
            (metrics.ttft_s, choice.ttft_s),
            (metrics.tpot_s, choice.tpot_s),
            (metrics.e2e_s, choice.e2e_s),
        ):
            # Undefined is not zero: without a token there is no time to it.
            if value is not None:
                histogram.observe(value)
        for gap_s in choice.itls_s:
            metrics.itl_s.observe(gap_s)


def _most_telling(group: ExceptionGroup[Exception]) -> Exception:
    """Return the error a client should see, or the first one if none is meant for clients."""
    leaves = list(_leaves(group))
    for leaf in leaves:
        if isinstance(leaf, ApiError):
            return leaf
    return leaves[0]


def _leaves(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for member in error.exceptions:
            yield from _leaves(member)
    else:
        yield error
