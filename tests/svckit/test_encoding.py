from collections.abc import Callable
from subprocess import Popen

PROGRAM = """
    from svckit.encoding import check_encoding
    from svckit.errors import ServiceError
    try:
        check_encoding()
    except ServiceError as exc:
        print(exc)
    else:
        print("fine")
"""
# Keeps Python from falling back to UTF-8 by itself in the C locale.
PLAIN_C = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}


def test_utf8_mode_is_accepted(start_program: Callable[..., Popen[str]]) -> None:
    process = start_program(PROGRAM, env={**PLAIN_C, "PYTHONUTF8": "1"})
    assert process.communicate(timeout=30)[0] == "fine\n"


def test_utf8_locale_is_accepted(start_program: Callable[..., Popen[str]]) -> None:
    process = start_program(PROGRAM, env={**PLAIN_C, "LC_ALL": "C.UTF-8"})
    assert process.communicate(timeout=30)[0] == "fine\n"


def test_another_encoding_is_refused_in_one_sentence(
    start_program: Callable[..., Popen[str]],
) -> None:
    output = start_program(PROGRAM, env=PLAIN_C).communicate(timeout=30)[0]
    assert "not UTF-8; set PYTHONUTF8=1" in output
    assert output.count("\n") == 1
