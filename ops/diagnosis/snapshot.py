"""One service at one moment: its health answer and its metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ops.diagnosis.exposition import Exposition

ROLES: Final = ("router", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a service told.

    Attributes:
        url: of its HTTP or admin port.
        role: "router", "prefill", "decode"; "" if it is none of ours.
        name: the worker's instance id, or "router".
        taken_at: this host's monotonic clock when the metrics arrived.
        health: the body of /healthz.
        metrics: those of /metrics; empty if they could not be had.
        metrics_problem: why not; "" if they could.
    """

    url: str
    role: str
    name: str
    taken_at: float
    health: Mapping[str, Any] = field(default_factory=dict)
    metrics: Exposition = field(default_factory=Exposition)
    metrics_problem: str = ""
