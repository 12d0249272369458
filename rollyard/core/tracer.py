"""The program's OpenTelemetry tracer. OpenTelemetry is not even imported unless the program has done so."""

from __future__ import annotations

import sys
from typing import Any


def find_tracer(name: str) -> Any:
    """None where the program has set up no tracer provider."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return trace.get_tracer(name)
