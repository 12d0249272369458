"""The docker backend: sandboxes as containers of a Docker or Podman engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import anyio
import msgspec

from rollyard.core.errors import ConfigError, Error, SandboxError, SandboxGone, SandboxUnavailable, UnknownName
from rollyard.core.ids import new_id
from rollyard.core.log import Log
from rollyard.core.sandbox import Capabilities, Isolation, Resources, SandboxInfo, SandboxSpec
from rollyard.core.sequences import as_tuple
from rollyard.images.layers import layer_prefix
from rollyard.images.store import ImageStore
from rollyard.sandbox.docker import container, images, netns, routes, sweep
from rollyard.sandbox.docker.box import DockerSandbox, remove, remove_volume
from rollyard.sandbox.docker.container import Identity
from rollyard.sandbox.docker.disk import ContainerDiskWatch
from rollyard.sandbox.docker.engine import DockerEngine, EngineRefused, Stream, find_host
from rollyard.sandbox.docker.faults import is_gone
from rollyard.sandbox.docker.images import BuildRequest
from rollyard.sandbox.docker.routes import NetnsAccess, PortAccess, Route
from rollyard.sandbox.gpus import SHARE, GpuPool, find_held
from rollyard.sandbox.pending import PendingSandbox
from rollyard.sandbox.relay import RelayAccess
from rollyard.sandbox.retry import OpenLimits, Throttle, retry_open
from rollyard.sandbox.teardown import Owned, delete_all, not_deleted, one_by_one

_CLEANUP_S = 20.0
CLOSE_S = 120.0
_ISOLATION: Mapping[str, Isolation] = {"runsc": "gvisor", "kata": "microvm", "kata-runtime": "microvm"}


class DockerBackend:
    """`host` is the engine's address (else `DOCKER_HOST`, else its usual socket); `image` stands for `host` in a spec;
    `pull="missing"` fetches images the engine does not have; `mounts` are host directories a spec may show inside;
    `route` and `same_host` overrule what is found out (see `routes`); `images` is the store that layers are in."""

    name = "docker"

    def __init__(
        self,
        *,
        host: str | None = None,
        image: str = images.HOST_IMAGE,
        pull: Literal["never", "missing"] = "never",
        mounts: Sequence[str | Path] = (),
        runtime: str | None = None,
        route: Route | None = None,
        same_host: bool | None = None,
        limits: OpenLimits | None = None,
        store: str | Path | None = None,
        devices: str | Path = "/dev",
    ) -> None:
        if route is not None and route not in routes.ROUTES:
            raise ConfigError(f"there is no route {route!r}", hint=f"it is one of {', '.join(routes.ROUTES)}")
        if pull not in ("never", "missing"):
            raise ConfigError(f"pull is 'never' or 'missing', got {pull!r}")
        self.images = ImageStore(Path(store) if store else None)
        self._engine = DockerEngine(find_host(self.name, host))
        self._gpus = GpuPool(devices)
        self._image, self._pull, self._runtime = image, pull, runtime
        self._mounts = tuple(Path(path).resolve() for path in as_tuple(mounts, "mounts"))
        self._asked_route, self._same_host = route, same_host
        self.route: Route = route or "exec"
        self._limits = limits or OpenLimits(opening=8)
        self._throttle = Throttle(self._limits)
        self._boxes: dict[str, DockerSandbox] = {}
        self._owned = Owned(self.name, one_by_one(self._delete_now))
        self._watch = ContainerDiskWatch(self._engine)
        self._dirs = routes.SocketDirs(self._engine.host)
        self._defaults: dict[str, container.ContainerDefaults] = {}
        self._log = Log("rollyard.sandbox.docker")

    async def __aenter__(self) -> Self:
        await self._engine.__aenter__()
        if self._same_host is None:
            self._same_host = self._engine.shares_host
        if self._runtime is not None and self._runtime not in self._engine.info.get("Runtimes", {}):
            known = sorted(self._engine.info.get("Runtimes", {}))
            await self._engine.aclose()
            raise UnknownName("container runtime", self._runtime, known)
        if self._asked_route is None and self._same_host:
            self.route = "netns" if await asyncio.to_thread(netns.may_enter) else "socket"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._watch.aclose()
        with anyio.move_on_after(CLOSE_S, shield=True):
            own = {name: self._boxes[name] for name in self._owned}
            if left := await delete_all(list(own), lambda name: own[name].kill()):
                self._log.warning("sandboxes.not_deleted", error=str(not_deleted(left)))
        await self._engine.aclose()

    @property
    def capabilities(self) -> Capabilities:
        """Known once the backend is entered: layers and mounts need an engine on this machine."""
        limited = bool(self._engine.info.get("MemoryLimit", True))
        return Capabilities(
            isolation=_ISOLATION.get(self._runtime or "", "container"),
            images=True,
            layers=bool(self._same_host),
            mounts=bool(self._same_host),
            snapshot=True,
            pause=True,
            stdin=True,
            users=True,
            root=True,
            listen=True,
            dial=True,
            network_none=True,
            network_allowlist=True,
            services=True,
            gpus=bool(self._same_host) and bool(self._gpus.list()),
            attach=True,
            list=True,
            ttl=True,
            extend=True,
            lifetime_ttl=True,
            bytes_exact=True,
            tree_kill=True,
            memory_limit=limited,
            pids_limit=bool(self._engine.info.get("PidsLimit", True)),
            cpu_limit=bool(self._engine.info.get("CpuCfsQuota", True)),
            max_concurrent=self._limits.live,
            creates_per_s=self._limits.creates_per_s,
        )

    def _bound(self, spec: SandboxSpec) -> SandboxSpec:
        """With a share of the engine's memory, where no limit is named and the engine keeps one."""
        total = self._engine.info.get("MemTotal") or 0
        if spec.resources.memory_mb is not None or not total or not self.capabilities.memory_limit:
            return spec
        memory_mb = max(1, int(total * container.MEMORY_SHARE) >> 20)
        return msgspec.structs.replace(spec, resources=msgspec.structs.replace(spec.resources, memory_mb=memory_mb))

    def open(self, spec: SandboxSpec) -> PendingSandbox[DockerSandbox]:
        container.check(spec, self.capabilities, self._mounts)
        self._gpus.check(spec.resources, lifetime=spec.lifetime)
        if spec.network == "host":
            self._log.warning("sandbox.host_network", image=spec.image)
        return PendingSandbox(lambda: self._open_when_free(spec))

    async def build_image(self, folder: str, *, resources: Resources, timeout_s: float) -> str:
        """Build the folder's Dockerfile with the engine's own builder, without a network; the image's name. Equal folders
        are built once."""
        request = BuildRequest(folder=folder, host=self._image, resources=resources, timeout_s=timeout_s)
        return await images.build(self._engine, request)

    async def remove_image(self, image: str) -> None:
        """A snapshot or a built image of ours; others are not touched."""
        await images.remove(self._engine, image)

    async def _open_when_free(self, spec: SandboxSpec) -> DockerSandbox:
        async with self._throttle.place(len(self._boxes)):
            # Again also when a call broke after it was sent: what it may have made was removed by its name.
            return await retry_open(lambda: self._open(spec), self._limits, timeout=spec.boot_s, idempotent=True)

    async def _open(self, spec: SandboxSpec) -> DockerSandbox:
        held = find_held(spec, ((box.info.labels, box.reserved) for box in self._boxes.values()))
        reserved = self._gpus.reserve(spec.resources, share=bool(spec.options.get(SHARE)), held=held)
        try:
            box = await self._open_with(spec, container.show_gpus(reserved, self._engine.info.get("Runtimes") or {}))
        except BaseException:  # cancelled too: else they would never be released
            reserved.release()
            raise
        box.reserved = reserved
        return box

    async def _open_with(self, spec: SandboxSpec, gpus: Mapping[str, Any]) -> DockerSandbox:
        image = self._image if spec.image == "host" else spec.image
        defaults = await self._resolve(image)
        now = time.time()
        who = Identity(
            id=new_id("sbx"),
            backend=self.name,
            image=image,
            isolation=self.capabilities.isolation,
            created_at=now,
            expires_at=now + spec.ttl_s,
            lifetime=spec.lifetime,
            user=spec.user or defaults.user or "0:0",
            workdir=spec.workdir or defaults.workdir or "/",
        )
        main = self._find_beside(spec)
        place = self._dirs.make(who.id) if self.route == "socket" else None
        volumes = [container.volume(one, main.id if main is not None else who.id) for one in spec.volumes]
        binds = [*self._binds(spec, place), *volumes]
        beside = main.container if main is not None and spec.network != "host" else None
        body = container.request(self._bound(spec), who, binds, self._runtime, beside=beside)
        body["HostConfig"] |= gpus
        making = asyncio.ensure_future(self._make(who, body, attach=spec.lifetime == "owner"))
        try:
            async with asyncio.timeout(spec.boot_s):
                lifeline, found = await asyncio.shield(making)
        except BaseException as error:  # cancelled or failed, the half-made container goes first
            await self._undo(who, making)
            if isinstance(error, TimeoutError):
                raise SandboxUnavailable(f"the sandbox was not up in {spec.boot_s:g} s", hint="raise boot_s") from None
            if isinstance(error, EngineRefused):
                raise _not_opened(error, image) from None
            raise
        box = self._box(who, found, env={**defaults.env, **spec.env}, lifeline=lifeline)
        self._boxes[who.id] = box
        if spec.lifetime == "owner":
            self._owned.add(who.id)
        if spec.resources.disk_mb is not None:
            self._watch.add(box, spec.resources.disk_mb)
        (main or box).volumes.update(one["Source"] for one in volumes)
        try:
            await box.open_volumes([one.path for one in spec.volumes if one.writable])
            await box.add_names(spec.names if main is not None else ())
            if spec.network == "allowlist" and main is not None:
                box.use_egress_of(main, spec.names)
            elif spec.network == "allowlist":
                await box.attach_egress(spec.allowed_hosts, spec.names)
        except BaseException:  # cancelled too: else it would never be closed
            await box.kill()
            raise
        return box

    def _find_beside(self, spec: SandboxSpec) -> DockerSandbox | None:
        """The sandbox that this one is to be beside of."""
        if spec.beside is None:
            return None
        if spec.beside not in self._boxes:
            raise SandboxGone(
                f"there is no sandbox {spec.beside} to be beside of", hint="open it first, by the same backend object"
            )
        return self._boxes[spec.beside]

    async def _make(
        self, who: Identity, body: dict[str, Any], *, attach: bool
    ) -> tuple[Stream | None, Mapping[str, Any]]:
        made = (await self._engine.call("POST", "containers/create", params={"name": who.name}, body=body))["Id"]
        place, lifeline = f"containers/{made}", None
        if attach:
            lifeline = await self._engine.hijack(f"{place}/attach", params={"stream": True, "stdin": True})
        await self._engine.call("POST", f"{place}/start")
        found = await self._engine.call("GET", f"{place}/json")
        if not found["State"]["Running"]:
            raise SandboxError(f"image {who.image!r} cannot keep a sandbox", hint="it needs /bin/sh, cat and sleep")
        return lifeline, found

    async def _undo(self, who: Identity, making: asyncio.Future[Any]) -> None:
        """Leave nothing of an open that did not succeed. It is let finish first: an engine whose caller hangs up half way
        may keep a container that it can neither list nor delete."""
        with anyio.move_on_after(_CLEANUP_S, shield=True):
            await asyncio.wait([making])
            with contextlib.suppress(Error):  # the first error is the one to tell; a reaper finds what stays
                await remove(self._engine, who.name)
        if not making.done():
            making.cancel()
        elif not making.cancelled() and making.exception() is None and making.result()[0] is not None:
            making.result()[0].close()
        self._dirs.remove(who.id)

    def _binds(self, spec: SandboxSpec, place: Path | None) -> list[dict[str, Any]]:
        binds = [
            container.bind(str(self.images.layers.tree(layer) / layer_prefix(layer).lstrip("/")), layer_prefix(layer))
            for layer in spec.layers
        ]
        binds += [
            container.bind(str(Path(mount.remote_dir).resolve()), mount.local_dir, writable=mount.writable)
            for mount in spec.mounts
        ]
        if place is not None:
            binds.append(container.bind(str(place), container.SOCKET_DIR))
        return binds

    async def resolve(self, image: str) -> container.ContainerDefaults:
        """What an image says about programs now, for a build that is carried out in sandboxes."""
        name = self._image if image == "host" else image
        return await images.resolve(self._engine, name, pull=self._pull == "missing")

    async def _resolve(self, image: str) -> container.ContainerDefaults:
        if image not in self._defaults:
            self._defaults[image] = await images.resolve(self._engine, image, pull=self._pull == "missing")
        return self._defaults[image]

    def _box(
        self,
        who: Identity,
        found: Mapping[str, Any],
        *,
        env: Mapping[str, str],
        lifeline: Stream | None = None,
    ) -> DockerSandbox:
        name, state = found["Name"].lstrip("/"), found["State"]
        info = container.info(found["Config"]["Labels"], name, state["Status"], state.get("Pid"))
        assert info is not None
        return DockerSandbox(
            self._engine,
            found["Id"],
            who,
            info,
            self.capabilities,
            env=env,
            access=lambda box: self._access(box, found),
            lifeline=lifeline,
            forget=self.forget,
        )

    def _access(self, box: DockerSandbox, found: Mapping[str, Any]) -> PortAccess:
        pid = found["State"].get("Pid") or 0
        if self.route == "netns" and netns.is_ours(pid, found["Id"]):
            return NetnsAccess(pid, box.id)
        bound = [mount["Source"] for mount in found["Mounts"] if mount["Destination"] == container.SOCKET_DIR]
        if self.route == "socket" and bound:
            return RelayAccess(partial(routes.over_socket, box, Path(bound[0])), box.id)
        return RelayAccess(partial(routes.over_exec, box), box.id)

    def forget(self, sandbox_id: str) -> None:
        self._boxes.pop(sandbox_id, None)
        self._owned.discard(sandbox_id)
        self._watch.remove(sandbox_id)
        self._dirs.remove(sandbox_id)

    async def attach(self, sandbox_id: str) -> DockerSandbox:
        """A sandbox that another process opened. Its spec's environment is not known here: the engine was never told."""
        filters = {"label": [f"{container.MARK}={sandbox_id}"]}
        listed = await self._engine.call("GET", "containers/json", params={"all": True, "filters": filters})
        if not listed:
            raise SandboxGone(f"sandbox {sandbox_id} is gone", hint="open another sandbox")
        found = await self._engine.call("GET", f"containers/{listed[0]['Id']}/json")
        who = container.identity(found["Config"]["Labels"])
        if who is None or not found["State"]["Running"]:
            raise SandboxGone(f"sandbox {sandbox_id} is gone", hint="open another sandbox")
        return self._box(who, found, env=(await self._resolve(who.image)).env)

    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        return [
            info for info, _ in await self._list_containers(labels) if info.state not in ("exited", "dead", "removing")
        ]

    async def _list_containers(self, labels: Mapping[str, str] | None) -> list[tuple[SandboxInfo, str]]:
        """Sandboxes of this project on the engine, with the engine's ids."""
        params = {"all": True, "filters": container.label_filter(labels)}
        listed = await self._engine.call("GET", "containers/json", params=params)
        found = (
            (container.info(row["Labels"], row["Names"][0].lstrip("/"), row["State"]), row["Id"]) for row in listed
        )
        return [(info, made) for info, made in found if info is not None and info.backend == self.name]

    async def reap(self, labels: Mapping[str, str] | None = None, older_than: float | None = None) -> list[str]:
        """Delete sandboxes that are past their end; with labels or an age, all that they describe. By label only: what
        has none of ours is never touched."""
        named = labels is not None or older_than is not None
        old = [
            (info, made)
            for info, made in await self._list_containers(labels)
            if (named and time.time() - info.created_at >= (older_than or 0.0)) or container.is_over(info)
        ]
        if left := await delete_all([made for _, made in old], partial(remove, self._engine)):
            raise not_deleted({info.id: left[made] for info, made in old if made in left})
        live = {info.id for info in await self.list()}
        self._dirs.sweep(live)
        await self._sweep_volumes(live)
        return [info.id for info, _ in old]

    async def _sweep_volumes(self, live: set[str]) -> None:
        """Volumes of sandboxes that are gone."""
        found = await self._engine.call("GET", "volumes", params={"filters": {"label": [container.MARK]}})
        for row in found.get("Volumes") or ():
            if row["Labels"][container.MARK] not in live:
                await remove_volume(self._engine, row["Name"])

    def close_now(self) -> list[str]:
        """Delete the sandboxes of this object without an event loop; returns the ids of those that may still be there. It
        also happens by itself when the process exits."""
        return self._owned.delete_now()

    def _delete_now(self, sandbox_id: str, seconds: float) -> bool:
        box = self._boxes.get(sandbox_id)
        if box is not None and not sweep.delete_now(self._engine.host, box.container, seconds):
            return False
        self.forget(sandbox_id)
        return True


class PodmanBackend(DockerBackend):
    """The same on a Podman socket (`podman system service`), found by `CONTAINER_HOST` or at its usual place."""

    name = "podman"


def _not_opened(refused: EngineRefused, image: str) -> SandboxError:
    if refused.status == 404 and "image" in refused.text.lower():
        return SandboxError(f"image {image!r} was removed from the engine")
    if refused.status >= 500 and not is_gone(refused):
        return SandboxError(f"the engine could not start image {image!r}: {refused.text[:300]}")
    return SandboxUnavailable(f"the engine could not make a sandbox: {refused.text[:300]}")
