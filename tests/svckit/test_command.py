import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

Start = Callable[..., Popen[str]]

PROGRAM = """
    from dataclasses import dataclass
    from svckit.command import service_command
    from svckit.service_config import WorkerConfig
    from svckit.setting import option

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(WorkerConfig):
        listen_port: int = option("Port.", default=0)
        admin_port: int = option("Admin port.", default=0)

    if __name__ == "__main__":
        service_command("prefill", Config, "sample_service:serve", "A sample.")()
"""
# Raises on import: proves what runs before the entry is loaded.
BROKEN = "raise RuntimeError('entry loaded')\n"
WORKING = """
import json
import os
from svckit.lifecycle import Step
async def serve(config, lifecycle):
    lifecycle.advance(Step.READY)
    facts = {"threads": config.threads, "id": config.instance_id, "model": str(config.model),
             "cpus": sorted(os.sched_getaffinity(0))}
    print(json.dumps(facts), flush=True)
    await lifecycle.wait_draining()
"""


def first_line(process: Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    facts: dict[str, Any] = json.loads(process.stdout.readline())
    return facts


def test_help_does_not_load_the_entry(start_program: Start, tmp_path: Path) -> None:
    (tmp_path / "sample_service.py").write_text(BROKEN, encoding="utf-8")
    process = start_program(PROGRAM, "--help")
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert "--drain-timeout-s" in output
    assert "--parent-fd" not in output


def test_bad_setting_is_one_sentence_before_the_entry_loads(
    start_program: Start, tmp_path: Path
) -> None:
    (tmp_path / "sample_service.py").write_text(BROKEN, encoding="utf-8")
    process = start_program(PROGRAM, "--model", "/m", "--threads", "-1")
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (1, "")
    assert errors == "threads from --threads is '-1', but it must be at least 0.\n"


def test_config_file_variables_and_flags_reach_the_service(
    start_program: Start, tmp_path: Path
) -> None:
    (tmp_path / "sample_service.py").write_text(WORKING, encoding="utf-8")
    config = tmp_path / "c.toml"
    config.write_text("[prefill]\nmodel = '/m'\ninstance_id = 'file'\n", encoding="utf-8")
    cpu = min(os.sched_getaffinity(0))
    process = start_program(
        *(PROGRAM, "--config", str(config), "--cpus", str(cpu)),
        env={"PD_PREFILL_INSTANCE_ID": "variable"},
    )
    facts = first_line(process)
    instance_id = facts.pop("id")
    assert re.fullmatch("variable-[0-9a-f]{8}", instance_id)
    assert facts == {"threads": 1, "model": "/m", "cpus": [cpu]}
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert json.loads(errors.splitlines()[0])["instance_id"] == instance_id


def test_every_process_has_an_instance_id_of_its_own(start_program: Start, tmp_path: Path) -> None:
    (tmp_path / "sample_service.py").write_text(WORKING, encoding="utf-8")
    facts = [first_line(start_program(PROGRAM, "--model", "/m")) for _ in range(2)]
    assert all(re.fullmatch("prefill-[0-9a-f]{8}", fact["id"]) for fact in facts)
    assert facts[0]["id"] != facts[1]["id"]
    assert facts[0]["threads"] == len(os.sched_getaffinity(0))


def test_the_end_of_the_supervisor_drains(start_program: Start, tmp_path: Path) -> None:
    (tmp_path / "sample_service.py").write_text(WORKING, encoding="utf-8")
    reader, writer = os.pipe()
    process = start_program(
        *(PROGRAM, "--model", "/m", "--parent-fd", str(reader)), pass_fds=(reader,)
    )
    os.close(reader)
    first_line(process)
    os.close(writer)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "draining" in errors


def test_a_package_that_is_not_installed_is_a_sentence(
    start_program: Start, tmp_path: Path
) -> None:
    (tmp_path / "sample_service.py").write_text("import not_there.part\n", encoding="utf-8")
    process = start_program(PROGRAM, "--model", "/m")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == (
        "sample_service needs the package not_there, which is not installed here; "
        "install pdserve[worker]."
    )


def test_a_broken_entry_is_a_defect(start_program: Start, tmp_path: Path) -> None:
    (tmp_path / "sample_service.py").write_text(BROKEN, encoding="utf-8")
    process = start_program(PROGRAM, "--model", "/m")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 70
    assert "RuntimeError: entry loaded" in json.loads(errors.splitlines()[-1])["exception"]
