"""Findings as lines for a person and as JSON for a program."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from ops.node.finding import Finding, Verdict
from ops.node.formats.os_release import Distribution


def finding_line(finding: Finding) -> str:
    """``VERDICT check subject: measured (wanted ...): reason. cure``."""
    line = f"{finding.verdict:<7} {finding.check} {finding.subject}: {finding.measured or '-'}"
    if finding.verdict is not Verdict.OK and finding.wanted:
        line += f" (wanted {finding.wanted})"
    line += f": {finding.reason}"
    if finding.verdict is not Verdict.OK and finding.cure:
        line += f" Cure: {finding.cure}"
    return line


def summary_line(findings: Sequence[Finding]) -> str:
    """How many of each verdict."""
    counts = Counter(finding.verdict for finding in findings)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)


def as_json(distribution: Distribution, findings: Sequence[Finding]) -> str:
    """One object: what the machine runs, the counts, all findings."""
    counts = Counter(finding.verdict for finding in findings)
    return json.dumps(
        {
            "distribution": asdict(distribution),
            "counts": {verdict.value: counts[verdict] for verdict in Verdict},
            "findings": [asdict(finding) for finding in findings],
        },
        indent=1,
    )


def is_failed(findings: Sequence[Finding]) -> bool:
    """True if one is a FAIL; WARN and UNKNOWN do not fail."""
    return any(finding.verdict is Verdict.FAIL for finding in findings)
