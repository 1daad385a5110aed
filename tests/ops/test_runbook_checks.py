"""What the runbooks judge in made trees: good, bad and missing, with canned output of the tools."""

from pathlib import Path

import pytest

from tests.ops.runbook_tree import DISTRIBUTIONS, Tree

MLNX_QOS = """\
DCBX mode: OS controlled
Priority trust state: {trust}
Receive buffer size (bytes): 130944,130944,0,0,0,0,0,0,max_buffer_size=262016
Cable len: 7
PFC configuration:
\tpriority    0   1   2   3   4   5   6   7
\tenabled     {enabled}
\tbuffer      0   0   0   1   0   0   0   0
tc: 0 ratelimit: unlimited, tsa: vendor
\t priority:  1
"""
DCB_PFC = """\
pfc-cap 8 macsec-bypass off delay 32768
prio-pfc 0:off 1:off 2:off 3:on 4:off 5:off 6:off 7:off
"""
DEVINFO = """\
hca_id:\tmlx5_0
\ttransport:\t\t\tInfiniBand (0)
\tfw_ver:\t\t\t\t22.35.1012
\tphys_port_cnt:\t\t\t1
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tmax_mtu:\t\t4096 (5)
\t\t\tactive_mtu:\t\t{mtu}
\t\t\tlink_layer:\t\tEthernet
"""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def rdma(tree: Tree) -> Tree:
    """A ConnectX-6 Dx with one good port."""
    device = "/sys/class/infiniband/mlx5_0"
    port = f"{device}/ports/1"
    tree.write(f"{device}/fw_ver", "22.35.1012\n")
    tree.write(f"{device}/device/net/ens1/mtu", "9000\n")
    tree.write(f"{device}/device/current_link_speed", "16.0 GT/s PCIe\n")
    tree.write(f"{device}/device/max_link_speed", "16.0 GT/s PCIe\n")
    tree.write(f"{device}/device/current_link_width", "16\n")
    tree.write(f"{device}/device/max_link_width", "16\n")
    tree.write(f"{device}/device/numa_node", "0\n")
    tree.write(f"{port}/state", "4: ACTIVE\n")
    tree.write(f"{port}/link_layer", "Ethernet\n")
    tree.write(f"{port}/rate", "100 Gb/sec (4X EDR)\n")
    for index, (kind, gid) in enumerate(
        [
            ("IB/RoCE v1", "fe80:0000:0000:0000:0e42:a1ff:fe00:0001"),
            ("RoCE v2", "fe80:0000:0000:0000:0e42:a1ff:fe00:0001"),
            ("IB/RoCE v1", "0000:0000:0000:0000:0000:ffff:0a00:0001"),
            ("RoCE v2", "0000:0000:0000:0000:0000:ffff:0a00:0001"),
        ]
    ):
        tree.write(f"{port}/gid_attrs/types/{index}", f"{kind}\n")
        tree.write(f"{port}/gids/{index}", f"{gid}\n")
    tree.write("/sys/class/net/ens1/mtu", "9000\n")
    tree.write("/sys/class/net/ens1/device/vendor", "0x15b3\n")
    tree.write("/proc/self/limits", "Max locked memory         unlimited  unlimited  bytes\n")
    tree.printing("ethtool", "rx-checksumming: on\ntcp-segmentation-offload: on")
    return tree


# --- sysctl ---------------------------------------------------------------------------------------


def test_sysctl_good(tree: Tree) -> None:
    tree.write("/proc/sys/net/core/rmem_max", "536870912\n")
    tree.write("/proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t268435456\n")
    tree.write("/proc/sys/net/ipv4/neigh/default/base_reachable_time_ms", "1000\n")
    verdicts = tree.findings("sysctl.sh")
    assert verdicts["net.core.rmem_max"] == "OK"
    assert verdicts["net.ipv4.tcp_rmem"] == "OK"
    assert verdicts["net.ipv4.neigh.default.base_reachable_time_ms"] == "OK"


