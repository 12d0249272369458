"""Harbor datasets on disk: `dataset.toml` (tasks pinned by digest) and `registry.json` (tasks by path or git commit).

A digest that does not match what lies in the folder is an error that names both. Git tasks are fetched once with the `git`
command into the cache, by commit; nothing else here reaches out.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.cache import cache_home, make_once
from rollyard.core.errors import ConfigError
from rollyard.core.task import Task
from rollyard.tasks.harbor.digest import file_digest
from rollyard.tasks.harbor.load import is_task, load_folder
from rollyard.tasks.harbor.schema import Author, check_package_name
from rollyard.tasks.harbor.taskfile import field_error, read_toml

_DIGEST = re.compile(r"sha256:[a-f0-9]{64}")
_FETCH_S = 300


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class TaskRef(_Strict, frozen=True, kw_only=True):
    name: str
    digest: str

    def __post_init__(self) -> None:
        check_package_name(self.name)
        if not _DIGEST.fullmatch(self.digest):
            raise ValueError(f"a digest is 'sha256:' and 64 hex digits, got {self.digest!r}")


class FileRef(_Strict, frozen=True, kw_only=True):
    path: str
    digest: str = ""

    def __post_init__(self) -> None:
        if "/" in self.path or "\\" in self.path:
            raise ValueError(f"a dataset's file is a plain file name, got {self.path!r}")


class DatasetInfo(_Strict, frozen=True, kw_only=True):
    name: str
    version: str | None = None
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []

    def __post_init__(self) -> None:
        check_package_name(self.name)


class DatasetFile(_Strict, frozen=True, kw_only=True):
    schema_version: str = "1.0"
    dataset: DatasetInfo
    tasks: list[TaskRef] = []
    files: list[FileRef] = []
    metadata: dict[str, Any] = {}


class RegistryTask(_Strict, frozen=True, kw_only=True):
    name: str
    path: str
    git_url: str | None = None
    git_commit_id: str | None = None


class RegistryDataset(_Strict, frozen=True, kw_only=True):
    name: str
    version: str
    description: str = ""
    tasks: list[RegistryTask] = []
    metrics: list[dict[str, Any]] = []


def task_folders(root: Path) -> Iterator[Path]:
    """Task folders directly below `root`, or one level deeper (`org/name`), sorted by path. One that this user may not look into
    is among them, so that the caller says so."""
    for name in _folder_names(root):
        child = root / name
        if name.startswith("."):
            continue
        try:
            if is_task(child):
                yield child
            else:
                yield from [child / inner for inner in _folder_names(child) if is_task(child / inner)]
        except PermissionError:
            yield child


def _folder_names(place: Path) -> list[str]:
    with os.scandir(place) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def from_dataset(path: Path) -> Iterator[Task]:
    """The pinned tasks of a `dataset.toml`, out of the folders beside it."""
    try:
        manifest = msgspec.convert(read_toml(path), DatasetFile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {field_error(error)}") from error
    for number, file in enumerate(manifest.files):
        there = path.parent / file.path
        if not there.is_file():
            raise ConfigError(f"{path}: files[{number}]: {file.path} is not beside it")
        if file.digest and file.digest != f"sha256:{file_digest(there)}":
            raise ConfigError(f"{path}: files[{number}].digest: {file.path} has changed: sha256:{file_digest(there)}")
    folders = {folder.name: folder for folder in task_folders(path.parent)}
    named = {_package_name(folder): folder for folder in folders.values()}
    seen: set[TaskRef] = set()
    for number, ref in enumerate(manifest.tasks):
        if ref in seen:
            continue
        seen.add(ref)
        folder = named.get(ref.name) or folders.get(ref.name.partition("/")[2])
        if folder is None:
            raise ConfigError(f"{path}: tasks[{number}].name: no folder of {ref.name!r} lies beside it")
        task = load_folder(folder)
        if task.digest != ref.digest:
            raise ConfigError(f"{path}: tasks[{number}].digest: {folder} has {task.digest}, pinned is {ref.digest}")
        yield msgspec.structs.replace(task, id=ref.name)


def _package_name(folder: Path) -> str:
    package = read_toml(folder / "task.toml").get("task")
    return str(package.get("name")) if isinstance(package, dict) else folder.name


def from_registry(path: Path, wanted: str | None, *, cache: Path | None) -> Iterator[Task]:
    """The tasks of one dataset (`name` or `name@version`) of a `registry.json`; of the only one, when there is one."""
    try:
        datasets = msgspec.json.decode(path.read_bytes(), type=list[RegistryDataset])
    except BAD_JSON as error:
        raise ConfigError(
            f"{path}: {field_error(error) if isinstance(error, msgspec.ValidationError) else error}",
            hint=f"a registry is a list of datasets; tasks of Fleet are loaded as {path}#fleet",
        ) from error
    known = [f"{dataset.name}@{dataset.version}" for dataset in datasets]
    chosen = [d for d, name in zip(datasets, known, strict=True) if wanted in (None, d.name, name)]
    if len(chosen) != 1:
        raise ConfigError(f"{path}: choose one dataset, as PATH#NAME@VERSION; it has {', '.join(known) or 'none'}")
    for entry in chosen[0].tasks:
        base = path.parent if entry.git_url is None else _fetch(entry, entry.git_url, cache)
        folder = (base / entry.path).resolve()
        if not is_task(folder):
            raise ConfigError(f"{path}: task {entry.name!r}: {folder} is no task folder")
        yield msgspec.structs.replace(load_folder(folder), id=entry.name)


def _fetch(entry: RegistryTask, url: str, cache: Path | None) -> Path:
    """A checkout of one commit, made once. The commit must be named: `HEAD` is another task tomorrow."""
    commit = entry.git_commit_id
    if commit is None or not re.fullmatch(r"[0-9a-fA-F]{7,64}", commit):
        raise ConfigError(f"task {entry.name!r}: git_commit_id must name a commit, got {commit!r}")
    if url.startswith("-"):
        raise ConfigError(f"task {entry.name!r}: {url!r} is not a git URL")
    target = (cache or cache_home()) / "git" / hashlib.sha256(f"{url}\0{commit}".encode()).hexdigest()[:32]
    return make_once(target, lambda checkout: check_out(f"task {entry.name!r}", url, commit, checkout))


def check_out(task: str, url: str, commit: str, checkout: Path) -> None:
    """The files of one commit. A repository on this disk gives any commit that it has, not only those that a branch names."""
    checkout.mkdir(parents=True)
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_NOSYSTEM": "1"}
    giving = ["--upload-pack", "git -c uploadpack.allowAnySHA1InWant=true upload-pack"] if Path(url).is_dir() else []
    for command in (
        ["git", "init", "-q"],
        ["git", "fetch", "-q", "--depth", "1", *giving, url, commit],
        ["git", "-c", "core.hooksPath=/dev/null", "checkout", "-q", "FETCH_HEAD"],
    ):
        done = subprocess.run(command, cwd=checkout, env=quiet, capture_output=True, timeout=_FETCH_S, check=False)
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip()[-400:]
            raise ConfigError(f"{task}: {' '.join(command[:2])} of {url} failed: {said}")
