"""Fuzz one decoder, guided by coverage.

    python -m tests.kvproto.fuzz TARGET [libFuzzer options]

Needs the package ``atheris``, which is not a dependency of the project. A finding is printed with
its input; add that to ``REGRESSIONS`` of ``test_fuzz.py``.
"""

import sys

import atheris

with atheris.instrument_imports(include=["kvproto", "tests.kvproto"]):
    from tests.kvproto.fuzz_targets import TARGETS


def main(arguments: list[str]) -> None:
    """Run until libFuzzer's options say stop."""
    name, *options = arguments[1:]
    atheris.Setup([arguments[0], *options], TARGETS[name].run)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
