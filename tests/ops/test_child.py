import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from ops.child import Child, describe_exit
from ops.cluster import ChildSpec
from svckit.errors import ServiceError

PRINT_FACTS = "import os, sys; print(os.environ['X'], os.getsid(0) == os.getpid(), sys.argv[1:])"


def spec(*command: str) -> ChildSpec:
    return ChildSpec(name="c", command=command, env={"X": "x"}, ready_url="", stop_rank=0)


@pytest.mark.parametrize(
    ("code", "words"), [(3, "exit code 3"), (-9, "SIGKILL"), (-63, "signal 63"), (0, "exit code 0")]
)
def test_describe_exit(code: int, words: str) -> None:
    assert describe_exit(code) == words


async def test_output_goes_to_the_log_and_the_child_has_its_own_session(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = Child(spec(sys.executable, "-c", PRINT_FACTS), tmp_path / "c.log", reader)
    try:
        async with asyncio.timeout(30):
            await child.start()
            assert await child.wait() == 0
    finally:
        os.close(reader)
        os.close(writer)
    assert not child.is_running
    text = child.log_path.read_text("utf-8")
    assert text == f"x True ['--parent-fd', '{reader}']\n"


async def test_a_program_that_is_not_there_is_a_service_error(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = Child(spec("/nowhere/program"), tmp_path / "c.log", reader)
    try:
        with pytest.raises(ServiceError, match="c cannot be started: /nowhere/program: No such"):
            await child.start()
    finally:
        os.close(reader)
        os.close(writer)
    assert not child.is_running
    assert child.pid is None
    child.send(signal.SIGTERM)  # nothing to send it to
