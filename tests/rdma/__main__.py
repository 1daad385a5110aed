"""Run the RDMA tests in the rig: ``python -m tests.rdma [pytest arguments]``.

Where the rig cannot be had, one line says how many tests did not run and why, and the exit status
is 0; with PD_RDMA_RIG=required it is 1. PD_LONG_TESTS=1 runs the tests marked long as well.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.rdma.rig.__main__ import explain, say
from tests.rdma.rig.errors import RigUnavailable
from tests.rdma.rig.host import this_host
from tests.rdma.rig.machine import prepare

RIG_VARIABLE: Final = "PD_RDMA_RIG"
_FOLDER: Final = "tests/rdma"
_TIMEOUT_S: Final = 1800.0
_LONG_TIMEOUT_S: Final = 7200.0


class CollectionFailed(Exception):
    """The tests could not even be counted; the text is pytest's output."""


def is_long(env: Mapping[str, str]) -> bool:
    """True in the long mode."""
    return env.get("PD_LONG_TESTS") == "1"


def pytest_command(arguments: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """The command that runs the RDMA tests, or those that ``arguments`` name."""
    marked = "rdma" if is_long(env) else "rdma and not long"
    named = any(Path(argument.partition("::")[0]).exists() for argument in arguments)
    # Ours first: a -m given by the person comes later and wins.
    return [
        *(sys.executable, "-m", "pytest", "-m", marked, "-p", "no:cacheprovider"),
        *arguments,
        *([] if named else [_FOLDER]),
    ]


def count_tests(command: Sequence[str]) -> int:
    """How many tests ``command`` would run; CollectionFailed if a module cannot be loaded."""
    result = subprocess.run(
        [*command, "--collect-only", "-q"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    # 5: there are none.
    if result.returncode not in (0, 5):
        raise CollectionFailed(result.stdout)
    return parse_count(result.stdout)


def parse_count(text: str) -> int:
    """The number of tests that pytest says it would run."""
    found = re.search(r"^(\d+)(?:/\d+)? tests? collected", text, re.MULTILINE)
    return int(found[1]) if found else 0


def not_run_line(num_tests: int, reason: str) -> str:
    """The one line in place of the tests."""
    tests = "1 RDMA test" if num_tests == 1 else f"{num_tests} RDMA tests"
    return f"{tests} did NOT run, because {reason}."


def main(arguments: list[str]) -> int:
    """Run the tests, or say why not; return pytest's exit status, 124 or 125 of the guest."""
    # So that the guest's processes are stopped on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    command = pytest_command(arguments, os.environ)
    started_at = time.monotonic()
    try:
        rig = prepare(this_host(), os.environ, say)
    except RigUnavailable as exc:
        try:
            num_tests = count_tests(command)
        except CollectionFailed as failed:
            print(failed, flush=True)
            return 1
        print(not_run_line(num_tests, str(exc)), flush=True)
        return 1 if os.environ.get(RIG_VARIABLE) == "required" else 0
    prepared_at = time.monotonic()
    timeout_s = _LONG_TIMEOUT_S if is_long(os.environ) else _TIMEOUT_S
    ending = rig.run(command, sys.stdout.buffer, timeout_s=timeout_s)
    explain(ending, timeout_s)
    say(
        f"prepared in {prepared_at - started_at:.1f} s, "
        f"ran {time.monotonic() - prepared_at:.1f} s, of which boot {ending.booted_s or 0:.1f} s"
    )
    return ending.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
