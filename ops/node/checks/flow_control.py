"""Flow control for RoCE: its priority, PFC, receive buffers, ECN marks, and what the counters say.

Two mechanisms, and both are wanted. PFC stops the link partner before a buffer overflows; DCQCN
slows the senders down long before that. DCQCN lives on ECN marks: the switch marks, the receiver
answers with a congestion notification, the sender slows down. "Disable ECN, use DCQCN", as is
sometimes advised, leaves nothing but pauses. Source: Zhu et al., "Congestion Control for
Large-Scale RDMA Deployments", SIGCOMM 2015; IEEE 802.1Qbb.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ops.node.facts import Facts
from ops.node.finding import Finding, Verdict
from ops.node.formats.dcb import Buffers, parse_buffers, parse_dscp_map, parse_pfc
from ops.node.formats.ethtool import parse_counters, parse_pause
from ops.node.formats.mlnx_qos import MlnxQos, parse_mlnx_qos
from ops.node.rdma_ports import RdmaPort, read_rdma_ports

CHECK: Final = "flow_control"

# What the fabric's switches are set up for in most guides: DSCP 26 and with it priority 3. The last
# two bits of the type of service say "can take ECN marks".
WANTED_PRIORITY: Final = 3
WANTED_TOS: Final = 26 << 2 | 0b10

SAMPLE_INTERVAL_S: Final = 0.5
# As options of sleep(1), so that a dump is read back without waiting.
_SLEEP: Final = ("sleep", str(SAMPLE_INTERVAL_S))

_QOS_SOURCE: Final = "NVIDIA MLNX_OFED manual, Quality of Service; dcb-app(8)"
_PFC_SOURCE: Final = "IEEE 802.1Qbb; dcb-pfc(8)"
_ECN_SOURCE: Final = "DCQCN, SIGCOMM 2015; NVIDIA manual, RoCE congestion control"
_COUNTER_SOURCE: Final = "Linux Documentation/networking/device_drivers/ethernet/mellanox/mlx5"

# Counters that mean a packet was lost in a class that must lose none, or had to be sent again.
_LOSS_PATTERNS: Final = (
    re.compile(r"rx_discards_phy|rx_prio\d_(?:buf_|cong_)?discards?"),
    re.compile(r"rx_out_of_buffer|out_of_buffer"),
)
_RETRANSMIT_NAMES: Final = frozenset(
    {
        *("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "implied_nak_seq_err"),
        *("rnr_nak_retry_err", "roce_slow_restart", "req_transport_retries_exceeded"),
        # rxe
        *("rcvd_seq_err", "retry_exceeded_err", "retry_rnr_exceeded_err", "completer_retry_err"),
    }
)


@dataclass(frozen=True, slots=True)
class Qos:
    """What is known of one port's quality of service; None is unknown.

    Attributes:
        trust: "dscp" or "pcp".
        dscp_map: DSCP → priority.
        pfc_priorities: priorities with PFC.
        buffer_of_priority: index of the receive buffer of each priority.
        buffer_nbytes: size of each receive buffer.
        has_global_pause: 802.3x pause frames are sent or obeyed.
        tos: type of service of the packets of connections made by rdma_cm.
        ecn_priorities: priorities whose packets are answered (np) and slowed (rp) by ECN marks.
    """

    trust: str | None
    dscp_map: Mapping[int, int]
    pfc_priorities: frozenset[int] | None
    buffer_of_priority: Mapping[int, int]
    buffer_nbytes: Mapping[int, int]
    has_global_pause: bool | None
    tos: int | None
    ecn_priorities: Mapping[str, frozenset[int]]

    @property
    def priority(self) -> int | None:
        """The one that carries RoCE as far as it is known, else the only one with PFC."""
        if self.tos is not None and self.trust == "dscp":
            # Without an entry hardware takes the upper three bits.
            return self.dscp_map.get(self.tos >> 2, self.tos >> 5)
        if self.trust == "pcp":
            return 0  # packets without a VLAN tag have no priority of their own
        if self.pfc_priorities is not None and len(self.pfc_priorities) == 1:
            return next(iter(self.pfc_priorities))
        return None


@dataclass(frozen=True, slots=True)
class CounterSample:
    """Counters of one port at one time: the interface's and the RDMA device's."""

    netdev: Mapping[str, int]
    device: Mapping[str, int]


def check(facts: Facts) -> list[Finding]:
    """One line if no port carries RoCE."""
    ports = [port for port in read_rdma_ports(facts) if port.carries_roce]
    if not ports:
        return [
            Finding(
                *(CHECK, "RoCE", Verdict.UNKNOWN, "no port carries it", "a RoCE port"),
                "Without RoCE there is nothing to keep lossless; TCP controls its own rate.",
                _PFC_SOURCE,
            )
        ]
    first = [sample_counters(facts, port, 1) for port in ports]
    if any(sample.netdev or sample.device for sample in first):
        facts.run(*_SLEEP)
        second = [sample_counters(facts, port, 2) for port in ports]
    else:
        second = first
    findings = []
    for port, before, after in zip(ports, first, second, strict=True):
        if port.is_software:
            findings.append(_software(port))
            priority = None
        else:
            qos = read_qos(facts, port)
            findings += judge_qos(port, qos)
            priority = qos.priority
        findings += judge_counters(port, priority, before, after)
    return findings


def _software(port: RdmaPort) -> Finding:
    return Finding(
        *(CHECK, port.name, Verdict.OK, "software", "hardware for a lossless network"),
        "Soft-RoCE knows neither PFC nor DCQCN: good for tries, not for load.",
        "rxe(7)",
    )


def read_qos(facts: Facts, port: RdmaPort) -> Qos:
    """Ask ``mlnx_qos``, ``dcb`` and sysfs; each fills what the others left open."""
    netdev = port.netdev
    mlnx = _mlnx_qos(facts, netdev)
    dscp_map = parse_dscp_map(facts.run("dcb", "app", "show", "dev", netdev).stdout)
    pfc = parse_pfc(facts.run("dcb", "pfc", "show", "dev", netdev).stdout)
    buffers = parse_buffers(facts.run("dcb", "buffer", "show", "dev", netdev).stdout)
    if mlnx is not None and not buffers.nbytes:
        buffers = Buffers(
            buffers.buffer_of_priority or mlnx.buffer_of_priority,
            dict(enumerate(mlnx.buffer_nbytes)),
        )
    pause = parse_pause(facts.run("ethtool", "-a", netdev).stdout)
    known_pause = [value for value in (pause.receives, pause.sends) if value is not None]
    trust = mlnx.trust if mlnx is not None else ""
    return Qos(
        # mlx5 trusts DSCP as soon as the table has an entry, and the port otherwise.
        trust=trust or ("dscp" if dscp_map else None),
        dscp_map=dscp_map or (mlnx.dscp_map if mlnx is not None else {}),
        pfc_priorities=pfc if pfc is not None else mlnx.pfc_priorities if mlnx else None,
        buffer_of_priority=buffers.buffer_of_priority,
        buffer_nbytes=buffers.nbytes,
        has_global_pause=any(known_pause) if known_pause else None,
        tos=_tos(facts, port),
        ecn_priorities={
            side: frozenset(
                priority
                for priority in range(8)
                if (facts.text(f"{folder}/{priority}") or "").strip() == "1"
            )
            for side in ("roce_np", "roce_rp")
            if facts.names(folder := f"/sys/class/net/{netdev}/ecn/{side}/enable")
        },
    )


def _mlnx_qos(facts: Facts, netdev: str) -> MlnxQos | None:
    output = facts.run("mlnx_qos", "-i", netdev)
    return parse_mlnx_qos(output.stdout) if output.is_ok else None


def _tos(facts: Facts, port: RdmaPort) -> int | None:
    """Of rdma_cm's configuration, of MLNX_OFED's override, or of the tool that reads the first."""
    override = facts.text(f"/sys/class/infiniband/{port.device}/tc/{port.port}/traffic_class")
    if match := re.search(r"Global tclass=(\d+)", override or ""):
        return int(match[1])
    text = facts.text(
        f"/sys/kernel/config/rdma_cm/{port.device}/ports/{port.port}/default_roce_tos"
    )
    if text is None:
        output = facts.run("cma_roce_tos", "-d", port.device, "-p", str(port.port))
        text = output.stdout if output.is_ok else ""
    match = re.fullmatch(r"\s*(\d+)\s*", text)
    return int(match[1]) if match else None


def judge_qos(port: RdmaPort, qos: Qos) -> list[Finding]:
    """Priority, PFC, global pause, buffers and ECN of one port."""
    return [
        _priority(port, qos),
        _pfc(port, qos),
        *_global_pause(port, qos),
        *_headroom(port, qos),
        *_ecn(port, qos),
    ]


def _priority(port: RdmaPort, qos: Qos) -> Finding:
    subject = f"{port.netdev} RoCE priority"
    wanted = f"DSCP trusted, type of service {WANTED_TOS} (DSCP 26) on priority {WANTED_PRIORITY}"
    cure = (
        f"mlnx_qos -i {port.netdev} --trust dscp; cma_roce_tos -d {port.device} -t {WANTED_TOS}; "
        f"or: dcb app add dev {port.netdev} dscp-prio 26:{WANTED_PRIORITY}"
    )
    if qos.trust is None:
        return Finding(
            *(CHECK, subject, Verdict.UNKNOWN, "", wanted),
            "Neither mlnx_qos nor dcb (iproute2 5.11 or later) says how packets are sorted.",
            *(_QOS_SOURCE, "install iproute2 5.11 or later, or NVIDIA's mlnx-tools"),
        )
    if qos.trust != "dscp":
        return Finding(
            *(CHECK, subject, Verdict.FAIL, f"trusts {qos.trust}", wanted),
            "Without VLAN tags all packets are of priority 0, and a router drops the tag: RoCE "
            "travels unprotected.",
            *(_QOS_SOURCE, cure),
        )
    if qos.tos is None:
        return Finding(
            *(CHECK, subject, Verdict.UNKNOWN, "trusts dscp, type of service unknown", wanted),
            "rdma_cm's configuration cannot be read (is configfs mounted?); programs that set the "
            "traffic class themselves do not need it.",
            *(_QOS_SOURCE, cure),
        )
    dscp = qos.tos >> 2
    measured = f"trusts dscp, type of service {qos.tos} (DSCP {dscp}) on priority {qos.priority}"
    if qos.priority == 0:
        return Finding(
            *(CHECK, subject, Verdict.FAIL, measured, wanted),
            "RoCE shares the priority of everything else, which is not lossless.",
            *(_QOS_SOURCE, cure),
        )
    if not qos.tos & 0b11:
        return Finding(
            *(CHECK, subject, Verdict.WARN, measured, wanted),
            "The last two bits are 0: the packets say that they cannot take ECN marks, so a switch "
            "drops where it would mark.",
            *("RFC 3168, section 5", cure),
        )
    return Finding(
        *(CHECK, subject, Verdict.OK, measured, wanted),
        *("Switches and both ends must sort RoCE the same way.", _QOS_SOURCE),
    )


def _pfc(port: RdmaPort, qos: Qos) -> Finding:
    subject = f"{port.netdev} PFC"
    priority = qos.priority
    should_be = WANTED_PRIORITY if priority in (None, 0) else priority
    wanted = f"on for priority {should_be} and no other"
    bits = ",".join("1" if number == should_be else "0" for number in range(8))
    cure = (
        f"mlnx_qos -i {port.netdev} --pfc {bits}, or: "
        f"dcb pfc set dev {port.netdev} prio-pfc all:off {should_be}:on; the same on the switch"
    )
    if qos.pfc_priorities is None:
        return Finding(
            *(CHECK, subject, Verdict.UNKNOWN, "", wanted),
            "Neither dcb nor mlnx_qos is installed, or the driver shows nothing.",
            *(_PFC_SOURCE, "install iproute2 5.11 or later, or NVIDIA's mlnx-tools"),
        )
    on = sorted(qos.pfc_priorities)
    measured = f"on for {', '.join(map(str, on))}" if on else "off"
    if not on:
        verdict, reason = Verdict.FAIL, "A full buffer drops packets, and RoCE repeats everything."
    elif should_be not in on:
        verdict = Verdict.FAIL
        reason = f"RoCE is on priority {priority}, which has none: its packets are dropped."
    elif len(on) > 1:
        verdict = Verdict.WARN
        reason = (
            "Pauses of traffic that does not need it block links and, in a loop, dead-lock them."
        )
    else:
        verdict, reason = Verdict.OK, "Only RoCE is stopped, and nothing of it is dropped."
    return Finding(
        CHECK,
        subject,
        verdict,
        measured,
        wanted,
        reason,
        _PFC_SOURCE,
        "" if verdict is Verdict.OK else cure,
    )


def _global_pause(port: RdmaPort, qos: Qos) -> list[Finding]:
    if qos.has_global_pause is None:
        return []
    is_right = not qos.has_global_pause
    return [
        Finding(
            CHECK,
            f"{port.netdev} global pause",
            Verdict.OK if is_right else Verdict.WARN,
            "off" if is_right else "on",
            "off, beside PFC",
            "A global pause stops every priority, also the control messages.",
            "IEEE 802.3x; ethtool(8), -a",
            "" if is_right else f"ethtool -A {port.netdev} rx off tx off, then PFC",
        )
    ]


def _headroom(port: RdmaPort, qos: Qos) -> list[Finding]:
    """The lossless priority has a receive buffer of its own, with room for what is on the way."""
    priority = qos.priority
    if not qos.buffer_of_priority or priority is None:
        return []
    buffer = qos.buffer_of_priority.get(priority, 0)
    sharing = sorted(
        other
        for other, index in qos.buffer_of_priority.items()
        if index == buffer and other != priority
    )
    nbytes = qos.buffer_nbytes.get(buffer)
    size = f" of {nbytes} bytes" if nbytes is not None else ""
    if sharing:
        verdict = Verdict.WARN
        reason = f"Priorities {', '.join(map(str, sharing))} fill the same buffer without a pause."
    elif nbytes == 0:
        verdict, reason = Verdict.FAIL, "A buffer without room drops what arrives after the pause."
    else:
        verdict, reason = Verdict.OK, "What is on the way when a pause is sent finds room."
    bits = ",".join("1" if number == priority else "0" for number in range(8))
    return [
        Finding(
            CHECK,
            f"{port.netdev} receive buffer",
            verdict,
            f"priority {priority} in buffer {buffer}{size}",
            f"a buffer for priority {priority} alone",
            reason,
            "dcb-buffer(8); NVIDIA manual, Receive Buffer",
            "" if verdict is Verdict.OK else f"mlnx_qos -i {port.netdev} --prio2buffer {bits}",
        )
    ]


def _ecn(port: RdmaPort, qos: Qos) -> list[Finding]:
    subject = f"{port.netdev} ECN"
    priority = WANTED_PRIORITY if qos.priority in (None, 0) else qos.priority
    wanted = f"on for priority {priority}, receiving (np) and sending (rp)"
    folder = f"/sys/class/net/{port.netdev}/ecn"
    if not qos.ecn_priorities:
        return [
            Finding(
                *(CHECK, subject, Verdict.UNKNOWN, "", wanted),
                f"{folder} is not there: only NVIDIA's own driver shows it; the one of the kernel "
                "has it on unless the NIC's configuration says otherwise.",
                _ECN_SOURCE,
                f"mlxconfig -d {port.device} query | grep ROCE_CC",
            )
        ]
    off = sorted(side for side, on in qos.ecn_priorities.items() if priority not in on)
    commands = "; ".join(f"echo 1 > {folder}/{side}/enable/{priority}" for side in off)
    return [
        Finding(
            CHECK,
            subject,
            Verdict.FAIL if off else Verdict.OK,
            f"off for priority {priority}: {', '.join(off)}" if off else "on",
            wanted,
            "DCQCN slows senders down by ECN marks; with ECN off only pauses are left, and those "
            "spread through the fabric.",
            _ECN_SOURCE,
            commands + ("; and ECN marking of the switch's queue" if off else ""),
        )
    ]


def sample_counters(facts: Facts, port: RdmaPort, number: int) -> CounterSample:
    """The port's counters now.

    The second sample asks with other words for the same, because a dump keeps one answer for each
    question.
    """
    statistics = {1: "-S", 2: "--statistics"}[number]
    netdev = parse_counters(facts.run("ethtool", statistics, port.netdev).stdout)
    options = {1: "-r", 2: "-rs"}[number]
    listed = facts.run("grep", options, "", f"{port.folder}/hw_counters").stdout
    device = {}
    for line in listed.splitlines():
        path, _, value = line.partition(":")
        if value.strip().isdecimal():
            device[path.rpartition("/")[2]] = int(value)
    device.pop("lifespan", None)  # a setting, not a counter
    return CounterSample(netdev, device)


def judge_counters(
    port: RdmaPort, priority: int | None, before: CounterSample, after: CounterSample
) -> list[Finding]:
    """Two samples of one port, ``SAMPLE_INTERVAL_S`` apart: what grew, and what has ever counted.

    Growing is of now; a count that stands still is history, perhaps of a cable that was changed
    long ago, and is only warned of.
    """
    if not before.netdev and not before.device:
        return [
            Finding(
                *(CHECK, f"{port.name} counters", Verdict.UNKNOWN, "", "counted"),
                "Neither ethtool -S nor hw_counters shows any.",
                *(_COUNTER_SOURCE, "install ethtool"),
            )
        ]
    findings = [
        _loss(port, before, after),
        _retransmits(port, before, after),
    ]
    if any("pause" in name for name in after.netdev):
        findings += [_pauses(port, priority, before, after), *_storm(port, before, after)]
    findings += _marks(port, before, after)
    return findings


def _growth(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """What grew; a counter that was reset in between counts from 0."""
    grown = {
        name: value - before.get(name, value) if value >= before.get(name, value) else value
        for name, value in after.items()
    }
    return {name: value for name, value in grown.items() if value}


def _listed(counters: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(counters.items()))


def _loss(port: RdmaPort, before: CounterSample, after: CounterSample) -> Finding:
    def lost(counters: Mapping[str, int]) -> dict[str, int]:
        return {
            name: value
            for name, value in counters.items()
            if value and any(pattern.fullmatch(name) for pattern in _LOSS_PATTERNS)
        }

    all_before = {**before.netdev, **before.device}
    all_after = {**after.netdev, **after.device}
    growing, ever = lost(_growth(all_before, all_after)), lost(all_after)
    verdict = Verdict.FAIL if growing else Verdict.WARN if ever else Verdict.OK
    return Finding(
        CHECK,
        f"{port.netdev} discards",
        verdict,
        f"growing: {_listed(growing)}" if growing else _listed(ever) or "none",
        "none",
        "Packets are dropped in this NIC now."
        if growing
        else "Packets were dropped since the counters began; nothing was while this looked."
        if ever
        else "Nothing was dropped in this NIC.",
        _COUNTER_SOURCE,
        "PFC on both ends of the link, a buffer with headroom, ECN; then look again"
        if ever
        else "",
    )


def _retransmits(port: RdmaPort, before: CounterSample, after: CounterSample) -> Finding:
    def again(counters: Mapping[str, int]) -> dict[str, int]:
        return {n: value for n, value in counters.items() if n in _RETRANSMIT_NAMES and value}

    growing, ever = again(_growth(before.device, after.device)), again(after.device)
    verdict = Verdict.FAIL if growing else Verdict.WARN if ever else Verdict.OK
    return Finding(
        CHECK,
        f"{port.name} retransmissions",
        verdict,
        f"growing: {_listed(growing)}" if growing else _listed(ever) or "none",
        "none",
        "RDMA packets are lost on the way or come out of order, and are sent again."
        if ever
        else "Each RDMA packet arrived in its order."
        if after.device
        else "The device counts none.",
        "Linux Documentation/ABI/stable/sysfs-class-infiniband; NVIDIA manual, hw_counters",
        "pdctl node check with --peer finds the path that loses; rnr_nak: the peer posts too few "
        "receives"
        if ever
        else "",
    )


def _pauses(
    port: RdmaPort, priority: int | None, before: CounterSample, after: CounterSample
) -> Finding:
    growth = _growth(before.netdev, after.netdev)
    frames = {
        name: value
        for name, value in growth.items()
        if re.fullmatch(r"[rt]x_(?:prio\d|global)_pause", name)
    }
    # Microseconds in which nothing could be sent, of the time between the samples.
    paused_us = max(
        (
            v
            for name, v in growth.items()
            if re.fullmatch(r"rx_(?:prio\d|global)_pause_duration", name)
        ),
        default=0,
    )
    share = paused_us / (SAMPLE_INTERVAL_S * 1_000_000)
    other = sorted(
        name
        for name, value in after.netdev.items()
        if value
        and (match := re.fullmatch(r"[rt]x_prio(\d)_pause", name))
        and priority is not None
        and int(match[1]) != priority
    )
    if share > 0.1:
        verdict = Verdict.FAIL
        reason = "The link partner stops this port for much of the time: congestion behind it."
    elif other:
        verdict = Verdict.WARN
        reason = "Pauses of another priority than RoCE's: the two ends sort packets differently."
    elif frames:
        verdict = Verdict.WARN
        reason = (
            "Pauses flow while this looked: PFC works, and ECN should have slowed senders first."
        )
    else:
        verdict, reason = Verdict.OK, "No pause while this looked."
    measured = _listed(frames) or "none in the interval"
    return Finding(
        CHECK,
        f"{port.netdev} pauses",
        verdict,
        f"{measured}; paused {share:.0%} of the time"
        + (f"; ever: {', '.join(other)}" if other else ""),
        "few, and for RoCE's priority only",
        reason,
        _COUNTER_SOURCE,
        ""
        if verdict is Verdict.OK
        else "the same PFC priority on NIC and switch; ECN marking below the PFC threshold",
    )


def _storm(port: RdmaPort, before: CounterSample, after: CounterSample) -> list[Finding]:
    """A NIC that pauses its partner for seconds stops the whole fabric; it counts that itself."""
    names = ("tx_pause_storm_warning_events", "tx_pause_storm_error_events")
    ever = {name: after.netdev[name] for name in names if after.netdev.get(name)}
    if not any(name in after.netdev for name in names):
        return []
    growing = {n: v for n, v in _growth(before.netdev, after.netdev).items() if n in names}
    verdict = Verdict.FAIL if growing else Verdict.WARN if ever else Verdict.OK
    return [
        Finding(
            CHECK,
            f"{port.netdev} pause storm",
            verdict,
            _listed(growing or ever) or "none",
            "none",
            "This host took no packets for so long that it paused the network: a dead-lock, a hung "
            "PCIe slot or a receiver that stands still."
            if ever
            else "The host has always taken its packets in time.",
            _COUNTER_SOURCE,
            "dmesg | grep mlx5; look at rx_out_of_buffer and outbound_pci_stalled_wr; a PFC "
            "watchdog on the switch"
            if ever
            else "",
        )
    ]


def _marks(port: RdmaPort, before: CounterSample, after: CounterSample) -> list[Finding]:
    """Whether ECN marks are seen and answered, as far as the NIC counts them."""
    names = ("np_ecn_marked_roce_packets", "np_cnp_sent", "rp_cnp_handled", "rp_cnp_ignored")
    if not any(name in after.device for name in names):
        return []
    growth = _growth(before.device, after.device)
    ignored = growth.get("rp_cnp_ignored", 0)
    marked = growth.get("np_ecn_marked_roce_packets", 0)
    is_silent = marked > 0 and not growth.get("np_cnp_sent", 0)
    if ignored:
        verdict, reason = (
            Verdict.FAIL,
            "Congestion notifications arrive and are ignored (rp is off).",
        )
    elif is_silent:
        verdict, reason = Verdict.FAIL, "Marked packets arrive and no sender is told (np is off)."
    else:
        verdict, reason = Verdict.OK, "Marks, where there are any, are answered."
    return [
        Finding(
            CHECK,
            f"{port.name} congestion notifications",
            verdict,
            _listed({name: growth.get(name, 0) for name in names if name in after.device}),
            "handled, none ignored",
            reason,
            _ECN_SOURCE,
            ""
            if verdict is Verdict.OK
            else f"echo 1 > /sys/class/net/{port.netdev}/ecn/roce_np/enable/PRIORITY and roce_rp",
        )
    ]
