"""Stop strings in a text that arrives in pieces. Pure."""

from collections.abc import Sequence


class StopStringMatcher:
    """Passes text through until one of `stop_strings` is complete.

    Text that may be the beginning of a stop string is held back. The match that ends first
    counts, and of those the longest: so the result does not depend on where pieces are cut.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self.is_matched = False

    def push(self, text: str) -> str:
        """Return the text that can be shown now; after a match always empty."""
        if self.is_matched:
            return ""
        if not self._stop_strings:
            return text
        held = self._held + text
        start = self._match_start(held)
        if start is not None:
            self.is_matched = True
            self._held = ""
            return held[:start]
        num_held_chars = self._num_held_chars(held)
        self._held = held[len(held) - num_held_chars :]
        return held[: len(held) - num_held_chars]

    def flush(self) -> str:
        """Return what was held back; the text has ended."""
        held, self._held = self._held, ""
        return held

    def _match_start(self, held: str) -> int | None:
        """Return where the first complete stop string begins, None if there is none."""
        matches = [
            (start + len(stop), start)
            for stop in self._stop_strings
            if (start := held.find(stop)) >= 0
        ]
        return min(matches)[1] if matches else None

    def _num_held_chars(self, held: str) -> int:
        """Return the length of the longest tail that begins a stop string."""
        longest = max(len(stop) for stop in self._stop_strings) - 1
        for num_chars in range(min(longest, len(held)), 0, -1):
            tail = held[-num_chars:]
            if any(stop.startswith(tail) for stop in self._stop_strings):
                return num_chars
        return 0
