"""The local backend: sandboxes out of this machine's own kernel, with no daemon and nothing installed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from rollyard.core.errors import (
    ConfigError,
    IsolationTooWeak,
    SandboxError,
    SandboxGone,
    SandboxInterrupted,
    SandboxUnavailable,
    Unsupported,
)
from rollyard.core.home import data_home, private_dir
from rollyard.core.ids import new_id
from rollyard.core.log import Log
from rollyard.core.sandbox import DEFAULT_PATH, Capabilities, MemoryUse, SandboxInfo, SandboxSpec
from rollyard.core.sequences import as_tuple
from rollyard.images import mount_table
from rollyard.images.rootfs import Rootfs
from rollyard.images.store import ImageStore
from rollyard.sandbox import egress
from rollyard.sandbox.gpus import SHARE, GpuPool, find_held
from rollyard.sandbox.local import cgroups, host_rules, ids, microvm, probe, view_root
from rollyard.sandbox.local.abilities import capabilities
from rollyard.sandbox.local.binds import list_binds, make_bind
from rollyard.sandbox.local.box import LocalSandbox
from rollyard.sandbox.local.channel import Channel, ChannelRefused
from rollyard.sandbox.local.checks import check
from rollyard.sandbox.local.disk import LocalDiskWatch, default_disk_mb, disk_limit
from rollyard.sandbox.local.gvisor import GvisorUse, with_gvisor
from rollyard.sandbox.local.inner import gvisor, protocol, remains
from rollyard.sandbox.local.job import ANSWER_S
from rollyard.sandbox.local.journal import Home, SandboxEntry, SandboxJournal, is_dead
from rollyard.sandbox.local.launcher import Launcher
from rollyard.sandbox.local.memory import MachineMemory
from rollyard.sandbox.local.microvm import MicrovmUse, with_microvm
from rollyard.sandbox.local.page_in import Regions
from rollyard.sandbox.local.pool import SandboxPool
from rollyard.sandbox.local.probe import LEVELS, NAMESPACED, Level
from rollyard.sandbox.pending import PendingSandbox
from rollyard.sandbox.retry import OpenLimits, Throttle, retry_open

_ROOTFS_S = 2.0
_OVERLAYS = ("overlay", "fuse.fuse-overlayfs")
_AGAIN_S = 0.02
_SWEEP_S = 5.0  # a start waits no longer for what others left; the sweep goes on beside it


class LocalBackend:
    """`root` holds images and sandboxes; `mounts` are host directories that a spec may show inside; `level` asks for less
    isolation than there is (see `probe`)."""

    name = "local"

    def __init__(
        self,
        *,
        root: str | Path | None = None,
        mounts: Sequence[str | Path] = (),
        limits: OpenLimits | None = None,
        level: Level | None = None,
        isolation: Literal["gvisor", "microvm"] | None = None,
        devices: str | Path = "/dev",
        proc: str | Path = "/proc",
        cores: int | None = None,
    ) -> None:
        self.root = private_dir(Path(root) if root else data_home())
        self.images = ImageStore(self.root)
        self._mounts = tuple(Path(path).resolve() for path in as_tuple(mounts, "mounts"))
        self._journal = SandboxJournal(self.root)
        self._launcher = Launcher(self.root / "launcher.log")
        self._boxes: dict[str, tuple[LocalSandbox, str]] = {}
        self._cgroups = cgroups.find()
        self._ids, self.trial = probe.trial(self.root, ids.candidates())
        on_overlay = mount_table.kind_at(str(self.root)) in _OVERLAYS
        if on_overlay and self._ids.kind == "range":  # the kernel shows files of an overlay to no other ids
            why = f"{self.root} is on an overlay: set ROLLYARD_HOME to a directory on a disk or a volume"
            self.trial = msgspec.structs.replace(self.trial, namespaces=False, proc=False, error=why)
        reached = probe.reach_level(self.trial, self._cgroups)
        if level is not None and LEVELS.index(level) < LEVELS.index(reached):
            raise IsolationTooWeak(
                f"isolation level {level} is not reached here, {reached} is", hint="see `rollyard doctor`"
            )
        self.level: Level = level or reached
        if self.level in ("no_cgroups", "no_proc"):
            self._cgroups = cgroups.Cgroups()
        self._memory = MachineMemory(proc, cgroups.find_bounds(self._cgroups), cores=cores)
        self._gpus = GpuPool(devices)
        self._gvisor = GvisorUse(always=isolation == "gvisor", level=self.level)
        self._microvm = MicrovmUse(always=isolation == "microvm", level=self.level, root=self.root)
        self._last_capability = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
        self._limits = limits or OpenLimits()
        self._throttle = Throttle(self._limits)
        self._watch = LocalDiskWatch(self.root)
        self._in_memory = on_overlay and self._namespaced
        self._rootfs: dict[tuple[str, tuple[str, ...]], tuple[float, Rootfs]] = {}
        self._swept: list[str] = []  # found dead at the start, told to the first caller of `reap`
        self._log = Log("rollyard.sandbox.local")

    @property
    def capabilities(self) -> Capabilities:
        found = capabilities(self.level, self.trial, self._ids, self._cgroups, self._limits)
        found = msgspec.structs.replace(found, gpus=self.gpus > 0)
        if self._microvm.always:
            return with_microvm(found)
        return with_gvisor(found) if self._gvisor.always else found

    @property
    def gpus(self) -> int:
        """How many a sandbox here may have at most."""
        return len(self._gpus.list()) if self._namespaced else 0

    def _give(self, spec: SandboxSpec) -> Capabilities:
        """What a sandbox of this spec can do; refused where it asks for gVisor or a virtual machine and there is none."""
        if self._microvm.takes(spec):
            return with_microvm(self.capabilities)
        return with_gvisor(self.capabilities) if self._gvisor.takes(spec) else self.capabilities

    async def __aenter__(self) -> Self:
        sweeping = asyncio.ensure_future(asyncio.to_thread(self._sweep))
        sweeping.add_done_callback(self._note_swept)
        await asyncio.wait([sweeping], timeout=_SWEEP_S)
        return self

    def _note_swept(self, sweeping: asyncio.Future[list[str]]) -> None:
        if not sweeping.cancelled() and sweeping.exception() is None:
            self._swept += sweeping.result()

    async def __aexit__(self, *_: object) -> None:
        own = [box for box, lifetime in list(self._boxes.values()) if lifetime == "owner"]
        for result in await asyncio.gather(*(box.kill() for box in own), return_exceptions=True):
            if isinstance(result, Exception):
                self._log.warning("sandbox.kill_failed", error=str(result))
        await self._watch.aclose()
        await self._launcher.aclose()
        await asyncio.to_thread(cgroups.sweep, self._cgroups)

    def open(self, spec: SandboxSpec) -> PendingSandbox[LocalSandbox]:
        check(spec, self._give(spec), self._mounts)
        self._gpus.check(spec.resources, lifetime=spec.lifetime)
        spec = self._place(spec)
        if spec.network == "host":
            self._log.warning("sandbox.host_network", image=spec.image)
        return PendingSandbox(lambda: self._open_when_free(spec))

    def pool(self, spec: SandboxSpec, size: int) -> SandboxPool:
        """`async with backend.pool(spec, 8) as pool: box = await pool.take()`."""
        if size < 1:
            raise ConfigError(f"a pool needs a size of at least 1, got {size}")
        check(spec, self._give(spec), self._mounts)
        self._gpus.check(spec.resources, lifetime=spec.lifetime)
        spec = self._place(spec)
        return SandboxPool(lambda: self._open_when_free(spec), size)

    def _place(self, spec: SandboxSpec) -> SandboxSpec:
        """An overlay cannot be written to on another one, as the root of most containers is: then it is in memory."""
        if not self._in_memory or spec.disk == "tmpfs":
            return spec
        self._log.warning(
            "sandbox.disk_in_memory",
            root=str(self.root),
            hint="set ROLLYARD_HOME to a directory that is not on an overlay",
        )
        return msgspec.structs.replace(spec, disk="tmpfs")

    async def _open_when_free(self, spec: SandboxSpec) -> LocalSandbox:
        async with self._throttle.place(len(self._boxes)):
            return await retry_open(lambda: self._open(spec), self._limits, timeout=spec.boot_s)

    async def _open(self, spec: SandboxSpec) -> LocalSandbox:
        held = find_held(spec, ((box.info.labels, box.reserved) for box, _ in self._boxes.values()))
        reserved = self._gpus.reserve(spec.resources, share=bool(spec.options.get(SHARE)), held=held)
        try:
            box = await self._open_with(spec, reserved.devices)
        except BaseException:  # cancelled too: nobody would release them
            reserved.release()
            raise
        box.reserved = reserved
        return box

    async def _open_with(self, spec: SandboxSpec, devices: Sequence[str]) -> LocalSandbox:
        rootfs = await self._resolve(spec) if self._rooted else Rootfs(lowers=())
        if not self._namespaced and self._rooted:
            view_root.refuse(spec.image, rootfs)
        if spec.options.get("nesting"):
            rootfs = _keep_writes_inside(rootfs)
        sandbox_id = new_id("sbx")
        home = self._journal.home(sandbox_id)
        lock = home.make()
        try:
            entry = self._entry(home, spec, rootfs)
            home.write(entry)
            box = await self._boot(home, entry, spec, rootfs, lock, devices)
        except OSError as error:
            _discard(home)
            raise SandboxUnavailable(f"cannot make a sandbox: {error}", hint="see `rollyard doctor`") from error
        finally:
            os.close(lock)
        self._boxes[sandbox_id] = (box, spec.lifetime)
        if box.info.isolation == "gvisor":
            await self._gvisor.prove(box)
        if spec.network == "allowlist" and spec.beside is None:
            await self._attach_egress(box, spec)
        if spec.disk == "disk":
            self._watch.add(box, self._disk_mb(spec))
        return box

    async def _attach_egress(self, box: LocalSandbox, spec: SandboxSpec) -> None:
        try:
            box.egress = await egress.attach(box, spec.allowed_hosts, box)
        except BaseException:  # cancelled too: nobody would close it
            await box.kill()
            raise

    async def _resolve(self, spec: SandboxSpec) -> Rootfs:
        """The image store's answer, kept for a moment: a run opens hundreds of the same."""
        key = (spec.image, spec.layers)
        at, rootfs = self._rootfs.get(key, (0.0, None))
        if rootfs is None or time.monotonic() - at > _ROOTFS_S:
            rootfs = await self.images.resolve(spec.image, spec.layers)
            self._rootfs[key] = (time.monotonic(), rootfs)
        return rootfs

    @property
    def cgroup_kind(self) -> str:
        """Which cgroups bound its sandboxes: v2, v1, hybrid or none."""
        return self._cgroups.kind

    @property
    def _rooted(self) -> bool:
        """Whether sandboxes have a root of their own, as this level gives them one."""
        return capabilities(self.level, self.trial, self._ids, self._cgroups, self._limits).images

    @property
    def _namespaced(self) -> bool:
        return self.level in NAMESPACED

    def _entry(self, home: Home, spec: SandboxSpec, rootfs: Rootfs) -> SandboxEntry:
        now = time.time()
        env = {"PATH": DEFAULT_PATH, **rootfs.env}
        workdir = rootfs.workdir
        if not self._rooted:
            env, workdir = host_rules.environment(home), host_rules.workdir(home)
        trees = {tree.target: f"t{n}/upper" for n, tree in enumerate(rootfs.trees) if tree.writable}
        given = self._give(spec)
        return SandboxEntry(
            info=SandboxInfo(
                id=home.path.name,
                backend=self.name,
                image=spec.image,
                isolation=given.isolation,
                level=self.level,
                labels=spec.labels,
                created_at=now,
                expires_at=now + spec.ttl_s,
            ),
            capabilities=given,
            workdir=spec.workdir or workdir,
            user=spec.user or (rootfs.user if self._ids.many else None),
            env={**env, **(egress.variables(own_names=spec.names) if spec.network == "allowlist" else {}), **spec.env},
            lifetime=spec.lifetime,
            owner_pid=os.getpid(),
            uppers={"/": "root/upper", **trees},
            image=rootfs.image,
            layers=spec.layers,
        )

    def _disk_mb(self, spec: SandboxSpec) -> int:
        return spec.resources.disk_mb or default_disk_mb(self.root, spec.disk)

    def _plan(self, home: Home, spec: SandboxSpec, rootfs: Rootfs, view: dict[str, Any] | None) -> dict[str, Any]:
        beside = home if spec.beside is None else self._journal.home(spec.beside)
        binds = list_binds(home, spec, beside)
        virtual = self._microvm.takes(spec)
        program = None if virtual else self._gvisor.takes(spec)
        if virtual:
            binds += self._microvm.binds()
        if program:
            binds.append(make_bind(gvisor.RUNSC, program))
        resources = microvm.outer_resources(spec, self._disk_mb(spec)) if virtual else spec.resources
        recipe = cgroups.recipe(self._cgroups, resources)
        return {
            "home": str(home.path),
            "namespace": self._namespaced,
            "landlock": host_rules.landlock(home, spec, view) if self.level == "landlock" else None,
            "tcp_only": self.level == "landlock" and spec.network != "host",
            "view": None if view is None else {**view, "closed": spec.network != "host"},
            "network": spec.network,
            "beside": _joins(spec),
            "lowers": list(rootfs.lowers),
            "trees": msgspec.to_builtins(rootfs.trees),
            "binds": binds,
            "writable": str(home.fs) if spec.disk == "disk" and self._namespaced else None,
            "tmpfs_mb": self._disk_mb(spec),
            "inodes": disk_limit(self._disk_mb(spec)).inodes,
            "proc": self.level != "no_proc",
            "map": msgspec.to_builtins(self._ids),
            "cgroup_roots": recipe.roots,
            "limits": recipe.limits,
            "rlimits": {} if virtual else cgroups.rlimits(self._cgroups, resources),
            "owner": spec.lifetime == "owner",
            "ttl_s": spec.ttl_s,
            "idle_ttl_s": spec.idle_ttl_s,
            "nesting": bool(spec.options.get("nesting")) or program is not None or virtual,
            "gvisor": program is not None,
            "microvm": self._microvm.settings(spec) if virtual else None,
            "last_capability": self._last_capability,
        }

    async def _join(self, spec: SandboxSpec) -> list[int]:
        """The namespaces of the sandbox that this one is to be beside of."""
        if not _joins(spec):
            return []
        assert spec.beside is not None
        if spec.beside not in self._boxes:
            raise SandboxGone(
                f"there is no sandbox {spec.beside} to be beside of", hint="open it first, by the same backend object"
            )
        return await self._boxes[spec.beside][0].namespaces()

    async def _boot(
        self,
        home: Home,
        entry: SandboxEntry,
        spec: SandboxSpec,
        rootfs: Rootfs,
        lock: int,
        devices: Sequence[str],
    ) -> LocalSandbox:
        """Ask the zygote, then wait for the first process to say that it is ready. Whatever breaks this off (an error, a
        cancellation) closes the control socket, and the process on its other end exits."""
        view = None
        if self._microvm.takes(spec):
            await asyncio.to_thread(self._microvm.make_image)
            devices = [*devices, *microvm.devices(home)]
        if not self._rooted:
            host_rules.make(home)
        elif not self._namespaced:
            view = await asyncio.to_thread(view_root.lay_out, home, rootfs, spec.mounts)
        elif spec.disk == "disk":
            home.fs.mkdir(mode=0o755)
        deadline = time.monotonic() + spec.boot_s
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = Channel(ours, name=f"sandbox {entry.info.id}")
        pidfd: int | None = None
        joined: list[int] = []
        try:
            joined = await self._join(spec)
            with theirs, home.listener() as listener:
                fds = [theirs.fileno(), listener.fileno(), lock, *joined]
                plan = self._plan(home, spec, rootfs, view) | {"devices": list(devices)}
                reply, pidfd = await self._launcher.launch(plan, fds, spec.boot_s)
            await channel.greeting(max(0.1, deadline - time.monotonic()))
            entry = msgspec.structs.replace(
                entry,
                info=msgspec.structs.replace(entry.info, pid=reply["pid"]),
                cgroups=tuple(reply["cgroups"]),
                shifted=reply["shifted"],
            )
            home.write(entry)
            return LocalSandbox(home, entry, channel, pidfd, self)
        except BaseException as error:  # cancelled too: what was made is taken down again
            channel.close()
            if pidfd is not None:
                os.close(pidfd)
            else:  # the zygote never had it, so it will not tidy up after it
                _discard(home)
            if isinstance(error, ChannelRefused):
                raise SandboxUnavailable(
                    f"the sandbox did not start: {error.name} at {error.path}", hint="see `rollyard doctor`"
                ) from None
            raise
        finally:
            protocol.close_fds(joined)

    def _sweep(self) -> list[str]:
        gone = self._journal.sweep()
        cgroups.sweep(self._cgroups)
        return gone

    def forget(self, sandbox_id: str) -> None:
        self._boxes.pop(sandbox_id, None)
        self._watch.remove(sandbox_id)

    async def attach(self, sandbox_id: str) -> LocalSandbox:
        home = self._journal.home(sandbox_id)
        sock = await _connect(home)
        try:
            entry = home.read()
            pid = entry.info.pid
            if pid is None and is_dead(entry.owner_pid):
                pid = await asyncio.to_thread(home.find_holder)
            pidfd = os.pidfd_open(pid or 0)
        except SandboxError:
            sock.close()
            raise
        except OSError as error:  # it has just died, or is still being made and has no process yet
            sock.close()
            raise SandboxGone(f"sandbox {sandbox_id} cannot be attached to: {error.strerror}") from error
        return LocalSandbox(home, entry, Channel(sock, name=f"sandbox {sandbox_id}"), pidfd, self)

    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        found = await asyncio.to_thread(lambda: [entry.info for _, entry in self._journal.live()])
        return [info for info in found if _matches(info, labels)]

    async def remove_baked(self) -> list[str]:
        if live := await self.list():
            raise ConfigError(
                f"{len(live)} sandboxes are open, and one of them may be using what would go",
                hint="wait for them, or end them: rollyard clean --all",
            )
        return await self.images.remove_builds()

    async def remove_states(self, keys: Collection[str]) -> list[str]:
        in_use = await asyncio.to_thread(lambda: {entry.image for _, entry in self._journal.live()})
        return await self.images.remove_states(keys, in_use=in_use)

    async def memory(self) -> MemoryUse:
        """Of this machine, and of the sandboxes that this object opened."""
        pids = {box.id: box.info.pid for box, _ in self._boxes.values() if box.info.pid is not None}
        return await asyncio.to_thread(self._memory.read, pids)

    def check_sleep(self) -> None:
        if not self._memory.has_swap():
            raise Unsupported(
                "sandboxes can sleep where their memory has somewhere to go, and this machine has no swap switched on",
                hint="switch zram or a swap file on (docs/capacity.md has the commands), or let agents stay awake",
            )
        self._memory.check_page_out()

    async def page_out(self, pid: int) -> Regions:
        """A sandbox's memory by its first process; what is used comes back. Gives what was in memory before."""
        return await asyncio.to_thread(self._memory.page_out, pid)

    async def page_in(self, used: Regions, waking: int) -> None:
        """What a sandbox is likely to use, before it goes on."""
        await asyncio.to_thread(self._memory.page_in, used, waking)

    async def freeze(self, entry: SandboxEntry, uppers: Mapping[str, Path], *, shifted: bool) -> str:
        """Copy what a sandbox wrote into the image store."""
        shift = ids.RANGE_BASE if shifted and self._ids.kind == "range" else 0
        try:
            return await self.images.add_snapshot(entry.image, uppers, layers=entry.layers, uid_shift=shift)
        except OSError as error:
            raise SandboxError(f"the snapshot could not be written: {error}", hint="is the disk full?") from error

    async def reap(self, labels: Mapping[str, str] | None = None, older_than: float | None = None) -> list[str]:
        """Remove what dead sandboxes left; with labels or an age, also kill the live ones they describe."""
        gone, self._swept = [*self._swept, *await asyncio.to_thread(self._sweep)], []
        if labels is None and older_than is None:
            return gone
        for info in await self.list(labels):
            if older_than is None or time.time() - info.created_at >= older_than:
                with contextlib.suppress(SandboxError):  # it ended by itself meanwhile
                    await (await self.attach(info.id)).kill()
                gone.append(info.id)
        await asyncio.to_thread(self._sweep)
        return gone


async def _connect(home: Home) -> socket.socket:
    for _ in range(round(ANSWER_S / _AGAIN_S)):
        try:
            return home.connect()
        except BlockingIOError:
            await asyncio.sleep(_AGAIN_S)
    raise SandboxInterrupted(
        f"sandbox {home.path.name} does not answer", hint="try again; `Backend.list` shows its state"
    )


def _joins(spec: SandboxSpec) -> bool:
    """On the host's network two sandboxes share it already."""
    return spec.beside is not None and spec.network != "host"


def _discard(home: Home) -> None:
    with contextlib.suppress(OSError):  # the next sweep finds what could not be removed now
        remains.remove(str(home.path), [])


def _matches(info: SandboxInfo, labels: Mapping[str, str] | None) -> bool:
    return all(info.labels.get(name) == value for name, value in (labels or {}).items())


def _keep_writes_inside(rootfs: Rootfs) -> Rootfs:
    """A program that may mount can make a read-only mount of the host's writable. What it writes below an overlay stays in the
    sandbox, so with `nesting` every tree of the host is one."""
    trees = tuple(msgspec.structs.replace(tree, writable=True) for tree in rootfs.trees)
    return msgspec.structs.replace(rootfs, trees=trees)
