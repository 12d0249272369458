"""Both halves as one ASGI app, over a backend or over the control plane's instances."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import Route

from rollyard.core.protocols import Backend
from rollyard.core.sandbox import SandboxSpec
from rollyard.plane.compat.e2b.backend_boxes import BackendBoxes
from rollyard.plane.compat.e2b.boxes import Boxes
from rollyard.plane.compat.e2b.control import E2bControl
from rollyard.plane.compat.e2b.envd import Envd
from rollyard.plane.compat.e2b.template_api import TemplateApi


def e2b_app(
    backend: Backend,
    *,
    key: str | None = None,
    spec: SandboxSpec | None = None,
    templates: Mapping[str, SandboxSpec] | None = None,
    folder: Path | None = None,
) -> Starlette:
    """The app over an entered backend. `spec` is what the template `base` opens, and what others change the image of;
    `templates` names further ones, and those that clients build are kept in `folder`, or as
    long as the app is. Without a `key` every client is let in: serve that on loopback only."""
    boxes = BackendBoxes(backend, key=key, spec=spec or SandboxSpec(), templates=templates or {}, folder=folder)
    return Starlette(routes=e2b_routes(boxes))


def e2b_routes(boxes: Boxes) -> list[Route]:
    control = E2bControl(boxes)
    return [*control.routes(), *TemplateApi(boxes).routes(), *Envd(boxes).routes(), *control.refusals()]
