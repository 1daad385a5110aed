from collections.abc import Mapping

import pytest

from ops.node.change import FileChange, ValueChange
from ops.node.checks import sysctl
from ops.node.facts import Facts
from ops.node.finding import Verdict
from tests.ops.node import fact_trees as trees
from tests.ops.node.fact_trees import found, verdict_of

MEMINFO = {"/proc/meminfo": "MemTotal: 1 kB\nHugePages_Total: 0\nHugePages_Free: 0\n"}


def after(facts_before: Mapping[str, str], facts: Facts) -> dict[str, str]:
    """The files as they are once all changes are made."""
    files = dict(facts_before)
    for change in sysctl.changes(facts):
        if isinstance(change, FileChange):
            files[change.path] = change.text
        elif isinstance(change, ValueChange):
            files[change.path] = change.value
    return files


def test_a_good_machine_has_no_finding_but_ok() -> None:
    files = after(trees.GOOD_VALUES, trees.facts(trees.GOOD_VALUES))
    facts = trees.facts(files, MEMINFO)
    findings = sysctl.check(facts)
    assert {finding.verdict for finding in findings} == {Verdict.OK}
    assert sysctl.changes(facts) == []


def test_a_stock_machine_fails_with_measured_and_wanted() -> None:
    findings = sysctl.check(trees.facts(trees.STOCK_VALUES, MEMINFO))
    rmem = found(findings, "net.core.rmem_max")
    assert (rmem.verdict, rmem.measured) == (Verdict.FAIL, "212992")
    assert rmem.wanted == "at least 268435456"
    assert "sysctl -w" in rmem.cure
    assert verdict_of(findings, "net.ipv4.tcp_rmem") is Verdict.FAIL
    assert verdict_of(findings, "vm.max_map_count") is Verdict.WARN
    assert verdict_of(findings, "net.core.somaxconn") is Verdict.OK
    assert verdict_of(findings, "vm.nr_hugepages") is Verdict.OK


def test_values_that_cannot_be_seen_are_unknown_and_not_changed() -> None:
    facts = trees.facts()
    findings = sysctl.check(facts)
    assert {finding.verdict for finding in findings} == {Verdict.UNKNOWN}
    assert not any(isinstance(change, ValueChange) for change in sysctl.changes(facts))


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        ("1", Verdict.FAIL),  # the owner's note: taken for a second
        ("999", Verdict.FAIL),
        ("1000", Verdict.OK),
        ("30000", Verdict.WARN),
    ],
)
def test_the_unit_of_neighbour_times_is_milliseconds(value: str, verdict: Verdict) -> None:
    key = "net.ipv4.neigh.default.base_reachable_time_ms"
    path = "/proc/sys/net/ipv4/neigh/default/base_reachable_time_ms"
    facts = trees.facts(trees.GOOD_VALUES, {path: value})
    finding = found(sysctl.check(facts), key)
    assert finding.verdict is verdict
    assert "milliseconds" in finding.reason
    wanted = [change for change in sysctl.changes(facts) if change == _value(path, change)]
    assert len(wanted) == (value != "1000")


def _value(path: str, change: object) -> object:
    if isinstance(change, ValueChange) and change.path == path:
        assert change.value == "1000"
        return change
    return None


def test_interfaces_of_hardware_have_values_of_their_own() -> None:
    name = "base_reachable_time_ms"
    facts = trees.facts(
        trees.GOOD_VALUES,
        {f"/proc/sys/net/ipv4/neigh/{port}/{name}": "1" for port in ("eth0.5", "veth1")},
        links={"/sys/class/net/eth0.5/device": "../../0000:01:00.0"},
        folders={"/sys/class/net": ("eth0.5", "veth1")},
    )
    assert verdict_of(sysctl.check(facts), f"net.ipv4.neigh.eth0/5.{name}") is Verdict.FAIL
    paths = [change.path for change in sysctl.changes(facts) if isinstance(change, ValueChange)]
    assert paths == [f"/proc/sys/net/ipv4/neigh/eth0.5/{name}"]


def test_the_drop_in_has_what_nobody_else_sets() -> None:
    others = {"/etc/sysctl.d/10-map-count.conf": "vm.max_map_count=1048576\n"}
    files = after(others, trees.facts(others))
    text = files[sysctl.DROP_IN]
    assert "vm.max_map_count" not in text
    assert "net.core.rmem_max = 268435456\n" in text
    assert "net.ipv4.neigh.default.base_reachable_time_ms = 1000\n" in text
    assert sysctl.changes(trees.facts(files)) == []


