"""A Harbor task folder as a `Task`: `task.toml`, instruction, environment, tests, solution, steps.

Three rules differ from Harbor on purpose, and are documented: an unset network mode means no network; an explicit `public`
is refused unless the caller allows it; an unknown key is an error. What Harbor has no word for (a grade, setup commands,
read-only layers, another verifier) stands in `[metadata.rollyard]`, which Harbor ignores.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.limits import Limits
from rollyard.core.sandbox import Resources
from rollyard.core.task import (
    Artifact,
    CollectHook,
    File,
    Grade,
    Healthcheck,
    McpServer,
    Site,
    Step,
    Task,
    VerifierSpec,
)
from rollyard.tasks import schema
from rollyard.tasks.compose import fold
from rollyard.tasks.digest import folder_digest
from rollyard.tasks.files import TaskFiles

_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_NETWORK = {"public": "host", "no-network": "none", "allowlist": "allowlist"}
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")


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
    setup: list[str] = []
    files: list[ExtraFile] = []
    limits: dict[str, float] = {}
    pids: int | None = None


class _Folder:
    """One load: the parsed file, the folder, and what the caller allows."""

    def __init__(self, root: Path, allow_network: bool) -> None:
        self.root, self.toml = root, root / "task.toml"
        self.allow_network = allow_network
        self.files = TaskFiles(root)
        raw = read_toml(self.toml)
        try:
            self.file = schema.parse(raw)
            self.extra = msgspec.convert(self.file.metadata.get("rollyard", {}), Extra)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.toml}: {field_error(error)}") from error

    def fail(self, field: str, message: str, hint: str | None = None) -> ConfigError:
        return ConfigError(f"{self.toml}: {field}: {message}", hint=hint)

    def network(self, table: schema.EnvironmentTable | Any, field: str) -> tuple[str | None, tuple[str, ...]]:
        mode = table.mode if isinstance(table, schema.EnvironmentTable) else table.network_mode
        if mode is None:
            return None, ()
        if mode == "public" and not self.allow_network:
            raise self.fail(
                f"{field}.network_mode",
                "the task asks for the public network",
                "pass allow_network=True (--allow-network), or set network_mode = 'no-network'",
            )
        return _NETWORK[mode], tuple(schema.normal_host(host) for host in table.allowed_hosts or ())

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


def load_folder(folder: str | Path, *, allow_network: bool = False) -> Task:
    root = Path(folder).resolve()
    load = _Folder(root, allow_network)
    file, extra = load.file, load.extra
    try:
        site = _site(load, file.environment, "environment", root / "environment")
        steps = tuple(_step(load, step, number) for number, step in enumerate(file.steps or ()))
        verifier = None if steps else _verifier(load, None, "verifier")
        limits = _limits(load, steps)
    except ConfigError as error:
        if str(load.root) in error.message:
            raise
        raise ConfigError(f"{load.toml}: {error.message}", hint=error.hint) from error
    agent_network = load.network(file.agent, "agent")
    if agent_network[0] is not None:
        site = msgspec.structs.replace(site, network=agent_network[0], allowed_hosts=agent_network[1])
    solution = root / "solution"
    return Task(
        **{name: getattr(site, name) for name in Site.__struct_fields__},
        id=file.task.name if file.task is not None else root.name,
        instruction="" if steps else load.text(root / "instruction.md"),
        digest=folder_digest(root),
        files=tuple(_extra_file(load, item) for item in extra.files),
        user=_user(file.agent.user),
        setup=tuple(extra.setup),
        limits=limits,
        artifacts=_artifacts(file.artifacts),
        verifier=verifier,
        solution=str(solution) if (solution / "solve.sh").is_file() else None,
        solution_env=file.solution.env,
        steps=steps,
        step_reward=file.multi_step_reward_strategy or "mean",
        history=_history(root),
        package=_package(file),
        metadata={name: value for name, value in file.metadata.items() if name != "rollyard"},
        source=str(root),
    )


def _package(file: schema.TaskFile) -> dict[str, Any]:
    package: dict[str, Any] = {}
    if file.task is not None:
        told = msgspec.to_builtins(file.task)
        told["authors"] = [{k: v for k, v in author.items() if v is not None} for author in told["authors"]]
        package = {k: v for k, v in told.items() if v not in (None, "", [])}
    if file.source is not None:
        package["source"] = file.source
    return package


def _extra_file(load: _Folder, item: ExtraFile) -> File:
    source = (load.root / item.source).resolve()
    if not source.is_relative_to(load.root) or not source.exists():
        raise load.fail("metadata.rollyard.files", f"no {item.source!r} in the task folder")
    return File(path=item.path, source=str(source), mode=item.mode)


def _site(load: _Folder, table: schema.EnvironmentTable, field: str, directory: Path) -> Site:
    network, hosts = load.network(table, field)
    compose = next((directory / name for name in _COMPOSE if (directory / name).is_file()), None)
    site = Site(
        image=load.extra.image or table.docker_image or "host",
        build=str(directory) if (directory / "Dockerfile").is_file() and load.extra.image is None else None,
        compose=str(compose) if compose is not None else None,
        layers=tuple(load.extra.layers),
        env=table.env,
        workdir=table.workdir,
        resources=Resources(
            cpus=table.cpus,
            memory_mb=schema.megabytes(table.memory) if table.memory else table.memory_mb,
            disk_mb=schema.megabytes(table.storage) if table.storage else table.storage_mb,
            pids=load.extra.pids,
            gpus=table.gpus,
            gpu_types=tuple(table.gpu_types or ()),
            tpu=f"{table.tpu.type}:{table.tpu.topology.strip()}" if table.tpu is not None else None,
        ),
        network=network,
        allowed_hosts=hosts,
        healthcheck=_healthcheck(table.healthcheck),
        mcp=tuple(_mcp(server) for server in table.mcp_servers),
        skills=table.skills_dir,
        os="windows" if table.os.lower() == "windows" else "linux",
        build_timeout_s=table.build_timeout_sec,
    )
    return fold(site)


def _healthcheck(table: schema.HealthcheckTable | None) -> Healthcheck | None:
    if table is None:
        return None
    return Healthcheck(
        command=table.command,
        interval_s=table.interval_sec,
        timeout_s=table.timeout_sec,
        start_period_s=table.start_period_sec,
        start_interval_s=table.start_interval_sec,
        retries=table.retries,
    )


def _mcp(table: schema.McpTable) -> McpServer:
    return McpServer(
        name=table.name,
        transport="stdio" if table.transport == "stdio" else "sse" if table.transport == "sse" else "http",
        url=table.url,
        command=(table.command, *table.args) if table.command else (),
        headers=table.headers,
    )


def _user(user: str | int | None) -> str | None:
    return None if user is None else str(user)


def _artifacts(entries: list[str | schema.ArtifactTable]) -> tuple[Artifact, ...]:
    return tuple(
        Artifact(source=entry)
        if isinstance(entry, str)
        else Artifact(
            source=entry.source,
            destination=entry.destination or None,
            exclude=tuple(entry.exclude),
            service=entry.service,
        )
        for entry in entries
    )


def _history(directory: Path) -> str | None:
    path = directory / "trajectory.json"
    return path.read_text() if path.is_file() else None


def _step(load: _Folder, table: schema.StepTable, number: int) -> Step:
    directory = load.root / "steps" / table.name
    if not directory.is_dir():
        raise load.fail(f"steps[{number}].name", f"the folder steps/{table.name} does not exist")
    if not directory.resolve().is_relative_to(load.root):
        raise load.fail(f"steps[{number}].name", f"steps/{table.name} leads out of the task folder")
    network, hosts = load.network(table.agent, f"steps[{number}].agent")
    gate = table.min_reward
    solution, workdir = directory / "solution", directory / "workdir"
    task_agent = load.file.agent
    timeout = table.agent.timeout_sec if table.agent.timeout_sec is not None else task_agent.timeout_sec
    return Step(
        name=table.name,
        instruction=load.text(directory / "instruction.md"),
        history=_history(directory),
        workdir_files=str(workdir) if workdir.is_dir() else None,
        verifier=_verifier(load, table, f"steps[{number}].verifier"),
        min_reward={"reward": float(gate)} if isinstance(gate, (int, float)) else gate,
        agent_timeout_s=timeout,
        agent_user=_user(table.agent.user if table.agent.user is not None else task_agent.user),
        network=network,
        allowed_hosts=hosts,
        healthcheck=_healthcheck(table.healthcheck),
        artifacts=_artifacts(table.artifacts),
        solution=str(solution) if (solution / "solve.sh").is_file() else None,
    )


def _own_site(load: _Folder, step: schema.StepTable | None) -> tuple[Site | None, bool]:
    """A separate verifier's place, and whether its image brings the tests. None: a fresh copy of the task's own."""
    task_table = load.file.verifier
    table = (step.verifier.environment if step is not None else None) or task_table.environment
    candidates = [("verifier", task_table.environment, load.root / "tests")]
    if step is not None:
        tests = load.root / "steps" / step.name / "tests"
        candidates.insert(0, (f"steps.{step.name}.verifier", step.verifier.environment, tests))
    for field, environment, tests in candidates:
        image = environment.docker_image if environment is not None else None
        if image is None and not any((tests / name).is_file() for name in ("Dockerfile", *_COMPOSE)):
            continue
        described = table or load.file.environment
        site = _site(load, described, f"{field}.environment" if table else "environment", tests)
        if image is not None:
            return msgspec.structs.replace(site, image=image, build=None, compose=None), True
        return msgspec.structs.replace(site, image="host"), True
    if table is None:
        return None, False
    own = _site(load, table, "verifier.environment", load.root / "environment")
    return msgspec.structs.replace(own, image=load.extra.image or load.file.environment.docker_image or "host"), False


def _verifier(load: _Folder, step: schema.StepTable | None, field: str) -> VerifierSpec:
    table, extra = load.file.verifier, load.extra
    own = step.verifier if step is not None else table
    separate = own.separate if own.separate is not None else bool(table.separate)
    site, bundled = _own_site(load, step) if separate else (None, False)
    grade: Grade = extra.grade or ("sealed" if separate else "shared")
    if separate and grade != "sealed":
        raise load.fail("metadata.rollyard.grade", f"{grade!r} contradicts a separate verifier environment")
    kind = extra.verifier or "harbor"
    tests = _tests(load, step, field) if kind == "harbor" and not bundled else _test_dirs(load, step)
    network, hosts = load.network(own, field)
    if network is None and own is not table:
        network, hosts = load.network(table, "verifier")
    if network is None and site is None and load.file.agent.network_mode is not None:
        network, hosts = load.network(load.file.environment, "environment")
    user = own.user if own.user is not None else table.user
    return VerifierSpec(
        kind=kind,
        grade=grade,
        site=site,
        layers=tuple(extra.verifier_layers),
        tests=tests,
        bundled=bundled,
        carry_workdir=extra.carry_workdir if extra.carry_workdir is not None else not separate,
        env={**table.env, **own.env},
        user=_user(user),
        timeout_s=own.timeout_sec if own.timeout_sec is not None else table.timeout_sec,
        network=network,
        allowed_hosts=hosts,
        collect=tuple(_collect_hook(hook) for hook in (own.collect or table.collect)),
        options=extra.options,
    )


def _collect_hook(table: schema.CollectTable) -> CollectHook:
    return CollectHook(
        command=table.command, service=table.service, timeout_s=table.timeout_sec, user=_user(table.user)
    )


def _test_dirs(load: _Folder, step: schema.StepTable | None) -> tuple[str, ...]:
    directories = [load.root / "tests"]
    if step is not None:
        directories.append(load.root / "steps" / step.name / "tests")
    return tuple(str(directory) for directory in directories if directory.is_dir())


def _tests(load: _Folder, step: schema.StepTable | None, field: str) -> tuple[str, ...]:
    directories = _test_dirs(load, step)
    scripts = [Path(directory) / "test.sh" for directory in directories]
    present = [script for script in scripts if script.is_file()]
    if not present:
        wanted = "tests/test.sh" if step is None else f"steps/{step.name}/tests/test.sh or tests/test.sh"
        raise load.fail(field, f"the task has no {wanted}")
    if all(load.files.excluded(script) for script in present):
        raise load.fail(field, f"{present[-1].relative_to(load.root)} is excluded by .harborignore")
    for directory in directories:
        for _ in load.files.walk(Path(directory)):
            pass  # refuses links that lead out of the task
    return directories


def step_limits(steps: tuple[Step, ...]) -> dict[str, float]:
    """What the steps' own timeouts add up to; a stage that no step names is left to the defaults."""
    default = Limits()
    agent = [step.agent_timeout_s for step in steps]
    verify = [step.verifier.timeout_s if step.verifier else None for step in steps]
    found: dict[str, float] = {}
    if any(value is not None for value in agent):
        found["agent"] = sum(default.agent if value is None else value for value in agent)
    if any(value is not None for value in verify):
        found["verify"] = sum(default.verify if value is None else value for value in verify)
    return found


def _limits(load: _Folder, steps: tuple[Step, ...]) -> Limits | None:
    """Seconds for the agent and the verifier; None when the task names none."""
    said = {"agent": load.file.agent.timeout_sec, "verify": load.file.verifier.timeout_sec}
    wanted = step_limits(steps) if steps else {name: value for name, value in said.items() if value is not None}
    wanted |= load.extra.limits
    if not wanted:
        return None
    try:
        return msgspec.convert(wanted, Limits)
    except (msgspec.ValidationError, ConfigError) as error:
        raise load.fail("timeouts", str(error)) from error


def is_task(folder: Path) -> bool:
    return (folder / "task.toml").is_file()
