"""What a sandbox case stands on: a backend, a spec to open with, and how another process opens the same backend."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import anyio
import msgspec

from rollyard.core.ids import new_id
from rollyard.core.protocols import Backend, Opening, Sandbox
from rollyard.core.sandbox import Capabilities, Exit, SandboxSpec
from rollyard.testing.suite import Skip, check

# Another process that opens a sandbox of the same backend, says its id, and follows commands.
CHILD = """
import asyncio, json, sys
import msgspec, rollyard
from rollyard.core.sandbox import SandboxSpec
async def main():
    asked = json.loads(sys.argv[1])
    spec = msgspec.convert(asked["spec"], SandboxSpec)
    async with rollyard.sandbox.backend(asked["backend"], **asked["options"]) as backend:
        box = await backend.open(spec)
        await box.start(["sleep", "3600"])
        print(box.id, flush=True)
        if asked["stay"]:
            await asyncio.sleep(3600)
asyncio.run(main())
"""
ATTACH = """
import asyncio, json, sys
import rollyard
async def main():
    asked = json.loads(sys.argv[1])
    async with rollyard.sandbox.backend(asked["backend"], **asked["options"]) as backend:
        box = await backend.attach(asked["id"])
        done = await box.exec(["cat", asked["mark"]], timeout=30)
        code = (await (await box.job(asked["job"])).wait(30)).exit_code
        print(json.dumps({"mark": done.stdout.decode(), "code": code}))
asyncio.run(main())
"""


class SandboxFixture(msgspec.Struct, frozen=True, kw_only=True):
    """`name` and `options` open the same backend in another process; without them such cases are skipped. `layer`
    builds a layer to try and says which program it holds."""

    backend: Backend
    spec: SandboxSpec = SandboxSpec()
    name: str | None = None
    options: Mapping[str, Any] = {}
    parallel: int = 8
    layer: Callable[[], Awaitable[tuple[str, str]]] | None = None
    mount: str | None = None

    @property
    def can(self) -> Capabilities:
        return self.backend.capabilities

    def make_spec(self, **changes: Any) -> SandboxSpec:
        """The spec with changes, and a label that only this call's sandboxes have."""
        labels = {**self.spec.labels, "case": new_id("case"), **changes.pop("labels", {})}
        return msgspec.structs.replace(self.spec, labels=labels, **changes)

    def open(self, **changes: Any) -> Opening:
        return self.backend.open(self.make_spec(**changes))

    @contextlib.asynccontextmanager
    async def child(self, program: str, **asked: Any) -> AsyncGenerator[asyncio.subprocess.Process]:
        """A second process that runs `program` on the same backend; it is gone at the end."""
        if self.name is None:
            raise Skip("no name by which another process could open this backend")
        argument = json.dumps({"backend": self.name, "options": dict(self.options), **asked})
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, argument, env=dict(os.environ),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with anyio.CancelScope(shield=True):
                await process.wait()


async def sh(box: Sandbox, script: str, *, timeout: float = 30.0, **options: Any) -> Exit:
    return await box.exec(script, timeout=timeout, **options)


async def out(box: Sandbox, script: str, **options: Any) -> str:
    """stdout of a script that must succeed, without its last newline."""
    done = await sh(box, script, **options)
    check(done.exit_code == 0, f"{script!r} ended with {done.exit_code}: {done.text[-500:]}")
    return done.stdout.decode().removesuffix("\n")


async def scratch(box: Sandbox) -> str:
    """A directory to write in: /tmp is the host's where a sandbox has no root of its own."""
    return await out(box, "d=$(mktemp -d) && chmod 755 $d && echo $d")


def hearts(file: str) -> str:
    """A script of three programs that write to a file for ever: itself, a child, and one that left its session."""
    beat = f"while :; do echo NAME >> {file}; sleep 0.05; done"
    left, child = beat.replace("NAME", "left"), beat.replace("NAME", "child")
    return f"(setsid sh -c '{left}' &); ({child}) & {beat.replace('NAME', 'main')}"


async def all_beat(box: Sandbox, file: str) -> bool:
    return (await sh(box, f"sort -u {file}")).stdout.split() == [b"child", b"left", b"main"]


async def none_beats(box: Sandbox, file: str) -> bool:
    """Nothing was written for half a second. This needs no /proc, so it works in any sandbox."""
    before = (await box.stat(file)).size
    await anyio.sleep(0.5)
    return (await box.stat(file)).size == before


async def eventually(question: Callable[[], Awaitable[bool]], *, within: float, why: str) -> None:
    """Ask until the answer is true. For what another process or a timer brings about."""
    with anyio.move_on_after(within):
        while not await question():  # noqa: ASYNC110 - a timer or another process decides, and no event tells
            await anyio.sleep(0.1)
        return
    raise AssertionError(f"{why} (waited {within:.0f} s)")


async def raises(error: type[Exception] | tuple[type[Exception], ...], awaited: Awaitable[Any], why: str) -> Exception:
    """The error that must come. Another one, or none, fails the case."""
    try:
        await awaited
    except error as caught:
        return caught
    names = error.__name__ if isinstance(error, type) else " or ".join(one.__name__ for one in error)
    raise AssertionError(f"{why}: {names} expected, nothing was raised")
