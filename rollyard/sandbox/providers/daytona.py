"""Daytona sandboxes through the published SDK (the extra `daytona`), on the vendor's service or, by `url`, one of your own.

An image is built into a snapshot by Daytona; without one (`image="host"`) the organisation's default snapshot is opened. Times
are whole minutes there, so a sandbox is made to live a little longer than asked, and is ended at its time by its opener: an
unused one stops by `auto_stop_interval`, and a stopped one is deleted.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

from rollyard.core.errors import ConfigError, Error, SandboxError, SandboxInterrupted
from rollyard.core.ids import new_id
from rollyard.core.sandbox import Isolation, SandboxSpec
from rollyard.sandbox.remote.backend import RemoteBackend
from rollyard.sandbox.remote.errors import error_by_status, gone_error
from rollyard.sandbox.remote.provider import (
    FoundSandbox,
    KeptImage,
    SandboxLink,
    SandboxProvider,
    SandboxRequest,
    enum_text,
    import_sdk,
    require_key,
    whole_minutes,
)
from rollyard.sandbox.retry import OpenLimits
from rollyard.sandbox.teardown import one_by_one

_GONE = ("destroyed", "destroying", "stopped", "stopping", "archived", "archiving", "error", "build_failed")
_THEIRS = "code-toolbox-language"  # a label that the SDK adds
_FILE_S = 600
_CALL_S = 60.0
_GIB_MB = 1024
_PAGE = 100
_SNAPSHOT = "snapshot:"  # an image that is a snapshot, by its name


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
        can = {"network_none": True, "extend": True, "snapshot": True, "pause": True}
        provider = DaytonaProvider(key, url, target)
        super().__init__(provider, image=image, isolation=isolation, lease_s=lease_s, limits=limits, **can)

    def _limits_taken(self, spec: SandboxSpec) -> set[str]:
        """Only a sandbox of an image is made to measure; a snapshot has its own."""
        image = self._image_of(spec)
        return {"cpus", "memory_mb", "disk_mb"} if image and not image.startswith(_SNAPSHOT) else set()

    def _list_refused(self, spec: SandboxSpec) -> dict[str, object]:
        return {**super()._list_refused(spec), f"label {_THEIRS!r}, which is the SDK's own": _THEIRS in spec.labels}


class DaytonaProvider(SandboxProvider):
    keeps_images: ClassVar[bool] = True

    def __init__(self, key: str | None, url: str | None, target: str | None) -> None:
        super().__init__(key, url)
        self._target = target
        self._client: Any = None

    async def enter(self) -> None:
        self._sdk = import_sdk("daytona", "daytona", "daytona")
        found = self._key or os.environ.get("DAYTONA_API_KEY")
        self._key = require_key("daytona", found, hint="set DAYTONA_API_KEY, or pass key=")
        self._url = self._url or os.environ.get("DAYTONA_API_URL") or "https://app.daytona.io/api"
        config = self._sdk.DaytonaConfig(api_key=self._key, api_url=self._url, target=self._target)
        self._client = self._sdk.AsyncDaytona(config)

    async def leave(self) -> None:
        await self._client.close()

    async def create(self, request: SandboxRequest) -> DaytonaLink:
        spec, size = request.spec, request.spec.resources
        common: dict[str, Any] = {
            "env_vars": dict(spec.env),
            "labels": dict(request.labels),
            "auto_stop_interval": whole_minutes(request.lease_s),
            "auto_delete_interval": 0,
            "ttl_minutes": whole_minutes(spec.ttl_s),
            "network_block_all": spec.network == "none",
        }
        if request.image.startswith(_SNAPSHOT):
            name = request.image.removeprefix(_SNAPSHOT)
            wanted = self._sdk.CreateSandboxFromSnapshotParams(snapshot=name, **common)
        elif request.image:
            resources = self._sdk.Resources(
                cpu=math.ceil(size.cpus) if size.cpus else None,
                memory=math.ceil(size.memory_mb / _GIB_MB) if size.memory_mb else None,
                disk=math.ceil(size.disk_mb / _GIB_MB) if size.disk_mb else None,
            )
            wanted = self._sdk.CreateSandboxFromImageParams(image=request.image, resources=resources, **common)
        else:
            wanted = self._sdk.CreateSandboxFromSnapshotParams(**common)
        return DaytonaLink(await self._client.create(wanted, timeout=spec.boot_s))

    async def find(self, sandbox_id: str) -> tuple[DaytonaLink, FoundSandbox]:
        """One that is paused is resumed by it."""
        made = await self._client.get(sandbox_id, request_timeout=_CALL_S)
        if enum_text(made.state) in _GONE:
            raise gone_error(sandbox_id)
        if enum_text(made.state) in ("paused", "pausing"):
            await made.start(_FILE_S)
        return DaytonaLink(made), _describe(made)

    async def list(self, labels: Mapping[str, str]) -> Sequence[FoundSandbox]:
        """Stopped ones are among them until they are deleted: they cost money, too."""
        query = self._sdk.ListSandboxesQuery(labels=dict(labels))
        found = [_describe(one) async for one in self._client.list(query, request_timeout=_CALL_S)]
        return [one for one in found if one.state not in ("destroyed", "destroying")]

    async def delete(self, sandbox_id: str) -> bool:
        try:
            made = await self._client.get(sandbox_id, request_timeout=_CALL_S)
            if enum_text(made.state) in ("destroyed", "destroying"):
                return False
            await made.delete(_CALL_S)
        except (self._sdk.DaytonaNotFoundError, self._sdk.DaytonaConflictError):
            return False  # a conflict is a delete that is under way
        return True

    async def find_image(self, name: str) -> str | None:
        try:
            found = await self._client.snapshot.get(name)
        except self._sdk.DaytonaNotFoundError:
            return None
        return _SNAPSHOT + name if enum_text(found.state) == "active" else None

    async def list_images(self) -> Sequence[KeptImage]:
        found, page, pages = list[KeptImage](), 1, 1
        while page <= pages:
            got = await self._client.snapshot.list(page=page, limit=_PAGE)
            found += [KeptImage(name=one.name, image=_SNAPSHOT + one.name) for one in got.items]
            page, pages = page + 1, got.total_pages
        return found

    async def delete_image(self, image: str) -> None:
        with contextlib.suppress(self._sdk.DaytonaNotFoundError):
            await self._client.snapshot.delete(image.removeprefix(_SNAPSHOT))

    def delete_now(self, ids: Sequence[str], seconds: float) -> Sequence[str]:
        """By the generated client, which starts no thread."""
        generated = import_sdk("daytona_api_client", "daytona", "daytona")
        client = generated.ApiClient(generated.Configuration(host=self._url))
        client.default_headers["Authorization"] = f"Bearer {self._key}"
        api = generated.SandboxApi(client)

        def one(sandbox_id: str, left: float) -> bool:
            try:
                api.delete_sandbox(sandbox_id, _request_timeout=left)
            except Exception as error:  # noqa: BLE001 - whatever it was, it may still be there, and is reported as such
                return getattr(error, "status", None) in (404, 409, 410)
            return True

        return one_by_one(one)(ids, seconds)

    def fault(self, error: Exception, text: str, about: str) -> Error:
        if isinstance(error, self._sdk.DaytonaGoneError | self._sdk.DaytonaNotFoundError) and about:
            return gone_error(about)
        said = str(getattr(error, "headers", {}).get("Retry-After", ""))
        found = error_by_status(
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


class DaytonaLink(SandboxLink):
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
        return enum_text(self._made.state) not in _GONE

    async def keep(self, seconds: float) -> None:
        await self._made.refresh_activity(request_timeout=_CALL_S)

    async def snapshot(self) -> str:
        return await self.keep_image(new_id("rollyard-snapshot").lower().replace("_", "-"))

    async def keep_image(self, name: str) -> str:
        await self._made.create_snapshot(name, timeout=_FILE_S)
        return _SNAPSHOT + name

    async def pause(self) -> None:
        await self._made.pause(_FILE_S)

    async def resume(self, seconds: float) -> None:
        await self._made.start(_FILE_S)

    async def extend(self, end: float, labels: Mapping[str, str]) -> None:
        await self._made.set_labels({**labels, "rollyard.end": f"{end:.3f}"}, request_timeout=_CALL_S)
        await self._made.set_ttl(whole_minutes(end - time.time()), request_timeout=_CALL_S)


def _describe(made: Any) -> FoundSandbox:
    return FoundSandbox(
        id=made.id,
        image=made.snapshot or "",
        labels={name: value for name, value in made.labels.items() if name != _THEIRS},
        created_at=datetime.fromisoformat(made.created_at).timestamp(),
        state=enum_text(made.state),
    )
