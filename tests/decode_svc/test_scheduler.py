"""The decode scheduler: nobody overdraws the pool, the oldest always advances."""

from hypothesis import given
from hypothesis import strategies as st

from decode_svc.scheduler import SequenceView, num_blocks_for, plan_step

_BLOCK_SIZE = 16


def _running(name: str, num_tokens: int, num_blocks: int) -> SequenceView:
    return SequenceView(name, num_tokens, num_blocks, is_admitted=True, is_runnable=True)


def _fetching(name: str, num_tokens: int, num_blocks: int) -> SequenceView:
    return SequenceView(name, num_tokens, num_blocks, is_admitted=True, is_runnable=False)


def _waiting(name: str, num_tokens: int) -> SequenceView:
    return SequenceView(name, num_tokens, 0, is_admitted=False, is_runnable=False)


def test_sequences_join_and_leave_between_steps() -> None:
    plan = plan_step(
        [_running("a", 5, 1), _waiting("b", 20)],
        block_size=_BLOCK_SIZE,
        num_free_blocks=10,
        max_num_seqs=4,
    )
    assert plan.run == ("a",)
    assert plan.admit == ("b",)
    assert not plan.preempt


def test_a_block_is_taken_when_the_next_token_needs_it() -> None:
    plan = plan_step(
        [_running("a", 17, 1)], block_size=_BLOCK_SIZE, num_free_blocks=1, max_num_seqs=4
    )
    assert plan.grow == ("a",)


def test_the_youngest_gives_way() -> None:
    plan = plan_step(
        [_running("a", 17, 1), _running("b", 17, 1), _running("c", 3, 1)],
        block_size=_BLOCK_SIZE,
        num_free_blocks=1,
        max_num_seqs=4,
    )
    assert plan.preempt == ("c",)
    assert plan.run == ("a", "b")
    assert plan.grow == ("a", "b")


def test_blocks_under_a_writer_do_not_count_as_free() -> None:
    plan = plan_step(
        [_running("a", 17, 1), _fetching("b", 40, 3)],
        block_size=_BLOCK_SIZE,
        num_free_blocks=0,
        max_num_seqs=4,
    )
    assert plan.preempt == ("b",)
    assert plan.run == ()


def test_admission_keeps_a_block_for_each_sequence_already_in() -> None:
    plan = plan_step(
        [_running("a", 5, 1), _running("b", 5, 1), _waiting("c", 30)],
        block_size=_BLOCK_SIZE,
        num_free_blocks=3,
        max_num_seqs=4,
    )
    assert plan.admit == ()


def test_nobody_overtakes_the_first_that_waits() -> None:
    plan = plan_step(
        [_waiting("a", 500), _waiting("b", 5)],
        block_size=_BLOCK_SIZE,
        num_free_blocks=4,
        max_num_seqs=4,
    )
    assert plan.admit == ()


@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.sampled_from(["run", "fetch", "wait"]), st.booleans()),
        max_size=10,
    ),
    st.integers(0, 40),
    st.integers(1, 8),
)
def test_a_plan_never_overdraws(
    shapes: list[tuple[int, str, bool]], num_free_blocks: int, max_num_seqs: int
) -> None:
    sequences = []
    for index, (num_tokens, kind, is_at_edge) in enumerate(shapes):
        num_blocks = num_blocks_for(num_tokens, _BLOCK_SIZE)
        if kind == "run":
            held = max(1, num_blocks - is_at_edge)
            sequences.append(_running(str(index), num_tokens, held))
        elif kind == "fetch":
            sequences.append(_fetching(str(index), num_tokens, num_blocks))
        else:
            sequences.append(_waiting(str(index), num_tokens))
    by_id = {sequence.sequence_id: sequence for sequence in sequences}
    plan = plan_step(
        sequences,
        block_size=_BLOCK_SIZE,
        num_free_blocks=num_free_blocks,
        max_num_seqs=max_num_seqs,
    )
    returned = sum(by_id[i].num_blocks for i in plan.preempt if by_id[i].is_runnable)
    taken = len(plan.grow) + sum(
        num_blocks_for(by_id[i].num_tokens, _BLOCK_SIZE) for i in plan.admit
    )
    assert taken <= num_free_blocks + returned
    assert not set(plan.preempt) & set(plan.run)
    assert set(plan.grow) <= set(plan.run)
    num_in = sum(s.is_admitted for s in sequences)
    assert len(plan.admit) <= max(0, max_num_seqs - num_in)
    admitted = [s for s in sequences if s.is_admitted]
    if admitted:
        assert admitted[0].sequence_id not in plan.preempt
    for sequence_id in plan.run:
        sequence = by_id[sequence_id]
        needed = num_blocks_for(sequence.num_tokens, _BLOCK_SIZE)
        assert sequence.num_blocks + (sequence_id in plan.grow) >= needed


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=6))
def test_every_sequence_ends_in_a_small_pool(lengths: list[tuple[int, int]]) -> None:
    """A whole life with local prefill: (prompt tokens, output tokens), pool of 8 blocks."""
    num_blocks_total = 8
    tokens = {str(i): prompt for i, (prompt, _) in enumerate(lengths)}
    goals = {str(i): prompt + output for i, (prompt, output) in enumerate(lengths)}
    held: dict[str, int] = {}
    for _ in range(2000):
        if not tokens:
            break
        views = [
            SequenceView(i, n, held.get(i, 0), is_admitted=i in held, is_runnable=i in held)
            for i, n in tokens.items()
        ]
        plan = plan_step(
            views,
            block_size=_BLOCK_SIZE,
            num_free_blocks=num_blocks_total - sum(held.values()),
            max_num_seqs=4,
        )
        for i in plan.preempt:
            del held[i]
        for i in plan.grow:
            held[i] += 1
        for i in plan.admit:
            held[i] = num_blocks_for(tokens[i], _BLOCK_SIZE)
        assert sum(held.values()) <= num_blocks_total
        for i in plan.run:
            tokens[i] += 1
            if tokens[i] >= goals[i]:
                del tokens[i], held[i]
    assert not tokens
