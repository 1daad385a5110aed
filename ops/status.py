"""``pdctl status``: the router and its workers as a table; exit code 0 if it can serve."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from ops.api_client import DEFAULT_URL, ApiClient
from svckit.secret import read_secret

# Column title and the key in a worker's entry of /healthz.
_COLUMNS: Final = (
    ("role", "role"),
    ("instance", "instance_id"),
    ("address", "address"),
    ("state", "state"),
    ("running", "num_running"),
    ("waiting", "num_waiting"),
    ("free blocks", "num_free_blocks"),
)


@click.command("status")
@click.option("--url", default=DEFAULT_URL, show_default=True, help="The router's address.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="API key, mode 0600.")
def status_command(url: str, api_key_file: Path | None) -> None:
    """Show the router and its workers; exit code 0 if requests can be served."""
    health = asyncio.run(_health(ApiClient(url, read_secret(api_key_file, {}))))
    click.echo("\n".join(status_lines(url, health)))
    sys.exit(0 if is_serving(health) else 1)


async def _health(client: ApiClient) -> dict[str, Any]:
    async with client:
        return await client.health()


def is_serving(health: Mapping[str, Any]) -> bool:
    """True if the router serves and says that it has the workers it needs."""
    return health.get("state") == "serving" and health.get("is_ready") is True


def status_lines(url: str, health: Mapping[str, Any]) -> list[str]:
    """The router's line and one aligned row per worker."""
    model = f", model {health['model']}" if health.get("model") else ""
    note = "" if health.get("is_ready", True) else ", a kind of worker is missing"
    lines = [f"router {url}: {health.get('state', 'unknown')}{model}{note}"]
    if "workers" not in health:
        return [*lines, "its workers are shown only to holders of the API key (--api-key-file)"]
    workers = _workers(health)
    if not workers:
        return [*lines, "no worker is registered"]
    ordered = sorted(workers, key=lambda item: (_text(item, "role"), _text(item, "instance_id")))
    rows = [
        [title for title, _ in _COLUMNS],
        *([_text(worker, key) for _, key in _COLUMNS] for worker in ordered),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines.extend(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return lines


def _workers(health: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    workers = health.get("workers")
    return [item for item in workers if isinstance(item, dict)] if isinstance(workers, list) else []


def _text(worker: Mapping[str, Any], key: str) -> str:
    value = worker.get(key)
    return "-" if value is None else str(value)
