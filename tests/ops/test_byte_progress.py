import io

import pytest

from ops.byte_progress import ByteProgress, megabytes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("ops.byte_progress.time.monotonic", lambda: now[0])
    return now


def test_a_terminal_has_one_line_that_is_cleared(clock: list[float]) -> None:
    stream = Terminal()
    progress = ByteProgress("receiving", stream)
    progress(1_000_000, 4_000_000)
    assert stream.getvalue() == "", "short work shows nothing"
    clock[0] += 0.3
    progress(2_000_000, 4_000_000)
    progress(3_000_000, 4_000_000)
    assert stream.getvalue() == "\rreceiving 2.0 MB of 4.0 MB\x1b[K"
    progress.close()
    progress.close()
    assert stream.getvalue().endswith("\r\x1b[K")
    assert stream.getvalue().count("\r") == 2


def test_a_log_has_a_line_now_and_then(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = ByteProgress("sending", stream)
    for second in range(1, 13):
        clock[0] = 100.0 + second
        progress(second * 1_000_000, 12_000_000)
    progress.close()
    assert stream.getvalue() == "sending 5.0 MB of 12.0 MB\nsending 10.0 MB of 12.0 MB\n"


def test_small_amounts_are_kilobytes() -> None:
    assert [megabytes(n) for n in (640, 99_999, 100_000, 1_234_567_890)] == [
        *("0.6 kB", "100.0 kB", "0.1 MB", "1,234.6 MB")
    ]
