"""An ASGI application on listening sockets, by uvicorn, until a signal."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from types import FrameType
from typing import Any

import uvicorn


class Drain:
    """A server that is asked to stop sets `over` and goes on for `seconds`, so that load balancers see it before it goes.
    Asked twice, it stops at once."""

    def __init__(self, over: asyncio.Event, seconds: float) -> None:
        self.over, self.seconds = over, seconds


async def serve_app(app: Any, *sockets: socket.socket, drain: Drain | None = None, **settings: Any) -> None:
    """Until SIGINT or SIGTERM; `settings` are uvicorn's own."""
    chosen: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "off", **settings}
    config = uvicorn.Config(app, **chosen)
    await _Server(config, drain).serve(sockets=list(sockets))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, drain: Drain | None) -> None:
        super().__init__(config)
        self._drain = drain
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again = self._drain is None or self._drain.over.is_set()
        if self._drain is not None:
            self._loop.call_soon_threadsafe(self._drain.over.set)
        if self._drain is not None and self._drain.seconds > 0 and not again:
            later = partial(super().handle_exit, sig, frame)
            self._loop.call_soon_threadsafe(self._loop.call_later, self._drain.seconds, later)
        else:
            super().handle_exit(sig, frame)
