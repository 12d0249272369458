"""Both halves as one ASGI app over the control plane's instances."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route

from rollyard.core.ids import secret as new_secret
from rollyard.plane.compat.e2b.control import E2bControl
from rollyard.plane.compat.e2b.envd import Envd
from rollyard.plane.compat.e2b.instance_boxes import InstanceBoxes
from rollyard.plane.compat.e2b.template_api import TemplateApi
from rollyard.plane.http.request_log import RequestLog
from rollyard.plane.parts import PlaneParts


def e2b_app(
    plane: PlaneParts, *, secret: str | None = None, anonymous: bool = False, log: RequestLog | None = None
) -> Starlette:
    """The app over a plane's parts. Clients bear keys of the plane, unless it is `anonymous`: then every client is let in as one
    owner, so serve that on loopback only. `secret` signs the tokens of sandboxes; give one that outlives a restart."""
    boxes = InstanceBoxes(plane, secret=(secret or new_secret("rye")).encode(), anonymous=anonymous)
    return Starlette(routes=_routes(boxes), middleware=[] if log is None else [log.watch("e2b")])


def _routes(boxes: InstanceBoxes) -> list[Route]:
    control = E2bControl(boxes)
    return [*control.routes(), *TemplateApi(boxes).routes(), *Envd(boxes).routes(), *control.refusals()]
