"""How the CPUs of a host are divided among its workers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

_TOPOLOGY: Final = "/sys/devices/system/cpu/cpu{cpu}/topology/{name}"

# (package, core) of a CPU: two hardware threads of one core have the same place.
Place = tuple[int, int]


def divide_cores(
    cpus: Sequence[int], num_workers: int, place_of: Callable[[int], Place]
) -> list[tuple[int, ...]]:
    """Give each worker its CPUs: as evenly as possible, each CPU once, neighbours together.

    CPUs of one core stay with one worker where the numbers allow it, because they share its
    arithmetic units. With fewer CPUs than workers each worker gets one, in turn. The earlier
    workers get the larger shares.
    """
    ordered = sorted(cpus, key=lambda cpu: (place_of(cpu), cpu))
    if len(ordered) < num_workers:
        return [(ordered[worker % len(ordered)],) for worker in range(num_workers)]
    shares = []
    start = 0
    for worker in range(num_workers):
        # The remainder goes to the first workers, one CPU each.
        size = len(ordered) // num_workers + (worker < len(ordered) % num_workers)
        shares.append(tuple(sorted(ordered[start : start + size])))
        start += size
    return shares


def place_in_sysfs(cpu: int) -> Place:
    """The place of ``cpu`` as the kernel tells it; every CPU its own core where it does not."""
    try:
        return (
            int(Path(_TOPOLOGY.format(cpu=cpu, name="physical_package_id")).read_text("ascii")),
            int(Path(_TOPOLOGY.format(cpu=cpu, name="core_id")).read_text("ascii")),
        )
    except (OSError, ValueError):
        return (0, cpu)


def cpu_list(cpus: Sequence[int]) -> str:
    """CPUs as the services' --cpus takes them."""
    return ",".join(str(cpu) for cpu in cpus)
