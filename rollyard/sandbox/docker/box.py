"""One live container, as its opener or a process that attached sees it."""

from __future__ import annotations

import asyncio
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rollyard.core.errors import SandboxError, SandboxGone
from rollyard.core.ids import new_id
from rollyard.core.log import Log
from rollyard.core.program import Program, check_job_id
from rollyard.core.protocols import ByteStream, Listener
from rollyard.core.sandbox import Capabilities, SandboxInfo
from rollyard.sandbox import egress, job_shim
from rollyard.sandbox.docker import container, keeper
from rollyard.sandbox.docker.container import Identity
from rollyard.sandbox.docker.engine import DockerEngine, EngineRefused, Stream
from rollyard.sandbox.docker.faults import is_gone, translate_faults
from rollyard.sandbox.docker.files import DockerFiles
from rollyard.sandbox.docker.images import SNAPSHOTS
from rollyard.sandbox.docker.job import DockerJob
from rollyard.sandbox.docker.routes import NetnsAccess, PortAccess
from rollyard.sandbox.gpus import GpuReservation

_COMMIT_S = 600.0
_KILL_S = 60.0
_KILL_TRIES = 10
_ADD_NAMES = """for name; do
case "$(cat /etc/hosts)" in *"127.0.0.1	$name"*) ;; *) printf '127.0.0.1\\t%s\\n' "$name" >> /etc/hosts ;; esac
done"""


