"""All parts as one ASGI app."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.applications import Starlette

from rollyard.core.ids import secret as new_secret
from rollyard.core.protocols import Backend
from rollyard.plane.compat.fleet.control import FleetControl
from rollyard.plane.compat.fleet.guard import Admit, Guard, anybody
from rollyard.plane.compat.fleet.instances import Places
from rollyard.plane.compat.fleet.job_routes import JobRoutes
from rollyard.plane.compat.fleet.jobs import Jobs, Runner
from rollyard.plane.compat.fleet.manager import Manager
from rollyard.plane.compat.fleet.tasks import TaskRoutes, Tasks
from rollyard.plane.compat.fleet.verifiers import Shelf, Verifiers
from rollyard.plane.compat.fleet.world import World, WorldCatalog


def fleet_app(
    worlds: Iterable[World],
    backend: Backend,
    *,
    admit: Admit = anybody,
    tasks: Tasks | None = None,
    limit: int = 100,
    secret: str | None = None,
    runner: Callable[[Guard], Runner] | None = None,
) -> Starlette:
    """`app.state.places` are its instances: `await app.state.places.aclose()` ends them all. `runner` makes what works on the
    sessions of jobs; without it jobs are refused. `app.state.jobs` are those."""
    guard = Guard(admit, secret or new_secret("ryf"))
    places = Places(backend, WorldCatalog(worlds), guard.name, limit=limit)
    shelf, tasks = Shelf(), tasks or Tasks()
    jobs = Jobs(places, tasks, runner(guard) if runner is not None else None)
    app = Starlette(
        routes=[
            *FleetControl(places, guard).routes(),
            *Verifiers(places, guard, shelf).routes(),
            *TaskRoutes(tasks, shelf, guard).routes(),
            *JobRoutes(jobs, guard).routes(),
            *Manager(places, guard).routes(),
        ]
    )
    app.state.places, app.state.guard, app.state.jobs = places, guard, jobs
    return app
