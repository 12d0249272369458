"""Sandboxes of one backend, without a store: what is known of a sandbox is asked of the backend.

A sandbox of the server carries a label, so it neither shows nor ends what the same backend runs for somebody else.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.errors import Error, SandboxGone
from rollyard.core.plane import ApiKey
from rollyard.core.protocols import Backend, Sandbox
from rollyard.core.sandbox import Resources, SandboxSpec, is_path
from rollyard.plane.compat.e2b.boxes import E2bCreate, E2bSandbox, SandboxTokens, SandboxView, make_box, read_create
from rollyard.plane.compat.e2b.errors import E2bRefusal
from rollyard.plane.compat.e2b.template_builds import remove_image, start_or_kill
from rollyard.plane.compat.e2b.templates import BASE, Templates

MARK, _IMAGE = "rollyard.e2b", "rollyard.e2b.image"
_KEPT_S = 600.0  # how long a create is remembered by its Idempotency-Key


class BackendBoxes:
    """`spec` is what a template may not change: limits, isolation, and the network when the client asks for one. `key` None
    lets everybody in."""

    def __init__(
        self,
        backend: Backend,
        *,
        key: str | None,
        spec: SandboxSpec,
        templates: Mapping[str, SandboxSpec],
        folder: Path | None = None,
    ) -> None:
        self._backend, self._key = backend, key
        self._spec, self._named = spec, templates
        self._scratch = tempfile.TemporaryDirectory(prefix="rollyard-e2b-") if folder is None else None
        self.templates = Templates(folder or Path(self._scratch.name if self._scratch else ""))
        self.tokens = SandboxTokens((key or secrets.token_hex(32)).encode())
        self._boxes: dict[str, E2bSandbox] = {}
        self._creates: dict[str, tuple[float, asyncio.Task[E2bSandbox]]] = {}
        self._paused: set[str] = set()

    async def admit(self, key: str) -> ApiKey | None:
        if self._key is not None and not hmac.compare_digest(key.encode(), self._key.encode()):
            raise E2bRefusal("unauthenticated", "the API key is not known here")
        return None

    def list_known(self) -> list[str]:
        return list(self._boxes)

    async def forget_image(self, image: str) -> None:
        await remove_image(self._backend, image)

    async def create(
        self,
        caller: ApiKey | None,
        asked: Mapping[str, Any],
        idempotency_key: str | None,
        *,
        resources: Resources | None = None,
    ) -> E2bSandbox:
        wanted = read_create(asked)
        if wanted.on_timeout != "end":
            raise E2bRefusal("unimplemented", "autoPause is not served here, only by a plane", 400)
        spec = self._to_spec(wanted, resources)
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

    async def _open(self, spec: SandboxSpec) -> E2bSandbox:
        box = await self._keep(await self._backend.open(spec))
        if build := self.templates.of_image(spec.image):
            await start_or_kill(box, build[1])
        return box

    async def _keep(self, sandbox: Sandbox) -> E2bSandbox:
        template, image = sandbox.info.labels.get(MARK, BASE), sandbox.info.labels.get(_IMAGE, "")
        box = make_box(sandbox.id, template, image, sandbox, self.templates)
        box = self._boxes.setdefault(sandbox.id, box)
        await box.accounts.prepare()
        return box

    def _to_spec(self, asked: E2bCreate, resources: Resources | None) -> SandboxSpec:
        found = None if asked.template == BASE else self.templates.find("", asked.template)
        built = self.templates.ready("", asked.template) if found is not None else None
        base = self._named.get(asked.template) or (
            self._spec
            if asked.template == BASE
            else msgspec.structs.replace(self._spec, image=built.image if built else _image_name(asked.template))
        )
        resources = resources or (built.resources if built else Resources())
        changes: dict[str, Any] = {
            "labels": {
                **base.labels,
                **asked.metadata,
                MARK: found[0].id if found else asked.template,
                _IMAGE: base.image,
            },
            "env": {**base.env, **(built.env if built else {}), **asked.env},
            "resources": base.resources if resources == Resources() else resources,
            "ttl_s": asked.seconds,
            "lifetime": "ttl" if self._backend.capabilities.lifetime_ttl else base.lifetime,
        }
        if asked.internet is False and not asked.hosts:
            changes.update(network="none", allowed_hosts=())
        elif asked.hosts:
            if not self._backend.capabilities.network_allowlist:
                raise E2bRefusal("unimplemented", f"backend {self._backend.name} has no allowlist network", 400)
            changes.update(network="allowlist", allowed_hosts=asked.hosts)
        return msgspec.structs.replace(base, **changes)

    async def find(self, sandbox_id: str, *, wake: bool = True) -> E2bSandbox:
        """By id, also one that an earlier server opened."""
        box = self._boxes.get(sandbox_id)
        if box is not None and await box.sandbox.alive():
            return box
        self._boxes.pop(sandbox_id, None)
        self._paused.discard(sandbox_id)
        if box is None and self._backend.capabilities.attach:
            sandbox = await self._backend.attach(sandbox_id)
            if MARK in sandbox.info.labels:
                return await self._keep(sandbox)
        raise SandboxGone(f"sandbox {sandbox_id} is gone")

    async def view(self, caller: ApiKey | None, sandbox_id: str) -> SandboxView:
        await self.find(sandbox_id)
        for one in await self.list(caller, {}):
            if one.id == sandbox_id:
                return one
        raise SandboxGone(f"sandbox {sandbox_id} is gone")

    async def list(self, caller: ApiKey | None, metadata: Mapping[str, str]) -> list[SandboxView]:
        found = [info for info in await self._backend.list(metadata or None) if MARK in info.labels]
        found.sort(key=lambda info: (-info.created_at, info.id))
        return [
            SandboxView(
                id=info.id,
                template=info.labels[MARK],
                created_at=info.created_at,
                expires_at=info.expires_at,
                metadata={name: value for name, value in info.labels.items() if name not in (MARK, _IMAGE)},
                state="paused" if info.state == "paused" or info.id in self._paused else "running",
                resources=self._limits_of(info.labels.get(_IMAGE, "")),
            )
            for info in found
        ]

    def _limits_of(self, image: str) -> Resources:
        built = self.templates.of_image(image)
        return built[1].resources if built is not None and built[1].resources != Resources() else self._spec.resources

    async def kill(self, caller: ApiKey | None, sandbox_id: str) -> None:
        box = await self.find(sandbox_id)
        self._boxes.pop(sandbox_id, None)
        if not await box.sandbox.kill():
            raise SandboxGone(f"sandbox {sandbox_id} is gone")

    async def extend(self, caller: ApiKey | None, sandbox_id: str, seconds: float) -> None:
        await (await self.find(sandbox_id)).sandbox.extend(seconds)

    async def pause(self, caller: ApiKey | None, sandbox_id: str, *, memory: bool = True) -> None:
        if not memory:
            await (await self.find(sandbox_id)).sandbox.kill_processes()
        await (await self.find(sandbox_id)).sandbox.pause()
        self._paused.add(sandbox_id)

    async def resume(self, caller: ApiKey | None, sandbox_id: str) -> None:
        await (await self.find(sandbox_id)).sandbox.resume()
        self._paused.discard(sandbox_id)

    async def snapshot(self, caller: ApiKey | None, sandbox_id: str) -> str:
        return await (await self.find(sandbox_id)).sandbox.snapshot()

    async def fork(
        self, caller: ApiKey | None, sandbox_id: str, seconds: float, count: int
    ) -> list[E2bSandbox | Error]:
        """What a sandbox was opened with is known to the control plane, not to a backend."""
        raise E2bRefusal("unimplemented", "a fork is not served here; take a snapshot and create from it")


def _image_name(template: str) -> str:
    if is_path(template):
        raise E2bRefusal(
            "not_found", f"template '{template}' not found: an image has a name, and no path of this server", 404
        )
    return template
