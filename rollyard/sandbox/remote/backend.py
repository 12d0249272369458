"""A backend over a `Provider`: opening with patience, exactly one sandbox per open, leases, labels, lists, ends.

Labels are the whole memory: everything that is needed to find, attach to, or end a sandbox is in them. A sandbox that is to die
with its opener is made so that its provider ends it when it is not used for `lease_s`; while its opener lives it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, Self, cast

import anyio
import msgspec

from rollyard.core.errors import ConfigError, Error, IsolationTooWeak, SandboxError, SandboxUnavailable, Unsupported
from rollyard.core.log import Log
from rollyard.core.protocols import Backend
from rollyard.core.sandbox import Capabilities, Isolation, Resources, SandboxInfo, SandboxSpec, at_least
from rollyard.sandbox.paths import ROOT
from rollyard.sandbox.pending import PendingSandbox
from rollyard.sandbox.remote.box import RemoteSandbox
from rollyard.sandbox.remote.errors import SecretFilter, gone_error, translate_errors
from rollyard.sandbox.remote.images import BuiltImage, RemoteImages
from rollyard.sandbox.remote.provider import FoundSandbox, SandboxLink, SandboxProvider, SandboxRequest
from rollyard.sandbox.retry import LOOKS, OpenLimits, Throttle, retry_open
from rollyard.sandbox.teardown import Owned, delete_all, not_deleted, to_reap

MARK = "rollyard"
_OWN = "rollyard."
_KEPT = ("workdir", "user", "end", "open", "lifetime")  # our own labels, after `rollyard.`
_PREPARE = """mkdir -p "$1/x" "$1/jobs" && chmod 1777 "$1" "$1/x" "$1/jobs" || exit 1
[ -z "$2" ] || [ -d "$2" ] || mkdir -p -- "$2" || exit 1
[ "$3" = none ] || exit 0
for link in $(tail -n +3 /proc/net/dev | cut -d: -f1); do if [ $link != lo ]; then exit 9; fi; done; exit 0"""
_CLEANUP_S = 20.0
_CLOSE_S = 120.0
_CALL_S = 60.0  # for one question about sandboxes, and for asking it again: SDKs have retries of their own


class RemoteBackend:
    """Made by each provider's backend with what its sandboxes can do beside what all can; `image` stands for `host` in a
    spec."""

    name: ClassVar[str]
    loggers: ClassVar[tuple[str, ...]] = ()  # where the SDK logs
    min_lease_s: ClassVar[float] = 30.0
    runs_as_users: ClassVar[bool] = False  # whether the provider takes a user with each program
    proves_network_none: ClassVar[bool] = False  # whether a sandbox without a network has no interface either

    def __init__(
        self,
        provider: SandboxProvider,
        *,
        image: str,
        isolation: Isolation,
        lease_s: float,
        limits: OpenLimits | None,
        **can: Any,
    ) -> None:
        if float(lease_s) < self.min_lease_s:
            raise ConfigError(f"lease_s must be at least {self.min_lease_s:g}, got {lease_s!r}")
        self._provider, self._image, self._lease_s = provider, image, float(lease_s)
        self._limits = limits or OpenLimits(opening=8)
        self._can = Capabilities(
            isolation=isolation,
            images=True,
            builds=True,
            listen=True,
            dial=True,
            attach=True,
            list=True,
            ttl=True,
            lifetime_ttl=True,
            bytes_exact=True,
            tree_kill=True,
            max_concurrent=self._limits.live,
            creates_per_s=self._limits.creates_per_s,
            **can,
        )
        self._throttle = Throttle(self._limits)
        none = self._can.network_none
        self._images = RemoteImages(
            cast(Backend, cast(object, self)), provider, default=image, name=self.name, network_none=none
        )
        self._boxes: dict[str, RemoteSandbox] = {}
        self._leases: dict[str, asyncio.Task[None]] = {}
        self._owned = Owned(self.name, provider.delete_now)
        self._stack = contextlib.AsyncExitStack()
        self._log = Log(f"rollyard.sandbox.{self.name}")

    async def __aenter__(self) -> Self:
        self._stack.enter_context(SecretFilter(self._provider, self.loggers))
        try:
            with translate_errors(self._provider):
                async with asyncio.timeout(_CALL_S):
                    await self._provider.enter()
        except BaseException:  # cancelled too: what was entered is left
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.move_on_after(_CLOSE_S, shield=True):
            own = {name: self._boxes[name] for name in self._owned}
            if left := await delete_all(list(own), lambda name: own[name].kill()):
                self._log.warning("sandboxes.not_deleted", error=str(not_deleted(left)))
        for lease in self._leases.values():
            lease.cancel()
        for box in self._boxes.values():  # they live on, without this process
            box.close_link()
        with anyio.move_on_after(_CLEANUP_S, shield=True), translate_errors(self._provider):
            await self._provider.leave()
        await self._stack.aclose()

    def close_now(self) -> list[str]:
        """Delete the sandboxes of this object without an event loop; returns the ids of those that may still be there. It
        also happens by itself when the process exits."""
        return self._owned.delete_now()

    @property
    def capabilities(self) -> Capabilities:
        return self._can

    def open(self, spec: SandboxSpec) -> PendingSandbox[RemoteSandbox]:
        self._check(spec)
        return PendingSandbox(lambda: self._open_when_free(spec))

    async def build_image(self, folder: str, *, resources: Resources, timeout_s: float) -> str:
        """The image of a folder's Dockerfile; equal folders are built once. See `RemoteImages`."""
        with translate_errors(self._provider):
            return await self._images.build(folder, resources, timeout_s)

    async def bake_layer(
        self, image: str, layer: str, *, title: str, source: str, prefix: str, resources: Resources
    ) -> str | None:
        with translate_errors(self._provider):
            return await self._images.bake(image, layer, title=title, source=source, prefix=prefix, resources=resources)

    async def find_baked(self, image: str, layer: str, *, title: str, resources: Resources) -> str | None:
        with translate_errors(self._provider):
            return await self._images.find_baked(image, layer, title=title, resources=resources)

    async def remove_image(self, image: str) -> None:
        """A snapshot, or an image that was built or baked."""
        with translate_errors(self._provider):
            await self._provider.delete_image(image)

    async def remove_baked(self) -> list[str]:
        """Delete every image that this project made at the provider's; their names."""
        with translate_errors(self._provider):
            found = await self._images.list_kept()
            for one in found:
                await self._provider.delete_image(one.image)
        return [one.name for one in found]

    def _list_refused(self, spec: SandboxSpec) -> dict[str, object]:
        """What was asked for and cannot be had, by name. Providers that have more say so."""
        made = self._images.find(spec.image)
        limits = {"cpus", "memory_mb", "disk_mb", "pids"} - self._limits_taken(spec)
        if made is not None and made.resources == spec.resources:
            limits = {"pids"}  # it was made with the rest
        return {
            "layers": spec.layers,
            "mounts": spec.mounts,
            "volumes": spec.volumes,
            "beside": spec.beside,
            "names": spec.names,
            "user": spec.user and not self.runs_as_users,
            "idle_ttl_s": spec.idle_ttl_s,
            "resources.gpus or tpu": spec.resources.accelerated,
            "disk='tmpfs'": spec.disk == "tmpfs",
            "network='allowlist'": spec.network == "allowlist",
            **{f"resources.{name}": getattr(spec.resources, name) for name in sorted(limits)},
            **{f"options.{name}": True for name in spec.options},
        }

    def _limits_taken(self, spec: SandboxSpec) -> set[str]:
        """The resources that the provider gives as they are asked for."""
        return set()

    def _check(self, spec: SandboxSpec) -> None:
        if not at_least(self._can.isolation, spec.min_isolation):
            raise IsolationTooWeak(
                f"this {self.name} backend gives isolation {self._can.isolation!r}, {spec.min_isolation!r} was asked for"
            )
        for name, is_set in self._list_refused(spec).items():
            if is_set:
                raise Unsupported(f"the {self.name} backend has no {name}", hint="leave it out, or use another backend")
        if spec.network == "none" and not self._can.network_none:
            raise Unsupported(
                f"the {self.name} backend cannot take a sandbox's network away",
                hint="say network='host' and allow_unsafe=True, or use another backend",
            )
        if spec.network == "host" and not spec.allow_unsafe:
            raise ConfigError("network='host' gives the sandbox the internet", hint="say allow_unsafe=True to have it")
        if self._can.max_ttl_s is not None and spec.ttl_s > self._can.max_ttl_s:
            raise Unsupported(f"the {self.name} backend keeps a sandbox for {self._can.max_ttl_s:g} s at most")

    async def _open_when_free(self, spec: SandboxSpec) -> RemoteSandbox:
        async with self._throttle.place(len(self._boxes)):
            making = asyncio.ensure_future(self._open_one(spec, str(uuid.uuid4())))
            try:
                return await asyncio.shield(making)
            except asyncio.CancelledError:
                with anyio.move_on_after(spec.boot_s + _CLEANUP_S, shield=True):
                    await asyncio.wait([making])
                    if not making.cancelled() and making.exception() is None:
                        await making.result().kill()
                making.cancel()
                raise

    async def _open_one(self, spec: SandboxSpec, key: str) -> RemoteSandbox:
        """Exactly one sandbox, or none. A create that broke may have made one: a provider that knows the key gives it out the
        next time, and what one that does not has made too many is found by its label and deleted."""
        spec, made = self._with_image(spec)
        labels, broke, kept = self._labels(spec, key), False, ""

        async def create() -> SandboxLink:
            nonlocal broke
            try:
                return await self._create(spec, labels, key)
            except Error as error:
                broke = broke or error.retry in ("safe", "if_idempotent")  # a proxy's "busy" may hide a success, too
                raise

        try:
            async with asyncio.timeout(spec.boot_s + _CLEANUP_S):  # a provider has its own, which is sooner
                link = await retry_open(create, self._limits, idempotent=True)
                kept = link.id
                box = await self._prepare(link, spec, labels)
                if made is not None and made.folder is not None:
                    await self._carry_out(made, box, spec)
        except TimeoutError:
            broke = True
            raise SandboxUnavailable(f"the sandbox was not up in {spec.boot_s:g} s", hint="raise boot_s") from None
        finally:
            if broke:
                with anyio.move_on_after(_CLEANUP_S, shield=True):
                    await self._delete_others(key, kept)
        self._boxes[box.id] = box
        if spec.lifetime == "owner":
            box.lease_s = self._lease_s
            self._owned.add(box.id)
            self._leases[box.id] = asyncio.create_task(self._hold(box), name=f"rollyard-lease-{box.id}")
        return box

    def _with_image(self, spec: SandboxSpec) -> tuple[SandboxSpec, BuiltImage | None]:
        """A spec with what its image's Dockerfile says about programs, where this backend built it."""
        made = self._images.find(spec.image)
        if made is None:
            return spec, None
        built = made.built
        return msgspec.structs.replace(
            spec,
            image=made.image,
            env={**built.env, **spec.env},
            workdir=spec.workdir or (built.workdir if built.workdir not in ("", "/") else None),
            user=spec.user or built.user,
        ), made

    async def _carry_out(self, made: BuiltImage, box: RemoteSandbox, spec: SandboxSpec) -> None:
        try:
            await self._images.carry_out(made, box, spec.boot_s)
        except BaseException:  # cancelled too: half of an image is of no use
            with anyio.move_on_after(_CLEANUP_S, shield=True), contextlib.suppress(Error):
                # The first error is reported
                await self._delete(box.id)
            raise

    def _labels(self, spec: SandboxSpec, key: str) -> dict[str, str]:
        end = time.time() + spec.boot_s + spec.ttl_s  # for others to see; its opener counts from when it is up
        own = {"workdir": spec.workdir or "/", "end": f"{end:.3f}", "open": key, "lifetime": spec.lifetime}
        if spec.user:
            own["user"] = spec.user
        return {**spec.labels, MARK: "1", **{_OWN + name: value for name, value in own.items()}}

    async def _create(self, spec: SandboxSpec, labels: Mapping[str, str], key: str) -> SandboxLink:
        lease = self._lease_s if spec.lifetime == "owner" else spec.ttl_s
        with translate_errors(self._provider):
            image = await self._provider.take_image(self._image_of(spec), spec.resources)
            return await self._provider.create(
                SandboxRequest(spec=spec, image=image, labels=labels, lease_s=lease, key=key)
            )

    def _image_of(self, spec: SandboxSpec) -> str:
        return self._image if spec.image == "host" else spec.image

    async def _prepare(self, link: SandboxLink, spec: SandboxSpec, labels: Mapping[str, str]) -> RemoteSandbox:
        found = FoundSandbox(id=link.id, image=self._image_of(spec), labels=labels, created_at=time.time())
        box, look = self._box(link, found), spec.network if self.proves_network_none else ""
        try:
            done = await box.repeat_script(_PREPARE, ROOT, spec.workdir or "", look)
            if done.exit_code == 9:
                raise ConfigError("the sandbox was to have no network and has one", hint="see this backend's page")
            if not done.ok:
                raise SandboxError(f"sandbox {box.id} could not be prepared: {done.text[-300:].strip()}")
        except BaseException:  # cancelled too: an unprepared sandbox has no owner to end it
            with anyio.move_on_after(_CLEANUP_S, shield=True), contextlib.suppress(Error):
                # The first error is reported
                await self._delete(box.id)
            raise
        box.info = msgspec.structs.replace(box.info, expires_at=time.time() + spec.ttl_s)
        return box

    async def _delete_others(self, key: str, kept: str) -> None:
        try:
            made = [found.id for found in await self._list({f"{_OWN}open": key})]
            left = await delete_all([name for name in made if name != kept], self._delete)
        except Error as error:
            left = {"of a create that broke": error}
        if left:
            self._log.warning("sandboxes.not_deleted", error=str(not_deleted(left)))

    async def _hold(self, box: RemoteSandbox) -> None:
        """Use an owned sandbox for as long as this process lives, and end it at its time."""
        while (left := (box.info.expires_at or 0.0) - time.time()) > 0:
            await asyncio.sleep(min(left, self._lease_s / 3))
            try:
                if (box.info.expires_at or 0.0) > time.time():
                    await box.keep()
            except Error as error:  # the next one may succeed; until then the sandbox lives on what it was given
                self._log.warning("sandbox.lease_not_renewed", sandbox_id=box.id, error=str(error))
                if error.retry == "gone":
                    return
        try:
            await box.kill()
        except Error as error:
            self._log.warning("sandbox.not_deleted", sandbox_id=box.id, error=str(error))

    def _box(self, link: SandboxLink, found: FoundSandbox) -> RemoteSandbox:
        return RemoteSandbox(
            link,
            self._provider,
            self._info(found),
            self._can,
            own=found.labels,
            workdir=found.labels.get(f"{_OWN}workdir") or "/",
            forget=self._drop,
        )

    def _info(self, found: FoundSandbox) -> SandboxInfo:
        """What it is kept for is its end, but for one that is leased and so may be kept until the end in its label."""
        own = {MARK, *(_OWN + name for name in _KEPT)}
        ends = [found.expires_at]
        if found.expires_at is None or found.labels.get(f"{_OWN}lifetime") == "owner":
            ends.append(float(found.labels.get(f"{_OWN}end") or 0) or None)
        return SandboxInfo(
            id=found.id,
            backend=self.name,
            image=found.image,
            isolation=self._can.isolation,
            labels={name: value for name, value in found.labels.items() if name not in own},
            created_at=found.created_at,
            expires_at=max((end for end in ends if end is not None), default=None),
            state=found.state,
        )

    def _drop(self, sandbox_id: str) -> None:
        self._boxes.pop(sandbox_id, None)
        self._owned.discard(sandbox_id)
        lease = self._leases.pop(sandbox_id, None)
        if lease is not None and lease is not asyncio.current_task():
            lease.cancel()

    async def attach(self, sandbox_id: str) -> RemoteSandbox:
        """A sandbox that another process opened."""
        with translate_errors(self._provider, sandbox_id):
            async with asyncio.timeout(_CALL_S):
                link, found = await self._provider.find(sandbox_id)
        if MARK not in found.labels:
            raise gone_error(sandbox_id)
        return self._box(link, found)

    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        return [self._info(found) for found in await self._list(labels or {})]

    async def _list(self, labels: Mapping[str, str]) -> list[FoundSandbox]:
        async def look() -> list[FoundSandbox]:
            with translate_errors(self._provider):
                async with asyncio.timeout(_CALL_S):
                    return list(await self._provider.list({**labels, MARK: "1"}))

        wanted, found = {**labels, MARK: "1"}.items(), await retry_open(look, LOOKS, timeout=_CALL_S, idempotent=True)
        return [one for one in found if wanted <= one.labels.items()]

    async def reap(self, labels: Mapping[str, str] | None = None, older_than: float | None = None) -> list[str]:
        """Delete sandboxes of this project; with labels or an age, those that they describe, else those past their end."""
        old = to_reap(await self.list(labels), labels, older_than)
        if left := await delete_all(old, self._delete):
            raise not_deleted(left)
        return old

    async def _delete(self, sandbox_id: str) -> None:
        async def end() -> None:
            with translate_errors(self._provider, sandbox_id):
                async with asyncio.timeout(_CALL_S):
                    await self._provider.delete(sandbox_id)

        await retry_open(end, LOOKS, timeout=_CALL_S, idempotent=True)
