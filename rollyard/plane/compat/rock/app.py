"""Both halves as one ASGI app; the key is the first part of the path."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Mount

from rollyard.plane.compat.rock.callers import RockCallers
from rollyard.plane.compat.rock.gem import Gem
from rollyard.plane.compat.rock.sandboxes import Sandboxes
from rollyard.plane.compat.rock.shells import RockShell, Shells
from rollyard.plane.http.request_log import RequestLog
from rollyard.plane.parts import PlaneParts
from rollyard.plane.service.typed_records import TypedRecords


def rock_app(prefix: str, plane: PlaneParts, log: RequestLog) -> Starlette:
    instances, callers = plane.instances, RockCallers(plane.access, plane.instances)
    shells = Shells(TypedRecords(plane.store, "rock_shell", RockShell))
    routes = [*Sandboxes(instances, callers, shells).routes(), *Gem(instances, plane.gateway, callers).routes()]
    return Starlette(routes=[Mount(f"{prefix}/{{key}}", routes=routes)], middleware=[log.watch("rock")])
