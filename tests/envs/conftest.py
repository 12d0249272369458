"""A real server on loopback, in the test's own loop."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager

import rollyard as ry
from rollyard.envs.server import EnvServer
from rollyard.envs.sessions import EnvLimits
from rollyard.net.websocket_server import SocketProtocol
from rollyard.testing.serve import serve_app
from rollyard.tools import ToolContext


class Counter(ry.Env):
    """Adds up; every instance that is closed says so."""

    closed: list[str] = []
    cut: list[str] = []

    def __init__(self):
        self.total = 0
        self.steps = 0

    async def reset(self, *, seed=None, options=None):
        self.total = seed or 0
        return ry.StepResult(observation={"total": self.total}, info={"options": dict(options or {})})

    async def step(self, action):
        self.steps += 1
        if "sleep" in action:
            await self.report_progress(0, 1, "asleep")
            await asyncio.sleep(action["sleep"])
        if "reward" in action:
            return ry.StepResult(observation={}, reward=float(action["reward"]))
        if action.get("boom"):
            raise RuntimeError("secret of the host")
        self.total += action.get("add", 0)
        truncated = self.total > 99
        return ry.StepResult(observation={"total": self.total}, reward=1.0, truncated=truncated, info={"n": self.steps})

    @property
    def state(self):
        return {"total": self.total}

    def tools(self):
        @ry.tools.tool
        async def double(x: int) -> int:
            """Twice x."""
            return 2 * x

        @ry.tools.tool
        async def count(to: int, context: ToolContext) -> int:
            """Counts, saying how far it is; a negative number never ends."""
            for n in range(to):
                await context.progress(n + 1, to, f"{n + 1} of {to}")
            if to < 0:
                await context.progress(1.0, None, "begun")
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    self.cut.append("cancelled")
                    raise
            return to

        return [double, count]

    def save(self):
        return {"total": self.total, "steps": self.steps}

    async def restore(self, saved):
        self.total, self.steps = saved["total"], saved["steps"]

    async def close(self):
        self.closed.append("closed")


def sockets_kept_in(transports):
    """A server's side of a WebSocket that leaves its transports there, for tests that cut them."""

    class Kept(SocketProtocol):
        def connection_made(self, transport):
            super().connection_made(transport)
            transports.append(transport)

    return Kept


async def told(socket, frame):
    """What a server answers to one frame."""
    await socket.send(frame if isinstance(frame, str) else json.dumps(frame))
    return json.loads(await asyncio.wait_for(socket.recv(), 30))


@asynccontextmanager
async def served(
    make=Counter,
    *,
    key=None,
    production=False,
    port=0,
    name=None,
    splits=None,
    clock=time.monotonic,
    ws=SocketProtocol,
    **limits,
):
    limits = EnvLimits(**limits)
    app = EnvServer(make, name=name, key=key, production=production, splits=splits, limits=limits, clock=clock)
    async with serve_app(app, port=port, lifespan="on", ws=ws) as url:
        yield url
