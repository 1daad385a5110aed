"""What a prefill worker counts; docs/metrics.md defines each by formula."""

from svckit.metrics import NBYTES_BUCKETS, Metrics


class PrefillMetrics:
    """The metrics of one prefill worker, in a registry of their own."""

    def __init__(self) -> None:
        make = Metrics("prefill")
        self.registry = make.registry
        self.prompts = make.counter("prompts", "Prompts taken on.")
        self.prompt_tokens = make.counter("prompt_tokens", "Tokens of the prompts taken on.")
        self.step_tokens = make.counter("computed_tokens", "Tokens computed.")
        self.outcomes = make.counter("outcomes", "Prompts that ended, by outcome.", ["outcome"])
        self.refusals = make.counter("refusals", "Prompts refused, by wire code.", ["code"])
        self.waiting = make.gauge("waiting_prompts", "Prompts of which nothing is computed yet.")
        self.running = make.gauge("running_prompts", "Prompts begun, with tokens left to compute.")
        self.pushing = make.gauge(
            "pushing_prompts", "Prompts computed, whose KV or acknowledgement is under way."
        )
        self.free_blocks = make.gauge("free_blocks", "KV blocks that nobody holds.")
        self.queue_s = make.histogram("queue_seconds", "Arrival to first step.")
        self.prefill_s = make.histogram("prefill_seconds", "First step to last token computed.")
        self.step_s = make.histogram("step_seconds", "One step.")
        self.handoff_s = make.histogram(
            "handoff_seconds", "First block sent to COMMIT acknowledged."
        )
        self.handoff_nbytes = make.histogram(
            "handoff_bytes", "KV bytes of one handoff.", buckets=NBYTES_BUCKETS
        )
