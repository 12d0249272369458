"""`standard`: any sandbox service that serves AEnvironment's contract for backends under `/aenvironment/instance`.

Create, get, delete and list in the common envelope; warm-up and clean-up are the service's own business and are not called. A
service says where an instance is by `ip`, and ports are reached there directly, so the gateway and signed URLs work. A list is
believed only if it gives back the labels that instances were made with: otherwise nobody could tell whose a thing is.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, Self, cast

from rollyard.core.errors import PlaneNotFound, PlaneUnavailable, PlaneUnsupported, SandboxGone
from rollyard.core.plane import Instance
from rollyard.core.protocols import ByteStream, Sandbox
from rollyard.plane.engines.envelope import Service, remove, text
from rollyard.plane.engines.protocol import INSTANCE_LABEL, PLANE_LABEL, EngineCapabilities, EngineEntry
from rollyard.sandbox.streams import SocketStream

_INSTANCES = "/aenvironment/instance"
_DIAL_S = 10.0


class StandardEngine:
    name = "standard"
    capabilities = EngineCapabilities(
        list=True,
        dial=True,
        presign=True,
        ttl=True,
        mounts=True,
        arguments=True,
        images=True,
    )

    def __init__(self, *, url: str = "", key: str = "", timeout_s: float = 30.0, look_s: float = 0.5) -> None:
        key = key or os.environ.get("ROLLYARD_STANDARD_KEY", "")
        where = url or os.environ.get("ROLLYARD_STANDARD_URL", "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._service = Service(self.name, where, headers=headers, timeout_s=timeout_s)
        self._look_s = look_s

    async def create(self, instance: Instance, plane: str) -> str:
        """Returns once the service calls it running. One that does not come up is removed."""
        if instance.plan.start:
            raise PlaneUnsupported("engine standard cannot start a program", hint="its image's own program runs")
        if instance.plan.resources.pids is not None:
            raise PlaneUnsupported("engine standard cannot limit the number of processes")
        made = await self._service.call("POST", _INSTANCES, _body(instance, plane))
        ref = text(made, "id")
        if not ref:
            raise PlaneUnavailable("the service made an instance and did not name it")
        try:
            status = text(made, "status")
            while status != "Running":
                if status not in ("Pending", "Creating"):
                    raise PlaneUnavailable(f"the service's instance is {status or 'in no state'} instead of running")
                await asyncio.sleep(self._look_s)
                status = text(await self._find(ref), "status")
        except BaseException:  # also when the caller has gone: what came up half is removed
            await asyncio.shield(remove(self.delete, ref))
            raise
        return ref

    async def _find(self, ref: str) -> Any:
        return await self._service.call("GET", f"{_INSTANCES}/{ref}")

    async def alive(self, ref: str) -> bool:
        try:
            return text(await self._find(ref), "status") in ("Running", "Pending", "Creating")
        except PlaneNotFound:
            return False

    async def delete(self, ref: str) -> None:
        try:
            await self._service.call("DELETE", f"{_INSTANCES}/{ref}")
        except PlaneNotFound:
            return

    async def list(self, plane: str) -> list[EngineEntry]:
        found: Any = await self._service.call("GET", _INSTANCES, query={"envName": ""})
        things: list[EngineEntry] = []
        for one in cast("list[Any]", found if isinstance(found, list) else []):
            labels: Any = one.get("labels") if isinstance(one, dict) else None
            if not isinstance(labels, dict):
                raise PlaneUnavailable("the service's list has no labels, so the owner of its instances cannot be told")
            if text(labels, PLANE_LABEL) == plane and text(one, "id"):
                things.append(EngineEntry(ref=text(one, "id"), instance_id=text(labels, INSTANCE_LABEL)))
        return things

    async def extend(self, ref: str, ttl_s: float) -> None:
        raise PlaneUnsupported("engine standard cannot extend an instance's time", hint="create with a longer ttl_s")

    async def sandbox(self, ref: str) -> Sandbox:
        raise PlaneUnsupported("engine standard cannot run programs or reach files", hint="use the gateway or presign")

    async def dial(self, ref: str, port: int) -> ByteStream:
        try:
            ip = text(await self._find(ref), "ip")
        except PlaneNotFound as error:
            raise SandboxGone(f"the service has no instance {ref}") from error
        if not ip:
            raise PlaneUnavailable("the service does not say where the instance is")
        async with asyncio.timeout(_DIAL_S):
            loop = asyncio.get_running_loop()
            family, kind, proto, _, address = (await loop.getaddrinfo(ip, port, type=socket.SOCK_STREAM))[0]
            sock = socket.socket(family, kind, proto)
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, address)
            except BaseException:  # also a cancelled one must not leave its socket
                sock.close()
                raise
        return SocketStream(sock)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._service.aclose()


def _body(instance: Instance, plane: str) -> dict[str, Any]:
    """The environment as the contract writes it, with what was asked for in its `deploy_config`."""
    name, _, version = (instance.env or "").partition("@")
    plan, resources = instance.plan, instance.plan.resources
    deploy: dict[str, Any] = {
        "environment_variables": dict(plan.env),
        "arguments": list(plan.arguments),
        "ttl": f"{round(plan.ttl_s * 1000)}ms",
        "owner": instance.owner,
        "labels": {**instance.labels, PLANE_LABEL: plane, INSTANCE_LABEL: instance.id},
    }
    if resources.cpus is not None:
        deploy["cpu"] = f"{resources.cpus:g}"
    if resources.memory_mb is not None:
        deploy["memory"] = f"{resources.memory_mb}Mi"
    if resources.disk_mb is not None:
        deploy["ephemeralStorage"] = f"{resources.disk_mb}Mi"
    if plan.mounts:
        deploy["mountPoints"] = [
            {"id": mount.id or "", "remote_dir": mount.remote_dir, "local_dir": mount.local_dir}
            for mount in plan.mounts
        ]
    return {
        "id": f"{name}-{version}" if name else instance.id,
        "name": name or instance.id,
        "version": version or "0",
        "description": "",
        "code_url": "",
        "tags": [],
        "artifacts": [] if plan.image == "host" else [{"type": "image", "content": plan.image}],
        "deploy_config": deploy,
    }
