"""The checks of a node, in the order in which they are reported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ops.node.change import Change
from ops.node.checks import flow_control, locale, modprobe, mtu, path, rdma, sysctl, system
from ops.node.facts import Facts
from ops.node.finding import Finding

Check = Callable[[Facts, Sequence[str]], list[Finding]]
Changes = Callable[[Facts], list[Change]]


@dataclass(frozen=True, slots=True)
class Concern:
    """One file of ``ops/node/checks``.

    Attributes:
        name: its ``CHECK``.
        check: its findings, from facts and the peers to probe.
        changes: what apply would do for it.
    """

    name: str
    check: Check
    changes: Changes


def _without_peers(check: Callable[[Facts], list[Finding]]) -> Check:
    return lambda facts, _peers: check(facts)


def _changes_nothing(_facts: Facts) -> list[Change]:
    return []


CATALOGUE: Final = (
    Concern(locale.CHECK, _without_peers(locale.check), locale.changes),
    Concern(sysctl.CHECK, _without_peers(sysctl.check), sysctl.changes),
    Concern(modprobe.CHECK, _without_peers(modprobe.check), modprobe.changes),
    Concern(rdma.CHECK, _without_peers(rdma.check), rdma.changes),
    Concern(mtu.CHECK, mtu.check, _changes_nothing),
    Concern(path.CHECK, path.check, _changes_nothing),
    Concern(flow_control.CHECK, _without_peers(flow_control.check), _changes_nothing),
    Concern(system.CHECK, _without_peers(system.check), system.changes),
)


def all_findings(facts: Facts, peers: Sequence[str] = ()) -> list[Finding]:
    """What all checks find."""
    return [finding for concern in CATALOGUE for finding in concern.check(facts, peers)]


def all_changes(facts: Facts) -> list[Change]:
    """What all checks would change, in their order."""
    return [change for concern in CATALOGUE for change in concern.changes(facts)]
