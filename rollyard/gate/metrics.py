"""Counts the hot path keeps as plain integers, and their Prometheus form for whoever asks with the admin key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard.gate.gate import Gate

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, float("inf"))


class GateCounters:
    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()  # (dialect, kind) -> answered
        self.refusals: Counter[int] = Counter()  # status -> count
        self.joined = 0
        self.budget_stops = 0
        self.bad_keys = 0
        self.seconds = 0.0
        self.waits = [0] * len(BUCKETS)

    def answered(self, dialect: str, kind: str, seconds: float) -> None:
        self.calls[dialect, kind] += 1
        self.seconds += seconds
        for index, bound in enumerate(BUCKETS):
            if seconds <= bound:
                self.waits[index] += 1
                break

    def refused(self, status: int) -> None:
        self.refusals[status] += 1


def exposition(gate: Gate) -> bytes:
    """Prometheus text; the client library is imported by the first scrape."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(gate))
    return generate_latest(registry)


class _Collector:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        gate, counters = self._gate, self._gate.counters
        calls = CounterMetricFamily("rollyard_gate_calls", "answered calls", labels=["dialect", "kind"])
        for (dialect, kind), count in counters.calls.items():
            calls.add_metric([dialect, kind], count)
        yield calls
        refused = CounterMetricFamily("rollyard_gate_refusals", "refused requests", labels=["status"])
        for status, count in counters.refusals.items():
            refused.add_metric([str(status)], count)
        yield refused
        for name, words, value in (
            ("joined", "requests that joined an earlier turn", counters.joined),
            ("budget_stops", "calls answered by a budget stop", counters.budget_stops),
            ("bad_keys", "requests without a valid key", counters.bad_keys),
        ):
            yield CounterMetricFamily(f"rollyard_gate_{name}", words, value=value)
        for name, words, value in (
            ("sessions", "open sessions", len(gate.sessions)),
            ("in_flight", "calls under way", gate.in_flight),
            ("waiting", "calls waiting for their turn", gate.waiting),
            ("connections", "open connections", gate.connections),
        ):
            yield GaugeMetricFamily(f"rollyard_gate_{name}", words, value=value)
        yield _histogram(HistogramMetricFamily("rollyard_gate_call_seconds", "from request to answer"), counters)


def _histogram(family: Any, counters: GateCounters) -> Any:
    total, buckets = 0, list[tuple[str, float]]()
    for bound, count in zip(BUCKETS, counters.waits, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
    family.add_metric([], buckets, counters.seconds)
    return family
