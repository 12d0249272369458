"""What this machine can do, found by trying: one `DoctorFinding` per question, with advice where the answer is no.

Nothing is inferred from a version where it can be tried: a sandbox is really opened, an engine's socket really answers. A
finding that is `bad` stops something; `weak` means that something works less well; `absent` is an option not installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
import msgspec

from rollyard.core.cache import cache_home
from rollyard.core.errors import Error
from rollyard.core.home import data_home, private_dir
from rollyard.core.sandbox import SandboxSpec
from rollyard.images import mount_table
from rollyard.images.host import host_prefixes
from rollyard.sandbox import backend
from rollyard.sandbox.docker import netns
from rollyard.sandbox.local import cgroups
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.sandbox.local.disk import default_disk_mb, disk_limit
from rollyard.sandbox.local.probe import Level

State = Literal["ok", "weak", "bad", "absent"]
ROOM_MB = 5000
OLDEST_NODE = 20
LANDLOCK_CREATE_RULESET = 444
LEVELS: dict[Level, tuple[str, str]] = {
    "full": ("namespaces and cgroups", ""),
    "no_cgroups": (
        "namespaces; limits by rlimits alone",
        "memory and CPU are not bounded: run as root or in a delegated cgroup",
    ),
    "no_proc": (
        "namespaces without /proc",
        "in a container: give it a fresh proc (--security-opt systempaths=unconfined)",
    ),
    "landlock": ("Landlock; processes and loopback are shared", "the kernel rows say what refuses namespaces"),
    "none": ("nothing", "use another backend, or open with min_isolation='none' and allow_unsafe=True"),
}
SDKS = {
    "docker": "aiodocker",
    "e2b": "e2b",
    "hf": "huggingface_hub",
    "daytona": "daytona",
    "prime": "prime_sandboxes",
    "runloop": "runloop_api_client",
    "fleet": "fleet",
    "ray": "ray",
    "postgres": "asyncpg",
    "redis": "redis",
    "parquet": "pyarrow",
    "tokens": "tokenizers",
    "tui": "textual",
    "report": "matplotlib",
}
_FILES = "; agents reach the gate through a relay over a pair of files"
GATE = {
    "e2b": "; agents reach the gate through a relay over a program's stdin and stdout",
    "hf": _FILES,
    "daytona": _FILES,
    "prime": _FILES,
    "runloop": _FILES,
}


class DoctorFinding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`group` puts related rows together; `advice` is one line, and there is one for every row that is not `ok`; `seconds` is
    what a step took that was timed."""

    group: str
    name: str
    state: State
    found: str
    advice: str = ""
    seconds: float | None = None


async def examine() -> list[DoctorFinding]:
    """All findings, in the order they are shown."""
    kernel = await anyio.to_thread.run_sync(_kernel)
    sandbox = [*await anyio.to_thread.run_sync(_isolation), await _open_local()]
    rest = await anyio.to_thread.run_sync(lambda: [*_engines(), *_programs(), *_packages(), *_places()])
    return [*kernel, *sandbox, *rest]


def healthy(findings: list[DoctorFinding]) -> bool:
    return not any(finding.state == "bad" for finding in findings)


def _kernel() -> list[DoctorFinding]:
    return [
        DoctorFinding(group="kernel", name="release", state="ok", found=f"{platform.release()} {platform.machine()}"),
        _user_namespaces(),
        _overlay(),
        _landlock(),
        _seccomp(),
        _cgroups(),
        _limits(),
    ]


def _user_namespaces() -> DoctorFinding:
    row = partial(DoctorFinding, group="kernel", name="user namespaces")
    if shutil.which("unshare") is None:
        return row(state="absent", found="not tried: no program unshare", advice="install util-linux to have it tried")
    tried = subprocess.run(
        ["unshare", "--user", "--map-root-user", "true"], capture_output=True, timeout=20, check=False
    )
    if tried.returncode == 0:
        return row(state="ok", found="allowed")
    if _sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
        advice = "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or run as root"
    elif _sysctl("user/max_user_namespaces") == "0":
        advice = "sysctl -w user.max_user_namespaces=15000"
    elif _sysctl("kernel/unprivileged_userns_clone") == "0":
        advice = "sysctl -w kernel.unprivileged_userns_clone=1"
    else:
        advice = "in a container: start it with --security-opt seccomp=unconfined, or use the docker backend"
    return row(state="bad", found="refused", advice=advice)


def _overlay() -> DoctorFinding:
    known = "\toverlay\n" in Path("/proc/filesystems").read_text()
    return DoctorFinding(
        group="kernel", name="overlayfs", state="ok" if known else "bad", found="available" if known else "not in this kernel",
        advice="" if known else "modprobe overlay",
    )  # fmt: skip


