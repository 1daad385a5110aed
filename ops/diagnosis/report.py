"""The report of ``pdctl doctor``: lines for people, plain data for programs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from ops.diagnosis.bottleneck import Diagnosis
from ops.diagnosis.place import Place
from ops.node.finding import Finding, Verdict
from ops.node.report import finding_line

REPORT_VERSION: Final = 1
_INDENT: Final = "  "
# How commands and settings begin, which keep their letters.
_NAMES: Final = ("pdctl", "max_", "kv_")


@dataclass(frozen=True, slots=True)
class Report:
    """What was found.

    Attributes:
        node: findings about this machine.
        services: findings about the services and the paths between them.
        diagnosis: why it is slow.
        elapsed_s: how long the examination took.
    """

    node: tuple[Finding, ...]
    services: tuple[Finding, ...]
    diagnosis: Diagnosis
    elapsed_s: float

    @property
    def num_failed(self) -> int:
        """Findings with FAIL."""
        return sum(finding.verdict is Verdict.FAIL for finding in (*self.node, *self.services))


def report_lines(report: Report, *, is_verbose: bool = False) -> list[str]:
    """The report for people: what is right is only counted, unless ``is_verbose``."""
    lines = []
    for title, findings in (("node", report.node), ("services", report.services)):
        lines.append(f"{title}: {_counts(findings)}")
        shown = [f for f in findings if is_verbose or f.verdict is not Verdict.OK]
        lines += [_INDENT + finding_line(finding) for finding in shown]
    lines += diagnosis_lines(report.diagnosis)
    failed = f"{report.num_failed} FAIL" if report.num_failed else "nothing failed"
    return [*lines, f"{failed}, examined in {report.elapsed_s:.1f} s"]


def _counts(findings: Sequence[Finding]) -> str:
    counts = [(sum(f.verdict is verdict for f in findings), verdict) for verdict in Verdict]
    return ", ".join(f"{count} {verdict}" for count, verdict in counts if count) or "not checked"


def diagnosis_lines(diagnosis: Diagnosis) -> list[str]:
    """The bottleneck, where all sequences are, the figures, and what was not seen."""
    lines = [f"why is it slow: {diagnosis.place} ({diagnosis.verdict})"]
    lines.append(f"{_INDENT}{_sentence(diagnosis.reason)}")
    if diagnosis.next_step:
        lines.append(f"{_INDENT}next step: {diagnosis.next_step}")
    # Figures of nothing are zeros; --json has them.
    if diagnosis.figures and diagnosis.place not in (Place.IDLE, Place.UNKNOWN):
        held = ", ".join(f"{place} {num:.1f}" for place, num in diagnosis.num_at.items())
        lines.append(f"{_INDENT}sequences at each place, on average: {held}")
        width = max(len(figure.name) for figure in diagnosis.figures)
        lines += [
            f"{_INDENT}{figure.name:<{width}}  {figure.text:<9} {figure.metrics}"
            for figure in diagnosis.figures
        ]
    return [*lines, *(f"{_INDENT}not seen: {clause}" for clause in diagnosis.unseen)]


def report_json(report: Report) -> dict[str, Any]:
    """The same and every finding as JSON data."""
    diagnosis = report.diagnosis
    return {
        "report_version": REPORT_VERSION,
        "num_failed": report.num_failed,
        "elapsed_s": round(report.elapsed_s, 3),
        "node": [asdict(finding) for finding in report.node],
        "services": [asdict(finding) for finding in report.services],
        "diagnosis": {
            "bottleneck": diagnosis.place,
            "verdict": diagnosis.verdict,
            "reason": diagnosis.reason,
            "next_step": diagnosis.next_step,
            "num_sequences_at": {place: round(num, 4) for place, num in diagnosis.num_at.items()},
            "figures": {figure.key: figure.value for figure in diagnosis.figures},
            "unseen": list(diagnosis.unseen),
        },
    }


def _sentence(clause: str) -> str:
    """With a capital letter, unless it begins with a name of ours, and a full stop."""
    is_name = clause.startswith(_NAMES)
    text = clause if is_name else clause[:1].upper() + clause[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."
