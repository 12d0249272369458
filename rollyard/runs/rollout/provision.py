"""From a task and an agent to something a backend can open: the image, the agent's layer, and the route to the gate.

Backends with layers mount the agent read-only. Backends without keep an image with the layer in it, or get it uploaded
into each sandbox, unless the image already has the agent: there it is looked for first. Nothing is ever installed by piping a
download into a shell.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
import stamina

from rollyard import agents
from rollyard.core.agent import Agent, LayerSpec
from rollyard.core.errors import (
    AgentInstallFailed,
    CommandFailed,
    GateUnreachable,
    SandboxError,
    UnknownName,
    Unsupported,
    VerifierError,
)
from rollyard.core.limits import Deadline
from rollyard.core.protocols import Backend, BakesLayers, OwnImages, Sandbox
from rollyard.core.sandbox import SandboxSpec
from rollyard.core.task import Site, Step, Task, VerifierSpec
from rollyard.images.build import build, foresee_states
from rollyard.images.build_types import BuildOptions, Built, FileCache, Images
from rollyard.images.layers import layer_prefix
from rollyard.images.mirrors import find_mirrors
from rollyard.images.registries import read_registries
from rollyard.images.rootfs import Rootfs
from rollyard.images.store import ImageStore
from rollyard.net.egress.decide import EgressRules
from rollyard.runs.rollout.layer_commands import layer_by_commands, run_apart
from rollyard.tasks.layers import layer_spec
from rollyard.tasks.python_startup import KnownFiles

SOLUTION = "/solution"
_PROBE = b"GET /health HTTP/1.1\r\nHost: gate\r\nConnection: close\r\n\r\n"


class ProvisionedImage(msgspec.Struct, frozen=True, kw_only=True):
    """What one rollout stands on. `agent_layer` is the agent's; `layers` are all that the backend mounts;
    `baked` is an image with the agent in it, to be opened in place of `built`'s."""

    built: Built
    layers: tuple[str, ...]
    agent_layer: str | None
    baked: str | None = None

    @property
    def prefix(self) -> str:
        return layer_prefix(self.agent_layer) if self.agent_layer is not None else ""


def keeps_images(backend: Backend) -> bool:
    """Whether a backend opens what is in an image store of ours, and not what an engine or a provider has."""
    return isinstance(getattr(backend, "images", None), ImageStore) and not isinstance(backend, OwnImages)


class _PulledImages(NamedTuple):
    """The image store as a build asks it: the images that a Dockerfile begins from are pulled where they may be."""

    provision: Provision
    site: Site
    backend: Backend
    deadline: Deadline

    async def resolve(self, image: str) -> Rootfs:
        await self.provision.pull(image, self.site, self.backend, self.deadline)
        return await self.provision.images.resolve(image)


