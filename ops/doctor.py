"""``pdctl doctor``: this node, the services, and why it is slow; exit code 1 if anything FAILs."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ops.api_client import DEFAULT_URL
from ops.diagnosis.discovery import checked_url, read_configured_ports
from ops.diagnosis.examination import Wishes, examine
from ops.diagnosis.line_rate import named_line_rate, read_line_rate
from ops.diagnosis.report import report_json, report_lines
from ops.node.catalogue import all_findings
from ops.node.facts import LiveFacts
from ops.node.finding import Finding
from svckit.secret import read_secret


@click.command("doctor")
@click.option("--url", help=f"The router's address.  [default: {DEFAULT_URL}]")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="API key, mode 0600.")
@click.option(
    "--admin",
    "admin_urls",
    multiple=True,
    metavar="URL",
    help="Admin port of a worker of this host; may be repeated. Else they are looked for.",
)
@click.option(
    "--seconds",
    default=3.0,
    type=click.FloatRange(0.2, 60),
    show_default=True,
    help="How long to watch the metrics.",
)
@click.option("--json", "is_json", is_flag=True, help="Everything as JSON.")
@click.option("--verbose", "-v", "is_verbose", is_flag=True, help="Show what is OK.")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="TOML file.")
@click.option(
    "--line-rate-gbps",
    type=click.FloatRange(0.001, 100_000),
    help="Line rate between the hosts in Gbit/s; else that of the fastest network card.",
)
def doctor_command(
    url: str | None,
    api_key_file: Path | None,
    admin_urls: Sequence[str],
    seconds: float,
    is_json: bool,
    is_verbose: bool,
    config_path: Path | None,
    line_rate_gbps: float | None,
) -> None:
    """Examine this node and the services, and say what slows them down.

    Nothing is changed and no request is made but for health and metrics. Exit code 0: nothing is
    FAIL; 1: something is. docs/doctor.md explains each diagnosis.
    """
    configured = read_configured_ports(config_path)
    if line_rate_gbps is None:
        line_rate = read_line_rate(LiveFacts())
    else:
        line_rate = named_line_rate(line_rate_gbps)
    wishes = Wishes(
        router_url=checked_url(url or configured.router_url or DEFAULT_URL),
        api_key=read_secret(api_key_file or configured.api_key_file, {}),
        admin_urls=tuple(checked_url(admin) for admin in admin_urls),
        configured_ports=configured.admin_ports,
        seconds=seconds,
        line_rate=line_rate,
        node_checks=check_this_node,
    )
    report = asyncio.run(examine(wishes))
    if is_json:
        click.echo(json.dumps(report_json(report), indent=1, ensure_ascii=False))
    else:
        click.echo("\n".join(report_lines(report, is_verbose=is_verbose)))
    sys.exit(1 if report.num_failed else 0)


def check_this_node() -> Sequence[Finding]:
    """The checks of ``pdctl node check`` on this machine."""
    return all_findings(LiveFacts())
