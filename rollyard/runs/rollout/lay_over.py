"""The parent's files over the working directory of a child that ran the parent's commands again.

What a command leaves may not repeat: a time, an order, a download. At the branch point the paths that differ from the parent's
snapshot are made the parent's, and all others are left alone.
"""

from __future__ import annotations

import os
import stat
from hashlib import blake2b
from pathlib import Path

import anyio.to_thread
import msgspec

from rollyard.core import folders
from rollyard.core.errors import SandboxError
from rollyard.core.rollout import CallSnapshot
from rollyard.core.scratch import async_scratch
from rollyard.runs.rollout.collect import MAX_WORKDIR
from rollyard.runs.rollout.context import Prepared, RolloutContext

_PART = 2**20


async def lay_over(context: RolloutContext, prepared: Prepared, start: CallSnapshot) -> list[str] | None:
    """Gives the paths below the working directory that were changed; None where it cannot be compared (it is too large), and
    nothing was."""
    sandbox, workdir = prepared.opened.sandbox, prepared.facts.workdir
    place = prepared.opened.spec
    labels = {**place.labels, "rollyard.role": "look"}
    place = msgspec.structs.replace(
        place, image=start.image, network="none", allowed_hosts=(), mounts=(), labels=labels
    )
    async with async_scratch("parent") as theirs, async_scratch("child") as own:
        try:
            async with context.backend.open(place) as parent:
                await parent.download_dir(workdir, str(theirs), max_bytes=MAX_WORKDIR)
            await sandbox.download_dir(workdir, str(own), max_bytes=MAX_WORKDIR)
        except SandboxError as error:
            await context.stages.tell("snapshot.not_laid_over", image=start.image, error=str(error))
            return None
        wanted, there = (
            await anyio.to_thread.run_sync(_describe, theirs),
            await anyio.to_thread.run_sync(_describe, own),
        )
        gone = [path for path, what in there.items() if path not in wanted or wanted[path][0] != what[0]]
        changed = [path for path, what in wanted.items() if there.get(path) != what]
        for path in gone:
            if not any(path.startswith(f"{above}/") for above in gone):
                await sandbox.remove(f"{workdir}/{path}")
        if changed:
            await anyio.to_thread.run_sync(_keep_only, theirs, frozenset(changed))
            await sandbox.upload_dir(str(theirs), workdir, user=context.task.user)
    return sorted({*gone, *changed})


def _describe(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every path below a directory: what it is, who may use it, and its content."""
    found: dict[str, tuple[int, int, bytes]] = {}
    for folder in folders.walk(root):
        above = f"{folder.path}/" if folder.names else ""
        for name in (*folder.folders, *folder.others):
            status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
            kind = stat.S_IFMT(status.st_mode)
            mode = 0 if kind == stat.S_IFLNK else stat.S_IMODE(status.st_mode)
            found[above + name] = (kind, mode, _content(name, folder.fd, kind))
    return found


def _content(name: str, at: int, kind: int) -> bytes:
    if kind == stat.S_IFLNK:
        return os.fsencode(os.readlink(name, dir_fd=at))
    if kind != stat.S_IFREG:
        return b""
    digest = blake2b()
    with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at), "rb") as file:
        while part := file.read(_PART):
            digest.update(part)
    return digest.digest()


def _keep_only(root: Path, wanted: frozenset[str]) -> None:
    """Take what is the same already out of the copy: only what differs travels."""
    for folder in folders.walk(root):
        above = f"{folder.path}/" if folder.names else ""
        for name in folder.others:
            if above + name not in wanted:
                os.unlink(name, dir_fd=folder.fd)
