"""Sandboxes of E2B or, by `url`, of a server that speaks its protocol, through the published SDK (the extra `e2b`; `cube` for
servers that need an older one).

The SDK runs a line in a login shell: the line first puts back the environment that was asked for, since a profile may have
changed it. It streams programs, so jobs have a stdin and the relay goes over one program's pipes, and its file calls are exact. A
deadline of the SDK's would be put on the program by the server, and the default is a minute: every call says none.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Any, ClassVar

import msgspec

from rollyard.core.errors import (
    ConfigError,
    Error,
    PathError,
    SandboxError,
    SandboxInterrupted,
    SandboxUnavailable,
    Unsupported,
)
from rollyard.core.sandbox import DEFAULT_PATH, Isolation, Resources, SandboxSpec
from rollyard.sandbox.paths import TREE_S
from rollyard.sandbox.remote.backend import RemoteBackend
from rollyard.sandbox.remote.errors import error_by_status, gone_error
from rollyard.sandbox.remote.images import name_image
from rollyard.sandbox.remote.provider import (
    FoundSandbox,
    KeptImage,
    SandboxProvider,
    SandboxRequest,
    StreamingLink,
    enum_text,
    import_sdk,
    require_key,
)
from rollyard.sandbox.retry import OpenLimits
from rollyard.sandbox.teardown import one_by_one

_USER = "rollyard.user"
_ROOT = "root"  # a template's own user may not write where tasks say; an image's is root, too
_REFERENCE = re.compile(r"[/:.@]")
_V2_FROM = (2, 51)
_MAX_TTL_S = 86400.0
_SNAPSHOT_S = 600.0
_TAIL = 4096
_CLEAN = (
    'for n in $(compgen -e); do unset "$n" 2>/dev/null; done; '
    'while IFS= read -r -d "" kv; do export "$kv" 2>/dev/null; done </proc/$$/environ; '
    f': "${{PATH:={DEFAULT_PATH}}}"; export PATH; unset SHLVL OLDPWD; exec '
)


class E2BBackend(RemoteBackend):
    """`key` is the API key (else `E2B_API_KEY`); `url` is a compatible server's address for both of its halves; `template`
    stands for `host` in a spec; `isolation` is what that server's sandboxes give. A sandbox that is to die with its opener
    is opened for `lease_s` at a time."""

    name: ClassVar[str] = "e2b"
    min_lease_s: ClassVar[float] = 15.0
    runs_as_users: ClassVar[bool] = True

    def __init__(
        self,
        *,
        key: str | None = None,
        url: str | None = None,
        template: str = "base",
        isolation: Isolation = "microvm",
        lease_s: float = 60.0,
        limits: OpenLimits | None = None,
    ) -> None:
        super().__init__(
            E2BProvider(key, url),
            image=template,
            isolation=isolation,
            lease_s=lease_s,
            limits=limits,
            snapshot=True,
            pause=True,
            stdin=True,
            network_none=True,
            extend=True,
            max_ttl_s=None if url else _MAX_TTL_S,  # a server of your own has its own rules
        )

    def _limits_taken(self, spec: SandboxSpec) -> set[str]:
        """A template's are compared with them."""
        return {"cpus", "memory_mb"}


