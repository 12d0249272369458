"""Both halves as one ASGI app."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.applications import Starlette

from rollyard.core.protocols import Backend
from rollyard.core.sandbox import SandboxSpec
from rollyard.plane.e2b.boxes import Boxes
from rollyard.plane.e2b.control import Control
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
    base = spec or SandboxSpec()
    boxes = Boxes(backend, key=key, spec=base, templates=templates or {})
    return Starlette(routes=[*Control(boxes, key=key, spec=base).routes(), *Envd(boxes).routes()])
