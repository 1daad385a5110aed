"""Every ``pdctl`` line of docs/operations.md can be parsed by the command that it names."""

import re
import shlex
from pathlib import Path

import click
import pytest

from ops.pdctl import pdctl

PAGE = (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
LINES = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    if line.startswith("pdctl ")
]


@pytest.mark.parametrize("line", LINES)
def test_it_can_be_parsed(line: str) -> None:
    command: click.Command = pdctl
    _, *words = shlex.split(line)
    name = "pdctl"
    while isinstance(command, click.Group):
        name = words.pop(0)
        command = command.commands[name]
    assert command.make_context(name, words).command is command
