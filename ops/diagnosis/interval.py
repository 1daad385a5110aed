"""What happened at one service between two snapshots of it."""

from dataclasses import dataclass

from ops.diagnosis.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Interval:
    """Two snapshots of one service. Every answer is None where the metrics do not tell."""

    before: Snapshot
    after: Snapshot

    @property
    def seconds(self) -> float:
        """How long, by the clock of whoever asked."""
        return self.after.taken_at - self.before.taken_at

    @property
    def was_restarted(self) -> bool:
        """True if it is not the same process any more, so that its counters began anew."""
        name = f"pd_{self.after.role}_process_start_time_seconds"
        started_at = self.before.metrics.total(name), self.after.metrics.total(name)
        return self.before.name != self.after.name or (
            None not in started_at and started_at[0] != started_at[1]
        )

    def rise(self, name: str) -> float | None:
        """How much a counter, or a histogram's sum or count, has grown, over all labels.

        None if it is missing, was reset, or no time passed.
        """
        before, after = self.before.metrics.total(name), self.after.metrics.total(name)
        if before is None or after is None or self.was_restarted or self.seconds <= 0:
            return None
        return after - before if after >= before else None

    def rises(self, name: str, label: str) -> dict[str, float]:
        """How much a counter has grown, for each value of ``label`` for which it has."""
        if self.rise(name) is None:
            return {}
        before = self.before.metrics.by_label(name, label)
        after = self.after.metrics.by_label(name, label)
        grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
        return {key: value for key, value in sorted(grown.items()) if value > 0}

    def per_second(self, name: str) -> float | None:
        """``rise`` over the time that passed."""
        rise = self.rise(name)
        return None if rise is None else rise / self.seconds

    def mean(self, histogram: str) -> float | None:
        """Mean of a histogram's samples of this interval; None if there were none."""
        total, count = self.rise(f"{histogram}_sum"), self.rise(f"{histogram}_count")
        return total / count if total is not None and count else None

    def low(self, gauge: str) -> float | None:
        """The lower of the two values of a gauge: so much was there at both moments."""
        before, after = self.before.metrics.total(gauge), self.after.metrics.total(gauge)
        return None if before is None or after is None else min(before, after)

    def num_within(self, histogram: str, gauge: str | None = None) -> float | None:
        """How many were, on average, in a place that ``histogram`` times and ``gauge`` counts.

        By Little's law the time that those spent who left it, over the time that passed; nobody
        counts for more than the whole interval. Those who stay are seen by the gauge alone.
        """
        per_second = self.per_second(f"{histogram}_sum")
        count = self.rise(f"{histogram}_count")
        left = None if per_second is None or count is None else min(per_second, count)
        known = [
            value
            for value in (left, None if gauge is None else self.low(gauge))
            if value is not None
        ]
        return max(known, default=None)