def test_a_drop_in_that_somebody_edited_is_set_right() -> None:
    facts = trees.facts(trees.GOOD_VALUES, {sysctl.DROP_IN: "net.core.rmem_max = 1\n"})
    assert [change.path for change in sysctl.changes(facts)] == [sysctl.DROP_IN]


@pytest.mark.parametrize(
    ("path", "verdict", "words"),
    [
        ("/etc/sysctl.d/99-mine.conf", Verdict.FAIL, "wins at the next boot"),
        ("/usr/lib/sysctl.d/99-vendor.conf", Verdict.FAIL, "wins at the next boot"),
        ("/etc/sysctl.conf", Verdict.FAIL, "wins at the next boot"),
        ("/run/sysctl.d/10-early.conf", Verdict.OK, "read later and wins"),
    ],
)
def test_a_file_that_disagrees_is_named(path: str, verdict: Verdict, words: str) -> None:
    facts = trees.facts(trees.GOOD_VALUES, {path: "# theirs\nnet.core.rmem_max=212992\n"})
    findings = [
        finding
        for finding in sysctl.check(facts)
        if finding.subject == "net.core.rmem_max" and path in finding.measured
    ]
    assert [finding.verdict for finding in findings] == [verdict]
    assert findings[0].measured == f"212992 in {path}:2"
    assert words in findings[0].reason
    # It is never edited; our own file has the line.
    assert {change.path for change in sysctl.changes(facts)} == {sysctl.DROP_IN}


def test_a_file_hides_one_of_the_same_name() -> None:
    bad = {"/usr/lib/sysctl.d/99-a.conf": "net.core.rmem_max=1\n"}
    facts = trees.facts(trees.GOOD_VALUES, bad, {"/etc/sysctl.d/99-a.conf": ""})
    assert all("99-a.conf" not in finding.measured for finding in sysctl.check(facts))


def test_the_link_to_sysctl_conf_is_not_reported_twice() -> None:
    text = "net.core.rmem_max=1\n"
    facts = trees.facts(
        trees.GOOD_VALUES,
        {"/etc/sysctl.conf": text, "/etc/sysctl.d/99-sysctl.conf": text},
        links={"/etc/sysctl.d/99-sysctl.conf": "../sysctl.conf"},
    )
    named = [finding for finding in sysctl.check(facts) if "sysctl.conf:" in finding.measured]
    assert [finding.measured for finding in named] == ["1 in /etc/sysctl.conf:1"]


def test_a_pattern_counts_unless_a_line_names_the_key() -> None:
    pattern = "net.ipv4.neigh.*.base_reachable_time_ms = 1\n"
    path = "/etc/sysctl.d/99-a.conf"
    key = "net.ipv4.neigh.default.base_reachable_time_ms"

    def disagrees(text: str) -> bool:
        findings = sysctl.check(trees.facts(trees.GOOD_VALUES, {path: text}))
        return any(path in found.measured and found.subject == key for found in findings)

    assert disagrees(pattern)
    assert not disagrees(pattern + f"{key} = 1000\n")


@pytest.mark.parametrize(
    ("total", "free", "asked", "verdict"),
    [
        (0, 0, "", Verdict.OK),
        (1024, 512, "vm.nr_hugepages=1024", Verdict.OK),
        (1000, 512, "vm.nr_hugepages=1024", Verdict.WARN),
        (1024, 0, "", Verdict.WARN),
    ],
)
def test_huge_pages_are_judged_and_never_set(
    total: int, free: int, asked: str, verdict: Verdict
) -> None:
    meminfo = f"HugePages_Total:    {total}\nHugePages_Free:     {free}\n"
    files = {"/proc/meminfo": meminfo, "/etc/sysctl.d/80-huge.conf": asked}
    facts = trees.facts(trees.GOOD_VALUES, files)
    assert verdict_of(sysctl.check(facts), "vm.nr_hugepages") is verdict
    assert all("hugepages" not in str(change) for change in sysctl.changes(facts))


@pytest.mark.parametrize("value", ["", "many", "4096 x", "-1"])
def test_odd_values_do_not_raise(value: str) -> None:
    facts = trees.facts(dict.fromkeys(trees.GOOD_VALUES, value), {"/proc/meminfo": value})
    assert verdict_of(sysctl.check(facts), "net.core.rmem_max") is Verdict.FAIL
