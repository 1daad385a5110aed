import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ops.model_cache import DEFAULT_MODEL, default_model_dir
from ops.pdctl import main, pdctl


def test_verbs() -> None:
    assert sorted(pdctl.commands) == [
        *("chat", "demo", "doctor", "kv", "model", "node", "start", "status", "up")
    ]


@pytest.mark.parametrize("verb", ["chat", "demo", "doctor", "kv", "model", "node", "status", "up"])
def test_each_verb_explains_itself(verb: str) -> None:
    result = CliRunner().invoke(pdctl, [verb, "--help"])
    assert result.exit_code == 0
    assert "Usage: " in result.output


def test_model_fetch_prints_the_folder_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PD_CACHE_DIR", str(tmp_path))
    folder = default_model_dir()
    folder.mkdir(parents=True)
    (folder / ".complete").write_text(DEFAULT_MODEL.sha256, encoding="utf-8")
    result = CliRunner().invoke(pdctl, ["model", "fetch"])
    assert (result.exit_code, result.output) == (0, f"{folder}\n")


def test_an_error_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["status", "--url", "nonsense"])
    assert caught.value.code == 1
    assert capsys.readouterr().err == (
        "The address 'nonsense' must start with http:// or https://.\n"
    )


def test_the_tools_do_not_load_torch_or_services(program_env: dict[str, str]) -> None:
    code = (
        "import sys, ops.pdctl; "
        "print([n for n in ('torch', 'transformers', 'numpy', 'kvengine', 'router_svc',"
        " 'prefill_svc', 'decode_svc') if n in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=program_env,
        timeout=50,
        check=True,
    )
    assert result.stdout == "[]\n"
