"""A `Task` is frozen data: what to do, where, within which limits, and how it is judged. Loading one from a folder, a row
or a class is the work of the package `tasks`; `runs` runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from rollyard.core.limits import Limits
from rollyard.core.remote_task import TaskConfig
from rollyard.core.sandbox import Resources
from rollyard.core.sequences import check_sequences

Grade = Literal["sealed", "shared", "live"]


class File(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file to put into the sandbox: inline `data`, or a host `source` (file or directory)."""

    path: str
    data: bytes | None = None
    source: str | None = None
    mode: int | None = None


class McpServer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An MCP server the agent may use: `command` for stdio, `url` for streamable HTTP or SSE."""

    name: str
    transport: Literal["stdio", "http", "sse"] = "http"
    url: str | None = None
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    headers: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        check_sequences(self)


class Healthcheck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    start_interval_s: float = 5.0
    retries: int = 3


class Artifact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    source: str
    destination: str | None = None
    exclude: tuple[str, ...] = ()
    service: str | None = None

    def __post_init__(self) -> None:
        check_sequences(self)


class CollectHook(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    command: str
    service: str = "main"
    timeout_s: float = 60.0
    user: str | None = None


class Site(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where something runs, as a task describes it: the agent's place (a `Task` is one) or a verifier's own. `env` values
    may be `${VAR}` or `${VAR:-default}`, resolved from the host only when the sandbox opens, so that no secret is kept in
    a task. `network` is none, allowlist or host; None means none."""

    image: str = "host"
    build: str | None = None  # host directory with a Dockerfile
    compose: str | None = None  # host path of a compose file
    layers: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    workdir: str | None = None
    resources: Resources = Resources()
    network: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    healthcheck: Healthcheck | None = None
    mcp: tuple[McpServer, ...] = ()
    skills: str | None = None  # a directory inside the sandbox
    os: Literal["linux", "windows"] = "linux"
    build_timeout_s: float = 600.0
    build_hosts: tuple[str, ...] = ()  # what its Dockerfile's commands may reach; the caller's word, never the task's
    pull: tuple[str, ...] = ()  # registries that images which are not here are pulled from; the caller's word too

    def __post_init__(self) -> None:
        check_sequences(self, commands=("setup",))


class VerifierSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the task is judged. `kind` names a verifier in the registry; `options` are its own. `site` is a place of its own
    for a sealed verdict (None: a fresh copy of the task's). `tests` are host directories laid over each other at `/tests`,
    unless the site's image brings them (`bundled`). `layers` are read-only tools that only the verifier sees."""

    kind: str
    grade: Grade = "sealed"
    site: Site | None = None
    layers: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    bundled: bool = False
    carry_workdir: bool = True  # sealed: take the working directory along, not only the declared artifacts
    safe_path: bool = True  # Python's own modules stand before those of the working directory
    env: Mapping[str, str] = {}
    user: str | None = None
    timeout_s: float | None = None
    network: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    collect: tuple[CollectHook, ...] = ()
    options: Mapping[str, Any] = {}

    def __post_init__(self) -> None:
        check_sequences(self)


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of a multi-step task; all steps share one sandbox. What is unset here is the task's."""

    name: str
    instruction: str
    history: str | None = None  # ATIF prior context, JSON text
    workdir_files: str | None = None  # host directory laid over the working directory; its setup.sh is run
    verifier: VerifierSpec | None = None
    min_reward: Mapping[str, float] | None = None
    agent_timeout_s: float | None = None
    agent_user: str | None = None
    network: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    healthcheck: Healthcheck | None = None
    artifacts: tuple[Artifact, ...] = ()
    solution: str | None = None

    def __post_init__(self) -> None:
        check_sequences(self)


class Task(Site, frozen=True, kw_only=True, omit_defaults=True):
    """`digest` is the identity of its content; `id` is its name inside its taskset. `source` is the host folder it came
    from, `solution` the host folder the oracle runs, `package` what its author says about it (name, version, authors ...).
    `remote` is an environment elsewhere that is made for each attempt: its tools are what the agent works with."""

    id: str
    instruction: str
    digest: str = ""
    files: tuple[File, ...] = ()
    user: str | None = None  # the agent's
    setup: tuple[str, ...] = ()
    setup_network: str | None = None  # what setup may reach, where that is not what the agent may
    setup_hosts: tuple[str, ...] = ()
    limits: Limits | None = None
    artifacts: tuple[Artifact, ...] = ()
    verifier: VerifierSpec | None = None
    solution: str | None = None
    solution_env: Mapping[str, str] = {}
    steps: tuple[Step, ...] = ()
    step_reward: Literal["mean", "final"] = "mean"
    history: str | None = None  # ATIF prior context, JSON text
    remote: TaskConfig | None = None
    package: Mapping[str, Any] = {}
    metadata: Mapping[str, Any] = {}
    source: str | None = None
    trusted: bool = True  # set by what loads the task, never by what is loaded
    host_env: tuple[str, ...] = ()  # host variables that an untrusted task may read
