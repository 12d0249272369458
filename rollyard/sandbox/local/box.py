"""One live sandbox, as its owner or a process that attached sees it. Every method is a request to its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio

from rollyard.core import folders
from rollyard.core.errors import PathError, SandboxError, SandboxGone, SandboxInterrupted, Unsupported
from rollyard.core.ids import new_id
from rollyard.core.program import Program, ProgramCalls
from rollyard.core.sandbox import Exit, SandboxUsage
from rollyard.sandbox.gpus import GpuReservation
from rollyard.sandbox.local.cgroups import Group
from rollyard.sandbox.local.channel import Channel, ChannelRefused
from rollyard.sandbox.local.files import LocalFiles
from rollyard.sandbox.local.inner import protocol
from rollyard.sandbox.local.job import ANSWER_S, LocalJob
from rollyard.sandbox.local.journal import Home, SandboxEntry, has_ended
from rollyard.sandbox.local.page_in import Regions
from rollyard.sandbox.local.probe import NAMESPACED
from rollyard.sandbox.local.usage import read_usage
from rollyard.sandbox.local.view_root import save_changes
from rollyard.sandbox.local.writes import list_writes
from rollyard.sandbox.streams import SocketListener, SocketStream

_GRACE_S = 5.0
_KILL_S = ANSWER_S  # what was killed is gone once each of its processes had a processor to end on
JOB_OUTPUT = 256 * 2**20
FETCH_S = 5.0  # for memory to come back from a slow disk before programs go on


class LocalSandbox(ProgramCalls, LocalFiles):
    """`pidfd` refers to its first process: killing that kills everything in it, and it can be mistaken for no other."""

    def __init__(self, home: Home, entry: SandboxEntry, channel: Channel, pidfd: int, backend: Any) -> None:
        super().__init__(channel, entry)
        self.id = entry.info.id
        self.info = entry.info
        self.capabilities = entry.capabilities
        self._home = home
        self._pidfd: int | None = pidfd
        self._backend = backend
        self.group = Group(entry.cgroups)
        self._oom_seen = 0
        self._sleeps = 0
        self._used: Regions = {}  # what it used between its last two sleeps
        self.reserved: GpuReservation | None = None

    @property
    def written(self) -> Path:
        """Where on the host its changes are, when they are on disk."""
        return self._home.fs

    @property
    def dead(self) -> bool:
        return self._channel.closed.is_set()

    # -- programs

    async def _exec(self, program: Program, timeout: float) -> Exit:
        job_id = new_id("exec")
        fields = self._launch(job_id, program, program.output_limit)
        fds = [protocol.memory_file(), protocol.memory_file()]
        if program.input is not None:
            fds.append(protocol.memory_file(program.input))
        try:
            result = await self._run(job_id, {**fields, "timeout": timeout}, fds, timeout)
            return self._exit(result, *(protocol.read_at(fd, os.fstat(fd).st_size) for fd in fds[:2]))
        finally:
            protocol.close_fds(fds)

    async def _run(self, job_id: str, fields: dict[str, Any], fds: list[int], timeout: float) -> dict[str, Any]:
        """The keeper enforces the timeout; if it cannot (a program inside stopped it) the supervisor ends the job."""
        launch = {**fields, "wait": True, "ephemeral": True}
        try:
            reply, _ = await self._channel.request("run", launch, fds=fds, timeout=timeout + _GRACE_S)
            return reply
        except ChannelRefused as refused:
            raise self._path_error(fields["argv"][0], refused) from None
        except SandboxInterrupted:
            await self._channel.request("kill", {"job": job_id, "force": True}, timeout=ANSWER_S)
            return {"exit_code": None, "signal": signal.SIGKILL, "timed_out": True}
        except asyncio.CancelledError:
            self._channel.post("kill", {"job": job_id})
            raise

    def _launch(self, job_id: str, program: Program, max_output: int) -> dict[str, Any]:
        if program.user not in (None, "root", "0"):
            self._need("users")
        return {
            "job": job_id,
            "argv": program.argv,
            "env": {**self._entry.env, **program.env},
            "cwd": self._path(program.cwd or self._entry.workdir),
            "user": program.user or self._entry.user,
            "max_output": max_output,
        }

    def _exit(self, result: dict[str, Any], stdout: bytes, stderr: bytes) -> Exit:
        code, number = result.get("exit_code"), result.get("signal")
        oom = bool(result.get("oom"))
        if not oom and (number == signal.SIGKILL or code == 128 + signal.SIGKILL):
            kills = self.group.oom_kills()
            oom, self._oom_seen = kills > self._oom_seen, kills
        return Exit(
            exit_code=code,
            stdout=stdout,
            stderr=stderr,
            timed_out=result.get("timed_out", False),
            signal=number,
            oom=oom,
            lost=result.get("lost", False),
            truncated=result.get("truncated", False),
            duration_s=result.get("duration_s", 0.0),
        )

    async def _start(self, program: Program) -> LocalJob:
        name = program.job_id or new_id("job")
        files = self._home.jobs / name
        fds: list[int] = []
        feed: int | None = None
        try:
            files.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            fds += [os.open(files / part, flags, 0o600) for part in ("out", "err")]
            if program.stdin:
                source, feed = os.pipe()
                fds += [source, feed]
                os.set_blocking(feed, False)
            fields = {**self._launch(name, program, JOB_OUTPUT), "wait": False, "ephemeral": False}
            reply, _ = await self._channel.request("run", fields, fds=fds, timeout=ANSWER_S)
        except ChannelRefused as refused:
            raise self._path_error(program.argv[0], refused) from None
        except FileNotFoundError:
            raise SandboxGone(f"sandbox {self.id} is gone", hint="open another sandbox") from None
        finally:
            protocol.close_fds([fd for fd in fds if fd != feed])
        if feed is not None and reply.get("known"):
            os.close(feed)
            feed = None
        return LocalJob(name, self._channel, files, stdin=feed, finish=self._exit)

    async def job(self, job_id: str) -> LocalJob:
        job = LocalJob(job_id, self._channel, self._home.jobs / job_id, finish=self._exit)
        await job.poll()
        return job

    async def kill_processes(self) -> None:
        """End every program in the sandbox, however it was started, and keep the sandbox and its files."""
        await self._ask("end_all")

    # -- network

    async def listen(self, port: int = 0) -> SocketListener:
        self._need("listen")
        return await self.listen_at("127.0.0.1", port)

    async def listen_at(self, address: str, port: int) -> SocketListener:
        sock, bound = await self._bind(address, port, datagrams=False)
        return SocketListener(sock, bound)

    async def bind_datagrams(self, address: str, port: int) -> socket.socket:
        return (await self._bind(address, port, datagrams=True))[0]

    async def _bind(self, address: str, port: int, *, datagrams: bool) -> tuple[socket.socket, int]:
        asked = {"address": address, "port": port, "datagrams": datagrams}
        try:
            reply, (fd,) = await self._channel.request("listen", asked, timeout=ANSWER_S)
        except ChannelRefused as refused:
            raise PathError(f"{address}:{port}", refused.name, hint="another port, or 0 for any") from None
        return socket.socket(fileno=fd), reply["port"]

    async def dial(self, port: int) -> SocketStream:
        self._need("dial")
        try:
            reply, (fd,) = await self._channel.request("socket", {"port": port}, timeout=ANSWER_S)
        except ChannelRefused as refused:
            raise self._no_answer(port, refused.name) from None
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        if reply.get("connected"):
            return SocketStream(sock)
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except (OSError, TimeoutError) as error:
            sock.close()
            raise self._no_answer(port, error) from error
        return SocketStream(sock)

    def _no_answer(self, port: int, why: object) -> SandboxInterrupted:
        return SandboxInterrupted(
            f"nothing answers on port {port} inside {self.id}: {why}", hint="start the server first"
        )

    async def namespaces(self) -> list[int]:
        """Descriptors of the user and network namespaces that a sandbox beside this one joins; the caller closes them."""
        _, fds = await self._ask("namespaces")
        return fds

    # -- the sandbox itself

    async def snapshot(self) -> str:
        """The id of a copy of all that was written here; its programs stand still while it is made."""
        self._need("snapshot")
        await self._ask("pause", on=True)
        try:
            if self.info.level not in NAMESPACED:
                return await self._snapshot_view()
            _, fds = await self._ask("upper")  # a tmpfs that only the sandbox has, when it has one
            try:
                base = Path(f"/proc/self/fd/{fds[0]}") if fds else self.written
                uppers = {target: base / name for target, name in self._entry.uppers.items()}
                return await self._backend.freeze(self._entry, uppers, shifted=self._entry.shifted or bool(fds))
            finally:
                protocol.close_fds(fds)
        finally:
            await self._ask("pause", on=False)

    async def usage(self) -> SandboxUsage:
        _, fds = await self._ask("upper")
        try:
            return await asyncio.to_thread(read_usage, self.group.dirs, self.written, fds[0] if fds else None)
        finally:
            protocol.close_fds(fds)

    async def list_writes(self, since: float) -> tuple[str, ...]:
        if self.info.level not in NAMESPACED:
            raise Unsupported("what a sandbox without mount namespaces writes is not apart from what was there")
        _, fds = await self._ask("upper")
        try:
            base = Path(f"/proc/self/fd/{fds[0]}") if fds else self.written
            uppers = {target: base / name for target, name in self._entry.uppers.items()}
            return await asyncio.to_thread(list_writes, uppers, since)
        finally:
            protocol.close_fds(fds)

    async def _snapshot_view(self) -> str:
        changes = Path(tempfile.mkdtemp(prefix="changes-", dir=self._home.path))
        try:
            await asyncio.to_thread(save_changes, self._home, changes)
            return await self._backend.freeze(self._entry, {"/": changes}, shifted=False)
        finally:
            await asyncio.to_thread(folders.remove, changes)

    async def extend(self, ttl_s: float) -> None:
        """From now on `ttl_s`."""
        end = time.time() + ttl_s
        await self._ask("extend", ttl_s=ttl_s)
        self.info = self._home.note(expires_at=end)

    async def pause(self) -> None:
        self._need("pause")
        await self._ask("pause", on=True)
        self.info = self._home.note(state="paused")

    async def resume(self) -> None:
        self._need("pause")
        await self._ask("pause", on=False)
        self.info = self._home.note(state="running")

    async def put_to_sleep(self, *, freeze: bool = False) -> None:
        """Its memory goes to the machine's swap; what its programs touch comes back. Frozen, they touch nothing until `wake`."""
        self._backend.check_sleep()
        if freeze:
            await self._ask("pause", on=True)
        self.group.allow_swap(True)
        resident = await self._backend.page_out(self.info.pid)
        # the first time it is all that was ever allocated, of which a program uses next to nothing
        self._used = resident if self._sleeps else {}
        self._sleeps += 1

    async def wake(self) -> None:
        self.group.allow_swap(False)
        used, self._used = self._used, {}
        if used:
            with anyio.move_on_after(FETCH_S):  # its programs can fetch it themselves, but not while they are frozen
                await self._backend.page_in(used, self._sleeps)
        await self._ask("pause", on=False)

    async def alive(self) -> bool:
        if self._channel.closed.is_set():
            return False
        try:
            await self._ask("ping")
        except SandboxError:
            return False
        return True

    async def kill(self) -> bool:
        """End everything in it at once. True when this call did it, False when it was dead already."""
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is None:
            return False
        try:
            was_dead = has_ended(pidfd)
            if not was_dead:
                if self.info.level not in NAMESPACED:  # no namespace: nobody but the supervisor can end what it started
                    with contextlib.suppress(SandboxError):
                        await self._channel.request("exit", timeout=_KILL_S)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                await _end(pidfd, _KILL_S)
            return not was_dead
        finally:
            os.close(pidfd)
            if self.egress is not None:
                await self.egress.aclose()
            self._channel.close()
            if self.reserved is not None:
                self.reserved.release()
            self._backend.forget(self.id)

    def _need(self, capability: str) -> None:
        if not getattr(self.capabilities, capability):
            raise Unsupported(
                f"the local backend cannot {capability} at isolation {self.info.isolation!r}",
                hint="`rollyard doctor` says what is missing",
            )


async def _end(pidfd: int, timeout: float) -> None:
    """Wait until the first process is gone; the kernel lets it go only after all others in its namespace."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    loop.add_reader(pidfd, lambda: done.done() or done.set_result(None))
    try:
        async with asyncio.timeout(timeout):
            await asyncio.shield(done)
    except TimeoutError:
        raise SandboxInterrupted(
            f"the sandbox did not die within {timeout:g} s", hint="a process of it is stuck in the kernel"
        ) from None
    finally:
        loop.remove_reader(pidfd)
