"""The E2B-compatible server on a loopback port, for tests that drive it."""

from contextlib import asynccontextmanager

from rollyard.plane.compat.e2b import e2b_app
from rollyard.testing.serve import serve_app


@asynccontextmanager
async def serving(backend, **options):
    """`backend` through the server; nothing of it is left at the end."""
    try:
        async with serve_app(e2b_app(backend, **options)) as url:
            yield url
    finally:
        await backend.reap(labels={}, older_than=0.0)
