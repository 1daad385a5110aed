import json
import os
import signal
import socket
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from ops.ports import plan_ports, refuse_busy_ports
from ops.start import flag_value
from ops.up import configured_models
from svckit.errors import ServiceError
from tests.ops.fake_services import FakeServices
from tests.ops.stand_ins import is_alive

DEADLINE_S = 50


def free_base_port() -> int:
    """A base port whose successors are free; below the range that the kernel hands out."""
    for base_port in range(20_000 + os.getpid() % 10_000, 32_000, 20):
        try:
            refuse_busy_ports(plan_ports(base_port - 1, base_port, 2), "127.0.0.1")
        except ServiceError:
            continue
        return base_port
    raise AssertionError("no free ports")


def up(services: FakeServices, *flags: str) -> Popen[str]:
    base_port = free_base_port()
    common = ("--http-port", str(base_port - 1), "--base-port", str(base_port))
    return services.pdctl("up", "--model", "/m", *common, *flags)


def wait_ready(process: Popen[str]) -> str:
    assert process.stderr is not None
    lines = []
    while line := process.stderr.readline():
        lines.append(line)
        if line.startswith("pdctl: ready after"):
            return line
    raise AssertionError("".join(lines))


def started(services: FakeServices, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((services.folder / f"{name}.argv").read_text("utf-8"))
    return facts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_ready_then_stopped_by_a_signal(
    fake_services: FakeServices, tmp_path: Path, number: signal.Signals
) -> None:
    ready_file = tmp_path / "ready.json"
    process = up(fake_services, "--ready-file", str(ready_file))
    url = wait_ready(process).split()[5]
    content = json.loads(ready_file.read_text("utf-8"))
    assert f"{content['url']}/v1" == url
    assert content["pid"] == process.pid
    assert [item["name"] for item in content["processes"]] == ["router", "prefill-0", "decode-0"]
    pids = [item["pid"] for item in content["processes"]]
    assert all(is_alive(pid) for pid in pids)
    process.send_signal(number)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    assert not any(is_alive(pid) for pid in pids)
    assert not ready_file.exists()
    assert sorted(path.name for path in Path(content["run_dir"]).iterdir()) == [
        *("decode-0.log", "prefill-0.log", "router.log")
    ]


def test_a_signal_during_the_start_stops_all(fake_services: FakeServices) -> None:
    fake_services.env["FAKE_UNREADY"] = "decode"
    process = up(fake_services)
    assert process.stderr is not None
    while (line := process.stderr.readline()) != "pdctl: decode-0: probed\n":
        assert line, "pdctl ended early"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert len(fake_services.pids()) == 3
    assert not any(is_alive(pid) for pid in fake_services.pids())


def test_cores_are_divided(fake_services: FakeServices) -> None:
    process = up(fake_services)
    wait_ready(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    cpus: set[int] = set()
    for name in ("prefill-0", "decode-0"):
        facts = started(fake_services, name)
        share = (flag_value(facts["argv"], "--cpus") or "").split(",")
        assert flag_value(facts["argv"], "--threads") == facts["threads"] == str(len(share))
        cpus.update(int(cpu) for cpu in share)
    assert cpus == os.sched_getaffinity(0)


def test_a_refusing_worker_stops_all_with_its_sentence(fake_services: FakeServices) -> None:
    fake_services.env["FAKE_REFUSAL"] = "decode"
    process = up(fake_services)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    sentence = "decode-0 cannot start: The pool does not fit into memory."
    assert errors.splitlines()[-1] == sentence
    assert "Traceback" not in errors
    assert not any(is_alive(pid) for pid in fake_services.pids())


def test_models_named_by_variables_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PD_ROUTER_MODEL", "PD_PREFILL_MODEL", "PD_DECODE_MODEL"):
        monkeypatch.delenv(name, raising=False)
    assert configured_models(None) == set()
    monkeypatch.setenv("PD_ROUTER_MODEL", "/r")
    config = tmp_path / "c.toml"
    config.write_text("[decode]\nmodel = '/d'\n", encoding="utf-8")
    assert configured_models(config) == {"router", "decode"}


def test_a_busy_port_is_one_sentence_and_starts_nothing(fake_services: FakeServices) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = fake_services.pdctl("up", "--model", "/m", "--http-port", str(port))
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert errors == (
        f"Port {port} on 127.0.0.1 is already in use; choose another one with --http-port.\n"
    )
    assert fake_services.pids() == []
