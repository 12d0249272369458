"""All parts as one ASGI app."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.applications import Starlette

from rollyard.core.ids import secret as new_secret
from rollyard.plane.compat.fleet.control import FleetControl
from rollyard.plane.compat.fleet.guard import Admit, Guard, anybody
from rollyard.plane.compat.fleet.instances import WorldInstances
from rollyard.plane.compat.fleet.job_routes import JobRoutes
from rollyard.plane.compat.fleet.jobs import Jobs, Runner
from rollyard.plane.compat.fleet.manager import Manager
from rollyard.plane.compat.fleet.tasks import TaskRoutes, Tasks
from rollyard.plane.compat.fleet.verifiers import Shelf, Verifiers
from rollyard.plane.compat.fleet.world import World, WorldCatalog
from rollyard.plane.engines.backend import BackendEngine
from rollyard.plane.http.request_log import RequestLog
from rollyard.plane.service.instance_backend import InstanceBackend
from rollyard.plane.service.instances import Instances

NOBODY = "fleet"  # who owns the sandboxes that verifiers run in


def fleet_app(
    worlds: Iterable[World],
    instances: Instances,
    engine: BackendEngine,
    *,
    admit: Admit = anybody,
    tasks: Tasks | None = None,
    secret: str | None = None,
    runner: Callable[[Guard], Runner] | None = None,
    log: RequestLog | None = None,
) -> Starlette:
    """Over the plane's instances on `engine`. `runner` makes what works on the sessions of jobs; without it jobs are refused.
    `app.state` has `places` and `jobs`; both have an `aclose`."""
    guard = Guard(admit, secret or new_secret("ryf"))
    checks = InstanceBackend(instances, engine, owner=lambda labels: NOBODY)
    places = WorldInstances(instances, engine, WorldCatalog(worlds), checks=checks)
    shelf, tasks = Shelf(), tasks or Tasks()
    jobs = Jobs(places, tasks, runner(guard) if runner is not None else None)
    app = Starlette(
        routes=[
            *FleetControl(places, guard).routes(),
            *Verifiers(places, guard, shelf).routes(),
            *TaskRoutes(tasks, shelf, guard).routes(),
            *JobRoutes(jobs, guard).routes(),
            *Manager(places, guard).routes(),
        ],
        middleware=[] if log is None else [log.watch("fleet")],
    )
    app.state.places, app.state.guard, app.state.jobs = places, guard, jobs
    return app