class Provision:
    """Shared by the rollouts of a run, so that a layer or an image is built once and found ever after."""

    def __init__(self, images: ImageStore | None = None, own: OwnImages | None = None) -> None:
        self.images = images or ImageStore()
        self._own = own
        self._builds = FileCache(self.images.root / "builds")
        self._locks: dict[str, anyio.Lock] = {}
        self.prebaked: dict[tuple[str, str, str | None], bool] = {}
        self.known_files = KnownFiles()

    @classmethod
    def of(cls, backend: Backend | str) -> Provision:
        """On the backend's own image store where it has one: an image or layer made elsewhere would be unknown to it."""
        images = getattr(backend, "images", None)
        own = backend if isinstance(backend, OwnImages) else None
        return cls(images if isinstance(images, ImageStore) else None, own)

    @property
    def made_states(self) -> frozenset[str]:
        """Keys of the states that were built here, and not found."""
        return frozenset(self._builds.made)

    async def foresee_states(self, site: Site, backend: Backend) -> tuple[str, ...]:
        """Keys of the states that the site's Dockerfile would be built by, as far as they are known."""
        if site.build is None:
            return ()
        return await foresee_states(site.build, backend, self.images)

    async def prepare_image(
        self, task: Task, agent: Agent, layer: str | None, backend: Backend, deadline: Deadline
    ) -> ProvisionedImage:
        """`layer` is the agent's, where it has one."""
        built = await self.image(task, backend, deadline)
        if task.layers and not backend.capabilities.layers:
            raise Unsupported(f"backend {backend.name!r} mounts no layers, and task {task.id!r} names some")
        layers = await self.layers(task.layers, task, backend)
        if layer is not None and backend.capabilities.layers:
            layers = (*layers, layer)
        baked = await self._bake(task, agent, built.image, layer, backend)
        return ProvisionedImage(built=built, layers=layers, agent_layer=layer, baked=baked)

    async def _bake(self, task: Task, agent: Agent, image: str, layer: str | None, backend: Backend) -> str | None:
        """The image with the agent in it, for backends that keep one; the first rollout makes it."""
        if layer is None or backend.capabilities.layers or not isinstance(backend, BakesLayers):
            return None
        prefix = layer_prefix(layer)
        source = self.images.layers.tree(layer) / prefix.lstrip("/")
        return await backend.bake_layer(
            image, layer, title=agent.name, source=str(source), prefix=prefix, resources=task.resources
        )

    async def find_baked(self, task: Task, agent: Agent, image: str, backend: Backend) -> str | None:
        """The image with the agent in it, where a rollout before this one made it."""
        layer = self.images.layers.find(agent.layer)
        if layer is None or not isinstance(backend, BakesLayers):
            return None
        return await backend.find_baked(image, layer, title=agent.name, resources=task.resources)

    async def verifier_layers(self, task: Task, specs: Sequence[VerifierSpec], backend: Backend) -> None:
        """Build what judging will need before the agent runs: a tool that cannot be had must not cost an agent's work."""
        try:
            for spec in specs:
                names = (*spec.layers, *(spec.site.layers if spec.site is not None else ()))
                await self.layers(names, task, backend)
        except SandboxError as error:
            raise _tools_missing(error) from error

    async def verifier_images(self, specs: Sequence[VerifierSpec], backend: Backend, deadline: Deadline) -> None:
        """Find or build the images of verifiers that have one of their own."""
        try:
            for spec in specs:
                if spec.site is not None:
                    await self.image(spec.site, backend, deadline)
        except SandboxError as error:
            raise _tools_missing(error) from error

    async def layers(self, names: Sequence[str], task: Task, backend: Backend) -> tuple[str, ...]:
        """Ids for layers as a task writes them: an id, or pinned packages to build once. Packages that an untrusted author
        chose are installed in a sandbox."""
        found: list[str] = []
        for name in names:
            spec = layer_spec(name, sandboxed=not task.trusted)
            apart = partial(run_apart, backend)
            found.append(name if spec is None else await self.images.build_layer(spec, apart=apart))
        return tuple(found)

    async def agent_layer(self, agent: Agent, backend: Backend, deadline: Deadline) -> str | None:
        if agent.layer == LayerSpec():
            return None
        try:
            if agent.layer.commands:
                lock = self._locks.setdefault(f"layer of {agent.name}", anyio.Lock())
                async with lock:
                    return await layer_by_commands(agent.layer, backend, self.images, deadline)
            return await self.images.build_layer(agent.layer)
        except SandboxError as error:
            raise _install_failed(f"agent {agent.name!r} could not be installed: {error.message}", error) from error

    async def find_prebaked(self, agent: Agent, place: SandboxSpec, backend: Backend, deadline: Deadline) -> bool:
        """Whether the image brings this agent in this version. A sandbox is opened to look, once for each image."""
        key = (place.image, agent.name, agent.version)
        async with self._locks.setdefault(f"look for {key}", anyio.Lock()):
            if key not in self.prebaked:
                async with backend.open(place) as box:
                    self.prebaked[key] = await self._is_there(box, agent, deadline)
        return self.prebaked[key]

    async def _is_there(self, sandbox: Sandbox, agent: Agent, deadline: Deadline) -> bool:
        """Found on PATH, and of the version that is meant: its check prints it."""
        limit_s = max(1.0, min(30.0, deadline.left))
        found = await sandbox.exec(agents.presence_check(agent, ""), cwd="/", timeout=limit_s)
        version = re.escape(agent.version or "")
        return found.ok and re.search(rf"(?<![\d.]){version}(?![\d.])", found.text) is not None

    async def image(self, site: Site, backend: Backend, deadline: Deadline) -> Built:
        """A known image, or one built from the site's Dockerfile and found again by its content. A ready image that the site
        names beside its Dockerfile is taken where there is one. What is not here is pulled where its registry may be asked."""
        await self.pull(site.image, site, backend, deadline)
        if site.build is None or (site.image != "host" and await self._ready_image(site.image, backend)):
            return Built(image=site.image, workdir="")
        lock = self._locks.setdefault(site.build, anyio.Lock())
        async with lock:
            timeout_s = min(site.build_timeout_s, max(1.0, deadline.left))
            if isinstance(backend, OwnImages) and not site.build_hosts:  # an engine's own builder has no proxy
                image = await backend.build_image(site.build, resources=site.resources, timeout_s=timeout_s)
                return Built(image=image, workdir="")
            options = BuildOptions(
                timeout_s=timeout_s,
                resources=site.resources,
                network="allowlist" if site.build_hosts else "none",
                allowed_hosts=site.build_hosts,
                env=find_mirrors(EgressRules(site.build_hosts).permits) if site.build_hosts else {},
            )
            images = backend if isinstance(backend, Images) else _PulledImages(self, site, backend, deadline)
            return await build(site.build, backend, images, self._builds, options)

    def must_pull(self, image: str, site: Site, backend: Backend) -> bool:
        """Whether an image is not here, and its registry may be asked for it."""
        if image == "host" or not keeps_images(backend) or self.images.catalog.look_up(image) is not None:
            return False
        return self.images.must_pull(image, read_registries(site.pull))

    async def pull(self, image: str, site: Site, backend: Backend, deadline: Deadline) -> None:
        """Fetch an image that must be: once on this machine, however many rollouts ask."""
        if self.must_pull(image, site, backend):
            timeout_s = min(site.build_timeout_s, max(1.0, deadline.left))
            await self.images.pull_missing(image, read_registries(site.pull), timeout_s=timeout_s)

    async def _ready_image(self, image: str, backend: Backend) -> bool:
        """A backend that builds looks into its own store; one that does not has to take the name as it is."""
        if not backend.capabilities.snapshot:
            return True
        try:
            await self.images.resolve(image)
        except UnknownName:
            return False
        return True

    async def has(self, image: str) -> bool:
        """Whether a snapshot is still there. A backend with images of its own is asked by opening from it."""
        try:
            return self._own is not None or bool(await self.images.find(image))
        except UnknownName:
            return False

    async def forget(self, image: str) -> None:
        """Remove a snapshot."""
        await (self._own.remove_image(image) if self._own is not None else self.images.remove(image))

    async def upload_agent(self, sandbox: Sandbox, agent: Agent, ground: ProvisionedImage, deadline: Deadline) -> str:
        """The prefix that the agent then lies under, in a sandbox that mounts no layers."""
        assert ground.agent_layer is not None
        source = self.images.layers.tree(ground.agent_layer) / ground.prefix.lstrip("/")
        try:
            async for attempt in stamina.retry_context(on=_may_repeat, attempts=3, timeout=deadline.left):
                with attempt:
                    await sandbox.upload_dir(str(source), ground.prefix)
        except SandboxError as error:
            raise _install_failed(f"agent {agent.name!r} could not be uploaded: {error}", error) from error
        return ground.prefix

    async def solution(self, sandbox: Sandbox, task: Task, step: Step | None, agent: Agent) -> str | None:
        """The task's solution, put into the sandbox for the oracle alone."""
        folder = step.solution if step is not None else task.solution
        if agent.name != "oracle":
            return None
        if folder is None:
            raise Unsupported(f"task {task.id!r} has no solution for the oracle to run")
        source = Path(folder)
        script = "solve.sh"
        if source.is_file():
            source, script = source.parent, source.name
        await sandbox.upload_dir(str(source), SOLUTION)
        return f"{SOLUTION}/{script}"

    async def prove_route(self, sandbox: Sandbox, port: int) -> None:
        """One request through the very listener the agent will use, before the agent starts. It reaches no policy."""
        if not sandbox.capabilities.dial:
            return
        try:
            with anyio.fail_after(10):
                stream = await sandbox.dial(port)
                try:
                    await stream.send(_PROBE)
                    head = await stream.receive()
                finally:
                    await stream.aclose()
        except (OSError, TimeoutError, SandboxError) as error:
            raise GateUnreachable(
                f"the gate does not answer at 127.0.0.1:{port} inside the sandbox: {error or 'no answer in 10 s'}",
                hint="is the gate running? `async with Gate(...)` must surround the rollout",
            ) from error
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise GateUnreachable(f"the gate refused a probe from inside the sandbox: {head[:80]!r}")


def _tools_missing(error: SandboxError) -> VerifierError:
    return VerifierError(f"the verifier's tools could not be built: {error.message}", hint=error.hint)


def _install_failed(message: str, cause: SandboxError) -> AgentInstallFailed:
    """With the exit code and the output of the command that failed, where one did."""
    if not isinstance(cause, CommandFailed):
        return AgentInstallFailed(message, exit_code=None, hint=cause.hint)
    return AgentInstallFailed(
        message, exit_code=cause.exit_code, stdout=cause.stdout, stderr=cause.stderr, hint=cause.hint
    )


def _may_repeat(error: Exception) -> bool:
    return isinstance(error, SandboxError) and error.retry in {"safe", "if_idempotent"}
