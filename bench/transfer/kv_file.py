"""How long it takes until the KV of a 1 GiB file can be read."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.transfer.report import GIB, OPEN_MAX_S
from kvproto.geometry import KvGeometry
from kvproto.kv_file import KvFile, KvFileWriter

# Llama 3 8B: 128 KiB a token.
_GEOMETRY: Final = KvGeometry.uniform(
    32, 8, 128, "bfloat16", [f"layers.{layer}" for layer in range(32)]
)
_NUM_OPENS: Final = 20
_MARK: Final = b"last row of the last layer"


@dataclass(frozen=True, slots=True)
class Opening:
    """Wall-clock seconds of each opening of one file, until its last row was read."""

    nbytes: int
    times_s: list[float]

    @property
    def median_s(self) -> float:
        """Of all openings."""
        return statistics.median(self.times_s)

    def lines(self) -> list[str]:
        """A row of the table, and the bar."""
        word = "PASS        " if self.median_s < OPEN_MAX_S else "FALLS SHORT "
        row = f"{'open 1 GiB KV file':26}{self.median_s * 1e3:10.2f} ms"
        slowest = f"slowest of {len(self.times_s)}: {max(self.times_s) * 1e3:.2f} ms"
        bar = f"KV file opened in < {OPEN_MAX_S * 1e3:g} ms"
        return [
            f"{row}, read-only, its pages not in memory; {slowest}",
            f"{word}    1 GiB  {bar}: {self.median_s * 1e3:.2f} ms",
        ]

    def as_json(self) -> dict[str, Any]:
        """Every sample too."""
        return {"nbytes": self.nbytes, "median_s": self.median_s, "times_s": self.times_s}


def open_kv_file(nbytes: int = GIB) -> Opening:
    """Write a file of ``nbytes`` in the folder for temporary files; open it again and again.

    KvFileError: no room.
    """
    times_s = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.kv"
        tokens = [token % 32_000 for token in range(nbytes // _GEOMETRY.kv_token_nbytes)]
        with KvFileWriter(path, _GEOMETRY, tokens) as writer:
            writer.cache.memory[-len(_MARK) :] = _MARK
            writer.commit()
        for _ in range(_NUM_OPENS):
            _forget(path)
            begin_at = time.perf_counter()
            with KvFile.open(path) as opened:
                row = bytes(opened.cache.memory[-len(_MARK) :])
            times_s.append(time.perf_counter() - begin_at)
            if row != _MARK or opened.cache.nbytes != nbytes or not opened.cache.memory.readonly:
                raise RuntimeError("the KV file did not hold what was written")
    return Opening(nbytes, times_s)


def _forget(path: Path) -> None:
    """Make the system drop what it keeps of the file in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
