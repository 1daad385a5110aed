"""Kernel settings for KV that goes over TCP, for many mappings and for the neighbour table.

Files are read as sysctl.d(5) orders them; what we want stands in a drop-in of our own, and others'
files are never edited, only named when they win over ours.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from ops.node.change import Change, FileChange, ValueChange
from ops.node.facts import Facts
from ops.node.finding import Finding, Verdict
from ops.node.formats.sysctl import parse_settings, value_path

CHECK: Final = "sysctl"
DROP_IN: Final = "/etc/sysctl.d/90-pdserve.conf"

# sysctl.d(5): a file hides files of the same name in the folders after its own.
_FOLDERS: Final = (
    "/etc/sysctl.d",
    "/run/sysctl.d",
    "/usr/local/lib/sysctl.d",
    "/usr/lib/sysctl.d",
    "/lib/sysctl.d",
)
# `sysctl --system` reads it after all others; systemd only where a link in /etc/sysctl.d names it.
_LAST_FILE: Final = "/etc/sysctl.conf"
_SOCKET_BUFFER_NBYTES: Final = 256 * 1024 * 1024
_NEIGHBOUR_NAME: Final = "base_reachable_time_ms"
_NEIGHBOUR_REACHABLE_MS: Final = 1000
_HEADER: Final = (
    "# Written by pdserve (pdctl node, or ops/runbooks); its rollback takes it back.\n"
    "# Settings of your own belong into another file.\n"
)


@dataclass(frozen=True, slots=True)
class _Wish:
    """A setting that we want.

    Attributes:
        value: what to write.
        is_least: a larger last number is right as well.
        verdict: of a value that is not right.
    """

    key: str
    value: str
    is_least: bool
    verdict: Verdict
    reason: str
    source: str

    def is_right(self, value: str) -> bool:
        if not self.is_least:
            return value.split() == self.value.split()
        number, wanted = _last_number(value), _last_number(self.value)
        return number is not None and wanted is not None and number >= wanted

    @property
    def wanted(self) -> str:
        return f"at least {self.value}" if self.is_least else self.value


_WISHES: Final = (
    *(
        _Wish(
            key,
            str(_SOCKET_BUFFER_NBYTES),
            True,
            Verdict.FAIL,
            "A socket cannot have a larger buffer than this; below bandwidth times delay the KV "
            "transfer waits for acknowledgements.",
            "socket(7), tcp(7)",
        )
        for key in ("net.core.rmem_max", "net.core.wmem_max")
    ),
    _Wish(
        "net.ipv4.tcp_rmem",
        f"4096 131072 {_SOCKET_BUFFER_NBYTES}",
        True,
        Verdict.FAIL,
        "The last number bounds the receive window that TCP grows by itself.",
        "tcp(7)",
    ),
    _Wish(
        "net.ipv4.tcp_wmem",
        f"4096 65536 {_SOCKET_BUFFER_NBYTES}",
        True,
        Verdict.FAIL,
        "The last number bounds the send buffer that TCP grows by itself.",
        "tcp(7)",
    ),
    _Wish(
        "net.core.netdev_max_backlog",
        "250000",
        True,
        Verdict.WARN,
        "Packets beyond it are dropped before the protocol sees them when a burst of KV arrives.",
        "kernel: Documentation/admin-guide/sysctl/net.rst",
    ),
    _Wish(
        "net.core.somaxconn",
        "4096",
        True,
        Verdict.WARN,
        "More clients that connect at once than this wait for a retry of their SYN.",
        "listen(2)",
    ),
    _Wish(
        "net.ipv4.tcp_mtu_probing",
        "1",
        False,
        Verdict.WARN,
        "Without it a path that drops large packets and sends no ICMP stalls a transfer for ever.",
        "kernel: Documentation/networking/ip-sysctl.rst",
    ),
    _Wish(
        "net.ipv4.tcp_slow_start_after_idle",
        "0",
        False,
        Verdict.WARN,
        "With it every handoff after a pause starts with a small window again.",
        "kernel: Documentation/networking/ip-sysctl.rst",
    ),
    _Wish(
        "net.ipv4.tcp_window_scaling",
        "1",
        False,
        Verdict.FAIL,
        "Without it no TCP window is above 64 KiB.",
        "tcp(7)",
    ),
    _Wish(
        "vm.max_map_count",
        "262144",
        True,
        Verdict.WARN,
        "Mapped KV files, shared memory and weights are mappings; beyond it mmap fails.",
        "kernel: Documentation/admin-guide/sysctl/vm.rst",
    ),
    *(
        _Wish(
            f"net.ipv4.neigh.default.gc_thresh{step}",
            str(entries),
            True,
            Verdict.WARN,
            "With more peers than this the neighbour table is emptied or full, and packets wait "
            "for ARP.",
            "arp(7)",
        )
        for step, entries in ((1, 1024), (2, 2048), (3, 4096))
    ),
)


def _neighbour_wish(key: str) -> _Wish:
    return _Wish(
        key,
        str(_NEIGHBOUR_REACHABLE_MS),
        False,
        Verdict.WARN,
        "The unit is milliseconds: 1000 is one second, after which a peer that moved or died is "
        "noticed; 1 would be 1 ms, and every packet would ask for the peer again.",
        "arp(7)",
    )


@dataclass(frozen=True, slots=True)
class _Assignment:
    path: str
    key: str
    value: str
    line_number: int
    is_after_ours: bool


def check(facts: Facts) -> list[Finding]:
    """Each wanted setting as it runs, then files that disagree with ours, then huge pages."""
    others = _assignments_of_others(facts)
    findings = [_judged(facts, wish) for wish in _wishes(facts)]
    for wish in _wishes(facts):
        findings.extend(_disagreements(wish, others))
    findings.append(_huge_pages(facts, others))
    return findings


def changes(facts: Facts) -> list[Change]:
    """Our drop-in, then the running values that are not right."""
    others = _assignments_of_others(facts)
    wanted: list[Change] = []
    lines = [
        f"{wish.key} = {wish.value}\n"
        for wish in _lasting_wishes()
        if not _is_right_by_others(wish, others)
    ]
    present = facts.text(DROP_IN)
    text = _HEADER + "".join(lines)
    if text != present and (lines or present is not None):
        wanted.append(
            FileChange(DROP_IN, text, "Settings for KV over TCP that last over a reboot.")
        )
    for wish in _wishes(facts):
        running = facts.text(value_path(wish.key))
        if running is not None and not wish.is_right(running):
            wanted.append(ValueChange(value_path(wish.key), wish.value, wish.reason))
    return wanted


def _lasting_wishes() -> tuple[_Wish, ...]:
    """What stands in the file: interfaces that come later take the default's values."""
    return (
        *_WISHES,
        *(_neighbour_wish(f"net.{ip}.neigh.default.{_NEIGHBOUR_NAME}") for ip in ("ipv4", "ipv6")),
    )


