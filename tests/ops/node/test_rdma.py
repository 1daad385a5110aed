"""The RDMA check on made machines: good, bad, missing."""

import pytest

from ops.node.change import FileChange
from ops.node.checks.rdma import LIMITS_PATH, LIMITS_TEXT, changes, check
from ops.node.facts import RecordedFacts
from ops.node.finding import Verdict
from tests.ops.node.network_facts import (
    LIMITS,
    LINK,
    PORT,
    PYTHON,
    Machine,
    captured,
    edge_box,
    found,
    printed,
    roce_node,
    set_gid,
    soft_roce_node,
    verdicts,
)


@pytest.fixture
def node() -> Machine:
    return roce_node()


def test_a_good_node_is_good_in_everything(node: Machine) -> None:
    findings = check(node.facts)
    assert verdicts(findings) == {Verdict.OK}
    assert [finding.subject for finding in findings] == [
        "mlx5_0/1",
        "mlx5_0/1 GID",
        "/dev/infiniband/uverbs0",
        "pyverbs",
        "mlx5_0 firmware",
        "memlock of this shell",
        "ens1f0 offloads",
        "mlx5_0 PCIe",
        "mlx5_0 relaxed ordering",
        "mlx5_0 NUMA node",
    ]
    assert found(findings, "mlx5_0/1").measured == (
        "ACTIVE LinkUp, Ethernet, 100 Gb/sec (4X EDR), ens1f0"
    )
    assert changes(node.facts) == []


@pytest.mark.parametrize("facts", [edge_box().facts, RecordedFacts()])
def test_a_node_without_rdma_has_one_line_and_does_not_fail(facts: RecordedFacts) -> None:
    (finding,) = check(facts)
    assert finding.verdict is Verdict.UNKNOWN
    assert "TCP" in finding.reason
    assert "mapped memory" in finding.reason
    assert changes(facts) == []


def test_a_nic_without_its_rdma_driver_is_told_from_no_nic() -> None:
    box = edge_box()
    box.files["/sys/bus/pci/devices/0000:4b:00.0/vendor"] = "0x15b3\n"
    (finding,) = check(box.facts)
    assert (finding.verdict, "0000:4b:00.0" in finding.measured) == (Verdict.WARN, True)
    assert "modprobe mlx5_ib" in finding.cure


def test_soft_roce_has_no_firmware_and_no_slot() -> None:
    findings = check(soft_roce_node().facts)
    subjects = {finding.subject for finding in findings}
    assert found(findings, "rxe0/1").measured.endswith("(software)")
    assert found(findings, "rxe0/1 GID").measured.startswith("index 1: 10.99.0.1 (RoCE v2, eth0)")
    assert not subjects & {"rxe0 firmware", "rxe0 PCIe", "PCIe ACS and relaxed ordering"}
    assert found(findings, "eth0 offloads").verdict is Verdict.UNKNOWN


class TestPort:
    def test_a_port_that_is_down_fails_if_it_is_the_only_one(self, node: Machine) -> None:
        node.files[f"{PORT}/state"] = "1: DOWN\n"
        node.files[f"{PORT}/phys_state"] = "3: Disabled\n"
        finding = found(check(node.facts), "mlx5_0/1")
        assert finding.verdict is Verdict.FAIL
        assert finding.measured.startswith("DOWN Disabled")
        assert "ip link set ens1f0 up" in finding.cure

    def test_a_second_port_that_is_down_is_warned_of(self, node: Machine) -> None:
        other = "/sys/class/infiniband/mlx5_1/ports/1"
        node.files[f"{other}/state"] = "1: DOWN\n"
        node.files[f"{other}/link_layer"] = "Ethernet\n"
        assert found(check(node.facts), "mlx5_1/1").verdict is Verdict.WARN
        assert found(check(node.facts), "mlx5_0/1").verdict is Verdict.OK

    def test_infiniband_is_warned_of(self, node: Machine) -> None:
        node.files[f"{PORT}/link_layer"] = "InfiniBand\n"
        finding = found(check(node.facts), "mlx5_0/1")
        assert (finding.verdict, finding.wanted) == (Verdict.WARN, "Ethernet")

    def test_nothing_readable_is_no_crash(self) -> None:
        machine = Machine(folders={"/sys/class/infiniband/mlx5_0/ports": ("1",)})
        assert found(check(machine.facts), "mlx5_0/1").verdict is Verdict.FAIL


