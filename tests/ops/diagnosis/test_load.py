"""From metrics to figures; which bottleneck they mean is tested in test_bottleneck."""

from dataclasses import replace
from typing import Any

import pytest

from ops.diagnosis.bottleneck import diagnose
from ops.diagnosis.interval import Interval
from ops.diagnosis.load import Load, busy_share, measure_load
from ops.diagnosis.place import Place
from tests.ops.diagnosis.made_services import SECONDS, interval, worker_entry

ROUTER = {
    "pd_router_requests_in_flight": 9.0,
    "pd_router_sequences_waiting": 6.0,
    "pd_router_sequences_running": 3.0,
    "pd_router_process_cpu_seconds_total": 1.0,
    "gen_ai_server_time_to_first_token_seconds_sum": 10.0,
    "gen_ai_server_time_to_first_token_seconds_count": 5.0,
}
DECODE = {
    "pd_decode_waiting_sequences": 6.0,
    "pd_decode_fetching_sequences": 4.0,
    "pd_decode_running_sequences": 3.0,
    "pd_decode_queue_seconds_sum": 1.0,
    "pd_decode_queue_seconds_count": 5.0,
    "pd_decode_step_seconds_sum": 2.0,
    "pd_decode_step_seconds_count": 100.0,
    "pd_decode_batch_size_sum": 300.0,
    "pd_decode_batch_size_count": 100.0,
    "pd_decode_free_blocks": 25.0,
    "pd_decode_preemptions_total": 2.0,
    "pd_decode_output_tokens_total": 300.0,
    "pd_decode_handoff_seconds_sum": 8.0,
    "pd_decode_handoff_seconds_count": 5.0,
    "pd_decode_handoff_exposed_seconds_sum": 2.0,
    "pd_decode_handoff_exposed_seconds_count": 5.0,
    "pd_decode_handoff_bytes_sum": 4e6,
    "pd_decode_handoff_bytes_count": 5.0,
}
PREFILL = {
    "pd_prefill_waiting_prompts": 3.0,
    "pd_prefill_running_prompts": 1.0,
    "pd_prefill_pushing_prompts": 1.0,
    "pd_prefill_step_seconds_sum": 3.0,
    "pd_prefill_step_seconds_count": 30.0,
    "pd_prefill_free_blocks": 50.0,
    "pd_prefill_computed_tokens_total": 4000.0,
    "pd_prefill_prefill_seconds_sum": 3.0,
    "pd_prefill_prefill_seconds_count": 5.0,
    "pd_prefill_queue_seconds_sum": 9.0,
    "pd_prefill_queue_seconds_count": 5.0,
}
GAUGES = ("waiting", "fetching", "running", "pushing", "free", "in_flight")


def held(metrics: dict[str, float]) -> dict[str, float]:
    """The gauges alone: they were the same before."""
    return {name: value for name, value in metrics.items() if any(g in name for g in GAUGES)}


def made(role: str, metrics: dict[str, float], **health: Any) -> Any:
    return interval(role, f"{role}-0", before=held(metrics), after=metrics, **health)


@pytest.fixture
def load() -> Load:
    decode = made(
        "decode",
        DECODE,
        blocks={"free": 25, "used": 75},
        max_num_seqs=7,
        prefill_workers={
            "prefill-0": {"carrier": "tcp", "bandwidth_bytes_per_s": 5e8},
            "prefill-1": {"carrier": "mapped", "bandwidth_bytes_per_s": 3e9},
        },
    )
    prefill = made("prefill", PREFILL, blocks={"free": 50, "used": 50})
    return measure_load(made("router", ROUTER), [prefill, decode])


def test_figures(load: Load) -> None:
    assert load.seconds == SECONDS
    assert load.num_requests == 9.0
    assert load.router_cpu_share == 0.25
    assert load.ttft_s == 2.0
    assert load.num_held_at_router == 0.0
    assert load.num_decode_waiting == 2.0  # 6 wait, for 4 of them KV is made
    assert load.num_fetching == 4.0
    assert load.num_decoding == 3.0
    assert load.decode_busy_share == 0.5
    assert (load.decode_step_s, load.decode_batch) == (0.02, 3.0)
    assert load.is_decode_full_batch
    assert load.free_decode_share == 0.25
    assert load.num_preemptions == 2.0
    assert (load.num_prefill_waiting, load.num_prefilling) == (3.0, 1.0)
    assert (load.prefill_busy_share, load.prefill_s) == (0.75, 0.6)
    assert load.free_prefill_share == 0.5
    assert load.num_handing_over == 1.0
    assert load.handoff_exposed_s == pytest.approx(0.4)
    assert load.handoff_bytes_per_s == 1e6
    assert load.path_bytes_per_s == 5e8
    assert load.path_share is None  # two paths, and nobody tells what each carries
    assert load.carriers == ("mapped", "tcp")
    assert load.unseen == ()