def test_sysctl_bad(tree: Tree) -> None:
    tree.write("/proc/sys/net/core/rmem_max", "212992\n")
    tree.write("/proc/sys/net/ipv4/tcp_window_scaling", "0\n")
    # One millisecond, as `echo 1` writes it: worse than the default of 30 s.
    tree.write("/proc/sys/net/ipv4/neigh/default/base_reachable_time_ms", "1\n")
    tree.write("/proc/sys/net/ipv6/neigh/default/base_reachable_time_ms", "30000\n")
    verdicts = tree.findings("sysctl.sh")
    assert verdicts["net.core.rmem_max"] == "FAIL"
    assert verdicts["net.ipv4.tcp_window_scaling"] == "FAIL"
    assert verdicts["net.ipv4.neigh.default.base_reachable_time_ms"] == "FAIL"
    assert verdicts["net.ipv6.neigh.default.base_reachable_time_ms"] == "WARN"


def test_sysctl_names_the_file_that_wins_over_ours(tree: Tree) -> None:
    tree.write("/proc/sys/net/core/rmem_max", "268435456\n")
    tree.write("/etc/sysctl.d/50-early.conf", "net.core.rmem_max=1\n")
    tree.write("/etc/sysctl.d/99-tuned.conf", "# comment\n\n-net/core/rmem_max = 4194304\n")
    output = tree.run("sysctl.sh", "check").stdout
    assert "FAIL sysctl net.core.rmem_max: 4194304 in /etc/sysctl.d/99-tuned.conf:3" in output
    assert "50-early.conf" not in output


def test_sysctl_knows_which_files_hide_others(tree: Tree) -> None:
    tree.write("/proc/sys/net/core/rmem_max", "268435456\n")
    tree.write("/usr/lib/sysctl.d/99-vendor.conf", "net.core.rmem_max = 1\n")
    tree.write("/etc/sysctl.d/99-vendor.conf", "# switched off here\n")
    tree.link("/etc/sysctl.d/99-sysctl.conf", "../sysctl.conf")
    tree.write("/etc/sysctl.conf", "net.core.wmem_max = 2\n")
    tree.write("/etc/sysctl.d/95-all.conf", "net.ipv4.neigh.*.base_reachable_time_ms = 1\n")
    output = tree.run("sysctl.sh", "check").stdout
    assert "99-vendor.conf" not in output
    assert output.count("2 in /etc/sysctl.conf:1") == 1
    assert "1 in /etc/sysctl.d/95-all.conf:1" in output


def test_sysctl_judges_interfaces_of_hardware_by_themselves(tree: Tree) -> None:
    neighbours = "/proc/sys/net/ipv4/neigh"
    for name in ("ens1.100", "veth0"):
        tree.write(f"{neighbours}/{name}/base_reachable_time_ms", "30000\n")
    tree.write("/sys/class/net/ens1.100/device/vendor", "0x15b3\n")
    verdicts = tree.findings("sysctl.sh")
    assert verdicts["net.ipv4.neigh.ens1/100.base_reachable_time_ms"] == "WARN"
    assert "net.ipv4.neigh.veth0.base_reachable_time_ms" not in verdicts


# --- modprobe -------------------------------------------------------------------------------------


def test_modprobe_good(tree: Tree) -> None:
    rdma(tree)
    tree.write("/proc/modules", "ib_uverbs 180224 2 - Live 0x0\nrdma_ucm 32768 0 - Live 0x0\n")
    tree.write("/etc/modules-load.d/ours.conf", "ib_uverbs\nrdma_ucm # both\n")
    tree.printing("modinfo", "prof_sel:profile selector. Valid range 0 - 2 (uint)")
    verdicts = tree.findings("modprobe.sh")
    assert [verdicts[name] for name in ("ib_uverbs", "rdma_ucm", "at boot")] == ["OK"] * 3
    # Options of tuning notes that this driver does not have are reported, not set.
    assert verdicts["mlx5_core log_sz_xrq"] == verdicts["mlx5_core log_sz_sq"] == "UNKNOWN"


def test_modprobe_bad(tree: Tree) -> None:
    rdma(tree)
    tree.write("/etc/modprobe.d/mlx5.conf", "options mlx5_core log_sz_xrq=8 prof_sel=2\n")
    tree.printing("modinfo", "prof_sel:profile selector. Valid range 0 - 2 (uint)")
    verdicts = tree.findings("modprobe.sh")
    assert verdicts["ib_uverbs"] == "FAIL"
    assert verdicts["at boot"] == "WARN"
    assert verdicts["mlx5_core log_sz_xrq=8"] == "WARN"
    assert "mlx5_core prof_sel=2" not in verdicts


