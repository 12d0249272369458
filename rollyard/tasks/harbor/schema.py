"""`task.toml` as written: Harbor's schema up to 1.4, typed, every field.

These structs are the file's own shape; `harbor.py` turns them into a `Task`. An unknown key is an error that names it, since
a misspelt limit or network mode that is quietly ignored changes what a reward means. `[metadata]` is free.
"""

from __future__ import annotations

import math
import re
import unicodedata
from ipaddress import ip_address, ip_network
from typing import Any, Literal

import msgspec

NetworkMode = Literal["public", "no-network", "allowlist"]

_VERSION = re.compile(r"\d+(\.\d+)*")  # what a version brings that is not known here is refused by its key
_PACKAGE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*")
_SERVICE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_NOT_PORTABLE = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[1-9¹²³])", re.IGNORECASE)
_SECRET_NAME = re.compile(r"KEY|SECRET|TOKEN(?!S)|PASSWORD|CREDENTIAL|AUTH|^(?:SET-)?COOKIE$", re.IGNORECASE)
_REFERENCE = r"\$\{[A-Za-z_][A-Za-z0-9_]*(?::-)?\}"
_ONLY_REFERENCES = re.compile(rf"\s*(?:[A-Za-z]+\s+)?{_REFERENCE}(?:[\s:-]*{_REFERENCE})*\s*")


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


def check_package_name(name: str) -> None:
    if not _PACKAGE.fullmatch(name) or ".." in name:
        raise ValueError(f"a package name is 'org/name' in letters, digits, '.', '_' and '-', got {name!r}")


def _check_service(name: str) -> None:
    if not _SERVICE.fullmatch(name):
        raise ValueError(f"{name!r} is not a compose service name")


def normal_host(host: str) -> str:
    """One allow-list entry: a host name, `*.host`, an address or a network; never a URL, a port or a path."""
    host = host.strip().lower().rstrip(".")
    if "/" in host and "%" not in host:
        return ip_network(host).compressed
    if ":" in host and "%" not in host:
        return ip_address(host).compressed
    name = host.removeprefix("*.")
    if not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise ValueError(f"allowed_hosts: {host!r} is not a host name, '*.name', address or network")
    if name != host and re.fullmatch(r"[\d.]+", name):
        raise ValueError(f"allowed_hosts: the wildcard {host!r} must stand before a name, not an address")
    return host


class _Network(_Table, frozen=True, kw_only=True):
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None

    def __post_init__(self) -> None:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError("allowed_hosts is only valid with network_mode = 'allowlist'")
        for host in self.allowed_hosts or ():
            normal_host(host)


class Author(_Table, frozen=True, kw_only=True):
    name: str
    email: str | None = None


class Package(_Table, frozen=True, kw_only=True):
    name: str
    version: str | None = None
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []

    def __post_init__(self) -> None:
        check_package_name(self.name)
        if self.version == "":
            raise ValueError("version must not be empty")


class HealthcheckTable(_Table, frozen=True, kw_only=True):
    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class TpuTable(_Table, frozen=True, kw_only=True):
    type: str
    topology: str

    def __post_init__(self) -> None:
        if not self.type or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", self.topology.strip()):
            raise ValueError("a tpu is a type and a topology such as '2x4' or '2x2x1'")


