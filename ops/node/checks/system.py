"""System: clock, CPU, interrupts, memory, limits, containers, GPUs.

Nothing of it stops a service; each can make one slow or end it later, without a word that points
here.
"""

import re
from typing import Final

from ops.node.cgroup import read_cgroup_limits
from ops.node.change import Change, FileChange, ValueChange
from ops.node.container import container_kind
from ops.node.facts import Facts
from ops.node.finding import Finding, Verdict
from ops.node.formats.clock_sync import parse_adjtimex, parse_chronyc, parse_timedatectl
from ops.node.formats.limits import parse_limits
from ops.node.formats.nvidia_smi import GPU_QUERY, parse_gpus, parse_topology
from ops.node.formats.rdma import parse_netns_mode
from ops.node.rdma_ports import CLASS_FOLDER, read_rdma_ports

CHECK: Final = "system"

THP_FOLDER: Final = "/sys/kernel/mm/transparent_hugepage"
SHMEM_PATH: Final = f"{THP_FOLDER}/shmem_enabled"
SHMEM_VALUE: Final = "advise"
TMPFILES_PATH: Final = "/etc/tmpfiles.d/pdserve-huge-pages.conf"
TMPFILES_TEXT: Final = f"""\
# pdserve: huge pages for shared memory whose program asks for them (mapped KV pools do).
w {SHMEM_PATH} - - - - {SHMEM_VALUE}
"""

MIN_OPEN_FILES: Final = 65536
MIN_SHM_NBYTES: Final = 1 << 30
MIN_CGROUP_MEMORY_NBYTES: Final = 2 << 30

_CPU_FOLDER: Final = "/sys/devices/system/cpu"
_CLOCK_FOLDER: Final = "/sys/devices/system/clocksource/clocksource0"
# Read from the CPU itself, without a trap into the hypervisor or a device.
_GOOD_CLOCKS: Final = (
    "tsc",
    "arch_sys_counter",
    "timebase",
    "stp",
    "kvm-clock",
    "hyperv_clocksource_tsc_page",
)
_KIB: Final = 1024
_GIB: Final = 1 << 30

_THP_SOURCE: Final = "Linux Documentation/admin-guide/mm/transhuge.rst"


def check(facts: Facts) -> list[Finding]:
    """All findings; those about hardware that is not there are left out."""
    return [
        _clock_source(facts),
        _clock_sync(facts),
        _governor(facts),
        *_interrupts(facts),
        _swap(facts),
        _huge_pages(facts),
        _shared_huge_pages(facts),
        *_limits(facts),
        *_cgroup(facts),
        _shared_memory_folder(facts),
        *_container(facts),
        *_gpus(facts),
    ]


def changes(facts: Facts) -> list[Change]:
    """Huge pages for shared memory, now and after a reboot, where the kernel has them."""
    choices = facts.text(SHMEM_PATH)
    if choices is None or SHMEM_VALUE not in re.findall(r"\w+", choices):
        return []
    if _chosen(choices) in _SHMEM_GOOD:
        return []
    reason = "Mapped KV pools are shared memory, and have huge pages only where this allows it."
    # The file first: if this ends in between, the value still asks for the rest.
    return [
        FileChange(TMPFILES_PATH, TMPFILES_TEXT, f"{reason} The file makes it last."),
        ValueChange(SHMEM_PATH, SHMEM_VALUE, reason),
    ]


_SHMEM_GOOD: Final = ("advise", "always", "within_size", "force")


def _chosen(text: str | None) -> str:
    """Of "always [madvise] never"."""
    match = re.search(r"\[([\w+-]+)\]", text or "")
    return match[1] if match else ""


def _word(facts: Facts, path: str) -> str:
    return (facts.text(path) or "").strip()


