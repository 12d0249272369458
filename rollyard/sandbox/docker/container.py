"""What a spec may ask of the docker backend, and the container it becomes.

There is no pass-through: what is not in `OPTIONS` is refused by name, so no spec can ask for privileges, devices, host
namespaces or the engine's own socket. Labels carry all that another process needs to find a sandbox. A label cannot change
after creation and a name can, so the end time is in the name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.egress import parse_rule
from rollyard.core.errors import ConfigError, IsolationTooWeak, PathError, Unsupported
from rollyard.core.sandbox import Capabilities, Isolation, SandboxInfo, SandboxSpec, Volume, at_least
from rollyard.sandbox.docker import keeper
from rollyard.sandbox.gpus import SHARE, GpuReservation

MARK = "rollyard.sandbox"
_OWN = "rollyard.label."
DEFAULT_PIDS = 4096
CPU_SHARES = 512  # half of the usual, of processors that others want too
MEMORY_SHARE = 0.5  # of the engine's machine, for a sandbox that names no limit
SPARE_PIDS = 16  # the keeper, and the threads an engine needs for a moment to start a program
DROPPED = ["NET_RAW", "MKNOD", "AUDIT_WRITE"]
SOCKET_DIR = "/run/rollyard"


def _parse_whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError("a whole number of at least 1 is wanted")
    return int(text)


def _cpus(text: str) -> str:
    if not text or not set(text) <= set("0123456789,-"):
        raise ValueError("a list such as 0-3,8 is wanted")
    return text


OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "shm_mb": _parse_whole,
    "cpuset": _cpus,
    "nofile": _parse_whole,
    SHARE: str,
}


class ContainerDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What an image says about programs started in it; `image` is its id."""

    image: str
    env: Mapping[str, str]
    workdir: str
    user: str
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a sandbox's labels and name."""

    id: str
    backend: str
    image: str
    isolation: Isolation
    created_at: float
    expires_at: float
    lifetime: str
    user: str
    workdir: str

    @property
    def name(self) -> str:
        return f"rollyard-{self.id}-{math.ceil(self.expires_at)}"


def check(spec: SandboxSpec, got: Capabilities, allowed: tuple[Path, ...]) -> None:
    """Refuse, before anything is made, what cannot be honoured."""
    if not at_least(got.isolation, spec.min_isolation):
        raise IsolationTooWeak(
            f"the docker backend gives isolation {got.isolation!r}, {spec.min_isolation!r} was asked for",
            hint="backend('docker', runtime='runsc') gives gvisor where that runtime is installed",
        )
    for host in spec.allowed_hosts:
        parse_rule(host)
    if spec.network == "host" and not spec.allow_unsafe:
        raise ConfigError(
            "network='host' exposes this machine's network to the sandbox",
            hint="use network='none', or say allow_unsafe=True",
        )
    if spec.idle_ttl_s is not None:
        raise Unsupported("the docker backend has no idle_ttl_s", hint="use ttl_s and extend it")
    if spec.disk == "tmpfs":
        raise Unsupported("the docker backend has no disk='tmpfs'", hint="use the local backend, or disk='disk'")
    if spec.resources.gpus and not got.gpus:
        raise Unsupported(
            f"resources.gpus={spec.resources.gpus}: there is no GPU for containers here",
            hint="it needs an engine on this machine, and device nodes such as /dev/nvidia0",
        )
    if spec.layers and not got.layers:
        raise Unsupported("layers need an engine on this machine", hint="bake them into the image")
    if spec.mounts and not got.mounts:
        raise Unsupported("mounts need an engine on this machine", hint="use the local backend, or upload the files")
    options(spec.options)
    for mount in spec.mounts:
        _mount(mount.remote_dir, mount.local_dir, allowed)


def options(given: Mapping[str, str]) -> dict[str, Any]:
    if unknown := sorted(set(given) - set(OPTIONS)):
        raise Unsupported(f"the docker backend has no option {unknown}", hint=f"it has {sorted(OPTIONS)}")
    found: dict[str, Any] = {}
    for name, text in given.items():
        try:
            found[name] = OPTIONS[name](text)
        except ValueError as error:
            raise ConfigError(f"options.{name}: {error}, got {text!r}") from None
    return found


def _mount(source: str, target: str, allowed: tuple[Path, ...]) -> None:
    path = Path(source).resolve()
    if not any(path.is_relative_to(place) for place in allowed):
        raise ConfigError(
            f"the mount of {source!r} is not allowed", hint="name the directory in backend('docker', mounts=[...])"
        )
    if not path.is_dir():
        raise ConfigError(f"the mount of {source!r} is not a directory on this host")
    if not target.startswith("/") or target == "/":
        raise ConfigError(f"a mount needs an absolute place inside, got {target!r}")


