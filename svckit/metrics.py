"""Metrics of one process in a registry of its own.

The library's global REGISTRY is not used: two services in one test process would collide in it.
"""

from collections.abc import Sequence
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

# From 1 ms (a decode step of a small model) to 2 min (a long prompt on an edge board).
TIME_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
# From 4 KiB to 16 GiB in steps of four.
NBYTES_BUCKETS: Final = tuple(float(4096 * 4**power) for power in range(12))
METRICS_CONTENT_TYPE: Final = CONTENT_TYPE_LATEST


class Metrics:
    """Makes the metrics of one service, all named ``pd_<service>_<name>``.

    ValueError: the same name was made twice, which is our own bug.
    """

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._namespace = f"pd_{service}"
        ProcessCollector(namespace=self._namespace, registry=self.registry)

    def counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        """A number that only grows; ``_total`` is appended by the exposition."""
        return Counter(name, help_text, labels, namespace=self._namespace, registry=self.registry)

    def gauge(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Gauge:
        """A number that goes up and down."""
        return Gauge(name, help_text, labels, namespace=self._namespace, registry=self.registry)

    def histogram(
        self,
        name: str,
        help_text: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float] = TIME_BUCKETS_S,
    ) -> Histogram:
        """A distribution; the default buckets are seconds."""
        return Histogram(
            name,
            help_text,
            labels,
            namespace=self._namespace,
            registry=self.registry,
            buckets=buckets,
        )

    def render(self) -> bytes:
        """The text exposition format, of type ``METRICS_CONTENT_TYPE``."""
        return render(self.registry)


def render(registry: CollectorRegistry) -> bytes:
    """The text exposition of ``registry``."""
    return generate_latest(registry)
