from dataclasses import dataclass, field
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from svckit.config import load_config, options_for
from svckit.errors import ConfigError
from svckit.setting import option


@dataclass(frozen=True, kw_only=True)
class Sample:
    listen_port: int = option("The port.", default=7401, minimum=0, maximum=65535)
    is_eager: bool = option("Eager.", default=False)
    model: str = option("The model.", default="m")
    secret_file: Path | None = option("Secret.", default=None)
    secret: bytes | None = field(default=None, repr=False, metadata={"secret": True})

    def __post_init__(self) -> None:
        if self.model == "impossible":
            raise ConfigError("model impossible is not possible.")


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(text, encoding="utf-8")
    return path


PORTS = st.none() | st.integers(0, 65535)


@given(flag=PORTS, env=PORTS, toml=PORTS)
def test_flags_win_over_environment_over_file_over_default(
    tmp_path_factory: pytest.TempPathFactory, flag: int | None, env: int | None, toml: int | None
) -> None:
    lines = "[prefill]\n" + (f"listen_port = {toml}\n" if toml is not None else "")
    path = write(tmp_path_factory.mktemp("config"), lines)
    config = load_config(
        Sample,
        {"listen_port": None if flag is None else str(flag), "model": None},
        {} if env is None else {"PD_PREFILL_LISTEN_PORT": str(env)},
        path,
        "prefill",
    )
    given_values = [value for value in (flag, env, toml, 7401) if value is not None]
    assert config.listen_port == given_values[0]


def test_defaults_alone() -> None:
    assert load_config(Sample, {}, {}, None, "prefill") == Sample(
        listen_port=7401, is_eager=False, model="m"
    )


def test_other_sections_and_variables_are_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path, "[decode]\nanything = 1\n[prefill]\nis_eager = true\n")
    env = {"PD_DECODE_ANYTHING": "1", "PD_CACHE_DIR": "/x"}
    assert load_config(Sample, {}, env, path, "prefill").is_eager is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[prefill]\nlisten_prt = 1", "Unknown key listen_prt .* nearest known one is listen_port"),
        ("[prefil]\nlisten_port = 1", r"Unknown section \[prefil\] .* nearest known one is prefil"),
        ("prefill = 3", r"written as \[prefill\]"),
        ("[prefill", "is not valid TOML"),
        ("[prefill]\nlisten_port = 'x'", r"listen_port from \[prefill\] in .* is 'x'"),
        ("[prefill]\nlisten_port = 70000", "at most 65535"),
        ("[prefill]\nsecret = 'abc'", "Unknown key secret"),
        ("[prefill]\nmodel = 'impossible'", "not possible"),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(Sample, {}, {}, write(tmp_path, text), "prefill")


def test_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot read the configuration file .*No such file"):
        load_config(Sample, {}, {}, tmp_path / "absent.toml", "prefill")


def test_unknown_variable_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"PD_PREFILL_LISTN_PORT; .* is PD_PREFILL_LISTEN_PORT"):
        load_config(Sample, {}, {"PD_PREFILL_LISTN_PORT": "1"}, None, "prefill")


def test_unknown_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"flag modl; .* is model"):
        load_config(Sample, {"modl": "x"}, {}, None, "prefill")


def test_missing_value_names_the_three_ways() -> None:
    @dataclass(frozen=True)
    class Needs:
        model: str = option("The model.")

    with pytest.raises(ConfigError, match=r"--model, PD_DECODE_MODEL or model in .*\[decode\]"):
        load_config(Needs, {}, {}, None, "decode")


def test_secret_comes_from_its_variable_and_is_not_shown() -> None:
    config = load_config(Sample, {}, {"PD_SECRET": "0123456789abcdef"}, None, "prefill")
    assert config.secret == b"0123456789abcdef"
    assert "0123456789abcdef" not in repr(config)


def command() -> click.Command:
    def callback(**flags: object) -> None:
        config = load_config(Sample, flags, {}, None, "prefill")
        click.echo(f"{config.listen_port} {config.is_eager} {config.model}")

    return click.Command("x", params=options_for(Sample, "prefill"), callback=callback)


def test_options_reach_the_config() -> None:
    result = CliRunner().invoke(command(), ["--listen-port", "5", "--is-eager", "--model", "q"])
    assert result.output == "5 True q\n"
    assert CliRunner().invoke(command(), ["--no-is-eager"]).output == "7401 False m\n"


def test_help_names_default_and_variable_but_no_secret_value() -> None:
    output = " ".join(CliRunner().invoke(command(), ["--help"]).output.split())
    assert "The port. [default: 7401; env: PD_PREFILL_LISTEN_PORT]" in output
    assert "--secret-file PATH" in output
    assert "--secret " not in output
