"""`Browsers`: who has which browser, until when. A lease is one Chromium in one sandbox, with one key for its tool.

Ending a lease kills the sandbox. So does its TTL, which the sandbox backend keeps by itself: a server that was killed
leaves no browser behind for longer than that, and none for longer than its own life on a backend whose sandboxes end with
their owner.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from hmac import compare_digest
from typing import Self

import msgspec

from rollyard.core.errors import ConfigError, EnvUnavailable, EpisodeLost, Error
from rollyard.core.ids import new_id, secret
from rollyard.core.log import Log
from rollyard.core.protocols import Backend
from rollyard.core.sandbox import Resources, SandboxSpec
from rollyard.envs.browser.chromium import Chromium
from rollyard.envs.browser.computer import computer
from rollyard.envs.browser.proxy import OriginProxy, origin_of
from rollyard.tools.toolset import Toolset

LABEL = "rollyard.browser"
_SWEEP_S = 1.0
_log = Log("rollyard.browser")


class BrowserLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`max_ttl_s` bounds what a caller may ask for."""

    capacity: int = 8
    ttl_s: float = 1800.0
    max_ttl_s: float = 4 * 3600.0
    boot_s: float = 60.0
    size: tuple[int, int] = (1024, 768)
    resources: Resources = Resources(memory_mb=2048, pids=512)


class BrowserLease(msgspec.Struct, kw_only=True, eq=False):
    """One lease from the inside."""

    id: str
    key: str
    expires_at: float  # on the wall; what ends it is `deadline`, on the loop's clock, which never jumps
    deadline: float
    browser: Chromium
    proxy: OriginProxy
    toolset: Toolset
    stack: AsyncExitStack


class Browsers:
    def __init__(self, backend: Backend, *, image: str = "host", limits: BrowserLimits | None = None) -> None:
        self.limits = limits or BrowserLimits()
        self.held: dict[str, BrowserLease] = {}
        self._backend = backend
        self._image = image
        self._opening = 0
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await asyncio.gather(*(self.end(name) for name in list(self.held)))

    async def create(self, ttl_s: float | None = None, labels: Mapping[str, str] | None = None) -> BrowserLease:
        """A browser with an empty page. At capacity this is refused at once: leases are long."""
        ttl_s = self.limits.ttl_s if ttl_s is None else ttl_s
        if not 0 < ttl_s <= self.limits.max_ttl_s:
            raise ConfigError(f"ttl_s must be above 0 and at most {self.limits.max_ttl_s:g}, got {ttl_s!r}")
        if len(self.held) + self._opening >= self.limits.capacity:
            raise EnvUnavailable(f"all {self.limits.capacity} browsers are leased", hint="delete a lease, or wait")
        self._opening += 1
        try:
            held = await self._open(new_id("brw"), ttl_s, labels or {})
            self.held[held.id] = held
        finally:
            self._opening -= 1
        _log.info("browser.leased", lease=held.id, ttl_s=ttl_s)
        return held

    async def _open(self, name: str, ttl_s: float, labels: Mapping[str, str]) -> BrowserLease:
        spec = SandboxSpec(
            image=self._image,
            ttl_s=ttl_s + self.limits.boot_s,
            labels={**labels, LABEL: name},
            resources=self.limits.resources,
        )
        async with AsyncExitStack() as stack:
            sandbox = await stack.enter_async_context(self._backend.open(spec))
            proxy = OriginProxy(await sandbox.listen(0))
            stack.push_async_callback(proxy.aclose)
            browser = await Chromium.start(
                sandbox, proxy_port=proxy.port, size=self.limits.size, timeout_s=self.limits.boot_s
            )
            stack.push_async_callback(browser.aclose)
            toolset = Toolset([computer(browser)], name="computer")
            stack.push_async_callback(toolset.aclose)
            return BrowserLease(
                id=name,
                key=secret(),
                expires_at=time.time() + ttl_s,
                deadline=asyncio.get_running_loop().time() + ttl_s,
                browser=browser,
                proxy=proxy,
                toolset=toolset,
                stack=stack.pop_all(),
            )

    def get(self, name: str) -> BrowserLease:
        held = self.held.get(name)
        if held is None:
            raise EpisodeLost(f"there is no lease {name!r}", hint="it ended or expired; take another")
        return held

    def of_key(self, key: str) -> BrowserLease | None:
        """A linear look at a handful of leases, in time that does not depend on where keys differ."""
        return next((held for held in self.held.values() if compare_digest(held.key.encode(), key.encode())), None)

    async def navigate(self, name: str, url: str) -> None:
        """Open `url`, whose origin the browser may reach from now on."""
        held = self.get(name)
        held.proxy.allowed.add(origin_of(url))
        await held.browser.navigate(url)

    async def check(self, name: str) -> None:
        await self.get(name).browser.check()

    async def end(self, name: str) -> bool:
        """Whether there was one. The first caller ends it; others find it gone."""
        held = self.held.pop(name, None)
        if held is None:
            return False
        await held.stack.aclose()
        _log.info("browser.ended", lease=name)
        return True

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = asyncio.get_running_loop().time()
            for name in [held.id for held in self.held.values() if held.deadline <= now]:
                try:
                    await self.end(name)
                except (Error, OSError) as error:
                    _log.warning("browser.end_failed", lease=name, error=str(error))
