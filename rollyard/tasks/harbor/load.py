"""A Harbor task folder as a `Task`: `task.toml`, instruction, environment, tests, solution, steps.

Three rules differ from Harbor on purpose, and are documented: an unset network mode means no network; an explicit `public`
is closed unless the caller asks for it; an unknown key is an error. What Harbor has no word for (a grade, setup commands,
read-only layers, another verifier) stands in `[metadata.rollyard]`, which Harbor ignores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.limits import Limits
from rollyard.core.printable import printable
from rollyard.core.sequences import as_commands
from rollyard.core.task import (
    Artifact,
    File,
    Site,
    Step,
    Task,
)
from rollyard.tasks.harbor import schema
from rollyard.tasks.harbor.digest import folder_digest
from rollyard.tasks.harbor.environment_table import healthcheck, read_site
from rollyard.tasks.harbor.taskfile import ExtraFile, TaskFolder, user_name
from rollyard.tasks.harbor.verifier_table import read_verifier


def load_folder(folder: str | Path) -> Task:
    try:
        return _load_folder(Path(folder).resolve())
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror or error}") from error
    except (ValueError, RuntimeError) as error:  # what strange names, links, encodings and nestings make readers raise
        raise ConfigError(f"{printable(str(folder))}: it cannot be read: {error}") from error


def _load_folder(root: Path) -> Task:
    load = TaskFolder(root)
    file, extra = load.file, load.extra
    try:
        site = read_site(load, file.environment, root / "environment")
        steps = tuple(_step(load, step, number) for number, step in enumerate(file.steps or ()))
        verifier = None if steps else read_verifier(load, None, "verifier")
        limits = _limits(load, steps)
    except ConfigError as error:
        if str(load.root) in error.message:
            raise
        raise ConfigError(f"{load.toml}: {error.message}", hint=error.hint) from error
    agent_network = load.network(file.agent)
    setup_network: tuple[str | None, tuple[str, ...]] = (None, ())
    if agent_network[0] is not None:
        setup_network = (site.network, site.allowed_hosts)
        site = msgspec.structs.replace(site, network=agent_network[0], allowed_hosts=agent_network[1])
    solution = root / "solution"
    task_id = file.task.name if file.task is not None else root.name
    if not task_id.isprintable():
        raise ConfigError(f"{task_id!r} is no name for a task", hint="rename its folder: printable UTF-8 characters")
    return Task(
        **{name: getattr(site, name) for name in Site.__struct_fields__},
        id=task_id,
        instruction="" if steps else load.text(root / "instruction.md"),
        digest=folder_digest(root),
        files=tuple(_extra_file(load, item) for item in extra.files),
        user=user_name(file.agent.user),
        setup=as_commands(extra.setup, "setup"),
        setup_network=setup_network[0],
        setup_hosts=setup_network[1],
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
        fields = msgspec.to_builtins(file.task)
        fields["authors"] = [{k: v for k, v in author.items() if v is not None} for author in fields["authors"]]
        package = {k: v for k, v in fields.items() if v not in (None, "", [])}
    if file.source is not None:
        package["source"] = file.source
    return package


def _extra_file(load: TaskFolder, item: ExtraFile) -> File:
    source = (load.root / item.source).resolve()
    if not source.is_relative_to(load.root) or not source.exists():
        raise load.fail("metadata.rollyard.files", f"no {item.source!r} in the task folder")
    return File(path=item.path, source=str(source), mode=item.mode)


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


def _step(load: TaskFolder, table: schema.StepTable, number: int) -> Step:
    directory = load.root / "steps" / table.name
    if not directory.is_dir():
        raise load.fail(f"steps[{number}].name", f"the folder steps/{table.name} does not exist")
    if not directory.resolve().is_relative_to(load.root):
        raise load.fail(f"steps[{number}].name", f"steps/{table.name} leads out of the task folder")
    network, hosts = load.network(table.agent)
    gate = table.min_reward
    solution, workdir = directory / "solution", directory / "workdir"
    task_agent = load.file.agent
    timeout = table.agent.timeout_sec if table.agent.timeout_sec is not None else task_agent.timeout_sec
    return Step(
        name=table.name,
        instruction=load.text(directory / "instruction.md"),
        history=_history(directory),
        workdir_files=str(workdir) if workdir.is_dir() else None,
        verifier=read_verifier(load, table, f"steps[{number}].verifier"),
        min_reward={"reward": float(gate)} if isinstance(gate, (int, float)) else gate,
        agent_timeout_s=timeout,
        agent_user=user_name(table.agent.user if table.agent.user is not None else task_agent.user),
        network=network,
        allowed_hosts=hosts,
        healthcheck=healthcheck(table.healthcheck),
        artifacts=_artifacts(table.artifacts),
        solution=str(solution) if (solution / "solve.sh").is_file() else None,
    )


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


def _limits(load: TaskFolder, steps: tuple[Step, ...]) -> Limits | None:
    """Seconds for the agent and the verifier; None when the task names none."""
    agent = load.file.agent
    said = {"agent": agent.timeout_sec, "verify": load.file.verifier.timeout_sec, "install": agent.setup_timeout_sec}
    given = {name: value for name, value in said.items() if value is not None}
    wanted = {**given, **step_limits(steps)} if steps else given
    wanted |= load.extra.limits
    if not wanted:
        return None
    try:
        return msgspec.convert(wanted, Limits)
    except (msgspec.ValidationError, ConfigError) as error:
        raise load.fail("timeouts", str(error)) from error


def is_task(folder: Path) -> bool:
    return (folder / "task.toml").is_file()
