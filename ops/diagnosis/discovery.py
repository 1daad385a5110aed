"""Where the services are to be asked: from flags, the configuration file and the router's list.

Admin ports listen on 127.0.0.1 alone, so only the workers of this host can be asked.
"""

import ipaddress
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ops.api_client import DEFAULT_URL
from ops.diagnosis.json_path import text_at
from ops.ports import LOOPBACK, MAX_PORT, plan_ports
from svckit.errors import ServiceError

# Of each service alone; ``pdctl up`` counts its own ports up, which the router's list tells.
_DEFAULT_ADMIN_PORTS: Final = {"prefill": 7411, "decode": 7412}
_MAX_TARGETS: Final = 128


@dataclass(frozen=True, slots=True)
class Target:
    """An admin port to ask.

    Attributes:
        url: without a path.
        is_required: it was named, so its silence is a failure; else it is a guess.
    """

    url: str
    is_required: bool


@dataclass(frozen=True, slots=True)
class ConfiguredPorts:
    """What a configuration file says about where services are to be asked; None: nothing."""

    router_url: str | None = None
    api_key_file: Path | None = None
    admin_ports: tuple[int, ...] = ()


def read_configured_ports(path: Path | None) -> ConfiguredPorts:
    """The ports of the TOML file; what is not set, or not as it should be, is left out.

    ServiceError if the file cannot be read or is no TOML.
    """
    if path is None:
        return ConfiguredPorts()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ServiceError(
            f"Cannot read the configuration file {path}: {exc.strerror}; name another one with "
            "--config."
        ) from exc
    except ValueError as exc:
        raise ServiceError(f"The configuration file {path} is not valid TOML: {exc}.") from exc
    router = _section(document, "router")
    ports = [_port(_section(document, role).get("admin_port")) for role in _DEFAULT_ADMIN_PORTS]
    return ConfiguredPorts(
        router_url=_router_url(router),
        api_key_file=Path(text_at(router, "api_key_file")) if router.get("api_key_file") else None,
        admin_ports=tuple(port for port in ports if port is not None),
    )


def _section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = document.get(name)
    return section if isinstance(section, dict) else {}


def _port(value: object) -> int | None:
    is_port = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_PORT
    return value if is_port and isinstance(value, int) else None


def _router_url(router: Mapping[str, Any]) -> str | None:
    port = _port(router.get("listen_port"))
    host = text_at(router, "listen_host") or LOOPBACK
    if port is None:
        return None
    host = LOOPBACK if host in ("0.0.0.0", "::") else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def checked_url(url: str) -> str:
    """``url`` without a slash at its end; ServiceError unless it is one of HTTP."""
    if not url.startswith(("http://", "https://")):
        raise ServiceError(
            f"The address {url!r} must start with http:// or https://, such as {DEFAULT_URL}."
        )
    return url.rstrip("/")


def admin_targets(
    urls: Sequence[str], configured: Sequence[int], workers: Sequence[Mapping[str, Any]]
) -> tuple[Target, ...]:
    """Which admin ports to ask, each once.

    Args:
        urls: those named by flags; then nothing is guessed.
        configured: ports of the configuration file.
        workers: the router's list, whose workers on this host have their admin port a multiple of
            ten above their own, as ``pdctl up`` and the default settings count.
    """
    if urls:
        named = dict.fromkeys(checked_url(url) for url in urls)
        return tuple(Target(url, is_required=True) for url in named)
    ports = dict.fromkeys(configured)
    strides = dict.fromkeys((_stride(1), _stride(len(workers))))
    for worker in workers:
        host, _, text = text_at(worker, "address").rpartition(":")
        if is_loopback(host) and text.isdecimal():
            ports.update(dict.fromkeys(int(text) + stride for stride in strides))
    ports.update(dict.fromkeys(_DEFAULT_ADMIN_PORTS.values()))
    usable = [port for port in ports if 0 < port <= MAX_PORT][:_MAX_TARGETS]
    return tuple(Target(f"http://{LOOPBACK}:{port}", is_required=False) for port in usable)


def _stride(num_workers: int) -> int:
    """How far above its own port the admin port of a worker lies; ``ops.ports`` decides."""
    plan = plan_ports(MAX_PORT, 1, max(1, min(num_workers, _MAX_TARGETS)))
    return plan.admins[0] - plan.workers[0]


def is_loopback(host: str) -> bool:
    """True if ``host`` means the machine that it is said on."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
