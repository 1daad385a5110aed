"""Start the guest, run one command inside, and hand out its output and exit status.

Inside, the host's files are at their usual paths, so that a virtual environment works unchanged;
what is written there is forgotten, but for the folders that are shared. It is not a sandbox: the
guest's root has the rights of the user on the host's files that it is told to write to.
"""

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

_FOLDER: Final = Path(__file__).parent
_SCRIPTS: Final = ("init.sh", "setup.sh", "pair.sh", "pair.routes")
# Gives the largest path MTU of RoCE, 4096.
_MTU: Final = 4200
_PIPE_NBYTES: Final = 1 << 20
_NUM_LOG_LINES: Final = 30
# As ``timeout`` and shells have them.
TIMED_OUT: Final = 124
NOT_RUN: Final = 125


@dataclass(frozen=True, slots=True)
class Command:
    """What runs in the guest, in which folder, with which environment."""

    arguments: tuple[str, ...]
    folder: Path
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a guest ended.

    ``status`` is the command's exit status, TIMED_OUT, or NOT_RUN if the guest died before it
    could say; ``booted_s`` the guest's uptime when the command started, None if it did not;
    ``kernel_log`` what the kernel said last.
    """

    status: int
    booted_s: float | None
    kernel_log: str


@dataclass(frozen=True, slots=True)
class Guest:
    """A kernel and the machine it makes; each run starts a new one."""

    kernel: Path
    memory_nbytes: int

    def run(
        self, command: Command, output: BinaryIO, *, timeout_s: float, shares: Sequence[Path] = ()
    ) -> Ending:
        """Run ``command`` and copy what it writes to ``output`` as it comes.

        The ``shares`` are folders that are written through to the host.
        """
        with tempfile.TemporaryDirectory(prefix="rdma-rig-") as name:
            control = Path(name)
            write_control_folder(control, command, shares)
            log = control / "kernel.log"
            timed_out = self._run_kernel(control, log, output, timeout_s)
            status, booted = _number(control / "status"), _number(control / "booted")
            if timed_out:
                status = TIMED_OUT
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        return Ending(
            NOT_RUN if status is None else int(status), booted, "\n".join(lines[-_NUM_LOG_LINES:])
        )

    def _run_kernel(self, control: Path, log: Path, output: BinaryIO, timeout_s: float) -> bool:
        """Run until the guest powers off; True if it had to be stopped at ``timeout_s``."""
        # A pipe of its own: the kernel makes its end non-blocking, which would change our output
        # for all that share it.
        read_end, write_end = os.pipe()
        fcntl.fcntl(read_end, fcntl.F_SETPIPE_SZ, _PIPE_NBYTES)
        copier = threading.Thread(target=_copy, args=(read_end, output), name="guest-output")
        copier.start()
        try:
            with log.open("wb") as kernel_says:
                process = subprocess.Popen(
                    self.kernel_command(control, write_end, one_cpu()),
                    stdin=subprocess.DEVNULL,
                    stdout=kernel_says,
                    stderr=kernel_says,
                    pass_fds=[write_end],
                    start_new_session=True,
                )
        finally:
            # The copier ends when the guest's end is closed as well, also if none started.
            os.close(write_end)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return True
        else:
            return False
        finally:
            # The kernel and all processes of the guest, which are processes of the host.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            copier.join()

    def kernel_command(self, control: Path, output_fd: int, cpu: int) -> list[str]:
        """The command line of the kernel; its first process is the control folder's init.sh."""
        return [
            # One CPU for all its processes: they hand over to each other at every system call,
            # which is a third faster without waking another CPU.
            *("taskset", "-c", str(cpu)),
            str(self.kernel),
            f"mem={self.memory_nbytes >> 20}M",
            *("root=none", "rootfstype=hostfs", "rootflags=/", "ro"),
            f"init={control / 'init.sh'}",
            f"rig_control={control}",
            f"uml_dir={control / 'uml'}",
            *("con=null", f"con0=null,fd:{output_fd}", "con1=null,fd:1", "console=tty1", "quiet"),
            *("panic=-1", "random.trust_cpu=on"),
        ]


def write_control_folder(control: Path, command: Command, shares: Sequence[Path]) -> None:
    """Write the scripts and what differs from run to run into ``control``."""
    for name in _SCRIPTS:
        shutil.copy(_FOLDER / name, control / name)
    (control / "init.sh").chmod(0o755)
    (control / "settings.sh").write_text(settings_text(shares), encoding="utf-8")
    (control / "command.sh").write_text(command_text(command), encoding="utf-8")


def settings_text(shares: Sequence[Path]) -> str:
    """Shell text of what setup.sh wants to know."""
    found = re.search(r"MHz\s*: ([\d.]+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    mounts = [
        f"    mkdir -p {folder}; mount -t hostfs -o {folder} none {folder} || fail 'no share'"
        for folder in (shlex.quote(str(share)) for share in shares)
    ]
    return "\n".join(
        [
            f"clock_mhz={found[1] if found else '2000'}",
            f"mtu={_MTU}",
            "mount_shares() {",
            *(mounts or ["    :"]),
            "}",
            "",
        ]
    )


def command_text(command: Command) -> str:
    """Shell text that becomes ``command``."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in command.env.items()]
    lines.append(f"cd {shlex.quote(str(command.folder))} && exec {shlex.join(command.arguments)}")
    return "\n".join(lines) + "\n"


def one_cpu() -> int:
    """One of the CPUs of this process, another one for the next process."""
    cpus = sorted(os.sched_getaffinity(0))
    return cpus[os.getpid() % len(cpus)]


def _copy(read_end: int, output: BinaryIO) -> None:
    """Copy until the other end is closed; a reader of ours that left does not stop the guest."""
    with os.fdopen(read_end, "rb", buffering=0) as source:
        while piece := source.read(1 << 16):
            with contextlib.suppress(BrokenPipeError, ValueError):
                output.write(piece)
                output.flush()


def _number(path: Path) -> float | None:
    """The number in a file; None if there is none."""
    try:
        return float(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
