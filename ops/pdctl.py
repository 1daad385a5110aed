"""``pdctl``: the one command of the operator; each verb has a file of its own."""

import sys
from collections.abc import Sequence

import click

from ops.chat import chat_command
from ops.demo import demo_command
from ops.doctor import doctor_command
from ops.kv import kv_group
from ops.model_cache import default_model_dir, fetch_model
from ops.node_command import node_group
from ops.start import start_command
from ops.status import status_command
from ops.up import report, up_command
from svckit.encoding import check_encoding
from svckit.errors import ServiceError
from svckit.lifecycle import EXIT_SERVICE_ERROR


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def pdctl(context: click.Context) -> None:
    """Run and look at a serving system with separate prefill and decode workers."""
    # What finds and mends a wrong encoding has to run in it.
    if context.invoked_subcommand not in (doctor_command.name, node_group.name):
        check_encoding()


@pdctl.group("model")
def model_group() -> None:
    """The default model in the cache."""


@model_group.command("fetch")
def fetch_command() -> None:
    """Download and convert the default model unless it is there; print its folder."""
    click.echo(fetch_model(default_model_dir(), report))


for _command in (
    chat_command,
    demo_command,
    doctor_command,
    kv_group,
    node_group,
    start_command,
    status_command,
    up_command,
):
    pdctl.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``pdctl``; a ServiceError is one sentence and exit code 1."""
    try:
        pdctl.main(arguments, prog_name="pdctl")
    except ServiceError as exc:
        click.echo(str(exc), err=True)
        sys.exit(EXIT_SERVICE_ERROR)


if __name__ == "__main__":
    main()
