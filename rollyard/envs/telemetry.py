"""What environments say about themselves: one vocabulary, in logs (the standard `logging`) and as OpenTelemetry
spans, with the same names and the same fields.

    env.session.opened | attached | detached | restored | expired | closed | refused      a line
    env.provisioning_completed | provisioning_retry | provisioning_failed | reset_failed | closed       a line (remote tasks)
    env.reset | env.step | env.state | env.tools | env.call | env.provision | env.verify  a span, and a line when it ends

`with telemetry.span(...)` serves blocking and asynchronous code alike. Lines go to the logger `rollyard.envs`: sessions at
INFO, moves at DEBUG, what went wrong and goes on at WARNING, failures at ERROR. Spans need a tracer provider that the program
has set up; without one, nothing is made. Actions, observations and arguments are never told: they belong to the episode.
"""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from rollyard.core.log import Log
from rollyard.core.tracer import find_tracer

LINES = frozenset(
    f"env.session.{name}" for name in ("opened", "attached", "detached", "restored", "expired", "closed", "refused")
) | {"env.provisioning_completed", "env.closed"}
WARNINGS = frozenset(f"env.{name}" for name in ("provisioning_retry", "provisioning_failed", "reset_failed"))
SPANS = frozenset(f"env.{move}" for move in ("reset", "step", "state", "tools", "call", "provision", "verify"))
_NAME = "rollyard.envs"


class Telemetry:
    """`fields` are added to every event, such as the environment's name."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self._log = Log(_NAME, **fields)

    def say(self, event: str, **fields: Any) -> None:
        if event not in LINES:
            raise ValueError(f"{event!r} is not in the vocabulary")
        if self._log.wants(logging.INFO):
            self._log.info(event, **fields)
        _add_event(event, self.fields | fields)

    def warn(self, event: str, **fields: Any) -> None:
        if event not in WARNINGS:
            raise ValueError(f"{event!r} is not in the vocabulary")
        self._log.warning(event, **fields)
        _add_event(event, self.fields | fields)

    def fail(self, event: str, error: BaseException, **fields: Any) -> None:
        """With the whole of the error, which the other side gets only as the id `incident`."""
        self._log.error(event, exc_info=error, **fields)

    def span(self, event: str, **fields: Any) -> TelemetrySpan:
        """What is known only at the end, such as a code, is added by `mark_found`."""
        if event not in SPANS:
            raise ValueError(f"{event!r} is not in the vocabulary")
        tracer = find_tracer(_NAME)
        log = self._log if self._log.wants(logging.DEBUG) else None
        if tracer is None and log is None:
            return _SILENT
        attributes = _attributes(self.fields | fields)
        traced = None if tracer is None else tracer.start_as_current_span(event, attributes=attributes)
        return TelemetrySpan(event, traced, None if log is None else log.bind(**fields))


class TelemetrySpan:
    def __init__(self, event: str, traced: AbstractContextManager[Any] | None, log: Log | None) -> None:
        self._event = event
        self._traced = traced
        self._span: Any = None
        self._log = log

    def __enter__(self) -> Self:
        if self._traced is not None:
            self._span = self._traced.__enter__()
        return self

    def mark_found(self, **fields: Any) -> None:
        if self._span is not None:
            self._span.set_attributes(_attributes(fields))
        if self._log is not None:
            self._log = self._log.bind(**fields)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._traced is not None:
            self._traced.__exit__(kind, error, trace)
        if self._log is not None:
            self._log.debug(self._event)


_SILENT = TelemetrySpan("", None, None)  # it keeps nothing, so all may share it


def _add_event(event: str, fields: dict[str, Any]) -> None:
    """A line inside a span is an event of that span."""
    if find_tracer(_NAME) is not None:
        sys.modules["opentelemetry.trace"].get_current_span().add_event(event, _attributes(fields))


def _attributes(fields: dict[str, Any]) -> dict[str, Any]:
    return {f"env.{name}": value for name, value in fields.items() if value is not None}
