"""The e2b backend: sandboxes of E2B or, by `url`, of a server that speaks its protocol."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
import uuid
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio
import structlog

from rollyard.core.errors import ConfigError, Error, IsolationTooWeak, Unsupported
from rollyard.core.sandbox import Capabilities, Isolation, SandboxInfo, SandboxSpec, at_least
from rollyard.sandbox import shim
from rollyard.sandbox.e2b.box import E2BSandbox
from rollyard.sandbox.e2b.faults import gone, sdk, speaking, translated
from rollyard.sandbox.e2b.lease import Lease
from rollyard.sandbox.opening import Opening
from rollyard.sandbox.paths import ROOT
from rollyard.sandbox.retry import LOOKS, OpenLimits, Throttle, retrying
from rollyard.sandbox.teardown import Owned, delete_all, described, not_deleted, one_by_one

MARK = "rollyard"
_OWN = "rollyard."
_PREPARE = f"""mkdir -p {ROOT}/x {ROOT}/jobs && chmod 1777 {ROOT} {ROOT}/x {ROOT}/jobs
[ -z "$1" ] || [ -d "$1" ] || mkdir -p -- "$1"; exit 0"""
_CLEANUP_S = 20.0
_CLOSE_S = 120.0
_ONE_S = 30.0


class E2BBackend:
    """`key` is the API key (else `E2B_API_KEY`); `url` is a compatible server's address for both of its halves; `template`
    stands for `host` in a spec; `isolation` is what that server's sandboxes give. A sandbox that is to die with its opener
    is opened for `lease_s` at a time."""

    name = "e2b"

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
        if lease_s < 15:
            raise ConfigError(f"lease_s must be at least 15, got {lease_s!r}")
        self._key, self._url, self._template = key, url, template
        self._isolation: Isolation = isolation
        self._lease_s = lease_s
        self._limits = limits or OpenLimits(opening=8)
        self._throttle = Throttle(self._limits)
        self._boxes: dict[str, E2BSandbox] = {}
        self._owned = Owned(self.name, one_by_one(self._delete_now))
        self._sdk: Any = None
        self._log: Any = structlog.get_logger("rollyard.sandbox.e2b")

    async def __aenter__(self) -> Self:
        self._sdk = sdk()
        self._key = self._key or os.environ.get("E2B_API_KEY")
        if not self._key:
            raise ConfigError("the e2b backend needs a key", hint="set E2B_API_KEY, or pass key=")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.move_on_after(_CLOSE_S, shield=True):
            own = {name: self._boxes[name] for name in self._owned}
            if left := await delete_all(list(own), lambda name: own[name].kill()):
                self._log.warning("sandboxes.not_deleted", error=str(not_deleted(left)))
        for box in self._boxes.values():
            if box.lease is not None:
                box.lease.cancel()

    def close_now(self) -> list[str]:
        """Delete the sandboxes of this object without an event loop; returns the ids of those that may still be there. It
        also happens by itself when the process exits."""
        return self._owned.delete_now()

    def _delete_now(self, sandbox_id: str, seconds: float) -> bool:
        try:
            self._sdk.Sandbox.kill(sandbox_id, request_timeout=min(_ONE_S, seconds), **self._control())
        except Exception as error:  # noqa: BLE001 - the SDK raises kinds of four packages; all mean that it may still be there
            self._log.warning(
                "sandbox.not_deleted",
                sandbox_id=sandbox_id,
                error=str(translated(error, about=sandbox_id, key=self._key)),
            )
            return False
        self._boxes.pop(sandbox_id, None)
        return True

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            isolation=self._isolation,
            snapshot=True,
            pause=True,
            stdin=True,
            listen=True,
            dial=True,
            network_none=True,
            attach=True,
            list=True,
            ttl=True,
            extend=True,
            lifetime_ttl=True,
            bytes_exact=True,
            tree_kill=True,
            max_ttl_s=86400.0,
            max_concurrent=self._limits.live,
            creates_per_s=self._limits.creates_per_s,
        )

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"api_key": self._key}
        if self._url is not None:
            options.update(api_url=self._url, sandbox_url=self._url)
        return options

    def _control(self) -> dict[str, Any]:
        """For calls about no sandbox in particular, which take no sandbox address."""
        return {name: value for name, value in self._options().items() if name != "sandbox_url"}

    def open(self, spec: SandboxSpec) -> Opening[E2BSandbox]:
        self._check(spec)
        return Opening(lambda: self._patiently(spec))

    def _check(self, spec: SandboxSpec) -> None:
        if not at_least(self._isolation, spec.min_isolation):
            raise IsolationTooWeak(
                f"this e2b backend gives isolation {self._isolation!r}, {spec.min_isolation!r} was asked for"
            )
        refused = {
            "layers": spec.layers,
            "mounts": spec.mounts,
            "idle_ttl_s": spec.idle_ttl_s,
            "resources.gpus or tpu": spec.resources.accelerated,
            "disk='tmpfs'": spec.disk == "tmpfs",
            "network='allowlist'": spec.network == "allowlist",
            **{f"options.{name}": True for name in spec.options},
        }
        for name, asked in refused.items():
            if asked:
                raise Unsupported(f"the e2b backend has no {name}", hint="leave it out, or use another backend")
        limits = ("cpus", "memory_mb", "disk_mb", "pids")
        if any(getattr(spec.resources, name) is not None for name in limits):
            raise Unsupported("the e2b backend takes its limits from the template", hint="leave resources out")
        if spec.network == "host" and not spec.allow_unsafe:
            raise ConfigError("network='host' gives the sandbox the internet", hint="say allow_unsafe=True to have it")

    async def _patiently(self, spec: SandboxSpec) -> E2BSandbox:
        key = str(uuid.uuid4())  # one for all tries: a create whose answer was lost makes no second sandbox
        async with self._throttle.place(len(self._boxes)):
            making = asyncio.ensure_future(self._one(spec, key))
            try:
                return await asyncio.shield(making)
            except asyncio.CancelledError:
                with anyio.move_on_after(_CLEANUP_S, shield=True):
                    await asyncio.wait([making])
                if making.done() and not making.cancelled() and making.exception() is None:
                    with anyio.move_on_after(_CLEANUP_S, shield=True):
                        await making.result().kill()
                making.cancel()
                raise

    async def _one(self, spec: SandboxSpec, key: str) -> E2BSandbox:
        """Exactly one sandbox, or none. A create that broke may have made one: a server that knows the key gives it out
        the next time, and what one that does not has made too many is found by its label and deleted."""
        broke: list[Error] = []

        async def create() -> E2BSandbox:
            try:
                return await self._create(spec, key)
            except Error as error:
                broke.append(error)
                raise

        kept: str | None = None
        try:
            box = await retrying(create, self._limits, timeout=spec.boot_s, idempotent=True)
            kept = box.id
        finally:
            if any(error.retry == "if_idempotent" for error in broke):
                with anyio.move_on_after(_CLEANUP_S, shield=True):
                    await self._delete_others(key, kept)
        await self._prepare(box, spec)
        return box

    async def _delete_others(self, key: str, kept: str | None) -> None:
        try:
            made = [one.sandbox_id for one in await self._found({f"{_OWN}open": key})]
            left = await delete_all([name for name in made if name != kept], self._kill)
        except Error as error:
            left = {"of a create that broke": error}
        if left:
            self._log.warning("sandboxes.not_deleted", error=str(not_deleted(left)))

    async def _create(self, spec: SandboxSpec, key: str) -> E2BSandbox:
        now = time.time()
        ttl = min(spec.ttl_s, self._lease_s) if spec.lifetime == "owner" else spec.ttl_s
        own = {
            "workdir": spec.workdir or "",
            "user": spec.user or "",
            "end": str(now + spec.ttl_s),
            "lifetime": spec.lifetime,
            "open": key,
        }
        metadata = {**spec.labels, MARK: "1", **{_OWN + name: value for name, value in own.items()}}
        template = self._template if spec.image == "host" else spec.image
        with speaking("", self._key):
            made = await self._sdk.AsyncSandbox.create(
                template,
                timeout=math.ceil(ttl),
                metadata=metadata,
                envs=dict(spec.env),
                allow_internet_access=spec.network == "host",
                headers={"Idempotency-Key": key},
                request_timeout=spec.boot_s,
                **self._options(),
            )
        return self._wrapped(made, self._info(made.sandbox_id, template, metadata, now, now + spec.ttl_s), metadata)

    async def _prepare(self, box: E2BSandbox, spec: SandboxSpec) -> None:
        argv = ["/bin/sh", "-c", _PREPARE, "rollyard", spec.workdir or ""]
        try:
            await shim.repeated(box.plain, argv, timeout=shim.STEP_S)
        except BaseException:  # cancelled too: an unprepared sandbox is nobody's
            with anyio.move_on_after(_CLEANUP_S, shield=True), contextlib.suppress(Error):  # the first error is told
                await self._kill(box.id)
            raise
        self._boxes[box.id] = box
        if spec.lifetime == "owner":
            box.lease = Lease(box.id, self._lease_s, box.info.created_at + spec.ttl_s, box.keep)
            self._owned.add(box.id)

    def _info(
        self,
        sandbox_id: str,
        image: str,
        metadata: Mapping[str, str],
        created: float,
        end: float,
        state: str = "running",
    ) -> SandboxInfo:
        return SandboxInfo(
            id=sandbox_id,
            backend=self.name,
            image=image,
            isolation=self._isolation,
            labels={name: value for name, value in metadata.items() if name != MARK and not name.startswith(_OWN)},
            created_at=created,
            expires_at=end,
            state=state,
        )

    def _listed(self, found: Any) -> SandboxInfo:
        """A sandbox as the server tells of it. What it is kept for now is the end, but for one that is leased and so may
        be kept until the end it was opened with."""
        end = found.end_at.timestamp()
        if found.metadata.get(f"{_OWN}lifetime") == "owner":
            end = max(end, float(found.metadata.get(f"{_OWN}end") or 0))
        state = str(getattr(found.state, "value", found.state))
        return self._info(found.sandbox_id, found.template_id, found.metadata, found.started_at.timestamp(), end, state)

    def _wrapped(self, made: Any, info: SandboxInfo, metadata: Mapping[str, str]) -> E2BSandbox:
        return E2BSandbox(
            made,
            info,
            self.capabilities,
            key=self._key,
            workdir=metadata.get(f"{_OWN}workdir") or "/",
            user=metadata.get(f"{_OWN}user") or None,
            forget=self._drop,
        )

    def _drop(self, sandbox_id: str) -> None:
        box = self._boxes.pop(sandbox_id, None)
        self._owned.discard(sandbox_id)
        if box is not None and box.lease is not None:
            box.lease.cancel()

    async def attach(self, sandbox_id: str) -> E2BSandbox:
        """A sandbox that another process opened. One that is paused is resumed by it."""
        with speaking(sandbox_id, self._key):
            made = await self._sdk.AsyncSandbox.connect(sandbox_id, timeout=1, **self._options())
            found = await made.get_info()
        if MARK not in found.metadata:
            raise gone(sandbox_id)
        return self._wrapped(made, self._listed(found), found.metadata)

    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        return [self._listed(one) for one in await self._found(labels or {})]

    async def _found(self, labels: Mapping[str, str]) -> list[Any]:
        return await retrying(partial(self._pages, {**labels, MARK: "1"}), LOOKS, idempotent=True)

    async def _pages(self, metadata: Mapping[str, str]) -> list[Any]:
        found: list[Any] = []
        with speaking("", self._key):
            pages = self._sdk.AsyncSandbox.list(query=self._sdk.SandboxQuery(metadata=metadata), **self._control())
            while pages.has_next:
                found += await pages.next_items()
        return found

    async def reap(self, labels: Mapping[str, str] | None = None, older_than: float | None = None) -> list[str]:
        """Delete sandboxes of this project; with labels or an age, those that they describe, else those past their end."""
        old = described(await self.list(labels), labels, older_than)
        if left := await delete_all(old, self._kill):
            raise not_deleted(left)
        return old

    async def _kill(self, sandbox_id: str) -> None:
        async def end() -> None:
            with speaking(sandbox_id, self._key):
                await self._sdk.AsyncSandbox.kill(sandbox_id, **self._control())

        await retrying(end, LOOKS, idempotent=True)
