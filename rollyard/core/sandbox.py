"""What a sandbox is asked for (`SandboxSpec`), what it can do (`Capabilities`) and what comes back (`Exit`, `Stat`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.sequences import check_sequences

Isolation = Literal["none", "landlock", "namespace", "container", "gvisor", "microvm"]
ISOLATION_ORDER: tuple[Isolation, ...] = ("none", "landlock", "namespace", "container", "gvisor", "microvm")
Network = Literal["none", "allowlist", "host"]
Lifetime = Literal["owner", "ttl"]
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # where an image does not say


def is_path(image: str) -> bool:
    """Whether an image is given by a path of the host, as its own user may, and no other."""
    return image.startswith(("/", "./", "../", "~"))


def at_least(got: Isolation, wanted: Isolation) -> bool:
    return ISOLATION_ORDER.index(got) >= ISOLATION_ORDER.index(wanted)


class Resources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`None` means the backend's default, which `Capabilities` documents. `gpu_types` are acceptable ones; `tpu` is
    `type:topology`. A backend without accelerators refuses them."""

    cpus: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    pids: int | None = None
    gpus: int | None = None
    gpu_types: tuple[str, ...] = ()
    tpu: str | None = None

    def __post_init__(self) -> None:
        check_sequences(self)
        for name in ("cpus", "memory_mb", "disk_mb", "pids"):
            value = getattr(self, name)
            if value is not None and (not math.isfinite(value) or value <= 0):
                raise ConfigError(f"resources.{name} must be a positive number, got {value!r}")
        if self.gpus is not None and self.gpus < 0:
            raise ConfigError(f"resources.gpus must not be negative, got {self.gpus!r}")

    @property
    def accelerated(self) -> bool:
        return bool(self.gpus) or self.tpu is not None


class Mount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host (or remote) directory shown in the sandbox. Hosts honour only directories on their allow-list."""

    local_dir: str  # inside the sandbox
    remote_dir: str  # on the host, or at the provider
    id: str | None = None
    writable: bool = False


class Volume(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A directory that a sandbox and those beside it have in common: empty at first, every user's to write to, and gone with
    the sandbox that the others are beside of."""

    name: str
    path: str  # inside the sandbox
    writable: bool = True

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", self.name):
            raise ConfigError(f"{self.name!r} is not the name of a volume", hint="letters, digits, '_', '.' and '-'")
        if not self.path.startswith("/") or not self.path.strip("/") or ".." in self.path.split("/"):
            raise ConfigError(f"volume {self.name!r} needs an absolute place inside, got {self.path!r}")


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`image` is `host`, a known image or alias, a snapshot id, a directory, a tar or an OCI archive. `layers` are ids of
    read-only additions on top of it, lowest first. `disk="tmpfs"` bounds the writable part hard and in memory. `beside` is the id
    of a live sandbox whose network this one shares, the allow-list included, and whose `volumes` it may show."""

    image: str = "host"
    layers: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    volumes: tuple[Volume, ...] = ()
    beside: str | None = None
    names: tuple[str, ...] = ()  # what its own loopback is called inside, beside localhost
    env: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}
    workdir: str | None = None
    user: str | None = None
    ttl_s: float = 3600.0
    idle_ttl_s: float | None = None
    boot_s: float = 15.0
    resources: Resources = Resources()
    disk: Literal["tmpfs", "disk"] = "disk"
    network: Network = "none"
    allowed_hosts: tuple[str, ...] = ()
    min_isolation: Isolation = "landlock"
    allow_unsafe: bool = False
    lifetime: Lifetime = "owner"
    options: Mapping[str, str] = {}  # backend-specific, checked against that backend's allow-list

    def __post_init__(self) -> None:
        check_sequences(self)
        if not 0 < self.ttl_s < 30 * 86400:
            raise ConfigError(f"ttl_s must be more than 0 s and less than 30 days, got {self.ttl_s:g} s")
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name or "\0" in value:
                raise ConfigError(f"environment variable name {name!r} cannot be passed to a program")
        if self.network == "allowlist" and not self.allowed_hosts:
            raise ConfigError("network='allowlist' needs allowed_hosts", hint="name the hosts, or use network='none'")


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend can do. False means that a call for it raises `Unsupported` before anything happens."""

    isolation: Isolation
    images: bool = False
    builds: bool = False  # Dockerfiles, by means of its own
    layers: bool = False
    mounts: bool = False
    snapshot: bool = False
    pause: bool = False
    stdin: bool = False
    users: bool = False
    root: bool = False
    listen: bool = False
    dial: bool = False
    network_none: bool = False
    network_allowlist: bool = False
    services: bool = False  # sandboxes beside another one, and volumes
    attach: bool = False
    list: bool = False
    ttl: bool = False
    idle_ttl: bool = False
    extend: bool = False
    lifetime_ttl: bool = False
    bytes_exact: bool = False
    tree_kill: bool = False
    memory_limit: bool = False
    pids_limit: bool = False
    cpu_limit: bool = False
    disk_limit: bool = False
    gpus: bool = False
    pool: bool = False
    max_ttl_s: float | None = None
    max_concurrent: int | None = None
    creates_per_s: float | None = None


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended. A non-zero code is a value, not an error; `exit_code` is None when it timed out or was lost."""

    exit_code: int | None
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    signal: int | None = None
    oom: bool = False
    lost: bool = False
    truncated: bool = False
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """stdout then stderr, as text; undecodable bytes are shown, not dropped."""
        return (self.stdout + self.stderr).decode("utf-8", "backslashreplace")


class SandboxUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox has used of the processors since it was opened, in seconds of one of them, and what it uses now, in bytes.
    `cpus`, `memory_total` and `disk_total` are what it could."""

    cpu_s: float
    cpus: float
    memory: int
    memory_total: int
    memory_cache: int
    disk: int
    disk_total: int


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of the machine that a backend's sandboxes are on, in bytes. `sandboxes` is what each holds of it, by its id,
    with a fair share of what several hold together; `files` is how much of that are pages of files, which those that run the same
    program hold together; `swapped` is what was paged out of each."""

    total: int
    available: int
    swap: int = 0
    swap_free: int = 0
    sandboxes: Mapping[str, int] = {}
    files: Mapping[str, int] = {}
    swapped: Mapping[str, int] = {}


class Stat(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    kind: Literal["file", "dir", "symlink", "other"]
    size: int
    mode: int
    mtime: float
    target: str | None = None


class SandboxInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `Backend.list`."""

    id: str
    backend: str
    image: str
    isolation: Isolation
    labels: Mapping[str, str]
    created_at: float
    expires_at: float | None
    pid: int | None = None
    state: str = "running"
    level: str | None = None  # the local backend's own level of isolation
