"""The paths of KV between pairs of workers: which carrier, how fast, and is that believable?"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ops.diagnosis.amount import bytes_text, seconds_text
from ops.diagnosis.discovery import is_loopback
from ops.diagnosis.json_path import mapping_at, number_at, text_at, value_at
from ops.diagnosis.line_rate import LineRate
from ops.diagnosis.snapshot import Snapshot
from ops.node.finding import Finding, Verdict

CHECK: Final = "pair"
_SOURCE: Final = "docs/metrics.md, docs/wire.md section 6"
_MAPPED: Final = "mapped"
_RDMA: Final = "rdma"
_TCP: Final = "tcp"
# Carriers that put KV where it belongs, and what makes each the right one.
_PLACING: Final = {
    _MAPPED: "KV is written into memory that both share",
    _RDMA: "KV is written into the pool by RDMA",
}
# A single TCP connection may reach about this part of a link; less has a cause worth finding.
MIN_LINE_SHARE: Final = 0.3
# Timer resolution and rounding, no more: a figure above this is not a fast path but a wrong one.
MAX_LINE_SHARE: Final = 1.02


def check_pairs(
    decodes: Sequence[Snapshot],
    prefills: Sequence[Snapshot],
    listed: Sequence[Mapping[str, Any]],
    line_rate: LineRate | None,
) -> list[Finding]:
    """Every pair that has a path, and the handoffs of every decode worker.

    ``listed``: the router's workers, whose addresses tell who is on the same host.
    """
    addresses = {text_at(entry, "instance_id"): text_at(entry, "address") for entry in listed}
    carriers = {prefill.name: _texts(prefill, "carriers") for prefill in prefills}
    findings: list[Finding] = []
    for decode in decodes:
        pairs = mapping_at(decode.health, "prefill_workers")
        if not pairs:
            findings.append(_without_pair(decode))
        is_all_on_wire = bool(pairs)
        for name, pair in sorted(pairs.items()):
            is_one_host = _is_one_host(addresses.get(name), addresses.get(decode.name))
            is_on_wire = text_at(pair, "carrier") == _TCP and is_one_host is False
            is_all_on_wire = is_all_on_wire and is_on_wire
            findings.append(
                _carrier(decode, name, pair, carriers.get(name), is_one_host=is_one_host)
            )
            findings.append(_bandwidth(decode, name, pair, line_rate, is_on_wire=is_on_wire))
        if is_all_on_wire and line_rate is not None:
            findings += _handoffs(decode, line_rate)
    return findings


def _without_pair(decode: Snapshot) -> Finding:
    return _finding(
        f"paths to {decode.name}",
        Verdict.UNKNOWN,
        "none yet",
        "",
        "a path is chosen and measured at the first handoff, and there was none since it or its "
        "prefill workers were started",
        "send a request with a prompt longer than local_prefill_tokens, such as pdctl chat, and "
        "ask again",
    )


def _carrier(
    decode: Snapshot,
    prefill: str,
    pair: object,
    prefill_carriers: tuple[str, ...] | None,
    *,
    is_one_host: bool | None,
) -> Finding:
    carrier = text_at(pair, "carrier")
    wanted = text_at(decode.health, "kv_carrier") or "auto"
    told = _passed_over(pair)
    subject = f"carrier {prefill} → {decode.name}"
    if not carrier:
        return _finding(subject, Verdict.UNKNOWN, "", "", "its health answer names no carrier")
    if carrier in _PLACING or wanted == _TCP:
        reason = _PLACING.get(carrier, "as set")
        return _finding(subject, Verdict.OK, carrier, f"kv_carrier {wanted}", reason)
    if wanted in _PLACING:
        cure = "run both on one host as one user with the same mapped_dir"
        if wanted == _RDMA:
            cure = "pdctl node check (check rdma) on both hosts"
        reason = told or "it is not what was asked for"
        return _finding(subject, Verdict.FAIL, carrier, wanted, reason, cure)
    shared = set(_texts(decode, "carriers"))
    if prefill_carriers is not None:
        shared &= set(prefill_carriers)
    if _RDMA in shared:
        return _finding(
            subject,
            Verdict.WARN,
            f"{carrier}, a fall-back",
            _RDMA,
            f"both have an RDMA port; {told or 'why it is not used is in the log'}",
            "pdctl node check (checks rdma, mtu, flow_control) on both hosts",
        )
    is_possible = _MAPPED in shared
    if is_one_host and is_possible:
        return _finding(
            subject,
            Verdict.WARN,
            f"{carrier}, a fall-back",
            "mapped",
            f"both are on one host and can map memory; {told or 'why they do not is in the log'}",
            "run both as one user with the same mapped_dir in [prefill] and [decode]",
        )
    reason = (
        "they are on two hosts" if is_one_host is False
        else "not both can map memory (kv_wire_dtype converts, or the system cannot)"
        if not is_possible
        else "whether they share a host is not known"
    )  # fmt: skip
    return _finding(subject, Verdict.OK, carrier, f"kv_carrier {wanted}", reason)


def _passed_over(pair: object) -> str:
    """Why better carriers are not used, as the decode worker says; "" if it says nothing."""
    reasons = pair.get("passed_over") if isinstance(pair, Mapping) else None
    if not isinstance(reasons, Mapping):
        return ""
    return "; ".join(f"{carrier}: {reason}" for carrier, reason in sorted(reasons.items()))


def _bandwidth(
    decode: Snapshot, prefill: str, pair: object, line_rate: LineRate | None, *, is_on_wire: bool
) -> Finding:
    subject = f"bandwidth {prefill} → {decode.name}"
    bandwidth, fixed_s = number_at(pair, "bandwidth_bytes_per_s"), number_at(pair, "fixed_s")
    if bandwidth is None:
        return _finding(
            subject,
            Verdict.UNKNOWN,
            "",
            "",
            "it was not measured: too few blocks were free when the path was chosen",
            "restart one of the two while the other is idle",
        )
    if bandwidth <= 0:
        return _finding(
            subject,
            Verdict.OK,
            "too fast for the probe",
            "",
            "the probe ended within its own noise",
        )
    measured = f"{bytes_text(bandwidth)}/s"
    if fixed_s is not None:
        measured += f" and {seconds_text(fixed_s)} for each handoff"
    if not is_on_wire:
        return _finding(
            subject, Verdict.OK, measured, "", "it stays on this host, so no line rate bounds it"
        )
    if line_rate is None:
        return _finding(
            subject,
            Verdict.UNKNOWN,
            measured,
            "",
            "the line rate is not known: no network card tells its speed",
            "name it with --line-rate-gbps",
        )
    return _against_line(subject, bandwidth, measured, line_rate)


def _against_line(subject: str, bandwidth: float, measured: str, line_rate: LineRate) -> Finding:
    share = bandwidth / line_rate.bytes_per_s
    line = f"{bytes_text(line_rate.bytes_per_s)}/s ({line_rate.origin})"
    if share > MAX_LINE_SHARE:
        return _beats_line(subject, measured, line)
    is_slow = share < MIN_LINE_SHARE
    return _finding(
        subject,
        Verdict.WARN if is_slow else Verdict.OK,
        f"{measured}, {share:.0%} of the line",
        f"{MIN_LINE_SHARE:.0%} to 100% of {line}",
        "most of the link is not used" if is_slow else "the link is used as TCP can",
        "run pdctl node check on both hosts (MTU, flow control, buffers), raise "
        "max_lanes of [decode]"
        if is_slow
        else "",
    )


def _handoffs(decode: Snapshot, line_rate: LineRate) -> list[Finding]:
    """All handoffs since the start: their bytes must have fitted through the line in their time."""
    nbytes = decode.metrics.total("pd_decode_handoff_bytes_sum")
    seconds = decode.metrics.total("pd_decode_handoff_seconds_sum")
    count = decode.metrics.total("pd_decode_handoff_seconds_count")
    if not nbytes or not count or seconds is None:
        return []
    floor_s = nbytes / line_rate.bytes_per_s
    measured = f"{seconds_text(seconds / count)} for {bytes_text(nbytes / count)}"
    floor = f"at least {seconds_text(floor_s / count)} ({line_rate.origin})"
    subject = f"handoffs of {decode.name}"
    if floor_s > seconds * MAX_LINE_SHARE:
        return [_beats_line(subject, measured, floor)]
    return [
        _finding(
            subject, Verdict.OK, measured, floor, "the mean of all since its start, above the floor"
        )
    ]


def _beats_line(subject: str, measured: str, line: str) -> Finding:
    return _finding(
        subject,
        Verdict.FAIL,
        measured,
        line,
        "nothing is faster than its line: the measurement is wrong, or the line rate is",
        "name the true rate with --line-rate-gbps; if it is right, trust no figure of this pair",
    )


def _is_one_host(one: str | None, other: str | None) -> bool | None:
    """None if it is not known."""
    hosts = [address.rpartition(":")[0] for address in (one, other) if address]
    if len(hosts) != 2:
        return None
    return hosts[0] == hosts[1] or all(is_loopback(host) for host in hosts)


def _texts(snapshot: Snapshot, key: str) -> tuple[str, ...]:
    value = value_at(snapshot.health, key)
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()


def _finding(
    subject: str, verdict: Verdict, measured: str, wanted: str, reason: str, cure: str = ""
) -> Finding:
    return Finding(CHECK, subject, verdict, measured, wanted, reason, _SOURCE, cure)
