from ops.timing_table import timing_table

TIMINGS = {
    "decode_queue_s": 0.001,
    "prefill_queue_s": 0.002,
    "prefill_s": 0.4,
    "prefill_worker": "prefill-0",
    "handoff_s": 0.05,
    "handoff_nbytes": 5_000_000,
    "carrier": "tcp",
    "first_step_s": 0.06,
    "num_output_tokens": 11,
    "ttft_s": 0.5,
    "e2e_s": 1.5,
    "itl_s": {"num": 10, "mean": 0.1, "p50": 0.09, "p99": 0.2, "max": 0.25},
}


def test_all_rows() -> None:
    assert timing_table(TIMINGS) == [
        "waiting for prefill         2.0 ms",
        "prefill                   400.0 ms  by prefill-0",
        "handoff                    50.0 ms  not hidden by prefill; 5.00 MB by tcp",
        "waiting for decode          1.0 ms",
        "first decode step          60.0 ms",
        "TTFT                      500.0 ms",
        "ITL                       100.0 ms  mean; p50 90.0, p99 200.0, max 250.0 ms",
        "output                       11 tokens  10.0 tokens/s after the first",
        "total                    1500.0 ms",
    ]


def test_a_prompt_prefilled_by_decode_has_no_handoff() -> None:
    rows = timing_table({"carrier": "local"})
    assert rows == ["handoff                    none  (prefilled by the decode worker)"]


def test_one_token_has_no_rate_and_no_itl() -> None:
    rows = timing_table({"num_output_tokens": 1, "ttft_s": 0.5, "e2e_s": 0.5, "itl_s": None})
    assert [row.split()[0] for row in rows] == ["TTFT", "output", "total"]
    assert rows[1].endswith("1 tokens")


def test_nothing_known_is_an_empty_table() -> None:
    assert timing_table({}) == []
