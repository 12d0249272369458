"""`arca`: sandboxes of the Arca service. The image of an instance is the id of an Arca template, which decides everything else.

There is no list, no warm-up and no way into a sandbox but a presigned URL: the service has no calls for them. Times to live are
whole minutes there, so the plane's own sweep is what ends an instance on time. Written from the contract; it has not been run
against the vendor's service.
"""

from __future__ import annotations

import asyncio
import math
import os
from typing import Any, Self

from rollyard.core.errors import ConfigError, PlaneInvalid, PlaneNotFound, PlaneUnavailable, PlaneUnsupported
from rollyard.core.plane import Instance
from rollyard.core.protocols import ByteStream, Sandbox
from rollyard.core.sandbox import Resources
from rollyard.plane.engines.envelope import Service, remove, text
from rollyard.plane.engines.protocol import EngineCapabilities, EngineEntry

_INSTANCES = "/arca/openapi/v1/sandbox/instances"
_GATEWAY = "/arca/api/v1"
_INSTEAD = "ask for a URL to a port with presign"


class ArcaEngine:
    name = "arca"
    capabilities = EngineCapabilities(presign=True, ttl=True, mounts=True, images=True)

    def __init__(self, *, url: str = "", key: str = "", timeout_s: float = 30.0, look_s: float = 0.5) -> None:
        key = key or os.environ.get("ARCA_API_KEY", "")
        if not key:
            raise ConfigError("engine arca needs an API key", hint="set ARCA_API_KEY")
        where = url or os.environ.get("ARCA_BASE_URL", "")
        self._service = Service(self.name, where, headers={"x-agent-sandbox-api-key": key}, timeout_s=timeout_s)
        self._look_s = look_s

    async def create(self, instance: Instance, plane: str) -> str:
        """Returns once the sandbox runs. One that does not come up is removed, also when the caller has gone."""
        template = _template(instance)
        made = await self._service.call(
            "POST", _INSTANCES, _body(instance, plane), headers={"x-agent-sandbox-template-id": template}
        )
        ref = text(made, "sandbox_id", "sandboxId")
        if not ref:
            raise PlaneUnavailable("arca made a sandbox and did not name it")
        try:
            while (status := await self._status(ref)) != "RUNNING":
                if status != "PENDING":
                    raise PlaneUnavailable(f"arca's sandbox is {status or 'in no state'} instead of running")
                await asyncio.sleep(self._look_s)
        except BaseException:  # also when the caller has gone: what came up half is removed
            await asyncio.shield(remove(self.delete, ref))
            raise
        return ref

    async def _status(self, ref: str) -> str:
        found = await self._service.call("GET", f"{_INSTANCES}/{ref}", headers={"x-agent-sandbox-id": ref})
        return text(found, "status").strip().upper()

    async def alive(self, ref: str) -> bool:
        try:
            return await self._status(ref) in ("RUNNING", "PENDING")
        except PlaneNotFound:
            return False

    async def delete(self, ref: str) -> None:
        try:
            await self._service.call("DELETE", f"{_INSTANCES}/{ref}", headers={"x-agent-sandbox-id": ref})
        except PlaneNotFound:
            return

    async def presign(self, ref: str, port: int, minutes: float) -> str:
        given = await self._service.call(
            "POST",
            f"{_GATEWAY}/sandbox/{ref}/presign/token",
            {"expiration_time": minutes},
            headers={"x-agent-sandbox-id": ref, "x-agent-sandbox-port": str(port)},
        )
        token = text(given, "token")
        if not token:
            raise PlaneUnavailable("arca gave no token for a presigned URL")
        return f"{self._service.url}{_GATEWAY}/session/{token}"

    async def list(self, plane: str) -> list[EngineEntry]:
        raise PlaneUnsupported("engine arca cannot list", hint="the plane's own list has its instances")

    async def extend(self, ref: str, ttl_s: float) -> None:
        raise PlaneUnsupported("engine arca cannot extend an instance's time", hint="create with a longer ttl_s")

    async def sandbox(self, ref: str) -> Sandbox:
        raise PlaneUnsupported("engine arca cannot run programs or reach files", hint=_INSTEAD)

    async def dial(self, ref: str, port: int) -> ByteStream:
        raise PlaneUnsupported("engine arca has no data plane", hint=_INSTEAD)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._service.aclose()


def _template(instance: Instance) -> str:
    plan = instance.plan
    if plan.image == "host":
        raise PlaneInvalid("engine arca needs a template", hint="give the id of an Arca template as the image")
    if plan.resources != Resources():
        raise PlaneUnsupported("engine arca cannot set resources", hint="they are the template's")
    return plan.image


def _body(instance: Instance, plane: str) -> dict[str, Any]:
    name, _, version = (instance.env or "").partition("@")
    metadata = {
        "aenv_env_name": name,
        "aenv_env_version": version,
        "aenv_owner": instance.owner,
        "rollyard_plane": plane,
        "rollyard_instance": instance.id,
    }
    body: dict[str, Any] = {
        "template_id": instance.plan.image,
        "ttl_in_minutes": math.ceil(instance.plan.ttl_s / 60),
        "metadata": {label: value for label, value in metadata.items() if value},
    }
    if instance.plan.env:
        body["envs"] = dict(instance.plan.env)
    if instance.plan.mounts:
        body["mount_points"] = [
            {"id": mount.id or "", "remote_dir": mount.remote_dir, "local_dir": mount.local_dir}
            for mount in instance.plan.mounts
        ]
    return body
