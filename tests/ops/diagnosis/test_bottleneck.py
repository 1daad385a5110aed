"""One load for each diagnosis, and what must not be taken for one."""

from dataclasses import replace

import pytest

from ops.diagnosis.bottleneck import Diagnosis, diagnose
from ops.diagnosis.load import Load
from ops.diagnosis.place import WAITING_PLACES, Place, places
from ops.node.finding import Verdict

IDLE = Load(
    seconds=3.0,
    num_requests=0.0,
    router_cpu_share=0.01,
    num_held_at_router=0.0,
    num_decode_waiting=0.0,
    num_fetching=0.0,
    num_decoding=0.0,
    decode_busy_share=0.0,
    free_decode_share=1.0,
    num_preemptions=0.0,
    num_prefill_waiting=0.0,
    num_prefilling=0.0,
    prefill_busy_share=0.0,
    num_prefill_workers=1,
    free_prefill_share=1.0,
    num_handing_over=0.0,
)
LOADS = {
    Place.IDLE: IDLE,
    Place.UNKNOWN: Load(),
    Place.PREFILL_QUEUE: replace(
        IDLE,
        num_prefill_waiting=7.0,
        num_prefilling=1.0,
        prefill_busy_share=0.97,
        num_fetching=8.0,
        num_decoding=0.3,
        prefill_tokens_per_s=500.0,
    ),
    Place.HANDOFF: replace(
        IDLE,
        num_handing_over=6.0,
        num_fetching=7.0,
        num_prefilling=1.0,
        prefill_busy_share=0.9,
        handoff_bytes_per_s=9e7,
        path_bytes_per_s=1e8,
        path_share=0.95,
        handoff_exposed_s=4.0,
        handoff_nbytes=6e7,
        carriers=("tcp",),
        num_decoding=1.0,
    ),
    Place.DECODE_MEMORY: replace(
        IDLE, num_decode_waiting=6.0, num_decoding=2.0, decode_busy_share=0.9,
        free_decode_share=0.2, num_preemptions=4.0,
    ),
    Place.DECODE_PLACES: replace(
        IDLE, num_decode_waiting=6.0, num_decoding=2.0, decode_busy_share=0.9,
        free_decode_share=0.9, is_decode_full_batch=True,
    ),
    Place.ROUTER: replace(IDLE, num_held_at_router=5.0, num_decoding=2.0, decode_busy_share=0.9),
    Place.PREFILL_COMPUTE: replace(
        IDLE, num_prefilling=0.8, prefill_busy_share=0.7, num_fetching=0.8, prefill_s=2.0
    ),
    Place.DECODE_COMPUTE: replace(
        IDLE, num_decoding=4.0, decode_busy_share=0.95, decode_batch=4.2, decode_step_s=0.01
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", Place)
def test_each_diagnosis(place: Place) -> None:
    diagnosis = diagnose(LOADS[place])
    assert diagnosis.place is place
    wanted = Verdict.UNKNOWN if place is Place.UNKNOWN else Verdict.OK
    assert diagnosis.verdict is (Verdict.WARN if place in WAITING_PLACES else wanted)
    assert diagnosis.reason
    assert diagnosis.next_step
    assert "None" not in diagnosis.reason + diagnosis.next_step


def said(load: Load) -> Diagnosis:
    diagnosis = diagnose(load)
    assert diagnosis.place in diagnosis.num_at
    return diagnosis


def test_the_figures_that_decided_are_in_the_reason() -> None:
    diagnosis = said(LOADS[Place.HANDOFF])
    assert "6.1 of 8.0 sequences" in diagnosis.reason
    assert "at 90 MB/s where the path was measured with 100 MB/s" in diagnosis.reason
    assert "60 MB adds 4 s" in diagnosis.reason
    figures = {figure.key: figure for figure in diagnosis.figures}
    assert figures["handoff_bytes_per_s"].value == 9e7
    assert figures["handoff_bytes_per_s"].text == "90 MB/s"
    assert "pd_decode_handoff_bytes" in figures["handoff_bytes_per_s"].metrics


@pytest.mark.parametrize(
    ("change", "step"),
    [
        ({}, "the path is full"),
        ({"path_share": 0.1}, "less than when it was measured"),
        ({"path_share": None}, "less than when it was measured"),
        ({"free_prefill_share": 0.02}, "kv_pool_nbytes of [prefill]"),
    ],
)
def test_a_slow_handoff_has_three_causes(change: dict[str, float | None], step: str) -> None:
    assert step in said(replace(LOADS[Place.HANDOFF], **change)).next_step  # type: ignore[arg-type]


def test_prompts_that_wait_while_nobody_computes_wait_for_the_path() -> None:
    load = replace(
        IDLE, num_prefill_waiting=5.0, num_prefilling=3.0, prefill_busy_share=0.1, num_fetching=8.0
    )
    assert said(load).place is Place.HANDOFF


def test_a_path_that_is_fuller_than_the_workers_is_what_prompts_wait_for() -> None:
    load = replace(
        IDLE, num_prefilling=2.0, prefill_busy_share=0.55, num_fetching=2.0, num_decode_waiting=6.0
    )
    assert said(load).place is Place.PREFILL_QUEUE
    assert said(replace(load, path_share=0.97)).place is Place.HANDOFF
    # Both are full: what is used more decides.
    full = replace(load, path_share=0.9, prefill_busy_share=0.99)
    assert said(full).place is Place.PREFILL_QUEUE


def test_blocks_held_by_sequences_whose_prompt_waits_are_the_prefill_workers_fault() -> None:
    load = replace(LOADS[Place.PREFILL_QUEUE], num_decode_waiting=20.0, free_decode_share=0.0)
    diagnosis = said(load)
    assert diagnosis.place is Place.PREFILL_QUEUE
    assert diagnosis.num_at[Place.DECODE_MEMORY] < 1.0


def test_blocks_held_by_sequences_whose_kv_is_under_way_are_the_paths_fault() -> None:
    load = replace(LOADS[Place.HANDOFF], num_decode_waiting=20.0, free_decode_share=0.0)
    assert said(load).place is Place.HANDOFF


def test_a_single_prompt_that_is_computed_does_not_queue() -> None:
    load = replace(IDLE, num_prefilling=1.0, prefill_busy_share=0.63, num_fetching=1.0)
    assert said(load).place is Place.PREFILL_COMPUTE
    # The same, now and then.
    load = replace(load, num_prefilling=0.3, prefill_busy_share=0.2, num_fetching=0.3)
    assert said(load).place is Place.PREFILL_COMPUTE


def test_two_workers_compute_two_prompts() -> None:
    load = replace(IDLE, num_prefilling=2.0, prefill_busy_share=0.9, num_prefill_workers=2)
    assert said(load).place is Place.PREFILL_COMPUTE


def test_a_short_queue_beside_much_decoding_is_not_named() -> None:
    load = replace(LOADS[Place.DECODE_COMPUTE], num_decoding=20.0, num_prefill_waiting=2.0)
    assert said(load).place is Place.DECODE_COMPUTE


def test_a_full_event_loop_is_named_before_all_else() -> None:
    load = replace(LOADS[Place.DECODE_COMPUTE], router_cpu_share=0.97)
    diagnosis = said(load)
    assert diagnosis.place is Place.ROUTER
    assert "0.97 CPUs" in diagnosis.reason
    # An idle router that just burns CPU is none of a request's business.
    assert diagnose(replace(IDLE, router_cpu_share=0.97)).place is Place.IDLE


def test_steps_that_do_not_run_although_there_is_work() -> None:
    load = replace(LOADS[Place.DECODE_COMPUTE], decode_busy_share=0.2)
    diagnosis = said(load)
    assert diagnosis.place is Place.DECODE_COMPUTE
    assert "fill only 20% of the time" in diagnosis.reason
    # Sequences that come now and then leave gaps of their own.
    sometimes = replace(load, num_decoding=0.84, decode_batch=4.2)
    assert "fill only" not in said(sometimes).reason


def test_memory_that_has_room_is_not_at_fault_if_the_batch_is_full() -> None:
    num_at = places(LOADS[Place.DECODE_PLACES])
    assert (num_at[Place.DECODE_PLACES], num_at[Place.DECODE_MEMORY]) == (6.0, 0.0)
    # Full both ways: without blocks more places would not help.
    both = replace(LOADS[Place.DECODE_PLACES], free_decode_share=0.01)
    assert said(both).place is Place.DECODE_MEMORY
