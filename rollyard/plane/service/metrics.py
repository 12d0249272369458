"""Counts that requests keep as plain integers, and their Prometheus form with what there is at the moment of the scrape."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from rollyard.net.metrics import Histogram


class PlaneCounters:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str, int]] = Counter()  # (api, method, route, status)
        self.seconds: dict[tuple[str, str], Histogram] = defaultdict(Histogram)  # by api and route
        self.swept: Counter[str] = Counter()  # due, ended, strays, failures
        self.passing = 0  # requests and WebSockets on their way through the gateway

    def count_answer(self, api: str, method: str, route: str, status: int, seconds: float) -> None:
        self.requests[api, method, route, status] += 1
        self.seconds[api, route].observe(seconds)


def plane_metrics(
    counters: PlaneCounters, live_counts: Mapping[tuple[str, str], int], pools: Mapping[str, tuple[int, int]]
) -> Iterable[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    requests = CounterMetricFamily(
        "rollyard_plane_requests", "answered requests", labels=["api", "method", "route", "status"]
    )
    for (api, method, route, status), count in counters.requests.items():
        requests.add_metric([api, method, route, str(status)], count)
    yield requests
    waits = HistogramMetricFamily("rollyard_plane_request_seconds", "time to answer", labels=["api", "route"])
    for (api, route), seconds in counters.seconds.items():
        seconds.add_to(waits, [api, route])
    yield waits
    swept = CounterMetricFamily("rollyard_plane_swept", "what sweeps found and did", labels=["what"])
    for what, count in counters.swept.items():
        swept.add_metric([what], count)
    yield swept
    yield GaugeMetricFamily("rollyard_plane_passing", "under way through the gateway", value=counters.passing)
    live = GaugeMetricFamily("rollyard_plane_instances", "live instances", labels=["engine", "state"])
    for (engine, state), count in live_counts.items():
        live.add_metric([engine, state], count)
    yield live
    for which, what in enumerate(("size", "live")):
        gauge = GaugeMetricFamily(f"rollyard_plane_pool_{what}", f"{what} of warm pools", labels=["pool"])
        for name, pair in pools.items():
            gauge.add_metric([name], pair[which])
        yield gauge
