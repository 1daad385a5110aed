"""Configuration: one frozen dataclass per process, built once from three sources.

Command-line flags win over environment variables (PD_<SECTION>_<FIELD>), those over the TOML
file's [section], that over the field's default. An unknown key anywhere is an error, because a
misspelt limit that is silently ignored is found out in production.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from svckit.errors import ConfigError
from svckit.secret import read_secret
from svckit.setting import Setting, settings_of

SECTIONS: Final = ("router", "prefill", "decode")

ConfigT = TypeVar("ConfigT")


def load_config(
    config_class: type[ConfigT],
    flags: Mapping[str, object],
    env: Mapping[str, str],
    toml_path: Path | None,
    section: str,
) -> ConfigT:
    """Build ``config_class`` from flags, environment and the TOML file, in falling precedence.

    ``flags`` maps field names to raw values; None means "not given". A field marked ``secret``
    is filled from ``secret_file`` or PD_SECRET. Raises ConfigError, checked in this order:
    unreadable TOML, unknown section or key, unknown variable, bad value, missing value, secret,
    and whatever ``__post_init__`` of the class raises.
    """
    settings = settings_of(config_class)
    given: dict[str, tuple[object, str]] = {}
    if toml_path is not None:
        given.update(_from_toml(toml_path, section, settings))
    given.update(_from_env(env, section, settings))
    given.update(_from_flags(flags, settings))
    values: dict[str, Any] = {}
    for name, setting in settings.items():
        if name in given:
            values[name] = setting.coerce(*given[name])
        elif setting.is_required:
            raise ConfigError(
                f"{name} is not set; give {setting.flag}, {_variable(section, name)} "
                f"or {name} in section [{section}] of the configuration file."
            )
        else:
            values[name] = setting.default
    for field in fields(config_class):  # type: ignore[arg-type]  # a dataclass by contract
        if field.metadata.get("secret"):
            values[field.name] = read_secret(values.get("secret_file"), env)
    return config_class(**values)


def options_for(config_class: type[Any], section: str = "") -> list[click.Parameter]:
    """One click option per setting, in field order.

    Values stay text and absent ones None: ``load_config`` checks them, so that a bad flag and a
    bad TOML value are refused in the same words. ``section`` adds the variable to the help.
    """
    return [_click_option(setting, section) for setting in settings_of(config_class).values()]


def _click_option(setting: Setting, section: str) -> click.Option:
    notes = []
    if not setting.is_required and setting.default not in (None, "", ()):
        notes.append(f"default: {_shown(setting.default)}")
    if section:
        notes.append(f"env: {_variable(section, setting.name)}")
    text = str(setting.metadata.get("help", ""))
    shown = f"{text}  [{'; '.join(notes)}]" if notes else text
    hidden = bool(setting.metadata.get("hidden", False))
    if setting.type is bool:
        switch = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"
        return click.Option([switch, setting.name], default=None, help=shown, hidden=hidden)
    metavar = f"[{'|'.join(setting.choices)}]" if setting.choices else _metavar(setting)
    return click.Option(
        [setting.flag, setting.name], default=None, help=shown, metavar=metavar, hidden=hidden
    )


def _metavar(setting: Setting) -> str:
    if "parse" in setting.metadata:
        return "VALUE"
    names = {int: "INTEGER", float: "NUMBER", Path: "PATH"}
    return names.get(setting.type, "TEXT")


def _shown(default: object) -> str:
    if isinstance(default, tuple):
        return ",".join(str(item) for item in default)
    return str(default).lower() if isinstance(default, bool) else str(default)


def _variable(section: str, name: str) -> str:
    return f"PD_{section}_{name}".upper()


def _from_toml(
    path: Path, section: str, settings: Mapping[str, Setting]
) -> dict[str, tuple[object, str]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"Cannot read the configuration file {path}: {exc.strerror}.") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"The configuration file {path} is not valid TOML: {exc}.") from exc
    known_sections = {*SECTIONS, section}
    for name in document:
        if name not in known_sections:
            raise ConfigError(_unknown(f"section [{name}] in {path}", name, known_sections))
    table = document.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{section} in {path} must be a section, written as [{section}].")
    for key in table:
        if key not in settings:
            raise ConfigError(
                _unknown(f"key {key} in section [{section}] of {path}", key, settings)
            )
    return {key: (value, f"[{section}] in {path}") for key, value in table.items()}


def _from_env(
    env: Mapping[str, str], section: str, settings: Mapping[str, Setting]
) -> dict[str, tuple[object, str]]:
    prefix = _variable(section, "")
    known = {_variable(section, name): name for name in settings}
    for key in env:
        if key.startswith(prefix) and key not in known:
            raise ConfigError(_unknown(f"environment variable {key}", key, known))
    return {name: (env[key], key) for key, name in known.items() if key in env}


def _from_flags(
    flags: Mapping[str, object], settings: Mapping[str, Setting]
) -> dict[str, tuple[object, str]]:
    for key in flags:
        if key not in settings:
            raise ConfigError(_unknown(f"flag {key}", key, settings))
    return {key: (raw, settings[key].flag) for key, raw in flags.items() if raw is not None}


def _unknown(what: str, key: str, known: Iterable[str]) -> str:
    # cutoff 0: always name one, even if it is far off; sorted: the same one on every run.
    nearest = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.0)
    hint = f"; the nearest known one is {nearest[0]}" if nearest else ""
    return f"Unknown {what}{hint}."
