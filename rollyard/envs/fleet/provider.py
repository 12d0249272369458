"""`EnvProvider`: where instances of remote environments come from, and `provision`, the one way in which they are asked for.

A provider tells what may be tried again from what may not by the type of its errors: `EnvUnavailable` is transient, every other
`EnvError` is final. Only `provision` tries again; its events are the same for every caller, blocking or not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from rollyard.core.errors import EnvUnavailable, Error
from rollyard.envs.fleet.databases import Databases
from rollyard.envs.telemetry import Telemetry

ATTEMPTS = 3
PAUSES_S = (2.0, 4.0)
PROVISION_S = 900.0  # what making one may take
_SETTLE_S = 30.0


class InstanceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Only `env_key` has no default. `image_type` None is the standard image, `region` None the provider's own choice."""

    env_key: str
    env_version: str | None = None
    data_key: str | None = None
    data_version: str | None = None
    image_type: str | None = None
    region: str | None = None
    env_variables: Mapping[str, Any] = {}
    ttl_s: float = 3600.0
    run_id: str | None = None


class RemoteInstance(Protocol):
    """One running environment. `tool_urls`: its MCP endpoints, or roots to search; `page_url`: its application's first page."""

    id: str

    @property
    def tool_urls(self) -> Sequence[str]: ...
    @property
    def page_url(self) -> str | None: ...
    @property
    def databases(self) -> Databases: ...
    async def reset(self, *, seed: int | None, timeout_s: float) -> None:
        """Raises `Unsupported` for a seed that it cannot honour, `EnvError` for whatever else went wrong."""
        ...

    async def close(self) -> None:
        """Returns once it is released; one that is gone already is no error."""
        ...


class EnvProvider(Protocol):
    """`tools_key` is what its instances' tools are called with."""

    name: str

    @property
    def tools_key(self) -> str | None: ...
    async def make(self, request: InstanceRequest) -> RemoteInstance: ...
    async def aclose(self) -> None: ...


async def provision(
    provider: EnvProvider,
    request: InstanceRequest,
    telemetry: Telemetry,
    *,
    attempts: int = ATTEMPTS,
    pauses_s: Sequence[float] = PAUSES_S,
) -> RemoteInstance:
    """An instance, in at most three tries with 2 s and then 4 s between them. `telemetry` knows the env key."""
    started = time.monotonic()
    with telemetry.span("env.provision"):
        for attempt in range(1, attempts + 1):
            try:
                made = await _make(provider, request)
            except EnvUnavailable as error:
                if attempt == attempts:
                    _record_failure(telemetry, attempt, error)
                    raise
                delay = pauses_s[min(attempt, len(pauses_s)) - 1]
                telemetry.warn(
                    "env.provisioning_retry",
                    attempt=attempt,
                    max_attempts=attempts,
                    error_type=type(error).__name__,
                    message=error.message,
                    delay_s=delay,
                )
                await asyncio.sleep(delay)
            except Error as error:
                _record_failure(telemetry, attempt, error)
                raise
            else:
                seconds = round(time.monotonic() - started, 3)
                telemetry.say("env.provisioning_completed", seconds=seconds, instance_id=made.id)
                return made
    raise AssertionError("attempts is at least one")


async def _make(provider: EnvProvider, request: InstanceRequest) -> RemoteInstance:
    """Who gives up waiting does not leave an instance behind: what is still being made is awaited, within bounds, and closed."""
    making = asyncio.ensure_future(provider.make(request))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait([making], timeout=_SETTLE_S)
        if making.done() and not making.cancelled() and making.exception() is None:
            async with asyncio.timeout(_SETTLE_S):
                await making.result().close()
        making.cancel()
        raise


def _record_failure(telemetry: Telemetry, attempt: int, error: Error) -> None:
    telemetry.warn("env.provisioning_failed", attempt=attempt, error_type=type(error).__name__, message=error.message)
