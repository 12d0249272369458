"""Things that are fetched or built once and shared by every process of this machine: wheels, weights, layers, venvs.

`make_once(path, make)` returns `path`. Where it is not there yet, `make(aside)` is called under a lock between processes, with a
name beside `path` to make the file or directory at; that is renamed to `path` when it is whole. So no process reads half of it,
those that wait get what the first one made, and a maker that dies (SIGKILL too) loses its lock: the next one removes what it
left and begins again.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from glob import escape
from pathlib import Path

from rollyard.core import folders
from rollyard.core.errors import SandboxUnavailable
from rollyard.core.home import user_home

WAIT_S = 1800.0
_POLL_S = 0.05


def cache_home() -> Path:
    """`$ROLLYARD_CACHE`, else `$XDG_CACHE_HOME/rollyard`, else `~/.cache/rollyard`."""
    if chosen := os.environ.get("ROLLYARD_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else user_home() / ".cache").absolute() / "rollyard"


def make_once(
    path: Path,
    make: Callable[[Path], object],
    *,
    is_good: Callable[[Path], bool] = Path.exists,
    wait_s: float = WAIT_S,
) -> Path:
    """`path`, made by `make(aside)` unless it is there and good. A process that is making it is waited for, `wait_s` at most."""
    if not is_good(path):
        with hold_lock(_lock_of(path), wait_s):
            if not is_good(path):
                with _build_beside(path) as aside:
                    make(aside)
    return path


async def make_once_async(
    path: Path,
    make: Callable[[Path], Awaitable[object]],
    *,
    is_good: Callable[[Path], bool] = Path.exists,
    wait_s: float = WAIT_S,
) -> Path:
    """`make_once` for a maker that awaits; waiting for another process does not block the event loop."""
    if not is_good(path):
        async with hold_lock_async(_lock_of(path), wait_s):
            if not is_good(path):
                with _build_beside(path) as aside:
                    await make(aside)
    return path


@contextmanager
def hold_lock(path: Path, wait_s: float) -> Generator[None]:
    """An exclusive lock between processes. The kernel lets go of it when its holder dies, however it dies."""
    until = time.monotonic() + wait_s
    while (handle := _try_lock(path)) is None:
        _check_wait(path, until, wait_s)
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(handle)


@asynccontextmanager
async def hold_lock_async(path: Path, wait_s: float) -> AsyncGenerator[None]:
    """`hold_lock` that does not block the event loop while it waits."""
    until = time.monotonic() + wait_s
    while (handle := _try_lock(path)) is None:
        _check_wait(path, until, wait_s)
        await asyncio.sleep(_POLL_S)  # the holder is another process: no event can tell
    try:
        yield
    finally:
        os.close(handle)


@asynccontextmanager
async def hold_one_of(paths: Sequence[Path], wait_s: float) -> AsyncGenerator[None]:
    """One of several locks between processes, whichever is free first: at most so many do this on the machine at a time."""
    until = time.monotonic() + wait_s
    while (handle := next((found for path in paths if (found := _try_lock(path)) is not None), None)) is None:
        _check_wait(paths[0], until, wait_s)
        await asyncio.sleep(_POLL_S)  # the holders are other processes: no event can tell
    try:
        yield
    finally:
        os.close(handle)


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file whole: a reader sees what was there before or all of `data`."""
    handle, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except BaseException:  # a full disk, or cancelled: nothing is left beside it
        Path(temporary).unlink(missing_ok=True)
        raise


def _lock_of(path: Path) -> Path:
    """Beside what it guards, so that all who see the same directory, by whatever path, see the same lock."""
    return path.parent / ".locks" / path.name


def _try_lock(path: Path) -> int | None:
    """An open file that holds the lock; None while another process has it. It is never inherited by programs that are run."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    with suppress(OSError):  # on a full disk it is held all the same, and cannot say by which process
        os.ftruncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
    return handle


def _check_wait(path: Path, until: float, wait_s: float) -> None:
    if time.monotonic() > until:
        holder = (path.read_text() if path.is_file() else "") or "unknown"
        raise SandboxUnavailable(
            f"process {holder} has held {path} for {wait_s:.0f} s",
            hint="it is making the same thing: wait for it, or end it and try again",
        )


@contextmanager
def _build_beside(path: Path) -> Generator[Path]:
    """A free name beside `path` that becomes `path` at the end. Only the holder of its lock comes here, so whatever has such a
    name was left by a maker that died."""
    for left in path.parent.glob(f".new-????????-{escape(path.name)}"):
        _remove(left)
    aside = path.with_name(f".new-{secrets.token_hex(4)}-{path.name}")
    try:
        yield aside
        if path.is_dir():  # it was there and no good; a directory is not replaced by a rename
            path.rename(old := path.with_name(f".old-{secrets.token_hex(4)}-{path.name}"))
            _remove(old)
        aside.rename(path)
    finally:
        _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        folders.remove(path)
    else:
        path.unlink(missing_ok=True)