def _clock_source(facts: Facts) -> Finding:
    current = _word(facts, f"{_CLOCK_FOLDER}/current_clocksource")
    available = _word(facts, f"{_CLOCK_FOLDER}/available_clocksource").split()
    source = "Linux Documentation/timers/timekeeping.rst"
    if not current:
        return Finding(
            *(CHECK, "clock source", Verdict.UNKNOWN, "", "tsc"),
            *(f"{_CLOCK_FOLDER} cannot be read.", source),
        )
    is_right = current in _GOOD_CLOCKS
    better = [name for name in available if name in _GOOD_CLOCKS]
    return Finding(
        CHECK,
        "clock source",
        Verdict.OK if is_right else Verdict.WARN,
        current,
        "one that is read without leaving the program (tsc)",
        "Every frame and every step read the clock; a slow source costs microseconds each time.",
        source,
        ""
        if is_right
        else f"echo {better[0]} > {_CLOCK_FOLDER}/current_clocksource"
        if better
        else "the kernel gave tsc up: dmesg | grep -i tsc",
    )


def _clock_sync(facts: Facts) -> Finding:
    wanted = "synchronized"
    asked = (
        (("timedatectl",), parse_timedatectl),
        (("chronyc", "-n", "tracking"), parse_chronyc),
        (("adjtimex", "--print"), parse_adjtimex),
    )
    source = "timedatectl(1), chronyc(1), adjtimex(8)"
    reason = (
        "Logs and metrics of several hosts are compared by their times; the services themselves "
        "never compare clocks."
    )
    answers = {
        command[0]: answer
        for command, parse in asked
        if (answer := parse(facts.run(*command).stdout)) is not None
    }
    if not answers:
        return Finding(
            *(CHECK, "clock synchronization", Verdict.UNKNOWN, "", wanted),
            "Neither timedatectl nor chronyc nor adjtimex answers here (in a container the host "
            "keeps the clock).",
            source,
        )
    good = [name for name, answer in answers.items() if answer]
    return Finding(
        CHECK,
        "clock synchronization",
        Verdict.OK if good else Verdict.WARN,
        f"{'' if good else 'not '}synchronized ({(good or list(answers))[0]})",
        wanted,
        reason,
        source,
        "" if good else "apt install chrony or dnf install chrony; systemctl enable --now chronyd",
    )


def _governor(facts: Facts) -> Finding:
    governors = {
        governor
        for name in facts.names(_CPU_FOLDER)
        if re.fullmatch(r"cpu\d+", name)
        if (governor := _word(facts, f"{_CPU_FOLDER}/{name}/cpufreq/scaling_governor"))
    }
    source = "Linux Documentation/admin-guide/pm/cpufreq.rst"
    if not governors:
        return Finding(
            *(CHECK, "CPU governor", Verdict.OK, "none", "performance"),
            "The kernel does not choose the frequency: a virtual machine, or the firmware does.",
            source,
        )
    is_right = governors == {"performance"}
    return Finding(
        CHECK,
        "CPU governor",
        Verdict.OK if is_right else Verdict.WARN,
        ", ".join(sorted(governors)),
        "performance",
        "A core that sleeps between two packets needs up to a millisecond to be fast again.",
        source,
        ""
        if is_right
        else "cpupower frequency-set -g performance (on battery or a small board: leave it)",
    )


