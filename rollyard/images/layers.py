"""Building layers: a read-only addition to any image that holds an agent or a toolchain with the interpreters it needs.

Everything of a layer lies under `/opt/rollyard/<digest>/`. The digest is of its contents with that prefix taken out, so the
same packages give the same layer, and two versions of an agent can lie side by side in one sandbox. What was asked for is
mapped to what was built by an index, so asking again costs one look-up. The trap avoided: a name from the request alone
(`codex@latest`) would mean different bytes on different days.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import stat
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec

from rollyard.core.agent import LayerSpec
from rollyard.core.cache import make_once_async, replace_file
from rollyard.core.errors import CommandFailed, ConfigError, UnknownName
from rollyard.core.home import private_dir
from rollyard.core.ids import new_id
from rollyard.core.scratch import scratch
from rollyard.images.archives import decompress, unpack
from rollyard.images.host_programs import run_program
from rollyard.images.interpreters import Toolchain, node_toolchain, npm_command, pip_command, python_toolchain
from rollyard.images.packages import Locked, SandboxRun, npm_install, pip_install
from rollyard.images.trees import (
    ManifestEntry,
    link_tree,
    manifest,
    open_to_all,
    publish,
    remove_tree,
    tree_digest,
)

FORMAT = "1"
PREFIX = "/opt/rollyard"
BUILD_TIMEOUT_S = 1800.0
SHARED_BYTES = 1 << 20


class LayerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What lies beside a layer's tree. `unmoved` are binary files that still name the place they were built in."""

    id: str
    spec: LayerSpec
    prefix: str
    created_at: float
    files: int
    bytes: int
    platform: str
    toolchains: tuple[str, ...] = ()
    npm: tuple[Locked, ...] = ()
    pip: tuple[Locked, ...] = ()
    unmoved: tuple[str, ...] = ()


