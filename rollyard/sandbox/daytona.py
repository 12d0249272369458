"""Daytona sandboxes through the published SDK (the extra `daytona`), on the vendor's service or, by `url`, one of your own.

An image is built into a snapshot by Daytona; without one (`image="host"`) the organisation's default snapshot is opened. Times
are whole minutes there, so a sandbox is made to live a little longer than asked, and is ended at its time by its opener: an
unused one stops by `auto_stop_interval`, and a stopped one is deleted.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

from rollyard.core.errors import ConfigError, Error, SandboxError, SandboxInterrupted
from rollyard.core.sandbox import Isolation, SandboxSpec
from rollyard.sandbox.remote.backend import RemoteBackend, capabilities
from rollyard.sandbox.remote.link import Found, Order, by_status, gone, sdk
from rollyard.sandbox.retry import OpenLimits
from rollyard.sandbox.teardown import one_by_one

_GONE = ("destroyed", "destroying", "stopped", "stopping", "archived", "archiving", "error", "build_failed")
_THEIRS = "code-toolbox-language"  # a label that the SDK adds
_FILE_S = 600
_CALL_S = 60.0
_GIB_MB = 1024


class DaytonaBackend(RemoteBackend):
    """`key` is the API key (else `DAYTONA_API_KEY`); `url` is the API's address; `target` is the region; `image` stands for
    `host` in a spec, and is the default snapshot when it is empty; `isolation` is what that service's sandboxes give."""

    name: ClassVar[str] = "daytona"
    loggers: ClassVar[tuple[str, ...]] = (
        "daytona.internal.event_dispatcher", "daytona.internal.event_subscription_manager", "daytona._utils.timeout",
        "daytona.internal.shared_session", "socketio.client", "engineio.client",
    )  # fmt: skip

    def __init__(
        self,
        *,
        key: str | None = None,
        url: str | None = None,
        target: str | None = None,
        image: str = "",
        isolation: Isolation = "container",
        lease_s: float = 300.0,
        limits: OpenLimits | None = None,
    ) -> None:
        can = capabilities(isolation, limits, images=True, network_none=True, network_allowlist=False, extend=True)
        super().__init__(Daytona(key, url, target), can, image=image, lease_s=lease_s, limits=limits)

    def _refused(self, spec: SandboxSpec) -> dict[str, object]:
        """Processors, memory and disk are Daytona's to give, for an image."""
        refused = super()._refused(spec)
        if spec.image != "host" or self._image:
            for name in ("cpus", "memory_mb", "disk_mb"):
                refused[f"resources.{name}"] = None
        return {**refused, f"label {_THEIRS!r}, which is the SDK's own": _THEIRS in spec.labels}