def test_modprobe_missing(tree: Tree) -> None:
    assert tree.findings("modprobe.sh") == dict.fromkeys(
        ("ib_uverbs", "rdma_ucm", "at boot"), "UNKNOWN"
    )
    assert tree.run("modprobe.sh", "plan").stdout == "modprobe: nothing to change\n"


# --- rdma -----------------------------------------------------------------------------------------


def test_rdma_good(tree: Tree) -> None:
    rdma(tree)
    verdicts = tree.findings("rdma.sh")
    assert set(verdicts.values()) == {"OK"}
    output = tree.run("rdma.sh", "check").stdout
    # Version 2 of an IPv4 address, not the link-local one before it.
    assert "mlx5_0/1 GID: index 3" in output


def test_rdma_bad(tree: Tree) -> None:
    rdma(tree)
    device = "/sys/class/infiniband/mlx5_0"
    tree.write(f"{device}/fw_ver", "22.30.1001\n")
    tree.write(f"{device}/ports/1/state", "1: DOWN\n")
    tree.write(f"{device}/ports/1/gid_attrs/types/3", "IB/RoCE v1\n")
    tree.write(f"{device}/device/current_link_width", "8\n")
    tree.write("/proc/self/limits", "Max locked memory         8388608  8388608  bytes\n")
    tree.write("/sys/bus/pci/devices/0000:41:00.0/vendor", "0x10de\n")
    tree.write("/sys/bus/pci/devices/0000:41:00.0/numa_node", "1\n")
    tree.printing("ethtool", "rx-checksumming: on\ngeneric-receive-offload: off [fixed]")
    tree.tool("lspci", "echo 'ACSCtl: SrcValid+ TransBlk-'; echo 'DevCtl: RlxdOrd- ExtTag+'")
    verdicts = tree.findings("rdma.sh")
    assert verdicts["mlx5_0 firmware"] == "FAIL"
    assert verdicts["mlx5_0/1"] == "WARN"
    assert verdicts["mlx5_0/1 GID"] == "FAIL"
    assert verdicts["mlx5_0 PCIe width"] == "WARN"
    assert verdicts["memlock"] == "FAIL"
    assert verdicts["mlx5_0 and GPU 0000:41:00.0"] == "WARN"
    assert verdicts["ens1 generic-receive-offload"] == "WARN"
    assert verdicts["mlx5_0 relaxed ordering"] == verdicts["PCIe ACS"] == "WARN"


@pytest.mark.parametrize(
    ("firmware", "verdict"),
    [
        ("22.30.1002", "OK"),
        ("22.9.9999", "FAIL"),
        ("22.100.1", "OK"),
        ("16.35.2000", "OK"),  # another family: no minimum is known
    ],
)
def test_rdma_compares_versions_as_numbers(tree: Tree, firmware: str, verdict: str) -> None:
    rdma(tree)
    tree.write("/sys/class/infiniband/mlx5_0/fw_ver", f"{firmware}\n")
    assert tree.findings("rdma.sh")["mlx5_0 firmware"] == verdict


def test_rdma_missing(tree: Tree) -> None:
    assert tree.findings("rdma.sh") == {"devices": "UNKNOWN"}
    tree.write("/sys/bus/pci/devices/0000:81:00.0/vendor", "0x15b3\n")
    assert tree.findings("rdma.sh") == {"devices": "WARN"}


# --- mtu ------------------------------------------------------------------------------------------


PING = """\
for word; do
    case $before in -s) size=$word ;; esac
    before=$word
done
[ "$size" -le LARGEST ]
"""


def _path(tree: Tree, largest: int) -> None:
    rdma(tree)
    tree.printing("ip", "10.0.0.2 dev ens1 src 10.0.0.1 uid 0")
    tree.printing("ibv_devinfo", DEVINFO.format(mtu="4096 (5)"))
    tree.tool("ping", PING.replace("LARGEST", str(largest)))


def test_mtu_good(tree: Tree) -> None:
    _path(tree, 8972)
    verdicts = tree.findings("mtu.sh", "--peer", "10.0.0.2", "--peer", "10.0.0.3")
    assert verdicts == dict.fromkeys(("ens1", "mlx5_0", "10.0.0.2", "10.0.0.3"), "OK")