def _interrupts(facts: Facts) -> list[Finding]:
    """Of NICs with several queues: spread over CPUs, and on the NIC's node."""
    findings = []
    daemon = facts.run("pgrep", "-x", "irqbalance")
    has_daemon = daemon.is_ok and bool(daemon.stdout.strip())
    with_rdma = {port.netdev for port in read_rdma_ports(facts) if port.carries_roce}
    for netdev in facts.names("/sys/class/net"):
        folder = f"/sys/class/net/{netdev}/device"
        numbers = [name for name in facts.names(f"{folder}/msi_irqs") if name.isdecimal()]
        # One for link changes and one for a queue: nothing to spread.
        if len(numbers) < 3:
            continue
        placed = {
            cpus
            for number in numbers
            if (
                cpus := _word(facts, f"/proc/irq/{number}/effective_affinity_list")
                or _word(facts, f"/proc/irq/{number}/smp_affinity_list")
            )
        }
        if not placed:
            continue
        node = _word(facts, f"{folder}/numa_node")
        local = _cpus(_word(facts, f"/sys/devices/system/node/node{node}/cpulist"))
        used = {cpu for cpus in placed for cpu in _cpus(cpus)}
        far = used - local if local and netdev in with_rdma else set()
        if len(used) == 1:
            verdict = Verdict.WARN
            reason = "All queues interrupt one CPU, which is the limit of the link."
        elif far:
            verdict = Verdict.WARN
            reason = f"{len(far)} of the CPUs are on the other socket than the NIC."
        else:
            verdict, reason = Verdict.OK, "Queues are served by several CPUs."
        findings.append(
            Finding(
                CHECK,
                f"{netdev} interrupts",
                verdict,
                f"{len(numbers)} on {len(used)} CPUs, irqbalance "
                + ("runs" if has_daemon else "does not run"),
                f"spread over the CPUs of node {node}" if local else "spread over several CPUs",
                reason,
                "Linux Documentation/core-api/irq/irq-affinity.rst",
                ""
                if verdict is Verdict.OK
                else "systemctl enable --now irqbalance, or set_irq_affinity_bynode.sh "
                f"{node or 0} {netdev} of mlnx-tools",
            )
        )
    return findings


def _cpus(text: str) -> set[int]:
    """Of "0-3,8"."""
    cpus: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _swap(facts: Facts) -> Finding:
    areas = [line.split() for line in (facts.text("/proc/swaps") or "").splitlines()[1:]]
    used_kib = sum(int(fields[3]) for fields in areas if len(fields) > 3 and fields[3].isdecimal())
    source = "proc_swaps(5)"
    if facts.text("/proc/swaps") is None:
        return Finding(
            *(CHECK, "swap", Verdict.UNKNOWN, "", "none used"),
            *("/proc/swaps cannot be read.", source),
        )
    return Finding(
        CHECK,
        "swap",
        Verdict.WARN if used_kib else Verdict.OK,
        f"{len(areas)} areas, {used_kib // _KIB} MiB used" if areas else "none",
        "none used",
        "A page of the KV pool that was swapped out stops a decode step for milliseconds.",
        source,
        "a smaller pool, or vm.swappiness=1; swapoff -a once memory is free" if used_kib else "",
    )


def _huge_pages(facts: Facts) -> Finding:
    text = facts.text(f"{THP_FOLDER}/enabled")
    chosen = _chosen(text)
    is_right = chosen in ("madvise", "always")
    return Finding(
        CHECK,
        "transparent huge pages",
        Verdict.UNKNOWN if text is None else Verdict.OK if is_right else Verdict.WARN,
        chosen,
        "madvise",
        "The kernel has none."
        if text is None
        else "The KV pool asks for huge pages; without them first touches and copies are slower.",
        _THP_SOURCE,
        "" if is_right or text is None else f"echo madvise > {THP_FOLDER}/enabled",
    )


def _shared_huge_pages(facts: Facts) -> Finding:
    text = facts.text(SHMEM_PATH)
    chosen = _chosen(text)
    is_right = chosen in _SHMEM_GOOD
    return Finding(
        CHECK,
        "huge pages of shared memory",
        Verdict.UNKNOWN if text is None else Verdict.OK if is_right else Verdict.WARN,
        chosen,
        SHMEM_VALUE,
        "This kernel has none (before 4.8, or without transparent huge pages)."
        if text is None
        else "A mapped KV pool is a memfd, which is shared memory: it has huge pages only where "
        "this allows it.",
        _THP_SOURCE,
        "" if is_right or text is None else f"echo {SHMEM_VALUE} > {SHMEM_PATH} (pdctl node plan)",
    )


