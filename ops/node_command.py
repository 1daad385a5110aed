"""``pdctl node``: look at a machine, plan, change it, check that it holds, take it back.

All but ``apply`` and ``rollback`` also run on the dump of another machine (``--from``).
"""

import io
import os
import sys
from pathlib import Path

import click

from ops.node.apply import apply_plan, check_can_apply, check_privilege
from ops.node.catalogue import all_changes, all_findings
from ops.node.errors import NodeError
from ops.node.facts import Facts, LiveFacts, RecordingFacts, read_dump
from ops.node.formats.os_release import read_distribution
from ops.node.log_line import explain
from ops.node.plan import Plan, plan_of
from ops.node.report import as_json, finding_line, is_failed, summary_line
from ops.node.rollback import planned_lines, roll_back
from ops.node.root_folder import RootFolder
from ops.node.verify import verify

_FILE = click.Path(path_type=Path)

_from_option = click.option(
    "--from", "dump", type=_FILE, metavar="DUMP", help="A dump of another machine."
)
_peer_option = click.option(
    "--peer", "peers", multiple=True, metavar="HOST", help="A machine to probe; may be repeated."
)
_root_option = click.option(
    "--root",
    "folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path("/"),
    help="The system in this folder, not this machine's.",
)
_yes_option = click.option("--yes", "is_yes", is_flag=True, help="Do not ask.")


@click.group("node")
def node_group() -> None:
    """The machine under the services: look, plan, apply, verify, roll back."""
    # The tool that finds a wrong encoding must be able to say so in it.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@node_group.command("dump")
@click.option("--output", type=_FILE, metavar="FILE", help="Write to FILE (mode 0600).")
@_peer_option
@_root_option
def dump_command(output: Path | None, peers: tuple[str, ...], folder: Path) -> None:
    """Write everything that the checks look at, as JSON, for --from elsewhere.

    Of the environment of other processes only variables of locale and Python are kept.
    """
    facts = RecordingFacts(_live_facts(RootFolder(folder)))
    all_findings(facts, peers)
    plan_of(facts, all_changes(facts)).lines(facts)
    verify(facts)
    if output is None:
        click.echo(facts.as_json(), nl=False)
        return
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(facts.as_json())
    except OSError as exc:
        raise NodeError(f"the dump {output} cannot be written: {exc}") from exc


@node_group.command("check")
@click.option("--json", "is_json", is_flag=True, help="Everything, for programs.")
@_from_option
@_peer_option
@_root_option
def check_command(is_json: bool, dump: Path | None, peers: tuple[str, ...], folder: Path) -> None:
    """Judge the machine; exit code 1 if anything FAILs."""
    facts = _facts(dump, RootFolder(folder))
    findings = all_findings(facts, peers)
    if is_json:
        click.echo(as_json(read_distribution(facts), findings))
    else:
        for finding in findings:
            click.echo(finding_line(finding))
        click.echo(summary_line(findings))
    sys.exit(1 if is_failed(findings) else 0)


@node_group.command("plan")
@_from_option
@_root_option
def plan_command(dump: Path | None, folder: Path) -> None:
    """Show what apply would change; nothing is changed."""
    facts = _facts(dump, RootFolder(folder))
    plan = _plan(facts)
    for line in plan.lines(facts):
        click.echo(line)
    click.echo("nothing to change" if plan.is_empty else f"{len(plan.changes)} changes")
    _echo_needs(plan.needs)
    if not plan.is_empty and not read_distribution(facts).family:
        click.echo("apply refuses here: the distribution is unknown")


@node_group.command("apply")
@_yes_option
@_root_option
def apply_command(is_yes: bool, folder: Path) -> None:
    """Make the changes of the plan, and keep what was there for rollback.

    Nothing is rebooted, reloaded or restarted: what needs that is said at the end.
    """
    root = RootFolder(folder)
    facts = _live_facts(root)
    plan = _plan(facts)
    if plan.is_empty:
        click.echo("nothing to change")
        return
    check_can_apply(root, facts, plan)
    for line in plan.lines(facts):
        click.echo(line)
    _ask(f"Make these {len(plan.changes)} changes in {root.path}?", is_yes)
    apply_plan(root, plan, click.echo)
    click.echo("done; take it back with: pdctl node rollback")
    _echo_needs(plan.needs)


@node_group.command("verify")
@click.option("--json", "is_json", is_flag=True, help="Everything, for programs.")
@_from_option
@_root_option
def verify_command(is_json: bool, dump: Path | None, folder: Path) -> None:
    """Is every planned change in force, files and running values? Exit code 0 if so."""
    facts = _facts(dump, RootFolder(folder))
    findings = verify(facts)
    if is_json:
        click.echo(as_json(read_distribution(facts), findings))
    else:
        for finding in findings:
            click.echo(finding_line(finding))
    sys.exit(1 if is_failed(findings) else 0)


@node_group.command("rollback")
@_yes_option
@_root_option
@click.option("--force", "is_forced", is_flag=True, help="Also over later changes of others.")
def rollback_command(is_yes: bool, folder: Path, is_forced: bool) -> None:
    """Put back everything that apply changed; may be run again."""
    root = RootFolder(folder)
    check_privilege(root)
    lines = planned_lines(root)
    if lines:
        for line in lines:
            click.echo(line)
        _ask(f"Take these {len(lines)} steps in {root.path}?", is_yes)
    _echo_needs(roll_back(root, click.echo, is_forced=is_forced))


@node_group.command("explain")
@click.argument("line", required=False)
def explain_command(line: str | None) -> None:
    """Say why a log LINE about encodings was written (or standard input) and what to do."""
    if line is None:
        line = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    explanations = explain(line)
    if not explanations:
        raise NodeError(
            "no line in it is known; known are errors of Python about codecs and of locales"
        )
    for explanation in explanations:
        for text in explanation.lines():
            click.echo(text)


def _facts(dump: Path | None, root: RootFolder) -> Facts:
    if dump is None:
        return _live_facts(root)
    if not root.is_this_machine:
        raise NodeError("give either --from DUMP or --root DIR, not both")
    return read_dump(dump)


def _live_facts(root: RootFolder) -> LiveFacts:
    # Commands of this machine say nothing about another root.
    return LiveFacts(root.path, runs_commands=root.is_this_machine)


def _plan(facts: Facts) -> Plan:
    return plan_of(facts, all_changes(facts))


def _ask(question: str, is_yes: bool) -> None:
    if is_yes:
        return
    if not sys.stdin.isatty():
        raise NodeError("there is no terminal to ask at; give --yes to go on without a question")
    if not click.confirm(question):
        raise NodeError("nothing was changed")


def _echo_needs(needs: tuple[str, ...]) -> None:
    for need in needs:
        click.echo(f"left for you: {need}")
