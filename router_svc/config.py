"""Settings of the router."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from svckit.errors import ConfigError
from svckit.service_config import MAX_PORT, ServiceConfig
from svckit.setting import option, parse_nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig(ServiceConfig):
    """What the router needs beside the shared settings.

    Raises ConfigError if HTTP would listen beyond this host without an API key.
    """

    listen_host: str = option("Address to listen on for HTTP.", default="127.0.0.1")
    listen_port: int = option(
        "Port to listen on for HTTP; 0 takes a free one.", default=8000, minimum=0, maximum=MAX_PORT
    )
    admin_port: int = option(
        "Not used: /metrics, /healthz and /readyz are on the HTTP port.",
        default=0,
        minimum=0,
        maximum=MAX_PORT,
        is_hidden=True,
    )
    control_host: str = option("Address on which workers register.", default="127.0.0.1")
    control_port: int = option(
        "Port on which workers register; 0 takes a free one.",
        default=7400,
        minimum=0,
        maximum=MAX_PORT,
    )
    served_model_name: str = option(
        "Model name in the API; empty means the name of the model folder.", default=""
    )
    api_key_file: Path | None = option(
        "File with the API key that clients must send as a bearer token, mode 0600.", default=None
    )
    max_requests: int = option(
        "Most requests in flight; more are refused with 429.",
        default=256,
        minimum=1,
        maximum=1 << 16,
    )
    default_max_tokens: int = option(
        "Output tokens of a request that names no limit, if the context has room for them.",
        default=512,
        minimum=1,
        maximum=1 << 20,
    )
    max_body_nbytes: int = option(
        "Largest request body; larger ones are refused with 413.",
        default=4 << 20,
        minimum=1024,
        maximum=1 << 30,
        parse=parse_nbytes,
    )
    body_timeout_s: float = option(
        "How long a client may take to send its request body.",
        default=30.0,
        minimum=0.1,
        maximum=3600.0,
    )
    request_timeout_s: float = option(
        "How long a request may take altogether.", default=600.0, minimum=0.1, maximum=86400.0
    )
    first_token_timeout_s: float = option(
        "How long a worker may take to its first token of a sequence, queueing included.",
        default=120.0,
        minimum=0.1,
        maximum=86400.0,
    )
    resume_timeout_s: float = option(
        "How long a sequence that lost its decode worker waits for another one.",
        default=20.0,
        minimum=0.0,
        maximum=3600.0,
    )
    max_resumes: int = option(
        "How many decode workers a sequence may lose before it fails.",
        default=3,
        minimum=0,
        maximum=100,
    )
    lease_s: float = option(
        "How long a worker stays registered without a sign of life.",
        default=3.0,
        minimum=0.1,
        maximum=600.0,
    )

    def __post_init__(self) -> None:
        if not _is_loopback(self.listen_host) and self.api_key_file is None:
            raise ConfigError(
                f"listen_host {self.listen_host} can be reached from other hosts, but no API key "
                "is set; give --api-key-file, or listen on 127.0.0.1."
            )
        if not _is_loopback(self.control_host) and self.secret is None:
            raise ConfigError(
                f"control_host {self.control_host} can be reached from other hosts, but no secret "
                "is set; give --secret-file, or listen on 127.0.0.1."
            )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # A name may resolve to anything.
        return False
