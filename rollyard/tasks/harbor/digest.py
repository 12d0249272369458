"""What a task is, as a hash: `sha256:` over the sorted names and hashes of a folder's files, or over a task's own fields.

The folder rule is Harbor's, so that the digests pinned in a `dataset.toml` mean the same here. What `.gitignore` or
`.harborignore` leave out is not in the hash.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
from pathspec import GitIgnoreSpec

from rollyard.core import folders
from rollyard.core.task import Task
from rollyard.tasks.harbor.files import TaskFiles

_ALWAYS_IGNORED = ("__pycache__/", "*.pyc", ".DS_Store", "*.swp", "*.swo", "*~")
_SINGLE = ("task.toml", "instruction.md", "README.md", "trajectory.json")
_FOLDERS = ("environment", "tests", "solution", "steps")


def collect(folder: Path) -> list[Path]:
    """The files that make a task what it is, sorted by name."""
    files = TaskFiles(folder)
    root = files.folder
    found = [root / name for name in _SINGLE if (root / name).is_file()]
    for name in _FOLDERS:
        found.extend(path for path in files.walk(root / name) if path.is_file())
    ignore = root / ".gitignore"
    lines = ignore.read_text().splitlines() if ignore.is_file() else _ALWAYS_IGNORED
    spec = GitIgnoreSpec.from_lines(lines)
    return sorted(
        (p for p in found if not spec.match_file(p.relative_to(root).as_posix())), key=lambda p: _rel(p, root)
    )


def _rel(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def file_digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def folder_digest(folder: Path) -> str:
    root = folder.resolve()
    outer = hashlib.sha256()
    for path in collect(root):
        outer.update(f"{_rel(path, root)}\0{file_digest(path)}\n".encode())
    return f"sha256:{outer.hexdigest()}"


def _tree_digest(path: Path) -> str:
    if path.is_file():
        return file_digest(path)
    root = path.resolve()
    found = (path / name for name in folders.entries(path))
    files = sorted(p for p in found if (p.is_file() or _leads_out(p, root)) and "__pycache__" not in p.parts)
    lines = (f"{_rel(p, path)}\0{str(p.readlink()) if _leads_out(p, root) else file_digest(p)}\n" for p in files)
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _leads_out(path: Path, root: Path) -> bool:
    """A link out of the tree is what it says, and not the file of this machine that it leads to."""
    return path.is_symlink() and not path.resolve().is_relative_to(root)


def task_digest(task: Task) -> str:
    """Identity of a task that came from no folder: its fields, with host paths replaced by what lies there."""
    fields: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(task, digest="", source=None, trusted=True))
    trees = [task.build, task.solution, *(file.source for file in task.files)]
    for spec in (task.verifier, *(step.verifier for step in task.steps)):
        trees.extend(spec.tests if spec is not None else ())
    trees.extend(path for step in task.steps for path in (step.workdir_files, step.solution))
    text = msgspec.json.encode(fields, order="sorted").decode()
    for tree in sorted({t for t in trees if t is not None and Path(t).exists()}, key=len, reverse=True):
        text = text.replace(msgspec.json.encode(tree).decode(), f'"{_tree_digest(Path(tree))}"')
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
