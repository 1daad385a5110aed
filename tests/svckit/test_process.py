import os
import signal
from collections.abc import Callable
from subprocess import Popen

import pytest

from svckit.errors import ServiceError
from svckit.process import pin_cpus

PINNED = """
    import os, sys, threading
    from svckit.process import pin_cpus
    asked, seen = threading.Event(), []
    def early():
        asked.wait(20)
        seen.append(os.sched_getaffinity(0))
    thread = threading.Thread(target=early)
    thread.start()
    num_cpus = pin_cpus([int(sys.argv[1])])
    asked.set()
    thread.join(20)
    print(num_cpus, sorted(os.sched_getaffinity(0)), sorted(seen[0]))
"""

WATCHED = """
    import signal, sys, time
    from svckit.process import watch_parent
    if sys.argv[2] == "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
    watch_parent(int(sys.argv[1]), grace_s=0.1)
    print("up", flush=True)
    while True:
        time.sleep(60)
"""


def test_pinning_moves_threads_that_exist_already(
    start_program: Callable[..., Popen[str]],
) -> None:
    cpu = max(os.sched_getaffinity(0))
    output = start_program(PINNED, str(cpu)).communicate(timeout=30)[0]
    assert output == f"1 [{cpu}] [{cpu}]\n"


def test_empty_list_changes_nothing() -> None:
    before = os.sched_getaffinity(0)
    assert pin_cpus(()) == len(before)
    assert os.sched_getaffinity(0) == before


def test_a_cpu_that_is_not_allowed_is_refused() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ServiceError, match="CPU 4095, which this process may not use"):
        pin_cpus([4095])
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("kind", "number", "said"),
    [("willing", signal.SIGTERM, ""), ("stubborn", signal.SIGKILL, "asked\n")],
)
def test_end_of_parent_terminates_then_kills(
    start_program: Callable[..., Popen[str]], kind: str, number: int, said: str
) -> None:
    reader, writer = os.pipe()
    process = start_program(WATCHED, str(reader), kind, pass_fds=(reader,))
    os.close(reader)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    assert process.poll() is None
    os.close(writer)
    assert process.communicate(timeout=30)[0] == said
    assert process.returncode == -number


def test_a_descriptor_that_is_not_open_is_no_parent(
    start_program: Callable[..., Popen[str]],
) -> None:
    process = start_program(WATCHED, "987", "willing")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    assert process.poll() is None
