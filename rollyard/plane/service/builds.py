"""From pushed files to an image: what an environment's `build` says, carried out once on each engine and found ever after.

A Dockerfile is carried out by our own builder, in sandboxes of the engine. Its commands reach the hosts that the plane's operator
names (package mirrors), through the egress proxy, and no others; without such hosts they have no network. It names no image that
its owner may not open. What came of a build, with all that it printed, is in the plane's storage; the same files of one owner are
built once.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from rollyard.core.egress import parse_build_network
from rollyard.core.errors import ConfigError, Error, PlaneInvalid, PlaneNotFound, PlaneUnsupported, UnknownName
from rollyard.core.plane import EnvBuild, EnvRecord, EnvSpec
from rollyard.core.sandbox import Resources
from rollyard.images.build import build
from rollyard.images.build_types import BuildOptions, Built, FileCache
from rollyard.images.mirrors import find_mirrors
from rollyard.images.store import ImageStore
from rollyard.net.egress.decide import EgressRules
from rollyard.plane.client.push import unpack
from rollyard.plane.engines.backend import BackendEngine
from rollyard.plane.engines.protocol import Engine
from rollyard.plane.service.access import check_image, snapshot_id
from rollyard.plane.service.typed_records import TypedRecords
from rollyard.plane.storage.protocol import PlaneStore

_LAID = "Dockerfile.rollyard"
_TAIL = 20_000


class BuildRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`image` is None where the build failed; `log` says why, or what was done. All that was printed is the blob `output`."""

    asked: EnvBuild
    image: str | None
    env: Mapping[str, str] = {}
    start: tuple[str, ...] = ()
    log: str = ""
    output: str | None = None
    seconds: float = 0.0


class Builds:
    """`hosts` is what the commands of Dockerfiles may reach."""

    def __init__(
        self,
        store: PlaneStore,
        *,
        hosts: tuple[str, ...] = (),
        limit_s: float = 1800.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self.hosts, self._limit_s, self._clock = store, hosts, limit_s, clock
        self._records = TypedRecords(store, "build", BuildRecord, clock=clock)
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}

    @property
    def mirrors(self) -> dict[str, str]:
        """What tells the commands of a build of this machine's package mirrors, as far as they are allowed."""
        return find_mirrors(EgressRules(self.hosts).permits) if self.hosts else {}

    async def make_ready(self, record: EnvRecord, spec: EnvSpec, engine: Engine) -> EnvSpec:
        """The spec with the image that its `build` gives on this engine, and what that says about starting it."""
        build = spec.build
        if build is None or (spec.image != "host" and await _has_image(engine, spec.image)):
            return spec
        if record.owner not in await self._store.owners_of("bundle", build.bundle):
            raise PlaneNotFound(f"{record.id} is built from files that {record.owner} has not pushed: {build.bundle}")
        if not isinstance(engine, BackendEngine):
            raise PlaneUnsupported(
                f"engine {engine.name} builds no images, and {record.id} is built from pushed files",
                hint="name an engine that runs sandboxes, or an image that this one knows",
            )
        digest = _key(record.owner, build)
        async with self._locks.setdefault((engine.name, digest), asyncio.Lock()):
            done = await self.find(engine.name, record.owner, build)
            if done is None or done.image is None or not await _is_there(engine, done.image):
                done = await self._build(record.owner, build, spec.resources, engine)
                await self._records.update(engine.name, digest, lambda _: done)
        if done.image is None:
            raise PlaneInvalid(f"{record.id} could not be built: {done.log}", hint="change its files and push again")
        await self._store.add_owner("snapshot", snapshot_id(done.image), record.owner, at=self._clock())
        return replace(spec, image=done.image, env={**done.env, **spec.env}, start=spec.start or done.start)

    async def find(self, engine: str, owner: str, recipe: EnvBuild) -> BuildRecord | None:
        kept = await self._records.get(engine, _key(owner, recipe))
        return None if kept is None else kept.value

    async def output(self, done: BuildRecord) -> bytes:
        """All that the build printed."""
        return b"" if done.output is None else await self._store.get_blob(done.output)

    async def _keep(self, owner: str, lines: list[str]) -> str:
        data = "\n".join(lines).encode("utf-8", "replace") + b"\n"
        digest = hashlib.sha256(data).hexdigest()
        await self._store.put_blob(digest, data, owner=owner, at=self._clock())
        return digest

    async def _build(self, owner: str, recipe: EnvBuild, resources: Resources, engine: BackendEngine) -> BuildRecord:
        began, images = self._clock(), _images(engine)
        files = await self._store.get_blob(recipe.bundle)
        lines: list[str] = []
        with tempfile.TemporaryDirectory(prefix="rollyard-build-") as scratch:
            folder = Path(scratch) / "files"
            try:
                await asyncio.to_thread(unpack, files, folder)
                context, dockerfile = _lay_out(folder, recipe)
                options = BuildOptions(
                    dockerfile=dockerfile,
                    timeout_s=self._limit_s,
                    resources=resources,
                    network="allowlist" if self.hosts else "none",
                    allowed_hosts=self.hosts,
                    env=self.mirrors,
                    say=lines.append,
                    may_open=partial(check_image, self._store, owner=owner),
                )
                cache = FileCache(images.root / "builds")
                built = await build(context, engine.backend, images, cache, options)
            except Error as error:  # of its files, or of what they need
                words = "\n".join(str(part) for part in (error.message, error.hint) if part)
                words = words.replace(f"{folder}/", "")  # where this server unpacked them is its own business
                output = await self._keep(owner, [*lines, words])
                seconds = self._clock() - began
                return BuildRecord(asked=recipe, image=None, log=words[-_TAIL:], output=output, seconds=seconds)
        said = f"{built.ran} instructions were carried out, {built.cached} were known"
        return BuildRecord(
            asked=recipe,
            image=built.image,
            env=built.env,
            start=_start(built, recipe.start),
            log=said,
            output=await self._keep(owner, [*lines, said]),
            seconds=self._clock() - began,
        )


