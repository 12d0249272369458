"""Directories over Connect: look, list, make, move, remove. What is known of a file is asked of `find` inside, in one call."""

from __future__ import annotations

import posixpath
import stat as modes
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from rollyard.core.errors import PathError
from rollyard.plane.compat.e2b.boxes import E2bSandbox
from rollyard.plane.compat.e2b.errors import E2bRefusal
from rollyard.plane.compat.e2b.file_metadata import GET, SOURCE, split_metadata

_TYPES = {"f": "FILE_TYPE_FILE", "d": "FILE_TYPE_DIRECTORY", "l": "FILE_TYPE_SYMLINK"}
_BITS = {"f": modes.S_IFREG, "d": modes.S_IFDIR, "l": modes.S_IFLNK}
_FORMAT = r"%p\0%y\0%Y\0%s\0%m\0%T@\0%u\0%g\0%l\0"
_STAT = f'[ -e "$1" ] || [ -L "$1" ] || exit 2; find "$1" -maxdepth 0 -printf \'{_FORMAT}\''
_LIST = (
    '[ -e "$1" ] || exit 2; [ -d "$1" ] || exit 20; [ -r "$1" ] || exit 13; '
    f'find "$1/" -mindepth 1 -maxdepth "$2" -printf \'{_FORMAT}\''
)
_MOVE = '[ -e "$1" ] || [ -L "$1" ] || exit 2; mkdir -p -- "$(dirname "$2")" && mv -T -- "$1" "$2"'
_CODES = {2: "ENOENT", 13: "EACCES", 20: "ENOTDIR"}
_STEP_S = 60.0
_MOST = 64 * 2**20
_DEEPEST = 1000
Method = Callable[[E2bSandbox, Mapping[str, Any], str | None], Awaitable[dict[str, Any]]]


async def stat(box: E2bSandbox, request: Mapping[str, Any], user: str | None) -> dict[str, Any]:
    return {"entry": await look(box, await _path(box, request, "path", user), user)}


async def look(box: E2bSandbox, path: str, user: str | None) -> dict[str, Any]:
    """One entry, as clients know it."""
    (entry,) = _entries(box, await run_script(box, user, _STAT + GET, path, "0", SOURCE))
    return entry


async def list_dir(box: E2bSandbox, request: Mapping[str, Any], user: str | None) -> dict[str, Any]:
    depth = int(request.get("depth") or 1)
    if not 1 <= depth <= _DEEPEST:
        raise E2bRefusal("invalid_argument", "depth should be at least one")
    place = await _path(box, request, "path", user)
    found = _entries(box, await run_script(box, user, _LIST + GET, place, str(depth), SOURCE))
    return {"entries": sorted(found, key=lambda entry: entry["path"])}


async def make_dir(box: E2bSandbox, request: Mapping[str, Any], user: str | None) -> dict[str, Any]:
    path = await _path(box, request, "path", user)
    if await box.sandbox.exists(path):
        raise E2bRefusal("already_exists", f"{path} exists")
    await box.sandbox.mkdir(path, user=box.accounts.as_user(user))
    return {"entry": await look(box, path, user)}


async def move(box: E2bSandbox, request: Mapping[str, Any], user: str | None) -> dict[str, Any]:
    source, target = await _path(box, request, "source", user), await _path(box, request, "destination", user)
    await run_script(box, user, _MOVE, source, target)
    return {"entry": await look(box, target, user)}


async def remove(box: E2bSandbox, request: Mapping[str, Any], user: str | None) -> dict[str, Any]:
    try:
        await box.sandbox.remove(await _path(box, request, "path", user))
    except PathError as error:
        if error.errno_name != "ENOENT":
            raise
    return {}


async def run_script(box: E2bSandbox, user: str | None, script: str, path: str, *args: str) -> bytes:
    """What a script about `path` says, as this user."""
    words = ["/bin/sh", "-c", script, "rollyard", path, *args]
    done = await box.sandbox.exec(words, cwd="/", user=box.accounts.as_user(user), timeout=_STEP_S, max_output=_MOST)
    if done.exit_code in _CODES:
        raise PathError(path, _CODES[done.exit_code])
    if not done.ok or done.truncated:
        raise E2bRefusal("invalid_argument", f"{path}: {done.text[-200:].strip()}")
    return done.stdout


def _entries(box: E2bSandbox, raw: bytes) -> list[dict[str, Any]]:
    lines, metadata = split_metadata(box, raw)
    words = [word.decode("utf-8", "surrogateescape") for word in lines.split(b"\0")[:-1]]
    found = [_entry(words[at : at + 9]) for at in range(0, len(words), 9)]
    return [{**one, "metadata": metadata[one["path"]]} if one["path"] in metadata else one for one in found]


def _entry(words: list[str]) -> dict[str, Any]:
    """A link has the type of what it leads to, and the place where that is."""
    path, kind, leads_to, size, mode, when, owner, group, target = words
    path = posixpath.normpath(path)
    entry: dict[str, Any] = {
        "name": posixpath.basename(path) or "/",
        "type": _TYPES.get(leads_to if kind == "l" else kind, "FILE_TYPE_UNSPECIFIED"),
        "path": path,
        "size": size,
        "mode": int(mode, 8),
        "permissions": modes.filemode(_BITS.get(kind, 0) | int(mode, 8)),
        "owner": owner,
        "group": group,
        "modifiedTime": datetime.fromtimestamp(float(when), UTC).isoformat().replace("+00:00", "Z"),
    }
    if kind == "l":
        entry["symlinkTarget"] = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return entry


async def _path(box: E2bSandbox, request: Mapping[str, Any], field: str, user: str | None) -> str:
    value = request.get(field)
    if not isinstance(value, str) or not value:
        raise E2bRefusal("invalid_argument", f"{field} is required")
    return await box.accounts.path(value, user)


METHODS: Mapping[str, Method] = {
    "Stat": stat,
    "ListDir": list_dir,
    "MakeDir": make_dir,
    "Move": move,
    "Remove": remove,
}
