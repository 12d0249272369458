"""What a task's episodes stand on: an instance, the tools to work on it, and a leased browser where the task is done on a screen.

It is opened once and serves every episode after that. Whatever fails on the way releases what was made so far: no instance and
no lease outlives the error that ended its use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Protocol

from rollyard.core.errors import EnvError, EpisodeLost, Error
from rollyard.core.log import Log
from rollyard.core.message import ToolSpec
from rollyard.core.remote_task import TaskConfig
from rollyard.envs.fleet.provider import EnvProvider, InstanceRequest, RemoteInstance, provision
from rollyard.envs.telemetry import Telemetry
from rollyard.tools.remote import RemoteTools

COMPUTER = "computer"
_FIRST_ATTEMPTS = 5  # a server that has just been made gets 11 s to come up, once
_RELEASE_S = 60.0
_log = Log("rollyard.envs")


class InstanceLease(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def mcp_url(self) -> str: ...
    @property
    def key(self) -> str: ...


class Leases(Protocol):
    """Where browsers are borrowed; `envs.browser.BrowserLeases` is one."""

    async def create(self, ttl_s: float = 1800.0) -> InstanceLease: ...
    async def navigate(self, lease_id: str, url: str) -> None: ...
    async def health(self, lease_id: str) -> None: ...
    async def delete(self, lease_id: str) -> None: ...


class TaskInstance:
    """`specs` are the tools that the task's modality offers."""

    def __init__(self, config: TaskConfig, instance: RemoteInstance, *, leases: Leases | None = None) -> None:
        self.config, self.instance = config, instance
        self.specs: list[ToolSpec] = []
        self.tools: RemoteTools | None = None
        self._leases, self._lease = leases, None

    async def equip(self, provider: EnvProvider, *, request_s: float) -> None:
        """Its tools, asked for once."""
        urls, key = list(self.instance.tool_urls), provider.tools_key
        if self.config.task_modality == "browser_use":
            assert self._leases is not None
            lease = self._lease = await self._leases.create(ttl_s=self.config.lifetime_s)
            urls, key = [lease.mcp_url], lease.key
        self.tools = RemoteTools(urls, key, timeout_s=request_s)
        self.specs = offer_tools(self.config, await self.tools.list(attempts=_FIRST_ATTEMPTS))

    async def begin(self, telemetry: Telemetry, *, seed: int | None, timeout_s: float, fresh: bool = True) -> None:
        """Put back to its beginning. A manager that fails at that costs a warning; only an instance that was used before and is
        gone raises `EpisodeLost`."""
        try:
            await self.instance.reset(seed=seed, timeout_s=timeout_s)
        except EnvError as error:
            if isinstance(error, EpisodeLost) and not fresh:
                raise
            telemetry.warn("env.reset_failed", cause=error.message)

    async def show_page(self) -> None:
        """The browser at the application's first page, loaded."""
        if self._lease is None or self._leases is None:
            return
        if self.instance.page_url is None:
            raise EnvError(f"environment {self.config.env_key} has no page that a browser could open")
        await self._leases.navigate(self._lease.id, self.instance.page_url)
        await self._leases.health(self._lease.id)

    async def screenshot(self) -> str:
        """What an agent that sees a screen sees first, as a data URL."""
        assert self.tools is not None
        answer = await self.tools.ask(COMPUTER, {"action": "screenshot"})
        if answer.is_error or not answer.images:
            said = answer.text or "no image"
            raise EnvError(f"environment {self.config.env_key} gave no first screenshot: {said}")
        return answer.images[0]

    async def release(self) -> None:
        """Everything, in turn: what cannot be released is logged, and the rest is released."""
        if self._lease is not None and self._leases is not None:
            await self._try(self._leases.delete(self._lease.id), "the browser's lease")
        if self.tools is not None:
            await self._try(self.tools.aclose(), "the connections to its tools")
        await self._try(self.instance.close(), "the instance")

    async def _try(self, releasing: Awaitable[None], what: str) -> None:
        try:
            async with asyncio.timeout(_RELEASE_S):
                await releasing
        except (Error, OSError, TimeoutError) as error:
            _log.error("something was not released", what=what, instance_id=self.instance.id, cause=str(error))


async def open_instance(
    config: TaskConfig,
    provider: EnvProvider,
    telemetry: Telemetry,
    *,
    request_s: float,
    leases: Leases | None = None,
    run_id: str | None = None,
) -> TaskInstance:
    request = InstanceRequest(
        env_key=config.env_key,
        env_version=config.env_version,
        data_key=config.data_key,
        data_version=config.data_version,
        image_type=config.image,
        region=config.region,
        env_variables=config.env_variables,
        ttl_s=config.lifetime_s,
        run_id=run_id,
    )
    opened = TaskInstance(config, await provision(provider, request, telemetry), leases=leases)
    try:
        await opened.equip(provider, request_s=request_s)
    except BaseException:  # cancelled too: an instance that was not handed out is released
        await asyncio.shield(asyncio.ensure_future(opened.release()))
        raise
    return opened


def offer_tools(config: TaskConfig, specs: Sequence[ToolSpec]) -> list[ToolSpec]:
    """`tool_use` works without the screen, the other two with nothing else."""
    with_screen = config.task_modality != "tool_use"
    found = [spec for spec in specs if (spec.name == COMPUTER) is with_screen]
    if not found:
        names = ", ".join(spec.name for spec in specs) or "none at all"
        raise EnvError(f"environment {config.env_key} has no tools for {config.task_modality}; it has: {names}")
    return found
