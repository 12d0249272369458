"""What servers count on their hot paths as plain numbers, and the Prometheus text made of it by a scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)  # upper bounds of durations


class Histogram:
    """Durations, counted by their upper bounds; the last count is for those above all of them."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total += seconds

    def add_to(self, family: Any, labels: list[str] | None = None) -> None:
        """Into a `HistogramMetricFamily`, whose buckets hold what is below them too."""
        bounds = [*(str(bound) for bound in self._bounds), "+Inf"]
        counts = [float(count) for count in accumulate(self._counts)]
        family.add_metric(labels or [], list(zip(bounds, counts, strict=True)), self._total)


class _Collector:
    def __init__(self, families: Iterable[Any]) -> None:
        self._families = families

    def collect(self) -> Iterable[Any]:
        return self._families


def write_metrics(families: Iterable[Any]) -> bytes:
    """Prometheus text of metric families; the client library is imported by the first scrape."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(families))
    return generate_latest(registry)
