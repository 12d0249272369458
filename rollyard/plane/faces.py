"""The compatible faces on the plane's own address: who answers a request is decided by its path.

E2B's client builds some URLs from the host alone, so its paths are at the root, beside the plane's own; `/health` is E2B's only
where the request names a sandbox.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from rollyard.plane.access import Access
from rollyard.plane.e2b.app import e2b_routes
from rollyard.plane.e2b.instance_boxes import InstanceBoxes
from rollyard.plane.instances import Instances

_E2B = (
    "/sandboxes",
    "/v2/sandboxes",
    "/files",
    "/templates",
    "/volumes",
    "/snapshots",
    "/process.Process",
    "/filesystem.Filesystem",
)
_OF_A_SANDBOX = (b"e2b-sandbox-id", b"x-access-token")


def e2b_face(instances: Instances, access: Access, *, secret: str) -> ASGIApp:
    """E2B's two halves over the plane's instances; `secret` signs the tokens of sandboxes."""
    return Starlette(routes=e2b_routes(InstanceBoxes(instances, access, secret=secret.encode())))


class Faces:
    """The plane's app, and those of the faces for the requests that are theirs."""

    def __init__(self, plane: ASGIApp, *, e2b: ASGIApp) -> None:
        self._plane, self._e2b = plane, e2b

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._chosen(scope)(scope, receive, send)

    def _chosen(self, scope: Scope) -> ASGIApp:
        path: str = scope.get("path", "")
        if any(path == place or path.startswith(place + "/") for place in _E2B):
            return self._e2b
        if path == "/health" and any(name in _OF_A_SANDBOX for name, _ in scope["headers"]):
            return self._e2b
        return self._plane
