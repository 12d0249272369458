"""Taking an agent's files from its sandbox to a judge's, through the host, without taking its tricks along.

Only regular files, directories and links travel. Device nodes, sockets and pipes are left behind; set-user-id bits are cleared.
Links are recreated inside the judge's sandbox and are never followed on the host, so no link can make the host hand over a
file of its own.
"""

from __future__ import annotations

import fnmatch
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path

import anyio.to_thread
import msgspec

from rollyard.core import folders
from rollyard.core.errors import CommandFailed, PathError
from rollyard.core.protocols import Sandbox
from rollyard.core.task import Artifact

MAX_BYTES = 2**30
_LINKS_S = 60.0


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """One path on its way: `host` is its copy, `links` the links that were in it (path, target)."""

    path: str
    host: Path
    folder: bool
    links: tuple[tuple[str, str], ...] = ()


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What was taken, and what was not and why."""

    items: tuple[Carried, ...] = ()
    notes: tuple[str, ...] = ()


def choose_artifacts(workdir: str | None, artifacts: Sequence[Artifact], base: str) -> list[Artifact]:
    """The working directory first, then artifacts that it does not already hold; relative ones are below `base`."""
    found = [Artifact(source=workdir)] if workdir is not None else []
    for artifact in (*artifacts, Artifact(source="/logs/artifacts")):
        source = artifact.source if artifact.source.startswith("/") else f"{base.rstrip('/')}/{artifact.source}"
        inside = workdir is not None and f"{source}/".startswith(f"{workdir.rstrip('/')}/")
        if not inside and artifact.service in (None, "main"):
            found.append(msgspec.structs.replace(artifact, source=source.rstrip("/")))
    return found


async def take(sandbox: Sandbox, artifacts: Sequence[Artifact], scratch: Path, *, max_bytes: int = MAX_BYTES) -> Load:
    items: list[Carried] = []
    notes: list[str] = []
    for number, artifact in enumerate(artifacts):
        path, host = artifact.source, scratch / str(number)
        try:
            kind = (await sandbox.stat(path)).kind
            if kind == "dir":
                await sandbox.download_dir(path, str(host), max_bytes=max_bytes)
                links = await anyio.to_thread.run_sync(_wash, host, artifact.exclude, path)
                items.append(Carried(path=path, host=host, folder=True, links=links))
            elif kind == "file":
                data = await sandbox.read(path, max_bytes=max_bytes)
                host.write_bytes(data)
                host.chmod((await sandbox.stat(path)).mode & 0o777)
                items.append(Carried(path=path, host=host, folder=False))
            else:
                notes.append(f"{path} was left behind: it is a {kind}")
        except PathError as error:
            notes.append(f"{path} was left behind: {error}")
    return Load(items=tuple(items), notes=tuple(notes))


def _wash(root: Path, exclude: Sequence[str], path: str) -> tuple[tuple[str, str], ...]:
    """Remove from a downloaded tree what must not travel; links are taken out and returned."""
    links: list[tuple[str, str]] = []
    for relative in reversed(list(folders.entries(root))):
        item = root / relative
        status = item.lstat()
        if any(fnmatch.fnmatchcase(relative, p) or fnmatch.fnmatchcase(item.name, p) for p in exclude):
            folders.remove(item)
        elif stat.S_ISLNK(status.st_mode):
            links.append((f"{path.rstrip('/')}/{relative}", str(item.readlink())))
            item.unlink()
        elif stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode):
            item.chmod(status.st_mode & 0o777)
        else:
            item.unlink()
    return tuple(sorted(links))


async def put(load: Load, sandbox: Sandbox, *, user: str | None) -> None:
    """Each path replaces what the judge's image has there: a file the agent deleted must not come back."""
    for item in load.items:
        if await _there(sandbox, item.path):
            await sandbox.remove(item.path)
        if item.folder:
            await sandbox.mkdir(item.path, user=user)
            await sandbox.upload_dir(str(item.host), item.path, user=user)
        else:
            await sandbox.write(item.path, item.host.read_bytes(), mode=item.host.stat().st_mode & 0o777, user=user)
    links = [link for item in load.items for link in item.links]
    if links:
        await _link(sandbox, links, user)


async def _there(sandbox: Sandbox, path: str) -> bool:
    try:
        await sandbox.stat(path)
    except PathError:
        return False
    return True


async def _link(sandbox: Sandbox, links: Sequence[tuple[str, str]], user: str | None) -> None:
    script = "".join(f"ln -s -- {shlex.quote(target)} {shlex.quote(path)}\n" for path, target in links)
    done = await sandbox.exec(["/bin/sh", "-es"], stdin=script.encode(), user=user, cwd="/", timeout=_LINKS_S)
    if not done.ok:
        raise CommandFailed(
            f"links could not be recreated for the judge: {done.text.strip()[-400:]}", exit_code=done.exit_code
        )
