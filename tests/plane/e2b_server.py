"""The E2B-compatible server on a loopback port, for tests that drive it."""

from contextlib import asynccontextmanager

from rollyard.plane.compat.e2b import e2b_app
from rollyard.plane.engines.protocol import INSTANCE_LABEL
from rollyard.plane.parts import ephemeral_plane
from rollyard.testing.serve import serve_app


@asynccontextmanager
async def serving(backend, *, key=None, wrap=None):
    """`backend` through the server, over a plane of its own; nothing of it is left at the end. Without a `key` everybody is let
    in. `wrap` is given the app, and what it gives is served."""
    async with ephemeral_plane(backend) as plane:
        if key is not None:
            await plane.access.find_or_make(key, "trainer", "local")
        app = e2b_app(plane, anonymous=key is None)
        async with serve_app(wrap(app) if wrap else app) as url:
            yield url


async def list_ids(backend):
    """Of the backend's sandboxes, as the server names them."""
    return [info.labels[INSTANCE_LABEL] for info in await backend.list()]
