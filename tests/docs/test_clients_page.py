"""The examples of docs/clients.md run, and its command lines exist."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvproto.client.blocking import LoopThread
from ops.pdctl import pdctl
from tests.kvproto.client.fake_workers import FakeDecode, FakePrefill, started

_PAGE = (Path(__file__).parents[2] / "docs/clients.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)


def test_every_python_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    thread = LoopThread("workers")
    prefill, decode = FakePrefill(), FakeDecode()
    servers = [thread.call(started(worker)) for worker in (prefill, decode)]
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for block in _blocks("python"):
            text = block.replace("9100", str(prefill.port)).replace("9200", str(decode.port))
            exec(compile(text, "docs/clients.md", "exec"), names)
    finally:
        for server in servers:
            thread.call(server.close())
        thread.close()
    assert names["output"] == names["prompt"][-5:]
    assert names["numbers"].shape == (6, 2, 8)
    assert names["num_rows"] == 7 + 4 + 1
    assert (tmp_path / "again.kv").is_file()
    assert capsys.readouterr().out.startswith("length {")


@pytest.mark.parametrize("line", "".join(_blocks("sh")).splitlines())
def test_every_command_line_can_be_parsed(line: str) -> None:
    program, group, verb, *arguments = shlex.split(line)
    assert program == "pdctl"
    command = pdctl.commands[group].commands[verb]  # type: ignore[attr-defined]
    context = command.make_context(verb, arguments)
    assert context.params["file"].suffix == ".kv"
