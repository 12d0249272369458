"""Where an export goes: a file that appears under its name only when it is complete."""

from __future__ import annotations

import glob
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from rollyard.core.rollout import Rollout
from rollyard.trajectory.samples import RefusedBranch


class Writer(Protocol):
    """Takes rollouts one by one; what it could not prove it gives back as refusals."""

    rows: int

    def add(self, rollout: Rollout) -> Sequence[RefusedBranch]: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def partial_name(path: Path) -> Path:
    return path.with_name(f"{_partial_start(path)}{os.getpid()}.part")


def remove_dead_parts(path: Path) -> None:
    """What exports to this place that were killed on this machine left behind."""
    start = _partial_start(path)
    for part in path.parent.glob(f"{glob.escape(start)}*.part"):
        pid = part.name.removeprefix(start).removesuffix(".part")
        if not pid.isdigit() or Path(f"/proc/{pid}").exists():
            continue
        shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)


def _partial_start(path: Path) -> str:
    return f".{path.name}.{socket.gethostname()}."


class JsonLines:
    """JSON values, one per line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder()

    def __enter__(self) -> Self:
        self._file = partial_name(self._path).open("wb")
        return self

    def write(self, value: Any) -> None:
        self._file.write(self._encoder.encode(value) + b"\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None:
            partial_name(self._path).replace(self._path)
        else:
            partial_name(self._path).unlink(missing_ok=True)
