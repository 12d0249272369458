"""`/v1/tasks`: tasks by key, those of the server's files and those that an owner imported."""

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
from rollyard.plane.compat.fleet.verifiers import StoredVerifier, VerifierCatalog, store_verifier, verifier_json
from rollyard.plane.service.shapes import rfc3339
from rollyard.plane.service.typed_records import TypedRecords


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
    """The server's own tasks, which every owner sees. `from_files` reads the JSON that `TaskEnv` reads."""

    def __init__(self, tasks: Iterable[FleetTask] = ()) -> None:
        self.at = time.time()
        self.by_key = {task.key: task for task in tasks}

    @classmethod
    def from_files(cls, *files: Path | str) -> Tasks:
        return cls(_from_config(row) for file in files for row in _rows(Path(file)))

    def verifiers(self) -> list[StoredVerifier]:
        return [
            store_verifier(one.key, one.verifier_func, self.at) for one in self.by_key.values() if one.verifier_func
        ]


class TaskCatalog:
    """The tasks that an owner sees: its own, which are in the plane's storage, before the server's. A task's verifier code goes
    to the verifiers, where its digest finds it."""

    def __init__(self, own: Tasks, records: TypedRecords[FleetTask], verifiers: VerifierCatalog) -> None:
        self._own, self._records, self._verifiers = own, records, verifiers

    async def put(self, owner: str, task: FleetTask) -> None:
        if task.verifier_func:
            await self._verifiers.put(owner, store_verifier(task.key, task.verifier_func, time.time()))
        await self._records.update(owner, task.key, lambda _: task)

    async def get(self, owner: str, key: str) -> tuple[FleetTask, float] | None:
        kept = await self._records.get(owner, key)
        if kept is not None:
            return kept.value, kept.record.created_at
        return (self._own.by_key[key], self._own.at) if key in self._own.by_key else None

    async def list(self, owner: str) -> list[tuple[FleetTask, float]]:
        found = {key: (task, self._own.at) for key, task in self._own.by_key.items()}
        found |= {kept.value.key: (kept.value, kept.record.created_at) for kept in await self._records.list(owner)}
        return list(found.values())


class TaskRoutes:
    def __init__(self, tasks: TaskCatalog, guard: Guard) -> None:
        self._tasks, self._guard = tasks, guard

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
            _tell(task, at, owner)
            for task, at in await self._tasks.list(owner)
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
        await self._tasks.put(owner, task)
        return JSONResponse(_tell(*await self._find(owner, task.key), owner))

    async def get(self, request: Request, owner: str) -> Response:
        return JSONResponse(_tell(*await self._find(owner, request.path_params["key"]), owner))

    async def update(self, request: Request, owner: str) -> Response:
        task, _ = await self._find(owner, request.path_params["key"])
        update = await body(request, TaskUpdate)
        changes = {"prompt": update.prompt, "verifier_func": update.verifier_code, "metadata": update.metadata}
        given = {name: value for name, value in changes.items() if value is not None}
        await self._tasks.put(owner, msgspec.structs.replace(task, **given))
        return JSONResponse(_tell(*await self._find(owner, task.key), owner))

    async def _find(self, owner: str, key: str) -> tuple[FleetTask, float]:
        found = await self._tasks.get(owner, key)
        if found is None:
            raise FleetRefusal(404, f"Task '{key}' not found")
        return found


def _tell(task: FleetTask, at: float, owner: str) -> dict[str, Any]:
    answer: dict[str, Any] = {
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
        verifier = store_verifier(task.key, task.verifier_func, at)
        answer.update(verifier_id=verifier.id, verifier=verifier_json(verifier))
    return answer


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
