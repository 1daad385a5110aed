"""``pdctl start SERVICE``: become one service, with its own flags."""

import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import click

from ops.cluster import worker_env
from ops.model_cache import default_model_dir, is_complete
from svckit.errors import ServiceError

SERVICES: Final = ("prefill", "decode", "router")


@click.command(
    "start",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)
@click.argument("service", required=False)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def start_command(service: str | None, flags: Sequence[str]) -> None:
    """Run one service in this process: prefill, decode or router, followed by its flags.

    ``pdctl start decode --help`` shows the flags of that service.
    """
    if service not in SERVICES:
        is_help = service in (None, "--help")
        usage = f"Usage: pdctl start {'|'.join(SERVICES)} [FLAGS], or --help after the service."
        click.echo(usage, err=not is_help)
        sys.exit(0 if is_help else 2)
    command, env = plan_start(service, flags, os.environ)
    # exec: signals and the exit code are the service's own, with nothing in between.
    os.execve(command[0], command, env)


# A prefill worker copies KV into memory that another process reads. From this size on memcpy writes
# past the cache; glibc before 2.38 does so only far above any piece of KV, at a quarter less
# bandwidth (bench/transfer). Source: the GNU C Library manual, "Tunables".
_COPY_PAST_THE_CACHE: Final = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x80000"}


def plan_start(
    service: str, flags: Sequence[str], env: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command line and environment of a service.

    The default model is filled in if no source names one; ServiceError if it is not fetched.
    """
    command = [sys.executable, "-m", f"{service}_svc", *flags]
    if "--help" not in flags and not has_model(service, flags, env):
        model_dir = default_model_dir(env)
        if not is_complete(model_dir):
            raise ServiceError(
                "No --model is given and the default model is not there yet; "
                "run pdctl model fetch first."
            )
        command += ["--model", str(model_dir)]
    threads = flag_value(flags, "--threads")
    extra = worker_env(int(threads)) if threads is not None and threads.isdigit() else {}
    if extra.get("OMP_NUM_THREADS") == "0":  # 0 asks the service to count its CPUs itself
        extra = {}
    defaults = _COPY_PAST_THE_CACHE if service == "prefill" else {}
    return command, {**defaults, **env, "PYTHONUTF8": "1", **extra}


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """The last value given for ``name``, as ``--name value`` or ``--name=value``."""
    found = None
    for position, flag in enumerate(flags):
        if flag.startswith(f"{name}="):
            found = flag.partition("=")[2]
        elif flag == name and position + 1 < len(flags):
            found = flags[position + 1]
    return found


def has_model(service: str, flags: Sequence[str], env: Mapping[str, str]) -> bool:
    """True if a flag, a variable or the configuration file names the service's model."""
    if flag_value(flags, "--model") is not None or env.get(f"PD_{service.upper()}_MODEL"):
        return True
    config = flag_value(flags, "--config")
    if config is None:
        return False
    try:
        document = tomllib.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True  # the service itself says what is wrong with the file
    section = document.get(service, {})
    return isinstance(section, dict) and "model" in section
