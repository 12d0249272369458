"""What is known of each sandbox on disk, written before anything is started, so that nothing can be forgotten.

One directory per sandbox: `box.json` (the entry), `sock` (attach), `fs` (what it wrote), `jobs` (output of its programs).
The entry is locked by the sandbox's own first process for as long as it lives: a lock that can be taken means that it is
dead, whatever its pid is now used for. A blank that was cloned beside it may hold the lock a moment longer, so of a locked
entry the first process is looked at too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core import folders
from rollyard.core.errors import SandboxGone
from rollyard.core.home import private_dir
from rollyard.core.log import Log
from rollyard.core.sandbox import Capabilities, SandboxInfo
from rollyard.sandbox.local import ids
from rollyard.sandbox.local.inner import remains

PACKAGES = Path(__file__).resolve().parents[3]
_HALF_MADE_S = 60.0
_REMOVE_S = 120.0
_told: set[Path] = set()


@contextlib.contextmanager
def _skip_errors(path: Path) -> Generator[None]:
    try:
        yield
    except FileNotFoundError:
        pass  # another process sweeps too
    except (OSError, subprocess.TimeoutExpired) as error:
        if path not in _told:
            _told.add(path)
            Log("rollyard.sandbox.local").warning(
                "sandbox.left_on_disk", path=str(path), error=str(error), hint="remove it by hand; nothing uses it"
            )


def has_ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def is_dead(pid: int) -> bool:
    """Whether there is no such process, or nothing of it but its exit status."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return has_ended(pidfd)
    finally:
        os.close(pidfd)


class SandboxEntry(msgspec.Struct, frozen=True, kw_only=True):
    info: SandboxInfo
    capabilities: Capabilities
    workdir: str
    user: str | None
    env: Mapping[str, str]
    cgroups: tuple[str, ...] = ()
    lifetime: str = "owner"
    owner_pid: int = 0
    shifted: bool = False  # what it wrote has the ids of its range, not its own
    uppers: Mapping[str, str] = {}  # mount target -> directory below `fs`
    image: str = "host"
    layers: tuple[str, ...] = ()


class Home:
    """The directory of one sandbox."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fs = path / "fs"
        self.jobs = path / "jobs"
        self._entry = path / "box.json"

    def make(self) -> int:
        """Create it and lock its entry; the lock's descriptor is the caller's. It gets its name only once it is locked, so a
        sweep beside it cannot take it for a dead one."""
        fresh = self.path.with_name(f".{self.path.name}")
        fresh.mkdir(mode=0o700)
        (fresh / "jobs").mkdir(mode=0o700)
        lock = os.open(fresh / "box.json", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        fresh.rename(self.path)
        return lock

    def write(self, entry: SandboxEntry) -> None:
        """In place, since the lock is on this very file; at once and never shorter, so that no reader sees half of it."""
        data = msgspec.json.encode(entry)
        fd = os.open(self._entry, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, data.ljust(os.fstat(fd).st_size), 0)
        finally:
            os.close(fd)

    def note(self, **changes: Any) -> SandboxInfo:
        """What a sandbox is now, for listings."""
        entry = self.read()
        info = msgspec.structs.replace(entry.info, **changes)
        self.write(msgspec.structs.replace(entry, info=info))
        return info

    def read(self) -> SandboxEntry:
        try:
            return msgspec.json.decode(self._entry.read_bytes(), type=SandboxEntry)
        except (OSError, msgspec.DecodeError) as error:
            raise SandboxGone(
                f"sandbox {self.path.name} is gone", hint="`Backend.list` shows those that live"
            ) from error

    def is_locked(self) -> bool:
        """Whether the sandbox (or its opening) is alive."""
        try:
            fd = os.open(self._entry, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def find_holder(self) -> int | None:
        """The first process of a sandbox whose maker died before it could note which that is: the one that holds the lock. Others
        may have the entry open for a moment, to read it."""
        entry, holders = os.path.realpath(self._entry), list[int]()
        for process in (path for path in Path("/proc").iterdir() if path.name.isdigit()):
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                for fd in (process / "fd").iterdir():
                    if str(fd.readlink()) == entry and "FLOCK" in (process / "fdinfo" / fd.name).read_text():
                        holders.append(int(process.name))
        return min(holders, default=None)

    def listener(self) -> socket.socket:
        """The attach socket. Bound through a directory descriptor: a socket's path may not be longer than 107 bytes."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        directory = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sock.bind(f"/proc/self/fd/{directory}/sock")
            sock.listen(16)
        finally:
            os.close(directory)
        return sock

    def connect(self) -> socket.socket:
        """A connection, at once or not at all: BlockingIOError says that it has more callers than it has answered. To wait
        here could be to wait for oneself, when the same loop is still making the sandbox."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            directory = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sock.connect(f"/proc/self/fd/{directory}/sock")
            finally:
                os.close(directory)
        except BlockingIOError:
            sock.close()
            raise
        except OSError as error:
            sock.close()
            raise SandboxGone(
                f"sandbox {self.path.name} is gone", hint="`Backend.list` shows those that live"
            ) from error
        return sock


class SandboxJournal:
    def __init__(self, root: Path) -> None:
        self.root = private_dir(root / "boxes")

    def home(self, sandbox_id: str) -> Home:
        if "/" in sandbox_id or sandbox_id in ("", ".", ".."):
            raise SandboxGone(f"no sandbox is named {sandbox_id!r}")
        return Home(self.root / sandbox_id)

    def homes(self) -> Iterator[Home]:
        for path in sorted(self.root.iterdir()):
            if not path.name.startswith("."):
                yield Home(path)

    def live(self) -> Iterator[tuple[Home, SandboxEntry]]:
        for home in self.homes():
            if home.is_locked():
                try:
                    entry = home.read()
                except SandboxGone:  # it ended, or is so new that its entry is not written yet
                    continue
                if not entry.info.pid or not is_dead(entry.info.pid):
                    yield home, entry

    def sweep(self) -> list[str]:
        """Remove what sandboxes left whose first process is dead. Safe at any time, beside any other process. What cannot be
        removed is stepped over and told once: nothing that one sandbox left may keep others from starting."""
        gone: list[str] = []
        for path in self.root.glob(".*"):
            with _skip_errors(path):
                if time.time() - path.stat().st_mtime > _HALF_MADE_S:
                    folders.remove(path)
        for home in self.homes():
            with _skip_errors(home.path):
                if not home.is_locked():
                    self._remove(home)
                    gone.append(home.path.name)
        return gone

    def _remove(self, home: Home) -> None:
        try:
            cgroups = list(home.read().cgroups)
        except SandboxGone:
            cgroups = []
        try:
            remains.remove(str(home.path), cgroups)
        except PermissionError:
            self._remove_mapped(home, cgroups)
            if home.path.exists():
                raise

    def _remove_mapped(self, home: Home, cgroups: list[str]) -> None:
        """Files under the ids of a map of ours can only be removed inside a namespace that has it."""
        work = json.dumps([str(home.path), cgroups, msgspec.to_builtins(ids.candidates()[0])])
        code = (
            "import sys; sys.path.append(sys.argv.pop()); from rollyard.sandbox.local.inner.remains import main; main()"
        )
        argv = [sys.executable, "-I", "-S", "-c", code, work, str(PACKAGES)]
        subprocess.run(argv, env={}, cwd="/", timeout=_REMOVE_S, check=False)
