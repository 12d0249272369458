"""What workers on other machines need of this one's files, shipped through the store by content, once per node.

A shipped is a directory or file as a tar in pieces; each piece is a body in the store under its digest, so the same task
folder, agent layer or image is sent once and found ever after, also by a node that joins when the driver is gone. A node
unpacks a shipped under a name that is its digest, and paths in tasks and policies are changed to where it lies there. Parts of
the image store (layers, trees of images) keep their place and name, since those are digests already. Agents' layers and files
go to every node when its worker starts, an image when the node has its first attempt that needs it (`NodeImages`).
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
from anyio.abc import Process

from rollyard.core.agent import LayerSpec
from rollyard.core.cache import hold_lock_async
from rollyard.core.errors import StoreError
from rollyard.core.home import private_dir
from rollyard.images.store import ImageStore
from rollyard.images.trees import publish, remove_tree
from rollyard.runs.run.assignment import Assignment
from rollyard.store import Store

T = TypeVar("T")

PIECE = 4 << 20
_LOOK_S = 5.0  # between looks at what other workers of this machine have fetched
_UNPACK_S = 1800.0
# Fields of tasks that are host paths
_PATHS = ("source", "build", "compose", "solution", "workdir_files", "image", "tests")
_SCRIPT = "scripted:"
_TAR = ("tar", "--sort=name", "--mtime=@0", "--numeric-owner", "--xattrs", "--xattrs-include=*", "--format=pax")
_SAME_ALWAYS = "--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime"


class ShippedPath(msgspec.Struct, frozen=True):
    """`name` is a path of the machine it was packed on, or one below the image store."""

    name: str
    pieces: tuple[str, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256("".join(self.pieces).encode()).hexdigest()[:32]


class Shipment(msgspec.Struct, frozen=True, kw_only=True):
    """`files` are unpacked anywhere; `parts` are pieces of an image store by their names there. Of those, `layers` says which
    agents need, `images` which each image is made of, and `names` the ids of images that tasks call by another name."""

    files: tuple[ShippedPath, ...] = ()
    parts: Mapping[str, ShippedPath] = {}
    layers: tuple[tuple[LayerSpec, str], ...] = ()
    images: Mapping[str, tuple[str, ...]] = {}
    names: Mapping[str, str] = {}


async def pack_work(work: Assignment, store: Store, images: ImageStore | None = None) -> Shipment:
    """Put what the work refers to on this machine into the store. A store of one machine needs none of it."""
    if not store.shared:
        return Shipment()
    images = images or ImageStore()
    layers = [(a.layer, await images.build_layer(a.layer)) for a in work.agents.values() if a.layer != LayerSpec()]
    made_of, names = _images_of(work, images)
    parts = {f"layers/{layer_id}" for _, layer_id in layers}.union(*made_of.values())
    files = [await _pack(Path(root), root, store) for root in _roots(work)]
    return Shipment(
        files=tuple(files),
        parts={name: await _part(images, name, store) for name in sorted(parts)},
        layers=tuple(layers),
        images=made_of,
        names=names,
    )


async def unpack_work(work: Assignment, shipment: Shipment, store: Store, images: ImageStore) -> Assignment:
    """The same work with its files on this machine; its images come later, each when it is needed."""
    for spec, layer_id in shipment.layers:
        part = f"layers/{layer_id}"
        await _unpack(shipment.parts[part], images.root / part, store, images.root)
        images.layers.remember(spec, layer_id)
    places: dict[str, str] = {}
    for shipped in shipment.files:
        place = images.root / "shipped" / shipped.digest
        await _unpack(shipped, place, store, images.root)
        places[shipped.name] = str(place)
    return _move_work(work, places) if places else work


class NodeImages:
    """The images of a run on this machine, fetched one by one as attempts need them, and those that are here already."""

    def __init__(self, shipment: Shipment, store: Store, images: ImageStore) -> None:
        self._shipment, self._store, self._images = shipment, store, images
        self._held: set[str] = set()
        self._fetched: set[str] = set()
        self._looked_at = float("-inf")

    @property
    def held(self) -> list[str]:
        """What this machine has or fetches, also for another worker on it."""
        if time.monotonic() - self._looked_at > _LOOK_S:
            self._looked_at = time.monotonic()
            self._held |= {
                name
                for name, parts in self._shipment.images.items()
                if all(self._place(part).exists() for part in parts)
            }
        return sorted(self._held)

    def expect(self, image: str) -> None:
        """An attempt that needs it was claimed, so it will be here: fetched, or built."""
        self._held.add(image)

    async def fetch(self, image: str) -> None:
        """The image that an attempt runs in. One that did not come with the run is built or found by the backend."""
        if image in self._fetched:
            return
        for part in self._shipment.images.get(image, ()):
            await _unpack(self._shipment.parts[part], self._place(part), self._store, self._images.root)
        if (image_id := self._shipment.names.get(image)) is not None:
            await self._images.catalog.name(image_id, [image])
        self._fetched.add(image)

    def _place(self, part: str) -> Path:
        return self._images.root / part


# what is to be sent


def _roots(work: Assignment) -> list[str]:
    """Host paths that tasks and scripts lie under; none lies under another."""
    found = {path for task in work.tasks.values() for path in _paths_in(task)}
    found |= {work.config.image} if work.config.image is not None else set()
    scripts = (*work.config.policies.values(), work.config.user or "")
    found |= {text.removeprefix(_SCRIPT) for text in scripts if text.startswith(_SCRIPT)}
    if Path(work.config.tasks).is_absolute() and Path(work.config.tasks).is_dir():
        found.add(work.config.tasks)
    real = sorted(path for path in found if Path(path).is_absolute() and Path(path).exists())
    return [path for n, path in enumerate(real) if not any(_is_below(path, root) for root in real[:n])]


def _paths_in(value: Any) -> Iterable[str]:
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            inner = getattr(value, name)
            yield from _texts(inner) if name in _PATHS or name == "options" else _paths_in(inner)
    elif isinstance(value, tuple):
        for inner in value:  # pyright: ignore[reportUnknownVariableType] - of structs, or of nothing that matters
            yield from _paths_in(inner)


def _texts(value: Any) -> list[str]:
    inner: Any = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else [value]
    return [text for text in inner if isinstance(text, str) and text.startswith("/")]


def _images_of(work: Assignment, images: ImageStore) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """The parts of the image store that each of the tasks' images is made of, and the ids of those that are called by a name."""
    found: dict[str, tuple[str, ...]] = {}
    names: dict[str, str] = {}
    for name in sorted({work.config.image or "host", *(task.image for task in work.tasks.values())} - {"host"}):
        record = images.catalog.look_up(name)
        if record is None:  # a path, or a name that only the nodes know
            continue
        parts: list[str] = []
        for kind, _, which in (ref.partition(":") for ref in (*record.stack, *sum(record.over.values(), ()))):
            if kind in ("tree", "layer"):
                parts.append(f"{kind}s/{which}")
        # The record last: what it names is there then
        found[name] = (*dict.fromkeys(parts), f"images/{record.id}.json")
        if name != record.id:
            names[name] = record.id
    return found, names


