"""The system check on made machines: good, bad, missing."""

import pytest

from ops.node.change import FileChange, ValueChange
from ops.node.checks.system import SHMEM_PATH, TMPFILES_PATH, TMPFILES_TEXT, changes, check
from ops.node.facts import RecordedFacts
from ops.node.finding import Finding, Verdict
from tests.ops.node.network_facts import (
    LIMITS,
    LINK,
    NETDEV,
    PORT,
    Machine,
    captured,
    edge_box,
    found,
    printed,
    roce_node,
    verdicts,
)

CLOCK = "/sys/devices/system/clocksource/clocksource0"
GPU_QUERY = "nvidia-smi --query-gpu=index,name,driver_version,pci.bus_id --format=csv,noheader"


@pytest.fixture
def box() -> Machine:
    return edge_box()


def judged(machine: Machine, subject: str) -> Finding:
    return found(check(machine.facts), subject)


@pytest.mark.parametrize("machine", [edge_box(), roce_node()])
def test_a_good_machine_is_good_in_everything(machine: Machine) -> None:
    assert verdicts(check(machine.facts)) == {Verdict.OK}
    assert changes(machine.facts) == []


def test_a_machine_that_tells_nothing_does_not_fail() -> None:
    findings = check(RecordedFacts())
    assert verdicts(findings) <= {Verdict.OK, Verdict.UNKNOWN}
    assert changes(RecordedFacts()) == []


class TestClock:
    @pytest.mark.parametrize("name", ["tsc", "kvm-clock", "arch_sys_counter"])
    def test_a_fast_source_is_right(self, box: Machine, name: str) -> None:
        box.files[f"{CLOCK}/current_clocksource"] = f"{name}\n"
        assert judged(box, "clock source").verdict is Verdict.OK

    def test_a_slow_source_is_warned_of_with_a_better_one(self, box: Machine) -> None:
        box.files[f"{CLOCK}/current_clocksource"] = "hpet\n"
        box.files[f"{CLOCK}/available_clocksource"] = "hpet acpi_pm tsc \n"
        finding = judged(box, "clock source")
        assert (finding.verdict, finding.cure) == (
            Verdict.WARN,
            f"echo tsc > {CLOCK}/current_clocksource",
        )

    def test_a_source_without_a_better_one_points_to_the_kernels_log(self, box: Machine) -> None:
        box.files[f"{CLOCK}/current_clocksource"] = "acpi_pm\n"
        assert "dmesg" in judged(box, "clock source").cure

    def test_unreadable_is_unknown(self, box: Machine) -> None:
        box.remove(CLOCK)
        assert judged(box, "clock source").verdict is Verdict.UNKNOWN

    @pytest.mark.parametrize(
        ("command", "said", "verdict"),
        [
            ("timedatectl", "System clock synchronized: yes\n", Verdict.OK),
            ("timedatectl", "     NTP enabled: yes\nNTP synchronized: no\n", Verdict.WARN),
            ("chronyc -n tracking", "Leap status     : Normal\n", Verdict.OK),
            ("chronyc -n tracking", "Leap status     : Not synchronised\n", Verdict.WARN),
            ("adjtimex --print", "       status: 8193\n", Verdict.OK),
            ("adjtimex --print", "       status: 64\n", Verdict.WARN),
            ("timedatectl", "Failed to create bus connection: Host is down\n", Verdict.UNKNOWN),
        ],
    )
    def test_synchronization(self, box: Machine, command: str, said: str, verdict: Verdict) -> None:
        box.commands = {command: printed(said)}
        assert judged(box, "clock synchronization").verdict is verdict

    def test_one_keeper_that_follows_a_source_is_enough(self, box: Machine) -> None:
        box.commands = {
            "timedatectl": printed("System clock synchronized: no\n"),
            "chronyc -n tracking": printed("Leap status     : Normal\n"),
        }
        assert judged(box, "clock synchronization").measured == "synchronized (chronyc)"


class TestCpu:
    def test_performance_is_right_and_powersave_is_warned_of(self, box: Machine) -> None:
        path = "/sys/devices/system/cpu/cpu{}/cpufreq/scaling_governor"
        box.files[path.format(0)] = box.files[path.format(1)] = "performance\n"
        assert judged(box, "CPU governor").verdict is Verdict.OK
        box.files[path.format(1)] = "powersave\n"
        finding = judged(box, "CPU governor")
        assert (finding.verdict, finding.measured) == (Verdict.WARN, "performance, powersave")

    def test_no_governor_is_no_fault(self, box: Machine) -> None:
        assert judged(box, "CPU governor").measured == "none"


