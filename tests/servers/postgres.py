"""A throw-away PostgreSQL server, for tests, drills and examples: stopped, frozen and filled up at will, and gone afterwards.

Its programs are those on the PATH (`initdb` and the others), else those of Debian's packages. It lies in a temporary directory;
`disk_mb` puts its data on a small file system of its own (root only), which `fill` fills to the last block.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from rollyard.core.errors import ConfigError

CONNECTIONS = 400  # a worker takes up to 16, and a drill may have many workers
_PROGRAMS = ("initdb", "pg_ctl", "postgres", "createdb")
_STEP_S = 120.0
_SMALL = {"shared_buffers": "32MB", "max_wal_size": "64MB", "min_wal_size": "32MB"}
_LARGE = {"shared_buffers": "512MB", "max_wal_size": "4GB", "min_wal_size": "512MB"}


class PostgresServer:
    """`url` is an empty database named `drill` on it. Without `durable` the server waits for no disk, which is faster. With
    `large` it keeps more in memory and writes its checkpoints more rarely, as one does that is used for long."""

    def __init__(
        self, host: str = "127.0.0.1", disk_mb: int | None = None, *, durable: bool = True, large: bool = False
    ) -> None:
        self._bin = _find_programs()
        self._durable, self._sizes = durable, _LARGE if large else _SMALL
        self.home = Path(tempfile.mkdtemp(prefix="ry-pg-"))
        self._data = self.home / "data"
        self.mounted = disk_mb is not None
        if self.mounted:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={disk_mb}m", "none", str(self.home)], check=True)
        self._who: dict[str, Any] = {}
        if os.geteuid() == 0:  # the server refuses to run as root
            user = _find_user()
            self._who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(self.home, user.pw_uid, user.pw_gid)
        self.host, self.port = host, free_port(host)
        self._run("initdb", "-D", str(self._data), "-A", "trust", "-U", "ry", "-N", "-E", "UTF8")
        with (self._data / "pg_hba.conf").open("a") as rules:
            rules.write(f"host all all {host}/24 trust\n")
        self.start()
        self._run("createdb", "-h", host, "-p", str(self.port), "-U", "ry", "drill")
        self.url = f"postgresql://ry@{host}:{self.port}/drill"

    def start(self) -> None:
        options = f"-k {self.home} -p {self.port} -c listen_addresses={self.host} -c max_connections={CONNECTIONS} "
        options += " ".join(f"-c {name}={size}" for name, size in self._sizes.items())
        if not self._durable:
            options += " -c fsync=off"
        log = str(self._data / "server.log")
        self._run("pg_ctl", "-D", str(self._data), "-w", "-t", "60", "-l", log, "-o", options, "start")

    def stop(self, how: str = "immediate") -> None:
        """`immediate` is as a crash: nothing is written that was not."""
        self._run("pg_ctl", "-D", str(self._data), "-m", how, "stop", check=False)

    def running(self) -> bool:
        return self._run("pg_ctl", "-D", str(self._data), "status", check=False) == 0

    def pids(self) -> list[int]:
        """The server's first process, then the others."""
        first = int((self._data / "postmaster.pid").read_text().split("\n")[0])
        return [first, *map(int, Path(f"/proc/{first}/task/{first}/children").read_text().split())]

    def signal(self, number: int) -> None:
        """SIGSTOP makes it stand still, SIGCONT go on."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def fill(self) -> None:
        """Until nothing fits on its disk any more."""
        # unbuffered: what a buffer still held would be refused once more when the file is closed
        with (self.home / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(b"\0" * 65536)

    def drain(self) -> None:
        (self.home / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        self.stop()
        if self.mounted:
            subprocess.run(["umount", str(self.home)], check=False)
        shutil.rmtree(self.home, ignore_errors=True)

    def _run(self, program: str, *args: str, check: bool = True) -> int:
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": "/", **self._who}
        return subprocess.run([str(self._bin / program), *args], check=check, timeout=_STEP_S, **quiet).returncode


def _find_programs() -> Path:
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    on_path = shutil.which("initdb")
    for folder in ([Path(on_path).resolve().parent] if on_path is not None else []) + debian:
        if all((folder / program).exists() for program in _PROGRAMS):
            return folder
    raise ConfigError("no PostgreSQL server is installed", hint="apt-get install postgresql, or put initdb on the PATH")


def _find_user() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:  # programs that came without a package, and so without its user
        return pwd.getpwnam("nobody")


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
