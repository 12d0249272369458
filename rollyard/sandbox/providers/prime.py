"""Prime Intellect sandboxes through the published SDK (the extra `prime`): a virtual machine each, made from a Docker image.

Its first use of an image builds a machine's disk and takes minutes: give `boot_s` for it. Labels are a list of texts there, so
each of ours is one `name=value`. Times are whole minutes, and cannot be changed later: an unused sandbox ends by itself, and its
opener ends it at its time. The SDK keeps the tokens of single sandboxes in `~/.prime`; the account's key is not among them.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rollyard.core.cache import cache_home
from rollyard.core.errors import ConfigError, Error, SandboxError, SandboxInterrupted, SandboxUnavailable
from rollyard.core.ids import new_id
from rollyard.core.sandbox import Isolation, SandboxSpec
from rollyard.images.build_types import FileCache
from rollyard.sandbox.remote.backend import RemoteBackend
from rollyard.sandbox.remote.errors import error_by_status, gone_error
from rollyard.sandbox.remote.provider import (
    KEPT,
    FoundSandbox,
    KeptImage,
    SandboxLink,
    SandboxProvider,
    SandboxRequest,
    import_sdk,
    require_key,
    whole_minutes,
)
from rollyard.sandbox.retry import OpenLimits

_OVER = ("TERMINATED", "ERROR", "TIMEOUT")
_MAX_TTL_S = 86400.0
_FILE_S = 600
_PAGE = 100
_GIB_MB = 1024
_CHECKPOINT = "checkpoint:"  # an image that is a checkpoint, by its id


class PrimeBackend(RemoteBackend):
    """`key` is the API key (else `PRIME_API_KEY`, else what `prime login` left); `url` is the API's address; `team` owns the
    sandboxes; `image` stands for `host` in a spec; `isolation` is what that service's sandboxes give."""

    name: ClassVar[str] = "prime"
    loggers: ClassVar[tuple[str, ...]] = ("prime_sandboxes.process",)

    def __init__(
        self,
        *,
        key: str | None = None,
        url: str | None = None,
        team: str | None = None,
        image: str = "python:3.12",
        isolation: Isolation = "microvm",
        lease_s: float = 300.0,
        limits: OpenLimits | None = None,
    ) -> None:
        can = {"network_none": True, "snapshot": True, "max_ttl_s": _MAX_TTL_S}
        provider = PrimeProvider(key, url, team)
        super().__init__(provider, image=image, isolation=isolation, lease_s=lease_s, limits=limits, **can)

    def _limits_taken(self, spec: SandboxSpec) -> set[str]:
        return {"cpus", "memory_mb", "disk_mb"}


