"""The E2B-compatible server on a loopback port, for tests that drive it."""

import asyncio
import socket
from contextlib import asynccontextmanager

import uvicorn

from rollyard.plane.e2b import e2b_app


@asynccontextmanager
async def listening(app):
    """Any ASGI app at an address."""
    sock = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
    running = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(running, 20)


@asynccontextmanager
async def serving(backend, **options):
    """`backend` through the server; nothing of it is left at the end."""
    try:
        async with listening(e2b_app(backend, **options)) as url:
            yield url
    finally:
        await backend.reap(labels={}, older_than=0.0)
