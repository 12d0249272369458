"""From an engine's refusal to the error a caller can act on. Its words are read in this file only."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from rollyard.core.errors import PathError, SandboxError, SandboxGone
from rollyard.sandbox.docker.engine import EngineRefused

_GONE = ("is not running", "no such container", "container state improper", "is not paused", "removal of container",
         "no container with name", "is dead", "marked for removal", "cannot exec in a stopped", "is restarting",
         "container has already been removed")  # fmt: skip
_PATHS = {
    "no space left on device": "ENOSPC",
    "disk quota exceeded": "EDQUOT",
    "read-only file system": "EROFS",
    "marked read-only": "EROFS",
    "not a directory": "ENOTDIR",
    "is a directory": "EISDIR",
    "permission denied": "EACCES",
    "file name too long": "ENAMETOOLONG",
    "too many levels of symbolic links": "ELOOP",
    "no such file": "ENOENT",
    "could not find the file": "ENOENT",
    "could not be found on container": "ENOENT",
}


def is_gone(refused: EngineRefused) -> bool:
    text = refused.text.lower()
    return any(sign in text for sign in _GONE)


def is_paused(refused: EngineRefused) -> bool:
    return "paused" in refused.text.lower() and "is not paused" not in refused.text.lower()


def path_error(path: str, refused: EngineRefused) -> PathError:
    text = refused.text.lower()
    name = next((name for sign, name in _PATHS.items() if sign in text), "ENOENT" if refused.status == 404 else "EIO")
    hint = None if name == "ENOENT" else refused.text[:200]
    return PathError(path, name, hint=hint)


@contextlib.contextmanager
def translate_faults(sandbox_id: str, path: str | None = None) -> Generator[None]:
    """Around calls about one sandbox; with a path, around calls about a file in it."""
    try:
        yield
    except EngineRefused as refused:
        if is_gone(refused):
            raise SandboxGone(f"sandbox {sandbox_id} is gone", hint="open another sandbox") from None
        if path is not None:
            raise path_error(path, refused) from None
        if is_paused(refused):
            raise SandboxError(f"sandbox {sandbox_id} is paused", hint="resume it first") from None
        raise
