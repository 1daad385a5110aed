"""Who serves a sequence: properties that must hold for every set of workers."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router_svc.scheduler import (
    MAX_RANKED_PREFILL_WORKERS,
    WorkerView,
    choose_decode,
    longest_sequence_tokens,
    rank_prefill,
)

WORKER = WorkerView(
    instance_id="w",
    role="decode",
    host="127.0.0.1",
    port=1,
    max_model_len=1000,
    num_blocks=10,
    block_size=16,
    num_free_blocks=10,
)


@st.composite
def worker_lists(draw: st.DrawFn) -> list[WorkerView]:
    counts = st.integers(0, 20)
    workers = []
    for number in range(draw(st.integers(0, 24))):
        num_blocks = draw(st.integers(1, 20))
        worker = WorkerView(
            instance_id=f"w{number}",
            role=draw(st.sampled_from(("prefill", "decode"))),
            host="127.0.0.1",
            port=number + 1,
            max_model_len=draw(st.integers(1, 400)),
            num_blocks=num_blocks,
            block_size=draw(st.sampled_from((1, 16, 32))),
            num_free_blocks=draw(st.integers(0, num_blocks)),
            num_running=draw(counts),
            num_waiting=draw(counts),
            num_waiting_tokens=draw(st.integers(0, 500)),
            num_assigned=draw(counts),
            num_assigned_tokens=draw(st.integers(0, 500)),
            is_draining=draw(st.booleans()),
            is_offered=draw(st.booleans()),
        )
        workers.append(worker)
    return draw(st.permutations(workers))


def fits(worker: WorkerView, num_tokens: int) -> bool:
    return min(worker.max_model_len, worker.num_blocks * worker.block_size) >= num_tokens


@given(worker_lists(), st.integers(1, 500), st.sets(st.sampled_from(["w0", "w1", "w2"])))
def test_choose_decode(workers: list[WorkerView], num_tokens: int, excluded: set[str]) -> None:
    chosen = choose_decode(workers, num_tokens, excluded_ids=excluded)
    allowed = [
        worker
        for worker in workers
        if worker.role == "decode"
        and worker.is_offered
        and not worker.is_draining
        and worker.instance_id not in excluded
        and fits(worker, num_tokens)
    ]
    assert (chosen is None) == (not allowed)
    if chosen is None:
        return
    assert chosen in allowed

    def has_room(worker: WorkerView) -> bool:
        return worker.num_free_blocks * worker.block_size >= num_tokens

    with_room = [worker for worker in allowed if has_room(worker)]
    rivals = with_room or allowed
    assert has_room(chosen) == bool(with_room)
    assert chosen.num_sequences == min(worker.num_sequences for worker in rivals)


@given(worker_lists(), st.integers(1, 500), st.randoms())
def test_decisions_do_not_depend_on_the_order(
    workers: list[WorkerView], num_tokens: int, random: object
) -> None:
    shuffled = list(workers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose_decode(workers, num_tokens) == choose_decode(shuffled, num_tokens)
    assert rank_prefill(workers, num_tokens) == rank_prefill(shuffled, num_tokens)


@given(worker_lists(), st.integers(1, 500))
def test_rank_prefill(workers: list[WorkerView], num_tokens: int) -> None:
    ranked = rank_prefill(workers, num_tokens)
    allowed = [
        worker
        for worker in workers
        if worker.role == "prefill"
        and worker.is_offered
        and not worker.is_draining
        and worker.max_model_len >= num_tokens
    ]
    assert len(ranked) == min(len(allowed), MAX_RANKED_PREFILL_WORKERS)
    assert len(set(ranked)) == len(ranked)
    assert set(ranked) <= set(allowed)
    ahead = [worker.num_waiting_tokens + worker.num_assigned_tokens for worker in ranked]
    assert ahead == sorted(ahead)
    left_out = set(allowed) - set(ranked)
    assert all(
        worker.num_waiting_tokens + worker.num_assigned_tokens >= ahead[-1] for worker in left_out
    )


def test_own_books_count_before_the_worker_reports() -> None:
    busy = replace(WORKER, instance_id="a", num_assigned=1)
    idle = replace(WORKER, instance_id="b")
    assert choose_decode([busy, idle], 10) == idle
    sent = replace(WORKER, role="prefill", instance_id="a", num_assigned_tokens=100)
    free = replace(WORKER, role="prefill", instance_id="b", num_waiting_tokens=50)
    assert rank_prefill([sent, free], 10) == (free, sent)


def test_more_free_tokens_break_a_tie() -> None:
    small = replace(WORKER, instance_id="a", num_free_blocks=2)
    large = replace(WORKER, instance_id="b", num_free_blocks=5)
    assert choose_decode([small, large], 10) == large


def test_longest_sequence() -> None:
    assert longest_sequence_tokens([], 300) == 300
    draining = replace(WORKER, is_draining=True)
    assert longest_sequence_tokens([draining], 300) == 160
    assert longest_sequence_tokens([draining, replace(WORKER, num_blocks=100)], 300) == 300
    assert longest_sequence_tokens([replace(WORKER, role="prefill")], 300) == 300
