import subprocess
import sys
from pathlib import Path

import pytest

from ops.model_cache import DEFAULT_MODEL, default_model_dir
from ops.start import flag_value, plan_start
from svckit.errors import ServiceError


def fetched(tmp_path: Path) -> dict[str, str]:
    """An environment whose cache holds the default model."""
    env = {"PD_CACHE_DIR": str(tmp_path)}
    folder = default_model_dir(env)
    folder.mkdir(parents=True)
    (folder / ".complete").write_text(DEFAULT_MODEL.sha256, encoding="utf-8")
    return env


def test_service_flags_are_passed_through() -> None:
    command, env = plan_start("decode", ["--model", "/m", "--listen-port=5"], {"A": "b"})
    assert command == [sys.executable, "-m", "decode_svc", "--model", "/m", "--listen-port=5"]
    assert env == {"A": "b", "PYTHONUTF8": "1"}


def test_threads_reach_the_environment() -> None:
    for flags in (["--threads", "3"], ["--threads=3"]):
        _, env = plan_start("decode", ["--model", "/m", *flags], {})
        assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in plan_start("decode", ["--model=/m", "--threads=0"], {})[1]


def test_the_default_model_is_filled_in(tmp_path: Path) -> None:
    env = fetched(tmp_path)
    command, _ = plan_start("prefill", ["--threads", "1"], env)
    assert flag_value(command, "--model") == str(default_model_dir(env))


def test_a_model_from_variable_or_file_is_left_alone(tmp_path: Path) -> None:
    env = fetched(tmp_path)
    command, _ = plan_start("prefill", [], {**env, "PD_PREFILL_MODEL": "/x"})
    assert flag_value(command, "--model") is None
    config = tmp_path / "c.toml"
    config.write_text("[prefill]\nmodel = '/x'\n", encoding="utf-8")
    flags = ["--config", str(config)]
    assert flag_value(plan_start("prefill", flags, env)[0], "--model") is None
    assert flag_value(plan_start("decode", flags, env)[0], "--model") is not None


def test_a_file_that_cannot_be_read_is_for_the_service_to_refuse(tmp_path: Path) -> None:
    command, _ = plan_start("decode", ["--config", str(tmp_path / "absent")], fetched(tmp_path))
    assert flag_value(command, "--model") is None


def test_a_model_that_is_not_fetched_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="run pdctl model fetch first"):
        plan_start("decode", [], {"PD_CACHE_DIR": str(tmp_path)})


def test_help_needs_no_model(tmp_path: Path) -> None:
    command, _ = plan_start("decode", ["--help"], {"PD_CACHE_DIR": str(tmp_path)})
    assert command[-1] == "--help"


def test_flag_value() -> None:
    assert flag_value(["--a", "1", "--a=2"], "--a") == "2"
    assert flag_value(["--ab", "1"], "--a") is None
    assert flag_value(["--a"], "--a") is None


def pdctl(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ops.pdctl", "start", *arguments],
        capture_output=True,
        text=True,
        env=env,
        timeout=50,
        check=False,
    )


@pytest.mark.parametrize("service", ["prefill", "decode", "router"])
def test_help_is_the_services_own(program_env: dict[str, str], service: str) -> None:
    result = pdctl(program_env, service, "--help")
    assert result.returncode == 0
    assert f"PD_{service.upper()}_LISTEN_PORT" in " ".join(result.stdout.split())


def test_a_services_refusal_and_exit_code_come_through(program_env: dict[str, str]) -> None:
    result = pdctl(program_env, "decode", "--model", "/m", "--listen-port", "x")
    assert result.returncode == 1
    assert (
        result.stderr == "listen_port from --listen-port is 'x', but it must be a whole number.\n"
    )


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("engine", 2)])
def test_usage(program_env: dict[str, str], argument: str, code: int) -> None:
    result = pdctl(program_env, argument)
    assert result.returncode == code
    assert "pdctl start prefill|decode|router" in result.stdout + result.stderr


def test_a_prefill_worker_copies_past_the_cache_unless_told_otherwise() -> None:
    name = "GLIBC_TUNABLES"
    assert "non_temporal" in plan_start("prefill", ["--model", "/m"], {})[1][name]
    assert plan_start("prefill", ["--model", "/m"], {name: "own"})[1][name] == "own"
    assert name not in plan_start("decode", ["--model", "/m"], {})[1]
