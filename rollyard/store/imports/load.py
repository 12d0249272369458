"""`rollyard import`: which reader a path needs, and a run that holds what it found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from rollyard.core.errors import ConfigError, UnknownName
from rollyard.core.near_path import near_path
from rollyard.store.imports.atif import read_atif, read_harbor_job
from rollyard.store.imports.foreign import ForeignRollout, keep_all
from rollyard.store.imports.inspect_log import read_inspect_log
from rollyard.store.store import Store

ImportFormat = Literal["inspect", "atif", "harbor"]
_READERS = {"inspect": read_inspect_log, "atif": read_atif, "harbor": read_harbor_job}
_BY_SUFFIX: dict[str, ImportFormat] = {".eval": "inspect", ".json": "atif", ".jsonl": "atif"}


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    format: str
    rollouts: int
    scored: int


async def import_run(where: str, path: str, format: str | None, name: str) -> Imported:
    """All of it is read before anything is written: a file that cannot be read leaves no half of a run."""
    source = Path(path)
    if not source.exists():
        raise ConfigError(f"no such file or folder: {path}", hint=near_path(path))
    chosen = format or ("harbor" if source.is_dir() else _BY_SUFFIX.get(source.suffix))
    if chosen not in _READERS:
        raise UnknownName("import format", str(chosen or source.suffix), list(_READERS))
    found = list(_read(chosen, source))
    if not found:
        raise ConfigError(f"{path} holds no rollout", hint="a job folder has trials with a result.json each")
    agents, models = (sorted({getattr(one, field) for one in found}) for field in ("agent", "model"))
    config = {
        "name": name or source.stem,
        "tasks": str(source.absolute()),
        "agents": agents,
        "policies": {model: f"imported:{model}" for model in models},
    }
    async with Store.open(where) as store:
        run_id = await store.create_run(config)
        count = await keep_all(store, run_id, found, chosen)
    scored = sum(one.verdict is not None for one in found)
    return Imported(run_id=run_id, format=chosen, rollouts=count, scored=scored)


def _read(format: str, source: Path) -> Iterator[ForeignRollout]:
    try:
        yield from _READERS[format](source)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{source} is not as {format} writes it: {type(error).__name__}: {error}") from error
