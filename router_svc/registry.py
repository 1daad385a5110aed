"""The workers that registered at this router, and what it knows of their load.

Synchronous and without sockets; the clock is handed in. `control.py` feeds it, `dispatch.py`
reads it. Who may be chosen is decided in `scheduler.py`.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvproto.messages import Register, Renew
from router_svc.scheduler import WorkerView

WORKER_ROLES: Final = ("prefill", "decode")
CONFIG_DIGEST_FACT: Final = "config_digest"


class IncompatibleWorkerError(Exception):
    """A worker that cannot work with this router or with its other workers; names the field."""

    def __init__(self, field: str, ours: object, theirs: object, hint: str) -> None:
        super().__init__(f"{field} is {theirs!r}, but {ours!r} is needed here. {hint}")
        self.field = field
        self.ours = ours
        self.theirs = theirs


@dataclass(slots=True, eq=False)
class WorkerEntry:
    """One registration. Compared by identity: a restarted worker is a new entry."""

    registration: Register
    registered_at: float
    renewed_at: float
    load: Renew | None = None
    is_offered: bool = False
    num_assigned: int = 0
    num_assigned_tokens: int = 0

    @property
    def instance_id(self) -> str:
        """The worker's own name, unique among its live peers."""
        return self.registration.instance_id


class WorkerRegistry:
    """All live registrations, by instance id.

    `config_digest` is the digest of the router's own model; `clock` returns monotonic seconds.
    """

    def __init__(self, config_digest: str, *, clock: Callable[[], float]) -> None:
        self._config_digest = config_digest
        self._clock = clock
        self._entries: dict[str, WorkerEntry] = {}
        self._changed = asyncio.Event()

    @property
    def changed(self) -> asyncio.Event:
        """An event set at the next change. Take it before looking, wait for it after."""
        return self._changed

    def register(self, registration: Register) -> WorkerEntry:
        """Add a worker, not offered yet. A live entry of the same id is replaced.

        Raises IncompatibleWorkerError, checked in this order: role, config_digest, sizes, every
        fact that the first live worker declares too.
        """
        self._check(registration)
        now = self._clock()
        entry = WorkerEntry(registration, registered_at=now, renewed_at=now)
        self._entries[entry.instance_id] = entry
        self._notify()
        return entry

    def offer(self, entry: WorkerEntry) -> None:
        """Let the scheduler choose this worker from now on."""
        entry.is_offered = True
        self._notify()

    def withdraw(self, entry: WorkerEntry) -> None:
        """Keep the registration, but do not choose this worker until it is offered again."""
        entry.is_offered = False
        self._notify()

    def renew(self, entry: WorkerEntry, load: Renew) -> None:
        """Take over the worker's load and restart its lease."""
        entry.load = load
        entry.renewed_at = self._clock()
        entry.num_assigned_tokens = 0
        self._notify()

    def remove(self, entry: WorkerEntry) -> None:
        """Forget the entry; an entry that was replaced meanwhile stays untouched."""
        entry.is_offered = False
        if self._entries.get(entry.instance_id) is entry:
            del self._entries[entry.instance_id]
        self._notify()

    def find(self, instance_id: str) -> WorkerEntry | None:
        """Return the live entry of this id."""
        return self._entries.get(instance_id)

    def views(self) -> tuple[WorkerView, ...]:
        """Return the snapshot that the scheduler decides on."""
        now = self._clock()
        return tuple(_view(entry, now) for entry in self._entries.values())

    def num_offered(self, role: str) -> int:
        """Return how many workers of `role` can be chosen now, draining ones not counted."""
        return sum(
            view.role == role and view.is_offered and not view.is_draining for view in self.views()
        )

    def health(self) -> list[dict[str, Any]]:
        """Return one JSON-ready object per worker, for /healthz."""
        now = self._clock()
        return [
            {
                "instance_id": view.instance_id,
                "role": view.role,
                "address": f"{view.host}:{view.port}",
                "model": entry.registration.model,
                "facts": dict(entry.registration.facts),
                "state": _state(view),
                "age_s": round(now - entry.registered_at, 3),
                "last_renewed_s": round(view.age_s, 3),
                "max_model_len": view.max_model_len,
                "num_blocks": view.num_blocks,
                "num_free_blocks": view.num_free_blocks,
                "num_running": view.num_running,
                "num_waiting": view.num_waiting,
                "num_waiting_tokens": view.num_waiting_tokens,
                "num_assigned": view.num_assigned,
            }
            for entry in self._entries.values()
            for view in (_view(entry, now),)
        ]

    def _check(self, registration: Register) -> None:
        if registration.role not in WORKER_ROLES:
            raise IncompatibleWorkerError(
                "role", "prefill or decode", registration.role, "Only workers register here."
            )
        digest = registration.facts.get(CONFIG_DIGEST_FACT)
        if digest != self._config_digest:
            raise IncompatibleWorkerError(
                CONFIG_DIGEST_FACT,
                self._config_digest,
                digest,
                "Start the router and its workers with the same model folder.",
            )
        for field in ("max_model_len", "block_size", "num_blocks"):
            if getattr(registration, field) < 1:
                raise IncompatibleWorkerError(
                    field, "at least 1", getattr(registration, field), "Fix the worker's settings."
                )
        self._check_facts(registration)

    def _check_facts(self, registration: Register) -> None:
        """Compare with the first live worker; one that comes back as itself is not compared."""
        for entry in self._entries.values():
            if entry.instance_id == registration.instance_id:
                continue
            field = _first_difference(entry.registration.facts, registration.facts)
            if field is not None:
                raise IncompatibleWorkerError(
                    field,
                    entry.registration.facts[field],
                    registration.facts[field],
                    f"Worker {entry.instance_id} is here already; start all workers with the "
                    "same model and dtype.",
                )
            return

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _first_difference(ours: Mapping[str, str | int], theirs: Mapping[str, str | int]) -> str | None:
    """Return the first fact, by name, that both declare and that differs."""
    for name in sorted(ours):
        if name in theirs and ours[name] != theirs[name]:
            return name
    return None


def _view(entry: WorkerEntry, now: float) -> WorkerView:
    registration, load = entry.registration, entry.load
    return WorkerView(
        instance_id=registration.instance_id,
        role=registration.role,
        host=registration.host,
        port=registration.port,
        max_model_len=registration.max_model_len,
        num_blocks=registration.num_blocks,
        block_size=registration.block_size,
        # Before the first RENEW the pool is taken to be empty.
        num_free_blocks=registration.num_blocks if load is None else load.num_free_blocks,
        num_running=0 if load is None else load.num_running,
        num_waiting=0 if load is None else load.num_waiting,
        num_waiting_tokens=0 if load is None else load.num_waiting_tokens,
        num_assigned=entry.num_assigned,
        num_assigned_tokens=entry.num_assigned_tokens,
        is_draining=load is not None and load.draining,
        is_offered=entry.is_offered,
        age_s=now - entry.renewed_at,
    )


def _state(view: WorkerView) -> str:
    if not view.is_offered:
        return "unreachable"
    return "draining" if view.is_draining else "serving"
