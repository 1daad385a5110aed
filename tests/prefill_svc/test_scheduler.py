"""The prefill scheduler: no starvation, no overdraft, short prompts soon."""

from hypothesis import given
from hypothesis import strategies as st

from prefill_svc.scheduler import PromptView, StepPlan, plan_step


def _views(*remaining: int) -> list[PromptView]:
    return [PromptView(str(i), n, 0, 0) for i, n in enumerate(remaining)]


def _shares(plan: StepPlan) -> dict[str, int]:
    return {chunk.sequence_id: chunk.num_tokens for chunk in plan.chunks}


def test_several_short_prompts_share_a_step() -> None:
    plan = plan_step(_views(10, 20, 30), max_step_tokens=256, max_step_prompts=8, num_free_blocks=0)
    assert _shares(plan) == {"0": 10, "1": 20, "2": 30}


def test_a_long_prompt_does_not_hold_up_a_short_one() -> None:
    plan = plan_step(_views(2000, 40), max_step_tokens=256, max_step_prompts=8, num_free_blocks=0)
    assert _shares(plan) == {"0": 216, "1": 40}


def test_short_ones_do_not_starve_the_oldest() -> None:
    plan = plan_step(
        _views(2000, *[100] * 10), max_step_tokens=256, max_step_prompts=16, num_free_blocks=0
    )
    assert _shares(plan)["0"] == 128


def test_a_started_prompt_always_advances() -> None:
    """Its decode worker would take silence for a stall, however many short prompts come."""
    started = PromptView("started", 5000, 100, 0)
    shorts = [PromptView(f"short{i}", 100, 0, 0) for i in range(14)]
    plan = plan_step(
        [PromptView("oldest", 9000, 2000, 0), started, *shorts],
        max_step_tokens=256,
        max_step_prompts=16,
        num_free_blocks=0,
    )
    assert _shares(plan)["started"] == 4
    assert _shares(plan)["oldest"] == 128
    assert sum(_shares(plan).values()) == 256


def test_admission_stops_at_the_first_prompt_that_does_not_fit() -> None:
    prompts = [PromptView("a", 160, 0, 10), PromptView("b", 320, 0, 20), PromptView("c", 16, 0, 1)]
    plan = plan_step(prompts, max_step_tokens=64, max_step_prompts=8, num_free_blocks=15)
    assert plan.admit == ("a",)
    assert set(_shares(plan)) == {"a"}


def test_a_stalled_connection_is_admitted_but_not_run() -> None:
    prompts = [PromptView("a", 100, 20, 0, is_stalled=True), PromptView("b", 50, 0, 0)]
    plan = plan_step(prompts, max_step_tokens=64, max_step_prompts=8, num_free_blocks=0)
    assert _shares(plan) == {"b": 50}


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert plan_step([], max_step_tokens=64, max_step_prompts=8, num_free_blocks=3) == StepPlan(
        (), ()
    )


@st.composite
def _prompts(draw: st.DrawFn) -> list[PromptView]:
    prompts = []
    for index in range(draw(st.integers(0, 12))):
        num_tokens = draw(st.integers(1, 3000))
        num_needed_blocks = draw(st.integers(0, 40))
        num_computed = 0 if num_needed_blocks else draw(st.integers(0, num_tokens - 1))
        prompts.append(
            PromptView(str(index), num_tokens, num_computed, num_needed_blocks, draw(st.booleans()))
        )
    return prompts


@given(_prompts(), st.integers(1, 600), st.integers(1, 8), st.integers(0, 100))
def test_a_plan_keeps_its_promises(
    prompts: list[PromptView], max_step_tokens: int, max_step_prompts: int, num_free_blocks: int
) -> None:
    plan = plan_step(
        prompts,
        max_step_tokens=max_step_tokens,
        max_step_prompts=max_step_prompts,
        num_free_blocks=num_free_blocks,
    )
    by_id = {prompt.sequence_id: prompt for prompt in prompts}
    assert sum(by_id[i].num_needed_blocks for i in plan.admit) <= num_free_blocks
    assert sum(chunk.num_tokens for chunk in plan.chunks) <= max_step_tokens
    assert len(plan.chunks) <= max_step_prompts
    for chunk in plan.chunks:
        prompt = by_id[chunk.sequence_id]
        assert 0 < chunk.num_tokens <= prompt.num_remaining_tokens
        assert chunk.first_token == prompt.num_computed_tokens
        assert not prompt.is_stalled
        assert not prompt.num_needed_blocks or prompt.sequence_id in plan.admit
    ready = [p for p in prompts if not p.is_stalled and not p.num_needed_blocks]
    if ready and ready[0] is prompts[0]:
        # The oldest prompt always advances, and no token of the budget is left unused.
        assert plan.chunks[0].sequence_id == ready[0].sequence_id


@given(st.lists(st.integers(1, 800), min_size=1, max_size=8), st.integers(1, 300))
def test_every_prompt_is_finished_and_the_budget_is_used(lengths: list[int], budget: int) -> None:
    done = [0] * len(lengths)
    num_steps = 0
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        prompts = [PromptView(str(i), n, done[i], 0) for i, n in enumerate(lengths) if done[i] < n]
        plan = plan_step(
            prompts, max_step_tokens=budget, max_step_prompts=len(lengths), num_free_blocks=0
        )
        for chunk in plan.chunks:
            done[int(chunk.sequence_id)] += chunk.num_tokens
        num_steps += 1
    assert num_steps == -(-sum(lengths) // budget)
