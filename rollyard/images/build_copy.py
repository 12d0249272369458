"""COPY and ADD: sources become a tree on the host, the tree becomes files in a sandbox.

Destinations follow Docker: several sources, a folder, or a trailing slash mean "into this folder"; one file otherwise takes the
destination's name, unless a folder of that name is already there.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio.to_thread
import msgspec

from rollyard.core import folders
from rollyard.core.errors import CommandFailed, PathError, Unsupported
from rollyard.core.protocols import Sandbox
from rollyard.images.archives import clear
from rollyard.images.build_context import Context, ContextSource, glob_pattern, is_archive, tree_key, unpack_local
from rollyard.images.dockerfile import Instruction

_REMOTE = re.compile(r"(https?|ftp|git|ssh)://|git@|.*\.git(#.*)?$")
_BATCH = 200
_TRANSFER_S = 120.0


class CopyInstruction(msgspec.Struct, frozen=True, kw_only=True):
    """One COPY or ADD with its variables replaced."""

    item: Instruction
    words: tuple[str, ...]
    workdir: str
    chown: str | None
    chmod: str | None
    expand: Callable[[str], str]

    @property
    def sources(self) -> tuple[str, ...]:
        """Sources that are not here-documents."""
        return tuple(word for word in self.words[:-1] if not word.startswith("<<"))

    @property
    def target(self) -> str:
        if len(self.words) < 2:
            raise ValueError("a source and a destination are needed")
        last = self.words[-1]
        return last if last.startswith("/") else f"{self.workdir.rstrip('/')}/{last.removeprefix('./')}"


class CopyTree(msgspec.Struct, frozen=True, kw_only=True):
    """What to put where. `into`: the content of `root` goes into the folder `target`; None: `root` holds one file, whose
    place depends on whether a folder `target` exists."""

    root: Path
    target: str
    into: bool | None


def copy_key(request: CopyInstruction, context: Context) -> str:
    """A hash of what the instruction copies out of the build folder and here-documents, found without copying any of it: an
    archive counts by its bytes."""
    exclude = _exclude_patterns(request)
    parts = [request.words[-1], *exclude]
    for entry in _find(request, context):
        kind = "archive" if _extracts(request, entry) else "folder" if entry.path.is_dir() else "file"
        name = Path(entry.name).name if kind == "file" else ""
        parts += [kind, name, context.key(entry, exclude=exclude)]
    for name, text in _here_documents(request):
        parts += ["here", name, text]
    return hashlib.sha256("".join(f"{len(part)} {part}" for part in parts).encode()).hexdigest()


def _exclude_patterns(request: CopyInstruction) -> list[str]:
    return [value for name, value in request.item.flags if name == "exclude"]


def _find(request: CopyInstruction, context: Context) -> list[ContextSource]:
    item, found = request.item, list[ContextSource]()
    for source in request.sources:
        if item.kind == "ADD" and _REMOTE.match(source):
            raise Unsupported(
                f"ADD {source}: remote sources are not fetched", hint="put the file into the build folder"
            )
        found.extend(context.find(source))
    if not found and not item.heredocs:
        raise ValueError("a source and a destination are needed")
    return found


def _extracts(request: CopyInstruction, entry: ContextSource) -> bool:
    return request.item.kind == "ADD" and request.item.flag("unpack") != "false" and is_archive(entry.path)


def _here_documents(request: CopyInstruction) -> list[tuple[str, str]]:
    return [(one.name, one.text if one.literal else request.expand(one.text)) for one in request.item.heredocs]


def assemble(request: CopyInstruction, context: Context, scratch: Path) -> CopyTree:
    """A tree out of the build folder and here-documents."""
    item, target = request.item, request.target
    found, exclude = _find(request, context), _exclude_patterns(request)
    single = len(found) + len(item.heredocs) == 1 and not target.endswith("/") and request.words[-1] not in (".", "..")
    unpacked = False
    for entry in found:
        if _extracts(request, entry):
            unpack_local(entry.path, scratch)
            unpacked = True
        elif entry.path.is_dir():
            context.copy(entry, scratch, exclude=exclude)
            single = False
        else:
            context.copy(entry, scratch, Path(entry.name).name)
    for name, text in _here_documents(request):
        clear(scratch / name)
        (scratch / name).write_text(text)
    return _finish(request, scratch, None if single and not unpacked else True)


async def fetch(request: CopyInstruction, other: Sandbox, scratch: Path) -> tuple[CopyTree, str]:
    """A tree out of another stage or image (`--from`), and its hash."""
    single = len(request.sources) == 1 and not request.target.endswith("/")
    for source in request.sources:
        for path in await _matches(other, source if source.startswith("/") else f"/{source}"):
            name = path.rstrip("/").rpartition("/")[2]
            kind = (await other.stat(path)).kind
            if kind == "dir":
                single = False
                await other.download_dir(path, str(scratch))
            else:
                data = await other.read(path)
                mode = (await other.stat(path)).mode & 0o7777
                clear(scratch / name)
                (scratch / name).write_bytes(data)
                (scratch / name).chmod(mode if kind == "file" else 0o755)
    if not any(scratch.iterdir()) and single:
        raise ValueError(f"{request.sources} is not in that image")
    tree = await anyio.to_thread.run_sync(_finish, request, scratch, None if single else True)
    return tree, await anyio.to_thread.run_sync(tree_key, scratch)


async def _matches(other: Sandbox, pattern: str) -> list[str]:
    if not re.search(r"[*?\[]", pattern):
        if not await other.exists(pattern):
            raise ValueError(f"{pattern!r} is not in that image")
        return [pattern]
    folder, _, last = pattern.rpartition("/")
    if re.search(r"[*?\[]", folder):
        raise ValueError(f"{pattern!r}: a pattern may stand in the last name only")
    wanted = glob_pattern(last)
    names = [entry.path for entry in await other.list_dir(folder or "/")]
    found = sorted(path for path in names if wanted.fullmatch(path.rpartition("/")[2]))
    if not found:
        raise ValueError(f"{pattern!r} matches nothing in that image")
    return found


def _finish(request: CopyInstruction, scratch: Path, into: bool | None) -> CopyTree:
    if request.chmod is not None:
        if not re.fullmatch(r"0?[0-7]{3,4}", request.chmod):
            raise Unsupported(f"--chmod={request.chmod} is not an octal mode")
        mode = int(request.chmod, 8)
        for name in reversed(list(folders.entries(scratch))):
            if not (scratch / name).is_symlink():
                (scratch / name).chmod(mode)
    return CopyTree(root=scratch, target=request.target.rstrip("/") or "/", into=into)


async def upload_tree(sandbox: Sandbox, tree: CopyTree, request: CopyInstruction, timeout: float) -> None:
    """Lay the tree into the sandbox, owned by root or by `--chown`."""
    root, target = tree.root, tree.target
    if tree.into is None and not await _is_folder(sandbox, target):
        (only,) = tree.root.iterdir()
        root = tree.root.parent / f"{tree.root.name}.file"
        root.mkdir()
        shutil.move(only, root / target.rpartition("/")[2])
        target = target.rpartition("/")[0] or "/"
    try:
        await sandbox.mkdir(target)
        await sandbox.upload_dir(str(root), target)
        if request.chown is not None:
            await _chown(sandbox, request.chown, _paths(root, target), timeout)
    finally:
        if root is not tree.root:
            folders.remove(root)


async def _is_folder(sandbox: Sandbox, path: str) -> bool:
    try:
        return (await sandbox.stat(path)).kind == "dir"
    except PathError:
        return False


def _paths(root: Path, target: str) -> list[str]:
    return [f"{target.rstrip('/')}/{name}" for name in sorted(folders.entries(root))]


async def _chown(sandbox: Sandbox, owner: str, paths: Sequence[str], timeout: float) -> None:
    for start in range(0, len(paths), _BATCH):
        batch = paths[start : start + _BATCH]
        done = await sandbox.exec(["chown", "-h", owner, "--", *batch], user="0", timeout=min(timeout, _TRANSFER_S))
        if not done.ok:
            raise CommandFailed(
                f"--chown={owner}: {done.text.strip()[-400:]}", exit_code=done.exit_code, stderr=done.text
            )
