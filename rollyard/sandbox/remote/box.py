"""One live sandbox of a provider: programs and files, jobs under the durable shim, and the relay, over one program's pipes where
the provider streams programs and over a pair of files elsewhere."""

from __future__ import annotations

import asyncio
import math
import secrets
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import TypeVar

import anyio
import msgspec

from rollyard.core.errors import Error, PathError, SandboxError, Unsupported
from rollyard.core.ids import new_id
from rollyard.core.log import Log
from rollyard.core.program import Program, check_job_id
from rollyard.core.protocols import ByteStream, Listener
from rollyard.core.sandbox import Capabilities, SandboxInfo
from rollyard.sandbox import job_shim
from rollyard.sandbox.job_shim import ShimJob
from rollyard.sandbox.paths import ROOT
from rollyard.sandbox.relay import HostRelay, RelayAccess, program
from rollyard.sandbox.relay.filepair import HostFilePair
from rollyard.sandbox.remote.errors import translate_errors
from rollyard.sandbox.remote.files import RemoteFiles
from rollyard.sandbox.remote.provider import LiveProgram, SandboxLink, SandboxProvider, StreamingLink
from rollyard.sandbox.retry import LOOKS, retry_open

T = TypeVar("T")
_CLOSE_S = 10.0
_CALL_S = 60.0
_SNAPSHOT_S = 600.0  # for what writes a whole disk or memory
_ENTER = 'cd -- "$1" && shift && exec "$@"'
_STARTED = 'n=0; while [ ! -e "$1/pid" ] && [ $n -lt 200 ]; do n=$((n+1)); sleep 0.02; done'


class RemoteJob(ShimJob):
    """`program` is there when it was started here with a stdin."""

    def __init__(
        self, box: RemoteSandbox, job_id: str, *, started: float | None = None, program: LiveProgram | None = None
    ) -> None:
        super().__init__(box.exec_plain, job_id, started=started)
        self._box, self._program = box, program

    async def write(self, data: bytes) -> None:
        if self._program is None:
            raise Unsupported(f"job {self.id} has no stdin here", hint="start it with stdin=True and keep that object")
        try:
            await self._box.ask(self._program.write(data))
        except SandboxError as error:
            if error.retry != "never":
                raise
            raise PathError(f"stdin of {self.id}", "EPIPE", hint="the program has ended or closed it") from None

    async def close_stdin(self) -> None:
        if self._program is not None:
            await self._box.ask(self._program.close_stdin())