def _wishes(facts: Facts) -> tuple[_Wish, ...]:
    """What shall run now: interfaces of hardware that are there have values of their own."""
    hardware = [
        name
        for name in facts.names("/sys/class/net")
        if facts.link(f"/sys/class/net/{name}/device") is not None
    ]
    return (
        *_lasting_wishes(),
        *(
            _neighbour_wish(f"net.{ip}.neigh.{name.replace('.', '/')}.{_NEIGHBOUR_NAME}")
            for name in hardware
            for ip in ("ipv4", "ipv6")
            if facts.text(f"/proc/sys/net/{ip}/neigh/{name}/{_NEIGHBOUR_NAME}") is not None
        ),
    )


def _judged(facts: Facts, wish: _Wish) -> Finding:
    running = facts.text(value_path(wish.key))
    if running is None:
        return Finding(
            CHECK,
            wish.key,
            Verdict.UNKNOWN,
            "",
            wish.wanted,
            "This kernel or this network namespace does not show it; look on the host.",
            wish.source,
        )
    measured = " ".join(running.split())
    if wish.is_right(running):
        return Finding(CHECK, wish.key, Verdict.OK, measured, wish.wanted, wish.reason, wish.source)
    verdict = wish.verdict
    number = _last_number(running)
    if wish.key.endswith(_NEIGHBOUR_NAME):
        measured += " ms"
        # Longer than wanted is only slow to notice; shorter floods the network with ARP.
        if number is not None and number < _NEIGHBOUR_REACHABLE_MS:
            verdict = Verdict.FAIL
    return Finding(
        CHECK,
        wish.key,
        verdict,
        measured,
        wish.wanted,
        wish.reason,
        wish.source,
        f'pdctl node apply, or for now: sysctl -w "{wish.key}={wish.value}"',
    )