def _landlock() -> DoctorFinding:
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, 1)
    if abi >= 4:
        return DoctorFinding(group="kernel", name="landlock", state="ok", found=f"ABI {abi}")
    return DoctorFinding(
        group="kernel", name="landlock", state="weak", found=f"ABI {abi}" if abi > 0 else "absent",
        advice="kernel 6.7 or newer with lsm=landlock; only needed where namespaces are refused",
    )  # fmt: skip


def _seccomp() -> DoctorFinding:
    known = "Seccomp_filters" in Path("/proc/self/status").read_text() or Path("/proc/sys/kernel/seccomp").is_dir()
    return DoctorFinding(
        group="kernel", name="seccomp filters", state="ok" if known else "bad", found="available" if known else "not there",
        advice="" if known else "a kernel with CONFIG_SECCOMP_FILTER",
    )  # fmt: skip


def _limits() -> DoctorFinding:
    """What bounds a sandbox of the local backend that names no limits of its own."""
    limit_mb = default_disk_mb(private_dir(data_home()), "disk")
    memory = cgroups.default_memory_mb() if cgroups.find().has("memory") else None
    found = [
        f"memory {memory} MB" if memory is not None else "memory not bounded",
        "all cores, half a share of busy ones" if cgroups.find().has("cpu") else "all cores",
        f"{cgroups.DEFAULT_PIDS} processes",
        f"{limit_mb} MB and {disk_limit(limit_mb).inodes} files on disk",
    ]
    state = "ok" if memory is not None else "weak"
    advice = "" if memory is not None else "run as root or in a delegated cgroup"
    return DoctorFinding(group="sandbox", name="default limits", state=state, found=", ".join(found), advice=advice)


def _cgroups() -> DoctorFinding:
    found = cgroups.find()
    have = [name for name in ("memory", "pids", "cpu") if found.has(name)]
    if len(have) == 3:
        return DoctorFinding(group="kernel", name="cgroups", state="ok", found=f"{found.kind}: {' '.join(have)}")
    lacking = " ".join(name for name in ("memory", "pids", "cpu") if name not in have)
    advice = f"no limit on {lacking}: run as root, or under `systemd-run --user --scope -p Delegate=yes`"
    return DoctorFinding(
        group="kernel", name="cgroups", state="weak", found=f"{found.kind}: {' '.join(have) or 'none usable'}", advice=advice
    )  # fmt: skip


def _isolation() -> list[DoctorFinding]:
    local = LocalBackend()
    return [_level(local), *_mounts(local)]


def _level(local: LocalBackend) -> DoctorFinding:
    """The isolation level of the local backend that this user reaches here."""
    what, advice = LEVELS[local.level]
    why = f" ({local.trial.error})" if local.trial.error else ""
    state: State = "ok" if local.level == "full" else "bad" if local.level == "none" else "weak"
    return DoctorFinding(
        group="sandbox", name="isolation", state=state, found=f"{local.level}: {what}{why}", advice=advice
    )


def _mounts(local: LocalBackend) -> list[DoctorFinding]:
    """What is mounted below the directories of this machine that sandboxes show. Most machines have none."""
    rows = mount_table.read()
    points = [mount.point for place in ("/usr", *host_prefixes()) for mount in mount_table.below(rows, place)]
    if not points or not local.capabilities.images:
        return []
    more = f" and {len(points) - 3} more" if len(points) > 3 else ""
    whole = "" if os.geteuid() == 0 else "; what they lie in is read-only as a whole"
    found = f"{', '.join(points[:3])}{more}: shown read-only{whole}"
    return [DoctorFinding(group="sandbox", name="mounts", state="ok", found=found)]


async def _open_local() -> DoctorFinding:
    """Open one and run a program in it: the only proof there is."""
    spec = SandboxSpec(min_isolation="none", allow_unsafe=True)
    try:
        with anyio.fail_after(60):
            async with backend("local") as local:
                async with local.open(spec):
                    pass  # the first one starts the launcher
                started, listens = time.monotonic(), local.capabilities.listen
                async with local.open(spec) as box:
                    opened = time.monotonic()
                    code = (await box.exec(["true"], timeout=20)).exit_code
                    ran = time.monotonic()
    except (Error, OSError, TimeoutError) as error:
        advice = getattr(error, "hint", None) or "the rows above say what the kernel refused"
        return DoctorFinding(group="sandbox", name="local", state="bad", found=f"does not open: {error}", advice=advice)
    gate = "agents reach the gate at a port inside" if listens else "agents reach the gate by gate_url= alone"
    timing = f"open {(opened - started) * 1000:.0f} ms, exec {(ran - opened) * 1000:.0f} ms; {gate}"
    if code != 0:
        advice = "a program that must succeed did not: run `rollyard check sandbox local`"
        return DoctorFinding(
            group="sandbox", name="local", state="bad", found=f"`true` ended with {code}", advice=advice
        )
    return DoctorFinding(group="sandbox", name="local", state="ok", found=f"opens and runs a program; {timing}")


