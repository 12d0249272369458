"""An ASGI application on a free port of the loopback, served in this process: `async with serve_app(app) as url`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

_STOP_S = 30.0


@asynccontextmanager
async def serve_app(app: Any, *, port: int = 0, **options: Any) -> AsyncGenerator[str]:
    """The address while it is served. `options` are uvicorn's; open connections get a second at the end."""
    settings: dict[str, Any] = {"log_level": "error", "lifespan": "off", "timeout_graceful_shutdown": 1, **options}
    with socket.create_server(("127.0.0.1", port)) as sock:
        server = uvicorn.Server(uvicorn.Config(app, **settings))
        task = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, _STOP_S)
