"""`TaskConfig`: a remote task as JSON says it. Reading it is all that happens here; no server is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

import msgspec

from rollyard.core.errors import ConfigError, UnknownName

Modality = Literal["tool_use", "computer_use", "browser_use"]
SUBMIT = "submit_final_answer"
TTL_S = 3600.0
BROWSER_TTL_S = 1800.0
# names that the same thing has in files of other tools
_ALSO = {
    "key": "task_key",
    "env_id": "env_key",
    "version": "env_version",
    "data_id": "data_key",
    "modality": "task_modality",
}


class TaskConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`env_key` and `data_key` may carry their version: `key:version`. `extra` is what else the JSON had."""

    env_key: str
    task_key: str = ""
    prompt: str = ""
    env_version: str | None = None
    data_key: str | None = None
    data_version: str | None = None
    env_variables: Mapping[str, Any] = {}
    image_type: str | None = None  # the modality's own
    region: str | None = None
    ttl_s: float | None = None
    verifier_code: str | None = None
    task_modality: Modality = "tool_use"
    partial_reward: bool = False  # a failed attempt gets the share of what held
    extra: Mapping[str, Any] = {}

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        fields = {_ALSO.get(name, name): value for name, value in given.items() if value is not None}
        if not fields.get("env_key"):
            raise ConfigError("a remote task needs env_key", hint="name the environment it runs in")
        if "verifier_func" in fields:
            fields.setdefault("verifier_code", fields.pop("verifier_func"))
        if "ttl_seconds" in fields:
            fields["ttl_s"] = fields.pop("ttl_seconds")
        if (modality := fields.get("task_modality", "tool_use")) not in get_args(Modality):
            raise UnknownName("task modality", str(modality), list(get_args(Modality)))
        known = {name: value for name, value in fields.items() if name in cls.__struct_fields__ and name != "extra"}
        extra = {name: value for name, value in fields.items() if name not in known}
        for name in ("env", "data"):
            _split(known, f"{name}_key", f"{name}_version")
        try:
            return msgspec.convert({**known, "extra": extra}, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"task {fields.get('task_key') or '(unnamed)'}: {error}") from error

    @classmethod
    def from_json_file(cls, path: Path | str, task_key: str | None = None) -> Self:
        """From one task, a list of them, or `{"tasks": [...]}`; `task_key` says which."""
        rows = _rows(path)
        by_key = {str(row.get("task_key") or row.get("key") or ""): row for row in rows}
        if task_key is None:
            if len(rows) != 1:
                raise ConfigError(f"{path} has {len(rows)} tasks", hint=f"name one: {', '.join(by_key)}")
            return cls.read(rows[0])
        if task_key not in by_key:
            raise UnknownName("task", task_key, list(by_key))
        return cls.read(by_key[task_key])

    @classmethod
    def all_from_json_file(cls, path: Path | str) -> list[Self]:
        return [cls.read(row) for row in _rows(path)]

    @property
    def lifetime_s(self) -> float:
        """An instance with a browser is the dearer one: it lives shorter."""
        return self.ttl_s or (BROWSER_TTL_S if self.task_modality == "browser_use" else TTL_S)

    @property
    def image(self) -> str | None:
        """The type of its image; None is the standard one. Only images of type `mcp` have a screen."""
        return self.image_type or ("mcp" if self.task_modality == "computer_use" else None)

    @property
    def wants_answer(self) -> bool:
        return SUBMIT in self.prompt


def _split(fields: dict[str, Any], key: str, version: str) -> None:
    name, colon, said = str(fields.get(key) or "").partition(":")
    if colon:
        fields[key] = name
        if fields.setdefault(version, said) != said:
            raise ConfigError(f"{key} says version {said} and {version} says {fields[version]}")


def _rows(path: Path | str) -> list[Mapping[str, Any]]:
    try:
        given = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read tasks from {path}: {error}") from error
    rows = given.get("tasks", [given]) if isinstance(given, Mapping) else given
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"cannot read tasks from {path}: it holds no task, and no list of them")
    return rows
