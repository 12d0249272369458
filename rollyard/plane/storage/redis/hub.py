"""`RedisHub`: descriptions of environments, by name and version, in Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from rollyard.core.errors import PlaneConflict, PlaneNotFound
from rollyard.core.plane import EnvRecord, EnvSpec
from rollyard.plane.storage.redis.change import Change, Row
from rollyard.plane.storage.redis.reading import RedisRows
from rollyard.plane.storage.redis.rows import BETWEEN, env_record, env_row

_PAGE = 500


class RedisHub(RedisRows):
    async def create_env(self, record: EnvRecord) -> EnvRecord:
        key = self._keys.env(record.name, record.version)

        async def work(change: Change) -> EnvRecord:
            if await change.row(key):
                raise PlaneConflict(f"{record.id} exists", hint="update it, or choose another version")
            change.put(key, env_row(record))
            change.add(self._keys.envs, record.name + BETWEEN + record.version)
            return record

        return await self._change(work)

    async def get_env(self, name: str, version: str) -> EnvRecord:
        return _env(await self._row(self._keys.env(name, version)), name, version)

    async def update_env(self, name: str, version: str, spec: EnvSpec, *, revision: int | None, at: float) -> EnvRecord:
        return await self._change_env(name, version, revision, {"spec": spec, "updated_at": at})

    async def release_env(self, name: str, version: str, *, revision: int | None, at: float) -> EnvRecord:
        changes = {"updated_at": at, "released_at": at, "status": "released"}
        return await self._change_env(name, version, revision, changes)

    async def _change_env(self, name: str, version: str, revision: int | None, changes: Mapping[str, Any]) -> EnvRecord:
        key = self._keys.env(name, version)

        async def work(change: Change) -> EnvRecord:
            found = _env(await change.row(key), name, version)
            if found.status == "released":
                raise PlaneConflict(f"{found.id} is released and does not change", hint="create a new version")
            if revision not in (None, found.revision):
                raise PlaneConflict(
                    f"{found.id} is at revision {found.revision}, not {revision}", hint="read it again, then update"
                )
            new = replace(found, revision=found.revision + 1, **changes)
            change.put(key, env_row(new))
            return new

        return await self._change(work)

    async def delete_env(self, name: str, version: str, *, released: bool) -> None:
        key = self._keys.env(name, version)

        async def work(change: Change) -> None:
            found = _env(await change.row(key), name, version)
            if found.status == "released" and not released:
                hint = "only an admin may delete a released version"
                raise PlaneConflict(f"{found.id} is released", hint=hint)
            change.drop(key)
            change.remove(self._keys.envs, name + BETWEEN + version)

        await self._change(work)

    async def list_envs(
        self, *, words: tuple[str, ...], status: str | None, after: tuple[str, str] | None, limit: int
    ) -> list[EnvRecord]:
        wanted = [word.lower() for word in words]
        last = BETWEEN.join(after) if after else None
        found: list[EnvRecord] = []
        while len(found) < limit:
            names = await self._list_after(self._keys.envs, last, _PAGE)
            for row in await self._read_rows([self._keys.env(*name.split(BETWEEN)) for name in names]):
                if row and all(word in row["words"] for word in wanted) and status in (None, row["status"]):
                    found.append(env_record(row))
            if len(names) < _PAGE:
                break
            last = names[-1]
        return found[:limit]


def _env(row: Row, name: str, version: str) -> EnvRecord:
    if not row:
        raise PlaneNotFound(f"there is no environment {name}@{version}")
    return env_record(row)
