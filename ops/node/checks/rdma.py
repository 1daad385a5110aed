"""RDMA: devices, ports, the GID to use, firmware, offloads, locked memory, PCIe, GPU neighbourhood.

A node without RDMA is a good node: TCP between hosts and mapped memory on one host carry the KV.
What fails here is a node whose RDMA hardware cannot be used although it is there: services would
fall back to TCP without a word and look like a slow model.
"""

import re
from collections.abc import Sequence
from typing import Final

from ops.node.change import Change, FileChange
from ops.node.facts import Facts
from ops.node.finding import Finding, Verdict
from ops.node.formats.ethtool import parse_features
from ops.node.formats.limits import Limit, parse_limits
from ops.node.formats.lspci import PciDevice, parse_devices
from ops.node.interpreter import interpreter
from ops.node.rdma_ports import CLASS_FOLDER, RdmaPort, choose_gid, read_addresses, read_rdma_ports

CHECK: Final = "rdma"

LIMITS_PATH: Final = "/etc/security/limits.d/90-pdserve-memlock.conf"
# "*" does not stand for root: limits.conf(5).
LIMITS_TEXT: Final = """\
# pdserve: RDMA locks the memory that peers write into.
# A service does not read this file; its unit sets LimitMEMLOCK.
* soft memlock unlimited
* hard memlock unlimited
root soft memlock unlimited
root hard memlock unlimited
"""

# First number of the firmware version: the family of the NIC. The minimum is the one that the
# project was specified with.
MIN_FIRMWARE: Final = {22: ("ConnectX-6 Dx", (22, 30, 1002))}

WANTED_FEATURES: Final = (
    "rx-checksumming",
    "tx-checksumming",
    "scatter-gather",
    "tcp-segmentation-offload",
    "generic-segmentation-offload",
    "generic-receive-offload",
)

_PCI_FOLDER: Final = "/sys/bus/pci/devices"
_MELLANOX: Final = "0x15b3"
_NVIDIA: Final = "0x10de"
_UNIT_FOLDERS: Final = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
_CAP_IPC_LOCK: Final = 14

_SYSFS: Final = "Linux Documentation/ABI/stable/sysfs-class-infiniband"


def check(facts: Facts) -> list[Finding]:
    """All findings; one line if there is no RDMA."""
    ports = read_rdma_ports(facts)
    if not ports:
        return [_no_device(facts)]
    return [
        *_states(ports),
        *_gids(facts, ports),
        *_verbs_devices(facts, ports),
        _pyverbs(facts),
        *_firmware(facts, ports),
        *_memlock(facts),
        *_features(facts, ports),
        *_pcie(facts, ports),
        *_pci_capabilities(facts, ports),
        *_neighbourhood(facts, ports),
    ]


def changes(facts: Facts) -> list[Change]:
    """The limit of locked memory for logins, where there is RDMA and the limit is not lifted."""
    if not read_rdma_ports(facts):
        return []
    limit = _locked_memory(facts)
    if limit is not None and limit.soft is None and limit.hard is None:
        return []
    if facts.text(LIMITS_PATH) == LIMITS_TEXT:
        return []
    return [
        FileChange(
            LIMITS_PATH,
            LIMITS_TEXT,
            "Registering the KV pool for RDMA locks it, and the usual limit of 64 KiB to 8 MiB is "
            "far below it.",
            needs="a new login",
        )
    ]


def _no_device(facts: Facts) -> Finding:
    driverless = [
        address
        for address in facts.names(_PCI_FOLDER)
        if (facts.text(f"{_PCI_FOLDER}/{address}/vendor") or "").strip() == _MELLANOX
    ]
    if driverless:
        return Finding(
            CHECK,
            "devices",
            Verdict.WARN,
            f"none, but the PCI device {driverless[0]} is of Mellanox/NVIDIA",
            "an RDMA device",
            "The NIC is there and its RDMA driver is not, so all KV goes over TCP.",
            _SYSFS,
            "modprobe mlx5_ib; in a container: give it the host's devices",
        )
    return Finding(
        CHECK,
        "devices",
        Verdict.UNKNOWN,
        "none",
        "an RDMA device, where KV shall cross hosts fast",
        f"{CLASS_FOLDER} is empty: KV goes over TCP between hosts and through mapped memory on "
        "one host, which is right for a node without such a NIC.",
        _SYSFS,
        "nothing, or for tries without hardware: modprobe rdma_rxe; "
        "rdma link add rxe0 type rxe netdev ETH",
    )


