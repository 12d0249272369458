"""What the control plane keeps: environment descriptions, instances and what happened to them, API keys.

These are records: who decides about them is `rollyard.plane.service`, who keeps them is `rollyard.plane.storage`. Times are
seconds since 1970; they become RFC 3339 only on the wire. `live` is the one truth about quota: an instance counts from the moment
its creation is journalled until its engine has confirmed that it is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from rollyard.core.sandbox import Mount, Network, Resources

Role = Literal["admin", "owner", "trainer", "agent", "metrics"]
ROLES: tuple[Role, ...] = ("admin", "owner", "trainer", "agent", "metrics")
DATA_PORT = 8081
EnvStatus = Literal["draft", "released"]
OwnedKind = Literal["bundle", "snapshot"]
OnTimeout = Literal["end", "pause", "stop"]
RecordKind = Literal[
    "fleet_task",
    "fleet_verifier",
    "fleet_job",
    "fleet_session",
    "fleet_transcript",
    "rock_shell",
    "e2b_program",
    "e2b_template",
    "e2b_build",
    "e2b_image",
    "e2b_archive",
    "project",
    "build",
]
# Their scope is an instance, and they end with it
KINDS_OF_INSTANCES: tuple[RecordKind, ...] = ("rock_shell", "e2b_program")
InstanceState = Literal["creating", "running", "paused", "deleting", "deleted", "expired", "failed"]


class EnvBuild(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an image comes from pushed files: `bundle` is their sha256, `context` the folder of them that is built from. With a
    `dockerfile` (a path below that) it is carried out; without, the files are laid over the image `base` at `target`. `start` is
    what runs in its working directory where the Dockerfile names no program."""

    bundle: str
    context: str = ""
    dockerfile: str | None = None
    base: str = "host"
    target: str = "/app"
    start: tuple[str, ...] = ()


class EnvSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an environment is. `artifacts` are hexadecimal sha256 digests by name. `start` is the program that runs in every
    instance (its arguments are appended); `port` is where the environment's own server of tools, functions, reward and
    health listens inside. With `build` the image is made from pushed files, and so is what the files say about starting it; an
    `image` that is named beside it is taken where the engine has it."""

    description: str = ""
    image: str = "host"
    build: EnvBuild | None = None
    engine: str | None = None
    resources: Resources = Resources()
    network: Network = "none"
    env: Mapping[str, str] = {}
    start: tuple[str, ...] = ()
    port: int = DATA_PORT
    ttl_s: float | None = None
    tags: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    verifier: str | None = None
    artifacts: Mapping[str, str] = {}
    extra: Mapping[str, Any] = {}


class EnvRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`revision` counts changes: who updates says which one was seen. A released record never changes again. All versions of
    a name belong to one owner."""

    name: str
    version: str
    owner: str
    revision: int
    status: EnvStatus
    spec: EnvSpec
    created_at: float
    updated_at: float
    released_at: float | None = None

    @property
    def id(self) -> str:
        return f"{self.name}@{self.version}"


RENEW_S = 3600.0  # how often the sweep renews what is paused
_KEPT_S = 7 * 86400.0  # how long an engine keeps what is not renewed


class InstancePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is asked for: the journal's record of an intention. At the end of its time an instance ends, or is paused,
    or is stopped: its programs end, its files stay, and it is paused. One that does not end is kept until it is deleted; with
    `auto_resume`, a request to it resumes it."""

    image: str = "host"
    env: Mapping[str, str] = {}
    start: tuple[str, ...] = ()
    port: int = DATA_PORT
    arguments: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    resources: Resources = Resources()
    network: Network = "none"
    allowed_hosts: tuple[str, ...] = ()
    ttl_s: float = 1800.0
    on_timeout: OnTimeout = "end"
    auto_resume: bool = False

    def engine_ttl_s(self, ttl_s: float) -> float:
        """The time of the engine's own thing: it must not end what the plane pauses."""
        return ttl_s if self.on_timeout == "end" else ttl_s + _KEPT_S


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    engine: str
    state: InstanceState
    live: bool
    plan: InstancePlan
    created_at: float
    updated_at: float
    expires_at: float
    last_seen_at: float
    settle_by: float  # a step under way at this time was abandoned by the server that took it
    env: str | None = None
    run_id: str | None = None
    rollout_id: str | None = None
    ref: str | None = None  # the engine's own name for it, once known
    idle_ttl_s: float | None = None
    labels: Mapping[str, str] = {}
    reason: str | None = None
    ended_at: float | None = None

    @property
    def ends_with_its_time(self) -> bool:
        """Whether the sweep ends it when its time is over; otherwise it is paused, and kept."""
        return self.plan.on_timeout == "end" or self.state not in ("running", "paused")


class InstanceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an instance's history."""

    at: float
    state: InstanceState
    reason: str | None = None


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is kept: never itself, only its sha256. `instance_id` narrows an agent's key to one instance."""

    id: str
    digest: bytes
    role: Role
    owner: str
    created_at: float
    instance_id: str | None = None
    revoked_at: float | None = None


class OwnerUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`quota` and `rate` (creations a second) None mean the server's default."""

    owner: str
    used: int
    quota: int | None
    rate: float | None = None


class AdmissionTerms(msgspec.Struct, frozen=True, kw_only=True):
    """On which creations are let in, for owners that have no terms of their own. No quota, no rate or a rate of 0: no
    limit."""

    quota: int | None = None
    rate: float | None = None
    burst: int = 1


AENV_SERVER = ("python3", "-m", "aenv.main", "src")  # what `aenv run` starts in the folder of a project
POOL_OWNER = "pool/"
KEYLESS_OWNER = "aenv"  # callers without a key, where an API lets them in: they see what is theirs and nothing else


class WarmPool(msgspec.Struct, frozen=True, kw_only=True):
    """Instances made ahead of their use, at most `size` of them. `plan` is the JSON of the request they are made from."""

    name: str
    size: int
    plan: str
    created_at: float

    @property
    def owner(self) -> str:
        return POOL_OWNER + self.name


class PoolClaim(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance from a pool becomes for the caller who takes it."""

    owner: str
    at: float
    run_id: str | None = None
    rollout_id: str | None = None
    labels: Mapping[str, str] = {}
    idle_ttl_s: float | None = None


class PlaneRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an API keeps beside its instances, found by kind, scope and name on every replica. `data` is JSON. `revision`
    counts changes: a change says which one was seen, so it is also the fencing number of who works on a record. `due_at` is
    when a server has to take it up; the one that claims it moves that on, and again while at work. None: nothing is left."""

    kind: RecordKind
    scope: str
    name: str
    data: str
    created_at: float
    updated_at: float
    revision: int = 0
    due_at: float | None = None
