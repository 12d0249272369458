"""The services of a task: sandboxes of their own beside the agent's, on its network, up before the agent starts.

They share the loopback of the agent's sandbox, so each is reached by its name at its own port, and not from outside. The agent
runs nothing in them, so they outlive it: each lives on while the tests run, or ends before them, as the task says.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import NamedTuple

import anyio
import msgspec

from rollyard.core.errors import CommandFailed, ConfigError, Error
from rollyard.core.limits import Deadline
from rollyard.core.protocols import Backend, Job, Sandbox
from rollyard.core.sandbox import SandboxSpec
from rollyard.core.task import Site, Task
from rollyard.images.build_types import Built, Images
from rollyard.runs.rollout.provision import Provision
from rollyard.runs.rollout.stages import Stages
from rollyard.tasks.harbor.compose import Condition, Services, TaskService, read_services
from rollyard.tasks.host_variables import resolve_env
from rollyard.tasks.trust import readable_variables

_CLOSE_S = 30.0
_LOOK_S = 0.25  # between two looks at a service that is coming up
_LOG = 4096


class RunningService(NamedTuple):
    service: TaskService
    sandbox: Sandbox
    job: Job


class ServiceStarter(NamedTuple):
    """What opens the services of one rollout: `place` is the agent's, `main` its sandbox."""

    task: Task
    place: SandboxSpec
    main: Sandbox
    backend: Backend
    provision: Provision
    stages: Stages


def find_services(task: Task) -> Services | None:
    return None if task.compose is None else read_services(task.compose)


def with_services(place: SandboxSpec, found: Services | None) -> SandboxSpec:
    """The agent's place, with the names of the services and the volumes that it shares with them."""
    if found is None:
        return place
    return msgspec.structs.replace(place, names=found.names, volumes=found.main.volumes)


def count_limit(task: Task, found: Services | None, boot_s: float, must_pull: Callable[[str], bool]) -> float:
    """What opening the services may take beyond the agent's own sandbox."""
    if found is None:
        return 0.0
    made = [one.build is not None or must_pull(one.image) for one in found.others]
    return len(made) * boot_s + sum(made) * task.build_timeout_s


async def start_services(
    starter: ServiceStarter, found: Services, deadline: Deadline, stack: AsyncExitStack
) -> tuple[RunningService, ...]:
    """Each after those that it depends on. All are up when this returns, and those that have a healthcheck are healthy."""
    running: dict[str, RunningService] = {}
    for service in found.others:
        await _await_all(service, running, deadline)
        running[service.name] = await _start(starter, service, deadline, stack)
        await starter.stages.tell(
            "service.started", service=service.name, sandbox_id=running[service.name].sandbox.id, verify=service.verify
        )
    await _await_all(found.main, running, deadline)
    ended = {
        name
        for one in (found.main, *found.others)
        for name, how in one.depends_on.items()
        if how == "service_completed_successfully"
    }
    for name, one in running.items():
        if name not in ended:
            await _await(one, "service_started" if one.service.healthcheck is None else "service_healthy", deadline)
    return tuple(running.values())


async def start_command(starter: ServiceStarter, main: TaskService, built: Built) -> None:
    """The command that the file gives to `main`, in the agent's sandbox. It ends with the agent's processes."""
    if main.command is None:
        return
    if starter.place.workdir is not None:
        await starter.main.mkdir(starter.place.workdir, user=starter.place.user)
    job = await starter.main.start(await _find_command(starter, main, built))
    if code := await job.poll():
        raise await _failure_of(RunningService(main, starter.main, job), f"ended with {code} before the agent started")
    await starter.stages.tell("service.started", service=main.name, sandbox_id=starter.main.id, verify="stop")


