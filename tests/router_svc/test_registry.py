"""Registrations: who is refused, what the scheduler sees."""

from dataclasses import replace

import pytest

from kvproto.messages import Register, Renew
from router_svc.registry import IncompatibleWorkerError, WorkerRegistry

DECODE = Register(
    role="decode",
    instance_id="d",
    host="127.0.0.1",
    port=7402,
    model="tiny",
    facts={"config_digest": "c", "weights_digest": "w"},
    max_model_len=100,
    num_blocks=8,
    block_size=16,
)
LOAD = Renew("d", 1, 2, 30, 4, draining=False)


class Clock:
    """A clock that tests move by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> WorkerRegistry:
    return WorkerRegistry("c", clock=clock)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"role": "router"}, "role"),
        ({"facts": {"config_digest": "x"}}, "config_digest"),
        ({"facts": {}}, "config_digest"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"facts": {"config_digest": "c", "weights_digest": "x"}}, "weights_digest"),
    ],
)
def test_refusals(registry: WorkerRegistry, change: dict[str, object], field: str) -> None:
    registry.register(DECODE)
    with pytest.raises(IncompatibleWorkerError, match=field) as info:
        registry.register(replace(DECODE, instance_id="other", **change))  # type: ignore[arg-type]
    assert info.value.field == field
    assert registry.find("other") is None


def test_facts_only_one_side_declares_do_not_matter(registry: WorkerRegistry) -> None:
    registry.register(DECODE)
    facts = {"config_digest": "c", "extra": 1}
    registry.register(replace(DECODE, instance_id="other", facts=facts))


def test_restarted_worker_may_bring_new_weights_when_it_is_alone(
    registry: WorkerRegistry,
) -> None:
    registry.register(DECODE)
    facts = {"config_digest": "c", "weights_digest": "new"}
    entry = registry.register(replace(DECODE, facts=facts))
    assert registry.find("d") is entry


def test_nobody_is_offered_by_itself(registry: WorkerRegistry) -> None:
    entry = registry.register(DECODE)
    assert registry.num_offered("decode") == 0
    assert registry.health()[0]["state"] == "unreachable"
    registry.offer(entry)
    assert (registry.num_offered("decode"), registry.num_offered("prefill")) == (1, 0)
    registry.withdraw(entry)
    assert registry.num_offered("decode") == 0


def test_view_before_and_after_the_first_renew(registry: WorkerRegistry, clock: Clock) -> None:
    entry = registry.register(DECODE)
    entry.num_assigned_tokens = 50
    clock.now += 2.0
    [view] = registry.views()
    assert (view.num_free_blocks, view.num_running, view.age_s) == (8, 0, 2.0)
    assert view.num_assigned_tokens == 50
    registry.renew(entry, LOAD)
    clock.now += 0.5
    [view] = registry.views()
    assert (view.num_running, view.num_waiting, view.num_waiting_tokens) == (1, 2, 30)
    assert (view.num_free_blocks, view.age_s) == (4, 0.5)
    # The worker's report now covers what the router had sent.
    assert view.num_assigned_tokens == 0
    health = registry.health()[0]
    assert (health["age_s"], health["last_renewed_s"]) == (2.5, 0.5)
    assert health["facts"] == DECODE.facts


def test_draining(registry: WorkerRegistry) -> None:
    entry = registry.register(DECODE)
    registry.offer(entry)
    registry.renew(entry, replace(LOAD, draining=True))
    assert registry.num_offered("decode") == 0
    assert registry.health()[0]["state"] == "draining"


def test_removing_a_replaced_entry_keeps_the_new_one(registry: WorkerRegistry) -> None:
    old = registry.register(DECODE)
    new = registry.register(DECODE)
    registry.remove(old)
    assert registry.find("d") is new
    registry.remove(new)
    assert registry.find("d") is None


def test_every_change_is_seen(registry: WorkerRegistry) -> None:
    def changes() -> bool:
        nonlocal changed
        was_set, changed = changed.is_set(), registry.changed
        return was_set

    changed = registry.changed
    entry = registry.register(DECODE)
    assert changes()
    assert not changes()
    registry.offer(entry)
    assert changes()
    registry.renew(entry, LOAD)
    assert changes()
    registry.withdraw(entry)
    assert changes()
    registry.remove(entry)
    assert changes()
