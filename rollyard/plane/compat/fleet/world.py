"""`World`: what an env key stands for. Files for a sandbox, the command that serves its tools, where its databases are."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.sandbox import SandboxSpec

HOME = "/srv/world"  # where its files are in the sandbox


class World(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`command` serves MCP at `/mcp` on `port`, from the world's own directory, with `plain_mcp` to import. `reset` runs with
    `ROLLYARD_SEED`; without it, `current` is made what `seed` is. `seeds`: whether a seed means anything to it. `data` are the
    data sets it knows (`key:version`); it gets the chosen one as `ROLLYARD_DATA_KEY` and `ROLLYARD_DATA_VERSION`."""

    key: str
    version: str
    command: tuple[str, ...]
    port: int
    name: str = ""
    description: str = ""
    files: str | None = None
    reset: tuple[str, ...] = ()
    seeds: bool = False
    data: tuple[str, ...] = ()
    databases: Mapping[str, str] = {}
    modalities: tuple[str, ...] = ("tool_use",)
    boot_s: float = 60.0
    spec: SandboxSpec = SandboxSpec()

    def paths(self) -> dict[str, str]:
        return {name: str(PurePosixPath(HOME) / path) for name, path in self.databases.items()}


def load_world(directory: Path | str) -> World:
    """From a folder with a `world.toml`; the folder's files are the world's."""
    folder = Path(directory)
    file = folder / "world.toml"
    if not file.is_file():
        raise ConfigError(f"there is no world.toml in {folder}")
    try:
        given = tomllib.loads(file.read_text())
        return msgspec.convert({"files": str(folder.resolve()), **given}, World)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{file}: {error}") from error


def load_worlds(directory: Path | str) -> list[World]:
    return [load_world(file.parent) for file in sorted(Path(directory).glob("*/world.toml"))]


class WorldCatalog:
    """Worlds by key and version. The last one given of a key is its default."""

    def __init__(self, worlds: Iterable[World]) -> None:
        self.versions: dict[str, dict[str, World]] = {}
        for world in worlds:
            self.versions.setdefault(world.key, {})[plain(world.version)] = world

    def get(self, key: str, version: str | None) -> World | None:
        found = self.versions[key]
        return list(found.values())[-1] if version is None else found.get(plain(version))


def plain(version: str) -> str:
    """`v1.2` and `1.2` are one version: clients put the letter before digits."""
    return version[1:] if version[:1] == "v" and version[1:2].isdigit() else version
