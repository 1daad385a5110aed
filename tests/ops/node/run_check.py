"""Run in another network namespace: ``python -m tests.ops.node.run_check CHECK TOOL,… PEER …``.

The tools count as not installed. Writes the findings as JSON. CHECK may also be "udp": the probe of
a host that allows no ICMP.
"""

import importlib
import json
import sys
from dataclasses import asdict

from ops.node.facts import NOT_FOUND_EXIT_CODE, CommandOutput, LiveFacts
from ops.node.path_mtu import probe_path_mtu


class PoorFacts(LiveFacts):
    """This machine, without some of its tools."""

    def __init__(self, missing: list[str]) -> None:
        super().__init__()
        self._missing = missing

    def run(self, *command: str) -> CommandOutput:
        if command[0] in self._missing:
            return CommandOutput(NOT_FOUND_EXIT_CODE, "", "")
        return super().run(*command)


def main(check: str, missing: str, *peers: str) -> None:
    if check == "udp":
        answers = [asdict(probe_path_mtu(peer, allows_icmp=False)) for peer in peers]
    else:
        module = importlib.import_module(f"ops.node.checks.{check}")
        findings = module.check(PoorFacts(missing.split(",")), peers)
        answers = [asdict(finding) for finding in findings]
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