async def _start(
    starter: ServiceStarter, service: TaskService, deadline: Deadline, stack: AsyncExitStack
) -> RunningService:
    task, place = starter.task, starter.place
    site = Site(
        image=service.image,
        build=service.build,
        resources=service.resources,
        build_timeout_s=task.build_timeout_s,
        build_hosts=task.build_hosts,
        pull=task.pull,
    )
    built = await starter.provision.image(site, starter.backend, deadline)
    where = f"task {task.id}: services.{service.name}.environment"
    spec = msgspec.structs.replace(
        place,
        image=built.image,
        layers=(),
        mounts=(),
        volumes=service.volumes,
        beside=starter.main.id,
        env={**built.env, **resolve_env(service.env, readable_variables(task), where=where)},
        workdir=service.workdir or built.workdir or None,
        user=service.user or built.user,
        resources=service.resources,
        labels={**place.labels, "rollyard.role": "service", "rollyard.service": service.name},
    )
    argv = await _find_command(starter, service, built)
    sandbox = await starter.backend.open(spec)
    stack.push_async_callback(_close, starter.stages, service, sandbox)
    return RunningService(service, sandbox, await sandbox.start(argv))


async def _find_command(starter: ServiceStarter, service: TaskService, built: Built) -> tuple[str, ...]:
    """As an engine has it: the file's own words first, and with an entrypoint of its own the image's CMD does not count."""
    images = starter.backend if isinstance(starter.backend, Images) else starter.provision.images
    image = built if built.entrypoint or built.cmd or built.ran or built.cached else await images.resolve(built.image)
    entrypoint = image.entrypoint if service.entrypoint is None else service.entrypoint
    command = image.cmd if service.command is None and service.entrypoint is None else service.command or ()
    if not entrypoint and not command:
        raise ConfigError(
            f"task {starter.task.id!r}: service {service.name!r} has nothing to run",
            hint="say command in the compose file, or CMD in its Dockerfile",
        )
    return (*entrypoint, *command)


async def _await_all(service: TaskService, running: dict[str, RunningService], deadline: Deadline) -> None:
    for name, condition in service.depends_on.items():
        await _await(running[name], condition, deadline)


async def _await(one: RunningService, condition: Condition, deadline: Deadline) -> None:
    if condition == "service_completed_successfully":
        done = await one.job.wait(max(1.0, deadline.left))
        if done.exit_code != 0:
            raise await _failure_of(one, f"ended with {done.exit_code}, and others wait for it to succeed")
    elif condition == "service_healthy":
        await _await_health(one, deadline)
    elif (code := await one.job.poll()) is not None:
        raise await _failure_of(one, f"ended with {code} before the agent started")


async def _await_health(one: RunningService, deadline: Deadline) -> None:
    """Looked at more often than the file says, and given up when the file says: a rollout waits for nothing else."""
    check = one.service.healthcheck
    assert check is not None
    until = anyio.current_time() + check.start_period_s + check.retries * check.interval_s
    while True:
        limit_s = max(1.0, min(check.timeout_s, deadline.left))
        done = await one.sandbox.exec(check.command, timeout=limit_s)
        if done.ok:
            return
        if (code := await one.job.poll()) is not None:
            raise await _failure_of(one, f"ended with {code} before it was healthy")
        if anyio.current_time() >= until:
            raise await _failure_of(one, f"is not healthy: {check.command!r} says {done.text[-200:].strip()!r}")
        await anyio.sleep(min(_LOOK_S, check.interval_s))


async def _failure_of(one: RunningService, what: str) -> CommandFailed:
    out, err = await one.job.tail(_LOG), await one.job.tail(_LOG, stderr=True)
    said = (err or out).decode("utf-8", "replace").strip()[-400:]
    return CommandFailed(
        f"service {one.service.name!r} {what}: {said}",
        exit_code=await one.job.poll(),
        stdout=out.decode("utf-8", "replace"),
        stderr=err.decode("utf-8", "replace"),
    )


async def stop_services(services: tuple[RunningService, ...]) -> None:
    """End those that are not to live while the tests run."""
    for one in services:
        if one.service.verify == "stop":
            await one.sandbox.kill()


async def _close(stages: Stages, service: TaskService, sandbox: Sandbox) -> None:
    with anyio.move_on_after(_CLOSE_S, shield=True):
        try:
            await sandbox.kill()
        except Error as error:  # what was judged stands; its TTL and the reaper end it by its labels
            await stages.tell("sandbox.not_closed", sandbox_id=sandbox.id, error=str(error))
            return
        await stages.tell("service.closed", service=service.name, sandbox_id=sandbox.id)
