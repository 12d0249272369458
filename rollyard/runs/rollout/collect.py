"""After the agent: what it changed and what it left, taken out of the sandbox before judging can touch it.

The working directory is copied out once, as a tar with bounds. The patch comes from comparing that copy with one made before the
agent started; `rescore` judges the same copy again later. A directory over the bound is not kept, and the patch then says so.
"""

from __future__ import annotations

import difflib
import fnmatch
import io
import os
import stat
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio.to_thread
import msgspec

from rollyard.core import folders
from rollyard.core.errors import PathError, SandboxError, Unsupported
from rollyard.core.protocols import ListsWrites, Sandbox
from rollyard.core.scratch import async_scratch
from rollyard.tasks.transfer import describe_left_out

MAX_DIFF = 2 * 2**20
MAX_FILE = 16 * 2**20
MAX_WORKDIR = 64 * 2**20
_TEXT = 256 * 1024  # a larger file is compared, not shown
_SKIP_DIRS = frozenset({".git", "node_modules", "__pycache__", ".venv", "venv"})


class DirectoryCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A directory as it was. `files` maps paths below it to contents, without what a patch never shows (`.git`, caches);
    `tar` is all of it, None when it was not asked for, was too large or could not be read; `why` says which of the last two.
    `left_out` is how much of it lies deeper than a path can name."""

    files: Mapping[str, bytes] = {}
    tar: bytes | None = None
    why: str | None = None
    left_out: int = 0


async def copy_out(sandbox: Sandbox, path: str, *, pack: bool = True) -> DirectoryCopy:
    """`pack=False` leaves the tar out: a directory that is only compared with needs none."""
    async with async_scratch("copy") as folder:
        try:
            left_out = await sandbox.download_dir(path, str(folder), max_bytes=MAX_WORKDIR)
        except SandboxError as error:
            return DirectoryCopy(why=f"the working directory was not copied: {error}")
        copy = await anyio.to_thread.run_sync(_pack if pack else _read, folder)
        return msgspec.structs.replace(copy, left_out=left_out)


def _read(root: Path) -> DirectoryCopy:
    files: dict[str, bytes] = {}
    for folder in folders.walk(root):
        folder.folders[:] = [name for name in folder.folders if name not in _SKIP_DIRS]
        for name in folder.others:
            if stat.S_ISREG(os.stat(name, dir_fd=folder.fd, follow_symlinks=False).st_mode):
                files[f"{folder.path}/{name}" if folder.names else name] = _content(name, folder.fd)
    return DirectoryCopy(files=files)


def _pack(root: Path) -> DirectoryCopy:
    """Read the tree by directory descriptors: an agent made it, of any depth and size."""
    files: dict[str, bytes] = {}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        for folder in folders.walk(root):
            prefix = f"{folder.path}/" if folder.names else ""
            shown = _SKIP_DIRS.isdisjoint(folder.names)
            archive.addfile(_member(f"./{folder.path}" if folder.names else ".", os.fstat(folder.fd)))
            for name in folder.others:
                status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
                member = _member(f"./{prefix}{name}", status)
                if stat.S_ISLNK(status.st_mode):
                    member.linkname = os.readlink(name, dir_fd=folder.fd)
                    archive.addfile(member)
                elif stat.S_ISREG(status.st_mode):
                    data = _content(name, folder.fd)
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
                    if shown:
                        files[prefix + name] = data
    return DirectoryCopy(files=files, tar=packed.getvalue())


def _member(name: str, status: os.stat_result) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
    member.uid, member.gid = status.st_uid, status.st_gid
    if stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        member.type = tarfile.SYMTYPE
    return member


def _content(name: str, at: int) -> bytes:
    with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at), "rb") as file:
        return file.read()


def unpack(tar: bytes, target: Path) -> None:
    """A kept copy back into a directory of the host; links that lead outside it are left out."""
    with tarfile.open(fileobj=io.BytesIO(tar), mode="r:gz") as archive:
        archive.extractall(target, filter=_keep_inside)  # noqa: S202 - the filter refuses what leads outside


def _keep_inside(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    try:
        return tarfile.data_filter(member, path)
    except tarfile.FilterError:
        return None


def patch(before: DirectoryCopy, after: DirectoryCopy) -> str:
    if before.why or after.why:
        return f"[no patch: {before.why or after.why}]\n"
    patches: dict[str, str] = {}
    for name in sorted(set(before.files) | set(after.files)):
        old, new = before.files.get(name), after.files.get(name)
        if old != new:
            patches[name] = "".join(_file_patch(_show(name), old, new))
    named = {name: _name_only("Large", _show(name), before.files.get(name), after.files.get(name)) for name in patches}
    left = MAX_DIFF
    for name in sorted(patches, key=lambda name: len(patches[name])):  # no large file takes the place of others
        if len(patches[name]) > left:
            patches[name] = named[name] if len(named[name]) <= left else ""
        left -= len(patches[name])
    text = "".join(patches.values())
    return text if not after.left_out else f"{text}[{describe_left_out(after.left_out)}]\n"


def _name_only(kind: str, name: str, old: bytes | None, new: bytes | None) -> str:
    return f"{kind} file {name} {'is new' if old is None else 'is gone' if new is None else 'differs'}\n"


def _show(name: str) -> str:
    """A file's name as text that can be kept: bytes that are no UTF-8 are written out."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _file_patch(name: str, old: bytes | None, new: bytes | None) -> list[str]:
    if len(old or b"") > _TEXT or len(new or b"") > _TEXT:
        return [_name_only("Large", name, old, new)]
    try:
        left = (old or b"").decode().splitlines(keepends=True)
        right = (new or b"").decode().splitlines(keepends=True)
    except UnicodeDecodeError:
        return [_name_only("Binary", name, old, new)]
    source = f"a/{name}" if old is not None else "/dev/null"
    target = f"b/{name}" if new is not None else "/dev/null"
    lines = difflib.unified_diff(left, right, source, target)
    return [line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines]


