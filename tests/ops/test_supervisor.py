import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ops.cluster import ChildSpec
from ops.restart_policy import RestartPolicy
from ops.supervisor import Supervisor
from svckit.errors import ServiceError
from tests.ops.stand_ins import StandIns, is_alive

DEADLINE_S = 40
POLICY = RestartPolicy(max_restarts=2, first_delay_s=0.05, max_delay_s=0.1)


class Harness:
    """A supervisor over stand-ins, and what it reported."""

    def __init__(
        self,
        stand_ins: StandIns,
        specs: list[ChildSpec],
        *,
        ready_timeout_s: float,
        stop_timeout_s: float,
    ) -> None:
        self.lines: list[str] = []
        self.stand_ins = stand_ins
        self.supervisor = Supervisor(
            specs,
            stand_ins.folder,
            self.lines.append,
            policy=POLICY,
            ready_timeout_s=ready_timeout_s,
            stop_timeout_s=stop_timeout_s,
        )

    async def run(self, session: Callable[[], Awaitable[None]] | None = None) -> None:
        async def nothing() -> None:
            return

        async with asyncio.timeout(DEADLINE_S):
            await self.supervisor.run(session or nothing)

    def assert_all_ended(self) -> None:
        assert not [pid for pid in self.stand_ins.pids() if is_alive(pid)]


Make = Callable[..., Harness]


@pytest.fixture
def make(stand_ins: StandIns) -> Make:
    def make(*modes: str, ready_timeout_s: float = 30, stop_timeout_s: float = 20) -> Harness:
        specs = [
            stand_ins.spec(f"{mode}-{rank}", mode, stop_rank=rank)
            for rank, mode in enumerate(modes)
        ]
        return Harness(
            stand_ins, specs, ready_timeout_s=ready_timeout_s, stop_timeout_s=stop_timeout_s
        )

    return make


def the_service_error(error: BaseException) -> ServiceError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ServiceError)
    return error


async def test_session_runs_when_all_are_ready_then_all_stop_in_order(make: Make) -> None:
    harness = make("serve", "serve", "serve")
    ports = [int(child.spec.command[2]) for child in harness.supervisor.children]
    alive: list[bool] = []

    async def session() -> None:
        alive.extend(is_alive(pid) for pid in harness.stand_ins.pids())

    await harness.run(session)
    assert alive == [True] * 3
    assert harness.stand_ins.stop_order() == ports
    harness.assert_all_ended()
    assert sum("ready after" in line for line in harness.lines) == 3


async def test_a_killed_child_is_started_again(make: Make) -> None:
    harness = make("serve")
    [child] = harness.supervisor.children

    async def session() -> None:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        while child.is_ready.is_set():
            await asyncio.sleep(0.02)
        await child.is_ready.wait()

    await harness.run(session)
    assert "serve-0 ended (SIGKILL), starting it again in 0.05 s" in harness.lines
    assert len(harness.stand_ins.pids()) == 2
    harness.assert_all_ended()


async def test_a_crash_before_ready_is_restarted_too(make: Make) -> None:
    harness = make("crash-once")
    await harness.run()
    assert len(harness.stand_ins.pids()) == 2


async def test_a_spent_budget_stops_everything_with_a_sentence(make: Make) -> None:
    harness = make("serve", "crash")
    with pytest.raises(BaseExceptionGroup) as caught:
        await harness.run()
    sentence = str(the_service_error(caught.value))
    assert sentence.startswith("crash-1 ended 3 times, giving up: it ended with exit code 9; its")
    harness.assert_all_ended()


async def test_a_refused_setting_is_not_tried_again(make: Make) -> None:
    harness = make("refuse")
    with pytest.raises(BaseExceptionGroup) as caught:
        await harness.run()
    assert str(the_service_error(caught.value)) == ("refuse-0 cannot start: The setting is wrong.")
    assert len(harness.stand_ins.pids()) == 1


async def test_not_ready_in_time(make: Make) -> None:
    harness = make("never-ready", ready_timeout_s=2)
    with pytest.raises(BaseExceptionGroup) as caught:
        await harness.run()
    assert "never-ready-0 was not ready within 2 s" in str(the_service_error(caught.value))
    harness.assert_all_ended()


async def test_a_stubborn_child_is_killed_after_its_deadline(make: Make) -> None:
    harness = make("stubborn", stop_timeout_s=0.2)
    await harness.run()
    assert "stubborn-0 did not stop within 0.2 s, killing" in harness.lines
    harness.assert_all_ended()


async def test_a_second_cancellation_kills_at_once(make: Make) -> None:
    harness = make("stubborn", stop_timeout_s=DEADLINE_S)
    is_serving = asyncio.Event()

    async def session() -> None:
        is_serving.set()
        await asyncio.sleep(DEADLINE_S)

    running = asyncio.create_task(harness.run(session))
    async with asyncio.timeout(DEADLINE_S):
        await is_serving.wait()
        running.cancel()
        await asyncio.sleep(0.2)
        assert is_alive(harness.stand_ins.pids()[0])  # the drain deadline is far away
        running.cancel()
        await asyncio.wait((running,))
    harness.assert_all_ended()


SUPERVISOR_PROGRAM = """
    import asyncio, pathlib, sys
    from ops.cluster import ChildSpec
    from ops.restart_policy import RestartPolicy
    from ops.supervisor import Supervisor

    async def main():
        port, folder, command = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]
        spec = ChildSpec(name="c", command=tuple(command), env={}, stop_rank=0,
                         ready_url=f"http://127.0.0.1:{port}/readyz")
        supervisor = Supervisor([spec], folder, print, policy=RestartPolicy(),
                                ready_timeout_s=30, stop_timeout_s=30)
        async def session():
            print("serving", flush=True)
            await asyncio.sleep(60)
        await supervisor.run(session)

    asyncio.run(main())
"""


def test_children_end_when_the_supervisor_is_killed(
    stand_ins: StandIns, tmp_path: Path, program_env: dict[str, str]
) -> None:
    program = tmp_path / "supervise.py"
    program.write_text(textwrap.dedent(SUPERVISOR_PROGRAM), encoding="utf-8")
    command = stand_ins.spec("c", "serve").command
    with subprocess.Popen(
        [sys.executable, str(program), command[2], str(tmp_path), *command],
        stdout=subprocess.PIPE,
        env=program_env,
        text=True,
    ) as supervisor:
        assert supervisor.stdout is not None
        while (line := supervisor.stdout.readline()) != "serving\n":
            assert line, "the supervisor ended early"
        [pid] = stand_ins.pids()
        assert is_alive(pid)
        supervisor.kill()
    wait_for_end(pid)


def wait_for_end(pid: int) -> None:
    """Poll: the process is not our child. The test's own time-out is the deadline."""
    poll = subprocess.run(["tail", f"--pid={pid}", "-s", "0.1", "-f", "/dev/null"], check=False)
    assert poll.returncode == 0
    assert not is_alive(pid)
