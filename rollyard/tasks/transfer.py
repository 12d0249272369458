"""Taking an agent's files from its sandbox to a judge's, through the host, without taking its tricks along.

Only regular files, directories and links travel. Device nodes, sockets and pipes are left behind; set-user-id bits are cleared.
Links travel as links and are never followed on the host, so no link can make the host hand over a file of its own. What cannot
be taken along is the agent's own doing: a note, never an error.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import anyio.to_thread
import msgspec

from rollyard.core import folders
from rollyard.core.errors import PathError
from rollyard.core.protocols import Sandbox
from rollyard.core.task import Artifact

MAX_BYTES = 2**30
_OFFERED = "/logs/artifacts"  # taken where an agent made it; no task asked for it


class TakenPath(msgspec.Struct, frozen=True, kw_only=True):
    """One path on its way: `host` is its copy."""

    path: str
    host: Path
    folder: bool


class TakenArtifacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was taken, and what was not and why."""

    items: tuple[TakenPath, ...] = ()
    notes: tuple[str, ...] = ()


def choose_artifacts(workdir: str | None, artifacts: Sequence[Artifact], base: str) -> list[Artifact]:
    """The working directory first, then artifacts that it does not already hold; relative ones are below `base`."""
    found = [Artifact(source=workdir)] if workdir is not None else []
    for artifact in (*artifacts, Artifact(source=_OFFERED)):
        source = artifact.source if artifact.source.startswith("/") else f"{base.rstrip('/')}/{artifact.source}"
        inside = workdir is not None and f"{source}/".startswith(f"{workdir.rstrip('/')}/")
        if not inside and artifact.service in (None, "main"):
            found.append(msgspec.structs.replace(artifact, source=source.rstrip("/")))
    return found


async def take(
    sandbox: Sandbox, artifacts: Sequence[Artifact], scratch: Path, *, max_bytes: int = MAX_BYTES
) -> TakenArtifacts:
    items: list[TakenPath] = []
    notes: list[str] = []
    for number, artifact in enumerate(artifacts):
        path, host = artifact.source, scratch / str(number)
        try:
            kind = (await sandbox.stat(path)).kind
            if kind == "dir":
                if left_out := await sandbox.download_dir(path, str(host), max_bytes=max_bytes):
                    notes.append(f"{path}: {describe_left_out(left_out)}")
                await anyio.to_thread.run_sync(_remove_untransferable, host, artifact.exclude)
                items.append(TakenPath(path=path, host=host, folder=True))
            elif kind == "file":
                data = await sandbox.read(path, max_bytes=max_bytes)
                host.write_bytes(data)
                host.chmod((await sandbox.stat(path)).mode & 0o777)
                items.append(TakenPath(path=path, host=host, folder=False))
            else:
                notes.append(f"{path} was left behind: it is a {kind}")
        except PathError as error:
            if path != _OFFERED or error.errno_name != "ENOENT":
                notes.append(f"{path} was left behind: {error}")
    return TakenArtifacts(items=tuple(items), notes=tuple(notes))


def describe_left_out(entries: int) -> str:
    return f"entries left out that lie deeper than a path can name: {entries}"


def _remove_untransferable(root: Path, exclude: Sequence[str]) -> None:
    """Remove from a downloaded tree what must not travel, going by directory descriptors: it may be of any shape."""
    for folder in folders.walk(root):
        prefix = f"{folder.path}/" if folder.names else ""
        for name in folder.folders[:]:
            if _excludes(prefix, name, exclude):
                folder.folders.remove(name)
                folders.remove(root / f"{prefix}{name}")
            else:
                mode = os.stat(name, dir_fd=folder.fd, follow_symlinks=False).st_mode
                os.chmod(name, mode & 0o777, dir_fd=folder.fd)
        for name in folder.others:
            mode = os.stat(name, dir_fd=folder.fd, follow_symlinks=False).st_mode
            if _excludes(prefix, name, exclude) or not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                os.unlink(name, dir_fd=folder.fd)
            elif stat.S_ISREG(mode) and mode & 0o7000:
                os.chmod(name, mode & 0o777, dir_fd=folder.fd)


def _excludes(prefix: str, name: str, exclude: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(prefix + name, p) or fnmatch.fnmatchcase(name, p) for p in exclude)


async def put(load: TakenArtifacts, sandbox: Sandbox, *, user: str | None) -> None:
    """Each path replaces what the judge's image has there: a file the agent deleted must not come back."""
    for item in load.items:
        if await _exists(sandbox, item.path):
            await sandbox.remove(item.path)
        if item.folder:
            await sandbox.mkdir(item.path, user=user)
            await sandbox.upload_dir(str(item.host), item.path, user=user)
        else:
            await sandbox.write(item.path, item.host.read_bytes(), mode=item.host.stat().st_mode & 0o777, user=user)


async def _exists(sandbox: Sandbox, path: str) -> bool:
    try:
        await sandbox.stat(path)
    except PathError:
        return False
    return True
