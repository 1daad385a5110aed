"""The settings that all services share, to be inherited and given other defaults."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from svckit.setting import option, parse_cpu_list

MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """What every service needs to listen, log, pin itself and stop."""

    listen_host: str = option("Address to listen on for kvproto.", default="127.0.0.1")
    listen_port: int = option(
        "Port to listen on for kvproto; 0 takes a free one.", minimum=0, maximum=MAX_PORT
    )
    admin_port: int = option(
        "Port of /metrics, /healthz and /readyz on 127.0.0.1; 0 takes a free one.",
        minimum=0,
        maximum=MAX_PORT,
    )
    model: Path = option("Folder of the model: config.json, tokenizer and weights.")
    threads: int = option(
        "Compute threads; 0 means one for each usable CPU.", default=0, minimum=0, maximum=1024
    )
    cpus: tuple[int, ...] = option(
        "CPUs to run on, such as 0 or 0,2 or 0-3; empty means all that are allowed.",
        default=(),
        parse=parse_cpu_list,
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "Least level that is logged.", default="info"
    )
    log_format: Literal["auto", "console", "json"] = option(
        "auto is console on a terminal and json elsewhere.", default="auto"
    )
    instance_id: str = option(
        "Name of this worker; each process adds a random part of its own.", default=""
    )
    drain_timeout_s: float = option(
        "How long running requests may take to finish after SIGTERM.",
        default=30.0,
        minimum=0.0,
        maximum=3600.0,
    )
    secret_file: Path | None = option(
        "File with the shared secret, mode 0600; or set PD_SECRET.", default=None
    )
    tls_cert_file: Path | None = option(
        "Certificate in PEM form, for TLS on every connection between services; needs the two "
        "below.",
        default=None,
    )
    tls_key_file: Path | None = option("Key of that certificate, mode 0600.", default=None)
    tls_ca_file: Path | None = option(
        "The private CA that signed the certificates of all services, and of nobody else.",
        default=None,
    )
    parent_fd: int = option(
        "Open pipe whose end of file means that the supervisor is gone.",
        default=-1,
        minimum=-1,
        is_hidden=True,
    )
    secret: bytes | None = field(default=None, repr=False, metadata={"secret": True})


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig(ServiceConfig):
    """A worker that registers at a router."""

    advertise_host: str = option(
        "Host under which other machines reach this worker; empty means listen_host.", default=""
    )
    mapped_dir: Path | None = option(
        "Private folder of the sockets through which workers on one host share memory; empty means "
        "the user's runtime folder. Both workers need the same.",
        default=None,
    )
    rdma_device: str = option(
        "RDMA device for KV, such as mlx5_0 or mlx5_0:1; empty chooses one, none uses no RDMA.",
        default="",
    )
    rdma_gid_index: int = option(
        "Entry of the port's GID table; -1 takes the RoCE v2 address that suits the peer.",
        default=-1,
        minimum=-1,
        maximum=255,
    )
    rdma_queue_pairs: int = option(
        "RDMA connections to each prefill worker; the decode worker's setting counts.",
        default=1,
        minimum=1,
        maximum=16,
    )
    rdma_traffic_class: int = option(
        "Traffic class of RDMA packets: the DSCP times four.", default=0, minimum=0, maximum=255
    )
    rdma_service_level: int = option(
        "Service level (priority) of RDMA packets.", default=0, minimum=0, maximum=7
    )
    rdma_ack_timeout: int = option(
        "An RDMA packet is sent again after 4.096 us * 2^n without an answer; 14 is 67 ms.",
        default=14,
        minimum=1,
        maximum=31,
    )
    rdma_retry_count: int = option(
        "After so many repetitions an RDMA connection fails; 7 never does on some devices.",
        default=6,
        minimum=0,
        maximum=7,
    )
    rdma_rnr_retry_count: int = option(
        "The same for an answer that says that the receiver is not ready.",
        default=6,
        minimum=0,
        maximum=7,
    )
    rdma_mtu_nbytes: int = option(
        "Largest RDMA packet: 256, 512, 1024, 2048 or 4096; 0 takes what the port has.",
        default=0,
        minimum=0,
        maximum=4096,
    )
    router_host: str = option("Host of the router's control port.", default="127.0.0.1")
    router_port: int = option(
        "The router's control port.", default=7400, minimum=1, maximum=MAX_PORT
    )
