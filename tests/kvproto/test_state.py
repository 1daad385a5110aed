"""Each table, walked over every state and event."""

import itertools

import pytest

from kvproto import state
from kvproto.state import (
    BLOCK_TRANSITIONS,
    CONNECTION_TRANSITIONS,
    TRANSFER_TRANSITIONS,
    BlockEvent,
    BlockState,
    ConnectionEvent,
    ConnectionState,
    InvalidTransition,
    TransferEvent,
    TransferState,
    advance,
    to_mermaid,
)

TABLES = [
    (CONNECTION_TRANSITIONS, ConnectionState, ConnectionEvent),
    (TRANSFER_TRANSITIONS, TransferState, TransferEvent),
    (BLOCK_TRANSITIONS, BlockState, BlockEvent),
]


@pytest.mark.parametrize(("table", "states", "events"), TABLES)
def test_what_is_not_in_the_table_is_forbidden(table, states, events):
    for pair in itertools.product(states, events):
        if pair in table:
            assert advance(table, *pair) is table[pair]
        else:
            with pytest.raises(InvalidTransition, match=pair[1].value):
                advance(table, *pair)


@pytest.mark.parametrize(("table", "states", "events"), TABLES)
def test_every_state_and_event_is_used(table, states, events):
    assert {event for _, event in table} == set(events)
    assert {start for start, _ in table} | set(table.values()) == set(states)


@pytest.mark.parametrize(("table", "states", "events"), TABLES)
def test_tables_cannot_be_changed(table, states, events):
    with pytest.raises(TypeError):
        table[next(iter(table))] = next(iter(states))


def test_a_writable_block_never_becomes_free_at_once():
    for event in BlockEvent:
        assert BLOCK_TRANSITIONS.get((BlockState.WRITABLE, event)) is not BlockState.FREE


def test_a_revoked_transfer_is_left_only_with_proof():
    leaving = {
        event
        for (start, event), end in TRANSFER_TRANSITIONS.items()
        if start is TransferState.REVOKED and end is not start
    }
    assert leaving == {TransferEvent.PROOF}


def test_nothing_leaves_the_end_of_a_connection():
    ends = {ConnectionState.POISONED, ConnectionState.ENDED}
    assert not ends & {start for start, _ in CONNECTION_TRANSITIONS}


def test_mermaid_draws_one_arrow_for_each_entry():
    lines = to_mermaid(BLOCK_TRANSITIONS).splitlines()
    assert lines[:3] == [
        "stateDiagram-v2",
        "    [*] --> free",
        "    free --> reserved: allocate",
    ]
    assert len(lines) == 2 + len(BLOCK_TRANSITIONS)


def test_the_theory_of_operation_names_every_machine():
    for name in ("*Connection*", "*Transfer*", "*Block*"):
        assert name in state.__doc__
