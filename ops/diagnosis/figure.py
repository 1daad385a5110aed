"""The figures behind a diagnosis, each with the metrics that it is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ops.diagnosis.amount import number_text, rate_text, share_text, size_text, time_text
from ops.diagnosis.load import Load


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value.

    Attributes:
        key: the name of the field of ``Load``, for programs.
        name: what it is.
        value: in the base unit.
        text: as a person reads it.
        metrics: what it is made of.
    """

    key: str
    name: str
    value: float
    text: str
    metrics: str


_TextOf = Callable[[float | None], str]

# Field of ``Load``, its name, how it is written, from which metrics: in the order in which a
# sequence comes by.
_FIGURES: Final[tuple[tuple[str, str, _TextOf, str], ...]] = (
    ("num_requests", "requests in flight", number_text, "pd_router_requests_in_flight"),
    ("router_cpu_share", "CPUs of the router", number_text, "pd_router_process_cpu_seconds_total"),
    (
        "num_held_at_router",
        "sequences at the router",
        number_text,
        "pd_router_sequences_{waiting,running} less pd_decode_{waiting,running}_sequences",
    ),
    ("ttft_s", "time to first token", time_text, "gen_ai_server_time_to_first_token_seconds"),
    (
        "num_decode_waiting",
        "sequences without blocks or place",
        number_text,
        "pd_decode_queue_seconds; pd_decode_{waiting,fetching}_sequences",
    ),
    ("free_decode_share", "decode blocks free", share_text, "pd_decode_free_blocks"),
    ("num_preemptions", "preemptions", number_text, "pd_decode_preemptions_total"),
    (
        "num_fetching",
        "sequences whose KV is made",
        number_text,
        "pd_decode_handoff_seconds; pd_decode_fetching_sequences",
    ),
    (
        "num_prefill_waiting",
        "prompts not begun",
        number_text,
        "pd_prefill_queue_seconds; pd_prefill_waiting_prompts",
    ),
    (
        "num_prefilling",
        "prompts being computed",
        number_text,
        "pd_prefill_prefill_seconds; pd_prefill_running_prompts",
    ),
    ("prefill_busy_share", "prefill workers busy", share_text, "pd_prefill_step_seconds"),
    ("free_prefill_share", "prefill blocks free", share_text, "pd_prefill_free_blocks"),
    (
        "prefill_tokens_per_s",
        "prompt tokens/s",
        number_text,
        "pd_prefill_computed_tokens_total",
    ),
    ("prefill_s", "time to compute a prompt", time_text, "pd_prefill_prefill_seconds"),
    (
        "num_handing_over",
        "sequences whose KV is on its way",
        number_text,
        "pd_decode_handoff_exposed_seconds; pd_prefill_pushing_prompts",
    ),
    (
        "handoff_exposed_s",
        "time added by a handoff",
        time_text,
        "pd_decode_handoff_exposed_seconds",
    ),
    ("handoff_nbytes", "size of a handoff", size_text, "pd_decode_handoff_bytes"),
    (
        "handoff_bytes_per_s",
        "bandwidth used by handoffs",
        rate_text,
        "pd_decode_handoff_bytes; num_bytes_received of /healthz",
    ),
    ("path_share", "part of the fullest path", share_text, "the two lines around this one"),
    (
        "path_bytes_per_s",
        "bandwidth of the slowest path",
        rate_text,
        "pd_decode_path_bandwidth_bytes_per_second",
    ),
    (
        "num_decoding",
        "sequences that decode",
        number_text,
        "pd_decode_batch_size, pd_decode_step_seconds; pd_decode_running_sequences",
    ),
    ("decode_busy_share", "decode workers busy", share_text, "pd_decode_step_seconds"),
    ("decode_step_s", "time of a decode step", time_text, "pd_decode_step_seconds"),
    ("output_tokens_per_s", "output tokens/s", number_text, "pd_decode_output_tokens_total"),
    ("itl_s", "gap between tokens", time_text, "gen_ai_server_inter_token_latency_seconds"),
)


def figures(load: Load) -> tuple[Figure, ...]:
    """Everything that is known."""
    return tuple(
        Figure(key, name, float(value), text_of(value), metrics)
        for key, name, text_of, metrics in _FIGURES
        if (value := getattr(load, key)) is not None
    )