class PrimeProvider(SandboxProvider):
    keeps_images: ClassVar[bool] = True

    def __init__(self, key: str | None, url: str | None, team: str | None) -> None:
        super().__init__(key, url)
        self._team = team
        self._client: Any = None
        self._folder = cache_home() / "baked"

    async def enter(self) -> None:
        self._sdk = import_sdk("prime_sandboxes", "prime-sandboxes", "prime")
        found = self._key or os.environ.get("PRIME_API_KEY") or self._sdk.Config().api_key
        self._key = require_key("prime", found, hint="set PRIME_API_KEY, run `prime login`, or pass key=")
        self._client = self._sdk.AsyncSandboxClient(api_key=self._key)
        if self._url is not None:
            self._client.client.base_url = self._url
        account = hashlib.sha256(f"{self._client.client.base_url}\0{self._key}\0{self._team}".encode()).hexdigest()[:16]
        self._folder /= f"prime-{account}"

    @property
    def _kept(self) -> FileCache:
        return FileCache(self._folder)

    async def leave(self) -> None:
        await self._client.aclose()

    async def create(self, request: SandboxRequest) -> PrimeLink:
        spec, resources = request.spec, request.spec.resources
        life, idle = whole_minutes(spec.ttl_s), whole_minutes(request.lease_s)
        origin: dict[str, Any] = {
            "docker_image": request.image,
            "disk_size_gb": resources.disk_mb / _GIB_MB if resources.disk_mb else None,
        }
        if request.image.startswith(_CHECKPOINT):  # which brings its image and its disk
            origin = {"checkpoint_id": request.image.removeprefix(_CHECKPOINT)}
        request = self._sdk.CreateSandboxRequest(
            name=new_id("rollyard").lower().replace("_", "-"),
            **origin,
            cpu_cores=resources.cpus or 1.0,
            memory_gb=resources.memory_mb / _GIB_MB if resources.memory_mb else 1.0,
            network_allowlist=[] if spec.network == "none" else None,
            timeout_minutes=life,
            idle_timeout_minutes=min(life, idle),
            environment_vars=dict(spec.env),
            labels=[f"{name}={value}" for name, value in request.labels.items()],
            team_id=self._team,
            idempotency_key=request.key,
        )
        made = await self._client.create(request)
        try:
            async with asyncio.timeout(spec.boot_s):
                await self._client.wait_for_creation(made.id, max_attempts=max(1, math.ceil(spec.boot_s)))
        except TimeoutError:
            raise SandboxUnavailable(f"the sandbox was not up in {spec.boot_s:g} s", hint="raise boot_s") from None
        return PrimeLink(self._client, made.id, self._kept)

    async def find(self, sandbox_id: str) -> tuple[PrimeLink, FoundSandbox]:
        made = await self._client.get(sandbox_id)
        if made.status in _OVER:
            raise gone_error(sandbox_id)
        return PrimeLink(self._client, sandbox_id, self._kept), _describe(made)

    async def list(self, labels: Mapping[str, str]) -> Sequence[FoundSandbox]:
        wanted, found, page = [f"{name}={value}" for name, value in labels.items()], list[FoundSandbox](), 1
        while True:
            got = await self._client.list(
                team_id=self._team, labels=wanted, page=page, per_page=_PAGE, exclude_terminated=True
            )
            found += [_describe(made) for made in got.sandboxes if made.status not in _OVER]
            if not got.has_next:
                return found
            page += 1

    async def delete(self, sandbox_id: str) -> bool:
        try:
            if (await self._client.get(sandbox_id)).status in _OVER:
                return False
            await self._client.delete(sandbox_id)
        except self._sdk.APIError as error:
            if _status(error) in (404, 410):
                return False
            raise
        return True

    async def find_image(self, name: str) -> str | None:
        """Checkpoints have no names there: this machine remembers which is which."""
        known = self._kept.get(name)
        if known is None:
            return None
        try:
            found = await self._client.get_checkpoint(known.decode().removeprefix(_CHECKPOINT))
        except self._sdk.APIError as error:
            if _status(error) in (404, 410):
                self._kept.drop(name)
                return None
            raise
        return known.decode() if found.state == "DURABLE" else None

    async def list_images(self) -> Sequence[KeptImage]:
        names = sorted(path.name for path in self._kept.root.glob(f"{KEPT}*"))
        return [KeptImage(name=name, image=(self._kept.get(name) or b"").decode()) for name in names]

    async def delete_image(self, image: str) -> None:
        try:
            await self._client.delete_checkpoint(image.removeprefix(_CHECKPOINT))
        except self._sdk.APIError as error:
            if _status(error) not in (404, 410):
                raise
        for one in await self.list_images():
            if one.image == image:
                self._kept.drop(one.name)

    def delete_now(self, ids: Sequence[str], seconds: float) -> Sequence[str]:
        """All of a batch in one call, by the plain client: the one with batching would start threads."""
        client = self._sdk.APIClient(api_key=self._key)
        client.base_url = self._client.client.base_url
        try:
            answer = client.request("DELETE", "/sandbox", json={"sandbox_ids": list(ids)}, timeout=seconds)
        except Exception:  # noqa: BLE001 - whatever it was, they may still be there, and are reported as such
            return list(ids)
        done = {*answer.get("succeeded", ()), *(one["sandbox_id"] for one in answer.get("failed", ()) if _absent(one))}
        return [name for name in ids if name not in done]

    def fault(self, error: Exception, text: str, about: str) -> Error:
        names = {kind.__name__ for kind in type(error).__mro__}
        if "SandboxImagePullError" in names:
            return ConfigError(f"the image cannot be had: {text}")
        if "SandboxNotRunningError" in names:
            return gone_error(about) if about else SandboxUnavailable(f"the sandbox did not come up: {text}")
        if "UnauthorizedError" in names:
            return ConfigError("the provider does not accept the key", hint="see this backend's page on credentials")
        found = error_by_status(_status(error), text, about=about)
        if found is not None:
            return found
        if names & {"ValidationError", "ValueError"}:
            return ConfigError(text)
        if "SandboxFileTooLargeError" in names:
            return SandboxError(text)
        return SandboxInterrupted(f"a call to Prime broke: {text}")


class PrimeLink(SandboxLink):
    """One sandbox of the client. Files come down by way of a file here: the SDK's read gives text."""

    def __init__(self, client: Any, sandbox_id: str, kept: FileCache) -> None:
        self.id = sandbox_id
        self._client, self._kept = client, kept

    async def snapshot(self) -> str:
        made = await self._client.checkpoint(self.id)
        await self._client.wait_for_checkpoint(made.id, timeout_seconds=_FILE_S)
        return _CHECKPOINT + str(made.id)

    async def keep_image(self, name: str) -> str:
        image = await self.snapshot()
        self._kept.put(name, image.encode())
        return image

    async def run(self, line: str, *, env: Mapping[str, str], timeout: float) -> str:
        done = await self._client.execute_command(
            self.id, line, working_dir="/", env=dict(env), timeout=math.ceil(timeout)
        )
        return str(done.stdout)

    async def put(self, path: str, data: bytes) -> None:
        await self._client.upload_bytes(self.id, path, data, Path(path).name, timeout=_FILE_S)

    async def get(self, path: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="rollyard-") as scratch:
            target = Path(scratch, "got")
            await self._client.download_file(self.id, path, str(target), timeout=_FILE_S)
            return await asyncio.to_thread(target.read_bytes)

    async def alive(self) -> bool:
        try:
            return (await self._client.get(self.id)).status not in _OVER
        except Exception as error:  # the SDK's errors have no common base; what is not 'gone' is raised
            if _status(error) in (404, 410):
                return False
            raise

    async def keep(self, seconds: float) -> None:
        await self._client.execute_command(self.id, "true", timeout=30)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _status(error: Exception) -> int | None:
    """The SDK's errors are texts; the response is on the error that they were made from."""
    for one in _chain(error):
        status = getattr(getattr(one, "response", None), "status_code", None)
        if status is not None:
            return int(status)
    return None


def _absent(failed: Mapping[str, str]) -> bool:
    return "not found" in failed.get("error", "").lower() or failed.get("code") == "NOT_FOUND"


def _describe(made: Any) -> FoundSandbox:
    return FoundSandbox(
        id=made.id,
        image=made.docker_image,
        labels={name: value for name, sign, value in (text.partition("=") for text in made.labels) if sign},
        created_at=made.created_at.timestamp(),
        state=str(made.status).lower(),
    )