def through(name: str, before: object, after: object, *, bandwidth: float = 1e6) -> Any:
    """A decode worker whose path to ``name`` has brought so many bytes at the two looks."""

    def health(nbytes: object) -> dict[str, Any]:
        path = {"carrier": "tcp", "bandwidth_bytes_per_s": bandwidth, "num_bytes_received": nbytes}
        return {"prefill_workers": {name: path}}

    pair = made("decode", DECODE)
    return Interval(
        replace(pair.before, health=health(before)), replace(pair.after, health=health(after))
    )


@pytest.mark.parametrize(
    ("before", "after", "share", "bytes_per_s"),
    [
        (1e6, 1e6 + 0.8e6 * SECONDS, 0.8, 1e6),
        (1e6, 1e6 + 3e6 * SECONDS, 3.0, 3e6),
        # Another connection: only handoffs that ended are known.
        (5e6, 1e6, 0.0, 1e6),
        (None, 1e6, 1.0, 1e6),
        ("many", "more", 1.0, 1e6),
    ],
)
def test_bytes_of_handoffs_that_have_not_ended(
    before: object, after: object, share: float, bytes_per_s: float
) -> None:
    load = measure_load(None, [through("prefill-0", before, after)])
    assert load.path_share == pytest.approx(share)
    assert load.handoff_bytes_per_s == pytest.approx(bytes_per_s)


def test_without_any_service_nothing_is_known() -> None:
    load = measure_load(None, [])
    assert load.num_decoding is None
    assert load.num_requests is None
    assert "router did not answer" in load.unseen[0]
    assert diagnose(load).place is Place.UNKNOWN


def test_metrics_of_another_version_leave_gaps_and_no_errors() -> None:
    load = measure_load(interval("router"), [interval("decode"), interval("prefill")])
    assert load.num_decoding is None
    assert load.prefill_busy_share is None
    assert diagnose(load).place is Place.UNKNOWN


def test_a_restarted_worker_is_named_and_its_rates_are_left_out() -> None:
    started = "pd_decode_process_start_time_seconds"
    decode = interval(
        "decode",
        "decode-0",
        before={**held(DECODE), started: 1.0},
        after={**DECODE, started: 2.0},
    )
    load = measure_load(made("router", ROUTER), [decode])
    assert load.output_tokens_per_s is None
    assert load.decode_busy_share is None
    assert load.num_fetching == 4.0  # a gauge needs no history
    assert any("decode-0 was restarted" in clause for clause in load.unseen)


def test_workers_that_were_not_asked_are_known_from_the_routers_list() -> None:
    workers = [
        worker_entry("prefill", "prefill-9", num_waiting=5, num_running=1),
        worker_entry("decode", "decode-9", num_waiting=8, num_running=2),
    ]
    load = measure_load(made("router", ROUTER, workers=workers), [])
    assert (load.num_prefill_waiting, load.num_prefilling) == (5.0, 1.0)
    assert load.num_decode_waiting == 2.0  # 8 less the 6 whose prompts the prefill worker has
    assert (load.num_fetching, load.num_decoding) == (6.0, 2.0)
    assert load.num_held_at_router is None
    assert sum("was not asked" in clause for clause in load.unseen) == 2
    assert diagnose(load).place is Place.PREFILL_QUEUE


def test_a_list_that_is_no_list_is_ignored() -> None:
    workers: Any = [None, "x", {"role": "decode", "instance_id": 7, "num_waiting": "many"}]
    load = measure_load(made("router", ROUTER, workers=workers), [])
    assert load.num_decode_waiting == 0.0


@pytest.mark.parametrize(
    ("steps_s", "cpu_s", "expected"),
    [
        (2.0, 4.0, 0.5),
        (9.0, 4.0, 1.0),  # a long step that began before
        (0.0, 3.6, 0.9),  # a long step that has not ended
        (0.0, 0.4, 0.0),  # the event loop alone
    ],
)
def test_how_busy_a_worker_is(steps_s: float, cpu_s: float, expected: float) -> None:
    worker = interval(
        "prefill",
        after={
            "pd_prefill_step_seconds_sum": steps_s,
            "pd_prefill_process_cpu_seconds_total": cpu_s,
        },
    )
    assert busy_share(worker) == pytest.approx(expected)
