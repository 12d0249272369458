"""`PlaneProvider`: remote task environments out of this project's own hub, for `TaskEnv`.

A task's `env_key` and `env_version` are an environment of the hub; without a version it is the newest one. Its tools are its own
server's, through the gateway. `reset` is a function of that server named `reset`, where there is one. SQLite files that
`extra["databases"]` of the environment names are opened in the instance, by a program put there. Nothing is taken for granted
that an instance cannot do: a region, another kind of image or a seed without `reset` is refused.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollyard.core.errors import (
    ConfigError,
    EnvError,
    EnvUnavailable,
    EpisodeLost,
    PlaneError,
    PlaneGone,
    PlaneNotFound,
    PlaneQuota,
    PlaneRateLimited,
    PlaneUnavailable,
    Unsupported,
)
from rollyard.envs.fleet.databases import SandboxDatabases, program_path
from rollyard.envs.fleet.provider import InstanceRequest
from rollyard.inside.verifier import archive
from rollyard.plane.client.plane import Plane

URL_VARIABLE, KEY_VARIABLE = "ROLLYARD_URL", "ROLLYARD_KEY"
_DATABASE_S = 30.0
_AGAIN = (PlaneUnavailable, PlaneQuota, PlaneRateLimited)


class PlaneProvider:
    """Address and key are arguments or `ROLLYARD_URL` and `ROLLYARD_KEY`; without them the constructor raises."""

    name = "plane"

    def __init__(self, url: str | None = None, key: str | None = None, *, ready_s: float = 45.0) -> None:
        where, secret = url or os.environ.get(URL_VARIABLE, ""), key or os.environ.get(KEY_VARIABLE, "")
        for variable, value in ((URL_VARIABLE, where), (KEY_VARIABLE, secret)):
            if not value.strip():
                raise ConfigError(
                    f"environments of a plane need {variable}", hint="`rollyard serve plane --print-env` prints it"
                )
        self._plane, self._key, self._ready_s = Plane(where, secret), secret, ready_s

    @property
    def tools_key(self) -> str | None:
        return self._key

    async def make(self, request: InstanceRequest) -> PlaneInstance:
        if request.region is not None or request.image_type not in (None, "mcp"):
            raise Unsupported("a plane has no regions, and its environments say what their images are")
        try:
            record = await self._record(request)
            made = await self._plane.instances.create(
                env=record["id"], ttl_s=request.ttl_s, run_id=request.run_id, environment=_variables(request)
            )
            instance = PlaneInstance(self._plane, made["id"], record["spec"].get("extra", {}).get("databases", {}))
            await self._ready(instance)
            return instance
        except PlaneError as error:
            raise _to_env_error(error) from error

    async def _ready(self, instance: PlaneInstance) -> None:
        try:
            await self._plane.wait_for_health(instance.id, within_s=self._ready_s)
        except BaseException:  # whatever it was, the instance will not be used
            await asyncio.shield(asyncio.ensure_future(instance.close()))
            raise

    async def _record(self, request: InstanceRequest) -> dict[str, Any]:
        if request.env_version is not None:
            return await self._plane.envs.get(request.env_key, request.env_version)
        found = [one async for one in self._plane.envs.list(search=request.env_key) if one["name"] == request.env_key]
        if not found:
            raise PlaneNotFound(f"there is no environment {request.env_key}")
        return max(found, key=lambda one: one["created_at"])

    async def aclose(self) -> None:
        await self._plane.aclose()


class PlaneInstance:
    def __init__(self, plane: Plane, instance_id: str, databases: Mapping[str, str]) -> None:
        self._plane, self.id = plane, instance_id
        self.databases = _InstanceDatabases(plane, instance_id, databases)

    @property
    def tool_urls(self) -> Sequence[str]:
        return (f"{self._plane.url}/v1/instances/{self.id}/mcp",)

    @property
    def page_url(self) -> str | None:
        return None

    async def reset(self, *, seed: int | None, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._reset(seed)
        except TimeoutError as error:
            raise EnvError(f"instance {self.id} was not reset within {timeout_s:g} s") from error
        except (PlaneGone, PlaneNotFound) as error:
            raise EpisodeLost(error.message) from error
        except PlaneError as error:
            raise _to_env_error(error) from error

    async def _reset(self, seed: int | None) -> None:
        one = self._plane.at(self.id)
        if "reset" in await one.list_functions():
            await one.call_function("reset", {} if seed is None else {"seed": seed})
        elif seed is not None:
            raise Unsupported("this environment takes no seed: its server has no function named reset")

    async def close(self) -> None:
        try:
            await self._plane.instances.delete(self.id)
        except (PlaneGone, PlaneNotFound):
            return
        except PlaneError as error:
            raise _to_env_error(error) from error


class _InstanceDatabases(SandboxDatabases):
    """Through the plane: one run of the program for each query."""

    def __init__(self, plane: Plane, instance_id: str, paths: Mapping[str, str]) -> None:
        self.paths = dict(paths)
        self._program: Any = _Runs(plane, instance_id)
        self._seconds = _DATABASE_S


class _Runs:
    def __init__(self, plane: Plane, instance_id: str) -> None:
        self._plane, self._id, self._there = plane, instance_id, False

    async def ask(self, request: bytes) -> bytes:
        try:
            if not self._there:
                await self._plane.instances.write(self._id, program_path(), archive())
                self._there = True
            command = ["python3", "-I", program_path(), "sqlite"]
            done = await self._plane.instances.exec(self._id, command, stdin=request + b"\n", timeout_s=_DATABASE_S)
        except PlaneError as error:
            raise _to_env_error(error) from error
        if done.exit_code != 0:
            raise EnvError(f"the database's program ended: {done.text[-500:]}")
        return done.stdout.split(b"\n", 1)[0]


def _variables(request: InstanceRequest) -> dict[str, str]:
    data = {"ROLLYARD_DATA_KEY": request.data_key, "ROLLYARD_DATA_VERSION": request.data_version}
    given = {name: value for name, value in {**data, **request.env_variables}.items() if value is not None}
    return {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode() for name, value in given.items()
    }


def _to_env_error(error: PlaneError) -> EnvError:
    return EnvUnavailable(str(error)) if isinstance(error, _AGAIN) else EnvError(str(error))