def _states(ports: Sequence[RdmaPort]) -> list[Finding]:
    findings = []
    any_active = any(port.is_active for port in ports)
    for port in ports:
        measured = f"{port.state} {port.physical_state}, {port.link_layer}, {port.rate}"
        if not port.is_active:
            findings.append(
                Finding(
                    CHECK,
                    port.name,
                    # The second port of a card is often without a cable on purpose.
                    Verdict.WARN if any_active else Verdict.FAIL,
                    measured,
                    "ACTIVE LinkUp",
                    "No RDMA packet leaves this port; services fall back to TCP.",
                    _SYSFS,
                    f"check the cable and the switch port; ip link set {port.netdev or 'ETH'} up",
                )
            )
        elif port.link_layer != "Ethernet":
            findings.append(
                Finding(
                    CHECK,
                    port.name,
                    Verdict.WARN,
                    measured,
                    "Ethernet",
                    "The checks of MTU, PFC and ECN are for RoCE and say nothing about InfiniBand.",
                    _SYSFS,
                    f"mlxconfig -d {port.device} set LINK_TYPE_P{port.port}=2, then reboot, if "
                    "RoCE is meant",
                )
            )
        else:
            findings.append(
                Finding(
                    CHECK,
                    port.name,
                    Verdict.OK,
                    f"{measured}, {port.netdev}" + (" (software)" if port.is_software else ""),
                    "ACTIVE LinkUp, Ethernet",
                    "The port carries RoCE.",
                    _SYSFS,
                )
            )
    return findings


def _gids(facts: Facts, ports: Sequence[RdmaPort]) -> list[Finding]:
    addresses = read_addresses(facts)
    source = "InfiniBand Architecture Specification, annex A17; rdma-core, ibv_query_gid_ex(3)"
    findings = []
    for port in ports:
        if not port.carries_roce:
            continue
        subject = f"{port.name} GID"
        gid = choose_gid(port, addresses)
        if gid is None:
            kinds = sorted({entry.kind or "?" for entry in port.gids})
            findings.append(
                Finding(
                    CHECK,
                    subject,
                    Verdict.FAIL,
                    ", ".join(kinds) or "no entry",
                    "a RoCE v2 entry with an IPv4 address",
                    "Without a RoCE v2 entry no queue pair can reach a peer through a router, and "
                    "peers with RoCE v2 do not answer v1.",
                    source,
                    f"ip address add ADDRESS/LENGTH dev {port.netdev or 'ETH'}; "
                    f"cma_roce_mode -d {port.device} -m 2",
                )
            )
            continue
        known = {str(entry.address.ip): entry.address.network for entry in addresses}
        subnet = known.get(str(gid.ipv4 or gid.address))
        measured = f"index {gid}" + (f" in {subnet}" if subnet else "")
        if gid.ipv4 is None and gid.address.is_link_local:
            findings.append(
                Finding(
                    CHECK,
                    subject,
                    Verdict.WARN,
                    measured,
                    "a RoCE v2 entry with an IPv4 address",
                    "A link-local address reaches peers of the same Ethernet only.",
                    source,
                    f"ip address add ADDRESS/LENGTH dev {port.netdev or 'ETH'}",
                )
            )
        else:
            findings.append(
                Finding(
                    CHECK,
                    subject,
                    Verdict.OK,
                    measured,
                    "a RoCE v2 entry with an address of the interface",
                    "This index is the one to use; it may differ on every host.",
                    source,
                )
            )
    return findings


