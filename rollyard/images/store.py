"""The image store: turns the name of an image and the ids of layers into a `Rootfs`, and keeps what images are made of.

    host/     skeletons of the `host` image (`host.py`)      images/, names.json   records and names (`catalog.py`)
    layers/   built layers (`layers.py`)                     trees/                what records point to (`stacks.py`)
    downloads/  layers that are being pulled (`pull.py`)

Everything is immutable once it has its name, so nothing needs a lock to be opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import anyio.to_thread
import msgspec

from rollyard.core.agent import LayerSpec
from rollyard.core.cache import hold_lock_async, replace_file
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.core.home import data_home, private_dir
from rollyard.core.ids import new_id
from rollyard.core.sandbox import is_path
from rollyard.core.sequences import as_tuple
from rollyard.images.catalog import ImageCatalog, ImageRecord, Kind
from rollyard.images.host import host_rootfs
from rollyard.images.imports import import_image
from rollyard.images.layers import LayerRecord, Layers
from rollyard.images.manifests import Platform
from rollyard.images.oci import ImageConfig
from rollyard.images.packages import SandboxRun
from rollyard.images.pull import PULL_TIMEOUT_S, OnProgress, PulledImage, pull
from rollyard.images.reference import canonical_name, parse_reference
from rollyard.images.registries import Registries
from rollyard.images.rootfs import HostTree, Rootfs
from rollyard.images.snapshots import copy_upper
from rollyard.images.stacks import Stacks

KEEP_UNUSED_S = 24 * 3600.0
IMPORT_TIMEOUT_S = 1800.0


class ImageStore:
    """One directory of images, layers and snapshots, private to its user."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = private_dir(root or data_home())
        self.layers = Layers(self.root)
        self.catalog = ImageCatalog(self.root)
        self._stacks = Stacks(self.root, self.layers)

    async def resolve(self, image: str = "host", layers: Sequence[str] = ()) -> Rootfs:
        """What to mount for `image` with `layers` on top, lowest first. A layer the image has already is not repeated."""
        record = await self.find(image)
        return await anyio.to_thread.run_sync(self._rootfs, record, _with_layers(record, layers))

    async def find(self, image: str) -> ImageRecord:
        """The record behind a name, an alias, an id, a directory or an archive; an archive met the first time is added."""
        if (record := self.catalog.look_up(image)) is not None:
            return record
        if is_path(image):
            return await self._find_path(Path(image).expanduser().absolute())
        known = ["host", *self.catalog.names()]
        raise UnknownName("image", image, known, hint=_how_to_get(image))

    async def layer(
        self,
        *,
        npm: Sequence[str] = (),
        pip: Sequence[str] = (),
        node: str | None = None,
        python: str | None = None,
    ) -> str:
        """Build (once) a layer with these packages and the interpreters they need; its id goes into `SandboxSpec.layers`."""
        return await self.build_layer(
            LayerSpec(npm=as_tuple(npm, "npm"), pip=as_tuple(pip, "pip"), node=node, python=python)
        )

    async def build_layer(self, spec: LayerSpec, *, apart: SandboxRun | None = None) -> str:
        return await self.layers.build(spec, apart=apart)

    def layer_record(self, layer_id: str) -> LayerRecord:
        return self.layers.record(layer_id)

    async def add(self, source: str, *, names: Sequence[str] = ()) -> ImageRecord:
        """Take in a rootfs directory, a tar, a `docker save` or OCI archive under these names and the tags it carries; or
        give more names to an image that is here."""
        path = Path(source).expanduser().absolute()
        tags: tuple[str, ...] = ()
        if (record := self.catalog.look_up(source)) is None:
            if not path.exists():
                raise ConfigError(
                    f"no image and no file named {source!r}", hint="give a directory, a tar or an OCI archive"
                )
            _refuse_home(path, self.root)
            async with hold_lock_async(self.root / "locks" / "import", IMPORT_TIMEOUT_S):
                found, tags = await anyio.to_thread.run_sync(import_image, self._stacks, path)
                record = self.catalog.save(found)
        await self.catalog.name(record.id, [*as_tuple(names, "names"), *tags])
        return record

    async def pull(
        self,
        image: str,
        registries: Registries,
        *,
        names: Sequence[str] | None = None,
        platform: Platform | None = None,
        timeout_s: float = PULL_TIMEOUT_S,
        on_progress: OnProgress | None = None,
    ) -> PulledImage:
        """Fetch what a registry has under this reference now, and name it so, or by `names`. Layers that are here stay."""
        reference = parse_reference(image)
        done = await pull(
            self._stacks, reference, registries, platform=platform, timeout_s=timeout_s, on_progress=on_progress
        )
        async with hold_lock_async(self.root / "locks" / "import", IMPORT_TIMEOUT_S):
            record = self.catalog.save(done.record)
        await self.catalog.name(record.id, [image] if names is None else as_tuple(names, "names"))
        return msgspec.structs.replace(done, record=record)

    def must_pull(self, image: str, registries: Registries) -> bool:
        """Whether an image is not here, and its registry may be asked for it. An id or a path is of this machine alone."""
        if is_path(image) or image.startswith(("img_", "snap_")) or self.catalog.look_up(image) is not None:
            return False
        return canonical_name(image) is not None and bool(registries.endpoints(parse_reference(image)))

    async def pull_missing(self, image: str, registries: Registries, *, timeout_s: float = PULL_TIMEOUT_S) -> None:
        """Fetch an image that is not here. Several who want the same one wait for the first."""
        key = hashlib.sha256(parse_reference(image).text.encode()).hexdigest()[:24]
        async with hold_lock_async(self.root / "locks" / f"pull-{key}", timeout_s):
            if self.catalog.look_up(image) is None:
                await self.pull(image, registries, timeout_s=timeout_s)

    async def commit(
        self,
        image: str,
        uppers: Mapping[str, Path],
        *,
        layers: Sequence[str] = (),
        config: ImageConfig | None = None,
        kind: Kind = "image",
        uid_shift: int = 0,
    ) -> str:
        """The id of a new image: `image` with `layers`, and on top a copy of `uppers` (mount target -> upper directory; `/`
        is the root's). Owners in the uppers are lowered by `uid_shift`."""
        base = await self.find(image)
        stack = _with_layers(base, layers)
        return await anyio.to_thread.run_sync(self._commit, base, stack, uppers, config or base.config, kind, uid_shift)

    async def add_snapshot(
        self, image: str, uppers: Mapping[str, Path], *, layers: Sequence[str] = (), uid_shift: int = 0
    ) -> str:
        """Freeze a sandbox's writable state; the id (`snap_...`) opens like any image."""
        return await self.commit(image, uppers, layers=layers, kind="snapshot", uid_shift=uid_shift)

    async def remove(self, image: str) -> list[str]:
        """Forget a name, with its last name the image; or a layer. Trees go later (`sweep`): a sandbox may be using them."""
        if image.startswith("ly_") and image not in self.catalog.names():
            users = [
                record.id for record in self.catalog.records() if any(ref.endswith(f":{image}") for ref in record.stack)
            ]
            if users:
                raise ConfigError(f"layer {image} is part of {', '.join(users)}", hint="remove those first")
            self.layers.remove(image)
            return [image]
        return await self.catalog.remove(image)

    async def remove_builds(self) -> list[str]:
        """Forget what Dockerfiles were built to, unless it has a name, and remove it with all that nothing names now. Nothing
        may be open."""
        named = set(self.catalog.names().values())
        gone: list[str] = []
        for kept in sorted((self.root / "builds").glob("local-*")):
            image = kept.read_text()
            kept.unlink(missing_ok=True)
            if image not in named and self.catalog.load(image) is not None:
                gone += await self.catalog.remove(image)
        await self.sweep(unused_s=0.0)
        return gone

    async def remove_states(self, keys: Iterable[str], *, in_use: Collection[str]) -> list[str]:
        """Forget these states of builds, unless they have a name or are `in_use`, and remove what was theirs alone."""
        kept = {*self.catalog.names().values(), *in_use}
        gone: list[str] = []
        refs: set[str] = set()
        for file in (self.root / "builds" / key for key in keys):
            image = file.read_text() if file.is_file() else ""
            if image in kept or (record := self.catalog.load(image)) is None:
                continue
            refs |= {ref for part in (record.stack, *record.over.values()) for ref in part}
            file.unlink(missing_ok=True)
            gone += await self.catalog.remove(image)
        async with hold_lock_async(self.root / "locks" / "import", IMPORT_TIMEOUT_S):
            theirs = refs - self._named_refs()
            trees = {name for kind, _, name in (ref.partition(":") for ref in theirs) if kind == "tree"}
            await anyio.to_thread.run_sync(self._stacks.remove, trees)
        return gone

    def _named_refs(self) -> set[str]:
        """What images are made of."""
        records = self.catalog.records()
        return {ref for record in records for part in (record.stack, *record.over.values()) for ref in part}

    async def sweep(self, *, unused_s: float = KEEP_UNUSED_S) -> list[str]:
        """Remove trees that no image names and that were not opened for `unused_s`; and what died while it was built."""
        async with hold_lock_async(self.root / "locks" / "import", IMPORT_TIMEOUT_S):
            named = {ref.partition(":")[2] for ref in self._named_refs()}
            return await anyio.to_thread.run_sync(self._stacks.sweep, named, unused_s)

    def _rootfs(self, record: ImageRecord, stack: tuple[str, ...]) -> Rootfs:
        stack = self._stacks.shallow(stack, bottom=True)
        config = record.config
        if "host" not in stack:
            lowers = tuple(str(self._stacks.path(ref)) for ref in stack)
            return Rootfs(
                lowers=lowers,
                env=config.env,
                workdir=config.workdir,
                user=config.user,
                entrypoint=config.entrypoint,
                cmd=config.cmd,
                image=record.id,
            )
        base = host_rootfs(self.root)
        return Rootfs(
            lowers=(*(str(self._stacks.path(ref)) for ref in stack if ref != "host"), *base.lowers),
            trees=tuple(self._with_over(tree, record.over.get(tree.target, ())) for tree in base.trees),
            env={**base.env, **config.env},
            workdir=config.workdir if config.workdir != "/" else base.workdir,
            user=config.user,
            entrypoint=config.entrypoint,
            cmd=config.cmd,
            image=record.id,
        )

    def _with_over(self, tree: HostTree, over: tuple[str, ...]) -> HostTree:
        paths = tuple(str(self._stacks.path(ref)) for ref in self._stacks.shallow(over, bottom=False))
        return msgspec.structs.replace(tree, over=paths) if paths else tree

    def _commit(
        self,
        base: ImageRecord,
        stack: tuple[str, ...],
        uppers: Mapping[str, Path],
        config: ImageConfig,
        kind: Kind,
        uid_shift: int,
    ) -> str:
        targets = {"/", *(tree.target for tree in self._rootfs(base, stack).trees if tree.writable)}
        if strange := sorted(set(uppers) - targets):
            raise ConfigError(f"{base.id!r} has no writable tree at {strange[0]!r}")
        over = dict(base.over)
        size = 0
        for target, upper in uppers.items():
            name = new_id("u")[2:]
            with self._stacks.making(lambda name=name: name) as scratch:
                size += copy_upper(upper, scratch, uid_shift=uid_shift)
            if target == "/":
                stack = self._stacks.shallow((f"tree:{name}", *stack), bottom=True)
            else:
                over[target] = self._stacks.shallow((f"tree:{name}", *over.get(target, ())), bottom=False)
        image_id = new_id("snap" if kind == "snapshot" else "img")
        record = ImageRecord(id=image_id, kind=kind, source=base.id, stack=stack, over=over, config=config, bytes=size)
        return self.catalog.save(record).id

    async def _find_path(self, path: Path) -> ImageRecord:
        if not path.exists():
            raise ConfigError(f"no image at {str(path)!r}", hint="the path is on the host; give one that exists")
        if path.is_dir() and not (path / "oci-layout").is_file():
            _refuse_home(path, self.root)
            return ImageRecord(id=str(path), source=str(path), stack=(f"dir:{path}",))
        status = path.stat()
        key = hashlib.sha256(f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()[:24]
        seen = private_dir(self.root / "sources") / key
        if seen.is_file() and (record := self.catalog.load(seen.read_text())) is not None:
            return record
        record = await self.add(str(path))
        replace_file(seen, record.id.encode())
        return record


def _how_to_get(image: str) -> str:
    added = f"`rollyard image add SOURCE --name {image}` takes it from a file"
    if canonical_name(image) is None:
        return added
    registry = parse_reference(image).registry
    return f"`rollyard image pull {image}` fetches it, --pull {registry} lets a run do that; {added}"


def _with_layers(record: ImageRecord, layers: Sequence[str]) -> tuple[str, ...]:
    added = [f"layer:{layer}" for layer in reversed(layers)]
    return (*(ref for ref in added if ref not in record.stack), *record.stack)


def _refuse_home(path: Path, store: Path) -> None:
    """A whole machine is not an image: what a sandbox may read of this one is the `host` image's list."""
    if path.is_dir() and (Path.home().is_relative_to(path) or store.is_relative_to(path)):
        raise ConfigError(f"{str(path)!r} holds a home directory: it cannot be an image", hint="use image='host'")


async def layer(
    *,
    npm: Sequence[str] = (),
    pip: Sequence[str] = (),
    node: str | None = None,
    python: str | None = None,
) -> str:
    """`ImageStore().layer(...)`: a layer in the default store."""
    return await ImageStore().layer(npm=npm, pip=pip, node=node, python=python)
