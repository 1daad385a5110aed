"""``pdctl kv``: the KV of a prompt from a prefill worker into a file, and on to a decode worker.

What does the work is imported only when a verb runs: it needs numpy, and hosts that only start
services need not have it.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from svckit.errors import ServiceError

_FILE = click.Path(path_type=Path)


def read_address(
    _context: click.Context, _parameter: click.Parameter, value: str
) -> tuple[str, int]:
    """(host, port) of ``HOST:PORT``, with ``[...]`` around an IPv6 address."""
    host, colon, port = value.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise click.BadParameter(f"{value!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def security_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that a connection to a worker may need."""
    for option in (
        click.option("--tls-ca-file", type=_FILE, help="CA of the services' certificates."),
        click.option("--tls-key-file", type=_FILE, help="Key of the certificate, mode 0600."),
        click.option("--tls-cert-file", type=_FILE, help="Certificate of this side, for TLS."),
        click.option(
            "--secret-file", type=_FILE, help="Shared secret, mode 0600; or set PD_SECRET."
        ),
    ):
        command = option(command)
    return command


def carrier_options(command: Callable[..., None]) -> Callable[..., None]:
    """How KV travels between this side and the worker."""
    for option in (
        click.option(
            "--rdma-device", default="", help="With rdma: mlx5_0 or mlx5_0:1; else one is chosen."
        ),
        click.option(
            "--carrier",
            type=click.Choice(["tcp", "rdma", "auto"]),
            default="tcp",
            show_default=True,
            help="How KV travels; auto is rdma if it can be had.",
        ),
    ):
        command = option(command)
    return command


@click.group("kv")
def kv_group() -> None:
    """KV of prompts as files: save, load, inspect, verify."""


@kv_group.command("save")
@click.argument("file", type=_FILE)
@click.option(
    "--prefill",
    required=True,
    callback=read_address,
    metavar="HOST:PORT",
    help="The prefill worker.",
)
@click.option("--tokens", type=_FILE, help="Token ids: a JSON array, or numbers between spaces.")
@click.option("--prompt", help="The prompt as text; needs --model.")
@click.option("--model", type=_FILE, help="Folder with the model's tokenizer.json.")
@click.option("--dtype", default="", help="Element type of the file; the worker's own by default.")
@carrier_options
@security_options
@click.option("--timeout-s", default=300.0, show_default=True, type=click.FloatRange(min=0.001))
def save_command(
    file: Path, tokens: Path | None, prompt: str | None, model: Path | None, **options: Any
) -> None:
    """Have a prefill worker compute a prompt and write its KV to FILE.

    The last token of the prompt has no KV in the file: decode computes it.
    """
    if (tokens is None) == (prompt is None):
        raise ServiceError("Give the prompt either as --tokens FILE or as --prompt TEXT.")
    if prompt is not None and model is None:
        raise ServiceError("--prompt needs --model, the folder with the model's tokenizer.json.")
    _work().save(file, tokens=tokens, prompt=prompt, model=model, **options)


@kv_group.command("load")
@click.argument("file", type=_FILE)
@click.option(
    "--decode", required=True, callback=read_address, metavar="HOST:PORT", help="The decode worker."
)
@click.option("--max-output-tokens", default=64, show_default=True, type=click.IntRange(min=1))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0.0, 2.0))
@click.option("--model", type=_FILE, help="Folder with tokenizer.json: print text, not token ids.")
@carrier_options
@security_options
@click.option("--timeout-s", default=300.0, show_default=True, type=click.FloatRange(min=0.001))
def load_command(file: Path, **options: Any) -> None:
    """Give the KV in FILE to a decode worker and print how it goes on."""
    _work().load(file, **options)


@kv_group.command("inspect")
@click.argument("file", type=_FILE)
@click.option("--json", "is_json", is_flag=True, help="Everything, for programs.")
def inspect_command(file: Path, is_json: bool) -> None:
    """Show what FILE says about itself; the rows are not read."""
    click.echo(_work().inspect(file, is_json=is_json))


@kv_group.command("verify")
@click.argument("file", type=_FILE)
def verify_command(file: Path) -> None:
    """Read all of FILE and compare it with its digests; exit code 0 if it is intact."""
    click.echo(_work().verify(file))


def _work() -> Any:
    try:
        return importlib.import_module("ops.kv_work")
    except ModuleNotFoundError as exc:
        raise ServiceError(
            f"`pdctl kv` needs the Python package {exc.name}; install pdserve[client]."
        ) from exc