def test_mtu_bad(tree: Tree) -> None:
    _path(tree, 1472)
    tree.printing("ibv_devinfo", DEVINFO.format(mtu="1024 (3)"))
    ended = tree.run("mtu.sh", "check", "--peer", "10.0.0.2")
    assert ended.returncode == 1
    assert "FAIL mtu mlx5_0: 1024 over ens1 with 9000 (wanted 4096)" in ended.stdout
    assert "FAIL mtu 10.0.0.2: 1500 (wanted 9000): small packets arrive" in ended.stdout


def test_mtu_of_a_peer_that_does_not_answer(tree: Tree) -> None:
    _path(tree, 0)
    ended = tree.run("mtu.sh", "check", "--peer", "10.0.0.9")
    assert ended.returncode == 1
    assert "FAIL mtu 10.0.0.9: no answer" in ended.stdout


def test_mtu_too_small_for_rdma_is_planned_for_a_person(tree: Tree) -> None:
    rdma(tree)
    tree.write("/sys/class/net/ens1/mtu", "1500\n")
    assert tree.findings("mtu.sh")["ens1"] == "WARN"
    before = tree.snapshot()
    assert "ip link set ens1 mtu 9000\n" in tree.run("mtu.sh", "plan").stdout
    assert tree.run("mtu.sh", "apply").returncode == 2
    assert tree.snapshot() == before


def test_mtu_missing(tree: Tree) -> None:
    verdicts = tree.findings("mtu.sh", "--peer", "10.0.0.2")
    assert verdicts == {"interfaces": "UNKNOWN", "10.0.0.2": "UNKNOWN"}


# --- flow control ---------------------------------------------------------------------------------


def _counters(tree: Tree, *samples: str) -> None:
    """ethtool -S prints the next sample at each call, the last one for ever."""
    for number, sample in enumerate(samples):
        (tree.path / f"sample{number}").write_text(sample, encoding="utf-8")
    last = len(samples) - 1
    tree.tool(
        "ethtool",
        f"count=$(cat {tree.path}/calls 2>/dev/null || echo 0)\n"
        f"[ $count -le {last} ] || count={last}\n"
        f"cat {tree.path}/sample$count\necho $((count + 1)) >{tree.path}/calls",
    )


def _counter_text(*, discards: int, paused_us: int) -> str:
    return (
        "NIC statistics:\n     rx_packets: 5\n"
        f"     rx_discards_phy: {discards}\n     rx_prio3_pause_duration: {paused_us}\n"
    )


def _lossless(tree: Tree) -> None:
    rdma(tree)
    tree.variables["SAMPLE_S"] = "1"
    tree.tool("sleep", "exit 0")
    tree.printing(
        "mlnx_qos", MLNX_QOS.format(trust="dscp", enabled="0   0   0   1   0   0   0   0")
    )
    for side in ("np", "rp"):
        tree.write(f"/sys/class/net/ens1/ecn/roce_{side}/enable/3", "1\n")


def test_flow_control_good(tree: Tree) -> None:
    _lossless(tree)
    _counters(tree, _counter_text(discards=7, paused_us=1000))
    verdicts = tree.findings("flow-control.sh")
    assert set(verdicts.values()) == {"OK"}
    assert set(verdicts) == {
        *("ens1 PFC", "ens1 trust", "ens1 ECN np", "ens1 ECN rp"),
        *("ens1 rx_discards_phy", "ens1 pauses"),
    }


@pytest.mark.parametrize(
    ("enabled", "measured"),
    [
        ("0   0   0   0   0   0   0   0", "off (wanted on for 3)"),
        ("1   1   1   1   1   1   1   1", "on for 0 1 2 3 4 5 6 7 (wanted on for 3 alone)"),
        ("0   0   0   0   1   0   0   0", "on for 4 (wanted on for 3 alone)"),
    ],
)
def test_flow_control_pfc_of_other_priorities(tree: Tree, enabled: str, measured: str) -> None:
    _lossless(tree)
    tree.printing("mlnx_qos", MLNX_QOS.format(trust="pcp", enabled=enabled))
    ended = tree.run("flow-control.sh", "check")
    assert ended.returncode == 1
    assert f"FAIL flow-control ens1 PFC: {measured}" in ended.stdout
    assert "WARN flow-control ens1 trust: pcp" in ended.stdout
    plan = tree.run("flow-control.sh", "plan").stdout
    assert "mlnx_qos -i ens1 --trust dscp --pfc 0,0,0,1,0,0,0,0\n" in plan


