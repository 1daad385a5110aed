"""``pdctl up``: all services of one host, supervised."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import click

from ops.cache_folder import cache_folder
from ops.cluster import ClusterWishes, http_url, plan_cluster
from ops.cores import divide_cores, place_in_sysfs
from ops.model_cache import default_model_dir, fetch_model
from ops.ports import PortPlan, plan_ports, refuse_busy_ports
from ops.restart_policy import RestartPolicy
from ops.run_folder import make_run_folder, write_ready_file
from ops.start import SERVICES, has_model
from ops.supervisor import Supervisor
from svckit.lifecycle import Lifecycle, Step, run_service
from svckit.logging import configure_logging

# A service ends its drain this much after its deadline at the latest (svckit/lifecycle.py),
# and cleans up after that.
_STOP_MARGIN_S: Final = 10.0


@click.command("up")
@click.option("--prefill", "num_prefill", default=1, type=click.IntRange(1, 64), show_default=True)
@click.option("--decode", "num_decode", default=1, type=click.IntRange(1, 64), show_default=True)
@click.option("--model", "model_dir", type=click.Path(path_type=Path), help="Model folder.")
@click.option("--http-host", default="127.0.0.1", show_default=True, help="Address of the API.")
@click.option("--http-port", default=8000, type=click.IntRange(1, 65535), show_default=True)
@click.option(
    "--base-port",
    default=7400,
    type=click.IntRange(1, 65535),
    show_default=True,
    help="First port of the services; workers and admin ports are counted up from it.",
)
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="TOML file.")
@click.option("--secret-file", type=click.Path(path_type=Path), help="Shared secret, mode 0600.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="API key, mode 0600.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Of all services; else as configured for each.",
)
@click.option("--drain-timeout-s", default=30.0, type=click.FloatRange(0, 3600), show_default=True)
@click.option("--ready-timeout-s", default=180.0, type=click.FloatRange(1, 3600), show_default=True)
@click.option("--max-restarts", default=5, type=click.IntRange(0, 1000), show_default=True)
@click.option("--ready-file", type=click.Path(path_type=Path), help="JSON written when ready.")
def up_command(
    num_prefill: int,
    num_decode: int,
    model_dir: Path | None,
    http_host: str,
    http_port: int,
    base_port: int,
    config_path: Path | None,
    secret_file: Path | None,
    api_key_file: Path | None,
    log_level: str | None,
    drain_timeout_s: float,
    ready_timeout_s: float,
    max_restarts: int,
    ready_file: Path | None,
) -> None:
    """Run a router, prefill and decode workers on this host until Ctrl-C or SIGTERM.

    A worker that dies is started again. Ctrl-C drains, a second one kills. Further settings come
    from --config and from PD_PREFILL_*, PD_DECODE_* and PD_ROUTER_* variables.
    """
    ports = plan_ports(http_port, base_port, num_prefill + num_decode)
    refuse_busy_ports(ports, http_host)
    roles_with_model = frozenset() if model_dir else configured_models(config_path)
    if model_dir is None and len(roles_with_model) < len(SERVICES):
        model_dir = fetch_model(default_model_dir(), report)
    wishes = ClusterWishes(
        num_prefill=num_prefill,
        num_decode=num_decode,
        model_dir=model_dir,
        roles_with_model=roles_with_model,
        http_host=http_host,
        log_level=log_level,
        drain_timeout_s=drain_timeout_s,
        config_path=config_path,
        secret_file=secret_file,
        api_key_file=api_key_file,
    )
    policy = RestartPolicy(max_restarts=max_restarts)

    async def until_stopped(_url: str, lifecycle: Lifecycle) -> None:
        await lifecycle.wait_draining()

    sys.exit(run_cluster(wishes, ports, until_stopped, policy, ready_timeout_s, ready_file))


def configured_models(config_path: Path | None) -> frozenset[str]:
    """The services whose model the configuration file or a variable names."""
    flags = () if config_path is None else ("--config", str(config_path))
    return frozenset(service for service in SERVICES if has_model(service, flags, os.environ))


def run_cluster(
    wishes: ClusterWishes,
    ports: PortPlan,
    session: Callable[[str, Lifecycle], Awaitable[None]],
    policy: RestartPolicy,
    ready_timeout_s: float,
    ready_file: Path | None = None,
) -> int:
    """Run the cluster and, once it is ready, ``session(url, lifecycle)``; return an exit code."""
    configure_logging("pdctl", "warning", "console")
    cpus = sorted(os.sched_getaffinity(0))
    shares = divide_cores(cpus, wishes.num_prefill + wishes.num_decode, place_in_sysfs)
    run_dir = make_run_folder(cache_folder(os.environ))
    url = http_url(wishes, ports)

    async def main(lifecycle: Lifecycle) -> None:
        # A closed terminal is a wish to stop, like Ctrl-C.
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGHUP, os.kill, os.getpid(), signal.SIGTERM
        )
        started_at = time.monotonic()
        supervisor = Supervisor(
            plan_cluster(wishes, ports, shares),
            run_dir,
            report,
            policy=policy,
            ready_timeout_s=ready_timeout_s,
            stop_timeout_s=wishes.drain_timeout_s + _STOP_MARGIN_S,
        )

        async def when_ready() -> None:
            lifecycle.advance(Step.READY)
            if ready_file is not None:
                write_ready_file(ready_file, url, run_dir, supervisor.children)
            report(f"ready after {time.monotonic() - started_at:.1f} s: {url}/v1 (logs: {run_dir})")
            await session(url, lifecycle)
            report("stopping")

        await supervisor.run(when_ready)

    report(f"starting {wishes.num_prefill} prefill, {wishes.num_decode} decode and the router")
    # Two ranks of children are stopped one after the other.
    stop_s = 2 * (wishes.drain_timeout_s + _STOP_MARGIN_S)
    try:
        return run_service(main, drain_timeout_s=stop_s)
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


def report(line: str) -> None:
    """One line of progress for the person."""
    click.echo(f"pdctl: {line}", err=True)
