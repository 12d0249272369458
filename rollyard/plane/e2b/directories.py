"""Directories over Connect: look, list, make, move, remove."""

from __future__ import annotations

import posixpath
import stat as modes
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from rollyard.core.errors import PathError
from rollyard.core.protocols import Sandbox
from rollyard.core.sandbox import Stat
from rollyard.plane.e2b.errors import E2bRefusal

_TYPES = {"file": "FILE_TYPE_FILE", "dir": "FILE_TYPE_DIRECTORY"}
_BITS = {"file": modes.S_IFREG, "dir": modes.S_IFDIR, "symlink": modes.S_IFLNK}
_MOVE_S = 60.0
Method = Callable[[Sandbox, Mapping[str, Any], str | None], Awaitable[dict[str, Any]]]


def _entry(found: Stat) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": posixpath.basename(found.path.rstrip("/")) or "/",
        "type": _TYPES.get(found.kind, "FILE_TYPE_UNSPECIFIED"),
        "path": found.path,
        "size": str(found.size),
        "mode": found.mode & 0o7777,
        "permissions": modes.filemode(_BITS.get(found.kind, 0) | (found.mode & 0o7777)),
        "owner": "",
        "group": "",
        "modifiedTime": datetime.fromtimestamp(found.mtime, UTC).isoformat().replace("+00:00", "Z"),
    }
    return {**entry, "symlinkTarget": found.target} if found.target is not None else entry


async def _resolved(sandbox: Sandbox, found: Stat) -> dict[str, Any]:
    """A link is shown with the type of what it leads to."""
    entry = _entry(found)
    if found.kind == "symlink" and found.target is not None:
        target = posixpath.join(posixpath.dirname(found.path), found.target)
        try:
            entry["type"] = _TYPES.get((await sandbox.stat(target)).kind, "FILE_TYPE_UNSPECIFIED")
        except PathError:
            return entry
    return entry


async def stat(sandbox: Sandbox, asked: Mapping[str, Any], user: str | None) -> dict[str, Any]:
    return {"entry": await _resolved(sandbox, await sandbox.stat(_name(asked, "path")))}


async def list_dir(sandbox: Sandbox, asked: Mapping[str, Any], user: str | None) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    level = [_name(asked, "path")]
    for _ in range(max(1, int(asked.get("depth") or 1))):
        below: list[str] = []
        for place in level:
            for found in await sandbox.list_dir(place):
                entries.append(await _resolved(sandbox, found))
                if found.kind == "dir":
                    below.append(found.path)
        level = below
    return {"entries": entries}


async def make_dir(sandbox: Sandbox, asked: Mapping[str, Any], user: str | None) -> dict[str, Any]:
    path = _name(asked, "path")
    if await sandbox.exists(path):
        raise E2bRefusal("already_exists", f"{path} exists")
    await sandbox.mkdir(path, user=user)
    return {"entry": _entry(await sandbox.stat(path))}


async def move(sandbox: Sandbox, asked: Mapping[str, Any], user: str | None) -> dict[str, Any]:
    source, target = _name(asked, "source"), _name(asked, "destination")
    await sandbox.stat(source)
    done = await sandbox.exec(["mv", "-T", "--", source, target], user=user, timeout=_MOVE_S)
    if not done.ok:
        raise E2bRefusal("invalid_argument", f"{source} could not be moved: {done.text[-200:].strip()}")
    return {"entry": _entry(await sandbox.stat(target))}


async def remove(sandbox: Sandbox, asked: Mapping[str, Any], user: str | None) -> dict[str, Any]:
    try:
        await sandbox.remove(_name(asked, "path"))
    except PathError as error:
        if error.errno_name != "ENOENT":
            raise
    return {}


def _name(asked: Mapping[str, Any], field: str) -> str:
    value = asked.get(field)
    if not isinstance(value, str) or not value:
        raise E2bRefusal("invalid_argument", f"{field} is required")
    return value


METHODS: Mapping[str, Method] = {
    "Stat": stat,
    "ListDir": list_dir,
    "MakeDir": make_dir,
    "Move": move,
    "Remove": remove,
}
