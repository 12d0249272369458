"""Named datasets of this machine: a TOML file that says for each what it is called, where its files are and how they are read.

`Taskset.load("humaneval")` or `"humaneval@1"` finds one here. Its source is on disk: a folder, an archive, a file of rows, or a
commit of a git repository (`git:PATH_OR_URL@COMMIT`, the one thing that is fetched, once, into the cache). The digest of the
files is kept, and files that have changed since are an error. Task folders that an adapter makes are kept in the cache.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import inspect
import lzma
import os
import re
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core import toml
from rollyard.core.cache import cache_home, hold_lock, make_once, replace_file
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.core.home import user_home
from rollyard.tasks.adapters import Adapter, check_options, guess_adapter, load_adapter
from rollyard.tasks.adapters.drafts import folder_name
from rollyard.tasks.datasets import check_out
from rollyard.tasks.harbor.taskfile import field_error, read_toml
from rollyard.tasks.trust import source_digest

VARIABLE = "ROLLYARD_DATASETS"
FOLDERS = "folders"  # no adapter: the source is task folders already
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_WAIT_S = 30.0  # for a process that writes the registry at this moment
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".zip")
_SMALL = 2**30  # bytes that any archive may hold
_MOST_PACKED = 100  # times its own size that a larger one may hold; text has a tenth of that


class DatasetEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    version: str = "1"
    source: str
    adapter: str = FOLDERS
    digest: str = ""
    licence: str = ""
    needs: tuple[str, ...] = ()
    options: Mapping[str, Any] = {}

    @property
    def title(self) -> str:
        return f"{self.name}@{self.version}"


class _RegistryFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dataset: list[DatasetEntry] = []


def registry_file() -> Path:
    """`$ROLLYARD_DATASETS`, else `datasets.toml` in the user's configuration."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else user_home() / ".config").absolute() / "rollyard" / "datasets.toml"


def read_registry() -> list[DatasetEntry]:
    path = registry_file()
    if not path.is_file():
        return []
    try:
        return msgspec.convert(read_toml(path), _RegistryFile).dataset
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {field_error(error)}") from error


def find_dataset(text: str) -> DatasetEntry | None:
    """`name` (the version added last) or `name@version`; None where no dataset has this name."""
    name, _, version = text.partition("@")
    named = [entry for entry in read_registry() if entry.name == name]
    found = [entry for entry in named if not version or entry.version == version]
    if named and not found:
        raise UnknownName("version of dataset", text, [entry.title for entry in named])
    return found[-1] if found else None


def add_dataset(entry: DatasetEntry, *, replace: bool = False) -> DatasetEntry:
    """Into the registry file, with the digest of its files and its adapter filled in."""
    if not _NAME.fullmatch(entry.name) or not _NAME.fullmatch(entry.version):
        raise ConfigError(f"{entry.title!r}: a name and a version are letters, digits, '.', '_' and '-'")
    _list_others(entry, replace=replace)
    files = unpack_source(entry.source)
    name = entry.adapter or (FOLDERS if _is_folders(files) else guess_adapter(files))
    needs = entry.needs
    if name == FOLDERS:
        if not _is_folders(files):
            raise ConfigError(f"{files}: no task folders in it", hint="a task folder holds a task.toml")
    else:
        adapter = load_adapter(name)
        check_options(name, adapter, entry.options)
        needs = needs or adapter.needs
    source = entry.source if entry.source.startswith("git:") else str(Path(entry.source).expanduser().absolute())
    entry = msgspec.structs.replace(
        entry, source=source, adapter=name, needs=needs, digest=entry.digest or source_digest(files)
    )
    path = registry_file()
    with hold_lock(path.parent / ".locks" / path.name, _WAIT_S):  # reading the source took its time: others were added
        tables = [msgspec.to_builtins(item) for item in (*_list_others(entry, replace=replace), entry)]
        replace_file(path, toml.dumps({"dataset": tables}).encode())
    return entry


def _list_others(entry: DatasetEntry, *, replace: bool) -> list[DatasetEntry]:
    """What the registry has beside this one."""
    found = read_registry()
    others = [other for other in found if other.title != entry.title]
    if len(others) < len(found) and not replace:
        raise ConfigError(
            f"{entry.title} is there already", hint="--replace puts this in its place, or give another version"
        )
    return others


def _is_folders(files: Path) -> bool:
    if not files.is_dir():
        return False
    if (files / "task.toml").is_file() or (files / "dataset.toml").is_file():
        return True
    return next(files.glob("*/task.toml"), None) is not None or next(files.glob("*/*/task.toml"), None) is not None


