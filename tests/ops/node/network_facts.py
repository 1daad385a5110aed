"""Made machines for the network checks: facts to start from, and to change for each case."""

from dataclasses import dataclass, field
from pathlib import Path

from ops.node.facts import CommandOutput, RecordedFacts
from ops.node.finding import Finding, Verdict

CAPTURED = Path(__file__).parent / "captured"

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max open files            {files}               {files}              files
Max locked memory         {locked}            {locked}            bytes
Max realtime timeout      unlimited            unlimited            us
"""

LINK = "/sys/class/infiniband/mlx5_0"
PORT = f"{LINK}/ports/1"
NETDEV = "/sys/class/net/ens1f0"
PYTHON = "/opt/pdserve/bin/python3"


def captured(name: str) -> str:
    return (CAPTURED / name).read_text(encoding="utf-8")


def printed(stdout: str = "", *, exit_code: int = 0, stderr: str = "") -> CommandOutput:
    return CommandOutput(exit_code, stdout, stderr)


@dataclass
class Machine:
    """Facts that a test may change before it asks."""

    files: dict[str, str] = field(default_factory=dict)
    folders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    commands: dict[str, CommandOutput] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def facts(self) -> RecordedFacts:
        return RecordedFacts(
            files=self.files,
            folders=self.folders,
            links=self.links,
            commands=self.commands,
            variables=self.variables,
        )

    def remove(self, prefix: str) -> None:
        """All files at and below ``prefix``."""
        for path in [path for path in self.files if path.startswith(prefix)]:
            del self.files[path]


def found(findings: list[Finding], subject: str) -> Finding:
    """The one finding about ``subject``."""
    matching = [finding for finding in findings if finding.subject == subject]
    assert len(matching) == 1, [finding.subject for finding in findings]
    return matching[0]


def verdicts(findings: list[Finding]) -> set[Verdict]:
    return {finding.verdict for finding in findings}


def edge_box() -> Machine:
    """A small board: one Ethernet port, no RDMA, no GPU, no tools."""
    return Machine(
        files={
            "/proc/self/limits": LIMITS.format(files=1048576, locked=8388608),
            "/proc/self/cmdline": f"{PYTHON}\0/opt/pdserve/bin/pdctl\0node\0check\0",
            "/proc/self/status": "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000000000\n",
            "/proc/swaps": "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n",
            "/proc/mounts": "tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0\n",
            "/proc/self/cgroup": "0::/user.slice/session-1.scope\n",
            "/sys/class/net/eth0/mtu": "1500\n",
            "/sys/class/net/eth0/operstate": "up\n",
            "/sys/class/net/eth0/device/uevent": "",
            "/sys/class/net/lo/mtu": "65536\n",
            "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "/sys/kernel/mm/transparent_hugepage/shmem_enabled": (
                "always within_size [advise] never deny force\n"
            ),
            "/sys/devices/system/clocksource/clocksource0/current_clocksource": (
                "arch_sys_counter\n"
            ),
        },
        commands={"timedatectl": printed("System clock synchronized: yes\n")},
    )


def roce_node() -> Machine:
    """A server whose ConnectX-6 Dx is set up as it should be, with NVIDIA's driver and tools."""
    machine = edge_box()
    machine.files.update(
        {
            "/proc/self/limits": LIMITS.format(files=1048576, locked="unlimited"),
            f"{LINK}/fw_ver": "22.35.2302\n",
            f"{LINK}/hca_type": "MT4125\n",
            f"{PORT}/state": "4: ACTIVE\n",
            f"{PORT}/phys_state": "5: LinkUp\n",
            f"{PORT}/link_layer": "Ethernet\n",
            f"{PORT}/rate": "100 Gb/sec (4X EDR)\n",
            f"{LINK}/device/current_link_speed": "16.0 GT/s PCIe\n",
            f"{LINK}/device/max_link_speed": "16.0 GT/s PCIe\n",
            f"{LINK}/device/current_link_width": "16\n",
            f"{LINK}/device/max_link_width": "16\n",
            f"{LINK}/device/numa_node": "0\n",
            "/sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0\n",
            "/sys/class/infiniband_verbs/abi_version": "6\n",
            "/sys/devices/system/node/node0/cpulist": "0-31\n",
            "/sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos": "106\n",
            f"{NETDEV}/mtu": "9000\n",
            f"{NETDEV}/operstate": "up\n",
            f"{NETDEV}/device/numa_node": "0\n",
            **{f"{NETDEV}/ecn/{s}/enable/{p}": "1\n" for s in ("roce_np", "roce_rp") for p in (3,)},
        }
    )
    gids = (
        ("fe80:0000:0000:0000:0000:00ff:fe00:0b00", "IB/RoCE v1"),
        ("fe80:0000:0000:0000:0000:00ff:fe00:0b00", "RoCE v2"),
        ("0000:0000:0000:0000:0000:ffff:c0a8:010b", "IB/RoCE v1"),
        ("0000:0000:0000:0000:0000:ffff:c0a8:010b", "RoCE v2"),
    )
    for index, (gid, kind) in enumerate(gids):
        set_gid(machine, index, gid, kind)
    set_gid(machine, 4, "0000:0000:0000:0000:0000:0000:0000:0000", "")
    machine.folders["/dev/infiniband"] = ("rdma_cm", "uverbs0")
    machine.links[f"{LINK}/device"] = "../../../0000:4b:00.0"
    machine.commands.update(
        {
            "ip -j address": printed(
                '[{"ifname":"ens1f0","mtu":9000,"addr_info":[{"family":"inet",'
                '"local":"192.168.1.11","prefixlen":24}]}]'
            ),
            "rdma link": printed(
                "link mlx5_0/1 state ACTIVE physical_state LINK_UP netdev ens1f0 \n"
            ),
            "stat -c %a /dev/infiniband/uverbs0": printed("666\n"),
            f"{PYTHON} -c import pyverbs.device": printed(),
            "ethtool -k ens1f0": printed(
                "Features for ens1f0:\nrx-checksumming: on\ntx-checksumming: on\n"
                "\ttx-checksum-ipv4: off [fixed]\nscatter-gather: on\n"
                "tcp-segmentation-offload: on\ngeneric-segmentation-offload: on\n"
                "generic-receive-offload: on\nlarge-receive-offload: off\n"
            ),
            "ethtool -a ens1f0": printed(
                "Pause parameters for ens1f0:\nAutonegotiate:\toff\nRX:\t\toff\nTX:\t\toff\n"
            ),
            "lspci -D -vvv": printed(captured("lspci-3.9.txt")),
            "ibv_devinfo -v": printed(captured("ibv_devinfo-ofed_5.9-mlx5.txt")),
            "mlnx_qos -i ens1f0": printed(captured("mlnx_qos-5.9.txt")),
        }
    )
    counters(machine, captured("ethtool_5.4-counters-mlx5.txt"), 1)
    counters(machine, captured("ethtool_5.4-counters-mlx5.txt"), 2)
    hw_counters(machine, HW_COUNTERS, 1)
    hw_counters(machine, HW_COUNTERS, 2)
    return machine


