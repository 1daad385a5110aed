import sys
from pathlib import Path

import pytest

from ops.node.facts import (
    MAX_FILE_NBYTES,
    CommandOutput,
    LiveFacts,
    RecordedFacts,
    RecordingFacts,
    read_dump,
)


def test_files_of_a_root(tmp_path: Path) -> None:
    facts = LiveFacts(tmp_path)
    (tmp_path / "a").write_bytes(b"x\xff\n")
    (tmp_path / "large").write_bytes(b"x" * (MAX_FILE_NBYTES + 1))
    (tmp_path / "link").symlink_to("/a")
    assert facts.text("/a") == "x\ufffd\n"
    assert facts.text("/link") == "x\ufffd\n"
    assert facts.text("/large") is None
    assert facts.text("/none") is None
    assert facts.names("/") == ("a", "large", "link")
    assert facts.names("/none") == ()
    assert facts.link("/link") == "/a"
    assert facts.link("/a") is None


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = LiveFacts()
    code = "import os, sys; print(os.environ['LC_ALL']); sys.exit(3)"
    assert facts.run(sys.executable, "-c", code) == CommandOutput(3, "C.UTF-8\n", "")
    assert facts.run("pdserve-no-such-tool").is_missing
    assert LiveFacts(Path("/"), runs_commands=False).run(sys.executable).is_missing
    monkeypatch.setattr("ops.node.facts.COMMAND_TIMEOUT_S", 0.05)
    late = facts.run(sys.executable, "-c", "import signal; signal.pause()")
    assert (late.exit_code, late.is_ok) == (124, False)


def test_recorded_folders_hold_recorded_files() -> None:
    facts = RecordedFacts(
        files={"/etc/a/b": "", "/etc/c": ""}, folders={"/etc": ["z"]}, links={"/etc/l": "c"}
    )
    assert facts.names("/etc/") == ("a", "c", "l", "z")
    assert facts.names("/et") == ()
    assert facts.run("ip", "link").is_missing


def test_a_dump_gives_back_what_was_asked(tmp_path: Path) -> None:
    source = RecordedFacts(
        files={"/a": "ä\n"},
        folders={"/f": ["x"]},
        links={"/l": "a"},
        commands={"ip -j link": CommandOutput(1, "out", "err")},
        variables={"LANG": "C"},
    )
    recording = RecordingFacts(source)

    def ask(facts: RecordedFacts | RecordingFacts) -> list[object]:
        return [
            facts.text("/a"),
            facts.text("/none"),
            facts.names("/f/"),
            facts.link("/l"),
            facts.run("ip", "-j", "link"),
            facts.run("none"),
            facts.environment("LANG"),
            facts.environment("NONE"),
        ]

    answers = ask(recording)
    path = tmp_path / "dump.json"
    path.write_text(recording.as_json(), encoding="utf-8")
    assert ask(read_dump(path)) == answers == ask(source)
