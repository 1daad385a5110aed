"""Is every planned change in force? Asked of the files, the running values and the journal."""

from typing import Final

from ops.node.apply import BOOT_ID
from ops.node.catalogue import all_changes
from ops.node.change import Change, CommandChange, FileChange, ValueChange
from ops.node.errors import NodeError
from ops.node.facts import Facts
from ops.node.finding import Finding, Verdict
from ops.node.journal import (
    JOURNAL_FILE,
    FileStep,
    JournalText,
    Step,
    ValueStep,
    parse_journal,
)
from ops.node.plan import plan_of
from ops.node.running_value import is_same_value
from ops.node.saved_file import digest_of

VERIFY: Final = "verify"
_SOURCE: Final = "pdctl node apply"
_CURE: Final = "pdctl node plan, then pdctl node apply"


def verify(facts: Facts) -> list[Finding]:
    """What is planned and not in force, then what the journal says was changed.

    A damaged journal is a finding, so that the rest is seen.
    """
    findings = [_planned(facts, change) for change in plan_of(facts, all_changes(facts)).changes]
    content = facts.text(JOURNAL_FILE)
    if content is not None:
        try:
            journal = parse_journal(content, JOURNAL_FILE)
        except NodeError as exc:
            findings.append(_finding("journal", Verdict.FAIL, "damaged", "", f"{exc}."))
        else:
            findings.extend(_applied(facts, journal, {finding.subject for finding in findings}))
    if not findings:
        reason = "All is right, and no apply is on record."
        findings.append(_finding("plan", Verdict.OK, "nothing to change", "", reason))
    return findings


def _planned(facts: Facts, change: Change) -> Finding:
    """A change that is in the plan is not in force."""
    match change:
        case FileChange(path=subject):
            measured = "no such file" if facts.text(subject) is None else "another text"
            wanted = "the text that the plan shows"
        case ValueChange(path=subject, value=wanted):
            measured = " ".join((facts.text(subject) or "").split()) or "no such value"
        case CommandChange():
            subject, measured, wanted = " ".join(change.command), "not run", "run"
    return _finding(subject, Verdict.FAIL, measured, wanted, change.reason, _CURE)


def _applied(facts: Facts, journal: JournalText, reported: set[str]) -> list[Finding]:
    """What was applied, except what is reported already."""
    findings = []
    if not journal.is_applied:
        findings.append(
            _finding(
                "journal",
                Verdict.FAIL,
                "an apply or rollback was interrupted",
                "",
                "Some changes may be made and others not.",
                "pdctl node rollback",
            )
        )
    boot_id = (facts.text(BOOT_ID) or "").strip()
    is_same_boot = not boot_id or boot_id == journal.boot_id
    # A later step for a path is the one that counts.
    last: dict[str, Step] = {
        step.path: step
        for step in journal.open_steps
        if isinstance(step, FileStep | ValueStep) and step.path not in reported
    }
    for path, step in last.items():
        if isinstance(step, ValueStep):
            findings.append(_value(facts, step, is_same_boot))
        elif isinstance(step, FileStep):
            findings.append(_file(facts.text(path), step, is_same_boot))
    return findings


def _file(text: str | None, step: FileStep, is_same_boot: bool) -> Finding:
    if text is None or digest_of(text.encode()) != step.new_digest:
        measured = "not there" if text is None else "another text"
        reason = "It was changed since apply, and the plan is content with it."
        return _finding(step.path, Verdict.WARN, measured, "as applied", reason)
    if step.needs and is_same_boot:
        return _finding(
            step.path,
            Verdict.WARN,
            "as applied",
            "in force",
            "It counts only after a step that is left to a person and cannot be seen from here.",
            step.needs,
        )
    return _finding(step.path, Verdict.OK, "as applied", "as applied", "It is in force.")


def _value(facts: Facts, step: ValueStep, is_same_boot: bool) -> Finding:
    shown = " ".join((facts.text(step.path) or "").split())
    if is_same_value(shown, step.value):
        return _finding(step.path, Verdict.OK, shown, step.value, "It is in force.")
    reason = (
        "Somebody changed it since apply, and the plan is content with it."
        if is_same_boot
        else "The machine was started since; the plan is content with it."
    )
    return _finding(step.path, Verdict.WARN, shown or "not there", step.value, reason)


def _finding(
    subject: str, verdict: Verdict, measured: str, wanted: str, reason: str, cure: str = ""
) -> Finding:
    return Finding(VERIFY, subject, verdict, measured, wanted, reason, _SOURCE, cure)
