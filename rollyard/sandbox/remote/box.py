"""One live sandbox of a provider: programs and files, jobs under the durable shim, and the relay over a pair of files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack

import anyio
import msgspec

from rollyard.core.errors import Error, PathError, Unsupported
from rollyard.core.ids import new_id
from rollyard.core.protocols import ByteStream, Command, Listener
from rollyard.core.sandbox import Capabilities, Exit, SandboxInfo
from rollyard.sandbox import shim
from rollyard.sandbox.paths import ROOT
from rollyard.sandbox.relay import Relay, RelayWay, program
from rollyard.sandbox.relay.filepair import FilePair
from rollyard.sandbox.remote.files import Files
from rollyard.sandbox.remote.link import Link, Provider, gone, speaking
from rollyard.sandbox.remote.programs import checked
from rollyard.sandbox.retry import LOOKS, retrying
from rollyard.sandbox.shim import ShimJob

_CLOSE_S = 10.0
_CALL_S = 60.0


class RemoteSandbox(Files):
    """`own` are the labels it was made with; `forget` tells the backend that it is gone."""

    def __init__(
        self,
        link: Link,
        provider: Provider,
        info: SandboxInfo,
        capabilities: Capabilities,
        *,
        own: Mapping[str, str],
        workdir: str,
        forget: Callable[[str], None],
    ) -> None:
        super().__init__(link, provider, workdir=workdir)
        self.info, self.capabilities = info, capabilities
        self._own, self._forget, self._dead = own, forget, False
        self._killing = asyncio.Lock()
        self._way = RelayWay(self._start_relay, self.id)

    async def plain(
        self,
        cmd: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: float,
    ) -> Exit:
        if self._dead:
            raise gone(self.id)
        return await super().plain(cmd, env=env, cwd=cwd, user=user, timeout=timeout)

    async def start(
        self,
        cmd: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        job_id: str | None = None,
    ) -> ShimJob:
        """With a `job_id` that ran here before, the job of that name is returned and nothing is started."""
        self._as_it_is(user)
        if stdin:
            raise Unsupported(f"jobs of the {self.info.backend} backend have no stdin", hint="give input in a file")
        name = job_id or new_id("job")
        if "/" in name or name.startswith("."):
            raise PathError(name, "EINVAL", hint="a job id is a plain name")
        return await shim.launch(self.plain, shim.argv_of(cmd), job_id=name, env=checked(env), cwd=self._place(cwd))

    async def job(self, job_id: str) -> ShimJob:
        if "/" in job_id or not job_id:
            raise PathError(job_id, "EINVAL", hint="a job id is a plain name")
        return await shim.find(self.plain, job_id)

    async def kill_processes(self) -> None:
        """All that were started through this backend, and what they started; the relay is none of them."""
        await shim.kill_all(self.plain)

    async def listen(self, port: int = 0) -> Listener:
        return await self._way.listen(port)

    async def dial(self, port: int) -> ByteStream:
        return await self._way.dial(port)

    async def _start_relay(self, stack: AsyncExitStack) -> Relay:
        argv = program.command(await self.say(program.FIND))
        pair = FilePair(self.say, self._put_part, f"{ROOT}/x/{new_id('relay')}")
        stack.push_async_callback(self._end_relay, pair)
        await pair.start(argv)
        return Relay(pair.output(), pair.write, log=pair.log)

    async def _put_part(self, place: str, data: bytes) -> None:
        await self._put(place, data, None)

    async def _end_relay(self, pair: FilePair) -> None:
        with anyio.move_on_after(_CLOSE_S, shield=True):
            try:
                await pair.aclose()
            except Error:
                return  # it ends by itself when nobody asks for it any more

    async def snapshot(self) -> str:
        raise Unsupported(f"the {self.info.backend} backend takes no snapshots", hint="use another backend")

    async def extend(self, ttl_s: float) -> None:
        """From now on `ttl_s`."""
        if not self.capabilities.extend:
            raise Unsupported(f"the {self.info.backend} backend cannot extend a sandbox", hint="open it for longer")
        end = time.time() + ttl_s
        with speaking(self._provider, self.id):
            async with asyncio.timeout(_CALL_S):
                await self._link.extend(end, self.info.created_at, self._own)
        self.info = msgspec.structs.replace(self.info, expires_at=end)

    async def pause(self) -> None:
        raise Unsupported(f"the {self.info.backend} backend has no pause", hint="end the sandbox and open another")

    async def resume(self) -> None:
        raise Unsupported(f"the {self.info.backend} backend has no pause", hint="end the sandbox and open another")

    async def keep(self) -> None:
        with speaking(self._provider, self.id):
            async with asyncio.timeout(_CALL_S):
                await self._link.keep()

    async def alive(self) -> bool:
        if self._dead:
            return False
        try:
            with speaking(self._provider, self.id):
                async with asyncio.timeout(_CALL_S):
                    return await self._link.alive()
        except Error:
            return False

    async def kill(self) -> bool:
        """True when this call did it, False when it was dead already. A kill that is under way is waited for."""

        async def end() -> bool:
            with speaking(self._provider, self.id):
                async with asyncio.timeout(_CALL_S):
                    return await self._provider.delete(self.id)

        async with self._killing:
            if self._dead:
                return False
            done = await retrying(end, LOOKS, timeout=_CALL_S, idempotent=True)
            self._dead = True
            self._forget(self.id)
        await self._way.aclose()
        return done
