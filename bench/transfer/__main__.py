"""KV transfer on one host: ours against the limits of the machine and against other engines.

    python -m bench.transfer [--full] [--sizes 64K 16M] [--only NAME ...] [--json FILE]

Every contestant moves the same bytes from the memory of one process into that of another, on
loopback. They take turns, round after round, so that whatever else the machine does falls on all;
each is summed up by its median. After every transfer the receiver compares a sample of its
memory, spoilt before, with the pattern that was sent. The receiver's pages are there before.

    fixed us    a whole transfer of 16 KiB
    GB/s        10^9 bytes a second; in brackets the share of the bare socket loop

Exits with 1 if a figure beats physics (a copy faster than memcpy, TCP faster than a bare socket):
then something was measured wrongly. Bars that are not reached are printed and do not change the
exit code.

Other engines: ``pip install pdserve[bench]``, and Debian's libibverbs1 for Mooncake. One that is
missing is named in a line and left out. Pickle is here to compare, on our own bytes alone.

Besides, a KV file of 1 GiB is opened, unless --only leaves it out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from bench.transfer.contestant import Contestant, Unavailable
from bench.transfer.duel import Duel, Failed, Turn
from bench.transfer.kv_file import open_kv_file
from bench.transfer.limit import Checksum, Memcpy
from bench.transfer.memory import Pattern, allocate
from bench.transfer.ours import (
    WRITE_NBYTES,
    MappedChecked,
    MappedUnchecked,
    Ours,
    TcpChecked,
    TcpUnchecked,
    TcpX2Checked,
    TcpX2Unchecked,
    TcpX4Checked,
    TcpX4Unchecked,
)
from bench.transfer.peers import MooncakeTcp, NixlSharedMemory, NixlTcp
from bench.transfer.quiet import wait_quiet
from bench.transfer.report import (
    FIXED_COST_NBYTES,
    GIB,
    KIB,
    MIB,
    Measured,
    Results,
    size_text,
    table,
)
from bench.transfer.stream import BareSocket, JsonBase64, Pickle, Protobuf

CONTESTANTS: tuple[type[Contestant], ...] = (
    Memcpy,
    Checksum,
    BareSocket,
    TcpChecked,
    TcpUnchecked,
    TcpX2Checked,
    TcpX2Unchecked,
    TcpX4Checked,
    TcpX4Unchecked,
    MappedChecked,
    MappedUnchecked,
    MooncakeTcp,
    NixlTcp,
    NixlSharedMemory,
    Protobuf,
    Pickle,
    JsonBase64,
)
OPEN_NAME = "open 1 GiB KV file"
SIZES = (64 * KIB, MIB, 16 * MIB, 256 * MIB)
# Transfers in one turn, so that a turn takes long enough to be worth waking two processes for.
TURN_NBYTES = 128 * MIB
MAX_TURN_TRANSFERS = 50


def parse_size(text: str) -> int:
    """``64K``, ``16M``, ``1G``; at least one token of ours."""
    units = {"K": KIB, "M": MIB, "G": GIB}
    try:
        return int(text[:-1]) * units[text[-1].upper()]
    except (KeyError, ValueError, IndexError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 64K, 16M or 1G") from None


def start(
    contestants: list[Contestant], max_nbytes: int, has_huge_pages: bool
) -> tuple[list[Duel], list[str]]:
    """Both processes of each; those that cannot run are left out, with a sentence why."""
    # Whole blocks of our pool.
    max_nbytes = -(-max_nbytes // MIB) * MIB
    pattern = Pattern()
    source = allocate(max_nbytes, has_huge_pages=has_huge_pages)
    pattern.fill(memoryview(source))
    duels, left_out = [], []
    for contestant in contestants:
        duel = Duel(
            contestant, source, pattern, max_nbytes=max_nbytes, has_huge_pages=has_huge_pages
        )
        try:
            duel.start()
        except (Unavailable, Failed) as exc:
            duel.end()
            left_out.append(f"left out: {contestant.name}: {exc}")
        else:
            duels.append(duel)
    return duels, left_out


def race(
    duels: list[Duel], sizes: list[int], num_rounds: int, patience_s: float
) -> tuple[list[Measured], list[str]]:
    """Round after round at each size, every contestant in turn."""
    rows, failures = [], []
    num_turns = num_busy_turns = 0
    alive = list(duels)
    for nbytes in sizes:
        num_transfers = max(1, min(MAX_TURN_TRANSFERS, TURN_NBYTES // nbytes))
        turns: dict[Duel, list[Turn]] = {duel: [] for duel in alive}
        for _ in range(num_rounds):
            for duel in list(alive):
                contestant = duel.contestant
                if not contestant.min_nbytes <= nbytes <= contestant.max_nbytes:
                    continue
                num_turns += 1
                num_busy_turns += not wait_quiet(patience_s)
                try:
                    turns[duel].append(duel.turn(nbytes, num_transfers))
                except (Unavailable, Failed) as exc:
                    alive.remove(duel)
                    duel.end()
                    failures.append(f"failed at {size_text(nbytes)}: {exc}")
        rows += [Measured(duel.contestant, nbytes, taken) for duel, taken in turns.items() if taken]
    if num_busy_turns:
        failures.append(
            f"note: in {num_busy_turns} of {num_turns} turns the machine was busy with something "
            "else; the figures are too low, ratios are less hurt"
        )
    return rows, failures


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "num_cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "huge_pages": huge_pages.read_text(encoding="utf-8").strip()
        if huge_pages.exists()
        else "unknown",
        "load_1m": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.transfer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--full", action="store_true", help="1 GiB too")
    parser.add_argument("--sizes", type=parse_size, nargs="+", help="instead of 64K 1M 16M 256M")
    parser.add_argument("--only", nargs="+", help="only contestants whose name has one of these")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant and size")
    parser.add_argument(
        "--patience", type=float, default=2.0, help="seconds a turn waits for a quiet machine"
    )
    parser.add_argument(
        "--write", type=parse_size, default=WRITE_NBYTES, help="bytes of one write of ours"
    )
    parser.add_argument("--huge-pages", action="store_true", help="ask for them on both sides")
    parser.add_argument("--json", type=Path, help="also write every sample to this file")
    options = parser.parse_args()

    def is_wanted(name: str) -> bool:
        return not options.only or any(part.lower() in name.lower() for part in options.only)

    contestants = [
        contestant(options.write) if issubclass(contestant, Ours) else contestant()
        for contestant in CONTESTANTS
        if is_wanted(contestant.name)
    ]
    sizes = sorted(options.sizes or [*SIZES, *([GIB] if options.full else [])])
    about = machine()
    print(
        f"{about['num_cores']} cores, kernel {about['kernel']}, Python {about['python']}, "
        f"huge pages {about['huge_pages']}, load {about['load_1m']:.1f}",
        flush=True,
    )
    duels, notes = start(contestants, max(*sizes, FIXED_COST_NBYTES), options.huge_pages)
    print("\n".join(notes), flush=True)
    try:
        rows, failures = race(duels, [FIXED_COST_NBYTES, *sizes], options.rounds, options.patience)
    finally:
        for duel in duels:
            duel.end()
    opening = open_kv_file() if is_wanted(OPEN_NAME) else None
    results = Results(rows)
    bars, impossible = results.bars(), results.impossible()
    opened = [] if opening is None else opening.lines()
    print("\n".join([*table(results, contestants), *opened, "", *bars, *failures, *impossible]))
    if options.json is not None:
        report = {
            "machine": about,
            "rows": [row.as_json() for row in rows],
            "opening": None if opening is None else opening.as_json(),
            "bars": bars,
            "notes": [*notes, *failures, *impossible],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if impossible else 0


if __name__ == "__main__":
    sys.exit(main())
