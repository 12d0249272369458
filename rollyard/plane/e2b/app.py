"""Both halves as one ASGI app, over a backend or over the control plane's instances."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.routing import Route

from rollyard.core.protocols import Backend
from rollyard.core.sandbox import SandboxSpec
from rollyard.plane.e2b.backend_boxes import BackendBoxes
from rollyard.plane.e2b.boxes import Boxes
from rollyard.plane.e2b.control import E2bControl
from rollyard.plane.e2b.envd import Envd


def e2b_app(
    backend: Backend,
    *,
    key: str | None = None,
    spec: SandboxSpec | None = None,
    templates: Mapping[str, SandboxSpec] | None = None,
) -> Starlette:
    """The app over an entered backend. `spec` is what the template `base` opens, and what others change the image of;
    `templates` names further ones. Without a `key` every client is let in: serve that on loopback only."""
    boxes = BackendBoxes(backend, key=key, spec=spec or SandboxSpec(), templates=templates or {})
    return Starlette(routes=e2b_routes(boxes))


def e2b_routes(boxes: Boxes) -> list[Route]:
    return [*E2bControl(boxes).routes(), *Envd(boxes).routes()]
