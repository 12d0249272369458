"""A `Taskset`: tasks in order, each with its own id, and `load`, which understands every form they come in.

| given | read as |
|---|---|
| a folder with `task.toml` | one Harbor task |
| a folder with `dataset.toml`, or that file | the pinned tasks, digests checked |
| a folder of task folders | all of them |
| `registry.json`, `registry.json#name@version` | one dataset of it |
| `tasks.json#fleet` | tasks of remote environments, as Fleet's tools write them |
| `rows.jsonl` | one task per line |
| `name`, `name@version` | a dataset of this machine's registry (`dataset_registry.py`) |
| `file.py`, `file.py:attr`, `module:attr`, a registered name | Python |
"""

from __future__ import annotations

import fnmatch
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, overload

import msgspec

from rollyard.core import registry
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.core.near_path import near_path
from rollyard.core.printable import printable
from rollyard.core.task import Task
from rollyard.tasks.dataset_registry import (
    FOLDERS,
    DatasetEntry,
    find_dataset,
    open_dataset,
    open_source,
    read_registry,
    task_folders_of,
)
from rollyard.tasks.datasets import from_dataset, from_registry, task_folders
from rollyard.tasks.harbor.index import FolderIndex
from rollyard.tasks.harbor.load import is_task, load_folder
from rollyard.tasks.harbor.write import to_folder
from rollyard.tasks.packed_tasks import FEWEST, choose_tasks, pack_tasks
from rollyard.tasks.rows import as_task, from_fleet, from_jsonl, from_python, rows_of
from rollyard.tasks.trust import HINT, is_trusted, load_remembered, mark_untrusted

FLEET = "fleet"  # what a file of Fleet's tasks is marked with, as PATH#fleet


class SkippedTask(NamedTuple):
    """A folder that is no task, and why."""

    folder: str
    reason: str


class Taskset(Sequence[Task]):
    """Immutable. Ids are unique: an attempt is found by its task's id. `skipped` are the folders of a folder of tasks that
    could not be read."""

    def __init__(self, tasks: Iterable[Any], *, name: str = "tasks") -> None:
        self.name = name
        self.skipped: tuple[SkippedTask, ...] = ()
        self._positions: dict[str, int] = {}
        self._tasks = pack_tasks(self._number(tasks))

    def _number(self, tasks: Iterable[Any]) -> Iterator[Task]:
        for number, value in enumerate(tasks):
            task = as_task(value, where=f"{self.name}[{number}]")
            if task.id in self._positions:
                where = task.source or self.name
                raise ConfigError(f"{where}: two tasks are named {task.id!r}", hint="give each its own id")
            self._positions[task.id] = number
            yield task

    def _choose(self, positions: Iterable[int]) -> Taskset:
        """Those at these positions, in this order."""
        order, ids, chosen = tuple(positions), tuple(self._positions), Taskset((), name=self.name)
        chosen._tasks = choose_tasks(self._tasks, order)
        chosen._positions = {ids[position]: number for number, position in enumerate(order)}
        return chosen

    @classmethod
    def load(
        cls,
        source: Any,
        *,
        trust_tasks: bool = False,
        strict: bool = False,
        limit: int | None = None,
        cache: str | Path | None = None,
    ) -> Taskset:
        """Tasks from a path, a name, or any iterable of tasks, mappings and strings. Those from files that are not below the
        working directory are untrusted (`trust.py`) unless `trust_tasks` says otherwise. A folder of tasks is loaded without
        those that cannot be read, which `skipped` names; with `strict` the first of them is an error."""
        if isinstance(source, Taskset):
            return source if limit is None else source.limit(limit)
        if not isinstance(source, (str, Path)):
            return cls(islice(rows_of(source, "tasks"), limit))
        text = str(source)
        skipped: list[SkippedTask] | None = None if strict else []
        found = _open(text, cache=Path(cache) if cache is not None else None, trust=trust_tasks, skipped=skipped)
        loaded = cls(islice(found, limit), name=text.rstrip("/").rpartition("/")[2] or text)
        loaded.skipped = tuple(skipped or ())
        if loaded.skipped and not loaded:
            raise ConfigError(f"none of {len(loaded.skipped)} tasks can be read; the first: {loaded.skipped[0].reason}")
        return loaded

    @property
    def digest(self) -> str:
        """The identity of the set: its tasks' digests and ids, in order."""
        text = "".join(f"{task.id}\0{task.digest}\n" for task in self._tasks)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    @overload
    def __getitem__(self, index: int | str) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Taskset: ...
    def __getitem__(self, index: int | str | slice) -> Task | Taskset:
        """By position, or by id."""
        if isinstance(index, slice):
            return self._choose(range(len(self))[index])
        if isinstance(index, int):
            return self._tasks[index]
        if index not in self._positions:
            raise UnknownName("task", index, list(self._positions))
        return self._tasks[self._positions[index]]

    def __repr__(self) -> str:
        return f"Taskset({self.name!r}, {len(self)} tasks)"

    def filter(self, wanted: str | Callable[[Task], bool]) -> Taskset:
        """Tasks whose id matches a shell pattern, or for which a function says yes."""
        if isinstance(wanted, str):
            return self._choose(at for name, at in self._positions.items() if fnmatch.fnmatchcase(name, wanted))
        return self._choose(at for at, task in enumerate(self._tasks) if wanted(task))

    def limit(self, count: int) -> Taskset:
        return self[:count]

    def shuffle(self, seed: int) -> Taskset:
        """The same seed gives the same order, on any machine."""
        order = sorted(self._positions)
        random.Random(seed).shuffle(order)
        return self._choose(self._positions[name] for name in order)

    def to_folder(self, folder: str | Path) -> Path:
        """Every task as a Harbor folder below `folder`."""
        root = Path(folder)
        for task in self._tasks:
            if not {"", ".", ".."}.isdisjoint(task.id.split("/")):
                raise ConfigError(f"{task.id!r} names no folder below {root}", hint="give the task another id")
            to_folder(task, root / task.id)
        return root