async def _part(images: ImageStore, name: str, store: Store) -> ShippedPath:
    """A part never changes, so it is read once; afterwards the store is only asked whether it still has the pieces."""
    noted = private_dir(images.root / "shipped") / f"{name.replace('/', '.')}.pieces"
    if noted.is_file():
        shipped = ShippedPath(name, tuple(noted.read_text().split()))
        if not await store.missing_blobs(shipped.pieces):
            return shipped
    shipped = await _pack(images.root / name, name, store)
    noted.write_text("\n".join(shipped.pieces))
    return shipped


async def _pack(path: Path, name: str, store: Store) -> ShippedPath:
    command = [*_TAR, _SAME_ALWAYS, "-cf", "-", "-C", str(path.parent), "--", path.name]
    pieces: list[str] = []
    async with await anyio.open_process(command) as tar:
        async for piece in _in_pieces(tar):
            pieces.append(await store.put_blob(piece))
    if tar.returncode:
        raise StoreError(f"{path} could not be packed: tar ended with {tar.returncode}")
    return ShippedPath(name, tuple(pieces))


async def _in_pieces(tar: Process) -> AsyncIterator[bytes]:
    assert tar.stdout is not None
    kept = bytearray()
    async for data in tar.stdout:
        kept += data
        while len(kept) >= PIECE:
            yield bytes(kept[:PIECE])
            del kept[:PIECE]
    if kept:
        yield bytes(kept)


# what has arrived


async def _unpack(shipped: ShippedPath, target: Path, store: Store, root: Path) -> None:
    """Once per node: the second worker finds it there."""
    if target.exists():
        return
    async with hold_lock_async(root / "locks" / f"shipped-{shipped.digest}", _UNPACK_S):
        if target.exists():
            return
        work = Path(tempfile.mkdtemp(prefix=".new-", dir=private_dir(target.parent)))
        try:
            command = ["tar", "--xattrs", "--xattrs-include=*", "--numeric-owner", "-xpf", "-", "-C", str(work)]
            async with await anyio.open_process(command) as tar:
                assert tar.stdin is not None
                for piece in shipped.pieces:
                    await tar.stdin.send(await store.get_blob(piece))
                await tar.stdin.aclose()
            if tar.returncode:
                raise StoreError(f"{shipped.name} could not be unpacked: tar ended with {tar.returncode}")
            publish(work / Path(shipped.name).name, target)
        finally:
            await anyio.to_thread.run_sync(remove_tree, work)


def _move_work(work: Assignment, places: Mapping[str, str]) -> Assignment:
    policies = {name: _move_script(text, places) for name, text in work.config.policies.items()}
    user = None if work.config.user is None else _move_script(work.config.user, places)
    image = None if work.config.image is None else _move_path(work.config.image, places)
    moved = _move_path(work.config.tasks, places)
    config = msgspec.structs.replace(work.config, policies=policies, user=user, tasks=moved, image=image)
    tasks = {task_id: _move_value(task, places) for task_id, task in work.tasks.items()}
    return msgspec.structs.replace(work, config=config, tasks=tasks)


def _move_script(text: str, places: Mapping[str, str]) -> str:
    return _SCRIPT + _move_path(text.removeprefix(_SCRIPT), places) if text.startswith(_SCRIPT) else text


def _move_value(value: Any, places: Mapping[str, str]) -> Any:
    if isinstance(value, msgspec.Struct):
        changed: dict[str, Any] = {}
        for name in value.__struct_fields__:
            inner = getattr(value, name)
            moved = _move_texts(inner, places) if name in _PATHS or name == "options" else _move_value(inner, places)
            if moved is not inner:
                changed[name] = moved
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, tuple):
        return tuple(_move_value(inner, places) for inner in value)  # pyright: ignore[reportUnknownVariableType]
    return value


def _move_texts(value: Any, places: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _move_path(inner, places) if isinstance(inner, str) else inner for name, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(_move_path(inner, places) if isinstance(inner, str) else inner for inner in value)
    return _move_path(value, places) if isinstance(value, str) else value


def _move_path(path: str, places: Mapping[str, str]) -> str:
    for root, place in places.items():
        if _is_below(path, root):
            return place + path[len(root) :]
    return path


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")
