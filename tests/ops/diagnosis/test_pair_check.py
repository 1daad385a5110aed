from typing import Any

import pytest

from ops.diagnosis.line_rate import LineRate
from ops.diagnosis.pair_check import check_pairs
from ops.diagnosis.snapshot import Snapshot
from ops.node.finding import Finding, Verdict
from tests.ops.diagnosis.made_services import snapshot, worker_entry

LINE = LineRate(1.25e9, "--line-rate-gbps")
HERE = [worker_entry("decode", "d", "127.0.0.1:2"), worker_entry("prefill", "p", "127.0.0.1:1")]
FAR = [worker_entry("decode", "d", "10.0.0.2:2"), worker_entry("prefill", "p", "10.0.0.1:1")]
PREFILL = snapshot("prefill", "p", carriers=["mapped", "tcp"])


def pair(carrier: str = "tcp", bandwidth: float | None = 1e9, **more: Any) -> dict[str, Any]:
    return {"carrier": carrier, "bandwidth_bytes_per_s": bandwidth, "fixed_s": 0.001, **more}


def decode(path: Any = None, metrics: dict[str, float] | None = None, **health: Any) -> Snapshot:
    paths = {} if path is None else {"p": path}
    facts = {"kv_carrier": "auto", "carriers": ["mapped", "tcp"], **health}
    return snapshot("decode", "d", metrics=metrics, prefill_workers=paths, **facts)


def found(worker: Snapshot, listed: Any, line: LineRate | None = LINE) -> dict[str, Finding]:
    findings = check_pairs([worker], [PREFILL], listed, line)
    return {finding.subject.split()[0]: finding for finding in findings}


@pytest.mark.parametrize(
    ("path", "health", "listed", "verdict", "words"),
    [
        (pair("mapped"), {}, HERE, Verdict.OK, "memory that both share"),
        (pair("tcp"), {}, HERE, Verdict.WARN, "both are on one host"),
        (
            pair("tcp", passed_over={"mapped": "no owner listens"}),
            {},
            HERE,
            Verdict.WARN,
            "no owner",
        ),
        (pair("tcp"), {"kv_carrier": "tcp"}, HERE, Verdict.OK, "as set"),
        (pair("tcp"), {"carriers": ["tcp"]}, HERE, Verdict.OK, "not both can map"),
        (pair("tcp"), {}, FAR, Verdict.OK, "on two hosts"),
        (pair("tcp"), {}, [], Verdict.OK, "not known"),
        (pair("tcp"), {"kv_carrier": "mapped"}, HERE, Verdict.FAIL, "not what was asked for"),
        (pair("rdma"), {}, FAR, Verdict.OK, "by RDMA"),
        (pair("tcp"), {"kv_carrier": "rdma"}, FAR, Verdict.FAIL, "not what was asked for"),
        ({}, {}, HERE, Verdict.UNKNOWN, "names no carrier"),
        ("nonsense", {}, HERE, Verdict.UNKNOWN, "names no carrier"),
    ],
)
def test_the_carrier(
    path: Any, health: dict[str, Any], listed: Any, verdict: Verdict, words: str
) -> None:
    finding = found(decode(path, **health), listed)["carrier"]
    assert finding.verdict is verdict
    assert words in finding.reason


def test_rdma_that_both_have_and_do_not_use_is_a_fall_back() -> None:
    worker = decode(
        pair("tcp", passed_over={"rdma": "RETRY_EXC_ERR"}), carriers=["rdma", "mapped", "tcp"]
    )
    prefill = snapshot("prefill", "p", carriers=["rdma", "tcp"])
    [finding] = [
        finding
        for finding in check_pairs([worker], [prefill], FAR, LINE)
        if finding.subject.startswith("carrier")
    ]
    assert finding.verdict is Verdict.WARN
    assert "rdma: RETRY_EXC_ERR" in finding.reason
    assert "pdctl node check" in finding.cure


@pytest.mark.parametrize(
    ("bandwidth", "verdict", "words"),
    [
        (1.2e9, Verdict.OK, "96% of the line"),
        (1e8, Verdict.WARN, "8% of the line"),
        (1.25e9, Verdict.OK, "100%"),
        (2e9, Verdict.FAIL, "the measurement is wrong"),
        (0.0, Verdict.OK, "too fast for the probe"),
        (None, Verdict.UNKNOWN, "not measured"),
        (float("nan"), Verdict.UNKNOWN, "not measured"),
    ],
)
def test_bandwidth_against_the_line(bandwidth: float | None, verdict: Verdict, words: str) -> None:
    finding = found(decode(pair(bandwidth=bandwidth)), FAR)["bandwidth"]
    assert finding.verdict is verdict
    assert words in finding.measured + finding.reason
    if bandwidth:
        assert finding.measured.count("nan") == 0


def test_a_path_within_a_host_has_no_line() -> None:
    finding = found(decode(pair("tcp", 9e9)), HERE)["bandwidth"]
    assert finding.verdict is Verdict.OK
    assert "no line rate" in finding.reason
    assert "9 GB/s and 1 ms" in finding.measured


def test_an_unknown_line_is_said() -> None:
    finding = found(decode(pair()), FAR, None)["bandwidth"]
    assert finding.verdict is Verdict.UNKNOWN
    assert "--line-rate-gbps" in finding.cure


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(10.0, Verdict.OK), (0.8, Verdict.OK), (0.5, Verdict.FAIL)]
)
def test_no_handoff_beats_the_line(seconds: float, verdict: Verdict) -> None:
    """1 GB at 1.25 GB/s takes 0.8 s at least, whatever was measured."""
    metrics = {
        "pd_decode_handoff_bytes_sum": 1e9,
        "pd_decode_handoff_seconds_sum": seconds,
        "pd_decode_handoff_seconds_count": 1.0,
    }
    finding = found(decode(pair(), metrics), FAR)["handoffs"]
    assert finding.verdict is verdict
    assert "800 ms" in finding.wanted
    # Bytes that stay on the host are not bound by it.
    assert "handoffs" not in found(decode(pair(), metrics), HERE)


def test_without_a_handoff_nothing_is_known_of_paths() -> None:
    finding = found(decode(), HERE)["paths"]
    assert finding.verdict is Verdict.UNKNOWN
    assert "first handoff" in finding.reason
