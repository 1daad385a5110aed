"""What was measured, as rows; and the bars and floors it is held against."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.transfer.contestant import Contestant, Medium
from bench.transfer.duel import Turn

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# Transfers this small are all fixed cost; the smallest that every contestant can make.
FIXED_COST_NBYTES = 16 * KIB
# Bars are for KV caches, not for single tokens.
BAR_MIN_NBYTES = 16 * MIB
# Medians of the same thing differ by this much between two runs on a busy machine.
NOISE = 0.15
NIXL_SHM_FACTOR = 1.3
JSON_FACTOR = 17.5
OPEN_MAX_S = 0.005


@dataclass(frozen=True, slots=True)
class Measured:
    """All turns of one contestant at one size."""

    contestant: Contestant
    nbytes: int
    turns: Sequence[Turn]

    @property
    def times_s(self) -> list[float]:
        """Of all transfers."""
        return [time_s for turn in self.turns for time_s in turn.times_s]

    @property
    def median_s(self) -> float:
        """Of all rounds."""
        return statistics.median(self.times_s)

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second, at the median."""
        return self.nbytes / self.median_s / 1e9

    @property
    def cpu_s(self) -> tuple[float, float]:
        """Processor seconds of one transfer at the sender and at the receiver; medians."""
        return (
            statistics.median(turn.sender_cpu_s for turn in self.turns),
            statistics.median(turn.receiver_cpu_s for turn in self.turns),
        )

    def as_json(self) -> dict[str, Any]:
        """Every sample too, so that others can judge."""
        return {
            "name": self.contestant.name,
            "medium": self.contestant.medium.value,
            "is_ours": self.contestant.is_ours,
            "has_checksum": self.contestant.has_checksum,
            "nbytes": self.nbytes,
            "median_s": self.median_s,
            "gb_per_s": self.gb_per_s,
            "sender_cpu_s": self.cpu_s[0],
            "receiver_cpu_s": self.cpu_s[1],
            "times_s": self.times_s,
        }


class Results:
    """Looks figures up by name and size."""

    def __init__(self, rows: Iterable[Measured]) -> None:
        self.rows = list(rows)

    def find(self, name: str, nbytes: int) -> Measured | None:
        """The row, or None if it was not measured."""
        for row in self.rows:
            if row.contestant.name == name and row.nbytes == nbytes:
                return row
        return None

    def best(
        self, nbytes: int, medium: Medium, *, is_ours: bool, has_checksum: bool | None = None
    ) -> Measured | None:
        """The fastest contestant of a kind."""
        rows = [
            row
            for row in self.rows
            if row.nbytes == nbytes
            and row.contestant.medium is medium
            and row.contestant.is_ours is is_ours
            and has_checksum in {None, row.contestant.has_checksum}
        ]
        return max(rows, key=lambda row: row.gb_per_s, default=None)

    def sizes(self) -> list[int]:
        """Sizes that were measured, ascending, without the one for the fixed cost."""
        return sorted({row.nbytes for row in self.rows} - {FIXED_COST_NBYTES})

    # -- floors --------------------------------------------------------------------------------

    def impossible(self) -> list[str]:
        """Sentences about figures that beat physics: something was measured wrongly then."""
        sentences = []
        for row in self.rows:
            medium = row.contestant.medium
            if medium is Medium.LIMIT and row.contestant.name != "bare socket":
                continue
            limits = ["memcpy"] if medium in {Medium.MAPPED, Medium.LIMIT} else ["bare socket"]
            for name in limits:
                limit = self.find(name, row.nbytes)
                if limit is not None and row.gb_per_s > (1 + NOISE) * limit.gb_per_s:
                    sentences.append(
                        f"IMPOSSIBLE: {row.contestant.name} moved {size_text(row.nbytes)} at "
                        f"{row.gb_per_s:.2f} GB/s, {name} in the same run at "
                        f"{limit.gb_per_s:.2f}; it cannot have moved all bytes, or the machine "
                        "was busy with something else: measure again"
                    )
        return sentences

    # -- bars ----------------------------------------------------------------------------------

    def bars(self) -> list[str]:
        """One line for each bar: PASS, FALLS SHORT or not measured."""
        lines = []
        for nbytes in self.sizes():
            if nbytes >= BAR_MIN_NBYTES:
                lines += self._bars_of_size(nbytes)
        return lines

    def _bars_of_size(self, nbytes: int) -> list[str]:
        bare, memcpy = self.find("bare socket", nbytes), self.find("memcpy", nbytes)
        unchecked = self.best(nbytes, Medium.TCP, is_ours=True, has_checksum=False)
        checked = self.best(nbytes, Medium.TCP, is_ours=True, has_checksum=True)
        mapped_unchecked = self.best(nbytes, Medium.MAPPED, is_ours=True, has_checksum=False)
        mapped = self.best(nbytes, Medium.MAPPED, is_ours=True, has_checksum=True)
        peer_tcp = self.best(nbytes, Medium.TCP, is_ours=False)
        peer_mapped = self.best(nbytes, Medium.MAPPED, is_ours=False)
        text = self.find("JSON + base64", nbytes)
        ours = max(
            (row for row in (checked, mapped) if row is not None),
            key=lambda row: row.gb_per_s,
            default=None,
        )
        bars = [
            ("TCP without checksum", unchecked, 0.9, bare, "bare socket"),
            ("TCP with checksum", checked, 0.75, bare, "bare socket"),
            ("TCP with checksum", checked, 1.0, peer_tcp, "best TCP peer"),
            ("mapped without checksum", mapped_unchecked, 0.9, memcpy, "memcpy"),
            ("mapped with checksum", mapped, NIXL_SHM_FACTOR, peer_mapped, "best shared memory"),
            ("our best with checksum", ours, JSON_FACTOR, text, "JSON + base64"),
        ]
        return [_bar(nbytes, *bar) for bar in bars]


