"""What the control groups above a process allow it.

Source: Linux Documentation/admin-guide/cgroup-v2.rst, admin-guide/cgroup-v1/memory.rst,
scheduler/sched-bwc.rst.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from ops.node.facts import Facts

_MOUNT: Final = "/sys/fs/cgroup"
# Version 1 writes the largest number of whole pages for "no limit".
_NO_LIMIT: Final = 1 << 60

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """The tightest limits on the way to the root.

    Attributes:
        version: 1, 2, or 0 if there are no control groups.
        memory_nbytes: None is unlimited.
        num_cpus: CPU time for each second, None is unlimited.
        num_throttled: periods in which the limit stopped the group, as counted.
    """

    version: int
    memory_nbytes: int | None
    num_cpus: float | None
    num_throttled: int


def read_cgroup_limits(facts: Facts) -> CgroupLimits:
    """Of the process that looks."""
    paths = dict(_paths(facts.text("/proc/self/cgroup") or ""))
    if "" in paths and facts.text(f"{_MOUNT}/cgroup.controllers") is not None:
        folders = list(_upwards(_MOUNT, paths[""]))
        quotas = [_quota_v2(facts.text(f"{folder}/cpu.max") or "") for folder in folders]
        return CgroupLimits(
            2,
            _least(_bytes(facts.text(f"{folder}/memory.max")) for folder in folders),
            _least(iter(quotas)),
            _throttled(facts, folders),
        )
    memory = list(_upwards(f"{_MOUNT}/memory", paths.get("memory", "/")))
    # "cpu" and "cpuacct" are one hierarchy on most systems, with a link for each name.
    cpu = list(_upwards(f"{_MOUNT}/cpu", paths.get("cpu", "/")))
    limit = _least(_bytes(facts.text(f"{folder}/memory.limit_in_bytes")) for folder in memory)
    return CgroupLimits(
        1 if paths else 0,
        limit,
        _least(_quota_v1(facts, folder) for folder in cpu),
        _throttled(facts, cpu),
    )


def _paths(text: str) -> Iterator[tuple[str, str]]:
    """(controller, path) of /proc/PID/cgroup; "" is version 2's only hierarchy."""
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                yield controller, fields[2]


def _upwards(mount: str, path: str) -> Iterator[str]:
    """The group and those above. In a container the upper ones may be missing; that is no limit."""
    names = [name for name in path.split("/") if name and name != ".."]
    for end in range(len(names), -1, -1):
        yield "/".join([mount, *names[:end]])


def _bytes(text: str | None) -> int | None:
    word = (text or "").strip()
    return int(word) if word.isdecimal() and int(word) < _NO_LIMIT else None


def _quota_v2(text: str) -> float | None:
    match = re.match(r"(\d+)\s+(\d+)", text)
    return int(match[1]) / int(match[2]) if match and int(match[2]) else None


def _quota_v1(facts: Facts, folder: str) -> float | None:
    quota = (facts.text(f"{folder}/cpu.cfs_quota_us") or "").strip()  # -1 is unlimited
    period = (facts.text(f"{folder}/cpu.cfs_period_us") or "").strip()
    if quota.isdecimal() and period.isdecimal() and int(period):
        return int(quota) / int(period)
    return None


def _throttled(facts: Facts, folders: list[str]) -> int:
    counts = (
        re.search(r"^nr_throttled (\d+)", facts.text(f"{folder}/cpu.stat") or "", re.MULTILINE)
        for folder in folders
    )
    return max((int(match[1]) for match in counts if match), default=0)


def _least(limits: Iterator[_Number | None]) -> _Number | None:
    return min((limit for limit in limits if limit is not None), default=None)
