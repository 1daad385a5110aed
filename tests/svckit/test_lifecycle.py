import asyncio
import itertools
import json
import signal
from collections.abc import Callable
from subprocess import Popen
from typing import Any

import pytest

from svckit.errors import DrainDeadlineError, InvalidTransition, ServiceError
from svckit.lifecycle import TRANSITIONS, Lifecycle, State, Step, run_service

Start = Callable[..., Popen[str]]

# `behaviour` is the body of the service; it says "up" once its signal handlers are in place.
PROGRAM = """
    import asyncio, sys
    from svckit.lifecycle import Step, run_service
    from svckit.logging import configure_logging
    from svckit.errors import ServiceError
    configure_logging("sample", fmt="json")

    async def main(lifecycle):
        mode = sys.argv[1]
        if mode == "starting":
            print("up", flush=True)
            await asyncio.sleep(60)
        lifecycle.advance(Step.READY)
        print("up", flush=True)
        await lifecycle.wait_draining()
        print("draining", flush=True)
        if mode != "willing":
            await asyncio.sleep(60)

    sys.exit(run_service(main, drain_timeout_s=float(sys.argv[2])))
"""


@pytest.mark.parametrize(("state", "step"), list(itertools.product(State, Step)))
def test_every_state_and_step(state: State, step: Step) -> None:
    lifecycle = Lifecycle()
    path = {
        State.STARTING: [],
        State.SERVING: [Step.READY],
        State.DRAINING: [Step.READY, Step.DRAIN],
        State.STOPPED: [Step.STOP],
    }
    for earlier in path[state]:
        lifecycle.advance(earlier)
    assert lifecycle.state is state
    if (state, step) in TRANSITIONS:
        assert lifecycle.advance(step) is TRANSITIONS[state, step]
        assert lifecycle.is_ready is (lifecycle.state is State.SERVING)
    else:
        assert state is State.STOPPED or (state, step) == (State.SERVING, Step.READY)
        with pytest.raises(
            InvalidTransition, match=f"{path[state][-1].value}: .* -> {state.value}"
        ):
            lifecycle.advance(step)
        assert lifecycle.state is state


def test_callbacks_run_on_changes_only() -> None:
    lifecycle = Lifecycle()
    changes: list[tuple[State, State]] = []
    lifecycle.on_change(lambda old, new: changes.append((old, new)))
    for step in (Step.READY, Step.DRAIN, Step.DRAIN, Step.STOP):
        lifecycle.advance(step)
    assert changes == [
        (State.STARTING, State.SERVING),
        (State.SERVING, State.DRAINING),
        (State.DRAINING, State.STOPPED),
    ]


async def test_wait_draining_returns_after_the_drain_step() -> None:
    lifecycle = Lifecycle()
    lifecycle.advance(Step.READY)
    waiting = asyncio.create_task(lifecycle.wait_draining())
    await asyncio.sleep(0)
    assert not waiting.done()
    lifecycle.advance(Step.DRAIN)
    async with asyncio.timeout(10):
        await waiting


def test_return_gives_zero_and_stops() -> None:
    seen: list[Lifecycle] = []

    async def main(lifecycle: Lifecycle) -> None:
        seen.append(lifecycle)

    assert run_service(main) == 0
    assert seen[0].state is State.STOPPED


@pytest.mark.parametrize("is_grouped", [False, True])
def test_service_error_is_one_sentence(
    capsys: pytest.CaptureFixture[str], is_grouped: bool
) -> None:
    async def fail() -> None:
        raise ServiceError("The port is taken.")

    async def main(_lifecycle: Lifecycle) -> None:
        if is_grouped:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
        await fail()

    assert run_service(main) == 1
    assert capsys.readouterr().err == "The port is taken.\n"


def test_a_defect_is_logged_with_its_trace(start_program: Start) -> None:
    process = start_program(
        """
        import sys
        from svckit.lifecycle import run_service
        from svckit.logging import configure_logging
        configure_logging("sample", fmt="json")
        async def main(_lifecycle):
            raise ZeroDivisionError("oh")
        sys.exit(run_service(main))
        """
    )
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 70
    last: dict[str, Any] = json.loads(errors.splitlines()[-1])
    assert last["event"] == "defect"
    assert "ZeroDivisionError: oh" in last["exception"]
    assert "Traceback" in last["exception"]


def await_line(process: Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == line + "\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_drains(start_program: Start, number: signal.Signals) -> None:
    process = start_program(PROGRAM, "willing", "20")
    await_line(process, "up")
    process.send_signal(number)
    await_line(process, "draining")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    changes = [json.loads(line) for line in errors.splitlines()]
    assert [entry["new"] for entry in changes if entry["event"] == "state changed"] == [
        *("serving", "draining", "stopped")
    ]


def test_second_signal_cancels(start_program: Start) -> None:
    process = start_program(PROGRAM, "slow", "60")
    await_line(process, "up")
    process.send_signal(signal.SIGTERM)
    await_line(process, "draining")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT


def test_signal_during_start_cancels_at_once(start_program: Start) -> None:
    process = start_program(PROGRAM, "starting", "60")
    await_line(process, "up")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_drain_deadline_cancels(start_program: Start) -> None:
    process = start_program(PROGRAM, "slow", "-4.9")  # the backstop adds 5 s
    await_line(process, "up")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 3
    assert "drain deadline passed" in errors


def test_third_signal_ends_work_that_swallows_its_cancellation(start_program: Start) -> None:
    process = start_program(
        """
        import asyncio, sys
        from svckit.lifecycle import Step, run_service
        from svckit.logging import configure_logging
        configure_logging("sample")
        async def main(lifecycle):
            lifecycle.advance(Step.READY)
            print("up", flush=True)
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    print("swallowed", flush=True)
        sys.exit(run_service(main, drain_timeout_s=60))
        """
    )
    await_line(process, "up")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    await_line(process, "swallowed")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


def test_work_left_at_the_drain_deadline_is_a_sentence_and_exit_code_3(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def main(_lifecycle: Lifecycle) -> None:
        async with asyncio.TaskGroup():
            raise DrainDeadlineError("Two prompts were left.")

    assert run_service(main) == 3
    assert "Two prompts were left.\n" in capfd.readouterr().err
