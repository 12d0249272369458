"""`/v1/tasks`: tasks by key. A task's verifier code goes on the verifiers' shelf, where its digest finds it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollyard.core.errors import ConfigError
from rollyard.plane.compat.fleet.control import body, for_owner
from rollyard.plane.compat.fleet.errors import FleetRefusal
from rollyard.plane.compat.fleet.guard import Guard
from rollyard.plane.compat.fleet.verifiers import Shelf, verifier_json
from rollyard.plane.service.shapes import rfc3339


class FleetTask(msgspec.Struct, frozen=True, kw_only=True):
    """As it is imported; `environment_id` is another name of `env_id`."""

    key: str
    prompt: str
    env_id: str = ""
    environment_id: str = ""
    version: str | None = None
    data_id: str | None = None
    data_version: str | None = None
    env_variables: dict[str, Any] | None = None
    verifier_func: str | None = None
    metadata: dict[str, Any] | None = None
    output_json_schema: dict[str, Any] | None = None

    @property
    def env(self) -> str:
        return self.env_id or self.environment_id


class TaskUpdate(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str | None = None
    verifier_code: str | None = None
    metadata: dict[str, Any] | None = None


class Tasks:
    """The tasks of one server, in memory. `from_files` reads the JSON that `TaskEnv` reads."""

    def __init__(self, tasks: Iterable[FleetTask] = ()) -> None:
        self._tasks: dict[str, tuple[FleetTask, float]] = {}
        for task in tasks:
            self.put(task)

    @classmethod
    def from_files(cls, *files: Path | str) -> Tasks:
        return cls(_from_config(row) for file in files for row in _rows(Path(file)))

    def put(self, task: FleetTask) -> FleetTask:
        self._tasks[task.key] = (task, self._tasks.get(task.key, (None, time.time()))[1])
        return task

    def get(self, key: str) -> tuple[FleetTask, float] | None:
        return self._tasks.get(key)

    def list(self) -> list[tuple[FleetTask, float]]:
        return list(self._tasks.values())


class TaskRoutes:
    def __init__(self, tasks: Tasks, shelf: Shelf, guard: Guard) -> None:
        self._tasks, self._shelf, self._guard = tasks, shelf, guard

    def routes(self) -> list[Route]:
        return [
            Route("/v1/tasks", for_owner(self._guard, self.list), methods=["GET"]),
            Route("/v1/tasks", for_owner(self._guard, self.create), methods=["POST"]),
            Route("/v1/tasks/{key}", for_owner(self._guard, self.get), methods=["GET"]),
            Route("/v1/tasks/{key}", for_owner(self._guard, self.update), methods=["PUT"]),
        ]

    async def list(self, request: Request, owner: str) -> Response:
        wanted = request.query_params
        keys = wanted.getlist("task_keys")
        found = [
            self._tell(task, at, owner)
            for task, at in self._tasks.list()
            if (not keys or task.key in keys)
            and wanted.get("env_key") in (None, task.env)
            and wanted.get("data_id") in (None, task.data_id)
            and wanted.get("data_version") in (None, task.data_version)
        ]
        return JSONResponse({"tasks": found, "total": len(found)})

    async def create(self, request: Request, owner: str) -> Response:
        task = await body(request, FleetTask)
        if not task.env:
            raise FleetRefusal(422, "a task names its environment")
        self._tasks.put(task)
        return JSONResponse(self._tell(*self._find(task.key), owner))

    async def get(self, request: Request, owner: str) -> Response:
        return JSONResponse(self._tell(*self._find(request.path_params["key"]), owner))

    async def update(self, request: Request, owner: str) -> Response:
        task, _ = self._find(request.path_params["key"])
        asked = await body(request, TaskUpdate)
        changes = {"prompt": asked.prompt, "verifier_func": asked.verifier_code, "metadata": asked.metadata}
        given = {name: value for name, value in changes.items() if value is not None}
        self._tasks.put(msgspec.structs.replace(task, **given))
        return JSONResponse(self._tell(*self._find(task.key), owner))

    def _find(self, key: str) -> tuple[FleetTask, float]:
        found = self._tasks.get(key)
        if found is None:
            raise FleetRefusal(404, f"Task '{key}' not found")
        return found

    def _tell(self, task: FleetTask, at: float, owner: str) -> dict[str, Any]:
        told: dict[str, Any] = {
            "key": task.key,
            "prompt": task.prompt,
            "team_id": owner,
            "environment_id": task.env,
            "created_at": rfc3339(at),
            "version": task.version,
            "data_id": task.data_id,
            "data_version": task.data_version,
            "env_variables": task.env_variables,
            "metadata": task.metadata,
            "output_json_schema": task.output_json_schema,
        }
        if task.verifier_func:
            verifier = self._shelf.put(task.key, task.verifier_func)
            told.update(verifier_id=verifier.id, verifier=verifier_json(verifier))
        return told


def _rows(file: Path) -> list[Mapping[str, Any]]:
    try:
        given = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read tasks from {file}: {error}") from error
    return given["tasks"] if isinstance(given, dict) else given


def _from_config(row: Mapping[str, Any]) -> FleetTask:
    return FleetTask(
        key=row["task_key"],
        prompt=row.get("prompt", ""),
        env_id=row.get("env_key", ""),
        version=row.get("env_version"),
        data_id=row.get("data_key"),
        data_version=row.get("data_version"),
        env_variables=row.get("env_variables"),
        verifier_func=row.get("verifier_code") or row.get("verifier_func"),
        metadata={"task_modality": row.get("task_modality", "tool_use")},
    )
