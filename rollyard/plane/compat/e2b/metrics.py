"""What a sandbox uses, as a client reads it: one reading when it asks, at most one in five seconds, and the last of them kept."""

from __future__ import annotations

import time
from collections import deque
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request

from rollyard.core.errors import Unsupported
from rollyard.core.protocols import MeasuresUsage, Sandbox
from rollyard.core.sandbox import Resources, SandboxUsage
from rollyard.plane.compat.e2b.errors import E2bRefusal

_EVERY_S = 5.0
_KEPT = 720


class UsageReading(msgspec.Struct, frozen=True):
    at: float
    cpu_pct: float
    usage: SandboxUsage


class UsageLog:
    """The processors' share is between two readings, the first one's since the sandbox was made."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._readings: deque[UsageReading] = deque(maxlen=_KEPT)

    async def read(self, created_at: float) -> list[UsageReading]:
        now = time.time()
        if not self._readings or now - self._readings[-1].at >= _EVERY_S:
            if not isinstance(self._sandbox, MeasuresUsage):
                raise Unsupported(f"backend {self._sandbox.info.backend} does not say what a sandbox uses")
            usage = await self._sandbox.usage()
            before, used = (
                (self._readings[-1].at, self._readings[-1].usage.cpu_s) if self._readings else (created_at, 0.0)
            )
            share = max(0.0, usage.cpu_s - used) / max(now - before, 0.001) / usage.cpus
            self._readings.append(UsageReading(now, min(100.0, 100 * share), usage))
        return list(self._readings)


def show_metric(reading: UsageReading, limits: Resources) -> dict[str, Any]:
    usage = reading.usage
    return {
        "timestamp": datetime.fromtimestamp(int(reading.at), UTC).isoformat().replace("+00:00", "Z"),
        "timestampUnix": int(reading.at),
        "cpuCount": max(1, round(limits.cpus or usage.cpus)),
        "cpuUsedPct": round(reading.cpu_pct, 2),
        "memUsed": usage.memory,
        "memTotal": usage.memory_total,
        "memCache": usage.memory_cache,
        "diskUsed": usage.disk,
        "diskTotal": limits.disk_mb * 2**20 if limits.disk_mb else usage.disk_total,
    }


def read_interval(request: Request) -> tuple[float, float]:
    """The seconds asked for; the last one is whole."""
    try:
        start, end = (
            float(request.query_params.get(name) or default) for name, default in (("start", 0), ("end", "inf"))
        )
    except ValueError as error:
        raise E2bRefusal("invalid_argument", "start and end are seconds since 1970") from error
    return start, end + 1
