"""Run any command in the guest: ``python -m tests.rdma.rig [--share FOLDER]... -- COMMAND...``.

For example ``python -m tests.rdma.rig -- ib_write_bw --version``, or a benchmark. The exit status
is the command's; 124 if it took too long, 125 if the guest died or the rig cannot be had.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from tests.rdma.rig.errors import RigUnavailable
from tests.rdma.rig.guest import NOT_RUN, TIMED_OUT, Ending
from tests.rdma.rig.host import this_host
from tests.rdma.rig.machine import prepare

_TIMEOUT_S = 1800.0


def say(line: str) -> None:
    """Show one line of progress."""
    print(f"rdma rig: {line}", file=sys.stderr, flush=True)


def explain(ending: Ending, timeout_s: float) -> None:
    """Say what the exit status alone does not tell."""
    if ending.status == TIMED_OUT:
        say(f"stopped after {timeout_s:g} s")
    elif ending.status == NOT_RUN:
        say(f"the guest ended without an exit status; its kernel last said:\n{ending.kernel_log}")


def main(arguments: list[str]) -> int:
    """Run the command of ``arguments``; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.rdma.rig", description=__doc__)
    parser.add_argument("--share", action="append", type=Path, default=[], metavar="FOLDER")
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_S, metavar="SECONDS")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    # So that the guest's processes are stopped on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        rig = prepare(this_host(), os.environ, say)
    except RigUnavailable as exc:
        say(f"the rig cannot be had here: {exc}")
        return NOT_RUN
    shares = [folder.resolve() for folder in options.share]
    ending = rig.run(options.command, sys.stdout.buffer, timeout_s=options.timeout, shares=shares)
    explain(ending, options.timeout)
    return ending.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
