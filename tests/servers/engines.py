"""A throw-away Docker or Podman engine out of Debian packages: started by hand in a directory of its own, then gone.

It touches no network (no bridge, no packet filter), pulls nothing (its one image is made by `rootfs`), and keeps everything
below one directory and in a mount namespace of its own, so that stopping it leaves nothing behind: no process, no mount, no
control group, no file.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

from rollyard.core.errors import ConfigError, SandboxUnavailable
from rollyard.core.sandbox import DEFAULT_PATH
from rollyard.sandbox.docker.engine import DockerEngine
from rollyard.sandbox.docker.images import HOST_IMAGE, load
from tests.servers.rootfs import rootfs_tar

START_S = 60.0
STOP_S = 30.0
PROGRAMS = {"docker": ("dockerd", "containerd", "runc"), "podman": ("podman", "conmon", "runc")}
_PODMAN_CONF = """[containers]
default_ulimits = ["nofile=1000:1000", "nproc=1000:1000"]
log_driver = "none"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
exit_command_delay = 5
"""


def lacking(kind: str) -> str | None:
    """One line on why this engine cannot be started here; None when it can."""
    if kind not in PROGRAMS:
        raise ConfigError(f"there is no engine {kind!r}", hint=f"it is one of {', '.join(PROGRAMS)}")
    if os.geteuid() != 0:
        return f"starting a {kind} engine needs root"
    absent = [name for name in PROGRAMS[kind] if _which(name) is None]
    packages = {"docker": "docker.io containerd runc", "podman": "podman conmon runc"}[kind]
    return f"{', '.join(absent)} not found: apt-get install --no-install-recommends {packages}" if absent else None


def start(kind: str, place: Path) -> str:
    """Start it with everything below `place`, with an image in it; returns its address. What fails is taken down again."""
    if why := lacking(kind):
        raise SandboxUnavailable(f"no {kind} engine: {why}")
    place.mkdir(mode=0o700, parents=True)
    host = f"unix://{place}/sock"
    (place / "before").write_text("\n".join(_outside(place)))
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            _command(kind, place), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env=_env(place), cwd=place,  # a monitor notes an out-of-memory kill in its working directory
        )  # fmt: skip
    (place / "pid").write_text(str(process.pid))
    try:
        asyncio.run(_ready(host, process))
    except BaseException as error:  # Ctrl-C too: a daemon that was started is stopped
        tail = (place / "log").read_text(errors="replace")[-1500:]
        stop(kind, place)
        if isinstance(error, Exception):
            raise SandboxUnavailable(f"the {kind} engine did not start: {error}\n{tail}") from error
        raise
    return host


def stop(kind: str, place: Path) -> None:
    """End it and remove all it left. Nothing happens when it is not there."""
    if not place.is_dir():
        return
    try:
        pid = int((place / "pid").read_text())
    except (OSError, ValueError):
        pid = 0
    if kind == "podman" and _is_ours(pid, place):
        inside = ["nsenter", "--mount", "--target", str(pid), *_podman(place), "rm", "--all", "--force", "--time", "0"]
        subprocess.run(inside, capture_output=True, check=False, timeout=120, env=_env(place))
    _end(pid, place)
    for stray in _strays(place):
        with contextlib.suppress(OSError):
            os.kill(stray, signal.SIGKILL)
    before = set((place / "before").read_text().splitlines()) if (place / "before").exists() else set[str]()
    for path in sorted(set(_outside(place)) - before, reverse=True):
        _remove(Path(path))
    shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def running(kind: str) -> Generator[str]:
    """An engine for the length of a block."""
    with tempfile.TemporaryDirectory(prefix="rollyard-engine-") as scratch:
        place = Path(scratch, kind)
        try:
            yield start(kind, place)
        finally:
            stop(kind, place)


async def _ready(host: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        if process.poll() is not None:
            raise SandboxUnavailable(f"it exited with {process.returncode}")
        try:
            async with DockerEngine(host) as engine:
                await load(engine, await asyncio.to_thread(rootfs_tar), HOST_IMAGE)
            return
        except SandboxUnavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


def _which(name: str) -> str | None:
    return shutil.which(name, path=DEFAULT_PATH)


def _env(place: Path) -> dict[str, str]:
    conf = str(place / "containers.conf")
    return {"PATH": DEFAULT_PATH, "CONTAINERS_CONF": conf, "HOME": str(place), "TMPDIR": str(place)}


def _command(kind: str, place: Path) -> list[str]:
    """In a mount namespace with an empty /run and /var/lib: engines keep things there that no option moves."""
    hidden = 'mount -t tmpfs none /run && mount -t tmpfs none /var/lib && exec "$@"'
    apart = ["unshare", "--mount", "--propagation", "private", "sh", "-c", hidden, "engine"]
    if kind == "podman":
        (place / "containers.conf").write_text(_PODMAN_CONF)
        return [*apart, *_podman(place), "system", "service", "--time=0", f"unix://{place}/sock"]
    (place / "daemon.json").write_text("{}")
    return [
        *apart, "dockerd", "--data-root", f"{place}/data", "--exec-root", f"{place}/exec", "--host", f"unix://{place}/sock",
        "--pidfile", f"{place}/dockerd.pid", "--config-file", f"{place}/daemon.json",
        "--bridge=none", "--iptables=false", "--ip-forward=false", "--cgroup-parent", f"/{_group(place)}",
    ]  # fmt: skip


def _podman(place: Path) -> list[str]:
    return ["podman", "--root", f"{place}/root", "--runroot", f"{place}/run", "--tmpdir", f"{place}/tmp"]


def _end(pid: int, place: Path) -> None:
    """SIGTERM, then SIGKILL, to the process we started, when it is still that one."""
    deadline = time.monotonic() + STOP_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        while _is_ours(pid, place):
            os.kill(pid, number)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            if number == signal.SIGTERM and time.monotonic() > deadline:
                break
            time.sleep(0.1)


def _is_ours(pid: int, place: Path) -> bool:
    try:
        return str(place).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _remove(path: Path) -> None:
    for _ in range(20):  # a process that was killed leaves its control group a moment later
        try:
            path.rmdir() if path.is_dir() else path.unlink()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)


def _strays(place: Path) -> list[int]:
    """Processes of the engine that outlive it: each is named by the directory that only this engine has."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [pid for pid in pids if pid != os.getpid() and _is_ours(pid, place)]