def _limits(facts: Facts) -> list[Finding]:
    """Open files; what is locked is the concern of RDMA."""
    source = "getrlimit(2), limits.conf(5), systemd.exec(5)"
    limit = parse_limits(facts.text("/proc/self/limits") or "").get("Max open files")
    wanted = f"{MIN_OPEN_FILES} or more"
    if limit is None:
        return [
            Finding(
                *(CHECK, "open files of this shell", Verdict.UNKNOWN, "", wanted),
                *("/proc/self/limits cannot be read.", source),
            )
        ]
    soft = limit.soft
    is_right = soft is None or soft >= MIN_OPEN_FILES
    hard = "unlimited" if limit.hard is None else str(limit.hard)
    return [
        Finding(
            CHECK,
            "open files of this shell",
            Verdict.OK if is_right else Verdict.WARN,
            f"{'unlimited' if soft is None else soft} (at most {hard})",
            wanted,
            "Each stream is a socket, and each mapped region a descriptor.",
            source,
            ""
            if is_right
            else f"ulimit -n {MIN_OPEN_FILES}; LimitNOFILE={MIN_OPEN_FILES} in a unit",
        )
    ]


def _cgroup(facts: Facts) -> list[Finding]:
    limits = read_cgroup_limits(facts)
    source = "Linux Documentation/admin-guide/cgroup-v2.rst"
    findings = []
    memory = limits.memory_nbytes
    if memory is not None:
        is_right = memory >= MIN_CGROUP_MEMORY_NBYTES
        findings.append(
            Finding(
                CHECK,
                "memory of the control group",
                Verdict.OK if is_right else Verdict.WARN,
                f"{memory / _GIB:.1f} GiB (version {limits.version})",
                "room for the model, the KV pool and what else runs in it",
                "Shared memory and mapped files count; beyond it the kernel kills the worker.",
                source,
                "" if is_right else "raise MemoryMax= of the unit or the container's limit",
            )
        )
    if limits.num_cpus is not None:
        is_right = limits.num_cpus >= 1 and not limits.num_throttled
        findings.append(
            Finding(
                CHECK,
                "CPU of the control group",
                Verdict.OK if is_right else Verdict.WARN,
                f"{limits.num_cpus:g} CPUs, throttled {limits.num_throttled} times",
                "at least 1, never throttled",
                "A group that used up its time stands still for the rest of each 100 ms: latency "
                "jumps while the CPU looks idle.",
                "Linux Documentation/scheduler/sched-bwc.rst",
                "" if is_right else "whole CPUs by --cpus and cpuset instead of a quota",
            )
        )
    return findings


def _shared_memory_folder(facts: Facts) -> Finding:
    lines = [line.split() for line in (facts.text("/proc/mounts") or "").splitlines()]
    options = [fields[3] for fields in lines if len(fields) > 3 and fields[1] == "/dev/shm"]
    source = "tmpfs(5), shm_overview(7)"
    wanted = f"{MIN_SHM_NBYTES // _GIB} GiB or more"
    if not options:
        return Finding(
            *(CHECK, "/dev/shm", Verdict.UNKNOWN, "not mounted", wanted),
            "KV files that are mapped from there need another folder; mapped pools do not.",
            *(source, "mount -t tmpfs tmpfs /dev/shm"),
        )
    # The last mount of a place is the one that is seen.
    size_kib = _size_kib(options[-1])
    is_right = size_kib is None or size_kib * _KIB >= MIN_SHM_NBYTES
    return Finding(
        CHECK,
        "/dev/shm",
        Verdict.OK if is_right else Verdict.WARN,
        "half of the memory" if size_kib is None else f"{size_kib // _KIB} MiB",
        wanted,
        "KV files that are written there end with a bus error when it is full; mapped pools are "
        "memfds and do not count.",
        source,
        "" if is_right else "docker run --shm-size=8g; in Kubernetes an emptyDir of medium Memory",
    )


def _size_kib(options: str) -> int | None:
    match = re.search(r"\bsize=(\d+)([kmg]?)", options)
    if match is None:
        return None
    factor = {"": 1 / _KIB, "k": 1, "m": _KIB, "g": _KIB * _KIB}[match[2]]
    return int(int(match[1]) * factor)


