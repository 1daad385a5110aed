"""The metrics of one service at one moment, as its /metrics tells them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Exposition:
    """Finite samples by name and labels; a value that is not a finite number counts as absent.

    Attributes:
        samples: by name as exposed, such as ``pd_decode_handoffs_total``.
        families: names without suffix, also of those that have no sample yet.
    """

    samples: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    families: frozenset[str] = frozenset()

    def total(self, name: str) -> float | None:
        """The sum over all labels; 0 for a counter that never counted; None if it is unknown."""
        values = self.samples.get(name)
        if values:
            return sum(values.values())
        return (
            0.0
            if name.removesuffix("_total") in self.families
            and name not in self.samples
            and name.endswith("_total")
            else None
        )

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The values of one label, summed over the others."""
        totals: dict[str, float] = {}
        for labels, value in self.samples.get(name, {}).items():
            key = dict(labels).get(label, "")
            totals[key] = totals.get(key, 0.0) + value
        return totals


def parse_exposition(text: str) -> Exposition:
    """Read Prometheus' text format; ValueError if it is none."""
    samples: dict[str, dict[Labels, float]] = {}
    families: set[str] = set()
    try:
        for family in text_string_to_metric_families(text):
            families.add(family.name)
            for sample in family.samples:
                values = samples.setdefault(sample.name, {})
                if math.isfinite(sample.value):
                    values[tuple(sorted(sample.labels.items()))] = float(sample.value)
    except (ValueError, IndexError, KeyError, AttributeError, TypeError) as exc:
        # The parser trusts its input: a line that is none of Prometheus' fails in various ways.
        raise ValueError(f"not Prometheus' text format ({exc})") from exc
    return Exposition(samples, frozenset(families))
