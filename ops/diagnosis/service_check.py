"""Are the services there, of one kind, and do they take work? Pure: snapshots in, findings out."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ops.diagnosis.amount import seconds_text
from ops.diagnosis.interval import Interval
from ops.diagnosis.json_path import mapping_at, mappings_at, number_at, text_at
from ops.diagnosis.snapshot import Snapshot
from ops.node.finding import Finding, Verdict

CHECK: Final = "service"
_API: Final = "docs/api.md"
_METRICS: Final = "docs/metrics.md"
_ROUTER_SERVING: Final = "serving"
# A healthy event loop answers in about a millisecond, on a crowded small machine in tens.
MAX_ROUND_TRIP_S: Final = 0.25
_FAILURE_COUNTERS: Final = (
    # role, counter, label, what it counts
    ("prefill", "pd_prefill_refusals_total", "code", "prompts refused"),
    ("decode", "pd_decode_refusals_total", "code", "sequences refused"),
    ("decode", "pd_decode_handoff_failures_total", "code", "handoffs failed"),
)
_CODE_CURES: Final = {
    "overloaded": "add a worker, or raise max_prompts of [prefill] or max_sequences of [decode]",
    "shutting_down": "wait for the drain to end",
    "incompatible": "the worker's log names the field that differs (model, carrier or bandwidth)",
    "unauthenticated": "give all services the same secret_file",
    "connection_lost": "look for a worker that died (pdctl status, its log)",
    "deadline_exceeded": "see what is slow below, or raise stall_timeout_s of [decode]",
    "digest_mismatch": "bytes change on the way: check memory and network card, run pdctl node "
    "check",
    "pool_exhausted": "raise kv_pool_nbytes of the worker",
}


def check_router(router_url: str, router: Snapshot | None, problem: str) -> list[Finding]:
    """The router itself. ``problem``: why there is no snapshot."""
    if router is None:
        return [
            _finding(
                f"router {router_url}",
                Verdict.FAIL,
                "no answer",
                "an answer",
                f"{problem}, so no request can be served through it",
                "start it with pdctl up or pdctl start router, or name another address with --url",
            )
        ]
    state = text_at(router.health, "state")
    findings = [
        _finding(
            f"router {router_url}",
            Verdict.OK if state == _ROUTER_SERVING else Verdict.WARN,
            state,
            _ROUTER_SERVING,
            "new requests are taken" if state == _ROUTER_SERVING else "new requests are refused",
            "" if state == _ROUTER_SERVING else "wait until it serves, or see its log",
        )
    ]
    if router.metrics_problem:
        findings.append(_metrics_unseen("router", router))
    if "workers" not in router.health:
        findings.append(
            _finding(
                "workers",
                Verdict.UNKNOWN,
                "",
                "",
                "the router shows its workers only to holders of the API key",
                "give --api-key-file",
            )
        )
    elif router.health.get("is_ready") is not True:
        roles = {text_at(worker, "role") for worker in router_workers(router)}
        missing = [role for role in ("prefill", "decode") if role not in roles]
        findings.append(
            _finding(
                "workers",
                Verdict.FAIL,
                f"no {' and no '.join(missing)} worker" if missing else "none that takes work",
                "a prefill and a decode worker that serve",
                "no request can be served",
                "start one with pdctl start; if one runs, its log says why it is not registered "
                "(router_host and router_port, secret_file, another model)",
            )
        )
    return findings


def check_target(url: str, problem: str) -> Finding:
    """An admin port that was named and is none. ``problem``: how it did not answer, or ""."""
    return _finding(
        f"admin port {url}",
        Verdict.FAIL,
        "no answer" if problem else "a service that is no worker",
        "a worker",
        problem or "it answers, but neither as a prefill nor as a decode worker",
        "name the admin_port of a worker of this host",
    )


def check_vanished(service: Snapshot, problem: str) -> Finding:
    """A service that answered the first time and not the second. ``problem``: how."""
    return _finding(
        f"{service.role} {service.name}",
        Verdict.WARN,
        "no answer at the second look",
        "an answer",
        f"{problem}, though it had answered just before",
        "see its log: it ended, or its event loop is held up",
    )


def router_workers(router: Snapshot | None) -> tuple[Mapping[str, Any], ...]:
    """The router's list of workers."""
    return () if router is None else mappings_at(router.health, "workers")


def check_workers(router: Snapshot | None, workers: Sequence[Snapshot]) -> list[Finding]:
    """Each worker: registered, serving, seen; and what would make it refuse work."""
    listed = {text_at(entry, "instance_id"): entry for entry in router_workers(router)}
    seen = {worker.name: worker for worker in workers}
    is_list_visible = router is not None and "workers" in router.health
    findings: list[Finding] = []
    for name in sorted({*listed, *seen}):
        entry, worker = listed.get(name), seen.get(name)
        findings.append(_state(name, entry, worker, is_list_visible=is_list_visible))
        if worker is None:
            findings.append(_admin_unseen(name, entry))
            continue
        if worker.metrics_problem:
            findings.append(_metrics_unseen(name, worker))
        if worker.role == "decode":
            findings.append(_quarantine(worker))
    return findings


