"""The hub: environment descriptions `name@version`, changed by compare-and-swap until they are released."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Callable

from rollyard.core.errors import PlaneInvalid, PlaneNotFound
from rollyard.core.plane import ApiKey, EnvRecord, EnvSpec
from rollyard.net.paging import each_page
from rollyard.plane.service.access import check_may_change, is_snapshot, snapshot_id
from rollyard.plane.service.cursors import read_cursor, write_cursor
from rollyard.plane.storage.protocol import PlaneStore

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_PAGE = 500


class Hub:
    def __init__(self, store: PlaneStore, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    async def create(
        self, name: str, version: str, spec: EnvSpec, *, by: ApiKey, owner: str | None = None
    ) -> EnvRecord:
        """A name belongs to the owner of its first version, so its next version comes from no other owner."""
        _check(name, version, spec)
        now = self._clock()
        record = EnvRecord(
            name=name,
            version=version,
            owner=await self._owner_of(name) or owner or by.owner,
            revision=1,
            status="draft",
            spec=spec,
            created_at=now,
            updated_at=now,
        )
        check_may_change(by, record)
        await self._give_image(spec, record.owner, by)
        return await self._store.create_env(record)

    async def _give_image(self, spec: EnvSpec, owner: str, by: ApiKey) -> None:
        """A snapshot that an admin puts into an owner's environment is that owner's, too."""
        name = snapshot_id(spec.image)
        if by.role == "admin" and (is_snapshot(name) or await self._store.owners_of("snapshot", name)):
            await self._store.add_owner("snapshot", name, owner, at=self._clock())

    async def _owner_of(self, name: str) -> str | None:
        first = await self._store.list_envs(words=(), status=None, after=(name, ""), limit=1)
        return first[0].owner if first and first[0].name == name else None

    async def get(self, name: str, version: str) -> EnvRecord:
        return await self._store.get_env(name, version)

    async def exists(self, name: str, version: str) -> bool:
        try:
            await self._store.get_env(name, version)
        except PlaneNotFound:
            return False
        return True

    async def update(self, name: str, version: str, spec: EnvSpec, *, revision: int, by: ApiKey) -> EnvRecord:
        """`revision` is the one the caller read; another change in between is a conflict, never overwritten."""
        _check(name, version, spec)
        before = await self.get(name, version)
        check_may_change(by, before)
        await self._give_image(spec, before.owner, by)
        return await self._store.update_env(name, version, spec, revision=revision, at=self._clock())

    async def release(self, name: str, version: str, *, revision: int | None = None, by: ApiKey) -> EnvRecord:
        """From here on it never changes."""
        check_may_change(by, await self.get(name, version))
        return await self._store.release_env(name, version, revision=revision, at=self._clock())

    async def delete(self, name: str, version: str, *, by: ApiKey) -> None:
        """A draft by its owner; a released one by an admin alone."""
        check_may_change(by, await self.get(name, version))
        await self._store.delete_env(name, version, released=by.role == "admin")

    async def page(
        self, *, search: str = "", status: str | None = None, cursor: str | None = None, limit: int = 50
    ) -> tuple[list[EnvRecord], str | None]:
        """In the order of names; with the cursor to go on from, None at the end."""
        if not 1 <= limit <= MAX_PAGE:
            raise PlaneInvalid(f"limit must be between 1 and {MAX_PAGE}")
        if status not in (None, "draft", "released"):
            raise PlaneInvalid("status must be draft or released")
        after = read_cursor(cursor, 2)
        found = await self._store.list_envs(
            words=tuple(search.split()), status=status, after=(after[0], after[1]) if after else None, limit=limit + 1
        )
        more = len(found) > limit
        found = found[:limit]
        return found, write_cursor(found[-1].name, found[-1].version) if more else None

    def all(self) -> AsyncGenerator[EnvRecord]:
        return each_page(lambda cursor: self.page(cursor=cursor, limit=MAX_PAGE))


def _check(name: str, version: str, spec: EnvSpec) -> None:
    for what, text in (("name", name), ("version", version)):
        if not _NAME.fullmatch(text):
            raise PlaneInvalid(f"{what} {text!r} is not 1 to 100 letters, digits, dots, dashes and underscores")
    for artifact, digest in spec.artifacts.items():
        if not _SHA256.fullmatch(digest):
            raise PlaneInvalid(f"artifact {artifact!r} is not named by a sha256")