def hosts_of_builds(text: str) -> tuple[str, ...]:
    """What `--build-network` lets the commands of Dockerfiles reach."""
    option = parse_build_network(text)
    return ("*",) if option.kind == "public" else option.hosts


def _key(owner: str, recipe: EnvBuild) -> str:
    return hashlib.sha256(msgspec.json.encode((owner, recipe))).hexdigest()


def _images(engine: BackendEngine) -> ImageStore:
    """The backend's own store, where it has one: an image made elsewhere would be unknown to it."""
    found = getattr(engine.backend, "images", None)
    return found if isinstance(found, ImageStore) else ImageStore()


async def _has_image(engine: Engine, image: str) -> bool:
    """An engine with images of its own may fetch what it does not have; its word comes when an instance is made."""
    own = isinstance(engine, BackendEngine) and isinstance(getattr(engine.backend, "images", None), ImageStore)
    return await _is_there(engine, image) if own and isinstance(engine, BackendEngine) else True


async def _is_there(engine: BackendEngine, image: str) -> bool:
    try:
        await _images(engine).find(image)
    except UnknownName:
        return False
    return True


def _lay_out(folder: Path, recipe: EnvBuild) -> tuple[Path, str]:
    """The folder that is built from, and the Dockerfile in it."""
    context = folder / recipe.context
    if not context.resolve().is_relative_to(folder.resolve()) or not context.is_dir():
        raise ConfigError(f"there is no folder {recipe.context!r} in the pushed files")
    if recipe.dockerfile is None:
        (context / _LAID).write_text(f"FROM {recipe.base}\nCOPY . {recipe.target}\nWORKDIR {recipe.target}\n")
        return context, _LAID
    if not (context / recipe.dockerfile).resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{recipe.dockerfile!r} is not below the pushed files")
    if not (context / recipe.dockerfile).is_file():
        raise ConfigError(f"there is no {recipe.dockerfile} in the pushed files")
    return context, recipe.dockerfile


def _start(built: Built, otherwise: tuple[str, ...]) -> tuple[str, ...]:
    """What a container of the image would run, in its folder. An interpreter with nothing to read, as images of Python have it,
    is no program."""
    program = (*built.entrypoint, *built.cmd)
    if program in ((), ("python",), ("python3",)):
        program = otherwise or program
    if not program or built.workdir in ("", "/"):
        return program
    return ("/bin/sh", "-c", 'cd "$0" && exec "$@"', built.workdir, *program)
