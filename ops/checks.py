"""All checks of the project, one after the other, each with its time: ``python -m ops.checks``.

Arguments are passed to pytest. PD_LONG_TESTS=1 runs the tests marked long as well.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LONG_TESTS_VARIABLE: Final = "PD_LONG_TESTS"


@dataclass(frozen=True, slots=True)
class Step:
    """One check: its name in the report and the command, relative to the checkout."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """How one step ended."""

    step: Step
    returncode: int
    duration_s: float


def plan_steps(
    bin_folder: Path, pytest_arguments: Sequence[str], env: Mapping[str, str]
) -> list[Step]:
    """The steps in order: cheap ones first, the model before the tests that need it."""
    python = str(bin_folder / "python")
    selection = () if env.get(LONG_TESTS_VARIABLE) == "1" else ("-m", "not long")
    return [
        Step("ruff check", (str(bin_folder / "ruff"), "check", ".")),
        Step("ruff format", (str(bin_folder / "ruff"), "format", "--check", ".")),
        Step("mypy", (str(bin_folder / "mypy"),)),
        Step("lint-imports", (str(bin_folder / "lint-imports"),)),
        Step("model fetch", (str(bin_folder / "pdctl"), "model", "fetch")),
        # Ours first: a -m given by the person comes later and wins.
        Step("pytest", (python, "-m", "pytest", *selection, *pytest_arguments)),
        # Whole, whatever pytest was told. It says itself if this machine cannot have the rig.
        Step("rdma rig", (python, "-m", "tests.rdma")),
    ]


def run_steps(
    steps: Sequence[Step], root: Path, report: Callable[[str], None]
) -> tuple[Result, ...]:
    """Run all steps, also after a failure: one run shows everything that is wrong."""
    results = []
    for step in steps:
        report(f"== {step.name}")
        started_at = time.monotonic()
        returncode = run_command(step.command, root)
        results.append(Result(step, returncode, time.monotonic() - started_at))
    return tuple(results)


def run_command(command: Sequence[str], root: Path) -> int:
    """The exit code of ``command``; 127, as in a shell, if it is not installed."""
    try:
        return subprocess.run(command, cwd=root, check=False).returncode
    except FileNotFoundError:
        print(f"{command[0]} is not installed; run python3 ops/bootstrap.py test.", flush=True)
        return 127


def summary(results: Sequence[Result]) -> list[str]:
    """One line per step and one for the whole."""
    lines = [
        f"{'ok' if result.returncode == 0 else 'FAILED':<8}{result.step.name:<14}"
        f"{result.duration_s:>8.1f} s"
        for result in results
    ]
    failed = [result.step.name for result in results if result.returncode != 0]
    lines.append(f"checks failed: {', '.join(failed)}" if failed else "all checks passed")
    return lines


def main() -> int:
    """Run everything; 1 if anything failed."""
    root = Path(__file__).resolve().parent.parent
    # Not resolved: the interpreter is a link out of the environment that holds the tools.
    bin_folder = Path(sys.executable).parent
    steps = plan_steps(bin_folder, sys.argv[1:], os.environ)
    results = run_steps(steps, root, lambda line: print(line, flush=True))
    print("\n".join(summary(results)), flush=True)
    return 1 if any(result.returncode != 0 for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
