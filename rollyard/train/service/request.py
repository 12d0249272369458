"""What a client of `serve rollouts` may ask for. Who answers, in which sandbox, and every path of the server's machine are the
server's: nothing here names one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rollyard import agents
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.core.limits import Limits
from rollyard.core.task import Task
from rollyard.runs.rollout.options import OPTIONS
from rollyard.runs.run.assignment import select_tasks
from rollyard.runs.run.config import RunConfig
from rollyard.tasks.rows import as_task
from rollyard.tasks.taskset import Taskset
from rollyard.tasks.trust import mark_untrusted

MAX_ROLLOUTS = 100_000  # of one job
MAX_RETRIES = 10


class RolloutJobRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`tasks` are rows as a JSON Lines file has them, or `taskset` names one of the server's. `options` are those of a rollout
    that a client may set. `callback` is called when the job is over."""

    tasks: list[dict[str, Any]] | None = None
    taskset: str | None = None
    agents: tuple[str, ...] = ()
    attempts: int = 1
    parallel: int | None = None
    retries: int = 1
    filter: tuple[str, ...] = ()
    limit: int | None = None
    name: str = ""
    options: dict[str, Any] = {}
    callback: str | None = None


class ServiceDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What the server decides for every job. `parallel` bounds one job; `tasks` is the folder of its tasksets."""

    agent: str
    sandbox: str
    parallel: int = 8
    tasks: Path | None = None
    callback_hosts: tuple[str, ...] = ()


def read_request(body: bytes) -> RolloutJobRequest:
    request = msgspec.json.decode(body, type=RolloutJobRequest)
    if (request.tasks is None) == (request.taskset is None):
        raise ConfigError("a job has tasks or the name of a taskset", hint="give one of them")
    return request


def config_of(request: RolloutJobRequest, server: ServiceDefaults) -> RunConfig:
    """The run that is meant. What only the server may choose is refused by name."""
    options = dict(request.options)
    for name in options:
        if name not in OPTIONS:
            raise ConfigError(f"there is no option {name!r}", hint=f"clients may set {', '.join(_clients())}")
        if OPTIONS[name].setter != "client":
            raise ConfigError(f"{name}: this server decides that", hint=f"clients may set {', '.join(_clients())}")
    if request.parallel is not None and request.parallel > server.parallel:
        raise ConfigError(f"parallel {request.parallel} is more than this server's {server.parallel}")
    if request.retries > MAX_RETRIES:
        raise ConfigError(f"retries {request.retries} is more than {MAX_RETRIES}")
    for name in request.agents:
        if name != server.agent and name not in (known := agents.names()):
            # A path or a module is the operator's to name
            raise UnknownName("agent", name, known)
    if "limits" in options:
        options["limits"] = msgspec.convert(options["limits"], Limits)
    fields = {
        **options,
        "name": request.name,
        "agents": request.agents or (server.agent,),
        "attempts": request.attempts,
        "parallel": request.parallel or server.parallel,
        "retries": request.retries,
        "filter": request.filter,
        "limit": request.limit,
        "sandbox": server.sandbox,
        "tasks": request.taskset or "",
    }
    try:
        return msgspec.convert(fields, RunConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error


def tasks_of(request: RolloutJobRequest, server: ServiceDefaults) -> list[Task]:
    """Those of the job, at least one."""
    found = select_tasks(_load(request, server), config_of(request, server))
    if not found:
        raise ConfigError("no task matches", hint="see filter and limit, and what the taskset holds")
    if (count := len(found) * len(request.agents or (server.agent,)) * request.attempts) > MAX_ROLLOUTS:
        raise ConfigError(f"{count:,} rollouts are more than {MAX_ROLLOUTS:,}", hint="ask for them in several jobs")
    return found


def _load(request: RolloutJobRequest, server: ServiceDefaults) -> list[Task]:
    """Rows of a client are an unknown author's, wherever this server was started: their files come with their contents."""
    if request.taskset is not None:
        return list(Taskset.load(_resolve_below(server.tasks, request.taskset)))
    rows = enumerate(request.tasks or ())
    mark = partial(mark_untrusted, root=None)
    return list(Taskset(as_task(row, where=f"tasks[{number}]", mark=mark) for number, row in rows))


def _resolve_below(root: Path | None, name: str) -> str:
    if root is None:
        raise ConfigError("this server has no tasksets", hint="send tasks, or serve with --tasks FOLDER")
    name, _, fragment = name.replace("\0", "?").partition("#")
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()) or not path.exists():
        found = ", ".join(sorted(child.name for child in root.iterdir())[:20])
        raise ConfigError(f"there is no taskset {name!r}", hint=f"there are {found}")
    return f"{path}#{fragment}" if fragment else str(path)


def _clients() -> list[str]:
    return [option.name for option in OPTIONS.values() if option.setter == "client"]
