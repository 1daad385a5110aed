import subprocess
import sys
from typing import Any

import pytest
from aiohttp import web

from ops.status import is_serving, status_lines
from tests.ops.fake_router import FakeRouter

URL = "http://127.0.0.1:8000"


def worker(role: str, number: int, **facts: Any) -> dict[str, Any]:
    return {
        "role": role,
        "instance_id": f"{role}-{number}",
        "address": f"127.0.0.1:{7401 + number}",
        "state": "serving",
        "num_running": 0,
        "num_waiting": 0,
        "num_free_blocks": 10,
        **facts,
    }


HEALTH: dict[str, Any] = {
    "state": "serving",
    "model": "m",
    "is_ready": True,
    "workers": [worker("prefill", 0, num_running=3), worker("decode", 1, state="draining")],
}


def test_table_is_aligned_and_sorted() -> None:
    assert status_lines(URL, HEALTH) == [
        "router http://127.0.0.1:8000: serving, model m",
        "role     instance   address         state     running  waiting  free blocks",
        "decode   decode-1   127.0.0.1:7402  draining  0        0        10",
        "prefill  prefill-0  127.0.0.1:7401  serving   3        0        10",
    ]


@pytest.mark.parametrize(
    ("health", "last"),
    [
        ({"state": "serving", "is_ready": False, "workers": []}, "no worker is registered"),
        ({"state": "serving"}, "its workers are shown only to holders of the API key"),
    ],
)
def test_without_workers(health: dict[str, Any], last: str) -> None:
    assert status_lines(URL, health)[-1].startswith(last)


def test_a_missing_kind_is_said() -> None:
    lines = status_lines(URL, {**HEALTH, "is_ready": False})
    assert lines[0].endswith("a kind of worker is missing")


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, True), ({"is_ready": False}, False), ({"state": "draining"}, False)],
)
def test_is_serving(change: dict[str, Any], expected: bool) -> None:
    assert is_serving({**HEALTH, **change}) is expected


@pytest.mark.parametrize(("is_ready", "code"), [(True, 0), (False, 1)])
async def test_exit_code(fake_router: FakeRouter, is_ready: bool, code: int) -> None:
    fake_router.answers["/healthz"] = lambda _: web.json_response({**HEALTH, "is_ready": is_ready})
    result = await fake_router.pdctl("status", "--url", fake_router.url)
    assert result.returncode == code
    assert "prefill-0" in result.stdout


def test_nothing_listening_is_one_sentence(program_env: dict[str, str], closed_url: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ops.pdctl", "status", "--url", closed_url],
        capture_output=True,
        text=True,
        env=program_env,
        timeout=40,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr == (
        f"Nothing is listening at {closed_url}; start the system with pdctl up "
        "or name another address with --url.\n"
    )
