"""Commands whose locked memory is limited, which root's by itself is not."""

from collections.abc import Sequence


def with_limit(limit_nbytes: int, command: Sequence[str]) -> list[str]:
    """``command`` as root without CAP_IPC_LOCK, so that the limit on locked memory holds."""
    return [
        *("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"),
        *("prlimit", f"--memlock={limit_nbytes}:{limit_nbytes}", *command),
    ]
