import json
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from tests.ops.fake_router import FakeRouter


def doctor(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ops.pdctl", "doctor", "--seconds", "0.2", *arguments],
        capture_output=True,
        text=True,
        env=env,
        encoding="utf-8",
        timeout=50,
        check=False,
    )


def test_nothing_runs(program_env: dict[str, str], closed_url: str) -> None:
    result = doctor(program_env, "--url", closed_url)
    assert result.returncode == 1
    assert f"FAIL    service router {closed_url}: no answer" in result.stdout
    assert "start it with pdctl up" in result.stdout
    assert result.stderr == ""


def test_the_configuration_names_the_router(
    program_env: dict[str, str], closed_url: str, tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    port = closed_url.rpartition(":")[2]
    config.write_text(f"[router]\nlisten_port = {port}\n", encoding="utf-8")
    result = doctor(program_env, "--config", str(config), "--json")
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert report["num_failed"] >= 1
    assert any(closed_url in finding["subject"] for finding in report["services"])
    assert report["diagnosis"]["bottleneck"] == "unknown"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--url", "nonsense"], "must start with http"),
        (["--admin", "localhost:7411"], "must start with http"),
        (["--config", "/nowhere/c.toml"], "Cannot read the configuration file"),
        (["--api-key-file", "/nowhere/key"], "/nowhere/key"),
    ],
)
def test_bad_input_is_one_line(
    program_env: dict[str, str], arguments: list[str], sentence: str
) -> None:
    result = doctor(program_env, *arguments)
    assert result.returncode == 1
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


async def test_a_router_alone_is_looked_at(fake_router: FakeRouter) -> None:
    health = {"state": "serving", "is_ready": False, "workers": []}
    fake_router.answers["/healthz"] = lambda _: web.json_response(health)
    fake_router.answers["/metrics"] = lambda _: web.Response(
        text="# TYPE pd_router_requests_in_flight gauge\npd_router_requests_in_flight 0\n"
    )
    arguments = ("--seconds", "0.2", "--line-rate-gbps", "10")
    result = await fake_router.pdctl("doctor", "--url", fake_router.url, *arguments)
    assert result.returncode == 1
    assert "no prefill and no decode worker" in result.stdout
    assert "why is it slow: idle (OK)" in result.stdout
