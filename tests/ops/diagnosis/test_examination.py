"""A whole examination against real HTTP servers that answer as a small cluster would."""

from collections.abc import Sequence
from typing import Any

from ops.diagnosis.examination import Wishes, examine
from ops.diagnosis.line_rate import LineRate
from ops.diagnosis.place import Place
from ops.diagnosis.report import Report, report_json, report_lines
from ops.node.finding import Finding, Verdict
from tests.ops.diagnosis.answers import json_of, never, text_of
from tests.ops.diagnosis.conftest import StartService
from tests.ops.diagnosis.made_services import worker_entry

NODE = Finding("sysctl", "net.core.rmem_max", Verdict.WARN, "212992", "268435456", "why", "src")
FACTS = {"weights_digest": "w"}


def metrics_text(**values: float) -> str:
    return "".join(f"# TYPE {name} gauge\n{name} {value}\n" for name, value in values.items())


async def cluster(start: StartService, **decode_metrics: float) -> tuple[str, list[str]]:
    """(the router's address, the workers' admin ports)."""
    prefill_health = {
        "state": "serving", "role": "prefill", "instance_id": "p", "version": "1",
        "facts": FACTS, "carriers": ["mapped", "tcp"], "blocks": {"free": 10},
    }  # fmt: skip
    decode_health = {
        **prefill_health, "role": "decode", "instance_id": "d", "kv_carrier": "auto",
        "leases": {"num_quarantined_blocks": 0}, "max_num_seqs": 4,
        "prefill_workers": {"p": {"carrier": "mapped", "bandwidth_bytes_per_s": 5e9}},
    }  # fmt: skip
    prefill = await start(
        {"/healthz": json_of(prefill_health), "/metrics": text_of(metrics_text())}
    )
    decode = await start(
        {"/healthz": json_of(decode_health), "/metrics": text_of(metrics_text(**decode_metrics))}
    )
    listed = [
        # Ports that are open: those of the stand-ins themselves.
        worker_entry("prefill", "p", prefill.removeprefix("http://"), facts=FACTS),
        worker_entry("decode", "d", decode.removeprefix("http://"), facts=FACTS),
    ]
    health = {"state": "serving", "is_ready": True, "version": "1", "workers": listed}
    text = metrics_text(pd_router_requests_in_flight=0.0)
    router = await start({"/healthz": json_of(health), "/metrics": text_of(text)})
    return router, [prefill, decode]


def wishes(router_url: str, admin_urls: Sequence[str] = (), **more: Any) -> Wishes:
    given = {"seconds": 0.05, "line_rate": LineRate(1e9, "test"), "node_checks": lambda: [NODE]}
    return Wishes(router_url=router_url, admin_urls=tuple(admin_urls), **{**given, **more})


def failed(report: Report) -> set[str]:
    return {finding.subject for finding in report.services if finding.verdict is Verdict.FAIL}


async def test_a_healthy_cluster(start_service: StartService) -> None:
    report = await examine(wishes(*await cluster(start_service)))
    assert report.node == (NODE,)
    assert [f for f in report.services if f.verdict is not Verdict.OK] == []
    subjects = {finding.subject for finding in report.services}
    assert {"carrier p → d", "round trip to d", "ports", "versions", "compatibility"} <= subjects
    assert report.diagnosis.place is Place.IDLE
    assert report.num_failed == 0


async def test_sequences_that_wait_for_blocks(start_service: StartService) -> None:
    router, admins = await cluster(
        start_service,
        pd_decode_waiting_sequences=9,
        pd_decode_fetching_sequences=0,
        pd_decode_running_sequences=2,
        pd_decode_free_blocks=0,
    )
    report = await examine(wishes(router, admins))
    assert report.diagnosis.place is Place.DECODE_MEMORY
    lines = report_lines(report)
    assert "why is it slow: decode memory (WARN)" in lines
    assert any("kv_pool_nbytes of [decode]" in line for line in lines)
    # What is right is counted and shown on demand only.
    assert not any("round trip" in line for line in lines)
    assert any("round trip" in line for line in report_lines(report, is_verbose=True))
    assert any(line.strip().startswith("WARN    sysctl net.core.rmem_max: 212992 (wanted")
               for line in lines)  # fmt: skip
    data = report_json(report)
    assert data["diagnosis"]["bottleneck"] == "decode memory"
    assert data["diagnosis"]["num_sequences_at"]["decode memory"] == 9.0
    assert data["node"][0]["verdict"] == "WARN"


async def test_admin_ports_that_are_not_named_and_not_found(start_service: StartService) -> None:
    router, _ = await cluster(start_service)
    report = await examine(wishes(router))
    unknown = [f.subject for f in report.services if f.verdict is Verdict.UNKNOWN]
    assert {"admin port of p", "admin port of d"} <= set(unknown)
    assert report.num_failed == 0


async def test_nothing_runs(closed_url: str) -> None:
    report = await examine(wishes(closed_url, [closed_url]))
    assert failed(report) == {f"router {closed_url}", f"admin port {closed_url}"}
    assert report.diagnosis.place is Place.UNKNOWN
    assert report.node == (NODE,)


async def test_workers_without_a_router(start_service: StartService, closed_url: str) -> None:
    _, admins = await cluster(
        start_service, pd_decode_running_sequences=3, pd_decode_waiting_sequences=0
    )
    report = await examine(wishes(closed_url, admins))
    assert failed(report) == {f"router {closed_url}"}
    assert report.diagnosis.place is Place.DECODE_COMPUTE
    assert any("router did not answer" in clause for clause in report.diagnosis.unseen)


async def test_another_service_behind_a_named_port(start_service: StartService) -> None:
    router, admins = await cluster(start_service)
    report = await examine(wishes(router, [*admins, router]))
    assert failed(report) == {f"admin port {router}"}


async def test_a_service_that_hangs_is_told(start_service: StartService) -> None:
    hanging = await start_service({"/healthz": never()})
    report = await examine(wishes(hanging, [hanging], answer_timeout_s=0.2))
    assert failed(report) == {f"router {hanging}", f"admin port {hanging}"}
    assert any("did not answer within 0.2 s" in finding.reason for finding in report.services)
