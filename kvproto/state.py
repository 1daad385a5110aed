"""State machines of the protocol, as tables.

Two rules:

1. What is not in a table is forbidden; ``advance`` raises, and the caller knows whose fault it is.
2. A state is left only by an event of its table; nothing assigns a state.

The diagrams of docs/wire.md are made from these tables (``to_mermaid``); a test compares them.

*Connection*: both sides send HELLO at once; each checks the other's HELLO, then sends AUTH; READY
after a valid AUTH. FAULT is anything the peer did wrong (and an ERROR for the whole connection).

*Transfer*: one lease, as the receiver of the KV sees it. REVOKED is left only with proof that its
writer has ended: ABORT_ACK, or what the carrier has for it (docs/wire.md section 6.4).

*Block*: one block of a KV pool. Only a block that no peer was told about goes from RESERVED to
FREE; a WRITABLE one passes through QUARANTINED first, unless its transfer was committed.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final, TypeVar


class ConnectionState(Enum):
    """Where a connection stands."""

    AWAITING_HELLO = "awaiting_hello"
    AWAITING_AUTH = "awaiting_auth"
    READY = "ready"
    POISONED = "poisoned"
    ENDED = "ended"


class ConnectionEvent(Enum):
    """What moves a connection."""

    HELLO = "hello"
    AUTH = "auth"
    MESSAGE = "message"
    FAULT = "fault"
    EOF = "eof"
    CLOSE = "close"


class TransferState(Enum):
    """Where a lease stands at the receiver."""

    GRANTED = "granted"
    WRITING = "writing"
    COMMITTED = "committed"
    REVOKED = "revoked"
    RELEASED = "released"


class TransferEvent(Enum):
    """What moves a lease."""

    WRITE = "write"
    COMMIT = "commit"
    REVOKE = "revoke"
    PROOF = "proof"


class BlockState(Enum):
    """Who may touch a block."""

    FREE = "free"
    RESERVED = "reserved"
    WRITABLE = "writable"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"


class BlockEvent(Enum):
    """What moves a block."""

    ALLOCATE = "allocate"
    OPEN = "open"
    COMMIT = "commit"
    FREE = "free"
    QUARANTINE = "quarantine"
    RELEASE = "release"


S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
Table = Mapping[tuple[S, E], S]

CONNECTION_TRANSITIONS: Final[Table[ConnectionState, ConnectionEvent]] = MappingProxyType(
    {
        (ConnectionState.AWAITING_HELLO, ConnectionEvent.HELLO): ConnectionState.AWAITING_AUTH,
        (ConnectionState.AWAITING_HELLO, ConnectionEvent.FAULT): ConnectionState.POISONED,
        (ConnectionState.AWAITING_HELLO, ConnectionEvent.EOF): ConnectionState.ENDED,
        (ConnectionState.AWAITING_HELLO, ConnectionEvent.CLOSE): ConnectionState.ENDED,
        (ConnectionState.AWAITING_AUTH, ConnectionEvent.AUTH): ConnectionState.READY,
        (ConnectionState.AWAITING_AUTH, ConnectionEvent.FAULT): ConnectionState.POISONED,
        (ConnectionState.AWAITING_AUTH, ConnectionEvent.EOF): ConnectionState.ENDED,
        (ConnectionState.AWAITING_AUTH, ConnectionEvent.CLOSE): ConnectionState.ENDED,
        (ConnectionState.READY, ConnectionEvent.MESSAGE): ConnectionState.READY,
        (ConnectionState.READY, ConnectionEvent.FAULT): ConnectionState.POISONED,
        (ConnectionState.READY, ConnectionEvent.EOF): ConnectionState.ENDED,
        (ConnectionState.READY, ConnectionEvent.CLOSE): ConnectionState.ENDED,
    }
)

TRANSFER_TRANSITIONS: Final[Table[TransferState, TransferEvent]] = MappingProxyType(
    {
        (TransferState.GRANTED, TransferEvent.WRITE): TransferState.WRITING,
        (TransferState.GRANTED, TransferEvent.REVOKE): TransferState.REVOKED,
        (TransferState.WRITING, TransferEvent.WRITE): TransferState.WRITING,
        (TransferState.WRITING, TransferEvent.COMMIT): TransferState.COMMITTED,
        (TransferState.WRITING, TransferEvent.REVOKE): TransferState.REVOKED,
        (TransferState.REVOKED, TransferEvent.REVOKE): TransferState.REVOKED,
        (TransferState.REVOKED, TransferEvent.PROOF): TransferState.RELEASED,
    }
)

BLOCK_TRANSITIONS: Final[Table[BlockState, BlockEvent]] = MappingProxyType(
    {
        (BlockState.FREE, BlockEvent.ALLOCATE): BlockState.RESERVED,
        (BlockState.RESERVED, BlockEvent.OPEN): BlockState.WRITABLE,
        (BlockState.RESERVED, BlockEvent.COMMIT): BlockState.COMMITTED,
        (BlockState.RESERVED, BlockEvent.FREE): BlockState.FREE,
        (BlockState.WRITABLE, BlockEvent.COMMIT): BlockState.COMMITTED,
        (BlockState.WRITABLE, BlockEvent.QUARANTINE): BlockState.QUARANTINED,
        (BlockState.COMMITTED, BlockEvent.FREE): BlockState.FREE,
        (BlockState.QUARANTINED, BlockEvent.RELEASE): BlockState.FREE,
    }
)


class InvalidTransition(Exception):
    """The table has no entry for this state and event."""


def advance(table: Table[S, E], state: S, event: E) -> S:
    """The next state; InvalidTransition if the table forbids ``event`` in ``state``."""
    next_state = table.get((state, event))
    if next_state is None:
        raise InvalidTransition(f"{event.value} is not allowed in state {state.value}")
    return next_state


def to_mermaid(table: Table[S, E]) -> str:
    """The table as a Mermaid state diagram, in the table's order, without a final newline."""
    first = next(iter(table))[0]
    lines = ["stateDiagram-v2", f"    [*] --> {first.value}"]
    lines += [
        f"    {state.value} --> {next_state.value}: {event.value}"
        for (state, event), next_state in table.items()
    ]
    return "\n".join(lines)
