"""After the agent: what it changed and what it left, taken out of the sandbox before judging can touch it.

The patch of the working directory comes from git where the task has a repository and `git` exists, else from a snapshot of
text files taken before the agent started. Sizes are bounded; what was cut is said.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence

from rollyard.core.errors import PathError, SandboxError
from rollyard.core.protocols import Sandbox

MAX_DIFF = 2 * 2**20
MAX_FILE = 16 * 2**20
_SNAPSHOT_FILES = 400
_SNAPSHOT_BYTES = 256 * 1024
_SKIP_DIRS = frozenset({".git", "node_modules", "__pycache__", ".venv", "venv"})


async def walk(sandbox: Sandbox, root: str, *, limit: int) -> dict[str, int]:
    """Regular files below `root` with their sizes; symbolic links are not followed."""
    found: dict[str, int] = {}
    queue = [root]
    while queue and len(found) < limit:
        try:
            entries = await sandbox.list_dir(queue.pop())
        except PathError:
            continue
        for entry in entries:
            name = entry.path.rsplit("/", 1)[-1]
            if entry.kind == "dir" and name not in _SKIP_DIRS:
                queue.append(entry.path)
            elif entry.kind == "file" and len(found) < limit:
                found[entry.path] = entry.size
    return found


async def photograph(sandbox: Sandbox, workdir: str) -> dict[str, bytes]:
    """Small files of the working directory as they are now."""
    files = await walk(sandbox, workdir, limit=_SNAPSHOT_FILES)
    return {
        path: await sandbox.read(path, max_bytes=_SNAPSHOT_BYTES)
        for path, size in files.items()
        if size <= _SNAPSHOT_BYTES
    }


def patch(before: Mapping[str, bytes], after: Mapping[str, bytes], workdir: str) -> str:
    out: list[str] = []
    for path in sorted(set(before) | set(after)):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        name = path.removeprefix(workdir.rstrip("/") + "/")
        try:
            left = old.decode().splitlines(keepends=True) if old is not None else []
            right = new.decode().splitlines(keepends=True) if new is not None else []
        except UnicodeDecodeError:
            out.append(f"Binary file {name} differs\n")
            continue
        source = f"a/{name}" if old is not None else "/dev/null"
        target = f"b/{name}" if new is not None else "/dev/null"
        for line in difflib.unified_diff(left, right, source, target):
            out.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    text = "".join(out)
    return text if len(text) <= MAX_DIFF else text[:MAX_DIFF] + "\n[cut here: the patch is larger]\n"


async def artifacts(sandbox: Sandbox, patterns: Sequence[str], *, limit: int = 200) -> dict[str, bytes]:
    """Files that match globs with absolute paths. A pattern that matches nothing is not an error."""
    found: dict[str, bytes] = {}
    for pattern in patterns:
        fixed = pattern.split("*", 1)[0]
        root = fixed.rsplit("/", 1)[0] or "/"
        try:
            if "*" not in pattern:
                if (await sandbox.stat(pattern)).kind == "file":
                    found[pattern] = await sandbox.read(pattern, max_bytes=MAX_FILE)
                    continue
                root, pattern = pattern, pattern.rstrip("/") + "/*"
            names = await walk(sandbox, root, limit=limit)
        except SandboxError:
            continue
        for path, size in names.items():
            if fnmatch.fnmatchcase(path, pattern) and size <= MAX_FILE and len(found) < limit:
                found[path] = await sandbox.read(path, max_bytes=MAX_FILE)
    return found
