"""Runloop devboxes through the published SDK (the extra `runloop`), on the vendor's service or, by `url`, one of your own.

An image is a blueprint; a Docker image becomes one, once. A devbox that is to die with its opener shuts down when it is idle, and
its opener says now and then that it is not. Its API runs a line in a login shell and takes no environment: values go by a file
that the line removes. It shows a bounded part of what a program said, so longer output comes by a file, too.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from rollyard.core.errors import ConfigError, Error, SandboxError, SandboxInterrupted, Unsupported
from rollyard.core.ids import new_id
from rollyard.core.sandbox import Isolation, Resources, SandboxSpec
from rollyard.sandbox.remote.backend import RemoteBackend
from rollyard.sandbox.remote.errors import error_by_status, gone_error
from rollyard.sandbox.remote.images import name_image
from rollyard.sandbox.remote.provider import (
    FoundSandbox,
    KeptImage,
    SandboxLink,
    SandboxProvider,
    SandboxRequest,
    import_sdk,
    require_key,
)
from rollyard.sandbox.retry import OpenLimits
from rollyard.sandbox.teardown import one_by_one

_OVER = ("shutdown", "failure", "suspended", "suspending")
_MAX_TTL_S = 172800.0
_CALL_S = 60.0
_FILE_S = 600.0
_SNAPSHOT = "snapshot:"  # an image that is a snapshot of a disk, by its id
_REFERENCE = re.compile(r"[/:.@]")
_NO_NETWORK = "rollyard-no-network"  # the name of a network policy that allows nothing
_PAGE = 100
_LINES = "100000"
_SHOWN = 32_000  # bytes of output that come with the answer
_OURS = "ROLLYARD_"  # variables of ours, which are no secrets
_CORES, _GIB = (0.5, 1, *range(2, 17, 2)), (1, *range(2, 65, 2))


class RunloopBackend(RemoteBackend):
    """`key` is the API key (else `RUNLOOP_API_KEY`); `url` is the API's address; `image` stands for `host` in a spec, and is
    the vendor's own image when it is empty; `isolation` is what that service's devboxes give."""

    name: ClassVar[str] = "runloop"
    loggers: ClassVar[tuple[str, ...]] = ("runloop_api_client", "runloop_api_client._base_client")

    def __init__(
        self,
        *,
        key: str | None = None,
        url: str | None = None,
        image: str = "",
        isolation: Isolation = "microvm",
        lease_s: float = 300.0,
        limits: OpenLimits | None = None,
    ) -> None:
        super().__init__(
            RunloopProvider(key, url),
            image=image,
            isolation=isolation,
            lease_s=lease_s,
            limits=limits,
            network_none=True,
            snapshot=True,
            max_ttl_s=_MAX_TTL_S,
        )

    def _limits_taken(self, spec: SandboxSpec) -> set[str]:
        return {"cpus", "memory_mb", "disk_mb"}


class RunloopProvider(SandboxProvider):
    keeps_images: ClassVar[bool] = True

    def __init__(self, key: str | None, url: str | None) -> None:
        super().__init__(key, url)
        self._client: Any = None
        self._policy: str | None = None

    async def enter(self) -> None:
        self._sdk = import_sdk("runloop_api_client", "runloop_api_client", "runloop")
        found = self._key or os.environ.get("RUNLOOP_API_KEY")
        self._key = require_key("runloop", found, hint="set RUNLOOP_API_KEY, or pass key=")
        # Its own retries would hide what is counted and waited for here, and its pools are the process's and many.
        pools = dict.fromkeys(("api_pool_shards", "background_pool_shards", "transfer_pool_shards"), 1)
        self._client = self._sdk.AsyncRunloop(
            bearer_token=self._key, base_url=self._url, max_retries=0, shared_http_pool=False, **pools
        )

    async def leave(self) -> None:
        await self._client.close()

    async def create(self, request: SandboxRequest) -> RunloopLink:
        spec = request.spec
        launch: dict[str, Any] = {"user_parameters": {"uid": 0, "username": "root"}, **_size(spec.resources)}
        if spec.lifetime == "owner":
            launch["lifecycle"] = {
                "after_idle": {"idle_time_seconds": math.ceil(request.lease_s), "on_idle": "shutdown"}
            }
        else:
            launch["keep_alive_time_seconds"] = math.ceil(spec.ttl_s)
        if spec.network == "none":
            launch["network_policy_id"] = await self._find_policy()
        source: dict[str, Any] = {}
        if request.image.startswith(_SNAPSHOT):
            source["snapshot_id"] = request.image.removeprefix(_SNAPSHOT)
        elif request.image:
            source["blueprint_name"] = request.image
        made = await self._client.devboxes.create(
            environment_variables=dict(spec.env),
            metadata=dict(request.labels),
            launch_parameters=launch,
            idempotency_key=request.key,
            timeout=spec.boot_s,
            **source,
        )
        polling = import_sdk("runloop_api_client.lib.polling", "runloop_api_client", "runloop")
        wait = polling.PollingConfig(interval_seconds=0.2, timeout_seconds=spec.boot_s)
        await self._client.devboxes.await_running(made.id, polling_config=wait)
        return RunloopLink(self._client, made.id)

    async def _find_policy(self) -> str:
        """The policy that allows nothing: names may be used again, so the first one found is taken."""
        if self._policy is None:
            async for one in self._client.network_policies.list(name=_NO_NETWORK, timeout=_CALL_S):
                if one.name == _NO_NETWORK:
                    self._policy = str(one.id)
                    break
            else:
                made = await self._client.network_policies.create(name=_NO_NETWORK, allow_all=False, timeout=_CALL_S)
                self._policy = str(made.id)
        return self._policy

    async def take_image(self, image: str, resources: Resources) -> str:
        """A blueprint or a snapshot by its name; any other name with a tag, a host or a path is a Docker image, which a
        blueprint is built of once."""
        if image.startswith(_SNAPSHOT) or not _REFERENCE.search(image):
            return image
        name = name_image(image, image.encode())
        async for one in self._client.blueprints.list(name=name, timeout=_CALL_S):
            if one.name == name and one.status == "build_complete":
                return name
        try:
            await self._client.blueprints.create_and_await_build_complete(name=name, dockerfile=f"FROM {image}")
        except self._sdk.RunloopError as error:
            if isinstance(error, self._sdk.APIConnectionError):
                raise
            raise ConfigError(f"no blueprint could be built of the image {image!r}") from None
        return name

    async def find(self, sandbox_id: str) -> tuple[RunloopLink, FoundSandbox]:
        made = await self._client.devboxes.retrieve(sandbox_id, timeout=_CALL_S)
        if made.status in _OVER:
            raise gone_error(sandbox_id)
        return RunloopLink(self._client, sandbox_id), _describe(made)

    async def list(self, labels: Mapping[str, str]) -> Sequence[FoundSandbox]:
        found = [_describe(one) async for one in self._client.devboxes.list(limit=_PAGE, timeout=_CALL_S)]
        return [one for one in found if one.state not in ("shutdown", "failure")]

    async def delete(self, sandbox_id: str) -> bool:
        try:
            if (await self._client.devboxes.retrieve(sandbox_id, timeout=_CALL_S)).status in ("shutdown", "failure"):
                return False
            await self._client.devboxes.shutdown(sandbox_id, timeout=_CALL_S)
        except self._sdk.NotFoundError:
            return False
        return True

    def delete_now(self, ids: Sequence[str], seconds: float) -> Sequence[str]:
        with self._sdk.Runloop(bearer_token=self._key, base_url=self._url, max_retries=0) as client:

            def one(sandbox_id: str, left: float) -> bool:
                try:
                    client.devboxes.shutdown(sandbox_id, timeout=left)
                except self._sdk.RunloopError as error:
                    return getattr(error, "status_code", None) in (404, 410)
                return True

            return one_by_one(one)(ids, seconds)

    async def find_image(self, name: str) -> str | None:
        return next((one.image for one in await self.list_images() if one.name == name), None)

    async def list_images(self) -> Sequence[KeptImage]:
        pages = self._client.devboxes.disk_snapshots.list(limit=_PAGE, timeout=_CALL_S)
        return [KeptImage(name=one.name or one.id, image=_SNAPSHOT + one.id) async for one in pages]

    async def delete_image(self, image: str) -> None:
        if not image.startswith(_SNAPSHOT):
            raise Unsupported(f"{image!r} is not a snapshot of a disk", hint="delete a blueprint at the vendor's")
        try:
            await self._client.devboxes.disk_snapshots.delete(image.removeprefix(_SNAPSHOT), timeout=_CALL_S)
        except self._sdk.NotFoundError:
            return

    def fault(self, error: Exception, text: str, about: str) -> Error:
        answer: Any = getattr(error, "response", None)
        if isinstance(error, self._sdk.APIStatusError) and answer is not None:
            said = str(answer.headers.get("Retry-After", ""))
            after = float(said) if said.isdigit() else None
            return error_by_status(answer.status_code, text, about=about, retry_after=after) or SandboxError(text)
        if isinstance(error, self._sdk.RunloopError) and not isinstance(error, self._sdk.APIConnectionError):
            return SandboxError(text)
        return SandboxInterrupted(f"a call to Runloop broke: {text}")


class RunloopLink(SandboxLink):
    """A devbox, by its id."""

    def __init__(self, client: Any, sandbox_id: str) -> None:
        self.id, self._client = sandbox_id, client

    async def run(self, line: str, *, env: Mapping[str, str], timeout: float) -> str:
        place = f"/tmp/.rollyard-{secrets.token_hex(8)}"
        hidden = {name: value for name, value in env.items() if not name.startswith(_OURS)}
        words = [f"export {name}={shlex.quote(value)}" for name, value in env.items() if name.startswith(_OURS)]
        if hidden:
            exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in hidden.items())
            await self._client.devboxes.write_file_contents(
                self.id, file_path=f"{place}.env", contents=exports, timeout=_CALL_S
            )
            words.append(f". {place}.env; rm -f {place}.env")
        command = "; ".join(
            [
                *words,
                f"{line} >{place} 2>&1",
                f'if [ "$(wc -c <{place})" -le {_SHOWN} ]; then cat {place}; rm -f {place}; else echo {place}; fi',
            ]
        )
        done = await self._client.devboxes.execute_and_await_completion(
            self.id, command=command, last_n=_LINES, timeout=timeout
        )
        said = str(done.stdout or "")
        if said.splitlines()[-1:] != [place]:
            return said
        whole = await self.get(place)
        await self._client.devboxes.execute(self.id, command=f"rm -f {place}", timeout=_CALL_S)
        return whole.decode("utf-8", "replace")

    async def put(self, path: str, data: bytes) -> None:
        await self._client.devboxes.upload_file(self.id, path=path, file=("file", data), timeout=_FILE_S)

    async def get(self, path: str) -> bytes:
        answer = await self._client.devboxes.download_file(self.id, path=path, timeout=_FILE_S)
        return bytes(await answer.read())

    async def alive(self) -> bool:
        return (await self._client.devboxes.retrieve(self.id, timeout=_CALL_S)).status not in _OVER

    async def keep(self, seconds: float) -> None:
        await self._client.devboxes.keep_alive(self.id, timeout=_CALL_S)

    async def snapshot(self) -> str:
        return await self.keep_image(new_id("rollyard-snapshot").lower())

    async def keep_image(self, name: str) -> str:
        made = await self._client.devboxes.snapshot_disk(self.id, name=name, timeout=_FILE_S)
        return _SNAPSHOT + str(made.id)


def _size(resources: Resources) -> dict[str, Any]:
    """What was asked for in the sizes that there are; a core has two to eight GiB."""
    if resources == Resources():
        return {}
    memory = (resources.memory_mb or 0) / 1024
    cores = next((one for one in _CORES if one >= max(resources.cpus or 0, memory / 8)), None)
    gib = next((one for one in _GIB if one >= max(memory, 2 * (cores or 0))), None)
    disk = max(2, 2 * math.ceil((resources.disk_mb or 0) / 2048))
    if cores is None or gib is None or disk > _GIB[-1]:
        raise Unsupported(
            f"a devbox has at most 16 cores, 64 GiB of memory and 64 GiB of disk; {msgspec.to_builtins(resources)} was asked for"
        )
    size = {"custom_cpu_cores": cores, "custom_gb_memory": gib}
    return {
        "resource_size_request": "CUSTOM_SIZE",
        **size,
        **({"custom_disk_size": disk} if resources.disk_mb else {}),
    }


def _describe(made: Any) -> FoundSandbox:
    image = _SNAPSHOT + made.snapshot_id if made.snapshot_id else made.blueprint_id or ""
    return FoundSandbox(
        id=made.id, image=image, labels=dict(made.metadata), created_at=made.create_time_ms / 1000, state=made.status
    )
