"""Settings of a prefill worker."""

from dataclasses import dataclass

from svckit.service_config import MAX_PORT, WorkerConfig
from svckit.setting import option, parse_nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig(WorkerConfig):
    """What a prefill worker needs beside the shared settings."""

    listen_port: int = option(
        "Port on which decode workers ask for prompts to be prefilled; 0 takes a free one.",
        default=7401,
        minimum=0,
        maximum=MAX_PORT,
    )
    admin_port: int = option(
        "Port of /metrics, /healthz and /readyz on 127.0.0.1; 0 takes a free one.",
        default=7411,
        minimum=0,
        maximum=MAX_PORT,
    )
    kv_pool_nbytes: int = option(
        "Memory for the KV of prompts that are computed or handed over, such as 1GiB.",
        default=1 << 30,
        minimum=1,
        parse=parse_nbytes,
    )
    block_size: int = option("Tokens in a KV block.", default=16, minimum=1, maximum=1024)
    max_model_len: int = option(
        "Longest sequence in tokens; 0 takes the model's own limit.", default=0, minimum=0
    )
    max_step_tokens: int = option(
        "Token budget of one step; long prompts are computed in chunks of at most this size.",
        default=256,
        minimum=1,
        maximum=1 << 20,
    )
    max_step_prompts: int = option(
        "Most prompts that share a step.", default=16, minimum=1, maximum=1024
    )
    max_prompts: int = option(
        "Most prompts in the worker, waiting and computing; more are refused.",
        default=256,
        minimum=1,
        maximum=1 << 16,
    )
    max_prompts_per_peer: int = option(
        "Most prompts of one decode worker; more are refused, so that others find room.",
        default=192,
        minimum=1,
        maximum=1 << 16,
    )
    ack_timeout_s: float = option(
        "How long the decode worker may take to acknowledge a finished handoff.",
        default=30.0,
        minimum=0.1,
        maximum=3600.0,
    )
