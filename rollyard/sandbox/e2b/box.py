"""One live sandbox of an E2B server: programs and files, jobs under the durable shim, and the relay over one program's pipe."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import anyio
import msgspec
import structlog

from rollyard.core.errors import Error, PathError, Unsupported
from rollyard.core.ids import new_id
from rollyard.core.protocols import ByteStream, Command, Listener
from rollyard.core.sandbox import Capabilities, SandboxInfo
from rollyard.sandbox import shim
from rollyard.sandbox.e2b.faults import speaking
from rollyard.sandbox.e2b.files import Files
from rollyard.sandbox.e2b.lease import Lease
from rollyard.sandbox.relay import Relay, RelayWay, program
from rollyard.sandbox.retry import LOOKS, retrying
from rollyard.sandbox.shim import ShimJob

_SNAPSHOT_S = 600.0
_END_S = 5.0


class E2BJob(ShimJob):
    """`handle` is the SDK's, when it was started here with a stdin."""

    def __init__(self, box: Files, job_id: str, *, started: float | None = None, handle: Any = None) -> None:
        super().__init__(box.plain, job_id, started=started)
        self._handle = handle

    async def write(self, data: bytes) -> None:
        if self._handle is None:
            raise Unsupported(f"job {self.id} has no stdin here", hint="start it with stdin=True and keep that object")
        try:
            with speaking(self.id, None):
                await self._handle.send_stdin(data)
        except Error:
            raise PathError(f"stdin of {self.id}", "EPIPE", hint="the program has ended or closed it") from None

    async def close_stdin(self) -> None:
        if self._handle is not None:
            with speaking(self.id, None):
                await self._handle.close_stdin()


