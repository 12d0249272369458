"""One task folder being read: its `task.toml`, and errors that name the file and the field."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.log import Log
from rollyard.core.task import Grade
from rollyard.tasks.harbor import schema
from rollyard.tasks.harbor.files import TaskFiles

_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_NETWORK = {"public": "host", "no-network": "none", "allowlist": "allowlist"}
_PARTS = (
    "task.toml", "instruction.md", "trajectory.json", "environment", "environment/Dockerfile", "environment/.dockerignore",
    "environment/docker-compose.yaml", "environment/docker-compose.yml", "tests", "tests/Dockerfile", "solution", "workdir",
)  # fmt: skip


class ExtraFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    source: str  # relative to the task folder
    mode: int | None = None


class Extra(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`[metadata.rollyard]`: what the format has no word for. `image` takes the place of the environment's own."""

    grade: Grade | None = None
    verifier: str | None = None
    options: dict[str, Any] = {}
    image: str | None = None
    layers: list[str] = []
    verifier_layers: list[str] = []
    carry_workdir: bool | None = None
    safe_path: bool = True
    setup: str | list[str] = []  # a string is one command
    files: list[ExtraFile] = []
    limits: dict[str, float] = {}
    pids: int | None = None


def unknown_notes(raw: dict[str, Any]) -> list[str]:
    """Keys of `[task]` that are not known."""
    package: Any = raw.get("task")
    return sorted(set(package) - set(schema.Package.__struct_fields__)) if isinstance(package, dict) else []


class TaskFolder:
    """One load: the parsed file and the folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.toml = root, root / "task.toml"
        self.files = TaskFiles(root)
        self._refuse_way_out(root)
        raw = self._without_notes(read_toml(self.toml))
        try:
            self.file = schema.parse(raw)
            self.extra = msgspec.convert(self.file.metadata.get("rollyard", {}), Extra)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.toml}: {field_error(error)}") from error
        for step in self.file.steps or ():
            self._refuse_way_out(root / "steps" / step.name)

    def _without_notes(self, raw: dict[str, Any]) -> dict[str, Any]:
        """`[task]` describes the package to people. An unknown key of it is reported and left out, as in Harbor."""
        if not (notes := unknown_notes(raw)):
            return raw
        Log("rollyard.tasks").warning("task.keys_left_out", file=str(self.toml), keys=", ".join(notes))
        return {**raw, "task": {name: value for name, value in raw["task"].items() if name not in notes}}

    def fail(self, field: str, message: str, hint: str | None = None) -> ConfigError:
        return ConfigError(f"{self.toml}: {field}: {message}", hint=hint)

    def network(self, table: schema.EnvironmentTable | Any) -> tuple[str | None, tuple[str, ...]]:
        mode = table.mode if isinstance(table, schema.EnvironmentTable) else table.network_mode
        if mode is None:
            return None, ()
        return _NETWORK[mode], tuple(schema.normal_host(host) for host in table.allowed_hosts or ())

    def _refuse_way_out(self, place: Path) -> None:
        """Links of the folder's own parts never lead out of it: what they show could be a secret of the host."""
        for name in _PARTS:
            if not (place / name).resolve().is_relative_to(self.root):
                raise ConfigError(f"{place / name}: a link leads out of the task folder")

    def text(self, path: Path) -> str:
        try:
            return strip_canary(path.read_text())
        except FileNotFoundError:
            raise ConfigError(f"{path}: the task has no such file") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def field_error(error: msgspec.ValidationError) -> str:
    """`environment.cpus: Expected ...` out of msgspec's `Expected ... - at `$.environment.cpus``."""
    message, _, where = str(error).partition(" - at `$")
    field = where.rstrip("`").lstrip(".")
    return f"{field}: {message}" if field else message


def strip_canary(text: str) -> str:
    """Leading comment lines that mark benchmark data, and the blank lines after them, are not for agents."""
    lines = text.split("\n")
    start = 0
    while start < len(lines) and _CANARY.fullmatch(lines[start].strip()):
        start += 1
    while start and start < len(lines) and not lines[start].strip():
        start += 1
    return "\n".join(lines[start:])


def user_name(user: str | int | None) -> str | None:
    return None if user is None else str(user)