def request(
    spec: SandboxSpec, who: Identity, binds: list[dict[str, Any]], runtime: str | None, *, beside: str | None = None
) -> dict[str, Any]:
    """The body of the engine's create call. The spec's environment is not in it: it goes with each program, so that
    neither `inspect` nor a snapshot shows it. `beside` is the container whose network this one shares, with its names."""
    owner = spec.lifetime == "owner"
    return {
        "Image": who.image,
        "Entrypoint": keeper.command(spec.ttl_s, spec.lifetime),
        "Cmd": [],
        "User": "0:0",
        "WorkingDir": "/",
        **({"Hostname": "sandbox"} if beside is None else {}),
        "Labels": labels(spec, who),
        "OpenStdin": owner,
        "StdinOnce": owner,
        "AttachStdin": owner,
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGKILL",
        "NetworkDisabled": False,
        "HostConfig": _host(spec, binds, runtime) | _network(spec, beside),
    }


def _network(spec: SandboxSpec, beside: str | None) -> dict[str, Any]:
    if beside is not None:
        return {"NetworkMode": f"container:{beside}"}
    named = {"ExtraHosts": [f"{name}:127.0.0.1" for name in spec.names]} if spec.names else {}
    return {"NetworkMode": "host" if spec.network == "host" else "none", **named}


def _host(spec: SandboxSpec, binds: list[dict[str, Any]], runtime: str | None) -> dict[str, Any]:
    resources, extra = spec.resources, options(spec.options)
    host: dict[str, Any] = {
        "AutoRemove": True,
        "CapDrop": DROPPED,
        "SecurityOpt": ["no-new-privileges"],
        "PidsLimit": (resources.pids or DEFAULT_PIDS) + SPARE_PIDS,
        "Mounts": binds,
        "LogConfig": {"Type": "none"},
    }
    if resources.memory_mb is not None:
        host |= {"Memory": resources.memory_mb * 2**20, "MemorySwap": resources.memory_mb * 2**20}
    if resources.cpus is not None:
        host["NanoCpus"] = int(resources.cpus * 10**9)
    else:
        host["CpuShares"] = CPU_SHARES
    if "shm_mb" in extra:
        host["ShmSize"] = extra["shm_mb"] * 2**20
    if "cpuset" in extra:
        host["CpusetCpus"] = extra["cpuset"]
    if "nofile" in extra:
        host["Ulimits"] = [{"Name": "nofile", "Soft": extra["nofile"], "Hard": extra["nofile"]}]
    if runtime is not None:
        host["Runtime"] = runtime
    return host


def bind(source: str, target: str, *, writable: bool = False) -> dict[str, Any]:
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": not writable}


def show_gpus(reserved: GpuReservation, runtimes: Mapping[str, Any]) -> dict[str, Any]:
    """By NVIDIA's runtime, which brings the driver's libraries, where the engine has it; else the device nodes alone."""
    if not reserved.gpus:
        return {}
    if "nvidia" in runtimes:
        numbers = [str(gpu.number) for gpu in reserved.gpus]
        return {"DeviceRequests": [{"Driver": "nvidia", "DeviceIDs": numbers, "Capabilities": [["gpu"]]}]}
    nodes = [(path, f"/dev/{Path(path).name}") for path in reserved.devices]
    return {
        "Devices": [{"PathOnHost": at, "PathInContainer": to, "CgroupPermissions": "rw"} for at, to in nodes],
    }


def volume(given: Volume, of: str) -> dict[str, Any]:
    """A volume of the engine's, of the sandbox `of`; the label finds it after everybody who knew it is dead."""
    return {
        "Type": "volume",
        "Source": f"rollyard-{of}-{given.name}",
        "Target": given.path,
        "ReadOnly": not given.writable,
        "VolumeOptions": {"NoCopy": True, "Labels": {MARK: of}},
    }


def labels(spec: SandboxSpec, who: Identity) -> dict[str, str]:
    own = {f"{_OWN}{name}": value for name, value in spec.labels.items()}
    return {MARK: who.id, "rollyard.identity": msgspec.json.encode(who).decode(), **own}


def label_filter(given: Mapping[str, str] | None) -> dict[str, list[str]]:
    """The engine's filter for sandboxes with these labels."""
    return {"label": [MARK, *(f"{_OWN}{name}={value}" for name, value in (given or {}).items())]}


def identity(found: Mapping[str, str]) -> Identity | None:
    try:
        return msgspec.json.decode(found["rollyard.identity"], type=Identity)
    except (*BAD_JSON, KeyError):
        return None


def info(found: Mapping[str, str], name: str, state: str, pid: int | None = None) -> SandboxInfo | None:
    """One line of a listing, out of labels and name; None for what is not ours."""
    who = identity(found)
    if who is None:
        return None
    return SandboxInfo(
        id=who.id,
        backend=who.backend,
        image=who.image,
        isolation=who.isolation,
        labels={key.removeprefix(_OWN): value for key, value in found.items() if key.startswith(_OWN)},
        created_at=who.created_at,
        expires_at=expiry(name, who),
        pid=pid,
        state=state,
    )


def expiry(name: str, who: Identity) -> float:
    end = name.rpartition("-")[2]
    return float(end) if end.isdigit() else who.expires_at


def is_over(found: SandboxInfo, slack_s: float = 5.0) -> bool:
    ended = found.state in ("exited", "dead", "stopped")
    return ended or (found.expires_at is not None and time.time() > found.expires_at + slack_s)


def no_directory(path: str) -> PathError:
    return PathError(path, "ENOENT", hint="the working directory")