def _verbs_devices(facts: Facts, ports: Sequence[RdmaPort]) -> list[Finding]:
    """/dev/infiniband/uverbsN of each device: there, and open to whoever runs the service."""
    nodes = set(facts.names("/dev/infiniband"))
    by_device = {
        (facts.text(f"/sys/class/infiniband_verbs/{name}/ibdev") or "").strip(): name
        for name in facts.names("/sys/class/infiniband_verbs")
        if name.startswith("uverbs")
    }
    source = "rdma-core, Documentation/udev.md"
    findings = []
    for device in sorted({port.device for port in ports}):
        name = by_device.get(device, "")
        path = f"/dev/infiniband/{name or 'uverbs*'}"
        if name not in nodes:
            findings.append(
                Finding(
                    CHECK,
                    path,
                    Verdict.FAIL,
                    "missing",
                    f"a device file for {device}",
                    "The kernel has the device and programs cannot open it, so services fall back "
                    "to TCP.",
                    source,
                    "modprobe ib_uverbs; a container needs --device=/dev/infiniband",
                )
            )
            continue
        mode = facts.run("stat", "-c", "%a", path).stdout.strip()
        if not re.fullmatch(r"[0-7]{3,4}", mode):
            verdict, reason = Verdict.UNKNOWN, "Its permissions cannot be read"
        elif int(mode[-1]) & 6 == 6:
            verdict, reason = Verdict.OK, "Every user may open it"
        else:
            verdict, reason = Verdict.WARN, "Only some users may open it; a service runs as its own"
        findings.append(
            Finding(
                CHECK,
                path,
                verdict,
                f"mode {mode}" if mode else "mode unknown",
                "mode 666",
                f"{reason} ({device}).",
                source,
                ""
                if verdict is Verdict.OK
                else "install rdma-core, whose udev rules set it, or give the service its group",
            )
        )
    return findings


def _pyverbs(facts: Facts) -> Finding:
    python = interpreter(facts)
    output = facts.run(python, "-c", "import pyverbs.device")
    source = "rdma-core, Documentation/pyverbs.md"
    if output.is_ok:
        return Finding(
            *(CHECK, "pyverbs", Verdict.OK, "importable", "importable"),
            *("The RDMA transport is made of it.", source),
        )
    last_line = (output.stderr.strip().splitlines() or [f"{python} does not start"])[-1]
    return Finding(
        CHECK,
        "pyverbs",
        Verdict.UNKNOWN if output.is_missing else Verdict.WARN,
        last_line[:200],
        "importable",
        f"{python} cannot use the RDMA device without it; services fall back to TCP.",
        source,
        "apt install python3-pyverbs or dnf install python3-pyverbs; both are for the "
        "distribution's own Python, and another one of the same version may have their folder "
        "on its path",
    )


def _firmware(facts: Facts, ports: Sequence[RdmaPort]) -> list[Finding]:
    findings = []
    for device in sorted({port.device for port in ports if not port.is_software}):
        text = (facts.text(f"{CLASS_FOLDER}/{device}/fw_ver") or "").strip()
        numbers = tuple(int(number) for number in re.findall(r"\d+", text)[:3])
        source = "NVIDIA ConnectX-6 Dx firmware release notes"
        name, minimum = MIN_FIRMWARE.get(numbers[0] if numbers else 0, ("", ()))
        if not numbers:
            verdict, wanted, reason = (
                *(Verdict.UNKNOWN, "a version", "The driver does not tell its firmware."),
            )
        elif not minimum:
            verdict, wanted = Verdict.OK, "no minimum is known for this NIC"
            reason = f"Only {', '.join(name for name, _ in MIN_FIRMWARE.values())} has one."
        else:
            verdict = Verdict.OK if numbers >= minimum else Verdict.FAIL
            wanted = f"{'.'.join(map(str, minimum))} or later ({name})"
            reason = "The project's RoCE settings were specified for this firmware and later ones."
        findings.append(
            Finding(
                *(CHECK, f"{device} firmware", verdict, text, wanted, reason, source),
                "mlxfwmanager --online -u, then mlxfwreset or a reboot"
                if verdict is Verdict.FAIL
                else "",
            )
        )
    return findings