def _container(facts: Facts) -> list[Finding]:
    kind = container_kind(facts)
    if not kind:
        return []
    devices = facts.names(CLASS_FOLDER)
    source = "podman-run(1), docker-run(1); rdma-system(8)"
    findings = [
        Finding(
            *(CHECK, "container", Verdict.OK, kind, "a container or none"),
            "Settings of the host (sysctl, modprobe, governor, PFC) can be seen here, and only the "
            "host can change most of them.",
            source,
        )
    ]
    if devices and not facts.names("/dev/infiniband"):
        findings.append(
            Finding(
                *(CHECK, "RDMA in the container", Verdict.WARN, "no /dev/infiniband", "passed on"),
                f"The host has {', '.join(devices)}, and this container cannot open it: KV goes "
                "over TCP.",
                source,
                "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1; in "
                "Kubernetes the RDMA device plugin",
            )
        )
    if devices and any(not port.netdev for port in read_rdma_ports(facts)):
        mode = parse_netns_mode(facts.run("rdma", "system", "show").stdout)
        findings.append(
            Finding(
                CHECK,
                "RDMA and network namespace",
                Verdict.WARN,
                f"an RDMA port without its interface, namespaces {mode or 'unknown'}",
                "the interface of the port in the same namespace",
                "A GID whose interface is in another network namespace cannot be used.",
                source,
                "the host's network (--network=host), or move the interface into the container",
            )
        )
    return findings


def _gpus(facts: Facts) -> list[Finding]:
    output = facts.run(*GPU_QUERY)
    has_driver = facts.text("/proc/driver/nvidia/version") is not None
    source = "nvidia-smi(1)"
    if output.is_missing:
        if not has_driver:
            return []
        return [
            Finding(
                *(CHECK, "GPU", Verdict.UNKNOWN, "a driver, no nvidia-smi", "GPUs that answer"),
                *("nvidia-smi is not installed here.", source),
                "in a container: --gpus all, with the NVIDIA container toolkit",
            )
        ]
    gpus = parse_gpus(output.stdout)
    if not gpus:
        said = (output.stdout.strip() or output.stderr.strip() or "nothing").splitlines()[0]
        return [
            Finding(
                *(CHECK, "GPU", Verdict.WARN, said[:200], "GPUs that answer"),
                "nvidia-smi sees no GPU: workers compute on the CPU.",
                source,
                "dmesg | grep -i nvrm; after a driver update: reboot, or reload the module",
            )
        ]
    names = sorted({gpu.name for gpu in gpus})
    findings = [
        Finding(
            CHECK,
            "GPU",
            Verdict.OK,
            f"{len(gpus)} x {', '.join(names)}, driver {gpus[0].driver}",
            "GPUs that answer",
            "The driver runs.",
            source,
        )
    ]
    devices = sorted({port.device for port in read_rdma_ports(facts) if not port.is_software})
    topology = parse_topology(facts.run("nvidia-smi", "topo", "-m").stdout).links if devices else {}
    for device in devices:
        ways = {
            pair[0]: way
            for pair, way in topology.items()
            if pair[1] == device and pair[0].startswith("GPU")
        }
        if not ways:
            continue
        near = sorted(gpu for gpu, way in ways.items() if way in ("PIX", "PXB", "PHB", "NODE"))
        findings.append(
            Finding(
                CHECK,
                f"GPU and {device}",
                Verdict.OK if near else Verdict.WARN,
                ", ".join(f"{gpu} {way}" for gpu, way in sorted(ways.items())),
                "a GPU on the NIC's socket (PIX, PXB, PHB or NODE)",
                "SYS crosses the sockets: each promoted block takes the slow way."
                if not near
                else f"Workers of {', '.join(near)} are near this NIC.",
                source,
                "" if near else "another slot for the NIC, or the NIC of the GPU's socket",
            )
        )
    return findings
