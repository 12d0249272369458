"""Counts that requests keep as plain integers, and their Prometheus form with what there is at the moment of the scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, float("inf"))


class PlaneCounters:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()  # (method, route, status)
        self.waits: dict[str, list[int]] = {}  # route -> counts by bucket
        self.seconds: Counter[str] = Counter()
        self.swept: Counter[str] = Counter()  # due, ended, strays, failures
        self.passing = 0  # requests and WebSockets on their way through the gateway

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        self.requests[method, route, status] += 1
        self.seconds[route] += seconds  # pyright: ignore[reportArgumentType]  # a Counter adds floats as well
        waits = self.waits.setdefault(route, [0] * len(BUCKETS))
        waits[next(n for n, bound in enumerate(BUCKETS) if seconds <= bound)] += 1


def exposition(
    counters: PlaneCounters, live: Mapping[tuple[str, str], int], pools: Mapping[str, tuple[int, int]]
) -> bytes:
    """Prometheus text; the client library is imported by the first scrape."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(counters, live, pools))
    return generate_latest(registry)


class _Collector:
    def __init__(
        self, counters: PlaneCounters, live: Mapping[tuple[str, str], int], pools: Mapping[str, tuple[int, int]]
    ) -> None:
        self._counters, self._live, self._pools = counters, live, pools

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        counters = self._counters
        requests = CounterMetricFamily(
            "rollyard_plane_requests", "answered requests", labels=["method", "route", "status"]
        )
        for (method, route, status), count in counters.requests.items():
            requests.add_metric([method, route, str(status)], count)
        yield requests
        waits = HistogramMetricFamily("rollyard_plane_request_seconds", "time to answer", labels=["route"])
        for route, counts in counters.waits.items():
            bounds = ["+Inf" if bound == float("inf") else repr(bound) for bound in BUCKETS]
            so_far = [sum(counts[: n + 1]) for n in range(len(counts))]
            waits.add_metric([route], list(zip(bounds, so_far, strict=True)), counters.seconds[route])
        yield waits
        swept = CounterMetricFamily("rollyard_plane_swept", "what sweeps found and did", labels=["what"])
        for what, count in counters.swept.items():
            swept.add_metric([what], count)
        yield swept
        yield GaugeMetricFamily("rollyard_plane_passing", "under way through the gateway", value=counters.passing)
        live = GaugeMetricFamily("rollyard_plane_instances", "live instances", labels=["engine", "state"])
        for (engine, state), count in self._live.items():
            live.add_metric([engine, state], count)
        yield live
        for which, what in enumerate(("size", "live")):
            gauge = GaugeMetricFamily(f"rollyard_plane_pool_{what}", f"{what} of warm pools", labels=["pool"])
            for name, pair in self._pools.items():
                gauge.add_metric([name], pair[which])
            yield gauge