async def list_writes(sandbox: Sandbox, workdir: str, since: float) -> tuple[str, ...] | None:
    """What the agent wrote and a patch does not show, where the sandbox's host can tell."""
    if not isinstance(sandbox, ListsWrites):
        return None
    try:
        written = await sandbox.list_writes(since)
    except (SandboxError, Unsupported):
        return None
    inside = workdir.rstrip("/") + "/"
    return tuple(
        path
        for path in written
        if (not path.startswith(inside) or not _SKIP_DIRS.isdisjoint(path.split("/"))) and "/.git/objects/" not in path
    )


async def artifacts(sandbox: Sandbox, patterns: Sequence[str], *, limit: int = 200) -> dict[str, bytes]:
    """Files that match globs with absolute paths. A pattern that matches nothing is not an error."""
    found: dict[str, bytes] = {}
    for pattern in patterns:
        try:
            if "*" not in pattern and (await sandbox.stat(pattern)).kind == "file":
                found[_show(pattern)] = await sandbox.read(pattern, max_bytes=MAX_FILE)
                continue
            wanted = pattern if "*" in pattern else pattern.rstrip("/") + "/*"
            names = await _walk(sandbox, wanted.split("*", 1)[0].rsplit("/", 1)[0] or "/", limit=limit)
        except SandboxError:
            continue
        for path, size in names.items():
            if fnmatch.fnmatchcase(path, wanted) and size <= MAX_FILE and len(found) < limit:
                with suppress(PathError):  # it cannot be read, or is gone
                    found[_show(path)] = await sandbox.read(path, max_bytes=MAX_FILE)
    return found


async def _walk(sandbox: Sandbox, root: str, *, limit: int) -> dict[str, int]:
    """Regular files below `root` with their sizes; symbolic links are not followed."""
    found: dict[str, int] = {}
    queue = [root]
    while queue and len(found) < limit:
        try:
            entries = await sandbox.list_dir(queue.pop())
        except PathError:
            continue
        for entry in entries:
            if entry.kind == "dir" and entry.path.rsplit("/", 1)[-1] not in _SKIP_DIRS:
                queue.append(entry.path)
            elif entry.kind == "file" and len(found) < limit:
                found[entry.path] = entry.size
    return found
