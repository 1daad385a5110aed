"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path


def available_nbytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that can be taken without swapping: of the host, or of the cgroup if less.

    0 if neither says so. Sources: proc_meminfo(5), MemAvailable; the kernel's
    admin-guide/cgroup-v2, memory.max and memory.current.
    """
    bounds = [
        int(line.split()[1]) * 1024
        for line in _read(proc / "meminfo").splitlines()
        if line.startswith("MemAvailable:")
    ]
    # Without a limit memory.max says "max".
    limit, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        bounds.append(max(0, int(limit) - int(used)))
    return min(bounds, default=0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
