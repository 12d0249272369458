"""Scratch directories that do not outlive their process by long.

`tempfile` removes a directory when its block ends; a process that was killed never gets there, and what it copied out of
sandboxes would lie about for good. Each directory here names its process by id and start time, and making the
next one removes those whose process is gone.
"""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from rollyard.core import folders


@contextmanager
def scratch(purpose: str) -> Generator[Path]:
    """A private, empty directory until the block ends."""
    made = _make(purpose)
    try:
        yield made
    finally:
        _remove(made)


@asynccontextmanager
async def async_scratch(purpose: str) -> AsyncGenerator[Path]:
    """The same for a working directory's thousands of files: made and removed in a thread, so that the event loop turns on."""
    made = await asyncio.to_thread(_make, purpose)
    try:
        yield made
    finally:  # begun at once: a caller that is cancelled here does not wait, and the thread goes on
        await asyncio.get_running_loop().run_in_executor(None, _remove, made)


def _make(purpose: str) -> Path:
    home = _home()
    _sweep(home)
    pid = os.getpid()
    return Path(tempfile.mkdtemp(prefix=f"{pid}-{_start_tick(pid)}-{purpose}-", dir=home))


def _remove(made: Path) -> None:
    with suppress(OSError):  # the next sweep tries again
        folders.remove(made)


def _home() -> Path:
    """This user's place below the system's temporary directory. Another user's directory of that name is not used."""
    home = Path(tempfile.gettempdir(), f"rollyard-{os.geteuid()}")
    with suppress(FileExistsError):
        home.mkdir(mode=0o700)
    found = home.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        return Path(tempfile.gettempdir())
    return home


def count_scratch(purpose: str) -> int:
    """How many directories with this purpose processes of this user have now."""
    home = _home()
    _sweep(home)
    return sum(name.split("-")[2:3] == [purpose] for name in os.listdir(home))


def _sweep(home: Path) -> None:
    """Each process is looked for once, since one may have hundreds of directories."""
    owned: dict[tuple[str, str], list[str]] = {}
    for name in os.listdir(home):
        pid, _, rest = name.partition("-")
        started = rest.partition("-")[0]
        if pid.isdigit() and started.isdigit():
            owned.setdefault((pid, started), []).append(name)
    for (pid, started), names in owned.items():
        if _start_tick(int(pid)) != int(started):
            for name in names:
                with suppress(OSError):  # no work depends on it
                    folders.remove(home / name)


def _start_tick(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0 when there is none. A number is not enough: numbers come again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return int(fields[19])