def _locked_memory(facts: Facts) -> Limit | None:
    return parse_limits(facts.text("/proc/self/limits") or "").get("Max locked memory")


def _may_lock_anyway(facts: Facts) -> bool:
    """CAP_IPC_LOCK, as root has: the limit does not bind."""
    match = re.search(
        r"^CapEff:\s*([0-9a-f]+)", facts.text("/proc/self/status") or "", re.MULTILINE
    )
    return match is not None and bool(int(match[1], 16) >> _CAP_IPC_LOCK & 1)


def _memlock(facts: Facts) -> list[Finding]:
    source = "getrlimit(2), limits.conf(5), systemd.exec(5)"
    reason = "Registering the KV pool locks it; above the limit ibv_reg_mr fails with ENOMEM."
    limit = _locked_memory(facts)
    findings = []
    if limit is None:
        findings.append(
            Finding(
                *(CHECK, "memlock of this shell", Verdict.UNKNOWN, "", "unlimited"),
                *("/proc/self/limits cannot be read.", source),
            )
        )
    else:
        measured = "unlimited" if limit.soft is None else f"{limit.soft // 1024} KiB"
        is_right = limit.soft is None or _may_lock_anyway(facts)
        if limit.soft is not None and is_right:
            measured += ", not binding (CAP_IPC_LOCK)"
        findings.append(
            Finding(
                CHECK,
                "memlock of this shell",
                Verdict.OK if is_right else Verdict.WARN,
                measured,
                "unlimited",
                reason,
                source,
                "" if is_right else f"write {LIMITS_PATH} (pdctl node plan) and log in again",
            )
        )
    units = {
        name: text
        for folder in reversed(_UNIT_FOLDERS)  # what /etc says wins
        for name in facts.names(folder)
        if name.startswith("pd") and name.endswith(".service")
        if "pdctl" in (text := facts.text(f"{folder}/{name}") or "")
    }
    for name, text in sorted(units.items()):
        match = re.search(r"^\s*LimitMEMLOCK=(\S+)", text, re.MULTILINE)
        value = match[1] if match else "not set (systemd's default, 64 KiB to 8 MiB)"
        is_right = value == "infinity"
        findings.append(
            Finding(
                CHECK,
                f"memlock of {name}",
                Verdict.OK if is_right else Verdict.FAIL,
                value,
                "LimitMEMLOCK=infinity",
                reason,
                source,
                "" if is_right else f"systemctl edit {name}: [Service] LimitMEMLOCK=infinity",
            )
        )
    return findings


def _features(facts: Facts, ports: Sequence[RdmaPort]) -> list[Finding]:
    findings = []
    for netdev in sorted({port.netdev for port in ports if port.carries_roce and port.netdev}):
        output = facts.run("ethtool", "-k", netdev)
        features = parse_features(output.stdout)
        off = [name for name in WANTED_FEATURES if name in features and not features[name].is_on]
        subject, source = f"{netdev} offloads", "ethtool(8)"
        wanted = "checksumming, scatter-gather, TSO, GSO and GRO on"
        if not features:
            findings.append(
                Finding(
                    *(CHECK, subject, Verdict.UNKNOWN, "", wanted),
                    "ethtool is not installed."
                    if output.is_missing
                    else "ethtool -k says nothing.",
                    source,
                    "apt install ethtool or dnf install ethtool",
                )
            )
        else:
            changeable = [name for name in off if not features[name].is_fixed]
            switches = " ".join(f"{name} on" for name in changeable)
            findings.append(
                Finding(
                    CHECK,
                    subject,
                    Verdict.WARN if off else Verdict.OK,
                    f"off: {', '.join(off)}" if off else "all on",
                    wanted,
                    "Control messages and the TCP carrier use this NIC too; without offloads one "
                    "core is the limit of the link.",
                    source,
                    f"ethtool -K {netdev} {switches}" if changeable else "",
                )
            )
    return findings


