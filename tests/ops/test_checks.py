import sys
from pathlib import Path

from ops.checks import Result, Step, plan_steps, run_steps, summary

BIN = Path("/venv/bin")


def test_all_checks_in_order_with_the_model_before_the_tests() -> None:
    steps = plan_steps(BIN, ["-k", "name"], {})
    assert [step.name for step in steps] == [
        *("ruff check", "ruff format", "mypy", "lint-imports", "model fetch", "pytest", "rdma rig")
    ]
    assert steps[-2].command == (
        *("/venv/bin/python", "-m", "pytest", "-m", "not long", "-k", "name"),
    )


def test_long_mode_selects_nothing_away() -> None:
    assert "not long" not in plan_steps(BIN, [], {"PD_LONG_TESTS": "1"})[-2].command
    assert "not long" in plan_steps(BIN, [], {"PD_LONG_TESTS": "0"})[-2].command


def test_the_rig_runs_all_rdma_tests_whatever_pytest_is_told() -> None:
    (step,) = [step for step in plan_steps(BIN, ["-k", "name"], {}) if step.name == "rdma rig"]
    assert step.command == ("/venv/bin/python", "-m", "tests.rdma")


def test_all_steps_run_after_a_failure(tmp_path: Path) -> None:
    def step(name: str, code: str) -> Step:
        return Step(name, (sys.executable, "-c", code))

    lines: list[str] = []
    steps = [
        step("bad", "raise SystemExit(3)"),
        Step("absent", ("/nowhere/tool",)),
        step("good", "open('here', 'w').close()"),
    ]
    results = run_steps(steps, tmp_path, lines.append)
    assert [result.returncode for result in results] == [3, 127, 0]
    assert (tmp_path / "here").exists()
    assert lines == ["== bad", "== absent", "== good"]


def test_summary_names_what_failed_and_the_times() -> None:
    good, bad = Result(Step("mypy", ()), 0, 12.34), Result(Step("pytest", ()), 1, 5.0)
    assert summary([good, bad]) == [
        "ok      mypy              12.3 s",
        "FAILED  pytest             5.0 s",
        "checks failed: pytest",
    ]
    assert summary([good])[-1] == "all checks passed"
