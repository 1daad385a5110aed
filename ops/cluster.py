"""What ``pdctl up`` starts: a pure plan from the wishes to one command line per process."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.cores import cpu_list
from ops.ports import LOOPBACK, PortPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterWishes:
    """How many workers, of what, and the settings all services share.

    ``model_dir`` goes to all services but those in ``roles_with_model``, whose model comes from
    the configuration file or the environment. ``log_level`` None leaves it to them, too.
    """

    num_prefill: int = 1
    num_decode: int = 1
    model_dir: Path | None
    roles_with_model: frozenset[str] = frozenset()
    http_host: str = LOOPBACK
    log_level: str | None = None
    drain_timeout_s: float = 30.0
    config_path: Path | None = None
    secret_file: Path | None = None
    api_key_file: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildSpec:
    """One process to keep running.

    ``command`` lacks --parent-fd, which the supervisor appends. ``stop_rank``: lower ones are
    stopped, and waited for, before higher ones.
    """

    name: str
    command: tuple[str, ...]
    env: dict[str, str]
    ready_url: str
    stop_rank: int


def plan_cluster(
    wishes: ClusterWishes, ports: PortPlan, shares: Sequence[tuple[int, ...]]
) -> list[ChildSpec]:
    """One spec per process: the router, then prefill, then decode workers.

    ``shares[i]`` are the CPUs of worker ``i``. The router is not pinned: it needs little, and
    the kernel finds it a gap.
    """
    roles = ["prefill"] * wishes.num_prefill + ["decode"] * wishes.num_decode
    assert len(roles) == len(ports.workers) == len(shares), "one port and one share per worker"
    specs = [_router(wishes, ports)]
    for worker, role in enumerate(roles):
        number = worker if role == "prefill" else worker - wishes.num_prefill
        specs.append(_worker(wishes, ports, role, number, worker, shares[worker]))
    return specs


def http_url(wishes: ClusterWishes, ports: PortPlan) -> str:
    """Where this host reaches the router's API."""
    listens_everywhere = wishes.http_host in ("", "0.0.0.0", "::")
    host = LOOPBACK if listens_everywhere else wishes.http_host
    return f"http://{f'[{host}]' if ':' in host else host}:{ports.http}"


def _router(wishes: ClusterWishes, ports: PortPlan) -> ChildSpec:
    return ChildSpec(
        name="router",
        command=(
            *_service("router", wishes, "router"),
            *("--listen-host", wishes.http_host, "--listen-port", str(ports.http)),
            *("--control-host", LOOPBACK, "--control-port", str(ports.control)),
            *_optional({"--api-key-file": wishes.api_key_file}),
        ),
        env=worker_env(1),
        ready_url=f"{http_url(wishes, ports)}/readyz",
        stop_rank=0,
    )


def _worker(
    wishes: ClusterWishes,
    ports: PortPlan,
    role: str,
    number: int,
    worker: int,
    cpus: tuple[int, ...],
) -> ChildSpec:
    name = f"{role}-{number}"
    admin_port = ports.admins[worker]
    return ChildSpec(
        name=name,
        command=(
            *_service(role, wishes, name),
            *("--listen-host", LOOPBACK, "--listen-port", str(ports.workers[worker])),
            *("--admin-port", str(admin_port)),
            *("--router-host", LOOPBACK, "--router-port", str(ports.control)),
            *("--threads", str(len(cpus)), "--cpus", cpu_list(cpus)),
        ),
        env=worker_env(len(cpus)),
        ready_url=f"http://{LOOPBACK}:{admin_port}/readyz",
        # After the router, whose last streams need both kinds of worker.
        stop_rank=1,
    )


def _service(role: str, wishes: ClusterWishes, name: str) -> tuple[str, ...]:
    """The flags that all services share."""
    return (
        *(sys.executable, "-m", f"{role}_svc", "--instance-id", name, "--log-format", "json"),
        *("--drain-timeout-s", f"{wishes.drain_timeout_s:g}"),
        *_optional(
            {
                "--model": None if role in wishes.roles_with_model else wishes.model_dir,
                "--log-level": wishes.log_level,
                "--config": wishes.config_path,
                "--secret-file": wishes.secret_file,
            }
        ),
    )


def _optional(flags: Mapping[str, Path | str | None]) -> tuple[str, ...]:
    return tuple(part for flag, value in flags.items() if value for part in (flag, str(value)))


def worker_env(num_threads: int) -> dict[str, str]:
    """Variables that must be set before torch is loaded, for ``num_threads`` compute threads."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        # The service pins itself with --cpus; a runtime that pins its threads once more puts
        # those of all workers on the same first CPUs.
        "KMP_AFFINITY": "none",
        "OMP_PROC_BIND": "false",
        "TOKENIZERS_PARALLELISM": "false",
        # The model is a local folder: nothing may be looked up in a hub.
        "HF_HUB_OFFLINE": "1",
        "PYTHONUTF8": "1",
        "PYTHONUNBUFFERED": "1",
    }
