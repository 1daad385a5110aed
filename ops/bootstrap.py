"""From a fresh clone to a running system or a test report, with nothing but Python.

    python3 ops/bootstrap.py demo ["your question"]
    python3 ops/bootstrap.py test [pytest arguments]

Makes .venv, installs the pinned packages into it and then becomes ``pdctl demo`` or the checks.
A stamp written last, over everything the installation depends on, makes the next start
immediate; without it (first time, interrupted, pins changed) the installation runs again. A lock
keeps two starts from installing at once. Only the standard library is imported: this file runs
before anything is installed, and the annotations are not evaluated, so that an old Python still
gets as far as the sentence that says it is too old.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

MIN_PYTHON = (3, 11)
EXTRAS = {
    "demo": ("convert", "router", "worker"),
    "test": ("convert", "dev", "router", "worker"),
}
HEARTBEAT_S = 15.0
USAGE = 'usage: python3 ops/bootstrap.py demo ["your question"] | test [pytest arguments]'
# What pip says that a waiting person wants to read.
SHOWN_PREFIXES = ("Downloading", "Using cached", "Building", "Installing collected packages")
MAX_SHOWN_LENGTH = 100


class BootstrapError(Exception):
    """The one sentence shown to the person."""


def inputs_digest(root: Path, python_version: str) -> str:
    """What the installation depends on, as hex: project file, pins and Python."""
    digest = hashlib.sha256(python_version.encode())
    for name in ("pyproject.toml", "constraints.txt"):
        content = (root / name).read_bytes()
        digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def is_installed(stamp: Path, digest: str, extras: tuple[str, ...]) -> bool:
    """True if a finished installation of ``digest`` with at least ``extras`` left its stamp."""
    try:
        content = json.loads(stamp.read_text(encoding="utf-8"))
        return content["digest"] == digest and set(extras) <= set(content["extras"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_stamp(stamp: Path, digest: str, extras: tuple[str, ...]) -> None:
    """Write the stamp whole or not at all."""
    partial = stamp.with_suffix(".partial")
    partial.write_text(json.dumps({"digest": digest, "extras": sorted(extras)}), encoding="utf-8")
    partial.replace(stamp)


def hold_lock(path: Path) -> int:
    """Wait for the lock and return its descriptor; it is freed on close, exec or any exit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another bootstrap is installing; waiting for it")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def say(line: str) -> None:
    """Show one line of progress."""
    print(f"bootstrap: {line}", file=sys.stderr, flush=True)


def run_logged(command: list[str], log: Path, failure: str) -> None:
    """Run ``command`` with its output in ``log`` and its progress on the terminal.

    BootstrapError: ``failure``, pip's own last error and the log's path, in one sentence.
    """
    last_line = last_error = ""
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        ) as process:
            try:
                for line in lines_with_heartbeat(process):
                    file.write(line + "\n")
                    if line.lstrip().startswith(SHOWN_PREFIXES):
                        say("  " + line.strip()[:MAX_SHOWN_LENGTH])
                    last_line = line.strip() or last_line
                    if line.startswith("ERROR:"):
                        last_error = line.removeprefix("ERROR:").strip()
            except BaseException:
                process.terminate()
                raise
        returncode = process.returncode
    if returncode != 0:
        reason = (last_error or last_line).rstrip(".") or f"exit code {returncode}"
        raise BootstrapError(f"{failure} ({reason}); the full log is {log}.")


def lines_with_heartbeat(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the process's lines; say that it still works when it is silent for long."""
    lines: queue.Queue[str | None] = queue.Queue(maxsize=1000)

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line.rstrip("\n"))
        lines.put(None)

    threading.Thread(target=read, name="output-reader", daemon=True).start()
    started_at = time.monotonic()
    while True:
        try:
            line = lines.get(timeout=HEARTBEAT_S)
        except queue.Empty:
            say(f"  still working ({time.monotonic() - started_at:.0f} s)")
            continue
        if line is None:
            return
        yield line


def make_venv(venv: Path, log: Path) -> None:
    """Create the environment unless a working one is there."""
    python = venv / "bin" / "python"
    if python.exists() and is_working(python):
        return
    if any(importlib.util.find_spec(name) is None for name in ("venv", "ensurepip")):
        raise BootstrapError(
            "This Python has no venv or ensurepip module; install it (on Debian and Ubuntu the "
            f"package python{sys.version_info[0]}.{sys.version_info[1]}-venv) and run this again."
        )
    say(f"creating {venv}")
    run_logged(
        # --clear: what is there is half an environment, left by an interruption.
        [sys.executable, "-m", "venv", "--clear", str(venv)],
        log,
        f"Creating the environment {venv} failed",
    )


def is_working(python: Path) -> bool:
    """True if ``python`` is of this version and has pip."""
    check = "import pip, sys; print(sys.version_info[:2])"
    result = subprocess.run(
        [str(python), "-c", check], capture_output=True, encoding="utf-8", check=False
    )
    return result.returncode == 0 and result.stdout.strip() == str(sys.version_info[:2])


def install(root: Path, extras: tuple[str, ...], log: Path) -> Path:
    """Make ``root``/.venv hold the pinned packages and return its bin folder."""
    venv = root / ".venv"
    stamp = venv / "installed.json"
    digest = inputs_digest(root, sys.version)
    lock = hold_lock(root / ".cache" / "bootstrap.lock")
    try:
        if is_installed(stamp, digest, extras) and is_working(venv / "bin" / "python"):
            return venv / "bin"
        stamp.unlink(missing_ok=True)
        log.write_text("", encoding="utf-8")
        make_venv(venv, log)
        say(f"installing the pinned packages into {venv} (several minutes the first time)")
        python = str(venv / "bin" / "python")
        run_logged(
            [
                *(python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"),
                *("--progress-bar", "off", "-c", str(root / "constraints.txt")),
                *("-e", f"{root}[{','.join(extras)}]"),
            ],
            log,
            "Installing the packages failed",
        )
        write_stamp(stamp, digest, extras)
    finally:
        os.close(lock)
    return venv / "bin"


def main(arguments: list[str]) -> int:
    """Install what ``arguments[0]`` needs and become it; return an exit code on failure."""
    if sys.version_info < MIN_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"Python 3.11 or newer is needed, this is {found}.", file=sys.stderr)
        return 1
    if not arguments or arguments[0] not in EXTRAS:
        print(USAGE, file=sys.stderr)
        return 2
    verb, *rest = arguments
    root = Path(__file__).resolve().parent.parent
    try:
        bin_folder = install(root, EXTRAS[verb], root / ".cache" / "bootstrap.log")
    except BootstrapError as exc:
        print(exc, file=sys.stderr)
        return 1
    except OSError as exc:
        print(f"The installation failed: {exc}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; the next start goes on with the installation.", file=sys.stderr)
        return 130
    os.chdir(root)
    os.environ["PYTHONUTF8"] = "1"
    os.environ["PATH"] = f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}"
    if verb == "demo":
        command = [str(bin_folder / "pdctl"), "demo", *rest]
    else:
        command = [str(bin_folder / "python"), "-m", "ops.checks", *rest]
    sys.stdout.flush()
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
