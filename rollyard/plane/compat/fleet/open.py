"""The Fleet-shaped server on a plane: its instances are the plane's, its keys are the plane's, its owners are the plane's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from starlette.applications import Starlette

from rollyard.core.errors import PlaneUnauthorized
from rollyard.core.protocols import Policy
from rollyard.plane.compat.fleet import FleetRefusal, Tasks, World, fleet_app, load_worlds
from rollyard.plane.compat.fleet.guard import Admit, Guard
from rollyard.plane.compat.fleet.jobs import Runner
from rollyard.plane.compat.fleet.rollouts import RolloutRunner
from rollyard.plane.engines.backend import BackendEngine
from rollyard.plane.http.request_log import RequestLog
from rollyard.plane.parts import PlaneParts
from rollyard.plane.service.access import Access
from rollyard.runs.rollout.open_policy import open_policy
from rollyard.store import Store


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`worlds` is a folder of folders with a `world.toml`; `tasks` are files that `/v1/tasks` begins with; `job_policy` (such as
    `scripted:FILE`) answers the model calls of jobs, which are refused without it."""

    worlds: Path | None = None
    tasks: tuple[Path, ...] = ()
    job_policy: str | None = None


class FleetParts(NamedTuple):
    """The options read and opened. Whatever may be refused about them has been."""

    worlds: list[World]
    tasks: Tasks
    policy: Policy | None


@asynccontextmanager
async def open_fleet(options: FleetOptions) -> AsyncGenerator[FleetParts]:
    worlds = [] if options.worlds is None else load_worlds(options.worlds)
    tasks = Tasks.from_files(*options.tasks)
    policy = None if options.job_policy is None else await open_policy(options.job_policy)
    try:
        yield FleetParts(worlds, tasks, policy)
    finally:
        if policy is not None:
            await policy.aclose()


@asynccontextmanager
async def open_fleet_app(
    plane: PlaneParts,
    *,
    secret: str,
    url: str,
    given: FleetParts,
    store: Store | None,
    log: RequestLog,
) -> AsyncGenerator[Starlette | None]:
    """None where no engine of the plane runs programs. `url` is where the API will be; rollouts of jobs go to `store`."""
    engine = next((one for one in plane.instances.engines.values() if isinstance(one, BackendEngine)), None)
    if engine is None:
        yield None
        return
    async with AsyncExitStack() as stack:
        runner: Callable[[Guard], Runner] | None = None
        if (policy := given.policy) is not None:

            def make_runner(guard: Guard) -> Runner:
                token = guard.instance_token
                return RolloutRunner(policy, backend=engine.backend, store=store, url=url, token=token)

            runner = make_runner
        app = fleet_app(
            given.worlds,
            plane,
            engine,
            admit=_admission(plane.access),
            tasks=given.tasks,
            secret=secret,
            runner=runner,
            log=log,
        )
        stack.push_async_callback(app.state.places.aclose)
        if app.state.worker is not None:
            stack.push_async_callback(_stop, asyncio.create_task(app.state.worker.forever()))
        yield app


async def _stop(work: asyncio.Task[None]) -> None:
    work.cancel()
    await asyncio.wait([work])


def _admission(access: Access) -> Admit:
    async def admit(header: str | None) -> str:
        try:
            caller = await access.caller(header)
        except PlaneUnauthorized as error:
            raise FleetRefusal(401, error.message) from error
        if caller.role == "agent":
            raise FleetRefusal(403, "a key of role agent may not do this")
        return caller.owner

    return admit