class McpTable(_Table, frozen=True, kw_only=True):
    name: str
    transport: Literal["stdio", "sse", "streamable-http", "http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []
    headers: dict[str, str] = {}

    def __post_init__(self) -> None:
        if self.transport == "stdio":
            if not self.command:
                raise ValueError("transport 'stdio' needs a command")
            if self.headers:
                raise ValueError("headers are for the HTTP transports")
        elif not self.url:
            raise ValueError(f"transport {self.transport!r} needs a url")
        for name, value in self.headers.items():
            if not _HEADER.fullmatch(name) or "\n" in value or "\r" in value:
                raise ValueError(f"{name!r} is not an HTTP header")
            if _SECRET_NAME.search(name) and value.strip() and not _ONLY_REFERENCES.fullmatch(value):
                raise ValueError(f"header {name!r} must take its credential from ${{VAR}}, never hold one")


class EnvironmentTable(_Network, frozen=True, kw_only=True):
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: int | float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: TpuTable | None = None
    mcp_servers: list[McpTable] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: HealthcheckTable | None = None
    workdir: str | None = None
    allow_internet: bool | None = None
    memory: str | None = None
    storage: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.os.lower() not in ("linux", "windows"):
            raise ValueError(f"os is 'linux' or 'windows', got {self.os!r}")
        if self.cpus is not None and not (math.isfinite(self.cpus) and self.cpus > 0):
            raise ValueError(f"cpus must be a positive number, got {self.cpus!r}")
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise ValueError(f"workdir must be an absolute path, got {self.workdir!r}")
        _agree("memory", self.memory, self.memory_mb)
        _agree("storage", self.storage, self.storage_mb)

    @property
    def mode(self) -> NetworkMode | None:
        """The network mode, with the old `allow_internet` read as the mode it meant."""
        if self.network_mode is not None or self.allow_internet is None:
            return self.network_mode
        return "public" if self.allow_internet else "no-network"


def megabytes(size: str) -> int:
    """`2G`, `512M`, `4096K` as the old `memory` and `storage` fields wrote them."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([GMK])B?\s*", size.upper())
    if match is None:
        raise ValueError(f"a size is written like '2G' or '512M', got {size!r}")
    return int(float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2]])


def _agree(name: str, old: str | None, new: int | None) -> None:
    if old is not None and new is not None and megabytes(old) != new:
        raise ValueError(f"{name} = {old!r} and {name}_mb = {new} contradict each other")


class CollectTable(_Table, frozen=True, kw_only=True):
    command: str
    service: str = "main"
    timeout_sec: float = 60.0
    user: str | int | None = None

    def __post_init__(self) -> None:
        _check_service(self.service)


class VerifierTable(_Network, frozen=True, kw_only=True):
    timeout_sec: float | None = None
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: list[CollectTable] = []

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError("environment_mode = 'shared' contradicts [verifier.environment]")

    @property
    def separate(self) -> bool | None:
        """None: not said at this level."""
        if self.environment_mode is not None:
            return self.environment_mode == "separate"
        return True if self.environment is not None else None


class AgentTable(_Network, frozen=True, kw_only=True):
    timeout_sec: float | None = None
    setup_timeout_sec: float | None = None  # of its installation
    user: str | int | None = None


class SolutionTable(_Table, frozen=True, kw_only=True):
    env: dict[str, str] = {}


class ArtifactTable(_Table, frozen=True, kw_only=True):
    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None

    def __post_init__(self) -> None:
        if ".." in self.source.split("/"):
            raise ValueError(f"an artifact's source must not contain '..', got {self.source!r}")
        place = self.destination or ""
        if place.startswith("/") or ".." in place.split("/") or "\\" in place or place.rstrip("/") == "manifest.json":
            raise ValueError(f"an artifact's destination is a relative path that stays inside, got {place!r}")
        if self.service is not None:
            _check_service(self.service)
            if self.service != "main" and not self.source.startswith("/"):
                raise ValueError(f"an artifact of service {self.service!r} needs an absolute source")


def _artifact_sources(entries: list[str | ArtifactTable]) -> None:
    for entry in entries:
        if isinstance(entry, str):
            ArtifactTable(source=entry)


class StepTable(_Table, frozen=True, kw_only=True):
    name: str
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthcheckTable | None = None
    artifacts: list[str | ArtifactTable] = []

    def __post_init__(self) -> None:
        name = self.name
        device = _DEVICE.fullmatch(name.partition(".")[0].rstrip(" "))
        if not name.strip() or name in (".", "..") or name.endswith((".", " ")) or _NOT_PORTABLE.search(name) or device:
            raise ValueError(f"a step's name is one portable directory name, got {name!r}")
        if len(name.encode()) > 255:
            raise ValueError("a step's name is at most 255 bytes")
        _artifact_sources(self.artifacts)


class TaskFile(_Table, frozen=True, kw_only=True):
    """The whole of `task.toml`."""

    schema_version: str = "1.4"
    task: Package | None = None
    metadata: dict[str, Any] = {}
    verifier: VerifierTable = VerifierTable()
    agent: AgentTable = AgentTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[StepTable] | None = None
    artifacts: list[str | ArtifactTable] = []

    def __post_init__(self) -> None:
        if not _VERSION.fullmatch(self.schema_version):
            raise ValueError(f"schema_version is written like '1.4', got {self.schema_version!r}")
        _artifact_sources(self.artifacts)
        seen: set[str] = set()
        for step in self.steps or ():
            key = unicodedata.normalize("NFC", step.name).casefold()
            if key in seen:
                raise ValueError(f"two steps are named {step.name!r} (letter case does not count)")
            seen.add(key)


def parse(raw: dict[str, Any]) -> TaskFile:
    """Raises `msgspec.ValidationError`, whose text ends with the path of the field at fault."""
    if "version" in raw and "schema_version" not in raw:
        raw = {**{k: v for k, v in raw.items() if k != "version"}, "schema_version": raw["version"]}
    return msgspec.convert(raw, TaskFile)
