"""ROCK's sandbox calls over the plane's instances: start, look, execute, shells, files, stop.

A sandbox that is not used for `auto_clear_time` minutes ends, as there; a stopped one is gone, so restart, archive and commit are
refused. A client's own `sandbox_id` makes a repeated start give the same instance, whose id is still the plane's.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.routing import Route

from rollyard.core.errors import CommandFailed, PlaneInvalid, PlaneNotFound, PlaneUnsupported
from rollyard.core.plane import ApiKey, Instance
from rollyard.core.sandbox import Resources
from rollyard.plane.compat.rock.callers import Endpoint, RockCallers
from rollyard.plane.compat.rock.shells import Shells
from rollyard.plane.http.quantities import megabytes
from rollyard.plane.http.wire import body
from rollyard.plane.service.create_request import CreateInstance
from rollyard.plane.service.instances import Instances

_PLACE = "/apis/envs/sandbox/v1"
_LIFE_S = 86400.0
_COMMAND_S = 300.0
_MAX_FILE = 64 * 2**20


class _Start(msgspec.Struct, frozen=True, kw_only=True):
    image: str
    image_os: str = "linux"
    auto_clear_time_minutes: int = 5
    memory: str | None = None
    cpus: float | None = None
    disk: str | None = None
    num_gpus: float | None = None
    accelerator_type: str | None = None
    registry_username: str | None = None
    use_kata_runtime: bool = False
    sandbox_id: str | None = None
    auto_archive_seconds: int | None = None


class _In(msgspec.Struct, frozen=True, kw_only=True):
    """What the calls about one sandbox send; each reads its own part of it."""

    sandbox_id: str
    command: str | tuple[str, ...] = ""
    session: str = "default"
    check: str = "raise"
    timeout: float | None = None
    cwd: str | None = None
    env: dict[str, str] | None = None
    remote_user: str | None = None
    startup_source: tuple[str, ...] = ()
    path: str = ""
    content: str = ""
    encoding: str | None = None
    errors: str | None = None


class Sandboxes:
    def __init__(self, instances: Instances, callers: RockCallers, shells: Shells) -> None:
        self._instances, self._callers, self._shells = instances, callers, shells

    def routes(self) -> list[Route]:
        def at(name: str, endpoint: Endpoint, method: str = "POST") -> Route:
            return Route(f"{_PLACE}/{name}", self._callers.envelope(endpoint), methods=[method])

        return [
            at("start_async", self.start),
            at("start", self.start),
            at("get_status", self.status, "GET"),
            at("is_alive", self.status, "GET"),
            at("execute", self.execute),
            at("create_session", self.open_shell),
            at("run_in_session", self.run),
            at("close_session", self.close_shell),
            at("read_file", self.read),
            at("write_file", self.write),
            at("upload", self.upload),
            at("stop", self.stop),
            at("delete", self.stop),
            *(at(name, _refuse) for name in ("restart", "commit", "sandboxes/{id}/archive", "sandboxes/{id}/restart")),
        ]

    async def start(self, request: Request, caller: ApiKey) -> dict[str, Any]:
        payload = await body(request, _Start)
        for name in ("accelerator_type", "registry_username", "use_kata_runtime", "auto_archive_seconds"):
            if getattr(payload, name):
                raise PlaneUnsupported(f"{name} is not served here")
        wanted = CreateInstance(
            image=payload.image,
            ttl_s=min(_LIFE_S, self._instances.settings.max_ttl_s),
            idle_ttl_s=max(1, payload.auto_clear_time_minutes) * 60.0,
            resources=Resources(
                cpus=payload.cpus,
                memory_mb=_size(payload.memory),
                disk_mb=_size(payload.disk),
                gpus=int(payload.num_gpus) if payload.num_gpus else None,
            ),
        )
        made = await self._instances.create(wanted, owner=caller.owner, caller=caller.id, key=payload.sandbox_id)
        return {"sandbox_id": made.id, "host_name": made.engine, "host_ip": ""}

    async def status(self, request: Request, caller: ApiKey) -> dict[str, Any]:
        sandbox_id = request.query_params.get("sandbox_id", "")
        return _status(await self._callers.find_own(caller, sandbox_id))

    async def execute(self, request: Request, caller: ApiKey) -> dict[str, Any]:
        wanted, own = await self._read_request(request, caller)
        sandbox = await self._instances.sandbox(own.id)
        limit = wanted.timeout or _COMMAND_S
        done = await sandbox.exec(wanted.command, env=wanted.env or {}, cwd=wanted.cwd, timeout=limit)
        if done.timed_out:
            raise TimeoutError(f"the command took longer than {limit:g} s")
        texts = {name: getattr(done, name).decode("utf-8", "backslashreplace") for name in ("stdout", "stderr")}
        return {**texts, "exit_code": done.exit_code}

    async def open_shell(self, request: Request, caller: ApiKey) -> dict[str, Any]:
        wanted, own = await self._read_request(request, caller)
        await self._shells.open(
            own.id,
            wanted.session,
            await self._instances.sandbox(own.id),
            env=wanted.env or {},
            user=wanted.remote_user,
            sources=wanted.startup_source,
        )
        return {"output": "", "session_type": "bash"}

    async def run(self, request: Request, caller: ApiKey) -> dict[str, Any]:
        wanted, own = await self._read_request(request, caller)
        if not isinstance(wanted.command, str):
            raise PlaneInvalid("a session's command is a text")
        sandbox = await self._instances.sandbox(own.id)
        done = await self._shells.run(
            own.id, wanted.session, sandbox, wanted.command, timeout=wanted.timeout or _COMMAND_S
        )
        if done.exit_code != 0 and wanted.check == "raise":
            words = f"command failed with exit code {done.exit_code}: {done.output[-500:]}"
            raise CommandFailed(words, exit_code=done.exit_code)
        return {"output": done.output, "exit_code": done.exit_code, "session_type": "bash"}

    async def close_shell(self, request: Request, caller: ApiKey) -> dict[str, Any]:
        wanted, own = await self._read_request(request, caller)
        await self._shells.close(own.id, wanted.session, await self._instances.sandbox(own.id))
        return {"session_type": "bash"}

    async def read(self, request: Request, caller: ApiKey) -> dict[str, Any]:
        wanted, own = await self._read_request(request, caller)
        data = await (await self._instances.sandbox(own.id, "files")).read(wanted.path, max_bytes=_MAX_FILE)
        try:
            return {"content": data.decode(wanted.encoding or "utf-8", wanted.errors or "strict")}
        except (LookupError, UnicodeDecodeError) as error:
            raise PlaneInvalid(f"{wanted.path} is no such text: {error}") from error

    async def write(self, request: Request, caller: ApiKey) -> dict[str, Any]:
        wanted, own = await self._read_request(request, caller)
        await (await self._instances.sandbox(own.id, "files")).write(wanted.path, wanted.content)
        return {"success": True, "message": ""}

    async def upload(self, request: Request, caller: ApiKey) -> dict[str, Any]:
        async with request.form(max_files=1, max_part_size=_MAX_FILE) as form:
            file, target = form.get("file"), form.get("target_path")
            if not isinstance(file, UploadFile) or not isinstance(target, str):
                raise PlaneInvalid("an upload has file, target_path and sandbox_id")
            own = await self._callers.find_own(caller, str(form.get("sandbox_id", "")))
            sandbox = await self._instances.sandbox(own.id, "files")
            await sandbox.write(target, await file.read(_MAX_FILE))
            return {"success": True, "message": "", "file_name": file.filename or ""}

    async def stop(self, request: Request, caller: ApiKey) -> dict[str, Any]:
        wanted = await body(request, _In)
        try:
            own = await self._callers.find_own(caller, wanted.sandbox_id)
            await self._instances.delete(own.id)
        except PlaneNotFound:
            return {"sandbox_id": wanted.sandbox_id}  # again does no harm, as there
        return {"sandbox_id": own.id}

    async def _read_request(self, request: Request, caller: ApiKey) -> tuple[_In, Instance]:
        wanted = await body(request, _In)
        return wanted, await self._callers.find_own(caller, wanted.sandbox_id)


def _size(text: str | None) -> int | None:
    """`8g` and `512m` are Docker's, and so powers of 1024."""
    plain = (text or "").strip().upper().removesuffix("B").removesuffix("I")
    return megabytes(f"{plain}i" if plain[-1:].isalpha() else plain)


async def _refuse(request: Request, caller: ApiKey) -> Any:
    raise PlaneUnsupported("a stopped sandbox is gone here", hint="use snapshots of the plane")


def _status(instance: Instance) -> dict[str, Any]:
    resources = instance.plan.resources
    return {
        "sandbox_id": instance.id,
        "status": {},
        "state": "running" if instance.state == "running" else "pending",
        "is_alive": instance.state == "running",
        "host_name": instance.engine,
        "image": instance.plan.image,
        "user_id": instance.owner,
        "cpus": resources.cpus,
        "memory": None if resources.memory_mb is None else f"{resources.memory_mb}m",
    }