def _disagreements(wish: _Wish, others: Iterable[_Assignment]) -> Iterator[Finding]:
    for other in _effective(wish.key, others):
        if wish.is_right(other.value):
            continue
        where = f"{other.path}:{other.line_number}"
        if other.is_after_ours:
            yield Finding(
                CHECK,
                wish.key,
                Verdict.FAIL,
                f"{other.value} in {where}",
                wish.wanted,
                f"That file is read after {DROP_IN} and wins at the next boot.",
                "sysctl.d(5)",
                f"remove the line from {where}",
            )
        else:
            yield Finding(
                CHECK,
                wish.key,
                Verdict.OK,
                f"{other.value} in {where}",
                wish.wanted,
                f"{DROP_IN} is read later and wins.",
                "sysctl.d(5)",
            )


def _huge_pages(facts: Facts, others: Iterable[_Assignment]) -> Finding:
    """Only judged: how many are right is for who configures the pool."""
    meminfo = {
        name: words.split()[0]
        for name, _, words in (
            line.partition(":") for line in (facts.text("/proc/meminfo") or "").splitlines()
        )
        if words.split()
    }
    total, free = (_last_number(meminfo.get(f"HugePages_{name}", "")) for name in ("Total", "Free"))
    source = "kernel: Documentation/admin-guide/mm/hugetlbpage.rst"

    def finding(verdict: Verdict, measured: str, wanted: str, reason: str, cure: str) -> Finding:
        return Finding(CHECK, "vm.nr_hugepages", verdict, measured, wanted, reason, source, cure)

    if total is None or free is None:
        reason = "/proc/meminfo cannot be read or the kernel has no huge pages."
        return finding(Verdict.UNKNOWN, "", "", reason, "")
    asked = max(
        (_last_number(other.value) or 0 for other in _effective("vm.nr_hugepages", others)),
        default=0,
    )
    measured = f"{total} reserved, {free} free"
    if total < asked:
        return finding(
            Verdict.WARN,
            measured,
            f"{asked}, as a sysctl file asks",
            "The kernel found too few free blocks of memory in one piece.",
            "reserve them at boot: hugepages=N on the kernel's command line",
        )
    if total and not free:
        return finding(
            Verdict.WARN,
            measured,
            "some free",
            "All are in use; a pool that wants huge pages gets none.",
            f"raise vm.nr_hugepages above {total} in a file of your own in /etc/sysctl.d",
        )
    reason = (
        "Enough for who uses them."
        if total
        else "Nobody has asked for any; the services do without."
    )
    return finding(Verdict.OK, measured, "enough for who uses them", reason, "")


def _is_right_by_others(wish: _Wish, others: Iterable[_Assignment]) -> bool:
    effective = _effective(wish.key, others)
    return bool(effective) and wish.is_right(effective[-1].value)


def _effective(key: str, others: Iterable[_Assignment]) -> list[_Assignment]:
    """The assignments to ``key`` in the order read; patterns count only if no line names it."""
    others = list(others)
    named = [other for other in others if other.key == key]
    return named or [other for other in others if fnmatchcase(key, other.key)]


def _assignments_of_others(facts: Facts) -> list[_Assignment]:
    """All files but ours, in the order in which they are read."""
    return [
        _Assignment(path, setting.key, setting.value, setting.line_number, is_after_ours)
        for path, is_after_ours in _files_of_others(facts)
        for setting in parse_settings(facts.text(path) or "")
    ]


def _files_of_others(facts: Facts) -> Iterator[tuple[str, bool]]:
    by_name: dict[str, str] = {}
    for folder in _FOLDERS:
        for name in facts.names(folder):
            if name.endswith(".conf"):
                by_name.setdefault(name, f"{folder}/{name}")
    own_name = DROP_IN.rpartition("/")[2]
    for name, path in sorted(by_name.items()):
        # Debian and Red Hat link the last file into the folder; it is read once more at the end.
        is_last_file = (facts.link(path) or "").rpartition("/")[2] == "sysctl.conf"
        if name != own_name and not is_last_file:
            yield path, name > own_name
    yield _LAST_FILE, True


def _last_number(value: str) -> int | None:
    words = value.split()
    return int(words[-1]) if words and words[-1].lstrip("-").isdecimal() else None
