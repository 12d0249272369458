"""Who may do what here. Four keys that do not serve each other's purpose.

| key | whose | opens |
|---|---|---|
| API key (`Authorization`) | the owner | everything of that owner |
| runner token (`X-Runner-Token`) | an API key, on request | instance managers: reset, databases, verifier functions |
| instance token (`Authorization`) | an agent | the tools and pages of one instance |
| page token (in a URL) | a browser | the pages of one instance, not its tools |
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable

from starlette.requests import HTTPConnection

from rollyard.plane.compat.fleet.errors import FleetRefusal

Admit = Callable[[str | None], Awaitable[str]]
LOCAL = "local"


async def admit_all(header: str | None) -> str:
    return LOCAL


def one_key(key: str) -> Admit:
    async def admit(header: str | None) -> str:
        if not _is_same(bearer(header), key):
            raise FleetRefusal(401, "the API key is not known here")
        return LOCAL

    return admit


def bearer(header: str | None) -> str:
    scheme, _, text = (header or "").partition(" ")
    return text.strip() if scheme.lower() == "bearer" else ""


class Guard:
    """`open`: no key is needed."""

    def __init__(self, admit: Admit, secret: str) -> None:
        self._admit, self._secret = admit, secret.encode()
        self.open = admit is admit_all

    async def owner(self, request: HTTPConnection) -> str:
        return await self._admit(request.headers.get("authorization"))

    def runner_token(self, owner: str) -> str:
        return self._derive("runner", owner)

    def instance_token(self, instance_id: str) -> str:
        return self._derive("instance", instance_id)

    def page_token(self, instance_id: str) -> str:
        return self._derive("page", instance_id)

    def opens(self, token: str, instance_id: str) -> None:
        if not _is_same(token, self.page_token(instance_id)):
            raise FleetRefusal(404, "there is no such page")

    def manages(self, request: HTTPConnection, owner: str) -> None:
        given = request.headers.get("x-runner-token", "")
        if not self.open and not _is_same(given, self.runner_token(owner)):
            raise FleetRefusal(403, "this needs the runner token of the instance's owner")

    async def uses(self, request: HTTPConnection, instance_id: str, owner: str) -> None:
        if self.open or _is_same(bearer(request.headers.get("authorization")), self.instance_token(instance_id)):
            return
        if await self.owner(request) != owner:
            raise FleetRefusal(404, f"there is no instance {instance_id}")

    def _derive(self, purpose: str, name: str) -> str:
        return hmac.new(self._secret, f"{purpose}\n{name}".encode(), hashlib.sha256).hexdigest()


def _is_same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())
