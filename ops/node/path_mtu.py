"""Largest packet that a path carries, found with don't-fragment probes.

As a program: ``python -m ops.node.path_mtu PEER …`` writes a JSON list, one object a peer, all
peers at once. The checks run it so, which lets a dump keep the answer.

Two ways a path is narrower than its ends: a router says so (ICMP "fragmentation needed"), or the
packets vanish: a switch or the far end with a smaller MTU, or a filter that eats the ICMP message.
The second one is the expensive one, because senders wait and repeat. Source: RFC 1191, RFC 8899.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Final, Protocol

from ops.node.probe_answer import matching_entries
from ops.node.probe_socket import Answer, ProbeSocket

PROGRAM: Final = "ops.node.path_mtu"
MAX_PEERS: Final = 64
DEADLINE_S: Final = 1.8
# How long to wait for the first answer; afterwards a multiple of what that one took, at least the
# second figure, as the peer's CPU may be busy.
FIRST_TIMEOUT_S: Final = 0.25
MIN_TIMEOUT_S: Final = 0.05
# So many lost packets in a row are no chance; halving has too many steps for it.
NUM_TRIES: Final = 3
NUM_TRIES_WHEN_HALVING: Final = 2
# Links that are in use: jumbo, the smallest one for RDMA packets of 4096, FDDI, Ethernet and what
# tunnels (PPPoE, GRE, VXLAN, WireGuard) leave of it; IPv6's and IPv4's smallest.
COMMON_MTUS: Final = (9000, 8900, 4200, 4096, 1500, 1492, 1476, 1450, 1420, 1400, 1280, 576)
VLAN_TAG_NBYTES: Final = 4


@dataclass(frozen=True, slots=True)
class PathMtu:
    """What a path carries.

    Attributes:
        peer: as it was asked for.
        address: what it stands for, or "".
        method: how it was asked.
        local_mtu: MTU of the interface towards it, 0 if unknown.
        path_mtu: the largest packet that was answered, 0 if none was.
        told_mtu: what a router or the kernel named as the limit, 0 if nobody did.
        error: why nothing was measured, "" if something was.
    """

    peer: str
    address: str = ""
    method: str = ""
    local_mtu: int = 0
    path_mtu: int = 0
    told_mtu: int = 0
    error: str = ""

    @property
    def is_black_hole(self) -> bool:
        """True if larger packets vanish without a word."""
        return 0 < self.path_mtu < self.local_mtu and not self.told_mtu


def probe_path_mtu(
    peer: str, *, allows_icmp: bool = True, clock: Callable[[], float] = time.monotonic
) -> PathMtu:
    """Measure the path to ``peer``; a result in any case, in less than three seconds."""
    try:
        with ProbeSocket(peer, allows_icmp=allows_icmp) as probe:
            return search_path_mtu(peer, probe, clock)
    except (OSError, UnicodeError) as exc:
        return PathMtu(peer, error=f"{exc.strerror if isinstance(exc, OSError) else exc}")


class Probe(Protocol):
    """What the search needs of a ``ProbeSocket``."""

    method: str
    address: str
    local_mtu: int

    @property
    def headers_nbytes(self) -> int:
        """The smallest packet."""

    def send(self, packet_nbytes: int, sequence: int) -> Answer | None:
        """See ``ProbeSocket.send``."""

    def receive(self, timeout_s: float) -> Answer | None:
        """See ``ProbeSocket.receive``."""


def search_path_mtu(peer: str, probe: Probe, clock: Callable[[], float]) -> PathMtu:
    """Find the largest packet that is answered, within ``DEADLINE_S`` of ``clock``."""
    return _Search(peer, probe, clock).run()


class _Search:
    """One measurement: the full size first, as that is the answer on a path that is right."""

    def __init__(self, peer: str, probe: Probe, clock: Callable[[], float]) -> None:
        self._peer, self._probe, self._clock = peer, probe, clock
        self._deadline = clock() + DEADLINE_S
        self._sequence = 0
        self._timeout_s = FIRST_TIMEOUT_S
        self._told_mtu = 0
        self._error = ""

    def run(self) -> PathMtu:
        started_at = self._clock()
        if not self._is_answered(self._probe.headers_nbytes):
            return self._result(0, self._error or "no answer, not even to a small packet")
        self._error = ""
        rtt_s = self._clock() - started_at
        self._timeout_s = min(FIRST_TIMEOUT_S, max(MIN_TIMEOUT_S, 8 * rtt_s))
        limit = self._probe.local_mtu
        # As many narrower hops in a row as a path may have.
        for _ in range(8):
            self._told_mtu = 0
            if self._is_answered(limit):
                lowest = 0 if limit == self._probe.local_mtu else limit
                return self._result(limit, "", told_mtu=lowest)
            if not self._probe.headers_nbytes < self._told_mtu < limit:
                break
            limit = self._told_mtu
        return self._result(self._largest_below(limit), "")

    def _largest_below(self, limit: int) -> int:
        """Nobody tells: the common sizes first, then the bytes between two of them, by halving."""
        low, high = self._probe.headers_nbytes, limit
        sizes = [mtu for mtu in COMMON_MTUS if low < mtu < high]
        while sizes:
            middle = len(sizes) // 2
            if self._is_answered(sizes[middle], NUM_TRIES_WHEN_HALVING):
                low, sizes = sizes[middle], sizes[:middle]
            else:
                high, sizes = sizes[middle], sizes[middle + 1 :]
        if low in COMMON_MTUS and self._is_answered(low + 1, NUM_TRIES_WHEN_HALVING):
            low += 1
            while high - low > 1 and self._clock() < self._deadline:
                middle = (low + high) // 2
                if self._is_answered(middle, NUM_TRIES_WHEN_HALVING):
                    low = middle
                else:
                    high = middle
        # A receiver lets the four bytes of a VLAN tag pass on top of its MTU.
        return next((mtu for mtu in COMMON_MTUS if mtu < low <= mtu + VLAN_TAG_NBYTES), low)

    def _is_answered(self, packet_nbytes: int, num_tries: int = NUM_TRIES) -> bool:
        """Several tries: one lost packet is not yet a narrow path."""
        for _ in range(num_tries):
            if self._clock() >= self._deadline:
                return False
            self._sequence += 1
            answer = self._probe.send(packet_nbytes, self._sequence)
            timeout_s = min(self._timeout_s, self._deadline - self._clock())
            while answer is None or answer.sequence not in (None, 0, self._sequence):
                answer = self._probe.receive(timeout_s)
                if answer is None:
                    break
            if answer is None:
                continue
            if answer.sequence is not None:
                return True
            if answer.told_mtu is not None:
                self._told_mtu = answer.told_mtu
                return False
            self._error = answer.error
        return False

    def _result(self, path_mtu: int, error: str, *, told_mtu: int = 0) -> PathMtu:
        return PathMtu(
            self._peer,
            self._probe.address,
            self._probe.method,
            self._probe.local_mtu,
            path_mtu,
            told_mtu,
            error,
        )


def probe_all(peers: Sequence[str]) -> list[PathMtu]:
    """All peers at once, at most ``MAX_PEERS``."""
    if not peers:
        return []
    with ThreadPoolExecutor(max_workers=min(len(peers), MAX_PEERS)) as pool:
        return list(pool.map(probe_path_mtu, peers))


def parse_path_mtus(text: str) -> list[PathMtu]:
    """What the program wrote; entries of another version are skipped."""
    return [PathMtu(**entry) for entry in matching_entries(text, PathMtu(""))]


def main(arguments: Sequence[str]) -> int:
    """The program."""
    print(json.dumps([asdict(path) for path in probe_all(arguments[:MAX_PEERS])]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
