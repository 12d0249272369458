"""The e2b backend: sandboxes of E2B or, by `url`, of a server that speaks its protocol."""

from __future__ import annotations

import asyncio
import math
import os
import time
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import anyio
import structlog

from rollyard.core.errors import ConfigError, Error, IsolationTooWeak, Unsupported
from rollyard.core.sandbox import Capabilities, Isolation, SandboxInfo, SandboxSpec, at_least
from rollyard.sandbox.e2b.box import E2BSandbox
from rollyard.sandbox.e2b.faults import gone, sdk, speaking
from rollyard.sandbox.e2b.programs import ROOT
from rollyard.sandbox.opening import Opening
from rollyard.sandbox.retry import OpenLimits, Throttle, retrying

MARK = "rollyard"
_OWN = "rollyard."
_PREPARE = f"""mkdir -p {ROOT}/x {ROOT}/jobs && chmod 1777 {ROOT} {ROOT}/x {ROOT}/jobs
[ -z "$1" ] || [ -d "$1" ] || mkdir -p -- "$1"; exit 0"""
_CLEANUP_S = 20.0


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
        self._boxes: dict[str, tuple[E2BSandbox, asyncio.Task[None] | None]] = {}
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
        own = [box for box, lease in self._boxes.values() if lease is not None]
        with anyio.move_on_after(_CLEANUP_S, shield=True):
            for result in await asyncio.gather(*(box.kill() for box in own), return_exceptions=True):
                if isinstance(result, Exception):
                    self._log.warning("sandbox.kill_failed", error=str(result))

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            isolation=self._isolation,
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
            making = asyncio.ensure_future(retrying(lambda: self._create(spec, key), self._limits, timeout=spec.boot_s))
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

    async def _create(self, spec: SandboxSpec, key: str) -> E2BSandbox:
        owned = spec.lifetime == "owner"
        now = time.time()
        ttl = min(spec.ttl_s, self._lease_s) if owned else spec.ttl_s
        own = {"workdir": spec.workdir or "", "user": spec.user or "", "end": str(now + spec.ttl_s)}
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
                request_timeout=spec.boot_s + 15,
                **self._options(),
            )
        info = self._info(made.sandbox_id, template, metadata, now)
        box = self._wrapped(made, info, metadata)
        try:
            await box.script(_PREPARE, spec.workdir or "")
        except BaseException:  # cancelled too: an unprepared sandbox is nobody's
            with anyio.move_on_after(_CLEANUP_S, shield=True):
                await made.kill()
            raise
        lease = asyncio.create_task(self._renew(box, now + spec.ttl_s)) if owned else None
        self._boxes[box.id] = (box, lease)
        return box

    async def _renew(self, box: E2BSandbox, end: float) -> None:
        """Keep an owned sandbox for as long as this process lives and its time lasts."""
        while (left := end - time.time()) > self._lease_s / 3:
            await asyncio.sleep(self._lease_s / 3)
            try:
                with speaking(box.id, self._key):
                    await self._sdk.AsyncSandbox.set_timeout(
                        box.id, math.ceil(max(1.0, min(self._lease_s, left))), **self._control()
                    )
            except Error as error:
                self._log.warning("sandbox.lease_not_renewed", sandbox_id=box.id, error=str(error))
                if error.retry == "gone":
                    return

    def _info(self, sandbox_id: str, image: str, metadata: Mapping[str, str], created: float) -> SandboxInfo:
        end = metadata.get(f"{_OWN}end")
        return SandboxInfo(
            id=sandbox_id,
            backend=self.name,
            image=image,
            isolation=self._isolation,
            labels={name: value for name, value in metadata.items() if name != MARK and not name.startswith(_OWN)},
            created_at=created,
            expires_at=float(end) if end else None,
        )

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
        _, lease = self._boxes.pop(sandbox_id, (None, None))
        if lease is not None:
            lease.cancel()

    async def attach(self, sandbox_id: str) -> E2BSandbox:
        with speaking(sandbox_id, self._key):
            made = await self._sdk.AsyncSandbox.connect(sandbox_id, timeout=1, **self._options())
            found = await made.get_info()
        if MARK not in found.metadata:
            raise gone(sandbox_id)
        info = self._info(sandbox_id, found.template_id, found.metadata, found.started_at.timestamp())
        return self._wrapped(made, info, found.metadata)

    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        found: list[SandboxInfo] = []
        with speaking("", self._key):
            query = self._sdk.SandboxQuery(metadata={**(labels or {}), MARK: "1"})
            pages = self._sdk.AsyncSandbox.list(query=query, **self._control())
            while pages.has_next:
                found += [
                    self._info(one.sandbox_id, one.template_id, one.metadata, one.started_at.timestamp())
                    for one in await pages.next_items()
                ]
        return found

    async def reap(self, labels: Mapping[str, str] | None = None, older_than: float | None = None) -> list[str]:
        """Delete sandboxes of this project; with labels or an age, those that they describe, else those past their end."""
        named, now = labels is not None or older_than is not None, time.time()
        old = [
            info.id
            for info in await self.list(labels)
            if (named and now - info.created_at >= (older_than or 0.0))
            or (info.expires_at is not None and info.expires_at < now)
        ]
        for at in range(0, len(old), 100):
            with speaking("", self._key):
                await asyncio.gather(
                    *(self._sdk.AsyncSandbox.kill(one, **self._control()) for one in old[at : at + 100])
                )
        return old
