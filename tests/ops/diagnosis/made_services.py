"""Snapshots of services made by hand, with metrics in the names of the real ones."""

from collections.abc import Mapping
from typing import Any

from ops.diagnosis.exposition import Exposition, Labels
from ops.diagnosis.interval import Interval
from ops.diagnosis.snapshot import Snapshot

SECONDS = 4.0

Metrics = Mapping[str, float]


def exposition(metrics: Metrics) -> Exposition:
    """Metrics without labels, or with one: ``name{label=value}``."""
    samples: dict[str, dict[Labels, float]] = {}
    for key, value in metrics.items():
        name, _, label = key.partition("{")
        labels = () if not label else (tuple(label.rstrip("}").split("=")),)
        samples.setdefault(name, {})[labels] = value  # type: ignore[index]
    return Exposition(samples, frozenset(name.removesuffix("_total") for name in samples))


def snapshot(
    role: str, name: str = "", *, at: float = 0.0, metrics: Metrics | None = None, **health: Any
) -> Snapshot:
    """One look at a service."""
    return Snapshot(
        url=f"http://127.0.0.1/{name or role}",
        role=role,
        name=name or role,
        taken_at=at,
        health={"state": "serving", **health},
        metrics=exposition(metrics or {}),
    )


def interval(
    role: str,
    name: str = "",
    *,
    before: Metrics | None = None,
    after: Metrics | None = None,
    **health: Any,
) -> Interval:
    """Two looks, SECONDS apart; what ``before`` lacks is 0 there."""
    after = after or {}
    full = {**dict.fromkeys(after, 0.0), **(before or {})}
    return Interval(
        snapshot(role, name, at=10.0, metrics=full, **health),
        snapshot(role, name, at=10.0 + SECONDS, metrics=after, **health),
    )


def worker_entry(
    role: str, name: str, address: str = "127.0.0.1:1", **facts: Any
) -> dict[str, Any]:
    """An entry of the router's list."""
    return {"role": role, "instance_id": name, "address": address, "state": "serving", **facts}