def _state(
    name: str,
    entry: Mapping[str, Any] | None,
    worker: Snapshot | None,
    *,
    is_list_visible: bool,
) -> Finding:
    state = (
        text_at(entry, "state") if entry is not None else text_at(worker_health(worker), "state")
    )
    role = text_at(entry, "role") or (worker.role if worker is not None else "")
    subject = f"{role} {name}".strip()
    address = text_at(entry, "address")
    where = f" at {address}" if address else ""
    if entry is None and is_list_visible:
        return _finding(
            subject,
            Verdict.WARN,
            f"{state}, not registered",
            "registered at the router",
            "the router does not know it, so it gets no work",
            "compare its router_host and router_port with the router's control port; its log says "
            "why a registration is refused",
        )
    if state == "unreachable":
        return _finding(
            subject,
            Verdict.FAIL,
            f"unreachable{where}",
            "serving",
            "it is registered but the router cannot connect to it",
            "check advertise_host of the worker and the firewall between the two hosts",
        )
    is_serving = state == "serving"
    return _finding(
        subject,
        Verdict.OK if is_serving else Verdict.WARN,
        (state or "unknown") + where,
        "serving",
        "it takes work" if is_serving else "it takes no new work",
        "" if is_serving else "wait for the start or the drain to end, or start another one",
    )


def worker_health(worker: Snapshot | None) -> Mapping[str, Any]:
    """The health answer, empty without one."""
    return {} if worker is None else worker.health


def _admin_unseen(name: str, entry: Mapping[str, Any] | None) -> Finding:
    address = text_at(entry, "address")
    return _finding(
        f"admin port of {name}",
        Verdict.UNKNOWN,
        "",
        "",
        "no admin port that was tried is this worker's; it listens on 127.0.0.1 of the worker's "
        f"own host ({address or 'unknown'}), so its memory, handoffs and paths are not seen",
        "run pdctl doctor on that host, or name the port with --admin",
    )


def _metrics_unseen(name: str, snapshot: Snapshot) -> Finding:
    is_key_missing = "answered 401" in snapshot.metrics_problem
    return _finding(
        f"metrics of {name}",
        Verdict.UNKNOWN,
        "",
        "",
        f"{snapshot.metrics_problem}: {snapshot.url}/metrics",
        "give --api-key-file" if is_key_missing else "ask again; if it stays, see its log",
    )


def _quarantine(worker: Snapshot) -> Finding:
    num_blocks = number_at(worker.health, "leases", "num_quarantined_blocks")
    max_blocks = number_at(worker.health, "leases", "max_quarantined_blocks")
    subject = f"quarantine of {worker.name}"
    if num_blocks is None:
        return _unknown(subject, "its health answer does not tell it")
    is_over = worker.health.get("is_over_quarantine_budget") is True
    verdict = Verdict.FAIL if is_over else Verdict.WARN if num_blocks else Verdict.OK
    reason = (
        "no handoff begins while it is over its budget"
        if is_over
        else "these blocks wait for a prefill worker that neither ends nor confirms an abort"
        if num_blocks
        else "no block waits for a prefill worker that will not end"
    )
    budget = "" if max_blocks is None else f", at most {max_blocks:.0f}"
    return _finding(
        subject,
        verdict,
        f"{num_blocks:.0f} blocks",
        f"0 blocks{budget}",
        reason,
        "find the prefill worker that hangs and end it (pdctl status, its log)"
        if num_blocks or is_over
        else "",
    )


def check_ports(problems: Mapping[str, str]) -> list[Finding]:
    """The workers' own ports, by address; the text is why one cannot be reached, "" if it can."""
    closed = {address: problem for address, problem in sorted(problems.items()) if problem}
    findings = [
        _finding(
            f"port {address}",
            Verdict.WARN,
            problem,
            "a connection",
            "a worker registered with this address, but from this host it cannot be reached",
            "check advertise_host of the worker and the firewall; it is right if this host needs "
            "no way there",
        )
        for address, problem in closed.items()
    ]
    if problems and not findings:
        what = f"{len(problems)} open"
        findings.append(
            _finding("ports", Verdict.OK, what, "all open", "each worker's port can be reached")
        )
    return findings


def check_agreement(router: Snapshot | None, workers: Sequence[Snapshot]) -> list[Finding]:
    """One version everywhere, and equal facts (the compatibility hashes) of all workers."""
    snapshots = ([] if router is None else [router]) + list(workers)
    versions = {s.name: text_at(s.health, "version") for s in snapshots}
    facts: dict[str, Mapping[str, Any]] = {
        text_at(entry, "instance_id"): mapping_at(entry, "facts")
        for entry in router_workers(router)
    }
    facts |= {w.name: mapping_at(w.health, "facts") for w in workers if w.health.get("facts")}
    return [*_versions(versions), *_facts({name: of for name, of in facts.items() if of})]