HW_COUNTERS = {
    "np_cnp_sent": 120,
    "np_ecn_marked_roce_packets": 4400,
    "rp_cnp_handled": 87,
    "rp_cnp_ignored": 0,
    "out_of_sequence": 0,
    "packet_seq_err": 0,
    "out_of_buffer": 0,
    "rnr_nak_retry_err": 0,
    "lifespan": 10,
}


def set_gid(machine: Machine, index: int, gid: str, kind: str, netdev: str = "ens1f0") -> None:
    machine.files[f"{PORT}/gids/{index}"] = f"{gid}\n"
    if kind:
        machine.files[f"{PORT}/gid_attrs/types/{index}"] = f"{kind}\n"
        machine.files[f"{PORT}/gid_attrs/ndevs/{index}"] = f"{netdev}\n"


def counters(machine: Machine, text: str, sample: int) -> None:
    option = {1: "-S", 2: "--statistics"}[sample]
    machine.commands[f"ethtool {option} ens1f0"] = printed(text)


def hw_counters(machine: Machine, values: dict[str, int], sample: int) -> None:
    option = {1: "-r", 2: "-rs"}[sample]
    lines = "".join(f"{PORT}/hw_counters/{name}:{value}\n" for name, value in values.items())
    machine.commands[f"grep {option}  {PORT}/hw_counters"] = printed(lines)


def soft_roce_node() -> Machine:
    """A laptop with rxe on its only interface, as the kernel shows it (taken from a real one)."""
    machine = edge_box()
    folder = "/sys/class/infiniband/rxe0"
    machine.files.update(
        {
            f"{folder}/fw_ver": "\n",
            f"{folder}/parent": "eth0\n",
            f"{folder}/ports/1/state": "4: ACTIVE\n",
            f"{folder}/ports/1/phys_state": "5: LinkUp\n",
            f"{folder}/ports/1/link_layer": "Ethernet\n",
            f"{folder}/ports/1/rate": "10 Gb/sec (1X FDR10)\n",
            f"{folder}/ports/1/gids/0": "fe80:0000:0000:0000:c0ca:ceff:fec6:d58b\n",
            f"{folder}/ports/1/gids/1": "0000:0000:0000:0000:0000:ffff:0a63:0001\n",
            f"{folder}/ports/1/gid_attrs/types/0": "RoCE v2\n",
            f"{folder}/ports/1/gid_attrs/types/1": "RoCE v2\n",
            f"{folder}/ports/1/gid_attrs/ndevs/0": "eth0\n",
            f"{folder}/ports/1/gid_attrs/ndevs/1": "eth0\n",
            "/sys/class/infiniband_verbs/uverbs0/ibdev": "rxe0\n",
        }
    )
    machine.folders["/dev/infiniband"] = ("rdma_cm", "uverbs0")
    machine.commands["stat -c %a /dev/infiniband/uverbs0"] = printed("666\n")
    return machine
