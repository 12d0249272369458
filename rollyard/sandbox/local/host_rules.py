"""Where a program may go on the levels `landlock` and `none`, where it shares the host's file system: a directory of its own,
and the system's programs read-only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollyard.core.sandbox import DEFAULT_PATH, SandboxSpec
from rollyard.images.host import ETC_FILES, ETC_SSL_FILES, ETC_TREES, host_prefixes
from rollyard.sandbox.local.journal import Home

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("passwd", "group", "hosts", "nsswitch.conf", "resolv.conf", *ETC_FILES, *ETC_SSL_FILES, *ETC_TREES)
_PROC = tuple(f"/proc/{name}" for name in ("cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "uptime", "version"))
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")


def make(home: Home) -> None:
    for name in ("work", "home", "tmp"):
        (home.fs / name).mkdir(parents=True)


def workdir(home: Home) -> str:
    return str(home.fs / "work")


def environment(home: Home) -> dict[str, str]:
    path = ":".join([*(f"{prefix}/bin" for prefix in host_prefixes()), DEFAULT_PATH])
    return {"PATH": path, "LANG": "C.UTF-8", "HOME": str(home.fs / "home"), "TMPDIR": str(home.fs / "tmp")}


def landlock(home: Home, spec: SandboxSpec, view: dict[str, Any] | None) -> dict[str, Any]:
    """The rules of the level `landlock`. The option `ports` are TCP ports a program may connect to, separated by commas;
    those of its listeners come to them."""
    mounts = {str(Path(mount.remote_dir).resolve()): mount.writable for mount in spec.mounts}
    elsewhere = [] if view is None else [place for place in view["shown"].values() if place not in ("/proc", "/dev")]
    read = [*_SYSTEM, *(f"/etc/{name}" for name in _ETC), *_PROC, *host_prefixes(), *elsewhere]
    ports = spec.options.get("ports", "")
    return {
        "read": read,
        "write": [str(home.fs), *_DEVICES, *(place for place, writable in mounts.items() if writable)],
        "ports": None if spec.network == "host" else [int(port) for port in ports.split(",") if port.strip()],
    }