def test_flow_control_wants_ecn_on_because_dcqcn_needs_the_marks(tree: Tree) -> None:
    _lossless(tree)
    tree.write("/sys/class/net/ens1/ecn/roce_np/enable/3", "0\n")
    ended = tree.run("flow-control.sh", "check")
    assert "FAIL flow-control ens1 ECN np: off (wanted on for priority 3)" in ended.stdout
    assert tree.run("flow-control.sh", "apply", "--yes").returncode == 0
    assert tree.text("/sys/class/net/ens1/ecn/roce_np/enable/3") == "1\n"
    assert tree.findings("flow-control.sh")["ens1 ECN np"] == "OK"


def test_flow_control_counters_that_grow(tree: Tree) -> None:
    _lossless(tree)
    first = _counter_text(discards=7, paused_us=0)
    # The first call only asks whether there are counters.
    _counters(tree, first, first, _counter_text(discards=9, paused_us=250_000))
    ended = tree.run("flow-control.sh", "check")
    assert ended.returncode == 1
    assert "FAIL flow-control ens1 rx_discards_phy: 2 in 1 s" in ended.stdout
    assert "FAIL flow-control ens1 pauses: 25 % of the time" in ended.stdout


def test_flow_control_with_the_kernel_own_tool(tree: Tree) -> None:
    _lossless(tree)
    (tree.bin / "mlnx_qos").unlink()
    tree.tool(
        "dcb",
        f"case $1 in pfc) cat <<'END'\n{DCB_PFC}END\n;; app) echo 'dscp-prio AF31:3' ;; esac",
    )
    verdicts = tree.findings("flow-control.sh")
    assert verdicts["ens1 PFC"] == verdicts["ens1 trust"] == "OK"


def test_flow_control_missing(tree: Tree) -> None:
    assert tree.findings("flow-control.sh") == {"interfaces": "UNKNOWN"}
    rdma(tree)
    (tree.bin / "ethtool").unlink()
    verdicts = tree.findings("flow-control.sh")
    assert set(verdicts.values()) == {"UNKNOWN"}
    assert len(verdicts) == 5


# --- locale ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_locale_good(tree: Tree, distribution: str) -> None:
    tree.write("/etc/os-release", DISTRIBUTIONS[distribution])
    is_debian = distribution in ("debian", "ubuntu")
    tree.write("/etc/default/locale" if is_debian else "/etc/locale.conf", 'LANG="en_US.UTF-8"\n')
    tree.write("/etc/systemd/system.conf", "[Manager]\nDefaultEnvironment=PYTHONUTF8=1\n")
    tree.printing("locale", "C\nC.utf8\nen_US.utf8\nPOSIX")
    tree.printing("python3", "utf-8 utf-8 UTF-8")
    assert set(tree.findings("locale.sh").values()) == {"OK"}
    assert tree.run("locale.sh", "plan").stdout == "locale: nothing to change\n"


def test_locale_bad(tree: Tree) -> None:
    tree.write("/etc/os-release", DISTRIBUTIONS["ubuntu"])
    tree.write("/etc/default/locale", "LANG=zh_CN.GBK\nLC_ALL=zh_CN.GBK\n")
    tree.write("/etc/systemd/system.conf", "[Manager]\nDefaultEnvironment=PYTHONUTF8=0\n")
    tree.printing("locale", "C\nPOSIX\nzh_CN.gbk")
    tree.printing("python3", "ascii ANSI_X3.4-1968 ANSI_X3.4-1968")
    assert tree.findings("locale.sh") == {
        "generated": "FAIL",
        "default": "FAIL",
        "PYTHONUTF8 in a service": "FAIL",
        "python in a service": "FAIL",
    }


def test_locale_that_is_the_default_but_does_not_exist(tree: Tree) -> None:
    tree.write("/etc/locale.conf", "LANG=de_DE.UTF-8\n")
    tree.printing("locale", "C\nC.utf8\nPOSIX")
    verdicts = tree.findings("locale.sh")
    assert verdicts["default"] == "FAIL"
    assert verdicts["generated"] == "WARN"


