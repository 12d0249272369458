"""The sandboxes behind the server: made from a create request, found again by id, listed without those of others.

A sandbox of the server carries a label, so it neither shows nor ends what the same backend runs for somebody else. Its access
token is derived from the server's secret, so nothing about it has to be kept: with a fixed key it outlives a restart.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from rollyard.core.errors import SandboxGone
from rollyard.core.protocols import Backend, Sandbox
from rollyard.core.sandbox import SandboxInfo, SandboxSpec
from rollyard.plane.e2b.errors import Refusal
from rollyard.plane.e2b.processes import Processes

ENVD_VERSION = "0.6.7"
MARK = "rollyard.e2b"
_KEPT_S = 600.0  # how long a create is remembered by its Idempotency-Key
_REFUSED = ("volumeMounts", "mcp", "iam")


class Box:
    """A sandbox and the programs clients have started in it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.processes = Processes(sandbox)


class Boxes:
    """`spec` is what a template may not change: limits, isolation, and the network when the client asks for one."""

    def __init__(
        self, backend: Backend, *, key: str | None, spec: SandboxSpec, templates: Mapping[str, SandboxSpec]
    ) -> None:
        self.backend = backend
        self._spec, self._templates = spec, templates
        self._secret = (key or secrets.token_hex(32)).encode()
        self._boxes: dict[str, Box] = {}
        self._creates: dict[str, tuple[float, asyncio.Task[Box]]] = {}

    def token(self, sandbox_id: str) -> str:
        return hmac.new(self._secret, sandbox_id.encode(), hashlib.sha256).hexdigest()

    def owner_of(self, token: str) -> str:
        """The sandbox of an access token, for clients that send nothing else; "" when there is none."""
        same = (name for name in self._boxes if hmac.compare_digest(self.token(name).encode(), token.encode()))
        return next(same, "")

    async def create(self, asked: Mapping[str, Any], idempotency_key: str | None) -> Box:
        spec = self._wanted(asked)
        if idempotency_key is None:
            return await self._open(spec)
        now = time.monotonic()
        for old in [name for name, (at, _) in self._creates.items() if now - at > _KEPT_S]:
            del self._creates[old]
        if idempotency_key not in self._creates:
            self._creates[idempotency_key] = (now, asyncio.create_task(self._open(spec)))
        try:
            # Shielded: a client that hangs up and asks again gets the sandbox that its first request was making.
            return await asyncio.shield(self._creates[idempotency_key][1])
        except Exception:  # whatever it was, the same key may try again
            self._creates.pop(idempotency_key, None)
            raise

    async def _open(self, spec: SandboxSpec) -> Box:
        sandbox: Sandbox = await self.backend.open(spec)
        box = self._boxes[sandbox.id] = Box(sandbox)
        return box

    def _wanted(self, asked: Mapping[str, Any]) -> SandboxSpec:
        template = asked.get("templateID")
        if not isinstance(template, str) or not template:
            raise Refusal("invalid_argument", "templateID is required")
        for name in _REFUSED:
            if asked.get(name):
                raise Refusal("unimplemented", f"{name} is not served here", 400)
        base = self._templates.get(template) or (
            self._spec if template == "base" else msgspec.structs.replace(self._spec, image=template)
        )
        changes: dict[str, Any] = {
            "labels": {**base.labels, **(asked.get("metadata") or {}), MARK: template},
            "env": {**base.env, **(asked.get("envVars") or {})},
            "ttl_s": float(asked.get("timeout") or 300),
            "lifetime": "ttl" if self.backend.capabilities.lifetime_ttl else base.lifetime,
        }
        if asked.get("allow_internet_access") is False:
            changes.update(network="none", allowed_hosts=())
        elif hosts := ((asked.get("network") or {}).get("allowOut")):
            if not self.backend.capabilities.network_allowlist:
                raise Refusal("unimplemented", f"backend {self.backend.name} has no allowlist network", 400)
            changes.update(network="allowlist", allowed_hosts=tuple(hosts))
        try:
            return msgspec.convert(msgspec.to_builtins(msgspec.structs.replace(base, **changes)), SandboxSpec)
        except msgspec.ValidationError as error:
            raise Refusal("invalid_argument", str(error)) from error

    async def find(self, sandbox_id: str) -> Box:
        """By id, also one that an earlier server opened."""
        box = self._boxes.get(sandbox_id)
        if box is not None and await box.sandbox.alive():
            return box
        self._boxes.pop(sandbox_id, None)
        if box is None and self.backend.capabilities.attach:
            sandbox = await self.backend.attach(sandbox_id)
            if MARK in sandbox.info.labels:
                box = self._boxes[sandbox_id] = Box(sandbox)
                return box
        raise SandboxGone(f"sandbox {sandbox_id} is gone")

    async def kill(self, sandbox_id: str) -> bool:
        try:
            box = await self.find(sandbox_id)
        except SandboxGone:
            return False
        self._boxes.pop(sandbox_id, None)
        return await box.sandbox.kill()

    async def list(self, metadata: Mapping[str, str]) -> list[SandboxInfo]:
        """Newest first, as the paging token counts on."""
        found = [info for info in await self.backend.list(metadata or None) if MARK in info.labels]
        return sorted(found, key=lambda info: (-info.created_at, info.id))

    def made(self, box: Box) -> dict[str, Any]:
        """The body of a create or connect reply."""
        info = box.sandbox.info
        return {
            "templateID": info.labels.get(MARK, "base"),
            "sandboxID": info.id,
            "clientID": "rollyard",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self.token(info.id),
        }


def described(info: SandboxInfo, spec: SandboxSpec) -> dict[str, Any]:
    """One sandbox as `get` and `list` show it. Limits the operator did not set are shown as 0."""
    template = info.labels.get(MARK, "base")
    return {
        "templateID": template,
        "alias": template,
        "sandboxID": info.id,
        "clientID": "rollyard",
        "startedAt": _moment(info.created_at),
        "endAt": _moment(info.expires_at if info.expires_at is not None else info.created_at + 30 * 86400),
        "envdVersion": ENVD_VERSION,
        "cpuCount": max(1, round(spec.resources.cpus or 1)),
        "memoryMB": spec.resources.memory_mb or 0,
        "diskSizeMB": spec.resources.disk_mb or 0,
        "state": "paused" if info.state == "paused" else "running",
        "metadata": {name: value for name, value in info.labels.items() if name != MARK},
    }


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