def _pcie(facts: Facts, ports: Sequence[RdmaPort]) -> list[Finding]:
    findings = []
    for port in ports:
        folder = f"{CLASS_FOLDER}/{port.device}/device"
        values = {
            name: (facts.text(f"{folder}/{name}") or "").strip()
            for name in (
                *("current_link_speed", "max_link_speed"),
                *("current_link_width", "max_link_width"),
            )
        }
        speed = _gigatransfers(values["current_link_speed"])
        width = values["current_link_width"]
        if port.is_software or not speed or not width.isdecimal() or width == "0":
            continue  # a virtual function or a software device has no link of its own
        full = _gigatransfers(values["max_link_speed"]), values["max_link_width"]
        is_full = (speed, width) == full
        # 8b/10b up to 5 GT/s, 128b/130b above.
        gbps = speed * int(width) * (0.8 if speed <= 5 else 128 / 130)
        is_enough = gbps >= port.rate_gbps
        findings.append(
            Finding(
                CHECK,
                f"{port.device} PCIe",
                Verdict.OK if is_full else Verdict.WARN,
                f"{speed:g} GT/s x{width} ({gbps:.0f} Gb/s)",
                f"{full[0]:g} GT/s x{full[1]}",
                (
                    "The slot carries the port's rate"
                    if is_enough
                    else f"The slot is slower than the port ({port.rate_gbps:g} Gb/s)"
                )
                + ("." if is_full else ", and the link came up below what the card can."),
                "Linux Documentation/ABI/testing/sysfs-bus-pci",
                "" if is_full else "another slot, or seat the card anew; look for a riser and BIOS",
            )
        )
    return findings


def _gigatransfers(text: str) -> float:
    """Of "16.0 GT/s PCIe"; 0.0 for "Unknown"."""
    match = re.match(r"\d+(?:\.\d+)?", text)
    return float(match[0]) if match else 0.0


def _pci_capabilities(facts: Facts, ports: Sequence[RdmaPort]) -> list[Finding]:
    hardware = [port for port in ports if not port.is_software]
    if not hardware:
        return []
    output = facts.run("lspci", "-D", "-vvv")
    devices = parse_devices(output.stdout)
    if not devices:
        return [
            Finding(
                *(CHECK, "PCIe ACS and relaxed ordering", Verdict.UNKNOWN, "", "seen by lspci"),
                "lspci is not installed." if output.is_missing else "lspci lists nothing.",
                "lspci(8)",
                "apt install pciutils or dnf install pciutils, and run this as root",
            )
        ]
    findings = [
        _relaxed_ordering(facts, device, devices)
        for device in sorted({port.device for port in hardware})
    ]
    if _gpu_addresses(facts):
        findings.append(_access_control(devices))
    return findings


def _relaxed_ordering(facts: Facts, device: str, devices: Sequence[PciDevice]) -> Finding:
    address = (facts.link(f"{CLASS_FOLDER}/{device}/device") or "").rpartition("/")[2]
    found = next((entry.orders_relaxed for entry in devices if entry.address == address), None)
    verdict = {None: Verdict.UNKNOWN, True: Verdict.OK, False: Verdict.WARN}[found]
    return Finding(
        CHECK,
        f"{device} relaxed ordering",
        verdict,
        {None: "", True: "allowed", False: "not allowed"}[found],
        "allowed",
        "lspci shows capabilities to root only."
        if found is None
        else "With strict ordering writes into host memory wait for each other, which costs up to "
        "half of the rate on some hosts.",
        "PCI Express Base Specification, Device Control; NVIDIA PCIe tuning guide",
        "run this as root" if found is None else "" if found else "BIOS: PCI relaxed ordering on",
    )


