"""`Boxes`: what the server needs to know of sandboxes, whoever keeps them. `backend_boxes` asks a backend, `instance_boxes`
the control plane.

A sandbox's access token is its id and a signature of it, so nothing about it has to be kept: with a fixed secret it outlives a
restart, and any replica knows it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

import msgspec

from rollyard.core.errors import Error
from rollyard.core.plane import ApiKey
from rollyard.core.protocols import Sandbox
from rollyard.core.sandbox import Resources
from rollyard.plane.e2b.errors import E2bRefusal
from rollyard.plane.e2b.processes import Processes

ENVD_VERSION = "0.6.7"
MOST_FORKS = 20
_REFUSED = ("volumeMounts", "mcp", "iam")


class E2bSandbox:
    """A sandbox and the programs clients have started in it. `id` is what clients call it."""

    def __init__(self, id: str, template: str, sandbox: Sandbox, processes: Processes) -> None:
        self.id, self.template, self.sandbox, self.processes = id, template, sandbox, processes


class SandboxView(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox as `get` and `list` show it."""

    id: str
    template: str
    created_at: float
    expires_at: float | None
    metadata: Mapping[str, str]
    state: Literal["running", "paused"] = "running"
    resources: Resources = Resources()


class Boxes(Protocol):
    """`caller` is who `admit` found; None where everybody is the same one."""

    @property
    def tokens(self) -> SandboxTokens: ...
    async def admit(self, key: str) -> ApiKey | None: ...
    async def create(
        self, caller: ApiKey | None, asked: Mapping[str, Any], idempotency_key: str | None
    ) -> E2bSandbox: ...
    async def find(self, sandbox_id: str) -> E2bSandbox:
        """Whoever asks has shown its token. Raises `SandboxGone`."""
        ...

    async def seen(self, caller: ApiKey | None, sandbox_id: str) -> SandboxView: ...
    async def list(self, caller: ApiKey | None, metadata: Mapping[str, str]) -> list[SandboxView]:
        """Newest first, as the paging token counts on."""
        ...

    async def kill(self, caller: ApiKey | None, sandbox_id: str) -> None: ...
    async def extend(self, caller: ApiKey | None, sandbox_id: str, seconds: float) -> None: ...
    async def pause(self, caller: ApiKey | None, sandbox_id: str) -> None: ...
    async def resume(self, caller: ApiKey | None, sandbox_id: str) -> None: ...
    async def snapshot(self, caller: ApiKey | None, sandbox_id: str) -> str: ...
    async def fork(
        self, caller: ApiKey | None, sandbox_id: str, seconds: float, count: int
    ) -> list[E2bSandbox | Error]:
        """What became of each of the copies."""
        ...


class SandboxTokens:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def of(self, sandbox_id: str) -> str:
        signature = hmac.new(self._secret, f"e2b {sandbox_id}".encode(), hashlib.sha256).hexdigest()
        return f"{sandbox_id}.{signature}"

    def id_in(self, token: str) -> str:
        """The sandbox that a token claims to be of, for clients that send nothing else. Not yet believed."""
        return token.rpartition(".")[0]


class E2bCreate(msgspec.Struct, frozen=True, kw_only=True):
    """A create request, read."""

    template: str
    seconds: float
    metadata: dict[str, str]
    env: dict[str, str]
    internet: bool | None
    hosts: tuple[str, ...]


def read_create(body: Mapping[str, Any]) -> E2bCreate:
    for name in _REFUSED:
        if body.get(name):
            raise E2bRefusal("unimplemented", f"{name} is not served here", 400)
    if not isinstance(body.get("templateID"), str) or not body["templateID"]:
        raise E2bRefusal("invalid_argument", "templateID is required")
    try:
        return msgspec.convert(
            {
                "template": body["templateID"],
                "seconds": body.get("timeout") or 300,
                "metadata": body.get("metadata") or {},
                "env": body.get("envVars") or {},
                "internet": body.get("allow_internet_access"),
                "hosts": (body.get("network") or {}).get("allowOut") or (),
            },
            E2bCreate,
        )
    except (msgspec.ValidationError, AttributeError) as error:
        raise E2bRefusal("invalid_argument", str(error)) from error


def made(box: E2bSandbox, tokens: SandboxTokens) -> dict[str, Any]:
    """The body of a create or connect reply."""
    return {
        "templateID": box.template,
        "sandboxID": box.id,
        "clientID": "rollyard",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": tokens.of(box.id),
    }


def described(seen: SandboxView) -> dict[str, Any]:
    """Limits the operator did not set are shown as 0."""
    end = seen.expires_at if seen.expires_at is not None else seen.created_at + 30 * 86400
    return {
        "templateID": seen.template,
        "alias": seen.template,
        "sandboxID": seen.id,
        "clientID": "rollyard",
        "startedAt": _moment(seen.created_at),
        "endAt": _moment(end),
        "envdVersion": ENVD_VERSION,
        "cpuCount": max(1, round(seen.resources.cpus or 1)),
        "memoryMB": seen.resources.memory_mb or 0,
        "diskSizeMB": seen.resources.disk_mb or 0,
        "state": seen.state,
        "metadata": dict(seen.metadata),
    }


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