def _group(place: Path) -> str:
    """A control group of this engine's own: two that run side by side must not take the other's for what was there."""
    return f"rollyard-engine-{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"


def _outside(place: Path) -> list[str]:
    """What an engine makes outside its directory: control groups in every hierarchy, and Docker's key."""
    root = Path("/sys/fs/cgroup")
    names = (_group(place), "docker", "libpod_parent")
    found = [base / name for base in (root, *root.glob("*")) for name in names if (base / name).is_dir()]
    groups = {str(path) for group in found for path in (group, *group.rglob("*")) if path.is_dir()}
    files = {str(path) for path in (Path("/etc/docker"), Path("/etc/docker/key.json")) if path.exists()}
    return sorted(groups | files)


def main(argv: list[str]) -> int:
    """`start` or `stop`, and the kind: what `make docker` runs."""
    if len(argv) != 2 or argv[0] not in ("start", "stop") or argv[1] not in PROGRAMS:
        sys.stderr.write(f"usage: python -m tests.servers.engines start|stop {'|'.join(PROGRAMS)}\n")
        return 2
    verb, kind = argv
    place = Path(tempfile.gettempdir(), f"rollyard-{kind}")
    if verb == "stop":
        stop(kind, place)
        return 0
    if place.is_dir():
        sys.stderr.write(f"there is one at {place} already; `make docker-stop ENGINE={kind}` ends it\n")
        return 1
    name = "DOCKER_HOST" if kind == "docker" else "CONTAINER_HOST"
    sys.stdout.write(f"{name}={start(kind, place)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
