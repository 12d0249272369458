"""Pushing a folder to a plane: its files as a bundle, and an environment version that names the bundle by sha256.

A folder is a Harbor task (`task.toml`), an AEnvironment project (`config.json`) or an OpenEnv package (`openenv.yaml`). What has
a Dockerfile and names no image is built by the plane when it is first used. The bundle is the same bytes for the same
files. Links are refused, since what they lead to may be anything; what unpacks one writes inside its target and nowhere else.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError, PlaneConflict
from rollyard.core.plane import AENV_SERVER
from rollyard.core.sandbox import Resources
from rollyard.plane.client.plane import Plane
from rollyard.tasks.harbor.load import is_task, load_folder

BUNDLE = "bundle"
MAX_FILES = 20_000  # of one bundle
_SKIPPED = frozenset((".git", ".venv", "__pycache__", "node_modules", ".pytest_cache"))
_AMOUNT = re.compile(r"([0-9.]+)\s*([A-Za-z]*)")
_MEGABYTES = {"": 1.0, "M": 1.0, "MI": 1.0, "MB": 1.0, "G": 1024.0, "GI": 1024.0, "GB": 1024.0}


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder says of itself. `build` is how its image comes from its files, None where it names one."""

    name: str
    version: str
    spec: dict[str, Any]
    build: dict[str, Any] | None = None


async def push(
    plane: Plane,
    folder: Path,
    *,
    name: str | None = None,
    version: str | None = None,
    image: str | None = None,
    release: bool = False,
) -> dict[str, Any]:
    """The environment's record. A draft of this name and version is replaced; a released one is a conflict."""
    project = read_project(folder, image=image)
    name, version = name or project.name, version or project.version
    sha256 = await plane.envs.upload(pack(folder))
    spec: dict[str, Any] = {**project.spec, "artifacts": {BUNDLE: sha256}}
    if project.build is not None:
        spec["build"] = {**project.build, "bundle": sha256}
    try:
        made = await plane.envs.create(name, version, **spec)
    except PlaneConflict:
        seen = await plane.envs.get(name, version)
        made = await plane.envs.update(name, version, revision=int(seen.get("revision") or 0), **spec)
    return await plane.envs.release(name, version, revision=made.get("revision")) if release else made


async def pull(plane: Plane, name: str, version: str, target: Path) -> Path:
    """The files of a pushed environment, in a new folder."""
    record = await plane.envs.get(name, version)
    sha256 = ((record.get("spec") or {}).get("artifacts") or {}).get(BUNDLE)
    if not isinstance(sha256, str):
        raise ConfigError(f"{name}@{version} has no files: it was not pushed", hint="`rollyard push FOLDER` sends them")
    unpack(await plane.envs.download(sha256), target)
    return target


def read_project(folder: Path, *, image: str | None = None) -> Project:
    if is_task(folder):
        return _harbor(folder, image)
    if (folder / "config.json").is_file():
        return _aenv(folder, image)
    if (folder / "openenv.yaml").is_file():
        return _openenv(folder, image)
    raise ConfigError(
        f"{folder} is neither a task folder (task.toml), an aenv project (config.json) nor an OpenEnv package (openenv.yaml)"
    )


def _harbor(folder: Path, image: str | None) -> Project:
    task = load_folder(folder)
    build = None
    if task.build is not None and image is None:
        context = Path(task.build).resolve().relative_to(folder.resolve()).as_posix()
        build = {"context": "" if context == "." else context, "dockerfile": "Dockerfile"}
    spec = {
        "description": task.instruction.strip().partition("\n")[0][:200],
        "image": image or ("host" if build is not None else task.image),
        "resources": msgspec.to_builtins(task.resources),
        "network": task.network or "none",
        "tags": ["harbor"],
        "tasks": [task.id],
        "verifier": task.verifier.kind if task.verifier is not None else None,
    }
    name = str(task.package.get("name") or folder.resolve().name)
    return Project(name=_check_name(name), version=str(task.package.get("version") or "1.0"), spec=spec, build=build)


