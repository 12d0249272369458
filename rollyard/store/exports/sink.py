"""Where an export goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from rollyard.core.rollout import Rollout
from rollyard.store.partial_files import partial_name
from rollyard.trajectory.samples import RefusedBranch


class Writer(Protocol):
    """Takes rollouts one by one; what it could not prove it gives back as refusals."""

    rows: int

    def add(self, rollout: Rollout) -> Sequence[RefusedBranch]: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


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
