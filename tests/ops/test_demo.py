import signal

import pytest

from ops.model_cache import DEFAULT_MODEL, default_model_dir
from tests.ops.fake_services import FakeServices
from tests.ops.stand_ins import is_alive

DEADLINE_S = 50


@pytest.fixture(autouse=True)
def fetched_model(fake_services: FakeServices) -> None:
    folder = default_model_dir(fake_services.env)
    folder.mkdir(parents=True)
    (folder / ".complete").write_text(DEFAULT_MODEL.sha256, encoding="utf-8")


def test_answer_table_and_a_clean_end(fake_services: FakeServices) -> None:
    process = fake_services.pdctl("demo", "Why?")
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    assert "> Why?" in output
    assert "An answer." in output
    assert "handoff                    50.0 ms  not hidden by prefill; 5.00 MB by tcp" in output
    assert len(fake_services.pids()) == 3
    assert not any(is_alive(pid) for pid in fake_services.pids())


def test_ctrl_c_during_the_answer_ends_it_all(fake_services: FakeServices) -> None:
    fake_services.env["FAKE_SILENCE"] = "1"
    process = fake_services.pdctl("demo", "Why?")
    assert process.stderr is not None
    while (line := process.stderr.readline()) != "pdctl: router: asked\n":
        assert line, "pdctl ended early"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert not any(is_alive(pid) for pid in fake_services.pids())


def test_a_failed_start_is_one_sentence(fake_services: FakeServices) -> None:
    fake_services.env["FAKE_REFUSAL"] = "prefill"
    process = fake_services.pdctl("demo")
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == ("prefill-0 cannot start: The pool does not fit into memory.")