def _aenv(folder: Path, image: str | None) -> Project:
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
        name, version = str(config["name"]), str(config["version"])
    except (msgspec.MsgspecError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder / 'config.json'} is not one of an aenv project: {error}") from error
    deploy: dict[str, Any] = config.get("deployConfig") or {}
    images = [one.get("content") for one in config.get("artifacts") or [] if one.get("type") == "image"]
    chosen = image or next((one for one in images if one), None)
    dockerfile = str((config.get("buildConfig") or {}).get("dockerfile") or "Dockerfile").removeprefix("./")
    build = {"dockerfile": dockerfile, "start": AENV_SERVER} if (folder / dockerfile).is_file() and not image else None
    if chosen is None and build is None:
        hint = "give --image, an artifact of type image in config.json, or a Dockerfile"
        raise ConfigError(f"{name} names no image and has no {dockerfile}", hint=hint)
    spec = {
        "description": str(config.get("description") or ""),
        "image": chosen or "host",
        "resources": msgspec.to_builtins(_resources(deploy)),
        "env": {str(k): str(v) for k, v in (deploy.get("environmentVariables") or {}).items()},
        "tags": ["aenv", *map(str, config.get("tags") or [])],
        "extra": {"aenv": config},
    }
    return Project(name=_check_name(name), version=version, spec=spec, build=build)


def _openenv(folder: Path, image: str | None) -> Project:
    import yaml  # the import costs 30 ms, and one kind of folder needs it

    try:
        said = yaml.safe_load((folder / "openenv.yaml").read_text())
        name, port = str(said["name"]), int(said.get("port") or 8000)
    except (yaml.YAMLError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / 'openenv.yaml'} is not one of an OpenEnv package: {error}") from error
    dockerfiles = [one for one in ("server/Dockerfile", "Dockerfile") if (folder / one).is_file()]
    if image is None and not dockerfiles:
        raise ConfigError(f"{name} has no server/Dockerfile", hint="give --image, or a Dockerfile")
    spec = {
        "description": str(said.get("description") or ""),
        "image": image or "host",
        "port": port,
        "tags": ["openenv"],
    }
    build = {"dockerfile": dockerfiles[0]} if image is None else None
    return Project(name=_check_name(name), version=str(said.get("version") or "1.0"), spec=spec, build=build)


def _resources(deploy: dict[str, Any]) -> Resources:
    cpus, memory = _amount(deploy.get("cpu")), _amount(deploy.get("memory"))
    return Resources(
        cpus=None if cpus is None else cpus[0] / (1000 if cpus[1] == "M" else 1),
        memory_mb=None if memory is None else int(memory[0] * _MEGABYTES.get(memory[1], 1.0)),
    )


def _amount(said: object) -> tuple[float, str] | None:
    found = _AMOUNT.fullmatch(str(said).strip()) if said else None
    return None if found is None else (float(found[1]), found[2].upper())


def _check_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:100] or "env"


def pack(folder: Path) -> bytes:
    """A tar of a folder's files: sorted, without times and owners."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in _files(folder):
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            data = path.read_bytes()
            entry.size, entry.mode = len(data), 0o755 if path.stat().st_mode & 0o100 else 0o644
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name in _SKIPPED:
            continue
        if path.is_symlink():
            raise ConfigError(f"{path} is a link", hint="push the file itself, or leave it out")
        if path.is_dir():
            yield from _files(path)
        elif path.is_file():
            yield path
        else:
            raise ConfigError(f"{path} is neither a file nor a folder")


def unpack(data: bytes, target: Path) -> None:
    """Plain files and folders only, all of them below `target`, which must not be there yet. A bundle is a tar as `pack` makes
    it: what unpacks to more than was sent, by compression or by holes in files, is refused."""
    target.mkdir(parents=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for count, entry in enumerate(tar):
                if count >= MAX_FILES:
                    raise ConfigError(f"the bundle has more than {MAX_FILES:,} files")
                if not (entry.isreg() or entry.isdir()) or entry.issparse():
                    raise ConfigError(f"the bundle has {entry.name!r}, which is neither a file nor a folder")
            tar.extractall(target, filter="data")
    except (tarfile.TarError, OSError) as error:
        raise ConfigError(f"the bundle is not one that may be unpacked: {error}") from error
