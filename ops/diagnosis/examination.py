"""One examination: node, services, and two looks at their metrics. Bounded in time throughout.

    router: snapshot ──▶ workers: snapshot ──▶ round trips, wait ──▶ all: snapshot ──▶ judge
    node:   checks in a thread of their own ─────────────────────────────────────────▶ judge

Judging is left to pure functions; this file only asks and waits.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ops.diagnosis.bottleneck import diagnose
from ops.diagnosis.discovery import Target, admin_targets
from ops.diagnosis.interval import Interval
from ops.diagnosis.json_path import text_at
from ops.diagnosis.line_rate import LineRate
from ops.diagnosis.load import measure_load
from ops.diagnosis.node_check import NodeChecks, check_node
from ops.diagnosis.pair_check import check_pairs
from ops.diagnosis.port_probe import port_problem
from ops.diagnosis.report import Report
from ops.diagnosis.scraper import SNAPSHOT_TIMEOUT_S, ScrapeFailure, Scraper
from ops.diagnosis.service_check import (
    check_agreement,
    check_failures,
    check_ports,
    check_round_trips,
    check_router,
    check_target,
    check_vanished,
    check_workers,
    router_workers,
)
from ops.diagnosis.snapshot import Snapshot
from ops.node.finding import Finding

NODE_TIMEOUT_S: Final = 6.0
_NUM_ROUND_TRIPS: Final = 5
_MAX_PROBED_PORTS: Final = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What to examine.

    Attributes:
        router_url: without a path.
        api_key: for the router's list of workers and its metrics.
        admin_urls: admin ports to ask; none: those that can be guessed.
        configured_ports: admin ports of a configuration file.
        seconds: between the two looks at the metrics.
        line_rate: of the network between hosts, if known.
        node_checks: finds what is wrong with this machine.
        answer_timeout_s: how long a service may take to tell what it knows.
    """

    router_url: str
    api_key: bytes | None = None
    admin_urls: tuple[str, ...] = ()
    configured_ports: tuple[int, ...] = ()
    seconds: float
    line_rate: LineRate | None
    node_checks: NodeChecks
    answer_timeout_s: float = SNAPSHOT_TIMEOUT_S


async def examine(wishes: Wishes) -> Report:
    """Look at everything; never raises for what services or the node do."""
    began_at = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        node = tasks.create_task(check_node(wishes.node_checks, timeout_s=NODE_TIMEOUT_S))
        async with Scraper(wishes.api_key, timeout_s=wishes.answer_timeout_s) as scraper:
            services, intervals = await _services(scraper, wishes)
    router = next((i for i in intervals if i.after.role == "router"), None)
    workers = [interval for interval in intervals if interval.after.role != "router"]
    diagnosis = diagnose(measure_load(router, workers))
    return Report(node.result(), tuple(services), diagnosis, time.monotonic() - began_at)


async def _services(scraper: Scraper, wishes: Wishes) -> tuple[list[Finding], list[Interval]]:
    """Findings about the services, and the two looks at each that answered both times."""
    router, problem = await _look(scraper, wishes.router_url, is_router=True)
    listed = router_workers(router)
    targets = admin_targets(wishes.admin_urls, wishes.configured_ports, listed)
    workers, findings = await _workers(scraper, targets, router)
    findings = [*check_router(wishes.router_url, router, problem), *findings]
    before = [*([router] if router else ()), *workers]
    if not before:
        return findings, []
    (trips, after), ports = await asyncio.gather(
        _watch(scraper, before, wishes.seconds),
        _port_problems([text_at(entry, "address") for entry in listed]),
    )
    intervals = []
    for old, (new, problem) in zip(before, after, strict=True):
        if new is not None:
            intervals.append(Interval(old, new))
        else:
            findings.append(check_vanished(old, problem))
    latest = {interval.after.url: interval.after for interval in intervals}
    workers = [latest.get(worker.url, worker) for worker in workers]
    findings += check_workers(router, workers)
    findings += check_ports(ports)
    findings += check_agreement(router, workers)
    findings += check_pairs(
        _of_role(workers, "decode"), _of_role(workers, "prefill"), listed, wishes.line_rate
    )
    findings += [check_round_trips(snapshot.name, *trips[snapshot.url]) for snapshot in before]
    findings += check_failures(intervals)
    return findings, intervals


async def _look(
    scraper: Scraper, url: str, *, is_router: bool = False
) -> tuple[Snapshot | None, str]:
    """(snapshot, "") or (None, why there is none)."""
    try:
        return await scraper.snapshot(url, is_router=is_router), ""
    except ScrapeFailure as exc:
        return None, str(exc)


async def _workers(
    scraper: Scraper, targets: Sequence[Target], router: Snapshot | None
) -> tuple[list[Snapshot], list[Finding]]:
    """The workers behind ``targets``; a guess that hit somebody else is dropped silently."""
    looks = await asyncio.gather(*(_look(scraper, target.url) for target in targets))
    names = {text_at(entry, "instance_id") for entry in router_workers(router)}
    found: dict[str, Snapshot] = {}
    findings: list[Finding] = []
    for target, (snapshot, problem) in zip(targets, looks, strict=True):
        is_worker = snapshot is not None and snapshot.role in ("prefill", "decode")
        if target.is_required and not is_worker:
            findings.append(check_target(target.url, problem))
        # Another cluster's worker on this host is nobody's fault.
        is_ours = not names or target.is_required or (snapshot and snapshot.name in names)
        if snapshot is not None and is_worker and is_ours:
            found.setdefault(snapshot.name, snapshot)
    return list(found.values()), findings


async def _watch(
    scraper: Scraper, before: Sequence[Snapshot], seconds: float
) -> tuple[Mapping[str, tuple[list[float], str]], list[tuple[Snapshot | None, str]]]:
    """Round trips by URL while the time passes, then the second look at each."""
    began_at = time.monotonic()
    trips = dict(
        zip(
            (snapshot.url for snapshot in before),
            await asyncio.gather(*(_round_trips(scraper, s.url, seconds) for s in before)),
            strict=True,
        )
    )
    await asyncio.sleep(max(0.0, began_at + seconds - time.monotonic()))
    looks = await asyncio.gather(
        *(_look(scraper, s.url, is_router=s.role == "router") for s in before)
    )
    return trips, looks


async def _port_problems(addresses: Sequence[str]) -> dict[str, str]:
    probed = [address for address in dict.fromkeys(addresses) if address][:_MAX_PROBED_PORTS]
    problems = await asyncio.gather(*(port_problem(address) for address in probed))
    return dict(zip(probed, problems, strict=True))


async def _round_trips(scraper: Scraper, url: str, seconds: float) -> tuple[list[float], str]:
    """(times, "") or (what there was, why there are no more). Spread over the interval."""
    ends_at = time.monotonic() + seconds
    trips: list[float] = []
    while len(trips) < _NUM_ROUND_TRIPS and (not trips or time.monotonic() < ends_at):
        try:
            trips.append(await scraper.round_trip_s(url))
        except ScrapeFailure as exc:
            return trips, str(exc)
        await asyncio.sleep(seconds / (2 * _NUM_ROUND_TRIPS))
    return trips, ""


def _of_role(snapshots: Iterable[Snapshot], role: str) -> list[Snapshot]:
    return [snapshot for snapshot in snapshots if snapshot.role == role]
