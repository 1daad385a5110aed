"""Loss and delay of a path: many small probes, counted and timed.

As a program: ``python -m ops.node.path_quality PEER …`` writes a JSON list, one object a peer, all
peers at once. ICMP echoes where they are allowed, otherwise TCP connections: an answer is either
accepted or refused, both are one round trip. Source: RFC 2680 (loss), RFC 2681 (round-trip delay).
"""

import errno
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Final

from ops.node.path_mtu import MAX_PEERS
from ops.node.probe_answer import matching_entries
from ops.node.probe_socket import CLOSED_UDP_PORT, ProbeSocket

PROGRAM: Final = "ops.node.path_quality"
# A hundred in half a second: sees a loss of one in a hundred more often than not, and is far below
# what hosts allow themselves to answer (net.ipv4.icmp_msgs_per_sec is 1000).
NUM_PROBES: Final = 100
INTERVAL_S: Final = 0.005
# After the last probe. Shorter than the second after which TCP sends a lost SYN again.
PATIENCE_S: Final = 0.6
PACKET_NBYTES: Final = 128


@dataclass(frozen=True, slots=True)
class PathQuality:
    """What a path did to the probes.

    Attributes:
        peer: as it was asked for.
        method: "ICMP echo" or "TCP connect".
        num_sent: probes that left.
        num_answered: of these.
        median_rtt_s: round-trip time; 0.0 without answers.
        p99_rtt_s: the 99th percentile.
        error: why nothing was measured, "" if something was.
    """

    peer: str
    method: str = ""
    num_sent: int = 0
    num_answered: int = 0
    median_rtt_s: float = 0.0
    p99_rtt_s: float = 0.0
    error: str = ""

    @property
    def loss(self) -> float:
        """Share of the probes without an answer."""
        return (self.num_sent - self.num_answered) / self.num_sent if self.num_sent else 0.0


def summarize(peer: str, method: str, num_sent: int, rtts_s: Sequence[float]) -> PathQuality:
    """The figures of one measurement."""
    ordered = sorted(rtts_s)
    if not ordered:
        return PathQuality(peer, method, num_sent, 0, error="no probe was answered")
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return PathQuality(peer, method, num_sent, len(ordered), ordered[len(ordered) // 2], p99)


def probe_path_quality(
    peer: str, *, allows_icmp: bool = True, clock: Callable[[], float] = time.monotonic
) -> PathQuality:
    """Measure the path to ``peer``; a result in any case, in less than three seconds."""
    try:
        if allows_icmp:
            with ProbeSocket(peer) as probe:
                if probe.method == "ICMP echo":
                    return _echoes(peer, probe, clock)
        return _connections(peer, clock)
    except (OSError, UnicodeError) as exc:
        return PathQuality(peer, error=f"{exc.strerror if isinstance(exc, OSError) else exc}")


def _echoes(peer: str, probe: ProbeSocket, clock: Callable[[], float]) -> PathQuality:
    sent_at: dict[int, float] = {}
    rtts_s: dict[int, float] = {}
    error = ""
    started_at = clock()
    ends_at = started_at + NUM_PROBES * INTERVAL_S + PATIENCE_S
    while (now := clock()) < ends_at and len(rtts_s) < NUM_PROBES:
        sequence = len(sent_at) + 1
        next_at = started_at + len(sent_at) * INTERVAL_S
        if sequence <= NUM_PROBES and now >= next_at:
            sent_at[sequence] = now
            answer = probe.send(PACKET_NBYTES, sequence)
        else:
            waits_until = next_at if sequence <= NUM_PROBES else ends_at
            answer = probe.receive(waits_until - now)
        if answer is not None and answer.sequence in sent_at:
            # The first answer counts: a duplicate is no second probe.
            rtts_s.setdefault(answer.sequence, clock() - sent_at[answer.sequence])
        elif answer is not None and answer.error:
            error = answer.error
    quality = summarize(peer, probe.method, len(sent_at), list(rtts_s.values()))
    return quality if rtts_s or not error else PathQuality(peer, probe.method, error=error)


def _connections(peer: str, clock: Callable[[], float]) -> PathQuality:
    """Connections to a port where nobody listens: a refusal is an answer."""
    family, _, _, _, address = socket.getaddrinfo(peer, CLOSED_UDP_PORT, type=socket.SOCK_STREAM)[0]
    rtts_s: list[float] = []
    num_sent, error = 0, ""
    started_at = clock()
    ends_at = started_at + NUM_PROBES * INTERVAL_S + PATIENCE_S
    with selectors.DefaultSelector() as waiting:
        try:
            while (now := clock()) < ends_at and len(rtts_s) < NUM_PROBES:
                next_at = started_at + num_sent * INTERVAL_S
                if num_sent < NUM_PROBES and now >= next_at:
                    num_sent += 1
                    trying = socket.socket(family, socket.SOCK_STREAM)
                    trying.setblocking(False)
                    # How it ends is asked below, also if it ends at once.
                    trying.connect_ex(address)
                    waiting.register(trying, selectors.EVENT_WRITE, now)
                waits_until = next_at if num_sent < NUM_PROBES else ends_at
                for key, _ in waiting.select(max(0.0, waits_until - clock())):
                    ended = key.fileobj
                    assert isinstance(ended, socket.socket)
                    code = ended.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if code in (0, errno.ECONNREFUSED):
                        rtts_s.append(clock() - key.data)
                    else:
                        error = os.strerror(code)
                    waiting.unregister(ended)
                    ended.close()
        finally:
            for key in list(waiting.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
    quality = summarize(peer, "TCP connect", num_sent, rtts_s)
    return quality if rtts_s or not error else PathQuality(peer, "TCP connect", error=error)


def probe_all(peers: Sequence[str]) -> list[PathQuality]:
    """All peers at once, at most ``MAX_PEERS``."""
    if not peers:
        return []
    with ThreadPoolExecutor(max_workers=min(len(peers), MAX_PEERS)) as pool:
        return list(pool.map(probe_path_quality, peers))


def parse_path_qualities(text: str) -> list[PathQuality]:
    """What the program wrote; entries of another version are skipped."""
    return [PathQuality(**entry) for entry in matching_entries(text, PathQuality(""))]


def main(arguments: Sequence[str]) -> int:
    """The program."""
    print(json.dumps([asdict(path) for path in probe_all(arguments[:MAX_PEERS])]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
