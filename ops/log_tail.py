"""What of a child's log deserves the terminal: warnings, errors, and lines that are not logs.

Children write straight into their files and not through a pipe of ours: a pipe whose reader is
gone would stop or kill them at the moment they should drain.
"""

import json
from pathlib import Path
from typing import Any, Final

_IMPORTANT_LEVELS: Final = frozenset({"warning", "error", "critical"})
# Bookkeeping keys, said elsewhere on the line or of no use to a person.
_HIDDEN_KEYS: Final = frozenset(
    {"event", "level", "timestamp", "service", "instance_id", "logger", "exception"}
)
_MAX_READ_NBYTES: Final = 1 << 16
_MAX_LINE_LENGTH: Final = 400


class LogTail:
    """Follows one growing log file from its present end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_line = ""  # the last line of any kind, for an error sentence
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def poll(self) -> list[str]:
        """The important lines since the last call, shortened; reads all that is there."""
        important = []
        while chunk := self._read():
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for raw in lines:
                if line := important_line(raw.decode("utf-8", "replace")):
                    important.append(line)
                    self.last_line = line
            if len(self._rest) > _MAX_READ_NBYTES:
                self._rest = b""  # a line without end is not one for the terminal
        return important

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read(_MAX_READ_NBYTES)
        except OSError:
            return b""
        self._offset += len(chunk)
        return chunk


def important_line(line: str) -> str:
    """The line as a person should see it, or "" if it is not important."""
    text = line.rstrip()
    try:
        entry: Any = json.loads(text)
    except ValueError:
        return text[:_MAX_LINE_LENGTH]
    if not isinstance(entry, dict):
        return text[:_MAX_LINE_LENGTH]
    level = str(entry.get("level", "info"))
    if level not in _IMPORTANT_LEVELS:
        return ""
    facts = " ".join(f"{key}={value}" for key, value in entry.items() if key not in _HIDDEN_KEYS)
    cause = last_words(str(entry.get("exception", "")))
    parts = (f"{level}: {entry.get('event', '')}", facts, cause)
    return " ".join(part for part in parts if part)[:_MAX_LINE_LENGTH]


def last_words(trace: str) -> str:
    """The last line of a trace that says something; the frame of an exception group does not."""
    lines = (line.strip(" |+-") for line in reversed(trace.splitlines()))
    return next((line for line in lines if line), "")
