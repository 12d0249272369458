"""OpenEnv's Task API: which tasks an environment has, by split, without beginning an episode.

    GET  /{env}/splits                              [{"name", "type"}]
    POST /{env}/tasks, /num_tasks  {"split"}        {"tasks", "env_name"}, {"num_tasks"}
    POST /{env}/task               {"split","index"}
    POST /{env}/task_range         {"split","start","stop"}

An environment without splits answers 501, as theirs do. Its own `Env.splits` are read, or those the server was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollyard.envs.results import EnvRefused

_TYPES = ("train", "validation", "test")
Splits = Mapping[str, Sequence[Any]]


class TaskQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    split: str
    index: int | None = None
    start: int | None = None
    stop: int | None = None


class TaskApi:
    def __init__(self, name: str, splits: Splits) -> None:
        self._name = name
        self._splits = splits

    def list_tasks(self, env: str) -> list[dict[str, str]]:
        self._check(env)
        return [{"name": name, "type": name if name in _TYPES else "validation"} for name in self._splits]

    def answer(self, env: str, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self._check(env)
        allowed = {"task": {"index"}, "task_range": {"start", "stop"}}.get(verb, set[str]())
        try:
            query = msgspec.convert(body, TaskQuery)
        except msgspec.ValidationError as error:
            raise EnvRefused("VALIDATION_ERROR", str(error)) from error
        if extra := sorted(set(body) - allowed - {"split"}):
            raise EnvRefused("VALIDATION_ERROR", f"unknown keys: {', '.join(extra)}")
        if query.split not in self._splits:
            raise EnvRefused("BAD_INDEX", f"there is no split {query.split[:40]!r}")
        tasks = self._splits[query.split]
        if verb == "num_tasks":
            return {"num_tasks": len(tasks)}
        if verb == "task":
            return {"task": _pick_task(tasks, query.index)}
        if verb == "task_range":
            return {"tasks": _plain(list(tasks[query.start : query.stop]))}
        return {"tasks": _plain(list(tasks)), "env_name": self._name}

    def _check(self, env: str) -> None:
        if env.lower() != self._name.lower():
            raise EnvRefused("NOT_FOUND", f"unknown environment {env[:40]!r}")
        if not self._splits:
            raise EnvRefused("UNSUPPORTED", "this environment has no tasks to look through")


def _pick_task(tasks: Sequence[Any], index: int | None) -> Any:
    if index is None:
        raise EnvRefused("VALIDATION_ERROR", "index must be an integer")
    if not 0 <= index < len(tasks):
        raise EnvRefused("BAD_INDEX", "Invalid task index")
    return _plain(tasks[index])


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, str_keys=True)
