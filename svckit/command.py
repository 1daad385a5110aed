"""The command line of a service: flags to config to a running process.

A service's ``__main__`` is one call of ``service_command`` with the name of its entry function.
The entry is named and not imported, so that ``--help`` and a refused flag do not wait seconds
for torch, and so that the CPUs are set before torch starts its threads.
"""

import os
import pkgutil
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from svckit.config import load_config, options_for
from svckit.encoding import check_encoding
from svckit.errors import ServiceError
from svckit.lifecycle import EXIT_SERVICE_ERROR, Lifecycle, run_service
from svckit.logging import configure_logging
from svckit.process import pin_cpus, watch_parent
from svckit.service_config import ServiceConfig

# Without a supervisor nobody waits for the drained answers: half a minute is for the log.
_ORPHAN_GRACE_S: Final = 10.0

ConfigT = TypeVar("ConfigT", bound=ServiceConfig)


def service_command(
    section: str, config_class: type[ConfigT], entry: str, help_text: str
) -> click.Command:
    """The click command of a service.

    ``section`` is router, prefill or decode; ``entry`` names ``async def f(config, lifecycle)``
    as "package.module:function". The process exits with the codes of svckit/lifecycle.py; a bad
    setting is one sentence and exit code 1.
    """

    def callback(config_path: Path | None, **flags: object) -> None:
        try:
            config = prepare(section, config_class, flags, config_path)
        except ServiceError as exc:
            click.echo(str(exc), err=True)
            sys.exit(EXIT_SERVICE_ERROR)

        async def main(lifecycle: Lifecycle) -> None:
            await _load(entry)(config, lifecycle)

        sys.exit(run_service(main, drain_timeout_s=config.drain_timeout_s))

    config_option = click.Option(
        ["--config", "config_path"],
        type=click.Path(path_type=Path),
        help=f"TOML file; its section [{section}] holds the keys below with underscores.",
    )
    params = [config_option, *options_for(config_class, section)]
    return click.Command(section, params=params, callback=callback, help=help_text)


def _load(entry: str) -> Any:
    """Import the entry function; ServiceError if a package it needs is not installed."""
    service = entry.partition(":")[0].partition(".")[0]
    try:
        return pkgutil.resolve_name(entry)
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package in ("", service):
            raise  # a module of ours: a defect, not an installation
        extra = "router" if service == "router_svc" else "worker"
        raise ServiceError(
            f"{service} needs the package {package}, which is not installed here; "
            f"install pdserve[{extra}]."
        ) from exc


def prepare(
    section: str,
    config_class: type[ConfigT],
    flags: dict[str, object],
    config_path: Path | None,
) -> ConfigT:
    """Load the config and set the process up: encoding, logs, CPUs, parent watch.

    The returned config has an ``instance_id`` that no other process ever had (the configured name
    and a random part, so that peers tell a restarted worker from the one they knew) and a real
    number of ``threads``. Raises ServiceError, checked in this order: encoding, settings, CPUs.
    """
    check_encoding()
    config = load_config(config_class, flags, os.environ, config_path, section)
    if config.parent_fd >= 0:
        watch_parent(config.parent_fd, grace_s=_ORPHAN_GRACE_S)
    num_cpus = pin_cpus(config.cpus)
    config = replace(
        config,
        instance_id=f"{config.instance_id or section}-{secrets.token_hex(4)}",
        threads=config.threads or num_cpus,
    )
    configure_logging(section, config.log_level, config.log_format, instance_id=config.instance_id)
    return config
