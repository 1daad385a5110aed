"""What a decode worker counts; docs/metrics.md defines each by formula."""

from svckit.metrics import NBYTES_BUCKETS, Metrics


class DecodeMetrics:
    """The metrics of one decode worker, in a registry of their own."""

    def __init__(self) -> None:
        make = Metrics("decode")
        self.registry = make.registry
        self.sequences = make.counter("sequences", "Sequences taken on.")
        self.outcomes = make.counter("outcomes", "Sequences that ended, by reason.", ["reason"])
        self.refusals = make.counter("refusals", "Sequences refused, by wire code.", ["code"])
        self.output_tokens = make.counter("output_tokens", "Tokens made.")
        self.preemptions = make.counter("preemptions", "Sequences that gave their blocks back.")
        self.local_prefills = make.counter("local_prefills", "Prompts prefilled here.")
        self.handoffs = make.counter("handoffs", "Handoffs that were verified.")
        self.handoff_failures = make.counter(
            "handoff_failures", "Attempts at a handoff that failed, by wire code.", ["code"]
        )
        self.cut_connections = make.counter(
            "cut_connections", "Connections cut because an abort was not confirmed in time."
        )
        self.queue_s = make.histogram("queue_seconds", "GENERATE received to blocks reserved.")
        self.handoff_s = make.histogram("handoff_seconds", "PREFILL sent to KV verified.")
        self.handoff_exposed_s = make.histogram(
            "handoff_exposed_seconds", "The same, less the prefill worker's queue and compute time."
        )
        self.handoff_nbytes = make.histogram(
            "handoff_bytes", "KV bytes of one handoff.", buckets=NBYTES_BUCKETS
        )
        self.wire_error = make.gauge(
            "handoff_wire_error", "Relative RMS error of the last handoff whose KV was converted."
        )
        self.path_bandwidth = make.gauge(
            "path_bandwidth_bytes_per_second",
            "Measured bandwidth of the path from a prefill worker, when it was chosen.",
            ["writer", "carrier"],
        )
        self.path_fallbacks = make.counter(
            "path_fallbacks", "Paths for which a better carrier was tried in vain.", ["carrier"]
        )
        self.quarantined_blocks = make.gauge(
            "quarantined_blocks", "KV blocks whose writer has not proven that it has ended."
        )
        self.step_s = make.histogram("step_seconds", "One decode step.")
        self.batch_size = make.histogram(
            "batch_size",
            "Sequences in a step.",
            buckets=tuple(float(2**power) for power in range(11)),
        )
        self.running = make.gauge("running_sequences", "Sequences that take part in steps.")
        self.waiting = make.gauge("waiting_sequences", "Sequences without KV yet.")
        self.fetching = make.gauge(
            "fetching_sequences", "Sequences, of those waiting, whose KV a prefill worker makes."
        )
        self.free_blocks = make.gauge("free_blocks", "KV blocks that nobody holds.")
