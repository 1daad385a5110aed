"""What holds for all the network and system checks, on good machines and on odd facts."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.node.checks import flow_control, mtu, path, rdma, system
from ops.node.facts import CommandOutput, Facts, RecordedFacts, RecordingFacts, read_dump
from ops.node.finding import Finding, Verdict
from tests.ops.node.network_facts import (
    CAPTURED,
    Machine,
    edge_box,
    roce_node,
    soft_roce_node,
)

PEER = "192.168.1.12"
CHECKS: dict[str, Callable[[Facts], list[Finding]]] = {
    "rdma": rdma.check,
    "mtu": lambda facts: mtu.check(facts, [PEER]),
    "path": lambda facts: path.check(facts, [PEER]),
    "flow_control": flow_control.check,
    "system": system.check,
}
TEXTS = (
    *(
        "",
        "\n",
        "0\n",
        "1\n",
        "-1\n",
        "7 x 9\n",
        "[]",
        "[never]\n",
        "on\n",
        "4: ACTIVE\n",
        "Ethernet\n",
    ),
    *("RoCE v2\n", "::1\n", "0000:0000:0000:0000:0000:ffff:c0a8:010b\n", "0::/a/b\n", "0-3,x\n"),
    *(
        "9" * 30 + "\n",
        "\ufffd\0\x1b[4m",
        "0-\n",
        "size=9k",
        "dscp",
        "NaN\n",
        "Max open files    x  y\n",
    ),
    *(path.read_text(encoding="utf-8") for path in sorted(CAPTURED.glob("*.txt"))),
)
NAMES = ("0", "1", "node0", "cpu0", "mlx5_0", "uverbs0", "eth0", "\ufffd", "pd.service", "99999")


GOOD_NODE, SOFT_NODE = roce_node().facts, soft_roce_node().facts


class OddFacts:
    """A machine of whose answers a share has nothing to do with the question."""

    def __init__(self, source: Facts, seed: int, share: float) -> None:
        self._source = source
        self._random = random.Random(seed)
        self._share = share

    def _is_odd(self) -> bool:
        return self._random.random() < self._share

    def text(self, path: str) -> str | None:
        return self._random.choice((None, *TEXTS)) if self._is_odd() else self._source.text(path)

    def names(self, path: str) -> tuple[str, ...]:
        if self._is_odd():
            return tuple(self._random.sample(NAMES, self._random.randrange(4)))
        return self._source.names(path)

    def link(self, path: str) -> str | None:
        if self._is_odd():
            return self._random.choice((None, "", "..", "../../0000:4b:00.0"))
        return self._source.link(path)

    def run(self, *command: str) -> CommandOutput:
        if self._is_odd():
            code = self._random.choice((0, 0, 1, 124, 127))
            return CommandOutput(code, self._random.choice(TEXTS), self._random.choice(TEXTS))
        return self._source.run(*command)

    def environment(self, name: str) -> str | None:
        return "x" if self._is_odd() else self._source.environment(name)


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), share=st.sampled_from((0.05, 0.2, 1.0)))
def test_odd_facts_are_judged_and_never_raise(seed: int, share: float) -> None:
    for source in (GOOD_NODE, SOFT_NODE):
        facts = OddFacts(source, seed, share)
        for name, check in CHECKS.items():
            for finding in check(facts):
                assert finding.check == name
        rdma.changes(facts)
        system.changes(facts)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("machine", [roce_node(), soft_roce_node(), edge_box(), Machine()])
def test_every_finding_says_what_why_and_where_it_is_written(name: str, machine: Machine) -> None:
    findings = CHECKS[name](machine.facts)
    assert findings
    for finding in findings:
        assert finding.check == name
        assert finding.subject
        assert finding.wanted
        assert finding.source
        assert finding.reason.endswith(".")
        assert finding.measured or finding.verdict is Verdict.UNKNOWN
        if finding.verdict in (Verdict.WARN, Verdict.FAIL):
            assert finding.cure


@pytest.mark.parametrize("name", ["rdma", "flow_control", "system"])
@pytest.mark.parametrize("machine", [edge_box(), soft_roce_node(), Machine()])
def test_a_machine_without_such_hardware_does_not_fail(name: str, machine: Machine) -> None:
    assert Verdict.FAIL not in {finding.verdict for finding in CHECKS[name](machine.facts)}


@pytest.mark.parametrize("name", CHECKS)
def test_a_dump_gives_the_findings_of_the_machine(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    machine = roce_node()
    recording = RecordingFacts(machine.facts)
    findings = CHECKS[name](recording)
    dump = tmp_path_factory.mktemp("dump") / "node.json"
    dump.write_text(recording.as_json(), encoding="utf-8")
    replayed = read_dump(dump)
    assert isinstance(replayed, RecordedFacts)
    assert CHECKS[name](replayed) == findings
