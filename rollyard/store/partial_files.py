"""Files and folders that appear under their name only when they are complete: until then they lie beside it under another."""

from __future__ import annotations

import glob
import os
import shutil
import socket
from pathlib import Path


def partial_name(path: Path) -> Path:
    return path.with_name(f"{_partial_start(path)}{os.getpid()}.part")


def remove_dead_parts(path: Path) -> None:
    """What processes of this machine that were killed while they wrote to this place left behind."""
    start = _partial_start(path)
    for part in path.parent.glob(f"{glob.escape(start)}*.part*"):  # SQLite has a file beside it
        pid = part.name.removeprefix(start).partition(".part")[0]
        if not pid.isdigit() or Path(f"/proc/{pid}").exists():
            continue
        shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)


def _partial_start(path: Path) -> str:
    return f".{path.name}.{socket.gethostname()}."