class RemoteSandbox(RemoteFiles):
    """`own` are the labels it was made with; `forget` tells the backend that it is gone. `lease_s` is finite for one that is
    to die with its opener: its provider gets no more than this at a time."""

    def __init__(
        self,
        link: SandboxLink,
        provider: SandboxProvider,
        info: SandboxInfo,
        capabilities: Capabilities,
        *,
        own: Mapping[str, str],
        workdir: str,
        forget: Callable[[str], None],
    ) -> None:
        super().__init__(link, provider, workdir=workdir)
        self.info, self.capabilities = info, capabilities
        self.lease_s, self.paused = math.inf, False
        self._own, self._forget = own, forget
        self._killing = asyncio.Lock()
        self._access = RelayAccess(self._start_relay, self.id)
        self._log = Log(f"rollyard.sandbox.{info.backend}")

    async def ask(self, call: Awaitable[T], *, timeout: float = _CALL_S) -> T:
        """One call of the SDK about this sandbox."""
        with translate_errors(self._provider, self.id):
            async with asyncio.timeout(timeout):
                return await call

    async def _start(self, program: Program) -> RemoteJob:
        argv, env, user = program.argv, program.env, program.user
        link, name, place = self._link_of(user), program.job_id or new_id("job"), self._place(program.cwd)
        if not program.stdin:
            await job_shim.launch(self.exec_plain, msgspec.structs.replace(program, job_id=name, cwd=place))
            return RemoteJob(self, name)
        if not isinstance(link, StreamingLink):
            raise Unsupported(f"jobs of the {self.info.backend} backend have no stdin", hint="give input in a file")
        if not await self.exists(place):
            raise PathError(place, "ENOENT", hint="the working directory")
        line = await self._fit_line(
            ["/bin/sh", "-c", _ENTER, "rollyard", place, *job_shim.attach_argv(argv, name)], user
        )
        running = await self.ask(link.start(line, env={**env, job_shim.MARK: name}), timeout=job_shim.STEP_S)
        await self.repeat_script(_STARTED, f"{job_shim.ROOT}/{name}")
        return RemoteJob(self, name, program=running)

    async def job(self, job_id: str) -> RemoteJob:
        job = RemoteJob(self, check_job_id(job_id), started=0.0)
        await job.look()
        return job

    async def kill_processes(self) -> None:
        """All that were started through this backend, and what they started; the relay is none of them."""
        await job_shim.kill_all(self.exec_plain)

    async def listen(self, port: int = 0) -> Listener:
        return await self._access.listen(port)

    async def dial(self, port: int) -> ByteStream:
        return await self._access.dial(port)

    async def _start_relay(self, stack: AsyncExitStack) -> HostRelay:
        argv, link = program.command(await self.repeat_script(program.FIND)), self._link
        if isinstance(link, StreamingLink):
            return await self._start_piped_relay(link, argv, stack)
        pair = HostFilePair(self.repeat_script, self._put_part, f"{ROOT}/x/{new_id('relay')}")
        stack.push_async_callback(self._end_relay, pair.aclose)
        await pair.start(argv)
        return HostRelay(pair.output(), pair.write, log=pair.log)

    async def _put_part(self, place: str, data: bytes) -> None:
        await self._put(place, data, None)

    async def _start_piped_relay(self, link: StreamingLink, argv: list[str], stack: AsyncExitStack) -> HostRelay:
        """Frames as lines over a program of the SDK, which hands out text."""
        nonce = secrets.token_hex(12)
        line = shlex.join(["/bin/sh", "-c", 'echo "$0"; exec "$@"', nonce, *argv, "lines"])
        running = await self.ask(link.start(line, env={}), timeout=job_shim.STEP_S)
        stack.push_async_callback(running.disconnect)
        # Ended also when its connection is what broke: it holds the ports that the next one is to listen on.
        stack.push_async_callback(self._end_relay, running.kill)

        async def send(data: bytes) -> None:
            await self.ask(running.write(data))

        async def log() -> bytes:
            return running.last_errors()

        return HostRelay(_text_after(nonce, running.output()), send, lines=True, log=log)

    async def _end_relay(self, end: Callable[[], Awaitable[None]]) -> None:
        if self._dead:
            return
        with anyio.move_on_after(_CLOSE_S, shield=True):
            try:
                await self.ask(end())
            except Error as error:  # it ends by itself when it is not asked for any more
                self._log.debug("sandbox.relay_not_ended", sandbox_id=self.id, error=str(error))

    async def snapshot(self) -> str:
        """The id of an image with the files, and where the provider can the memory, of this sandbox."""
        return await self.ask(self._link.snapshot(), timeout=_SNAPSHOT_S)

    async def keep_image(self, name: str) -> str:
        """The same under a name, by which the provider finds it."""
        return await self.ask(self._link.keep_image(name), timeout=_SNAPSHOT_S)

    async def extend(self, ttl_s: float) -> None:
        """From now on `ttl_s`."""
        end = time.time() + ttl_s
        await self.ask(self._link.extend(end, self._own))
        await self.ask(self._link.keep(min(self.lease_s, ttl_s)))
        self.info = msgspec.structs.replace(self.info, expires_at=end)

    async def keep(self) -> None:
        """Let it live for another lease, or for what is left of its time."""
        if not self.paused:
            await self.ask(self._link.keep(self._term()))

    def _term(self) -> float:
        return max(1.0, min(self.lease_s, (self.info.expires_at or 0.0) - time.time()))

    async def pause(self) -> None:
        await self.ask(self._link.pause(), timeout=_SNAPSHOT_S)
        self.paused = True

    async def resume(self) -> None:
        await self.ask(self._link.resume(self._term()), timeout=_SNAPSHOT_S)
        self.paused = False

    async def alive(self) -> bool:
        try:
            return not self._dead and await self.ask(self._link.alive())
        except Error:
            return False

    async def kill(self) -> bool:
        """True when this call did it, False when it was dead already. A kill that is under way is waited for."""
        async with self._killing:
            if self._dead:
                return False
            done = await retry_open(
                lambda: self.ask(self._provider.delete(self.id)), LOOKS, timeout=_CALL_S, idempotent=True
            )
            self._dead = True
            self._forget(self.id)
        await self._access.aclose()
        self.close_link()
        return done

    def close_link(self) -> None:
        """Give back the connections to it; it may live on."""
        self._link.close()


async def _text_after(nonce: str, chunks: AsyncIterator[str]) -> AsyncIterator[bytes]:
    """What follows the mark: before it a profile may have spoken."""
    seen, found = "", ""
    async for text in chunks:
        if found:
            yield text.encode()
            continue
        seen += text
        _, found, rest = seen.partition(f"{nonce}\n")
        if rest:
            yield rest.encode()
