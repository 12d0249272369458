"""Counts that sessions keep as plain integers, and their Prometheus form for callers with the server's key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rollyard.net.metrics import Histogram

if TYPE_CHECKING:
    from rollyard.envs.sessions import Sessions


class EnvCounters:
    def __init__(self) -> None:
        self.moves: Counter[tuple[str, str]] = Counter()  # (move, code) -> count; the code of a good one is OK
        self.sessions: Counter[str] = Counter()  # opened, restored, reattached, expired, closed, refused
        self.seconds = Histogram()

    def count_move(self, move: str, code: str, seconds: float) -> None:
        self.moves[move, code] += 1
        self.seconds.observe(seconds)


def env_metrics(sessions: Sessions) -> Iterable[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    counters = sessions.counters
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
        ("attached", "sessions with a client connected", sum(1 for s in sessions.active if s.attached)),
        ("waiting", "clients in line for a place", sessions.waiting),
        ("capacity", "sessions there is room for", sessions.limits.capacity),
    ):
        yield GaugeMetricFamily(f"rollyard_env_{name}", words, value=value)
    family = HistogramMetricFamily("rollyard_env_move_seconds", "from a move's turn to its answer")
    counters.seconds.add_to(family)
    yield family