def test_locale_missing(tree: Tree) -> None:
    verdicts = tree.findings("locale.sh")
    assert verdicts["generated"] == verdicts["python in a service"] == "UNKNOWN"
    assert verdicts["default"] == "WARN"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "UnicodeDecodeError: 'gbk' codec can't decode byte 0x94 in position 10",
            ("as if it were gbk", "0x94", "GBK"),
        ),
        (
            "UnicodeDecodeError: 'ascii' codec can't decode byte 0xc2 in position 0",
            ("as if it were ascii", "0xc2", "no UTF-8 locale"),
        ),
    ],
)
def test_locale_explains_the_two_classic_errors(
    tree: Tree, line: str, words: tuple[str, ...]
) -> None:
    ended = tree.run("locale.sh", "explain", line)
    assert ended.returncode == 0
    assert [word for word in (*words, "PYTHONUTF8=1") if word not in ended.stdout] == []


def test_locale_does_not_explain_what_it_does_not_know(tree: Tree) -> None:
    ended = tree.run("locale.sh", "explain", "Segmentation fault")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "no encoding error" in ended.stderr


# --- packages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_packages_good_and_bad(tree: Tree, distribution: str) -> None:
    tree.write("/etc/os-release", DISTRIBUTIONS[distribution])
    query = "dpkg-query" if distribution in ("debian", "ubuntu") else "rpm"
    tree.tool(query, "echo install ok installed")
    verdicts = tree.findings("packages.sh")
    assert verdicts.pop("mlnx_qos") == "UNKNOWN"
    assert set(verdicts.values()) == {"OK"}
    assert ("glibc-langpack-en" in verdicts) == (distribution == "rocky9")
    tree.tool(query, "exit 1")
    verdicts = tree.findings("packages.sh")
    assert verdicts["ethtool"] == verdicts["rdma-core"] == "WARN"


def test_packages_missing(tree: Tree) -> None:
    assert tree.findings("packages.sh")["distribution"] == "UNKNOWN"
    tree.write("/etc/os-release", DISTRIBUTIONS["rocky9"])
    assert set(tree.findings("packages.sh").values()) == {"UNKNOWN"}


# --- system ---------------------------------------------------------------------------------------


def _write_system(tree: Tree, *, is_good: bool) -> None:
    def one(good: str, bad: str) -> str:
        return (good if is_good else bad) + "\n"

    tree.write(
        "/sys/devices/system/clocksource/clocksource0/current_clocksource", one("tsc", "hpet")
    )
    for cpu in range(2):
        tree.write(
            f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor",
            one("performance", "powersave"),
        )
    tree.write("/sys/fs/cgroup/cpu.stat", one("nr_periods 9\nnr_throttled 0", "nr_throttled 7"))
    tree.write("/sys/fs/cgroup/memory.max", one("max", "8589934592"))
    tree.write("/proc/swaps", "Filename Type Size Used Priority\n" + one("", "/swap file 9 0 -2"))
    tree.write(
        "/sys/kernel/mm/transparent_hugepage/defrag",
        one("always defer defer+madvise [madvise] never", "[always] madvise never"),
    )
    tree.write(
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
        one("always within_size [advise] never deny force", "always advise [never] deny force"),
    )
    files = one("1048576", "1024").strip()
    tree.write("/proc/self/limits", f"Max open files            {files} 1048576 files\n")
    tree.write("/proc/77/comm", one("irqbalance", "bash"))
    tree.printing("timedatectl", one("System clock synchronized: yes", "NTP synchronized: no"))


def test_system_good(tree: Tree) -> None:
    _write_system(tree, is_good=True)
    verdicts = tree.findings("system.sh")
    assert set(verdicts.values()) == {"OK"}
    assert len(verdicts) == 9


def test_system_bad(tree: Tree) -> None:
    _write_system(tree, is_good=False)
    rdma(tree)
    tree.write("/proc/self/limits", "Max open files            1024 1048576 files\n")
    (tree.root / "dev").mkdir()
    tree.write("/dev/nvidia0", "")
    verdicts = tree.findings("system.sh")
    assert verdicts == {
        **dict.fromkeys(("clock source", "clock sync", "CPU governor", "CPU quota"), "WARN"),
        **dict.fromkeys(("swap", "huge pages, defrag", "memory limit", "open files"), "WARN"),
        "huge pages, shared memory": "WARN",
        **{"irqbalance": "UNKNOWN", "/dev/infiniband": "FAIL", "GPU driver": "FAIL"},
    }


def test_system_missing(tree: Tree) -> None:
    assert set(tree.findings("system.sh").values()) == {"UNKNOWN"}