class E2BSandbox(Files):
    def __init__(
        self,
        box: Any,
        info: SandboxInfo,
        capabilities: Capabilities,
        *,
        key: str | None,
        workdir: str,
        user: str | None,
        forget: Callable[[str], None],
    ) -> None:
        super().__init__(box, key=key, workdir=workdir, user=user)
        self.info, self.capabilities = info, capabilities
        self.lease: Lease | None = None  # set by the backend for one that is to die with its opener
        self._forget, self._killed = forget, False
        self._way = RelayWay(self._start_relay, self.id)
        self._log: Any = structlog.get_logger("rollyard.sandbox.e2b")

    async def start(
        self,
        cmd: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        job_id: str | None = None,
    ) -> E2BJob:
        """With a `job_id` that ran here before, the job of that name is returned and nothing is started."""
        name = job_id or new_id("job")
        if "/" in name or name.startswith("."):
            raise PathError(name, "EINVAL", hint="a job id is a plain name")
        place = self._place(cwd)
        if not stdin:
            await shim.launch(self.plain, shim.argv_of(cmd), job_id=name, env=env, cwd=place, user=user)
            return E2BJob(self, name)
        if not await self.exists(place):
            raise PathError(place, "ENOENT", hint="the working directory")
        entered = ["/bin/sh", "-c", 'cd -- "$1" && shift && exec "$@"', "rollyard", place]
        argv = [*entered, *shim.attached(shim.argv_of(cmd), name)]
        handle = await self.start_line(argv, env={**(env or {}), shim.MARK: name}, user=user, stdin=True)
        job = E2BJob(self, name, handle=handle)
        await self.script('n=0; while [ ! -e "$1/pid" ] && [ $n -lt 200 ]; do n=$((n+1)); sleep 0.02; done',
                          f"{shim.ROOT}/{name}")  # fmt: skip
        return job

    async def job(self, job_id: str) -> E2BJob:
        if "/" in job_id or not job_id:
            raise PathError(job_id, "EINVAL", hint="a job id is a plain name")
        job = E2BJob(self, job_id, started=0.0)
        await job.look()
        return job

    async def kill_processes(self) -> None:
        """All that were started through this backend, and what they started; the relay is none of them."""
        await shim.kill_all(self.plain)

    async def listen(self, port: int = 0) -> Listener:
        return await self._way.listen(port)

    async def dial(self, port: int) -> ByteStream:
        return await self._way.dial(port)

    async def _start_relay(self, stack: AsyncExitStack) -> Relay:
        """Frames as lines over a program of the SDK, which hands out text."""
        found = await shim.repeated(self.plain, ["/bin/sh", "-c", program.FIND], timeout=shim.STEP_S)
        argv = program.command(found)
        nonce, said = secrets.token_hex(12), bytearray()
        chunks: asyncio.Queue[str | None] = asyncio.Queue()
        handle = await self.start_line(
            ["/bin/sh", "-c", 'echo "$0"; exec "$@"', nonce, *argv, "lines"],
            env={},
            user=None,
            stdin=True,
            on_stdout=chunks.put_nowait,
            on_stderr=lambda text: said.extend(text.encode()),
        )
        stack.push_async_callback(self._end_relay, handle)
        ending = asyncio.create_task(_ended(handle, chunks))
        stack.callback(ending.cancel)

        async def send(data: bytes) -> None:
            with speaking(self.id, self._key):
                await handle.send_stdin(data)

        async def log() -> bytes:
            return bytes(said[-4096:])

        return Relay(_after(nonce, chunks), send, lines=True, log=log)

    async def _end_relay(self, handle: Any) -> None:
        """Also when its connection is what broke: it holds the ports that the next one is to listen on."""
        with anyio.move_on_after(_END_S, shield=True):
            try:
                if not self._killed:
                    await handle.kill()
            except Exception as error:  # noqa: BLE001 - the SDK raises kinds of four packages; a dead program is what is wanted
                self._log.debug("sandbox.relay_not_ended", sandbox_id=self.id, error=type(error).__name__)
            await handle.disconnect()

    async def snapshot(self) -> str:
        """The id of a template with the files, and where the server can the memory, of this sandbox."""
        with speaking(self.id, self._key):
            return str((await self._box.create_snapshot(request_timeout=_SNAPSHOT_S)).snapshot_id)

    async def extend(self, ttl_s: float) -> None:
        """From now on `ttl_s`."""
        end = time.time() + ttl_s
        if self.lease is not None:
            await self.lease.extend(end)
        else:
            await self.keep(math.ceil(ttl_s))
        self.info = msgspec.structs.replace(self.info, expires_at=end)

    async def keep(self, seconds: int) -> None:
        """Tell the server that this much is left from now."""
        with speaking(self.id, self._key):
            await self._box.set_timeout(seconds)

    async def pause(self) -> None:
        with speaking(self.id, self._key):
            await self._box.pause(request_timeout=_SNAPSHOT_S)

    async def resume(self) -> None:
        left = (self.info.expires_at or time.time()) - time.time()
        seconds = self.lease.term() if self.lease is not None else math.ceil(max(1.0, left))
        with speaking(self.id, self._key):
            await self._box.connect(seconds, request_timeout=_SNAPSHOT_S)

    async def kill(self) -> bool:
        """True when this call did it, False when it was dead already."""
        self._killed = True

        async def end() -> bool:
            with speaking(self.id, self._key):
                return bool(await self._box.kill())

        try:
            done = await retrying(end, LOOKS, idempotent=True)
            self._forget(self.id)
            return done
        finally:
            await self._way.aclose()


async def _ended(handle: Any, chunks: asyncio.Queue[str | None]) -> None:
    try:
        await handle.wait()
    except Exception as error:  # noqa: BLE001 - any end of the program is the end of the pipe, and is told as its last line
        chunks.put_nowait(f"\n[{type(error).__name__}]\n")
    finally:
        chunks.put_nowait(None)


async def _after(nonce: str, chunks: asyncio.Queue[str | None]) -> AsyncIterator[bytes]:
    """What follows the mark: before it a profile may have spoken."""
    seen, open_ = "", False
    while (text := await chunks.get()) is not None:
        if open_:
            yield text.encode()
            continue
        seen += text
        _, found, rest = seen.partition(f"{nonce}\n")
        if found:
            open_ = True
            if rest:
                yield rest.encode()