def _open(text: str, *, cache: Path | None, trust: bool, skipped: list[SkippedTask] | None) -> Iterator[Task]:
    name, _, fragment = text.partition("#")
    path = Path(name).expanduser()
    if path.is_dir():
        return _judge_folders(_folder(path, cache, skipped), trust)
    if path.is_file():
        if path.name == "dataset.toml":
            return _judge_folders(from_dataset(path), trust)
        if path.name == "task.toml":
            return _judge_folders(iter([load_folder(path.parent)]), trust)
        if path.suffix == ".jsonl" or fragment == FLEET:
            own = is_trusted(path, trust_tasks=trust)
            mark = None if own else partial(mark_untrusted, root=path.parent)
            return from_fleet(path, mark) if fragment == FLEET else from_jsonl(path, mark)
        if path.suffix == ".json":
            found = from_registry(path, fragment or None, cache=cache)
            return _judge_folders(found, trust)
        if path.suffix == ".py":
            return _run_python(text, path, trust)
        raise ConfigError(
            f"{path}: not a task file", hint="a folder, dataset.toml, registry.json, .jsonl, .py or PATH#fleet is"
        )
    if path.suffix in (".py", ".jsonl", ".json", ".toml") or "/" in name:
        file = name.rpartition(":")[0]
        if file.endswith(".py") and Path(file).is_file():
            return _run_python(text, Path(file), trust)
        raise ConfigError(f"{path}: no such file or folder", hint=near_path(path))
    if ":" in text:
        return from_python(text)
    known = registry.names("rollyard.tasksets")
    if text not in known:
        if (entry := find_dataset(text)) is not None:
            return _judge_folders(_dataset(entry, cache, skipped), trust)
        known += [entry.title for entry in read_registry()]
        hint = "name a folder of tasks, a dataset (`rollyard datasets list`), or a .toml, .jsonl, .json or .py file"
        raise UnknownName("task folder, file or taskset", text, known, hint=hint)
    return rows_of(registry.load("rollyard.tasksets", text), text)


def _judge_folders(tasks: Iterator[Task], trust: bool) -> Iterator[Task]:
    """Each task of a folder, trusted or not by where its folder lies and what is in it."""
    remembered = load_remembered()
    for task in tasks:
        root = Path(task.source or ".")
        trusted = is_trusted(root, trust_tasks=trust, remembered=remembered)
        yield task if trusted else mark_untrusted(task, root)


def _run_python(text: str, file: Path, trust: bool) -> Iterator[Task]:
    if not is_trusted(file, trust_tasks=trust):
        raise ConfigError(f"{file}: a Python file that is not below the working directory would run here", hint=HINT)
    return from_python(text)


def _folder(path: Path, cache: Path | None, skipped: list[SkippedTask] | None) -> Iterator[Task]:
    if is_task(path):
        return iter([load_folder(path)])
    if (path / "dataset.toml").is_file():
        return from_dataset(path / "dataset.toml")
    folders = task_folders(path)
    few = list(islice(folders, FEWEST))
    if not few:
        entry = find_dataset(str(path))
        named = f"; the dataset of this name is {entry.title}" if entry is not None else ""
        raise ConfigError(f"{path}: no task folders in it", hint=f"a task folder holds a task.toml{named}")
    return _load_each(few, skipped) if len(few) < FEWEST else _load_indexed(path, chain(few, folders), cache, skipped)


def load_folders(root: Path, *, trust_tasks: bool = False) -> tuple[list[Task], list[SkippedTask]]:
    """The tasks of a folder of folders, and those that cannot be read, also where that is all of them."""
    skipped: list[SkippedTask] = []
    return list(_judge_folders(_folder(root, None, skipped), trust_tasks)), skipped


def _load_indexed(
    place: Path, folders: Iterable[Path], cache: Path | None, skipped: list[SkippedTask] | None
) -> Iterator[Task]:
    with FolderIndex({place}, cache) as index:
        yield from _load_each(folders, skipped, index.load)


def _dataset(entry: DatasetEntry, cache: Path | None, skipped: list[SkippedTask] | None) -> Iterator[Task]:
    if entry.adapter == FOLDERS:
        return _folder(open_source(entry, cache=cache), cache, skipped)
    return _load_made(entry, cache, skipped)


def _load_made(entry: DatasetEntry, cache: Path | None, skipped: list[SkippedTask] | None) -> Iterator[Task]:
    """Folders that an adapter makes, one after another, as they are asked for."""
    with FolderIndex({task_folders_of(entry, cache)}, cache) as index:
        yield from _load_each(open_dataset(entry, cache=cache), skipped, index.load)


def _load_each(
    folders: Iterable[Path | tuple[str, ConfigError]],
    skipped: list[SkippedTask] | None,
    load: Callable[[Path], Task] = load_folder,
) -> Iterator[Task]:
    """What cannot be read goes to `skipped`, or is an error where there is none. Of two tasks with one name the later is
    called by its folder's."""
    seen: set[str] = set()
    for folder in folders:
        try:
            if not isinstance(folder, Path):
                raise folder[1]
            task = load(folder)
        except ConfigError as error:
            if skipped is None:
                raise
            named = str(folder) if isinstance(folder, Path) else folder[0]
            skipped.append(SkippedTask(printable(named), printable(str(error))))
            continue
        if task.id in seen:
            task = msgspec.structs.replace(task, id=folder.name if folder.name not in seen else str(folder))
        seen.add(task.id)
        yield task
