"""Which files a sandbox wrote, read from its upper directories on the host: no program inside can hide one, and the time is that
of the inode's last change, which none can set."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from rollyard.core import folders

_NOT_KEPT = ("tmp", "var/tmp", "dev", "proc", "sys", "run")  # nothing there outlives the sandbox or is loaded by others
MOST = 4_000


def list_writes(uppers: Mapping[str, Path], since: float) -> tuple[str, ...]:
    """Paths as they are inside; of more than `MOST` those nearest to the root. Removed ones are among them."""
    found = {path for target, upper in uppers.items() for path in _writes(target.strip("/"), upper, since)}
    return tuple(sorted(found, key=lambda path: (path.count("/"), path))[:MOST])


def _writes(target: str, upper: Path, since: float) -> Iterator[str]:
    if not upper.is_dir():
        return
    for folder in folders.walk(upper, on_error=lambda _: None):
        place = "/".join([*([target] if target else []), *folder.names])
        if place in _NOT_KEPT or folder.names[-1:] == ["__pycache__"]:
            folder.folders.clear()
            continue
        for name in folder.others:
            try:
                status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if status.st_ctime >= since and not stat.S_ISSOCK(status.st_mode):
                shown = os.fsencode(f"{place}/{name}" if place else name).decode("utf-8", "backslashreplace")
                yield f"/{shown}"