class Layers:
    """The layers of one store root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.dir = root / "layers"

    def tree(self, layer_id: str) -> Path:
        """The directory of one layer, rooted at `/`."""
        tree = self.dir / layer_id / "root"
        if not layer_id.startswith("ly_") or "/" in layer_id or not tree.is_dir():
            raise UnknownName(
                "layer", layer_id, self.ids(), hint="build it with `await rollyard.images.layer(pip=[...], npm=[...])`"
            )
        return tree

    def ids(self) -> list[str]:
        return sorted(path.name for path in self.dir.glob("ly_*"))

    def record(self, layer_id: str) -> LayerRecord:
        self.tree(layer_id)
        return msgspec.json.decode((self.dir / layer_id / "layer.json").read_bytes(), type=LayerRecord)

    async def build(self, spec: LayerSpec, *, apart: SandboxRun | None = None, timeout: float = BUILD_TIMEOUT_S) -> str:
        """The id of the layer that `spec` asks for; built when this store has not built it before. `apart` installs packages
        of a `sandboxed` one."""
        if not (spec.npm or spec.pip or spec.node or spec.python or spec.folder or spec.archive or spec.commands):
            raise ConfigError("a layer needs packages or an interpreter", hint="layer(npm=[...]) or layer(pip=[...])")
        if spec.commands:
            if (known := self.find(spec)) is not None:
                return known
            raise ConfigError(
                "a layer of commands is made in a sandbox, and was not made yet", hint="run a rollout first"
            )
        if spec.sandboxed and apart is None and self.find(spec) is None:
            raise ConfigError(
                "packages of a task from elsewhere are installed in a sandbox", hint="run a rollout first"
            )
        for name in (*spec.npm, *spec.pip):
            if not name.strip() or name.startswith("-"):
                raise ConfigError(f"{name!r} is not a package name")
        key = _key(spec)

        async def make(aside: Path) -> None:
            with anyio.fail_after(timeout):
                aside.write_text(await self._build(spec, key, apart if spec.sandboxed else None, timeout))

        index = await make_once_async(self.root / "index" / key, make, is_good=self._is_built, wait_s=timeout)
        return index.read_text()

    def find(self, spec: LayerSpec) -> str | None:
        """The layer that `spec` asks for, where it was built before."""
        index = self.root / "index" / _key(spec)
        return index.read_text() if self._is_built(index) else None

    def bytes_so_far(self, spec: LayerSpec) -> int:
        """Of a build of it that is under way, in this process or another."""
        found = 0
        for work in self.dir.glob(f".new-{_key(spec)}-*"):
            for folder, _, names in os.walk(work):
                for name in names:
                    with contextlib.suppress(OSError):  # an installer moves its files about
                        found += (Path(folder) / name).lstat().st_size
        return found

    def remember(self, spec: LayerSpec, layer_id: str) -> None:
        """From now on a layer that is here, however it came, is what `spec` asks for."""
        self.tree(layer_id)
        replace_file(private_dir(self.root / "index") / _key(spec), layer_id.encode())

    async def verify(self, layer_id: str) -> list[str]:
        """Paths whose contents are no longer those that were built; bytecode is not counted."""
        root = self.tree(layer_id)
        written = msgspec.json.decode((root.parent / "manifest.json").read_bytes(), type=list[ManifestEntry])
        found = await anyio.to_thread.run_sync(manifest, root)
        now = {entry.path: entry for entry in found if not _bytecode(entry.path)}
        then = {entry.path: entry for entry in written}
        changed = [path for path in then if path not in now or now[path].digest != then[path].digest]
        return sorted({*changed, *(path for path in now if path not in then)})

    def remove(self, layer_id: str) -> None:
        """Forget a layer at once. Its tree only loses its name: a sandbox that is open goes on using it."""
        place = self.tree(layer_id).parent
        place.rename(place.with_name(f".old-{new_id('ly')}-{layer_id}"))

    def _is_built(self, index: Path) -> bool:
        return index.is_file() and (self.dir / (index.read_text() or "none") / "root").is_dir()

    async def _build(self, spec: LayerSpec, key: str, apart: SandboxRun | None, timeout: float) -> str:
        for left in self.dir.glob(f".new-{key}-*"):  # by a build that was killed: this one holds its lock
            await anyio.to_thread.run_sync(remove_tree, left)
        work = Path(tempfile.mkdtemp(prefix=f".new-{key}-", dir=private_dir(self.dir)))
        try:
            place = work / "root" / PREFIX.lstrip("/")
            prefix = place / "building"
            (prefix / "bin").mkdir(parents=True)
            (prefix / "lib").mkdir()
            with scratch("layer") as folder:
                toolchains, npm, pip = await self._install(spec, prefix, apart, folder, timeout)
            entries = await anyio.to_thread.run_sync(_finish_tree, work / "root", prefix)
            digest = tree_digest(entries)
            layer_id, final = f"ly_{digest[:24]}", place / digest[:12]
            await anyio.to_thread.run_sync(_move, work / "root", prefix, final, entries)
            await anyio.to_thread.run_sync(_share_copies, work / "root", prefix, final, entries)
            if python := next((found for found in toolchains if found.kind == "python"), None):
                await _compile(python.tree / "bin/python3", final, timeout)
            after = await anyio.to_thread.run_sync(manifest, work / "root")
            record = LayerRecord(
                id=layer_id, spec=spec, prefix=layer_prefix(layer_id), created_at=time.time(), files=len(entries),
                bytes=sum(entry.size for entry in entries), platform=platform.machine(),
                toolchains=tuple(toolchain.id for toolchain in toolchains), npm=tuple(npm), pip=tuple(pip),
                unmoved=tuple(entry.path for entry in entries if entry.mentions and entry.binary),
            )  # fmt: skip
            (work / "layer.json").write_bytes(msgspec.json.encode(record))
            (work / "manifest.json").write_bytes(msgspec.json.encode([e for e in after if not _bytecode(e.path)]))
            publish(work, self.dir / layer_id)
            return layer_id
        finally:
            await anyio.to_thread.run_sync(remove_tree, work)

    async def _install(
        self, spec: LayerSpec, prefix: Path, apart: SandboxRun | None, scratch: Path, timeout: float
    ) -> tuple[list[Toolchain], list[Locked], list[Locked]]:
        toolchains: list[Toolchain] = []
        npm: list[Locked] = []
        pip: list[Locked] = []
        if spec.folder is not None or spec.archive is not None:
            await anyio.to_thread.run_sync(copy_source, spec, prefix)
        if not (spec.npm or spec.pip or spec.node or spec.python):
            return toolchains, npm, pip
        own_pip = await pip_command()
        if spec.pip or spec.python:
            python = await python_toolchain(self.root, spec.python, timeout=timeout)
            toolchains.append(python)
            await anyio.to_thread.run_sync(link_tree, python.tree, prefix)
            if spec.pip:
                pip = await pip_install(prefix, spec.pip, own_pip, apart=apart, scratch=scratch, timeout=timeout)
        if spec.npm or spec.node:
            node = await node_toolchain(self.root, spec.node, own_pip, timeout=timeout)
            toolchains.append(node)
            await anyio.to_thread.run_sync(_link_node, node, prefix)
            if spec.npm:
                npm = await npm_install(
                    prefix, spec.npm, npm_command(node), before=spec.before, apart=apart, scratch=scratch,
                    timeout=timeout,
                )  # fmt: skip
        return toolchains, npm, pip


def _key(spec: LayerSpec) -> str:
    parts: list[Any] = [FORMAT, spec, platform.machine()]
    return hashlib.sha256(msgspec.json.encode([*parts, *_content(spec)])).hexdigest()[:24]


def _content(spec: LayerSpec) -> list[str]:
    """What the folder, the archive or the packages that are files hold now: the same name with other bytes is another layer.
    One that is not on this machine was brought here as a layer."""
    named = [spec.folder or spec.archive or "", *(_local_path(package) for package in (*spec.npm, *spec.pip))]
    return [_digest(path) for name in named if name and (path := Path(name)).exists()]


def _local_path(package: str) -> str:
    """The file or folder that a package is asked for by, as npm (`file:PATH`) and pip (`NAME @ file://PATH`) write it."""
    _, marked, place = package.partition("file:")
    place = place.removeprefix("//") if marked else package
    return place if "/" in place and not place.startswith(("@", "http:", "https:", "git+")) else ""


def _digest(path: Path) -> str:
    if path.is_dir():
        return tree_digest(manifest(path))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_source(spec: LayerSpec, target: Path) -> None:
    """The folder or archive of a layer, into a directory."""
    source = Path(spec.folder or spec.archive or "")
    if not (source.is_dir() if spec.folder is not None else source.is_file()):
        raise ConfigError(
            f"the layer's {'folder' if spec.folder is not None else 'archive'} {str(source)!r} is not there"
        )
    if spec.folder is not None:
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        return
    try:
        with source.open("rb") as file, decompress(file) as plain:
            unpack(plain, target)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ConfigError(f"the layer's archive {str(source)!r} cannot be unpacked: {error}") from error


def layer_prefix(layer_id: str) -> str:
    """Where the layer lies in a sandbox; its programs are in `bin` below that."""
    return f"{PREFIX}/{layer_id.removeprefix('ly_')[:12]}"


def _link_node(node: Toolchain, prefix: Path) -> None:
    link_tree(node.tree / "bin", prefix / "bin")
    for library in (node.tree / "lib").glob("*.so*"):
        if not (prefix / "lib" / library.name).exists():
            (prefix / "lib" / library.name).hardlink_to(library)


def _finish_tree(root: Path, prefix: Path) -> list[ManifestEntry]:
    """Final modes, no caches, then the manifest by which the layer gets its name."""
    for leftover in (prefix / "lib/node_modules/.package-lock.json", prefix / "lib/node_modules/.cache"):
        if leftover.is_dir():
            remove_tree(leftover)
        else:
            leftover.unlink(missing_ok=True)
    open_to_all(root)
    return [entry for entry in manifest(root, bytes(prefix)) if not _bytecode(entry.path)]


def _move(root: Path, prefix: Path, final: Path, entries: list[ManifestEntry]) -> None:
    """Give the prefix its name and put that name, as seen from inside, into the text files that hold the old one."""
    inside = b"/" + bytes(final.relative_to(root))
    for entry in entries:
        if entry.mentions and not entry.binary:
            path = root / entry.path
            content = path.read_bytes().replace(bytes(prefix), inside)
            mode = path.stat().st_mode
            path.unlink()  # it may share its inode with a toolchain
            path.write_bytes(content)
            path.chmod(mode)
    prefix.rename(final)


def _share_copies(root: Path, prefix: Path, final: Path, entries: list[ManifestEntry]) -> None:
    """Large files that are the same become one: some agents install their native binary twice."""
    first: dict[tuple[str, int], Path] = {}
    for entry in entries:
        if entry.size >= SHARED_BYTES and stat.S_ISREG(entry.mode):
            path = final / (root / entry.path).relative_to(prefix)
            known = first.setdefault((entry.digest, entry.mode), path)
            if known != path:
                path.unlink()
                path.hardlink_to(known)


async def _compile(python: Path, prefix: Path, timeout: float) -> None:
    """Bytecode that names the in-sandbox path and is never checked: a sandbox need not compile what it cannot keep. By the Python
    that the layer's is a copy of: a package may have put a program or a module of its own in that one's place. Without `site`, so
    that no `.pth` file of a package runs on the host."""
    packages = [str(place) for place in (prefix / "lib").glob("python3*/*-packages")]
    inside = f"{PREFIX}/{prefix.name}"
    command = [
        str(python), "-I", "-S", "-m", "compileall", "-q", "-q", "-j", "2",
        "--invalidation-mode", "unchecked-hash",
        "-s", str(prefix), "-p", inside, "-x", r"/tests?/", *packages,
    ]  # fmt: skip
    try:
        what = "compiling the layer's Python packages"
        await run_program(command, env={"PATH": "/nonexistent"}, cwd=prefix, timeout=timeout, what=what)
    except CommandFailed:
        pass  # some packages carry templates that are no Python; all other files are compiled all the same


def _bytecode(path: str) -> bool:
    return "/__pycache__" in path
