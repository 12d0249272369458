"""What makes a sandbox an instance of a world: the world's files, its server, and a first sign of life from that."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib import resources

from rollyard.core.errors import EnvError, EnvUnavailable, Error, Unsupported
from rollyard.core.protocols import Job, Sandbox
from rollyard.envs.fleet.databases import SandboxDatabases
from rollyard.plane.compat.fleet.world import HOME, World

_LIB = "/srv/rollyard-lib"
_RESET_S = 60.0
_PROBE_S = 5.0
_PROBE = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"


async def boot(sandbox: Sandbox, world: World, variables: Mapping[str, str]) -> None:
    if not sandbox.capabilities.dial:
        raise Unsupported(f"backend {sandbox.info.backend} cannot reach a server inside a sandbox")
    if world.files is not None:
        await sandbox.upload_dir(world.files, HOME)
    else:
        await sandbox.mkdir(HOME)
    lone = resources.files("rollyard.inside").joinpath("plain_mcp.py").read_bytes()
    await sandbox.write(f"{_LIB}/plain_mcp.py", lone)
    job = await sandbox.start(world.command, cwd=HOME, env={**_environ(world), **variables})
    await _wait_until_healthy(sandbox, job, world)


async def reset(sandbox: Sandbox, world: World, databases: SandboxDatabases, seed: int | None) -> None:
    """As the world does it, or from `seed` to `current`."""
    if seed is not None and not world.seeds:
        raise Unsupported(f"environment {world.key} takes no seed")
    if world.reset:
        env = {**_environ(world), "ROLLYARD_SEED": "" if seed is None else str(seed)}
        done = await sandbox.exec(world.reset, cwd=HOME, env=env, timeout=_RESET_S)
        if not done.ok:
            raise EnvError(f"environment {world.key} could not be reset: {done.text[-500:]}")
    elif {"seed", "current"} <= set(world.databases):
        await databases.restore("current", "seed")


def _environ(world: World) -> dict[str, str]:
    return {"PYTHONPATH": _LIB, "PORT": str(world.port), "PYTHONUNBUFFERED": "1"}


async def _wait_until_healthy(sandbox: Sandbox, job: Job, world: World) -> None:
    """Returns when its health page does. A server that has ended, or takes too long, is reported with its last output."""
    pause = 0.02
    try:
        async with asyncio.timeout(world.boot_s):
            while not await _healthy(sandbox, world.port):
                if (code := await job.poll()) is not None:
                    raise EnvUnavailable(f"its server ended with {code}: {await _last_words(job)}")
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, 0.5)
    except TimeoutError as error:
        words = await _last_words(job)
        raise EnvUnavailable(f"no health after {world.boot_s:g} s: {words}") from error


async def _healthy(sandbox: Sandbox, port: int) -> bool:
    try:
        async with asyncio.timeout(_PROBE_S):
            stream = await sandbox.dial(port)
            try:
                await stream.send(_PROBE)
                return b" 200 " in (await stream.receive()).split(b"\r\n", 1)[0]
            finally:
                await stream.aclose()
    except (OSError, TimeoutError, Error):
        return False


async def _last_words(job: Job) -> str:
    said = await job.tail() + await job.tail(stderr=True)
    return said.decode("utf-8", "backslashreplace").strip()[-500:] or "no output"
