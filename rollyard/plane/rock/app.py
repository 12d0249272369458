"""Both halves as one ASGI app; the key is the first part of the path."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Mount

from rollyard.plane.access import Access
from rollyard.plane.gateway import Gateway
from rollyard.plane.instances import Instances
from rollyard.plane.rock.callers import RockCallers
from rollyard.plane.rock.gem import Gem
from rollyard.plane.rock.sandboxes import Sandboxes


def rock_app(prefix: str, instances: Instances, gateway: Gateway, access: Access) -> Starlette:
    callers = RockCallers(access, instances)
    routes = [*Sandboxes(instances, callers).routes(), *Gem(instances, gateway, callers).routes()]
    return Starlette(routes=[Mount(f"{prefix}/{{key}}", routes=routes)])