class TestInterrupts:
    @pytest.fixture
    def node(self) -> Machine:
        node = roce_node()
        for number, cpus in ((120, "0"), (121, "1"), (122, "2"), (123, "3")):
            node.files[f"{NETDEV}/device/msi_irqs/{number}"] = "msix\n"
            node.files[f"/proc/irq/{number}/smp_affinity_list"] = f"{cpus}\n"
        return node

    def test_spread_on_the_nics_node_is_right(self, node: Machine) -> None:
        node.commands["pgrep -x irqbalance"] = printed("812\n")
        finding = judged(node, "ens1f0 interrupts")
        assert (finding.verdict, finding.measured) == (
            Verdict.OK,
            "4 on 4 CPUs, irqbalance runs",
        )

    def test_all_on_one_cpu_is_warned_of(self, node: Machine) -> None:
        for number in (120, 121, 122, 123):
            node.files[f"/proc/irq/{number}/effective_affinity_list"] = "5\n"
        finding = judged(node, "ens1f0 interrupts")
        assert (finding.verdict, finding.measured) == (
            Verdict.WARN,
            "4 on 1 CPUs, irqbalance does not run",
        )

    def test_the_other_socket_is_warned_of(self, node: Machine) -> None:
        node.files["/proc/irq/123/smp_affinity_list"] = "40-41\n"
        finding = judged(node, "ens1f0 interrupts")
        assert (finding.verdict, finding.reason[:17]) == (Verdict.WARN, "2 of the CPUs are")

    def test_a_nic_with_one_queue_has_nothing_to_spread(self, node: Machine) -> None:
        node.remove(f"{NETDEV}/device/msi_irqs/12")
        assert "ens1f0 interrupts" not in {finding.subject for finding in check(node.facts)}


class TestMemory:
    def test_swap_in_use_is_warned_of(self, box: Machine) -> None:
        box.files["/proc/swaps"] = (
            "Filename\tType\tSize\tUsed\tPriority\n/dev/zram0 partition\t4194300\t51200\t100\n"
        )
        finding = judged(box, "swap")
        assert (finding.verdict, finding.measured) == (Verdict.WARN, "1 areas, 50 MiB used")

    def test_swap_that_is_not_used_is_right(self, box: Machine) -> None:
        box.files["/proc/swaps"] = "Filename\n/swapfile file\t4194300\t0\t-2\n"
        assert judged(box, "swap").verdict is Verdict.OK

    def test_unreadable_swap_is_unknown(self, box: Machine) -> None:
        del box.files["/proc/swaps"]
        assert judged(box, "swap").verdict is Verdict.UNKNOWN

    def test_huge_pages_that_are_off_are_warned_of(self, box: Machine) -> None:
        box.files["/sys/kernel/mm/transparent_hugepage/enabled"] = "always madvise [never]\n"
        assert judged(box, "transparent huge pages").verdict is Verdict.WARN

    def test_shared_memory_without_huge_pages_is_warned_of_and_changed(self, box: Machine) -> None:
        box.files[SHMEM_PATH] = "always within_size advise [never] deny force\n"
        finding = judged(box, "huge pages of shared memory")
        assert (finding.verdict, finding.measured) == (Verdict.WARN, "never")
        file, value = changes(box.facts)
        assert isinstance(value, ValueChange)
        assert isinstance(file, FileChange)
        assert (value.path, value.value) == (SHMEM_PATH, "advise")
        assert (file.path, file.text) == (TMPFILES_PATH, TMPFILES_TEXT)
        assert f"w {SHMEM_PATH} - - - - advise" in file.text

    def test_after_the_change_nothing_is_to_change(self, box: Machine) -> None:
        box.files[TMPFILES_PATH] = TMPFILES_TEXT
        assert changes(box.facts) == []

    def test_a_kernel_without_the_choice_is_left_alone(self, box: Machine) -> None:
        box.files[SHMEM_PATH] = "[never]\n"
        assert changes(box.facts) == []

    def test_kernels_without_huge_pages_are_unknown(self, box: Machine) -> None:
        box.remove("/sys/kernel/mm")
        assert judged(box, "huge pages of shared memory").verdict is Verdict.UNKNOWN