def _engines() -> list[DoctorFinding]:
    found = [_engine(name) for name in ("docker", "podman")]
    kvm = os.access("/dev/kvm", os.R_OK | os.W_OK)
    found.append(
        DoctorFinding(group="engines", name="kvm", state="ok" if kvm else "absent", found="opens" if kvm else "not usable",
                advice="" if kvm else "only microVM backends need it: load the kvm module and join the group kvm")
    )  # fmt: skip
    return found


def _engine(name: str) -> DoctorFinding:
    program = shutil.which(name)
    variable = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}[name]
    sockets = [os.environ.get(variable, "").removeprefix("unix://")]
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
    sockets += {
        "docker": ["/var/run/docker.sock", f"{runtime}/docker.sock"],
        "podman": ["/run/podman/podman.sock", f"{runtime}/podman/podman.sock"],
    }[name]
    answering = next((path for path in sockets if path and _answers(path)), None)
    if answering:
        route = "netns" if netns.may_enter() else "socket"
        return DoctorFinding(
            group="engines",
            name=name,
            state="ok",
            found=f"answers at {answering}; agents reach the gate by route {route}",
        )
    advice = (
        f"start it ({'dockerd' if name == 'docker' else 'podman system service'}), or set {variable}"
        if program
        else f"only the {name} backend needs it: install {name}"
    )
    return DoctorFinding(
        group="engines", name=name, state="absent", found="client only" if program else "not installed", advice=advice
    )


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(2)
        try:
            sock.connect(path)
            sock.sendall(b"GET /_ping HTTP/1.0\r\nHost: engine\r\n\r\n")
            return sock.recv(64).startswith(b"HTTP/1.")
        except OSError:
            return False


def _programs() -> list[DoctorFinding]:
    version = ".".join(map(str, sys.version_info[:3]))
    found = [
        DoctorFinding(group="programs", name="python", state="ok", found=f"{version} at {sys.executable}"),
        _node(),
    ]
    for name, why in (
        ("npm", "agents from npm"),
        ("git", "patches of an agent's work"),
        ("newuidmap", "more than one user without root"),
    ):
        program = shutil.which(name)
        package = {"newuidmap": "uidmap"}.get(name, name)
        needless = name == "newuidmap" and os.geteuid() == 0
        found.append(
            DoctorFinding(
                group="programs", name=name, state="ok" if program or needless else "weak",
                found=program or ("not needed by root" if needless else "not found"),
                advice="" if program or needless else f"needed for {why}: apt-get install {package}",
            )
        )  # fmt: skip
    return found


def _node() -> DoctorFinding:
    program = shutil.which("node")
    if program is None:
        return DoctorFinding(
            group="programs", name="node", state="weak", found="not found", advice="layers fetch one from PyPI (60 MB)"
        )
    tried = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=False)
    version = tried.stdout.strip().lstrip("v")
    new_enough = version.split(".")[0].isdigit() and int(version.split(".")[0]) >= OLDEST_NODE
    return DoctorFinding(
        group="programs", name="node", state="ok" if new_enough else "weak", found=f"{version or 'does not run'} at {program}",
        advice="" if new_enough else f"older than {OLDEST_NODE}: layers fetch a newer one from PyPI",
    )  # fmt: skip


def _packages() -> list[DoctorFinding]:
    return [
        DoctorFinding(
            group="extras", name=extra, state="ok" if importlib.util.find_spec(module) else "absent",
            found=f"installed{GATE.get(extra, '')}" if importlib.util.find_spec(module) else "not installed",
            advice="" if importlib.util.find_spec(module) else f"pip install 'rollyard[{extra}]'",
        )
        for extra, module in SDKS.items()
    ]  # fmt: skip


def _places() -> list[DoctorFinding]:
    found: list[DoctorFinding] = []
    for name, path, variable in (("data", data_home(), "ROLLYARD_HOME"), ("cache", cache_home(), "ROLLYARD_CACHE")):
        try:
            free = shutil.disk_usage(private_dir(path)).free // 2**20
        except OSError as error:
            found.append(
                DoctorFinding(
                    group="disk", name=name, state="bad", found=f"{path}: {error.strerror}", advice=f"set {variable}"
                )
            )
            continue
        enough = free >= ROOM_MB
        found.append(
            DoctorFinding(
                group="disk", name=name, state="ok" if enough else "weak", found=f"{free / 1024:.0f} GB free at {path}",
                advice="" if enough else f"an agent's layer takes up to 1 GB: free some, or set {variable}",
            )
        )  # fmt: skip
    return found


def _sysctl(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return None
