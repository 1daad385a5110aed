"""The TCP ports of one host's services."""

import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from svckit.admin import port_sentence
from svckit.errors import ServiceError

LOOPBACK: Final = "127.0.0.1"
MAX_PORT: Final = 65535
_ADMIN_STRIDE: Final = 10


@dataclass(frozen=True, slots=True)
class PortPlan:
    """Who listens where; worker ``i`` owns ``workers[i]`` and ``admins[i]``."""

    http: int
    control: int
    workers: tuple[int, ...]
    admins: tuple[int, ...]

    def flags(self) -> Mapping[int, str]:
        """Each port and the flag of ``pdctl up`` that moves it."""
        based = (self.control, *self.workers, *self.admins)
        return {self.http: "--http-port"} | dict.fromkeys(based, "--base-port")


def plan_ports(http_port: int, base_port: int, num_workers: int) -> PortPlan:
    """Ports counted up from ``base_port``: the router's control port, then one per worker.

    Admin ports lie a multiple of 10 higher (7401 -> 7411), past the last worker. Raises
    ServiceError if the numbers run out or the HTTP port is one of them.
    """
    # + 1: the router's control port comes before the workers'.
    stride = -(-(num_workers + 1) // _ADMIN_STRIDE) * _ADMIN_STRIDE
    workers = tuple(base_port + 1 + worker for worker in range(num_workers))
    admins = tuple(port + stride for port in workers)
    highest = admins[-1]
    if highest > MAX_PORT:
        raise ServiceError(
            f"The ports would go up to {highest}, but {MAX_PORT} is the last; "
            "choose a lower one with --base-port."
        )
    plan = PortPlan(http_port, base_port, workers, admins)
    if http_port in (base_port, *workers, *admins):
        raise ServiceError(
            f"Port {http_port} of --http-port is also used by another service; "
            "choose another one with --http-port or --base-port."
        )
    return plan


def free_ports(num_workers: int) -> PortPlan:
    """Ports that are free now, chosen by the kernel; all held at once so that none repeats."""
    with ExitStack() as stack:
        ports = []
        # Two of the router, two of each worker.
        for _ in range(2 + 2 * num_workers):
            listener = stack.enter_context(socket.socket())
            listener.bind((LOOPBACK, 0))
            ports.append(int(listener.getsockname()[1]))
    http, control, *rest = ports
    return PortPlan(http, control, tuple(rest[:num_workers]), tuple(rest[num_workers:]))


def refuse_busy_ports(plan: PortPlan, http_host: str) -> None:
    """Raise ServiceError naming the first port that cannot be opened, and its flag."""
    for port, flag in plan.flags().items():
        host = http_host if port == plan.http else LOOPBACK
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            # As the services do: a port in TIME_WAIT is not busy.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen(1)
            except OSError as exc:
                raise ServiceError(port_sentence(host, port, flag, exc)) from exc
