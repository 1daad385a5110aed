"""The router's metrics; docs/metrics.md gives the formulas.

Names follow OpenTelemetry's generative AI conventions where one exists, in Prometheus's
spelling; the rest is ``pd_router_*``. All times are differences on this process's monotonic
clock.
"""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from svckit.metrics import TIME_BUCKETS_S, Metrics

_TOKEN_BUCKETS: Final = tuple(float(4**power) for power in range(10))


class RouterMetrics:
    """Everything the router counts, in one registry of its own."""

    def __init__(self) -> None:
        self.metrics = Metrics("router")
        self.ttft_s = self._gen_ai_seconds(
            "gen_ai_server_time_to_first_token_seconds",
            "First output token leaves the router, since the request arrived.",
        )
        self.itl_s = self._gen_ai_seconds(
            "gen_ai_server_inter_token_latency_seconds",
            "Gap between two output tokens of a sequence, one sample per gap.",
        )
        self.tpot_s = self._gen_ai_seconds(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean gap of a sequence, one sample per sequence with at least two tokens.",
        )
        self.e2e_s = self._gen_ai_seconds(
            "gen_ai_server_request_duration_seconds",
            "Last output token leaves the router, since the request arrived.",
        )
        self.input_tokens = self._tokens("input_tokens", "Prompt tokens of a sequence.")
        self.output_tokens = self._tokens("output_tokens", "Output tokens of a sequence.")
        self.requests: Counter = self.metrics.counter(
            "requests", "HTTP requests to generate, by status of the answer.", ("status",)
        )
        self.stream_errors: Counter = self.metrics.counter(
            "stream_errors", "Streams that ended with an error event."
        )
        self.disconnects: Counter = self.metrics.counter(
            "disconnects", "Requests whose client left before the end."
        )
        self.resumes: Counter = self.metrics.counter(
            "resumes", "Sequences that lost their decode worker and had to go on elsewhere."
        )
        self.requests_in_flight: Gauge = self.metrics.gauge(
            "requests_in_flight", "Requests admitted and not yet answered."
        )
        self.sequences_waiting: Gauge = self.metrics.gauge(
            "sequences_waiting", "Sequences without a first token yet."
        )
        self.sequences_running: Gauge = self.metrics.gauge(
            "sequences_running", "Sequences between first and last token."
        )
        self.workers: Gauge = self.metrics.gauge(
            "workers", "Workers that can be chosen now.", ("role",)
        )

    def _gen_ai_seconds(self, name: str, help_text: str) -> Histogram:
        return Histogram(name, help_text, registry=self.metrics.registry, buckets=TIME_BUCKETS_S)

    def _tokens(self, name: str, help_text: str) -> Histogram:
        return self.metrics.histogram(name, help_text, buckets=_TOKEN_BUCKETS)