def _versions(versions: Mapping[str, str]) -> list[Finding]:
    if not versions:
        return []
    known = {name: version for name, version in versions.items() if version}
    if not known:
        return [_unknown("versions", "no service tells one (it runs from a checkout)")]
    if len(set(known.values())) == 1:
        text = next(iter(known.values()))
        return [
            _finding(
                "versions", Verdict.OK, f"{text} of {_names(known)}", "one", "all speak the same"
            )
        ]
    return [
        _finding(
            "versions",
            Verdict.WARN,
            _by_value(known),
            "one",
            "mixed versions are meant for an upgrade only",
            "end the upgrade: drain and restart the older ones",
        )
    ]


def _facts(facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    if not facts:
        return [_unknown("compatibility", "no worker's facts can be seen")]
    names = sorted({fact for of in facts.values() for fact in of})
    findings: list[Finding] = []
    for fact in names:
        values = {name: str(of[fact]) for name, of in facts.items() if fact in of}
        if len(set(values.values())) > 1:
            findings.append(
                _finding(
                    f"compatibility {fact}",
                    Verdict.FAIL,
                    _by_value(values),
                    "equal",
                    "workers that differ in it cannot hand KV over to each other",
                    "start all with the same model folder and dtype",
                )
            )
    if not findings:
        findings.append(
            _finding(
                "compatibility",
                Verdict.OK,
                f"{len(names)} facts of {len(facts)} workers",
                "equal",
                "each can hand KV over to each",
            )
        )
    return findings


def check_failures(intervals: Iterable[Interval]) -> list[Finding]:
    """What was refused or failed while we watched, and since the services were started."""
    findings: list[Finding] = []
    num_watched = 0
    for interval in intervals:
        for role, counter, label, what in _FAILURE_COUNTERS:
            if role != interval.after.role or interval.rise(counter) is None:
                continue
            num_watched += 1
            for code, num in interval.rises(counter, label).items():
                findings.append(
                    _finding(
                        f"{what} by {interval.after.name}",
                        Verdict.WARN,
                        f"{num:.0f} of {code} in {interval.seconds:.1f} s, "
                        f"{interval.after.metrics.total(counter) or 0:.0f} since its start",
                        "0",
                        "work is turned away",
                        _CODE_CURES.get(code, "its log names each with its reason"),
                        source=_METRICS,
                    )
                )
        if interval.after.role == "router":
            findings += _failed_answers(interval)
    if num_watched and not findings:
        findings.append(
            _finding(
                "refusals and failures",
                Verdict.OK,
                "0",
                "0",
                "none while we watched",
                source=_METRICS,
            )
        )
    return findings


def _failed_answers(interval: Interval) -> list[Finding]:
    rises = interval.rises("pd_router_requests_total", "status")
    failed = {status: num for status, num in rises.items() if status == "429" or status >= "5"}
    return [
        _finding(
            f"answers {status} of the router",
            Verdict.WARN,
            f"{num:.0f} in {interval.seconds:.1f} s",
            "0",
            "clients are turned away",
            "raise max_requests of [router] or add workers"
            if status == "429"
            else "the router's log has the reason of each",
            source=_METRICS,
        )
        for status, num in failed.items()
    ]


def check_round_trips(name: str, seconds: Sequence[float], problem: str = "") -> Finding:
    """One service's answer times, each measured by this process's clock alone.

    ``problem``: why there are none.
    """
    subject = f"round trip to {name}"
    if not seconds:
        return _finding(
            subject,
            Verdict.WARN,
            "no answer",
            "an answer",
            problem,
            "see its log for what holds it up",
        )
    median = statistics.median(seconds)
    is_slow = median > MAX_ROUND_TRIP_S
    return _finding(
        subject,
        Verdict.WARN if is_slow else Verdict.OK,
        f"{seconds_text(min(seconds))} at best, {seconds_text(median)} in the middle of "
        f"{len(seconds)}",
        f"below {seconds_text(MAX_ROUND_TRIP_S)}",
        "its event loop or the network holds every message up"
        if is_slow
        else "asked and answered, one clock, no other machine's time",
        "give the service CPUs of its own (cpus); run pdctl node check" if is_slow else "",
    )


def _names(of: Mapping[str, str]) -> str:
    return f"{len(of)} services" if len(of) != 1 else next(iter(of))


def _by_value(values: Mapping[str, str]) -> str:
    """Such as "a: prefill-0; b: decode-0, decode-1"."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(value, []).append(name)
    return "; ".join(f"{value}: {', '.join(sorted(names))}" for value, names in groups.items())


def _unknown(subject: str, reason: str) -> Finding:
    return _finding(subject, Verdict.UNKNOWN, "", "", reason)


def _finding(
    subject: str,
    verdict: Verdict,
    measured: str,
    wanted: str,
    reason: str,
    cure: str = "",
    *,
    source: str = _API,
) -> Finding:
    return Finding(CHECK, subject, verdict, measured, wanted, reason, source, cure)
