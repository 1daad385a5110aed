import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from svckit.logging import configure_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_json_lines_carry_service_and_instance() -> None:
    stream = io.StringIO()
    configure_logging("decode", instance_id="d-1", stream=stream)
    structlog.get_logger("a.b").info("admitted", num_blocks=3, name="größe")
    entry = json.loads(stream.getvalue())
    assert entry.pop("timestamp").endswith("Z")
    assert entry == {
        "event": "admitted",
        "service": "decode",
        "instance_id": "d-1",
        "level": "info",
        "logger": "a.b",
        "num_blocks": 3,
        "name": "größe",
    }


def test_the_standard_library_goes_the_same_way() -> None:
    stream = io.StringIO()
    configure_logging("decode", stream=stream)
    logging.getLogger("somewhere").warning("%d left", 3)
    entry = json.loads(stream.getvalue())
    assert (entry["event"], entry["service"], entry["level"]) == ("3 left", "decode", "warning")


def test_console_on_a_terminal() -> None:
    stream = Terminal()
    configure_logging("decode", stream=stream)
    structlog.get_logger("a").info("admitted")
    assert "admitted" in stream.getvalue()
    with pytest.raises(json.JSONDecodeError):
        json.loads(stream.getvalue())


def test_format_can_be_forced() -> None:
    stream = Terminal()
    configure_logging("decode", fmt="json", stream=stream)
    structlog.get_logger("a").info("admitted")
    assert json.loads(stream.getvalue())["event"] == "admitted"


def test_level_is_respected() -> None:
    stream = io.StringIO()
    configure_logging("decode", level="warning", stream=stream)
    structlog.get_logger("a").info("hidden")
    structlog.get_logger("a").warning("shown")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["shown"]


def test_exceptions_are_one_line_of_json() -> None:
    stream = io.StringIO()
    configure_logging("decode", stream=stream)
    try:
        int("bad")
    except ValueError:
        structlog.get_logger("a").exception("failed")
    assert "ValueError: invalid literal" in json.loads(stream.getvalue())["exception"]
