"""All parts as one ASGI app."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.applications import Starlette

from rollyard.core.ids import secret as new_secret
from rollyard.plane.compat.fleet.control import FleetControl
from rollyard.plane.compat.fleet.guard import Admit, Guard, admit_all
from rollyard.plane.compat.fleet.instances import WorldInstances
from rollyard.plane.compat.fleet.job_routes import JobRoutes
from rollyard.plane.compat.fleet.job_worker import JobWorker
from rollyard.plane.compat.fleet.jobs import Jobs, Runner
from rollyard.plane.compat.fleet.manager import Manager
from rollyard.plane.compat.fleet.tasks import FleetTask, TaskCatalog, TaskRoutes, Tasks
from rollyard.plane.compat.fleet.verifiers import StoredVerifier, VerifierCatalog, Verifiers
from rollyard.plane.compat.fleet.world import World, WorldCatalog
from rollyard.plane.engines.backend import BackendEngine
from rollyard.plane.http.request_log import RequestLog
from rollyard.plane.parts import PlaneParts
from rollyard.plane.service.instance_backend import InstanceBackend
from rollyard.plane.service.typed_records import TypedRecords

NOBODY = "fleet"  # who owns the sandboxes that verifiers run in


def fleet_app(
    worlds: Iterable[World],
    plane: PlaneParts,
    engine: BackendEngine,
    *,
    admit: Admit = admit_all,
    tasks: Tasks | None = None,
    secret: str | None = None,
    runner: Callable[[Guard], Runner] | None = None,
    log: RequestLog | None = None,
) -> Starlette:
    """Over the plane's instances on `engine`. `runner` makes what works on the sessions of jobs; without it jobs are refused.
    `app.state.places` has an `aclose`; `app.state.worker`, where there is a runner, works for as long as its `forever` runs."""
    guard = Guard(admit, secret or new_secret("ryf"))
    checks = InstanceBackend(plane.instances, engine, owner=lambda labels: NOBODY)
    places = WorldInstances(plane.instances, engine, WorldCatalog(worlds), checks=checks)
    own = tasks or Tasks()
    verifiers = VerifierCatalog(TypedRecords(plane.store, "fleet_verifier", StoredVerifier), own.verifiers())
    catalog = TaskCatalog(own, TypedRecords(plane.store, "fleet_task", FleetTask), verifiers)
    jobs = Jobs(plane.store, catalog, runs=runner is not None, clock=plane.clock)
    app = Starlette(
        routes=[
            *FleetControl(places, guard).routes(),
            *Verifiers(places, guard, verifiers).routes(),
            *TaskRoutes(catalog, guard).routes(),
            *JobRoutes(jobs, guard).routes(),
            *Manager(places, guard).routes(),
        ],
        middleware=[] if log is None else [log.watch("fleet")],
    )
    app.state.places, app.state.guard = places, guard
    app.state.worker = JobWorker(jobs, places, runner(guard)) if runner is not None else None
    return app
