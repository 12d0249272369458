"""Changes below a directory, found by looking: what `find` says now against what it said before.

A look sees what is there, so what came and went between two looks was never there, and many writes are one. A stream looks a few
times a second; a watcher that is asked for its events looks when it is asked.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

from rollyard.core.errors import PathError
from rollyard.core.ids import new_id
from rollyard.plane.compat.e2b.boxes import E2bSandbox
from rollyard.plane.compat.e2b.directories import look, run_script
from rollyard.plane.compat.e2b.errors import E2bRefusal

_LOOK_S = 0.2
_MOST_WATCHERS = 100
_FILES = (
    '[ -e "$1" ] || exit 2; [ -d "$1" ] || exit 20; '
    "find \"$1/\" -mindepth 1 ${2:+-maxdepth 1} -printf '%P\\0%i\\0%T@\\0%s\\0%m\\0%y\\0' || true"
)


class _Seen(NamedTuple):
    inode: str
    changed: str
    size: str
    mode: str
    kind: str


class DirectoryWatcher:
    """`user` is whose eyes it looks with; `begin` once before the first look."""

    def __init__(self, box: E2bSandbox, request: Mapping[str, Any], user: str | None) -> None:
        self._box, self._user, self._asked = box, user, request
        self._path = ""
        self._before: dict[str, _Seen] = {}

    async def begin(self) -> None:
        self._path = await self._box.accounts.path(str(self._asked.get("path") or ""), self._user)
        try:
            self._before = await self._see()
        except PathError as error:
            if error.errno_name == "ENOTDIR":
                raise E2bRefusal("invalid_argument", f"path {self._path} not a directory: not a directory") from error
            raise

    async def events(self) -> list[dict[str, Any]]:
        """What has changed since the last look."""
        try:
            now = await self._see()
        except PathError:  # the directory itself is gone
            now = {}
        before, self._before = self._before, now
        found: list[dict[str, Any]] = [
            {"name": name, "type": f"EVENT_TYPE_{kind}"} for name, kind in _changes(before, now)
        ]
        if self._asked.get("includeEntry"):
            for event in found:
                try:
                    event["entry"] = await look(self._box, posixpath.join(self._path, event["name"]), self._user)
                except PathError:
                    continue
        return found

    async def _see(self) -> dict[str, _Seen]:
        depth = "" if self._asked.get("recursive") else "1"
        raw = await run_script(self._box, self._user, _FILES, self._path, depth)
        words = [word.decode("utf-8", "surrogateescape") for word in raw.split(b"\0")[:-1]]
        return {words[at]: _Seen(*words[at + 1 : at + 6]) for at in range(0, len(words), 6)}

    async def stream(self, keepalive_s: float) -> AsyncIterator[dict[str, Any]]:
        """Until the client hangs up."""
        yield {"start": {}}
        quiet = 0.0
        while True:
            await asyncio.sleep(_LOOK_S)
            found, quiet = await self.events(), quiet + _LOOK_S
            for event in found:
                yield {"filesystem": event}
            if found or quiet >= keepalive_s:
                quiet = 0.0
            if not found and quiet == 0.0:
                yield {"keepalive": {}}


class Watchers:
    """Those of one sandbox that clients ask by their ids."""

    def __init__(self) -> None:
        self._by_id: dict[str, DirectoryWatcher] = {}

    async def create(self, box: E2bSandbox, request: Mapping[str, Any], user: str | None) -> dict[str, Any]:
        if len(self._by_id) >= _MOST_WATCHERS:
            raise E2bRefusal("resource_exhausted", f"a sandbox has at most {_MOST_WATCHERS} watchers", 429)
        watcher = DirectoryWatcher(box, request, user)
        await watcher.begin()
        name = new_id("watch")
        self._by_id[name] = watcher
        return {"watcherId": name}

    async def events(self, request: Mapping[str, Any]) -> dict[str, Any]:
        watcher = self._by_id.get(str(request.get("watcherId")))
        if watcher is None:
            raise E2bRefusal("not_found", f"watcher {request.get('watcherId')} not found")
        return {"events": await watcher.events()}

    def remove(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._by_id.pop(str(request.get("watcherId")), None) is None:
            raise E2bRefusal("not_found", f"watcher {request.get('watcherId')} not found")
        return {}


def _changes(before: Mapping[str, _Seen], now: Mapping[str, _Seen]) -> list[tuple[str, str]]:
    gone = {seen.inode: name for name, seen in before.items() if name not in now}
    found: list[tuple[str, str]] = []
    for name, seen in now.items():
        old = before.get(name)
        if old is None:
            if seen.inode in gone:
                found.append((gone.pop(seen.inode), "RENAME"))
            found.append((name, "CREATE"))
            if seen.kind == "f" and seen.size != "0":
                found.append((name, "WRITE"))
            continue
        if seen.kind == "f" and (seen.changed, seen.size, seen.inode) != (old.changed, old.size, old.inode):
            found.append((name, "WRITE"))
        if seen.mode != old.mode:
            found.append((name, "CHMOD"))
    return [*found, *((name, "REMOVE") for name in gone.values())]
