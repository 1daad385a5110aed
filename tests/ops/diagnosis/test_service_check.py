from typing import Any

import pytest

from ops.diagnosis.service_check import (
    check_agreement,
    check_failures,
    check_ports,
    check_round_trips,
    check_router,
    check_target,
    check_vanished,
    check_workers,
)
from ops.node.finding import Finding, Verdict
from tests.ops.diagnosis.made_services import interval, snapshot, worker_entry

URL = "http://127.0.0.1:8000"


def router(*workers: dict[str, Any], **health: Any) -> Any:
    facts = {"is_ready": True, "workers": list(workers), **health}
    return snapshot("router", **facts)


def verdicts(findings: list[Finding]) -> dict[str, Verdict]:
    return {finding.subject: finding.verdict for finding in findings}


def test_no_router() -> None:
    [finding] = check_router(URL, None, "nothing is listening there")
    assert finding.verdict is Verdict.FAIL
    assert URL in finding.subject
    assert "nothing is listening there" in finding.reason
    assert "pdctl up" in finding.cure


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        ({}, {f"router {URL}": Verdict.OK}),
        ({"state": "draining"}, {f"router {URL}": Verdict.WARN}),
        ({"is_ready": False}, {f"router {URL}": Verdict.OK, "workers": Verdict.FAIL}),
    ],
)
def test_the_routers_state(health: dict[str, Any], expected: dict[str, Verdict]) -> None:
    assert verdicts(check_router(URL, router(**health), "")) == expected


def test_the_missing_kind_is_named() -> None:
    [_, finding] = check_router(URL, router(worker_entry("prefill", "p"), is_ready=False), "")
    assert finding.measured == "no decode worker"


def test_a_router_that_wants_a_key() -> None:
    locked = snapshot("router")
    [_, finding] = check_router(URL, locked, "")
    assert finding.verdict is Verdict.UNKNOWN
    assert "--api-key-file" in finding.cure


@pytest.mark.parametrize(
    ("entry", "is_seen", "expected"),
    [
        ({}, True, Verdict.OK),
        ({"state": "draining"}, True, Verdict.WARN),
        ({"state": "unreachable"}, True, Verdict.FAIL),
        ({}, False, Verdict.OK),
        (None, True, Verdict.WARN),
    ],
)
def test_a_workers_state(entry: dict[str, Any] | None, is_seen: bool, expected: Verdict) -> None:
    listed = [] if entry is None else [worker_entry("prefill", "p", **entry)]
    seen = [snapshot("prefill", "p")] if is_seen else []
    found = verdicts(check_workers(router(*listed), seen))
    assert found["prefill p"] is expected
    assert ("admin port of p" in found) is not is_seen


def test_without_the_list_a_worker_is_judged_by_itself() -> None:
    worker = snapshot("decode", "d", leases={"num_quarantined_blocks": 0})
    for unknown_list in (None, snapshot("router")):
        assert verdicts(check_workers(unknown_list, [worker])) == {
            "decode d": Verdict.OK,
            "quarantine of d": Verdict.OK,
        }


@pytest.mark.parametrize(
    ("num_blocks", "is_over", "expected"),
    [
        (0, False, Verdict.OK),
        (3, False, Verdict.WARN),
        (9, True, Verdict.FAIL),
        ("many", False, Verdict.UNKNOWN),
    ],
)
def test_quarantine(num_blocks: object, is_over: bool, expected: Verdict) -> None:
    worker = snapshot(
        "decode",
        "d",
        leases={"num_quarantined_blocks": num_blocks, "max_quarantined_blocks": 8},
        is_over_quarantine_budget=is_over,
    )
    assert verdicts(check_workers(None, [worker]))["quarantine of d"] is expected


def test_versions() -> None:
    def found(*versions: str) -> Finding:
        workers = [
            snapshot("decode", f"d{n}", version=version) for n, version in enumerate(versions)
        ]
        return next(f for f in check_agreement(None, workers) if f.subject == "versions")

    assert found("1.0", "1.0").verdict is Verdict.OK
    mixed = found("1.0", "1.1", "1.0")
    assert mixed.verdict is Verdict.WARN
    assert mixed.measured == "1.0: d0, d2; 1.1: d1"
    assert found("", "").verdict is Verdict.UNKNOWN


def test_facts_are_compared_whoever_tells_them() -> None:
    listed = [
        worker_entry("prefill", "p", facts={"weights_digest": "a", "dtype": "float32"}),
        worker_entry("decode", "d", facts={"weights_digest": "a", "dtype": "float32"}),
    ]
    [equal] = [f for f in check_agreement(router(*listed), []) if "compat" in f.subject]
    assert equal.verdict is Verdict.OK
    seen = [snapshot("decode", "d", facts={"weights_digest": "b", "dtype": "float32"})]
    [differs] = [f for f in check_agreement(router(*listed), seen) if "compat" in f.subject]
    assert differs.verdict is Verdict.FAIL
    assert differs.subject == "compatibility weights_digest"
    assert differs.measured == "a: p; b: d"


def test_no_facts_at_all() -> None:
    assert verdicts(check_agreement(router(), []))["compatibility"] is Verdict.UNKNOWN


def test_failures_while_we_watched() -> None:
    refusals = "pd_prefill_refusals_total"
    quiet = interval("prefill", "p", before={refusals: 5.0}, after={refusals: 5.0})
    assert verdicts(check_failures([quiet])) == {"refusals and failures": Verdict.OK}
    busy = interval(
        "prefill",
        "p",
        before={f"{refusals}{{code=overloaded}}": 5.0},
        after={f"{refusals}{{code=overloaded}}": 8.0},
    )
    [finding] = check_failures([busy])
    assert finding.verdict is Verdict.WARN
    assert finding.measured == "3 of overloaded in 4.0 s, 8 since its start"
    assert "max_prompts" in finding.cure
    # Not "none" where nobody could count.
    assert check_failures([interval("prefill", "p")]) == []


@pytest.mark.parametrize(("status", "num"), [("200", 0), ("429", 1), ("503", 1), ("400", 0)])
def test_answers_of_the_router(status: str, num: int) -> None:
    made = interval("router", after={f"pd_router_requests_total{{status={status}}}": 2.0})
    found = check_failures([made])
    assert sum(finding.verdict is Verdict.WARN for finding in found) == num


def test_round_trips() -> None:
    fast = check_round_trips("router", [0.002, 0.001, 0.9])
    assert fast.verdict is Verdict.OK
    assert "1 ms at best, 2 ms in the middle of 3" in fast.measured
    assert check_round_trips("router", [0.4, 0.5]).verdict is Verdict.WARN
    silent = check_round_trips("router", [], "it did not answer within 2 s")
    assert silent.verdict is Verdict.WARN
    assert "did not answer" in silent.reason


def test_a_service_that_vanished() -> None:
    finding = check_vanished(snapshot("decode", "d"), "nothing is listening there")
    assert (finding.subject, finding.verdict) == ("decode d", Verdict.WARN)


def test_ports() -> None:
    assert verdicts(check_ports({"h:1": "", "h:2": ""})) == {"ports": Verdict.OK}
    assert verdicts(check_ports({"h:1": "", "h:2": "refused"})) == {"port h:2": Verdict.WARN}
    assert check_ports({}) == []


def test_a_named_admin_port_that_is_none() -> None:
    assert check_target("http://x", "it answered 404").verdict is Verdict.FAIL
    assert "neither" in check_target("http://x", "").reason
