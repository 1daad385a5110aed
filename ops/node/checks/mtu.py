"""MTU: of the interfaces, of RDMA packets, of the path to each peer, and all of them in agreement.

An RDMA packet cannot be fragmented. If a switch or the far end takes less than the near end sends,
small messages pass and large ones vanish: connections are made, and the first KV block hangs.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from ops.node.facts import TIMED_OUT_EXIT_CODE, Facts
from ops.node.finding import Finding, Verdict
from ops.node.formats.ibv_devinfo import parse_devinfo
from ops.node.formats.ip import parse_route_netdev
from ops.node.formats.ping import PingAnswer, parse_ping
from ops.node.interpreter import interpreter
from ops.node.path_mtu import PROGRAM, PathMtu, parse_path_mtus
from ops.node.rdma_ports import RdmaPort, read_rdma_ports

CHECK: Final = "mtu"

# Payloads that RDMA packets can have, and what the kernel keeps free for headers: GRH or IPv6 40,
# UDP 8, BTH 12, XRC 4, AtomicETH 28, ICRC 4.
RDMA_MTUS: Final = (256, 512, 1024, 2048, 4096)
ROCE_HEADERS_NBYTES: Final = 40 + 8 + 12 + 4 + 28 + 4
# The smallest round number that carries 4096, and the usual jumbo frame.
WANTED_MTUS: Final = "4200 or 9000"

# IPv6 does not work below it (RFC 8200, section 5).
MIN_MTU: Final = 1280
# What Ethernet hardware takes; the loopback has 65536.
MAX_ETHERNET_MTU: Final = 10_000
_PING_HEADERS_NBYTES: Final = {4: 28, 6: 48}
_NET_FOLDER: Final = "/sys/class/net"

_ROCE_SOURCE: Final = "Linux include/rdma/ib_addr.h, iboe_get_mtu"
_PATH_SOURCE: Final = "RFC 1191, RFC 8899; ping(8)"


def best_rdma_mtu(netdev_mtu: int) -> int:
    """The largest RDMA payload whose packet fits; 0 if none does."""
    return max(
        (mtu for mtu in RDMA_MTUS if mtu + ROCE_HEADERS_NBYTES <= netdev_mtu),
        default=0,
    )


def check(facts: Facts, peers: Sequence[str] = ()) -> list[Finding]:
    """Interfaces and RDMA ports; with ``peers`` also the path to each."""
    ports = [port for port in read_rdma_ports(facts) if port.carries_roce]
    findings = [*_interfaces(facts, ports), *_rdma(facts, ports)]
    if peers:
        findings += judge_paths(measure_paths(facts, peers))
    return findings


def compare(nodes: Mapping[str, Facts]) -> list[Finding]:
    """Several machines, as their dumps tell: the RoCE interfaces of all have one MTU.

    ``nodes`` has the facts of each by its name; what a machine without RoCE has does not count.
    """
    mtus = {
        f"{name} {port.netdev}": mtu
        for name, facts in sorted(nodes.items())
        for port in read_rdma_ports(facts)
        if port.carries_roce and (mtu := _netdev_mtu(facts, port.netdev))
    }
    if len(mtus) < 2:
        return []
    is_equal = len(set(mtus.values())) == 1
    return [
        Finding(
            CHECK,
            f"RoCE interfaces of {len(nodes)} nodes",
            Verdict.OK if is_equal else Verdict.FAIL,
            str(next(iter(mtus.values())))
            if is_equal
            else ", ".join(f"{where} {mtu}" for where, mtu in mtus.items()),
            "the same everywhere",
            "What the larger end sends, the smaller end drops.",
            _ROCE_SOURCE,
            "" if is_equal else f"ip link set dev NETDEV mtu {max(mtus.values())} where it is less",
        )
    ]


def _netdev_mtu(facts: Facts, netdev: str) -> int | None:
    text = (facts.text(f"{_NET_FOLDER}/{netdev}/mtu") or "").strip()
    return int(text) if netdev and text.isdecimal() else None


def _interfaces(facts: Facts, ports: Sequence[RdmaPort]) -> list[Finding]:
    with_roce = {port.netdev for port in ports}
    findings = []
    for netdev in facts.names(_NET_FOLDER):
        # A driver below it: no loopback, no bridge; and what RDMA sits on in any case.
        is_hardware = bool(facts.names(f"{_NET_FOLDER}/{netdev}/device"))
        is_up = (facts.text(f"{_NET_FOLDER}/{netdev}/operstate") or "").strip() == "up"
        mtu = _netdev_mtu(facts, netdev)
        if mtu is None or not (netdev in with_roce or (is_hardware and is_up)):
            continue
        if netdev in with_roce:
            is_right = best_rdma_mtu(mtu) == RDMA_MTUS[-1]
            findings.append(
                Finding(
                    CHECK,
                    netdev,
                    Verdict.OK if is_right else Verdict.WARN,
                    str(mtu),
                    f"{WANTED_MTUS} (RoCE)",
                    "RDMA packets of 4096 bytes need "
                    f"{RDMA_MTUS[-1] + ROCE_HEADERS_NBYTES} with their headers; smaller ones cost "
                    "more work for each byte.",
                    _ROCE_SOURCE,
                    ""
                    if is_right
                    else f"ip link set dev {netdev} mtu 9000, and on every switch port and peer",
                )
            )
        else:
            findings.append(
                Finding(
                    CHECK,
                    netdev,
                    Verdict.OK if mtu >= MIN_MTU else Verdict.WARN,
                    str(mtu),
                    f"at least {MIN_MTU}",
                    "TCP fits itself to it; 9000 would save work where the whole path has it.",
                    "RFC 8200, section 5",
                    "" if mtu >= MIN_MTU else f"ip link set dev {netdev} mtu 1500",
                )
            )
    if not findings:
        findings.append(
            Finding(
                *(CHECK, "interfaces", Verdict.UNKNOWN, "", "an Ethernet interface that is up"),
                *(f"{_NET_FOLDER} shows none.", "Linux Documentation/ABI/testing/sysfs-class-net"),
            )
        )
    return findings


def _rdma(facts: Facts, ports: Sequence[RdmaPort]) -> list[Finding]:
    if not ports:
        return []
    output = facts.run("ibv_devinfo", "-v")
    known = {(entry.device, entry.port): entry for entry in parse_devinfo(output.stdout)}
    findings = []
    for port in ports:
        subject = f"{port.name} active MTU"
        netdev_mtu = _netdev_mtu(facts, port.netdev)
        entry = known.get((port.device, port.port))
        best = best_rdma_mtu(netdev_mtu or 0)
        if entry is None or not entry.active_mtu or netdev_mtu is None:
            findings.append(
                Finding(
                    CHECK,
                    subject,
                    Verdict.UNKNOWN,
                    "",
                    f"{best} on {port.netdev} with MTU {netdev_mtu}" if best else "4096",
                    "ibv_devinfo is not installed, and the kernel does not show the active MTU."
                    if output.is_missing
                    else "Neither ibv_devinfo nor sysfs says enough.",
                    "ibv_devinfo(1)",
                    "apt install ibverbs-utils or dnf install libibverbs-utils",
                )
            )
            continue
        best = min(best, entry.max_mtu or best)
        if entry.active_mtu > best:
            verdict = Verdict.FAIL
            reason = (
                "Its packets are larger than the interface takes: small messages pass, large ones "
                "are dropped."
            )
        elif entry.active_mtu < best:
            verdict = Verdict.WARN
            reason = "The interface takes larger packets; the port took its MTU when it came up."
        elif best < RDMA_MTUS[-1]:
            verdict = Verdict.WARN
            reason = f"It is the most that fits into the interface's MTU of {netdev_mtu}."
        else:
            verdict, reason = Verdict.OK, "The largest there is, and it fits."
        findings.append(
            Finding(
                CHECK,
                subject,
                verdict,
                f"{entry.active_mtu} on {port.netdev} with MTU {netdev_mtu}",
                f"4096 on an Ethernet MTU of {WANTED_MTUS}",
                reason,
                _ROCE_SOURCE,
                ""
                if verdict is Verdict.OK
                else f"ip link set dev {port.netdev} mtu 9000, down and up again",
            )
        )
    return findings


def measure_paths(facts: Facts, peers: Sequence[str]) -> list[PathMtu]:
    """The path to each peer: with ``ping`` where it gives the answer, otherwise with our program.

    ``ping`` decides a path that is right and one where somebody tells the limit. Silence does not
    say whether the peer or only its large packets are lost, so our own program looks further.
    """
    told: dict[str, PathMtu] = {}
    for peer in peers:
        if (path := _ping_path(facts, peer)) is not None:
            told[peer] = path
    unknown = [peer for peer in dict.fromkeys(peers) if peer not in told]
    nothing = "neither ping nor the own probe could be run here, or the dump has no probe of it"
    if unknown:
        output = facts.run(interpreter(facts), "-m", PROGRAM, *unknown)
        told.update({path.peer: path for path in parse_path_mtus(output.stdout)})
        if output.exit_code == TIMED_OUT_EXIT_CODE:
            nothing = "the own probe took too long on this machine"
    return [told.get(peer) or PathMtu(peer, error=nothing) for peer in dict.fromkeys(peers)]


def _ping_path(facts: Facts, peer: str) -> PathMtu | None:
    if peer.startswith("-"):
        return None
    version = 6 if ":" in peer else 4
    route = facts.run("ip", "route", "get", peer)
    mtu = _netdev_mtu(facts, parse_route_netdev(route.stdout)) if route.is_ok else None
    # A name that is not an address has no route.
    if mtu is None or mtu > MAX_ETHERNET_MTU:
        return None
    size = mtu
    for _ in range(3):
        answer = _ping(facts, peer, size - _PING_HEADERS_NBYTES[version])
        if answer.num_received:
            told_mtu = size if size < mtu else 0
            return PathMtu(peer, peer, "ping", mtu, size, told_mtu)
        if answer.told_mtu is None or answer.told_mtu >= size:
            return None
        size = answer.told_mtu
    return None


def _ping(facts: Facts, peer: str, payload_nbytes: int) -> PingAnswer:
    output = facts.run(
        *("ping", "-n", "-M", "do", "-c", "2", "-i", "0.2", "-W", "1"),
        *("-s", str(payload_nbytes), peer),
    )
    return parse_ping(output.stdout, output.stderr)


def judge_paths(paths: Sequence[PathMtu]) -> list[Finding]:
    """One finding a peer, and one on whether all paths carry the same."""
    findings = [_path(path) for path in paths]
    # A peer on this host is reached without Ethernet.
    measured = {
        path.peer: path.path_mtu
        for path in paths
        if path.path_mtu and path.local_mtu <= MAX_ETHERNET_MTU
    }
    if len(measured) > 1:
        is_equal = len(set(measured.values())) == 1
        findings.append(
            Finding(
                CHECK,
                f"paths to {len(measured)} peers",
                Verdict.OK if is_equal else Verdict.FAIL,
                str(next(iter(measured.values())))
                if is_equal
                else ", ".join(f"{peer} {mtu}" for peer, mtu in measured.items()),
                "the same to all",
                "A KV pair works or hangs depending on which peer it has.",
                _PATH_SOURCE,
                "" if is_equal else "set one MTU on all interfaces and switch ports of the fabric",
            )
        )
    return findings


def _path(path: PathMtu) -> Finding:
    subject = f"path to {path.peer}"
    if not path.path_mtu:
        # A name that is wrong or a host that is down is found by whoever named it as a peer.
        return Finding(
            *(CHECK, subject, Verdict.FAIL, path.error or "no answer", "an answer"),
            "The peer cannot be reached, or it and the path answer neither ICMP nor UDP.",
            _PATH_SOURCE,
            f"check the name, the route (ip route get {path.peer}) and the firewall",
        )
    how = f"{path.path_mtu} ({path.method})"
    if path.path_mtu >= path.local_mtu:
        return Finding(
            *(CHECK, subject, Verdict.OK, how, f"{path.local_mtu}, as the own interface has"),
            *("Packets of full size arrive unfragmented.", _PATH_SOURCE),
        )
    if path.is_black_hole:
        reason = (
            "Larger packets vanish without a message: a switch or the peer has a smaller MTU, or a "
            "filter drops ICMP; connections open and then hang."
        )
    else:
        reason = (
            "A router on the way has a smaller MTU and says so: TCP adapts, RDMA packets are lost."
        )
    return Finding(
        CHECK,
        subject,
        Verdict.FAIL,
        how,
        f"{path.local_mtu}, as the own interface has",
        reason,
        _PATH_SOURCE,
        f"raise the MTU along the way and on the peer to {path.local_mtu}, or set the own "
        f"interface to {path.path_mtu}",
    )