def unpack_source(source: str, cache: Path | None = None) -> Path:
    """The source as a folder or file: archives are unpacked, and commits checked out, once into the cache."""
    home = (cache or cache_home()) / "datasets" / "sources"
    if source.startswith("git:"):
        url, _, commit = source.removeprefix("git:").rpartition("@")
        if not re.fullmatch(r"[0-9a-f]{40}", commit) or not url or url.startswith("-"):
            raise ConfigError(f"{source}: a git source is git:PATH_OR_URL@COMMIT, with all 40 digits of the commit")
        key = hashlib.sha256(source.encode()).hexdigest()[:32]
        return make_once(home / key, lambda folder: _check_out(source, url, commit, folder))
    path = Path(source).expanduser().absolute()
    if not path.exists():
        raise ConfigError(
            f"{path}: no such file or folder", hint="`rollyard datasets list` says where each set's files come from"
        )
    if path.is_dir() or not path.name.endswith(_ARCHIVES):
        return path
    key = source_digest(path).removeprefix("sha256:")[:32]
    return make_once(home / key, lambda folder: _unpack(path, folder))


def _check_out(source: str, url: str, commit: str, folder: Path) -> None:
    check_out(source, url, commit, folder)
    shutil.rmtree(folder / ".git")


def _unpack(archive: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    room = max(_SMALL, _MOST_PACKED * archive.stat().st_size)

    def take(member: tarfile.TarInfo | zipfile.ZipInfo) -> None:
        nonlocal room
        room -= member.size if isinstance(member, tarfile.TarInfo) else member.file_size
        if room < 0:
            raise ConfigError(
                f"{archive}: holds more than {_MOST_PACKED} times its own size",
                hint="unpack it yourself where you trust it, and name the folder",
            )

    def admit(member: tarfile.TarInfo, place: str) -> tarfile.TarInfo | None:
        take(member)
        return tarfile.data_filter(member, place)

    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as members:
                for member in members.infolist():
                    take(member)
                members.extractall(folder)  # noqa: S202 - zipfile keeps names inside
        else:
            with tarfile.open(archive) as members:
                members.extractall(folder, filter=admit)  # noqa: S202 - `data_filter` keeps names inside
    except (tarfile.TarError, zipfile.BadZipFile, OSError, zlib.error, lzma.LZMAError) as error:
        raise ConfigError(f"{archive}: cannot be unpacked: {error}") from error
    except EOFError as error:
        raise ConfigError(f"{archive}: cannot be unpacked: it ends too soon", hint="fetch it again") from error
    inner = list(folder.iterdir())
    if len(inner) == 1 and inner[0].is_dir():  # an archive of one folder is that folder
        aside = folder.with_name(f"{folder.name}.inner")
        inner[0].rename(aside)
        shutil.rmtree(folder)
        aside.rename(folder)


def open_source(entry: DatasetEntry, *, cache: Path | None = None) -> Path:
    """The dataset's files, which must be those that were added."""
    files = unpack_source(entry.source, cache)
    if entry.digest and (found := source_digest(files)) != entry.digest:
        raise ConfigError(
            f"{entry.title}: {entry.source} has changed since it was added: {found}, kept is {entry.digest}",
            hint=f"`rollyard datasets add {entry.name} --version NEW --source ...` adds it as another version",
        )
    return files


def task_folders_of(entry: DatasetEntry, cache: Path | None = None) -> Path:
    """Where the task folders lie that the entry's adapter makes."""
    key = _key(entry, load_adapter(entry.adapter))
    return (cache or cache_home()) / "datasets" / "tasks" / f"{entry.title}-{key}"


def open_dataset(entry: DatasetEntry, *, cache: Path | None = None) -> Iterator[Path | tuple[str, ConfigError]]:
    """The task folder of each task, made where it is not there yet; (name, error) for one that cannot be made."""
    files = open_source(entry, cache=cache)
    adapter, home = load_adapter(entry.adapter), task_folders_of(entry, cache)
    taken: dict[str, int] = {}
    for draft in adapter.read(files, entry.options):
        name = _free_name(folder_name(draft.id), taken)
        try:
            yield make_once(home / name, draft.write)
        except ConfigError as error:
            yield name, error
        except Exception as error:  # noqa: BLE001 - whatever an adapter stumbles over in one row, the others are tasks
            yield name, ConfigError(f"cannot be made into a task: {type(error).__name__}: {error}")


def _free_name(wanted: str, taken: dict[str, int]) -> str:
    """Rows with one id are different tasks: the second is `id-2`."""
    name = wanted
    while name in taken:
        taken[wanted] += 1
        name = f"{wanted}-{taken[wanted]}"
    taken[name] = 1
    return name


def _key(entry: DatasetEntry, adapter: Adapter) -> str:
    """What a made folder depends on: the files, the options, the adapter's own code and what adapters share."""
    inside = importlib.resources.files("rollyard.inside")
    modules = [Path(inspect.getfile(adapter.read)), *sorted(Path(inspect.getfile(Adapter)).parent.glob("*.py"))]
    code = b"".join(path.read_bytes() for path in modules)
    code += b"".join(inside.joinpath(name).read_bytes() for name in adapter.carries)
    text = msgspec.json.encode([entry.source, entry.digest, entry.adapter, dict(entry.options)], order="sorted")
    return hashlib.sha256(text + code).hexdigest()[:16]
