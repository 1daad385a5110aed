"""Settings of a decode worker."""

from dataclasses import dataclass
from typing import Literal

from kvproto.messages import MAX_LANES
from svckit.service_config import MAX_PORT, WorkerConfig
from svckit.setting import option, parse_nbytes

# The value of ``kv_wire_dtype`` that converts nothing.
POOL_DTYPE = "pool"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig(WorkerConfig):
    """What a decode worker needs beside the shared settings."""

    listen_port: int = option(
        "Port on which the router asks for tokens; 0 takes a free one.",
        default=7402,
        minimum=0,
        maximum=MAX_PORT,
    )
    admin_port: int = option(
        "Port of /metrics, /healthz and /readyz on 127.0.0.1; 0 takes a free one.",
        default=7412,
        minimum=0,
        maximum=MAX_PORT,
    )
    kv_pool_nbytes: int = option(
        "Memory for the KV of all running sequences, such as 1GiB.",
        default=1 << 30,
        minimum=1,
        parse=parse_nbytes,
    )
    block_size: int = option("Tokens in a KV block.", default=16, minimum=1, maximum=1024)
    max_model_len: int = option(
        "Longest sequence in tokens; 0 takes the model's own limit.", default=0, minimum=0
    )
    row_copies: Literal["auto", "yes", "no"] = option(
        "Keep a second layout of some weights, which makes a sequence that decodes alone about a "
        "tenth faster; auto does if it takes at most an eighth of the available memory.",
        default="auto",
    )
    max_num_seqs: int = option(
        "Most sequences that decode together.", default=32, minimum=1, maximum=4096
    )
    max_sequences: int = option(
        "Most sequences in the worker, waiting and running; more are refused.",
        default=256,
        minimum=1,
        maximum=1 << 16,
    )
    max_sequences_per_peer: int = option(
        "Most sequences of one router or client; more are refused, so that others find room.",
        default=192,
        minimum=1,
        maximum=1 << 16,
    )
    local_prefill_tokens: int = option(
        "Prompts of at most this many tokens are prefilled here, without a handoff.",
        default=16,
        minimum=1,
        maximum=1 << 20,
    )
    kv_wire_dtype: Literal["pool", "float16", "bfloat16", "int8"] = option(
        "Element type in which KV travels: pool is that of the pool; a smaller one loses precision "
        "(int8 has one scale per token and head) and the error is in /metrics.",
        default="pool",
    )
    kv_carrier: Literal["auto", "rdma", "mapped", "tcp"] = option(
        "How KV arrives: auto takes RDMA where it is proven and not slower than TCP, else mapped "
        "memory from prefill workers that prove to be on this host, else TCP; rdma and mapped "
        "refuse workers that cannot.",
        default="auto",
    )
    max_lanes: int = option(
        "Most connections to one prefill worker whose KV comes by TCP; more than one are kept only "
        "if measured to be a fifth faster.",
        default=4,
        minimum=1,
        maximum=MAX_LANES,
    )
    min_handoff_bandwidth: int = option(
        "Refuse a prefill worker whose path is measured to carry less than this in a second, such "
        "as 1GiB; 0 takes any.",
        default=0,
        minimum=0,
        parse=parse_nbytes,
    )
    max_quarantined_blocks: int = option(
        "Blocks that may wait for prefill workers that neither confirm an abort nor end; with more "
        "no handoff is begun. 0 means a quarter of the pool.",
        default=0,
        minimum=0,
    )
    connect_timeout_s: float = option(
        "How long connecting to a prefill worker may take.",
        default=5.0,
        minimum=0.1,
        maximum=300.0,
    )
    stall_timeout_s: float = option(
        "How long a started handoff may go without a byte before it is aborted.",
        default=30.0,
        minimum=0.1,
        maximum=3600.0,
    )
    abort_timeout_s: float = option(
        "How long a prefill worker may take to confirm an abort before its connection is cut.",
        default=5.0,
        minimum=0.1,
        maximum=300.0,
    )
