"""What is told while an agent is installed for the first time: what it is made of, and how much of it is there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

import anyio

from rollyard.core.agent import Agent
from rollyard.images.layers import Layers

INSTALLS = "agent.installs"
_EVERY_S = 3.0


@contextlib.asynccontextmanager
async def tell_install(agent: Agent, layers: Layers, tell: Callable[..., Awaitable[None]]) -> AsyncGenerator[None]:
    """Around an install. An agent that is there already is not spoken of; nor is one that commands install in a sandbox, whose
    output is kept."""
    spec = agent.layer
    if spec.commands or layers.find(spec) is not None:
        yield
        return
    packages = ", ".join((*spec.npm, *spec.pip)) or agent.name

    async def watch() -> None:
        while True:
            so_far = await anyio.to_thread.run_sync(layers.bytes_so_far, spec)
            await tell(INSTALLS, packages=packages, megabytes=round(so_far / 1e6, 1))
            await anyio.sleep(_EVERY_S)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