class TestLimits:
    @pytest.mark.parametrize(
        ("files", "verdict"),
        [("unlimited", Verdict.OK), (65536, Verdict.OK), (1024, Verdict.WARN)],
    )
    def test_open_files(self, box: Machine, files: object, verdict: Verdict) -> None:
        box.files["/proc/self/limits"] = LIMITS.format(files=files, locked=1)
        assert judged(box, "open files of this shell").verdict is verdict

    def test_unreadable_limits_are_unknown(self, box: Machine) -> None:
        del box.files["/proc/self/limits"]
        assert judged(box, "open files of this shell").verdict is Verdict.UNKNOWN


class TestControlGroup:
    def test_version_2_takes_the_tightest_on_the_way_up(self, box: Machine) -> None:
        group = "/sys/fs/cgroup/system.slice/pdserve.service"
        box.files["/proc/self/cgroup"] = "0::/system.slice/pdserve.service\n"
        box.files["/sys/fs/cgroup/cgroup.controllers"] = "cpu memory\n"
        box.files[f"{group}/memory.max"] = "max\n"
        box.files[f"{group}/cpu.max"] = "max 100000\n"
        box.files["/sys/fs/cgroup/system.slice/memory.max"] = f"{8 << 30}\n"
        box.files["/sys/fs/cgroup/system.slice/cpu.max"] = "250000 100000\n"
        assert judged(box, "memory of the control group").measured == "8.0 GiB (version 2)"
        assert judged(box, "CPU of the control group").measured == "2.5 CPUs, throttled 0 times"

    def test_version_1(self, box: Machine) -> None:
        box.files["/proc/self/cgroup"] = "5:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n"
        # In a container the group is mounted as the root.
        box.files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = f"{1 << 30}\n"
        box.files["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "50000\n"
        box.files["/sys/fs/cgroup/cpu/cpu.cfs_period_us"] = "100000\n"
        box.files["/sys/fs/cgroup/cpu/cpu.stat"] = "nr_periods 90\nnr_throttled 12\n"
        memory, cpu = (judged(box, f"{what} of the control group") for what in ("memory", "CPU"))
        assert (memory.verdict, memory.measured) == (Verdict.WARN, "1.0 GiB (version 1)")
        assert (cpu.verdict, cpu.measured) == (Verdict.WARN, "0.5 CPUs, throttled 12 times")

    def test_no_limit_is_not_worth_a_line(self, box: Machine) -> None:
        box.files["/proc/self/cgroup"] = "5:cpu,cpuacct:/\n4:memory:/\n"
        box.files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712\n"
        box.files["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "-1\n"
        box.files["/sys/fs/cgroup/cpu/cpu.cfs_period_us"] = "100000\n"
        assert not any("control group" in finding.subject for finding in check(box.facts))


class TestSharedMemoryFolder:
    @pytest.mark.parametrize(
        ("options", "verdict", "measured"),
        [
            ("rw,nosuid,nodev", Verdict.OK, "half of the memory"),
            ("rw,size=24683656k", Verdict.OK, "24105 MiB"),
            ("rw,nosuid,size=65536k,inode64", Verdict.WARN, "64 MiB"),
            ("rw,size=8g", Verdict.OK, "8192 MiB"),
            ("rw,size=67108864", Verdict.WARN, "64 MiB"),
        ],
    )
    def test_size(self, box: Machine, options: str, verdict: Verdict, measured: str) -> None:
        box.files["/proc/mounts"] = f"tmpfs / tmpfs rw 0 0\nshm /dev/shm tmpfs {options} 0 0\n"
        finding = judged(box, "/dev/shm")
        assert (finding.verdict, finding.measured) == (verdict, measured)

    def test_not_mounted_is_unknown(self, box: Machine) -> None:
        box.files["/proc/mounts"] = "proc /proc proc rw 0 0\n"
        assert judged(box, "/dev/shm").verdict is Verdict.UNKNOWN


class TestContainer:
    @pytest.mark.parametrize(
        ("path", "text", "kind"),
        [
            ("/.dockerenv", "", "docker"),
            ("/run/.containerenv", 'engine="podman-4.3.1"\n', "podman"),
            ("/run/systemd/container", "systemd-nspawn\n", "systemd-nspawn"),
            ("/proc/1/cgroup", "1:name=systemd:/kubepods/burstable/pod1/a\n", "kubernetes"),
            ("/proc/1/cgroup", "0::/docker/0123\n", "docker"),
        ],
    )
    def test_the_kind_is_told(self, box: Machine, path: str, text: str, kind: str) -> None:
        box.files[path] = text
        assert judged(box, "container").measured == kind

    def test_kubernetes_is_told_by_its_variable(self, box: Machine) -> None:
        box.variables["KUBERNETES_SERVICE_HOST"] = "10.96.0.1"
        assert judged(box, "container").measured == "kubernetes"

    def test_outside_of_one_there_is_no_line(self, box: Machine) -> None:
        assert "container" not in {finding.subject for finding in check(box.facts)}

    def test_rdma_that_was_not_passed_on_is_warned_of(self) -> None:
        node = roce_node()
        node.files["/.dockerenv"] = ""
        del node.folders["/dev/infiniband"]
        finding = judged(node, "RDMA in the container")
        assert (finding.verdict, "--device=/dev/infiniband" in finding.cure) == (Verdict.WARN, True)

    def test_a_port_whose_interface_is_elsewhere_is_warned_of(self) -> None:
        node = roce_node()
        node.files["/.dockerenv"] = ""
        node.commands["rdma link"] = printed("link mlx5_0/1 state ACTIVE physical_state LINK_UP\n")
        node.commands["rdma system show"] = printed("netns shared copy-on-fork on\n")
        node.remove(f"{PORT}/gid_attrs/ndevs")
        finding = judged(node, "RDMA and network namespace")
        assert (finding.verdict, finding.measured) == (
            Verdict.WARN,
            "an RDMA port without its interface, namespaces shared",
        )


class TestGpu:
    def test_no_gpu_is_not_worth_a_line(self, box: Machine) -> None:
        assert not any("GPU" in finding.subject for finding in check(box.facts))

    def test_gpus_and_their_way_to_the_nic(self) -> None:
        node = roce_node()
        node.commands[GPU_QUERY] = printed(
            "0, NVIDIA H100 80GB HBM3, 550.54.15, 00000000:17:00.0\n"
            "1, NVIDIA H100 80GB HBM3, 550.54.15, 00000000:B3:00.0\n"
        )
        node.commands["nvidia-smi topo -m"] = printed(captured("nvidia_smi_topo-550.txt"))
        assert judged(node, "GPU").measured == "2 x NVIDIA H100 80GB HBM3, driver 550.54.15"
        finding = judged(node, "GPU and mlx5_0")
        assert (finding.verdict, finding.measured) == (Verdict.OK, "GPU0 PIX, GPU1 SYS")

    def test_gpus_that_are_all_on_the_other_socket_are_warned_of(self) -> None:
        node = roce_node()
        node.commands[GPU_QUERY] = printed("0, NVIDIA L40S, 535.161.08, 00000000:B3:00.0\n")
        text = captured("nvidia_smi_topo-550.txt").replace("PIX", "SYS")
        node.commands["nvidia-smi topo -m"] = printed(text)
        assert judged(node, "GPU and mlx5_0").verdict is Verdict.WARN

    def test_a_driver_that_does_not_answer_is_warned_of(self, box: Machine) -> None:
        box.commands[GPU_QUERY] = printed(
            "Failed to initialize NVML: Driver/library version mismatch\n", exit_code=18
        )
        finding = judged(box, "GPU")
        assert (finding.verdict, finding.measured[:30]) == (
            Verdict.WARN,
            "Failed to initialize NVML: Dri",
        )

    def test_a_driver_without_nvidia_smi_is_unknown(self, box: Machine) -> None:
        box.files["/proc/driver/nvidia/version"] = "NVRM version: NVIDIA UNIX x86_64\n"
        assert judged(box, "GPU").verdict is Verdict.UNKNOWN


def test_all_findings_say_why_and_where_from() -> None:
    node = roce_node()
    node.remove(LINK)
    for finding in check(node.facts):
        assert finding.check == "system"
        assert finding.reason
        assert finding.source
