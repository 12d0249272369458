"""All parts as one ASGI app."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.applications import Starlette

from rollyard.core.ids import secret as new_secret
from rollyard.core.protocols import Backend
from rollyard.plane.fleet.control import Control
from rollyard.plane.fleet.guard import Admit, Guard, anybody
from rollyard.plane.fleet.manager import Manager
from rollyard.plane.fleet.places import Places
from rollyard.plane.fleet.tasks import TaskRoutes, Tasks
from rollyard.plane.fleet.verifiers import Shelf, Verifiers
from rollyard.plane.fleet.worlds import Catalog, World


def fleet_app(
    worlds: Iterable[World],
    backend: Backend,
    *,
    admit: Admit = anybody,
    tasks: Tasks | None = None,
    limit: int = 100,
    secret: str | None = None,
) -> Starlette:
    """`app.state.places` are its instances: `await app.state.places.aclose()` ends them all."""
    guard = Guard(admit, secret or new_secret("ryf"))
    places = Places(backend, Catalog(worlds), guard.name, limit=limit)
    shelf = Shelf()
    app = Starlette(
        routes=[
            *Control(places, guard).routes(),
            *Verifiers(places, guard, shelf).routes(),
            *TaskRoutes(tasks or Tasks(), shelf, guard).routes(),
            *Manager(places, guard).routes(),
        ]
    )
    app.state.places, app.state.guard = places, guard
    return app
