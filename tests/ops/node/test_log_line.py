"""The two classic errors, made for real, and what the tool says to them."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ops.node.log_line import explain
from ops.node_command import node_group
from ops.pdctl import main

DASH = "long — dash\n"
SIGN = "20 °C\n"


def error_of(content: bytes, codec: str) -> str:
    with pytest.raises(UnicodeDecodeError) as caught:
        content.decode(codec)
    return f"UnicodeDecodeError: {caught.value}"


def test_gbk_0x94() -> None:
    line = error_of("— x".encode(), "gbk")
    assert "'gbk' codec can't decode byte 0x94" in line
    (found,) = explain(f"2026-01-01 worker[3]: Traceback\n  File x\n{line}\n")
    assert "read as gbk" in found.cause
    assert "long dash" in found.cause
    assert "encoding='utf-8'" in found.cure
    assert "PYTHONUTF8=1" in found.cure


def test_ascii_0xc2() -> None:
    line = error_of(SIGN.encode(), "ascii")
    assert "'ascii' codec can't decode byte 0xc2" in line
    (found,) = explain(line)
    assert "C or POSIX locale" in found.cause
    assert "degree" in found.cause
    assert "PYTHONUTF8=1" in found.cure
    assert "yum" in found.cure


def test_a_file_of_gbk_opened_as_such_fails_on_utf8(tmp_path: Path) -> None:
    path = tmp_path / "model.txt"
    path.write_text(DASH, encoding="utf-8")
    with pytest.raises(UnicodeDecodeError) as caught:
        path.read_text(encoding="gbk")
    (found,) = explain(str(caught.value))
    assert "0x94" in found.cause


@pytest.mark.parametrize(("text", "byte"), [(SIGN, "0xc2"), (DASH, "0xe2")])
def test_a_process_in_the_c_locale_cannot_read_a_file_of_utf8(
    text: str, byte: str, tmp_path: Path, program_env: dict[str, str]
) -> None:
    path = tmp_path / "utf8.txt"
    path.write_text(text, encoding="utf-8")
    code = "import sys; print(len(open(sys.argv[1]).read()))"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    def child(*options: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, *options, "-c", code, str(path)],
            capture_output=True,
            encoding="utf-8",
            env={**program_env, **plain, **variables},
            timeout=50,
            check=False,
        )

    failed = child("-X", "utf8=0")
    assert failed.returncode == 1
    assert f"'ascii' codec can't decode byte {byte}" in failed.stderr
    (found,) = explain(failed.stderr)
    assert "C or POSIX locale" in found.cause
    # And the cure cures.
    cured = child(PYTHONUTF8="1")
    assert (cured.returncode, cured.stdout) == (0, f"{len(text)}\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("'cp936' codec can't decode byte 0x9c in position 1: incomplete", "curly quotation"),
        ("'gb18030' codec can't decode byte 0x81 in position 1: x", "read as gb18030"),
        ("'ascii' codec can't decode byte 0xf0 in position 0: ordinal not in range(128)", "emoji"),
        ("'utf-8' codec can't decode byte 0xb0 in position 3: invalid start byte", "not UTF-8"),
        ("'charmap' codec can't decode byte 0x9d in position 3: x", "read as charmap"),
        ("'utf-8' codec can't decode bytes in position 0-1: unexpected end of data", "not UTF-8"),
        (
            "'ascii' codec can't encode character '\\u2014' in position 5: ordinal not in range",
            "writes its output",
        ),
        ("'latin-1' codec can't encode characters in position 0-2: x", "in latin-1"),
        (
            "'utf-8' codec can't encode character '\\udcff' in position 0: surrogates not allowed",
            "half a character",
        ),
        ("locale.Error: unsupported locale setting", "does not exist"),
        ("bash: warning: setlocale: LC_ALL: cannot change locale (en_US.UTF-8)", "ssh client"),
        ("NameError: name 'reload' is not defined", "Python 2"),
        ("module 'sys' has no attribute 'setdefaultencoding'", "Python 2"),
    ],
)
def test_other_lines(line: str, words: str) -> None:
    (found,) = explain(line)
    assert words in found.cause


def test_a_line_that_comes_twice_is_explained_once() -> None:
    line = error_of(SIGN.encode(), "ascii")
    assert len(explain(f"{line}\n{line}\n")) == 1


def test_from_the_command_line_and_from_a_pipe() -> None:
    line = error_of("— x".encode(), "gbk")
    given = CliRunner().invoke(node_group, ["explain", line])
    piped = CliRunner().invoke(node_group, ["explain"], input=b"\xff noise\n" + line.encode())
    assert given.exit_code == piped.exit_code == 0
    assert given.output == piped.output
    assert [text.partition(":")[0] for text in given.output.splitlines()] == [
        *("line", "cause", "cure", "see")
    ]


def test_an_unknown_line_is_said_to_be_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["node", "explain", "all is well"])
    assert caught.value.code == 1
    assert "no line in it is known" in capsys.readouterr().err
