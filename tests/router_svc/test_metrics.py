"""Names and kinds of the router's metrics."""

from router_svc.metrics import RouterMetrics


def test_names() -> None:
    metrics = RouterMetrics()
    metrics.ttft_s.observe(0.5)
    metrics.requests.labels("200").inc()
    text = metrics.metrics.render().decode("utf-8")
    for name in (
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_server_time_per_output_token_seconds",
        "gen_ai_server_inter_token_latency_seconds",
        "gen_ai_server_request_duration_seconds",
        "pd_router_input_tokens",
        "pd_router_output_tokens",
    ):
        assert f"# TYPE {name} histogram" in text
    assert "gen_ai_server_time_to_first_token_seconds_sum 0.5" in text
    assert 'pd_router_requests_total{status="200"} 1.0' in text


def test_two_routers_in_one_process_do_not_meet() -> None:
    first, second = RouterMetrics(), RouterMetrics()
    first.resumes.inc()
    assert b"pd_router_resumes_total 0.0" in second.metrics.render()
