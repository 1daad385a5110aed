"""What the rig needs to know about the machine, and whether that is enough."""

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# User Mode Linux keeps the guest's memory in a file there.
GUEST_MEMORY_FOLDER: Final = Path("/dev/shm")
MIN_GUEST_MEMORY_NBYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Host:
    """One machine and the Python that runs there.

    ``distribution`` is the ID of os-release, "" if there is none; ``guest_memory_nbytes`` is what
    is free where the guest's memory will be.
    """

    system: str
    machine: str
    distribution: str
    implementation: str
    is_root: bool
    has_apt: bool
    guest_memory_nbytes: int


def this_host() -> Host:
    """The machine this runs on."""
    try:
        release: Mapping[str, str] = platform.freedesktop_os_release()
    except OSError:
        release = {}
    try:
        free_nbytes = shutil.disk_usage(GUEST_MEMORY_FOLDER).free
    except OSError:
        free_nbytes = 0
    return Host(
        system=platform.system(),
        machine=platform.machine(),
        distribution=release.get("ID", ""),
        implementation=sys.implementation.name,
        is_root=os.geteuid() == 0,
        has_apt=all(shutil.which(tool) for tool in ("apt-get", "apt-cache", "dpkg-query")),
        guest_memory_nbytes=free_nbytes,
    )


def obstacle(host: Host) -> str | None:
    """Why this machine cannot have the rig whatever is installed; None if it can."""
    if (host.system, host.machine) != ("Linux", "x86_64"):
        return f"the rig needs Linux on x86_64 and this is {host.system} on {host.machine}"
    if host.distribution != "debian" or not host.has_apt:
        name = host.distribution or "unknown"
        return (
            "the rig takes its kernel source and pyverbs from Debian with apt, and this "
            f"distribution is {name}" + ("" if host.has_apt else " without apt")
        )
    if host.implementation != "cpython":
        return f"the distribution's pyverbs is for CPython and this is {host.implementation}"
    if host.guest_memory_nbytes < MIN_GUEST_MEMORY_NBYTES:
        return (
            f"the guest's memory is a file in {GUEST_MEMORY_FOLDER}, where "
            f"{host.guest_memory_nbytes >> 20} MiB are free and "
            f"{MIN_GUEST_MEMORY_NBYTES >> 20} MiB are needed"
        )
    return None
