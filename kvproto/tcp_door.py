"""Who may come in at a listening port: strangers, whose handshake is not done, and guests.

Strangers have room of their own, so that silent connections never take that of guests. When it
is full the newcomer gets in and a stranger who has been there longer must leave: an honest peer is
through in milliseconds, so those who stay long are those who keep silent. The one who leaves is of
the newcomer's address if that has its full share, else of the address with the most.

Pure: no I/O, no clock. Not thread-safe.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvproto.errors import Overloaded

VisitorT = TypeVar("VisitorT", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class DoorLimits:
    """How many may be in; "instance" is a role and an instance id, "address" a remote host."""

    max_peers: int = 256
    max_peers_per_instance: int = 32
    max_handshakes: int = 128
    max_handshakes_per_address: int = 64


class Door(Generic[VisitorT]):
    """Counts visitors. ``arrive``, then ``admit`` once it is known who it is, then ``leave``."""

    def __init__(self, limits: DoorLimits) -> None:
        self._limits = limits
        self._strangers: dict[VisitorT, str] = {}  # to their address, in order of arrival
        self._guests: dict[VisitorT, tuple[str, str]] = {}

    def arrive(self, visitor: VisitorT, address: str) -> VisitorT | None:
        """Let a stranger in; the stranger who must leave instead, or None.

        Overloaded if the guests already have all the room there is for guests.
        """
        if len(self._guests) >= self._limits.max_peers:
            raise Overloaded(
                f"this side serves {self._limits.max_peers} peers, its limit (max_peers); "
                "try again later"
            )
        leaving = self._who_leaves_for(address)
        if leaving is not None:
            del self._strangers[leaving]
        self._strangers[visitor] = address
        return leaving

    def admit(self, visitor: VisitorT, role: str, instance_id: str) -> None:
        """The stranger's handshake is done: a guest from now on.

        Overloaded, checked in this order: no room for another guest, or for another connection
        of this instance. The visitor has then left.
        """
        self._strangers.pop(visitor, None)
        if len(self._guests) >= self._limits.max_peers:
            raise Overloaded(
                f"this side serves {self._limits.max_peers} peers, its limit (max_peers); "
                "try again later"
            )
        instance = (role, instance_id)
        num_connections = sum(guest == instance for guest in self._guests.values())
        if num_connections >= self._limits.max_peers_per_instance:
            raise Overloaded(
                f"{role} {instance_id} has {num_connections} connections here, its limit "
                "(max_peers_per_instance); use those that are open"
            )
        self._guests[visitor] = instance

    def leave(self, visitor: VisitorT) -> None:
        """The connection is gone. Idempotent."""
        self._strangers.pop(visitor, None)
        self._guests.pop(visitor, None)

    def stats(self) -> dict[str, int]:
        """How many guests and strangers there are, and how many may be."""
        return {
            "num_peers": len(self._guests),
            "max_peers": self._limits.max_peers,
            "num_handshakes": len(self._strangers),
            "max_handshakes": self._limits.max_handshakes,
        }

    def _who_leaves_for(self, address: str) -> VisitorT | None:
        counts = Counter(self._strangers.values())
        if counts[address] < self._limits.max_handshakes_per_address:
            if len(self._strangers) < self._limits.max_handshakes:
                return None
            # Ties: the address whose first stranger came first.
            address = counts.most_common(1)[0][0]
        return next(visitor for visitor, theirs in self._strangers.items() if theirs == address)
