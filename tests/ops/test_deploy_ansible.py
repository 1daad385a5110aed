"""The Ansible role: it parses, check mode changes nothing, its templates make good files."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

import ops
from decode_svc.config import DecodeConfig
from prefill_svc.config import PrefillConfig
from router_svc.config import RouterConfig
from svckit.config import load_config

ANSIBLE = Path(ops.__file__).parent.parent / "deploy" / "ansible"
ROLE = ANSIBLE / "roles" / "pdserve_node"
RUNBOOKS = Path(ops.__file__).parent / "runbooks"
CLASSES: dict[str, type[Any]] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}
# Words of a task that are no module.
KEYWORDS = {
    *("name", "loop", "loop_control", "register", "when", "changed_when", "failed_when", "notify"),
    *("check_mode", "no_log", "tags", "environment", "block", "always", "rescue", "listen"),
}


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def tasks() -> Iterator[dict[str, Any]]:
    """Every task and handler, those in blocks as well."""
    waiting = [
        task
        for path in (*sorted((ROLE / "tasks").glob("*.yml")), ROLE / "handlers" / "main.yml")
        for task in load(path)
    ]
    while waiting:
        task = waiting.pop(0)
        for part in ("block", "rescue", "always"):
            waiting.extend(task.get(part, []))
        if "block" not in task:
            yield task


def module_of(task: dict[str, Any]) -> str:
    (module,) = set(task) - KEYWORDS
    return module


@pytest.mark.parametrize(
    "path", sorted(ANSIBLE.rglob("*.yml")), ids=lambda path: str(path.relative_to(ANSIBLE))
)
def test_every_file_is_yaml(path: Path) -> None:
    assert load(path)


def test_every_task_says_what_it_does_and_names_its_module_in_full() -> None:
    found = list(tasks())
    assert len(found) > 15
    for task in found:
        assert task["name"][0].isupper(), task
        assert module_of(task).startswith("ansible.builtin."), task


def test_commands_say_when_they_change_something() -> None:
    commands = [task for task in tasks() if module_of(task) == "ansible.builtin.command"]
    assert len(commands) == 5
    assert all("changed_when" in task for task in commands)


def test_check_mode_runs_the_plan_and_neither_apply_nor_rollback() -> None:
    by_verb = {
        verb: task
        for task in tasks()
        for verb in ("plan", "apply", "verify", "rollback")
        if verb in str(task.get("ansible.builtin.command", {}).get("argv", ""))
    }
    assert set(by_verb) == {"plan", "apply", "verify", "rollback"}
    assert by_verb["plan"]["check_mode"] is False
    # Ansible skips a command in check mode unless check_mode is false.
    for verb in ("apply", "verify", "rollback"):
        assert "check_mode" not in by_verb[verb]
    assert "not ansible_check_mode" in by_verb["apply"]["when"]


def test_the_concerns_are_runbooks_that_have_the_verbs() -> None:
    defaults = load(ROLE / "defaults" / "main.yml")
    for concern in defaults["pdserve_node_concerns"]:
        text = (RUNBOOKS / f"{concern}.sh").read_text(encoding="utf-8")
        assert "check|plan|apply|verify|rollback" in text
    for concern in defaults["pdserve_node_checks"]:
        assert (RUNBOOKS / f"{concern}.sh").is_file()
    source = defaults["pdserve_runbooks_src"].replace("{{ role_path }}", str(ROLE))
    assert Path(source).resolve() == RUNBOOKS


def test_nothing_is_restarted_unasked() -> None:
    assert load(ROLE / "defaults" / "main.yml")["pdserve_restart_services"] is False
    restarting = [task for task in tasks() if "restarted" in str(task)]
    assert [task["when"] for task in restarting] == ["pdserve_restart_services | bool"]


def test_handlers_that_are_notified_exist() -> None:
    handlers = {task["name"] for task in load(ROLE / "handlers" / "main.yml")}
    notified: set[str] = set()
    for task in tasks():
        names = task.get("notify", [])
        notified.update([names] if isinstance(names, str) else names)
    assert notified
    assert notified <= handlers


def test_secrets_are_private_and_not_shown() -> None:
    (secrets,) = [task for task in tasks() if "secret_files" in str(task.get("loop"))]
    assert secrets["no_log"] is True
    assert secrets["ansible.builtin.copy"]["mode"] == "0600"
    assert secrets["ansible.builtin.copy"]["owner"] == "pdserve"


def test_the_example_inventory_makes_configurations_that_load(tmp_path: Path) -> None:
    inventory = load(ANSIBLE / "inventory.example.yml")["pdserve"]
    defaults = load(ROLE / "defaults" / "main.yml")
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.filters["combine"] = lambda first, second: {**first, **second}
    environment.filters["to_json"] = json.dumps
    template = environment.from_string(
        (ROLE / "templates" / "pdserve.toml.j2").read_text(encoding="utf-8")
    )
    for name in inventory["vars"]["pdserve_secret_files"]:
        (tmp_path / name).write_text("0123456789abcdef", encoding="utf-8")
        (tmp_path / name).chmod(0o600)
    seen = set()
    for host in inventory["hosts"].values():
        for service in host["pdserve_services"]:
            text = template.render(
                **{**defaults, **inventory["vars"], "item": service, "ansible_managed": "Managed"}
            )
            assert set(tomllib.loads(text)) == {service["role"]}
            path = tmp_path / "service.toml"
            path.write_text(text.replace("/etc/pdserve/secrets", str(tmp_path)), encoding="utf-8")
            loaded = load_config(CLASSES[service["role"]], {}, {}, path, service["role"])
            assert loaded.secret == b"0123456789abcdef"
            seen.add(service["role"])
    assert seen == set(CLASSES)