def _access_control(devices: Sequence[PciDevice]) -> Finding:
    redirecting = [entry.address for entry in devices if entry.redirects_requests]
    seen = [entry for entry in devices if entry.redirects_requests is not None]
    if redirecting:
        verdict, measured = Verdict.WARN, f"on at {len(redirecting)} bridges ({redirecting[0]}, …)"
    else:
        verdict = Verdict.OK if seen else Verdict.UNKNOWN
        measured = "off" if seen else ""
    return Finding(
        CHECK,
        "PCIe ACS",
        verdict,
        measured,
        "off between GPU and NIC, unless virtual machines share the host",
        "No device shows the capability (lspci shows it to root only)."
        if verdict is Verdict.UNKNOWN
        else "With request redirection each packet between GPU and NIC goes through the CPU; KV of "
        "pdserve lands in host memory, so only GPUDirect suffers.",
        "NVIDIA GPUDirect RDMA and Magnum IO storage guides",
        "BIOS: ACS off, or setpci on the bridges" if redirecting else "",
    )


def _gpu_addresses(facts: Facts) -> list[str]:
    """PCI addresses of NVIDIA's display and 3D controllers."""
    return [
        address
        for address in facts.names(_PCI_FOLDER)
        if (facts.text(f"{_PCI_FOLDER}/{address}/vendor") or "").strip() == _NVIDIA
        if (facts.text(f"{_PCI_FOLDER}/{address}/class") or "").startswith("0x03")
    ]


def _neighbourhood(facts: Facts, ports: Sequence[RdmaPort]) -> list[Finding]:
    """NUMA nodes of NIC and GPU, and what lets the NIC reach GPU memory."""
    gpus = _gpu_addresses(facts)
    gpu_nodes = {(facts.text(f"{_PCI_FOLDER}/{gpu}/numa_node") or "").strip() for gpu in gpus}
    num_nodes = sum(
        re.fullmatch(r"node\d+", name) is not None
        for name in facts.names("/sys/devices/system/node")
    )
    findings = []
    for device in sorted({port.device for port in ports if not port.is_software}):
        node = (facts.text(f"{CLASS_FOLDER}/{device}/device/numa_node") or "").strip()
        if not node:
            continue
        cpus = (facts.text(f"/sys/devices/system/node/node{node}/cpulist") or "").strip()
        # -1: the firmware does not say, as in most virtual machines.
        is_apart = num_nodes > 1 and bool(gpu_nodes) and node not in gpu_nodes
        is_unsaid = num_nodes > 1 and node == "-1"
        findings.append(
            Finding(
                CHECK,
                f"{device} NUMA node",
                Verdict.WARN if is_apart or is_unsaid else Verdict.OK,
                f"node {node}" + (f" of {num_nodes}, CPUs {cpus}" if cpus else ""),
                f"that of a GPU ({', '.join(sorted(gpu_nodes))})"
                if gpu_nodes
                else "that of its worker",
                "Memory and GPU of the other socket cost an extra hop for each byte; a worker runs "
                "best on the CPUs of the NIC's node.",
                "Linux Documentation/ABI/testing/sysfs-bus-pci, numa_node",
                f"pdctl start … --cpus {cpus}; a GPU or a NIC in a slot of the same socket"
                if is_apart
                else "",
            )
        )
    if gpus and any(not port.is_software for port in ports):
        modules = [
            name
            for name in ("nvidia_peermem", "nv_peer_mem")
            if facts.names(f"/sys/module/{name}") or facts.text(f"/sys/module/{name}/initstate")
        ]
        has_dma_buf = "Open Kernel Module" in (facts.text("/proc/driver/nvidia/version") or "")
        found = [*modules, *(["dma-buf (open driver)"] if has_dma_buf else [])]
        findings.append(
            Finding(
                CHECK,
                "GPUDirect RDMA",
                Verdict.OK,
                ", ".join(found) or "none",
                "not needed by pdserve; nvidia_peermem or dma-buf for other programs",
                "KV lands in host memory and is promoted from there.",
                "NVIDIA GPUDirect RDMA manual",
                "" if found else "modprobe nvidia_peermem, if another program wants it",
            )
        )
    return findings