class E2BProvider(SandboxProvider):
    keeps_images: ClassVar[bool] = True

    async def enter(self) -> None:
        self._sdk = import_sdk("e2b", "e2b", "e2b")
        found = self._key or os.environ.get("E2B_API_KEY")
        self._key = require_key("e2b", found, hint="set E2B_API_KEY, or pass key=")

    async def leave(self) -> None:
        """The SDK's connections are the process's own."""

    def _account(self) -> dict[str, Any]:
        """For calls about no sandbox in particular, which take no sandbox address."""
        return {"api_key": self._key, **({"api_url": self._url} if self._url else {})}

    def _options(self) -> dict[str, Any]:
        return {**self._account(), **({"sandbox_url": self._url} if self._url else {})}

    async def create(self, request: SandboxRequest) -> E2BLink:
        spec = request.spec
        made = await self._sdk.AsyncSandbox.create(
            request.image,
            timeout=math.ceil(min(request.lease_s, spec.ttl_s)),
            metadata=dict(request.labels),
            envs=dict(spec.env),
            allow_internet_access=spec.network == "host",
            headers={"Idempotency-Key": request.key},
            request_timeout=spec.boot_s,
            **self._options(),
        )
        link = E2BLink(self._sdk, made, spec.user or _ROOT)
        try:
            await self._compare(spec.resources, request.image, made)
        except BaseException:  # cancelled too: a sandbox that is too small is not left behind
            await asyncio.shield(asyncio.ensure_future(self.delete(link.id)))
            raise
        return link

    async def _compare(self, resources: Resources, template: str, made: Any) -> None:
        """A template brings its own limits: they have to be at least what was asked for. A server may show 0 for no limit."""
        if resources.cpus is None and resources.memory_mb is None:
            return
        info = await made.get_info()
        for name, wanted, given in (
            ("cpus", resources.cpus or 0, info.cpu_count),
            ("memory_mb", resources.memory_mb or 0, info.memory_mb),
        ):
            if given and wanted > given:
                raise Unsupported(
                    f"template {template!r} has resources.{name}={given}, and {wanted:g} was asked for",
                    hint="name a Docker image or a Dockerfile, which is built to measure, or a larger template",
                )

    async def take_image(self, image: str, resources: Resources) -> str:
        """A template or a snapshot by its name; any other name with a tag, a host or a path is a Docker image, which a template
        is built of once."""
        if not _REFERENCE.search(image) or await self._exists(image):
            return image
        name = name_image(image, image.encode(), msgspec.json.encode(resources))
        if not await self._exists(name):
            await self._build(name, self._sdk.Template().from_image(image), resources)
        return name

    async def _exists(self, name: str) -> bool:
        """By the template API, which older SDKs do not have: there every image is a template."""
        template = getattr(self._sdk, "AsyncTemplate", None)
        return template is None or bool(await template.exists(name, **self._account()))

    async def _build(self, name: str, template: Any, resources: Resources) -> None:
        limits: dict[str, Any] = {}
        if resources.cpus is not None:
            limits["cpu_count"] = math.ceil(resources.cpus)
        if resources.memory_mb is not None:
            limits["memory_mb"] = resources.memory_mb + resources.memory_mb % 2
        await self._sdk.AsyncTemplate.build(template, name, **limits, **self._account())

    async def find_image(self, name: str) -> str | None:
        return name if await self._exists(name) else None

    async def list_images(self) -> Sequence[KeptImage]:
        found: list[KeptImage] = []
        pages = self._sdk.AsyncSandbox.list_snapshots(**self._account())
        while pages.has_next:
            for one in await pages.next_items():
                title = (one.names or [one.snapshot_id])[0].rpartition("/")[2].partition(":")[0]
                found.append(KeptImage(name=title, image=one.snapshot_id))
        return found

    async def delete_image(self, image: str) -> None:
        await self._sdk.AsyncSandbox.delete_snapshot(image, **self._account())

    async def find(self, sandbox_id: str) -> tuple[E2BLink, FoundSandbox]:
        """One that is paused is resumed by it."""
        made = await self._sdk.AsyncSandbox.connect(sandbox_id, timeout=1, **self._options())
        found = _describe(await made.get_info())
        return E2BLink(self._sdk, made, found.labels.get(_USER) or _ROOT), found

    async def list(self, labels: Mapping[str, str]) -> Sequence[FoundSandbox]:
        found: list[FoundSandbox] = []
        pages = self._sdk.AsyncSandbox.list(query=self._sdk.SandboxQuery(metadata=dict(labels)), **self._account())
        while pages.has_next:
            found += [_describe(one) for one in await pages.next_items()]
        return found

    async def delete(self, sandbox_id: str) -> bool:
        return bool(await self._sdk.AsyncSandbox.kill(sandbox_id, **self._account()))

    def delete_now(self, ids: Sequence[str], seconds: float) -> Sequence[str]:
        def one(sandbox_id: str, left: float) -> bool:
            try:
                self._sdk.Sandbox.kill(sandbox_id, request_timeout=left, **self._account())
            except Exception:  # noqa: BLE001 - whatever it was, the sandbox may still be there, and is reported as such
                return False
            return True

        return one_by_one(one)(ids, seconds)

    def fault(self, error: Exception, text: str, about: str) -> Error:
        """By the names of classes: the SDK's versions do not have the same ones."""
        kinds, status = {kind.__name__ for kind in type(error).__mro__}, getattr(error, "status_code", None)
        if kinds & {"SandboxNotRunningException", "SandboxNotFoundException"}:
            return gone_error(about) if about else ConfigError(f"the server knows no such template: {text}")
        if "AuthenticationException" in kinds:
            return ConfigError("the server does not accept the key", hint="set E2B_API_KEY, or pass key=")
        if "RateLimitException" in kinds:
            status = 429
        if kinds & {"ConnectError", "ConnectTimeout"} and type(error).__module__.startswith("httpx"):
            return SandboxUnavailable(f"the sandbox server cannot be reached: {text}", hint="is its address right?")
        if status == 501:
            return Unsupported(f"this server does not serve it: {text}")
        if not about and status in (404, 405) and _sdk_version() >= _V2_FROM:
            return ConfigError(
                "this server has no /v2/sandboxes, which e2b 2.51 and later ask for",
                hint="pip install 'e2b>=2.21,<2.51' (the extra `cube`)",
            )
        if "BuildException" in kinds:
            return ConfigError(f"the template could not be built: {text}")
        if "InvalidArgumentException" in kinds:
            return ConfigError(f"the server refused it: {text}")
        found = error_by_status(status, text, about=about)
        if found is not None:
            return found
        if "SandboxException" not in kinds or kinds & {"SandboxUnreachableException", "TimeoutException"}:
            return SandboxInterrupted(f"a call to the sandbox server broke: {text}")
        return SandboxError(text)