class Daytona:
    def __init__(self, key: str | None, url: str | None, target: str | None) -> None:
        self._key, self._url, self._target = key, url, target
        self._sdk: Any = None
        self._client: Any = None

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self._key,) if self._key else ()

    async def enter(self) -> None:
        self._sdk = sdk("daytona", "daytona", "daytona")
        self._key = self._key or os.environ.get("DAYTONA_API_KEY")
        if not self._key:
            raise ConfigError("the daytona backend needs a key", hint="set DAYTONA_API_KEY, or pass key=")
        self._url = self._url or os.environ.get("DAYTONA_API_URL") or "https://app.daytona.io/api"
        config = self._sdk.DaytonaConfig(api_key=self._key, api_url=self._url, target=self._target)
        self._client = self._sdk.AsyncDaytona(config)

    async def leave(self) -> None:
        await self._client.close()

    async def create(self, order: Order) -> Box:
        spec, asked = order.spec, order.spec.resources
        common: dict[str, Any] = {
            "env_vars": dict(spec.env),
            "labels": dict(order.labels),
            "auto_stop_interval": _minutes(order.lease_s),
            "auto_delete_interval": 0,
            "ttl_minutes": _minutes(spec.ttl_s),
            "network_block_all": spec.network == "none",
        }
        if order.image:
            resources = self._sdk.Resources(
                cpu=math.ceil(asked.cpus) if asked.cpus else None,
                memory=math.ceil(asked.memory_mb / _GIB_MB) if asked.memory_mb else None,
                disk=math.ceil(asked.disk_mb / _GIB_MB) if asked.disk_mb else None,
            )
            wanted = self._sdk.CreateSandboxFromImageParams(image=order.image, resources=resources, **common)
        else:
            wanted = self._sdk.CreateSandboxFromSnapshotParams(**common)
        return Box(await self._client.create(wanted, timeout=spec.boot_s))

    async def find(self, sandbox_id: str) -> tuple[Box, Found]:
        made = await self._client.get(sandbox_id, request_timeout=_CALL_S)
        if _state(made) in _GONE:
            raise gone(sandbox_id)
        return Box(made), _found(made)

    async def list(self, labels: Mapping[str, str]) -> Sequence[Found]:
        """Stopped ones are among them until they are deleted: they cost money, too."""
        query = self._sdk.ListSandboxesQuery(labels=dict(labels))
        found = [_found(one) async for one in self._client.list(query, request_timeout=_CALL_S)]
        return [one for one in found if one.state not in ("destroyed", "destroying")]

    async def delete(self, sandbox_id: str) -> bool:
        try:
            made = await self._client.get(sandbox_id, request_timeout=_CALL_S)
            if _state(made) in ("destroyed", "destroying"):
                return False
            await made.delete(_CALL_S)
        except (self._sdk.DaytonaNotFoundError, self._sdk.DaytonaConflictError):
            return False  # a conflict is a delete that is under way
        return True

    def delete_now(self, ids: Sequence[str], seconds: float) -> Sequence[str]:
        """By the generated client, which starts no thread."""
        generated = sdk("daytona_api_client", "daytona", "daytona")
        client = generated.ApiClient(generated.Configuration(host=self._url))
        client.default_headers["Authorization"] = f"Bearer {self._key}"
        api = generated.SandboxApi(client)

        def one(sandbox_id: str, left: float) -> bool:
            try:
                api.delete_sandbox(sandbox_id, _request_timeout=left)
            except Exception as error:  # noqa: BLE001 - whatever it was, it may still be there, and is told as such
                return getattr(error, "status", None) in (404, 409, 410)
            return True

        return one_by_one(one)(ids, seconds)

    def fault(self, error: Exception, text: str, about: str) -> Error:
        if isinstance(error, self._sdk.DaytonaGoneError | self._sdk.DaytonaNotFoundError) and about:
            return gone(about)
        said = str(getattr(error, "headers", {}).get("Retry-After", ""))
        found = by_status(
            getattr(error, "status_code", None), text, about=about, retry_after=float(said) if said.isdigit() else None
        )
        if found is not None:
            return found
        if isinstance(error, self._sdk.DaytonaValidationError):
            return ConfigError(text)
        if isinstance(error, self._sdk.DaytonaError) and not isinstance(
            error, self._sdk.DaytonaConnectionError | self._sdk.DaytonaTimeoutError
        ):
            return SandboxError(text)
        return SandboxInterrupted(f"a call to Daytona broke: {text}")


class Box:
    """A `daytona.AsyncSandbox`."""

    def __init__(self, made: Any) -> None:
        self.id: str = made.id
        self._made = made

    async def run(self, line: str, *, env: Mapping[str, str], timeout: float) -> str:
        done = await self._made.process.exec(line, cwd="/", env=dict(env), timeout=math.ceil(timeout))
        return str(done.result)

    async def put(self, path: str, data: bytes) -> None:
        await self._made.fs.upload_file(data, path, _FILE_S)

    async def get(self, path: str) -> bytes:
        return bytes(await self._made.fs.download_file(path, _FILE_S))

    async def alive(self) -> bool:
        await self._made.refresh_data(request_timeout=_CALL_S)
        return _state(self._made) not in _GONE

    async def keep(self) -> None:
        await self._made.refresh_activity(request_timeout=_CALL_S)

    async def extend(self, end: float, created_at: float, labels: Mapping[str, str]) -> None:
        await self._made.set_labels({**labels, "rollyard.end": f"{end:.3f}"}, request_timeout=_CALL_S)
        await self._made.set_ttl(_minutes(end - time.time()), request_timeout=_CALL_S)


def _minutes(seconds: float) -> int:
    return max(1, math.ceil(seconds / 60))


def _state(made: Any) -> str:
    return str(getattr(made.state, "value", made.state))


def _found(made: Any) -> Found:
    return Found(
        id=made.id,
        image=made.snapshot or "",
        labels={name: value for name, value in made.labels.items() if name != _THEIRS},
        created_at=datetime.fromisoformat(made.created_at).timestamp(),
        state=_state(made),
    )