def _bar(
    nbytes: int, what: str, row: Measured | None, factor: float, other: Measured | None, base: str
) -> str:
    text = f"{size_text(nbytes):>8}  {what} >= {factor:g} x {base}"
    if row is None or other is None:
        missing = what if row is None else base
        return f"NOT MEASURED {text}: {missing} did not run"
    ratio = row.gb_per_s / other.gb_per_s
    word = "PASS        " if ratio >= factor else "FALLS SHORT "
    return (
        f"{word} {text}: {ratio:.2f} x ({row.contestant.name} {row.gb_per_s:.2f} GB/s, "
        f"{other.contestant.name} {other.gb_per_s:.2f})"
    )


def table(results: Results, contestants: Sequence[Contestant]) -> list[str]:
    """A row for each contestant: the fixed cost, then GB/s and the share of the bare socket."""
    sizes = results.sizes()
    lines = [
        f"{'GB/s (x bare socket)':26}{'fixed us':>10}"
        + "".join(f"{size_text(size):>17}" for size in sizes)
        + f"{'CPU s/GB send+recv':>20}"
    ]
    for contestant in contestants:
        fixed = results.find(contestant.name, FIXED_COST_NBYTES)
        line = f"{contestant.name:26}"
        line += f"{fixed.median_s * 1e6:10.0f}" if fixed is not None else f"{'-':>10}"
        for size in sizes:
            row = results.find(contestant.name, size)
            bare = results.find("bare socket", size)
            if row is None:
                line += f"{'-':>17}"
                continue
            share = f"({row.gb_per_s / bare.gb_per_s:.2f})" if bare is not None else ""
            line += f"{row.gb_per_s:9.2f} {share:>7}"
        row = results.find(contestant.name, sizes[-1]) if sizes else None
        if row is not None:
            sender_s, receiver_s = (cpu_s / row.nbytes * 1e9 for cpu_s in row.cpu_s)
            line += f"{sender_s:14.2f}+{receiver_s:.2f}"
        lines.append(line)
    return lines


def size_text(nbytes: int) -> str:
    """1 GiB, 16 MiB, 64 KiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"
