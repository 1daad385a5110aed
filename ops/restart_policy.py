"""When a dead process is started again: a pure decision from the times of its deaths."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most ``max_restarts`` within ``window_s``, after a delay that doubles up to a cap."""

    max_restarts: int = 5
    window_s: float = 120.0
    first_delay_s: float = 0.5
    max_delay_s: float = 10.0

    def delay_s(self, died_at: Sequence[float], now: float) -> float | None:
        """Seconds to wait before the next start, or None if the budget is spent.

        ``died_at`` are all deaths so far, the last one included, on the clock of ``now``.
        """
        num_recent = sum(1 for at in died_at if now - at <= self.window_s)
        if num_recent > self.max_restarts:
            return None
        # - 1: the first death waits first_delay_s itself.
        return min(self.first_delay_s * 2.0 ** max(0, num_recent - 1), self.max_delay_s)