class DockerSandbox(DockerFiles):
    """`lifeline` is the keeper's stdin when the sandbox is to die with this process."""

    def __init__(
        self,
        engine: DockerEngine,
        found: str,
        who: Identity,
        info: SandboxInfo,
        capabilities: Capabilities,
        *,
        env: Mapping[str, str] | None = None,
        access: Callable[[DockerSandbox], PortAccess],
        lifeline: Stream | None = None,
        forget: Callable[[str], None],
    ) -> None:
        super().__init__(engine, found, who, env or {})
        self.info = info
        self.capabilities = capabilities
        self.container = found
        self._access, self._lifeline, self._forget = access(self), lifeline, forget
        self._jobs: list[DockerJob] = []
        self.volumes: set[str] = set()  # of the engine's, that end with this sandbox
        self.reserved: GpuReservation | None = None
        self._killed = False
        self._names: bytes | None = None  # `resolv.conf` as the image has it, where the proxy's is in its place
        self._log = Log("rollyard.sandbox.docker")

    async def _start(self, program: Program) -> DockerJob:
        name = program.job_id or new_id("job")
        merged = {**self._env, **program.env}
        place, user = self._place(program.cwd), program.user or self._who.user
        if not program.stdin:
            launched = msgspec.structs.replace(program, job_id=name, env=merged, cwd=place, user=user)
            await job_shim.launch(self.exec_plain, launched)
            return DockerJob(self, name)
        argv = job_shim.attach_argv(program.argv, name)
        if not (await self.exists(place)):
            raise container.no_directory(place)
        entered = ["/bin/sh", "-c", 'cd -- "$1" && shift && exec "$@"', "rollyard", place, *argv]
        _, stream = await self.attach(entered, env={**merged, job_shim.MARK: name}, user=user)
        job = DockerJob(self, name, stdin=stream)
        self._jobs.append(job)
        await self._await_known(job)
        return job

    async def _await_known(self, job: DockerJob) -> None:
        """The engine starts an attached program in its own time; a job exists once its directory does."""
        deadline = time.monotonic() + job_shim.STEP_S
        while time.monotonic() < deadline:
            if await self._lstat(f"{job_shim.ROOT}/{job.id}/pid") is not None:
                return
            await asyncio.sleep(0.02)
        raise SandboxError(f"job {job.id} did not start in {job_shim.STEP_S:g} s")

    async def job(self, job_id: str) -> DockerJob:
        job = DockerJob(self, check_job_id(job_id), started=0.0)
        await job.look()
        return job

    async def kill_processes(self) -> None:
        """Every process but the first. Where no program can be started for it (a fork bomb), the first does it itself."""
        async with self._access.renewing():
            await self._end_all()

    async def _end_all(self) -> None:
        for _ in range(_KILL_TRIES):
            try:
                if (await self.exec_plain(["/bin/sh", "-c", "kill -9 -1; exit 0"], timeout=_KILL_S)).ok:
                    return
            except SandboxGone:
                raise
            except SandboxError as error:
                self._log.info("sandbox.kill_by_signal", sandbox=self.id, why=error.message)
            with translate_faults(self.id):
                await self._engine.call("POST", f"containers/{self._container}/kill", params={"signal": "SIGUSR1"})
            await asyncio.sleep(0.2)
        raise SandboxError(f"the programs of sandbox {self.id} could not be ended", hint="kill the sandbox")

    async def listen(self, port: int = 0) -> Listener:
        return await self._access.listen(port)

    async def open_volumes(self, paths: Sequence[str]) -> None:
        """Volumes are every user's to write to; an engine makes them root's."""
        if paths:
            await self.exec_plain(["/bin/sh", "-c", 'chmod 777 "$@"', "rollyard", *paths], timeout=_KILL_S)

    async def add_names(self, names: Sequence[str]) -> None:
        """Call its loopback by these too. A container on another one's network shares that one's names with Docker, not with
        Podman."""
        if names:
            await self.exec_plain(["/bin/sh", "-c", _ADD_NAMES, "rollyard", *names], timeout=_KILL_S)

    def use_egress_of(self, other: DockerSandbox, names: Sequence[str]) -> None:
        """Programs here get the proxy of the sandbox whose network they share."""
        self._env = {**other.describe_proxy(names), **self._env}

    def describe_proxy(self, names: Sequence[str]) -> dict[str, str]:
        served = isinstance(self._access, NetnsAccess)
        return egress.variables(egress.ADDRESS if served else egress.RELAYED, names)

    async def attach_egress(self, hosts: Sequence[str], names: Sequence[str] = ()) -> None:
        """Put the proxy of its allow-list to work. With a socket in its namespace names are served too."""
        ports = self._access if isinstance(self._access, NetnsAccess) else None
        if ports is not None:
            self._names = (await self.exec_plain(["/bin/sh", "-c", "cat /etc/resolv.conf"], timeout=_KILL_S)).stdout
            await self._write_names(egress.RESOLV_CONF.encode())
        self._env = {**self.describe_proxy(names), **self._env}
        self.egress = await egress.attach(self, hosts, ports)

    async def _write_names(self, content: bytes) -> None:
        """Into `resolv.conf` as it is: on most engines it is a mount, which cannot be replaced."""
        line = f"printf '%s' {shlex.quote(content.decode('utf-8', 'replace'))} > /etc/resolv.conf"
        await self.exec_plain(["/bin/sh", "-c", line], timeout=_KILL_S)

    async def dial(self, port: int) -> ByteStream:
        return await self._access.dial(port)

    async def snapshot(self) -> str:
        """The name of an image with all that was written here. What is in mounts and layers is not in it."""
        if self._names is None:
            return await self._commit()
        await self._write_names(self._names)
        try:
            return await self._commit()
        finally:
            await self._write_names(egress.RESOLV_CONF.encode())

    async def _commit(self) -> str:
        tag = new_id("snap")
        params = {"container": self._container, "repo": SNAPSHOTS, "tag": tag, "pause": True}
        config = {"Entrypoint": ["/bin/sh"], "Cmd": [], "User": self._who.user, "WorkingDir": self._who.workdir}
        with translate_faults(self.id):
            await self._engine.call(
                "POST", "commit", params=params, timeout=_COMMIT_S, body={**config, "Labels": {container.MARK: ""}}
            )
        return f"{SNAPSHOTS}:{tag}"

    async def extend(self, ttl_s: float) -> None:
        """From now on `ttl_s`. The keeper gets the new end, and the name has it for all others."""
        end = time.time() + ttl_s
        await self.script(keeper.EXTEND, str(math.ceil(ttl_s)))
        name = msgspec.structs.replace(self._who, expires_at=end).name
        with translate_faults(self.id):
            await self._engine.call("POST", f"containers/{self._container}/rename", params={"name": name})
        self.info = msgspec.structs.replace(self.info, expires_at=end)

    async def pause(self) -> None:
        with translate_faults(self.id):
            await self._engine.call("POST", f"containers/{self._container}/pause")

    async def resume(self) -> None:
        with translate_faults(self.id):
            await self._engine.call("POST", f"containers/{self._container}/unpause")

    async def kill(self) -> bool:
        """True when this call did it, False when it was dead already."""
        if self._killed:
            return False
        self._killed = True
        try:
            return await remove(self._engine, self._container)
        finally:
            for job in self._jobs:
                job.let_go()
            if self._lifeline is not None:
                self._lifeline.close()
            if self.egress is not None:
                await self.egress.aclose()
            await self._access.aclose()
            if self.reserved is not None:
                self.reserved.release()
            self._forget(self.id)
            for name in self.volumes:
                await remove_volume(self._engine, name)


async def remove(engine: DockerEngine, found: str) -> bool:
    """Kill and delete a container; False when there was none, or another process is deleting it."""
    try:
        await engine.call("DELETE", f"containers/{found}", params={"force": True, "v": True}, timeout=_KILL_S)
    except EngineRefused as refused:
        if refused.status in (404, 409) or is_gone(refused):
            return False
        raise
    return True


async def remove_volume(engine: DockerEngine, name: str) -> None:
    """One that a container still shows stays, for a reaper."""
    try:
        await engine.call("DELETE", f"volumes/{name}", timeout=_KILL_S)
    except EngineRefused as refused:
        if refused.status not in (404, 409):
            raise
