"""Counts that sessions keep as plain integers, and their Prometheus form for whoever asks with the server's key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard.envs.sessions import Sessions

BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, float("inf"))


class EnvCounters:
    def __init__(self) -> None:
        self.moves: Counter[tuple[str, str]] = Counter()  # (move, code) -> count; the code of a good one is OK
        self.sessions: Counter[str] = Counter()  # opened, restored, reattached, expired, closed, refused
        self.seconds = 0.0
        self.waits = [0] * len(BUCKETS)

    def moved(self, move: str, code: str, seconds: float) -> None:
        self.moves[move, code] += 1
        self.seconds += seconds
        for index, bound in enumerate(BUCKETS):
            if seconds <= bound:
                self.waits[index] += 1
                return


def exposition(sessions: Sessions) -> bytes:
    """Prometheus text; the client library is imported by the first scrape."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(sessions))
    return generate_latest(registry)


class _Collector:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        sessions, counters = self._sessions, self._sessions.counters
        moves = CounterMetricFamily("rollyard_env_moves", "answered moves", labels=["move", "code"])
        for (move, code), count in counters.moves.items():
            moves.add_metric([move, code], count)
        yield moves
        changes = CounterMetricFamily("rollyard_env_session_changes", "what became of sessions", labels=["change"])
        for change, count in counters.sessions.items():
            changes.add_metric([change], count)
        yield changes
        for name, words, value in (
            ("sessions", "sessions that exist", len(sessions.active)),
            ("attached", "sessions that somebody is connected to", sum(1 for s in sessions.active if s.attached)),
            ("waiting", "clients in line for a place", sessions.waiting),
            ("capacity", "sessions there is room for", sessions.limits.capacity),
        ):
            yield GaugeMetricFamily(f"rollyard_env_{name}", words, value=value)
        family = HistogramMetricFamily("rollyard_env_move_seconds", "from a move's turn to its answer")
        total, buckets = 0, list[tuple[str, float]]()
        for bound, count in zip(BUCKETS, counters.waits, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        family.add_metric([], buckets, counters.seconds)
        yield family
