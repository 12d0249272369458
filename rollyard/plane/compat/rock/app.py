"""Both halves as one ASGI app; the key is the first part of the path."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Mount

from rollyard.plane.compat.rock.callers import RockCallers
from rollyard.plane.compat.rock.gem import Gem
from rollyard.plane.compat.rock.sandboxes import Sandboxes
from rollyard.plane.gateway.gateway import Gateway
from rollyard.plane.http.request_log import RequestLog
from rollyard.plane.service.access import Access
from rollyard.plane.service.instances import Instances


def rock_app(prefix: str, instances: Instances, gateway: Gateway, access: Access, log: RequestLog) -> Starlette:
    callers = RockCallers(access, instances)
    routes = [*Sandboxes(instances, callers).routes(), *Gem(instances, gateway, callers).routes()]
    return Starlette(routes=[Mount(f"{prefix}/{{key}}", routes=routes)], middleware=[log.watch("rock")])