class E2BLink(StreamingLink):
    """An `e2b.AsyncSandbox`, with programs and files of `user`."""

    def __init__(self, sdk: Any, made: Any, user: str) -> None:
        self.id: str = made.sandbox_id
        self._sdk, self._made, self._user = sdk, made, user

    def as_user(self, user: str) -> E2BLink:
        return E2BLink(self._sdk, self._made, _ROOT if user == "0" else user)

    async def run(self, line: str, *, env: Mapping[str, str], timeout: float) -> str:
        handle = await self._start(line, env)
        try:
            return str((await handle.wait()).stdout)
        except self._sdk.CommandExitException as ended:
            return str(ended.stdout)
        except asyncio.CancelledError:
            await handle.disconnect()
            raise

    async def start(self, line: str, *, env: Mapping[str, str]) -> E2BProgram:
        program = E2BProgram()
        options = {"stdin": True, "on_stdout": program.take_output, "on_stderr": program.take_errors}
        if "retain_output" in inspect.signature(self._made.commands.run).parameters:
            options["retain_output"] = False  # else the SDK keeps all that a relay ever said
        program.handle = await self._start(line, env, **options)
        return program

    async def _start(self, line: str, env: Mapping[str, str], **options: Any) -> Any:
        return await self._made.commands.run(
            _CLEAN + line,
            background=True,
            envs=dict(env),
            cwd="/",  # the sandbox's own working directory may have been removed
            user=self._user,
            timeout=0,
            request_timeout=0,
            **options,
        )

    async def put(self, path: str, data: bytes) -> None:
        try:
            await self._made.files.write(path, data, user=self._user, request_timeout=TREE_S)
        except self._sdk.NotEnoughSpaceException:
            raise PathError(path, "ENOSPC", hint="the disk is full") from None

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        data = bytearray()
        async with AsyncExitStack() as stack:
            stream = await self._made.files.read(path, format="stream", user=self._user, request_timeout=TREE_S)
            if hasattr(stream, "aclose"):
                stack.push_async_callback(stream.aclose)
            async for chunk in stream:
                data += chunk
                if len(data) > max_bytes:
                    raise PathError(path, "EFBIG", hint=f"it is larger than max_bytes={max_bytes}")
        return bytes(data)

    async def alive(self) -> bool:
        return bool(await self._made.is_running(request_timeout=15))

    async def keep(self, seconds: float) -> None:
        await self._made.set_timeout(math.ceil(seconds))

    async def extend(self, end: float, labels: Mapping[str, str]) -> None:
        """Its time is what `keep` says; its labels cannot be changed."""

    async def keep_image(self, name: str) -> str:
        await self._made.create_snapshot(name, request_timeout=_SNAPSHOT_S)
        return name

    async def snapshot(self) -> str:
        return str((await self._made.create_snapshot(request_timeout=_SNAPSHOT_S)).snapshot_id)

    async def pause(self) -> None:
        await self._made.pause(request_timeout=_SNAPSHOT_S)

    async def resume(self, seconds: float) -> None:
        await self._made.connect(math.ceil(seconds), request_timeout=_SNAPSHOT_S)


class E2BProgram:
    """The SDK's handle of a program, whose output comes by callbacks."""

    def __init__(self) -> None:
        self.handle: Any = None
        self._chunks: asyncio.Queue[str | None] = asyncio.Queue()
        self._errors = ""

    def take_output(self, text: str) -> None:
        self._chunks.put_nowait(text)

    def take_errors(self, text: str) -> None:
        self._errors = (self._errors + text)[-_TAIL:]

    async def output(self) -> AsyncIterator[str]:
        waiting = asyncio.create_task(self._wait(), name="rollyard-e2b-program")
        try:
            while (text := await self._chunks.get()) is not None:
                yield text
        finally:
            waiting.cancel()

    async def _wait(self) -> None:
        try:
            await self.handle.wait()
        except Exception as error:  # noqa: BLE001 - any end of the program is the end of its output, and becomes its last line
            self._chunks.put_nowait(f"\n[{type(error).__name__}]\n")
        finally:
            self._chunks.put_nowait(None)

    def last_errors(self) -> bytes:
        return self._errors.encode()

    async def write(self, data: bytes) -> None:
        await self.handle.send_stdin(data)

    async def close_stdin(self) -> None:
        await self.handle.close_stdin()

    async def kill(self) -> None:
        await self.handle.kill()

    async def disconnect(self) -> None:
        await self.handle.disconnect()


def _describe(made: Any) -> FoundSandbox:
    return FoundSandbox(
        id=made.sandbox_id,
        image=made.template_id,
        labels=made.metadata,
        created_at=made.started_at.timestamp(),
        state=enum_text(made.state),
        expires_at=made.end_at.timestamp(),
    )


def _sdk_version() -> tuple[int, ...]:
    return tuple(int(part) for part in version("e2b").split(".")[:2])