class TestGid:
    def test_the_index_is_of_roce_v2_and_ipv4(self, node: Machine) -> None:
        finding = found(check(node.facts), "mlx5_0/1 GID")
        assert finding.measured == ("index 3: 192.168.1.11 (RoCE v2, ens1f0) in 192.168.1.0/24")

    def test_an_address_that_was_taken_away_loses_to_a_current_one(self, node: Machine) -> None:
        set_gid(node, 3, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2")
        set_gid(node, 4, "0000:0000:0000:0000:0000:ffff:c0a8:010b", "RoCE v2")
        assert found(check(node.facts), "mlx5_0/1 GID").measured.startswith("index 4: 192.168.1.11")

    def test_without_ip_the_first_ipv4_entry_is_taken(self, node: Machine) -> None:
        del node.commands["ip -j address"]
        finding = found(check(node.facts), "mlx5_0/1 GID")
        assert (finding.verdict, finding.measured) == (
            Verdict.OK,
            "index 3: 192.168.1.11 (RoCE v2, ens1f0)",
        )

    def test_an_old_ip_without_json_is_asked_again(self, node: Machine) -> None:
        node.commands["ip -j address"] = printed(exit_code=255, stderr='Option "-j" is unknown')
        node.commands["ip -o address"] = printed(
            "2: ens1f0    inet 192.168.1.11/24 scope global ens1f0\\       valid\n"
        )
        assert "192.168.1.0/24" in found(check(node.facts), "mlx5_0/1 GID").measured

    def test_only_roce_v1_fails(self, node: Machine) -> None:
        for index in range(4):
            node.files[f"{PORT}/gid_attrs/types/{index}"] = "IB/RoCE v1\n"
        finding = found(check(node.facts), "mlx5_0/1 GID")
        assert (finding.verdict, finding.measured) == (Verdict.FAIL, "IB/RoCE v1")
        assert "cma_roce_mode -d mlx5_0 -m 2" in finding.cure

    def test_only_a_link_local_address_is_warned_of(self, node: Machine) -> None:
        node.remove(f"{PORT}/gids/2")
        node.remove(f"{PORT}/gids/3")
        finding = found(check(node.facts), "mlx5_0/1 GID")
        assert (finding.verdict, finding.measured[:7]) == (Verdict.WARN, "index 1")

    def test_an_empty_table_fails(self, node: Machine) -> None:
        node.remove(f"{PORT}/gids/")
        assert found(check(node.facts), "mlx5_0/1 GID").measured == "no entry"


class TestVerbs:
    def test_a_missing_device_file_fails(self, node: Machine) -> None:
        del node.folders["/dev/infiniband"]
        finding = found(check(node.facts), "/dev/infiniband/uverbs0")
        assert finding.verdict is Verdict.FAIL
        assert "--device=/dev/infiniband" in finding.cure

    def test_without_ib_uverbs_no_name_is_known(self, node: Machine) -> None:
        node.remove("/sys/class/infiniband_verbs")
        assert found(check(node.facts), "/dev/infiniband/uverbs*").verdict is Verdict.FAIL

    @pytest.mark.parametrize(
        ("mode", "verdict"),
        [("666", Verdict.OK), ("660", Verdict.WARN), ("600", Verdict.WARN), ("", Verdict.UNKNOWN)],
    )
    def test_permissions(self, node: Machine, mode: str, verdict: Verdict) -> None:
        node.commands["stat -c %a /dev/infiniband/uverbs0"] = printed(f"{mode}\n")
        assert found(check(node.facts), "/dev/infiniband/uverbs0").verdict is verdict

    def test_pyverbs_that_is_not_there_names_the_package(self, node: Machine) -> None:
        node.commands[f"{PYTHON} -c import pyverbs.device"] = printed(
            exit_code=1,
            stderr="Traceback (most recent call last):\nModuleNotFoundError: No module named "
            "'pyverbs'\n",
        )
        finding = found(check(node.facts), "pyverbs")
        assert finding.verdict is Verdict.WARN
        assert finding.measured == "ModuleNotFoundError: No module named 'pyverbs'"
        assert "apt install python3-pyverbs" in finding.cure

    def test_an_interpreter_that_cannot_be_asked_is_unknown(self, node: Machine) -> None:
        del node.commands[f"{PYTHON} -c import pyverbs.device"]
        assert found(check(node.facts), "pyverbs").verdict is Verdict.UNKNOWN


class TestFirmware:
    @pytest.mark.parametrize(
        ("version", "verdict"),
        [
            ("22.30.1002", Verdict.OK),
            ("22.31.1014", Verdict.OK),
            ("22.30.1001", Verdict.FAIL),
            ("22.9.1002", Verdict.FAIL),
            # ConnectX-5: no minimum.
            ("16.21.2010", Verdict.OK),
            ("", Verdict.UNKNOWN),
        ],
    )
    def test_against_the_minimum(self, node: Machine, version: str, verdict: Verdict) -> None:
        node.files[f"{LINK}/fw_ver"] = f"{version}\n"
        finding = found(check(node.facts), "mlx5_0 firmware")
        assert (finding.verdict, finding.measured) == (verdict, version)


class TestLockedMemory:
    def test_a_limit_that_binds_is_warned_of_and_lifted(self, node: Machine) -> None:
        node.files["/proc/self/limits"] = LIMITS.format(files=1024, locked=65536)
        finding = found(check(node.facts), "memlock of this shell")
        assert (finding.verdict, finding.measured) == (Verdict.WARN, "64 KiB")
        (change,) = changes(node.facts)
        assert isinstance(change, FileChange)
        assert (change.path, change.text) == (LIMITS_PATH, LIMITS_TEXT)
        assert change.needs == "a new login"

    def test_once_the_file_is_there_nothing_is_to_change(self, node: Machine) -> None:
        node.files["/proc/self/limits"] = LIMITS.format(files=1024, locked=65536)
        node.files[LIMITS_PATH] = LIMITS_TEXT
        assert changes(node.facts) == []

    def test_root_is_not_bound(self, node: Machine) -> None:
        node.files["/proc/self/limits"] = LIMITS.format(files=1024, locked=65536)
        node.files["/proc/self/status"] = "CapEff:\t000001ffffffffff\n"
        finding = found(check(node.facts), "memlock of this shell")
        assert (finding.verdict, "not binding" in finding.measured) == (Verdict.OK, True)

    def test_limits_that_cannot_be_read_are_unknown(self, node: Machine) -> None:
        del node.files["/proc/self/limits"]
        assert found(check(node.facts), "memlock of this shell").verdict is Verdict.UNKNOWN

    @pytest.mark.parametrize(
        ("line", "verdict"),
        [
            ("LimitMEMLOCK=infinity", Verdict.OK),
            ("LimitMEMLOCK=64M", Verdict.FAIL),
            ("", Verdict.FAIL),
        ],
    )
    def test_units_of_services(self, node: Machine, line: str, verdict: Verdict) -> None:
        node.files["/etc/systemd/system/pdserve-decode.service"] = (
            f"[Service]\nExecStart=/usr/bin/pdctl start decode\n{line}\n"
        )
        # Of another product.
        node.files["/etc/systemd/system/pdns.service"] = "[Service]\nExecStart=/usr/sbin/pdns\n"
        findings = check(node.facts)
        assert found(findings, "memlock of pdserve-decode.service").verdict is verdict
        assert "memlock of pdns.service" not in {finding.subject for finding in findings}


class TestOffloads:
    def test_what_is_off_is_named_and_switched_on_unless_it_is_fixed(self, node: Machine) -> None:
        node.commands["ethtool -k ens1f0"] = printed(
            "Features for ens1f0:\ntcp-segmentation-offload: off\n"
            "generic-receive-offload: off [fixed]\nscatter-gather: on\n"
        )
        finding = found(check(node.facts), "ens1f0 offloads")
        assert finding.verdict is Verdict.WARN
        assert finding.measured == "off: tcp-segmentation-offload, generic-receive-offload"
        assert finding.cure == "ethtool -K ens1f0 tcp-segmentation-offload on"

    def test_without_ethtool_it_is_unknown(self, node: Machine) -> None:
        del node.commands["ethtool -k ens1f0"]
        finding = found(check(node.facts), "ens1f0 offloads")
        assert (finding.verdict, finding.reason) == (Verdict.UNKNOWN, "ethtool is not installed.")


class TestPcie:
    def test_a_narrow_slot_is_warned_of_with_its_rate(self, node: Machine) -> None:
        node.files[f"{LINK}/device/current_link_width"] = "4\n"
        node.files[f"{LINK}/device/current_link_speed"] = "8.0 GT/s PCIe\n"
        finding = found(check(node.facts), "mlx5_0 PCIe")
        assert (finding.verdict, finding.measured) == (Verdict.WARN, "8 GT/s x4 (32 Gb/s)")
        assert "slower than the port (100 Gb/s)" in finding.reason

    def test_kernels_before_5_write_the_speed_shorter(self, node: Machine) -> None:
        for name in ("current_link_speed", "max_link_speed"):
            node.files[f"{LINK}/device/{name}"] = "8 GT/s\n"
        assert found(check(node.facts), "mlx5_0 PCIe").measured == "8 GT/s x16 (126 Gb/s)"

    def test_a_virtual_function_has_no_link(self, node: Machine) -> None:
        node.files[f"{LINK}/device/current_link_speed"] = "Unknown\n"
        assert "mlx5_0 PCIe" not in {finding.subject for finding in check(node.facts)}

    def test_strict_ordering_is_warned_of(self, node: Machine) -> None:
        strict = captured("lspci-3.9.txt").replace("RlxdOrd+", "RlxdOrd-")
        node.commands["lspci -D -vvv"] = printed(strict)
        assert found(check(node.facts), "mlx5_0 relaxed ordering").verdict is Verdict.WARN

    def test_a_user_sees_no_capabilities(self, node: Machine) -> None:
        node.commands["lspci -D -vvv"] = printed(captured("lspci-3.5-user.txt"))
        finding = found(check(node.facts), "mlx5_0 relaxed ordering")
        assert (finding.verdict, finding.cure) == (Verdict.UNKNOWN, "run this as root")

    def test_without_lspci_one_line_says_so(self, node: Machine) -> None:
        del node.commands["lspci -D -vvv"]
        finding = found(check(node.facts), "PCIe ACS and relaxed ordering")
        assert (finding.verdict, finding.reason) == (Verdict.UNKNOWN, "lspci is not installed.")


class TestGpuNeighbourhood:
    @pytest.fixture
    def node(self) -> Machine:
        node = roce_node()
        gpu = "/sys/bus/pci/devices/0000:17:00.0"
        node.files[f"{gpu}/vendor"] = "0x10de\n"
        node.files[f"{gpu}/class"] = "0x030200\n"
        node.files[f"{gpu}/numa_node"] = "0\n"
        node.files["/sys/devices/system/node/node1/cpulist"] = "32-63\n"
        return node

    def test_one_socket_is_right_and_gpudirect_is_not_needed(self, node: Machine) -> None:
        findings = check(node.facts)
        assert found(findings, "mlx5_0 NUMA node").verdict is Verdict.OK
        direct = found(findings, "GPUDirect RDMA")
        assert (direct.verdict, direct.measured) == (Verdict.OK, "none")

    def test_the_other_socket_is_warned_of(self, node: Machine) -> None:
        node.files["/sys/bus/pci/devices/0000:17:00.0/numa_node"] = "1\n"
        finding = found(check(node.facts), "mlx5_0 NUMA node")
        assert (finding.verdict, finding.measured) == (Verdict.WARN, "node 0 of 2, CPUs 0-31")
        assert "--cpus 0-31" in finding.cure

    def test_peer_memory_and_dma_buf_are_told(self, node: Machine) -> None:
        node.files["/sys/module/nvidia_peermem/initstate"] = "live\n"
        node.files["/proc/driver/nvidia/version"] = (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15\n"
        )
        assert found(check(node.facts), "GPUDirect RDMA").measured == (
            "nvidia_peermem, dma-buf (open driver)"
        )

    def test_acs_between_gpu_and_nic_is_warned_of(self, node: Machine) -> None:
        finding = found(check(node.facts), "PCIe ACS")
        assert (finding.verdict, "0000:4a:00.0" in finding.measured) == (Verdict.WARN, True)

    def test_acs_that_is_off_is_right(self, node: Machine) -> None:
        off = captured("lspci-3.9.txt").replace("ReqRedir+", "ReqRedir-")
        node.commands["lspci -D -vvv"] = printed(off)
        assert found(check(node.facts), "PCIe ACS").verdict is Verdict.OK

    def test_acs_that_cannot_be_seen_is_unknown(self, node: Machine) -> None:
        node.commands["lspci -D -vvv"] = printed(captured("lspci-3.5-user.txt"))
        assert found(check(node.facts), "PCIe ACS").verdict is Verdict.UNKNOWN
