"""Counts the hot path keeps as plain integers, and their Prometheus form for the admin API."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollyard.net.metrics import Histogram

if TYPE_CHECKING:
    from rollyard.gate.gate import Gate

METRICS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class GateCounters:
    """What `/metrics` of the gate counts."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()  # (dialect, kind) -> answered
        self.refusals: Counter[int] = Counter()  # status -> count
        self.joined = 0
        self.budget_stops = 0
        self.bad_keys = 0
        self.seconds = Histogram()

    def count_answer(self, dialect: str, kind: str, seconds: float) -> None:
        self.calls[dialect, kind] += 1
        self.seconds.observe(seconds)

    def count_refusal(self, status: int) -> None:
        self.refusals[status] += 1


def gate_metrics(gate: Gate) -> Iterable[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    counters = gate.counters
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
    counted: Mapping[str, int] = getattr(gate.policy, "counters", dict)()
    events = CounterMetricFamily("rollyard_policy_events", "what the policy counts: prompts, servers", labels=["event"])
    for event, count in counted.items():
        events.add_metric([event], count)
    yield events
    seconds = HistogramMetricFamily("rollyard_gate_call_seconds", "from request to answer")
    counters.seconds.add_to(seconds)
    yield seconds


def add_metrics(texts: Sequence[bytes]) -> bytes:
    """The figures of several processes as those of one gate: all of them are counts, which add up."""
    families: dict[str, dict[str, float]] = {}  # by the two lines that begin one
    for text in texts:
        for part in text.decode().split("# HELP ")[1:]:
            words, kind, *lines = part.splitlines()
            family = families.setdefault(f"# HELP {words}\n{kind}\n", {})
            for name, _, value in (line.rpartition(" ") for line in lines):
                family[name] = family.get(name, 0.0) + float(value)
    return "".join(
        head + "".join(f"{name} {value}\n" for name, value in family.items()) for head, family in families.items()
    ).encode()
