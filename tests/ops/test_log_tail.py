import json
from pathlib import Path

import pytest

from ops.log_tail import LogTail, important_line, last_words


def entry(level: str, event: str, **facts: object) -> str:
    return json.dumps({"event": event, "level": level, "service": "decode", **facts})


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (entry("info", "admitted"), ""),
        (entry("debug", "admitted"), ""),
        (entry("warning", "peer lost", peer="p-0"), "warning: peer lost peer=p-0"),
        (entry("critical", "defect", exception="Trace\nValueError: x\n"), None),
        ("Port 7401 is already in use.\n", "Port 7401 is already in use."),
        ("[1, 2]", "[1, 2]"),
        ("", ""),
    ],
)
def test_important_line(line: str, shown: str | None) -> None:
    expected = "critical: defect ValueError: x" if shown is None else shown
    assert important_line(line) == expected


def test_long_lines_are_cut() -> None:
    assert len(important_line("x" * 10_000)) == 400


def test_only_new_whole_lines_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("from an earlier run\n", encoding="utf-8")
    tail = LogTail(path)
    assert tail.poll() == []
    with path.open("a", encoding="utf-8") as file:
        file.write("one\ntw")
        file.flush()
        assert tail.poll() == ["one"]
        file.write("o\n" + entry("info", "quiet") + "\n")
        file.flush()
        assert tail.poll() == ["two"]
    assert tail.last_line == "two"


def test_absent_file_has_no_lines_until_it_appears(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "log")
    assert tail.poll() == []
    (tmp_path / "log").write_text("hello\n", encoding="utf-8")
    assert tail.poll() == ["hello"]


def test_a_line_without_end_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    path.write_bytes(b"x" * (1 << 17) + b"\n" + b"after\n")
    assert tail.poll()[-1] == "after"


def test_last_words_of_an_exception_group_are_its_members() -> None:
    group = "  + Exception Group\n  | ValueError: x\n    +----------------\n"
    assert last_words(group) == "ValueError: x"
    assert last_words("") == ""
