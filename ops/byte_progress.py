"""How far a transfer is, on a terminal as one line that changes, elsewhere now and then."""

import time
from typing import Final, TextIO

_TERMINAL_INTERVAL_S: Final = 0.2
_LOG_INTERVAL_S: Final = 5.0


class ByteProgress:
    """Call it with (done, total) bytes as often as you like; nothing is shown at first.

    Args:
        what: begins the line, for example "receiving".
        stream: usually stderr, so that the output itself stays clean.
    """

    def __init__(self, what: str, stream: TextIO) -> None:
        self._what = what
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._interval_s = _TERMINAL_INTERVAL_S if self._is_terminal else _LOG_INTERVAL_S
        self._shown_at = time.monotonic()
        self._is_line_open = False

    def __call__(self, done_nbytes: int, total_nbytes: int) -> None:
        """Show it if the last time is long enough ago."""
        now = time.monotonic()
        if now - self._shown_at < self._interval_s:
            return
        self._shown_at = now
        line = f"{self._what} {megabytes(done_nbytes)} of {megabytes(total_nbytes)}"
        if self._is_terminal:
            self._stream.write(f"\r{line}\x1b[K")
            self._is_line_open = True
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Clear the line."""
        if self._is_line_open:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._is_line_open = False


def megabytes(nbytes: int) -> str:
    """For people."""
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 100_000 else f"{nbytes / 1e3:,.1f} kB"
