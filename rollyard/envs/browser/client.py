"""`BrowserLeases`: borrow a browser from a lease server (`rollyard serve browser`, or any with its routes)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError, EnvError, EnvUnavailable, EpisodeLost
from rollyard.net.http_session import HttpFailure, HttpSession

URL_VARIABLE = "ROLLYARD_BROWSER_URL"
KEY_VARIABLE = "ROLLYARD_BROWSER_KEY"
T = TypeVar("T")
_CREATE_S = 120.0
_CALL_S = 60.0


class LeasedBrowser(msgspec.Struct, frozen=True, kw_only=True):
    """One browser for a while. `mcp_url` and `key` are for its `computer` tool, and for nothing else."""

    id: str
    mcp_url: str
    key: str
    expires_at: float


class BrowserLeases:
    """The lease server's address and credential come from arguments or from the environment; without a credential nothing
    is tried. Each call has its own connection: there are a handful in an episode."""

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        self._url = (url or os.environ.get(URL_VARIABLE, "")).rstrip("/")
        self._key = key or os.environ.get(KEY_VARIABLE, "")
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError("no browser server is named", hint=f"set {URL_VARIABLE}; `rollyard serve browser` is one")
        if not self._key.strip():
            raise ConfigError("browser leases need a credential", hint=f"set {KEY_VARIABLE}")

    async def create(self, ttl_s: float = 1800.0, labels: Mapping[str, str] | None = None) -> LeasedBrowser:
        body = {"ttl_s": ttl_s, "labels": dict(labels or {})}
        return await self._call("POST", "/leases", LeasedBrowser, body, timeout_s=_CREATE_S)

    async def navigate(self, lease_id: str, url: str) -> None:
        await self._call("POST", f"/leases/{lease_id}/navigate", Any, {"url": url})

    async def health(self, lease_id: str) -> None:
        """Raises unless the browser answers and its page has loaded."""
        await self._call("GET", f"/leases/{lease_id}/health", Any)

    async def delete(self, lease_id: str) -> None:
        """A lease that is gone already is fine."""
        await self._call("DELETE", f"/leases/{lease_id}", Any)

    async def _call(
        self, method: str, path: str, kind: type[T] | Any, body: Any = None, *, timeout_s: float = _CALL_S
    ) -> T:
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with HttpSession(headers=headers) as session:
                answer = await session.request(method, self._url + path, data, timeout_s=timeout_s)
        except (HttpFailure, TimeoutError) as error:
            kind_of_failure = error.kind if isinstance(error, HttpFailure) else "TimeoutError"
            raise EnvUnavailable(f"the browser server at {self._url} does not answer: {kind_of_failure}") from error
        if answer.status >= 400:
            raise _error(answer.status, answer.body)
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except (*BAD_JSON, ValueError) as error:
            raise EnvError(f"the browser server answered {method} {path} with something else: {error}") from error


def _error(status: int, data: bytes) -> EnvError:
    try:
        said = str(msgspec.json.decode(data, type=dict[str, Any])["error"])
    except (*BAD_JSON, ValueError, KeyError):
        said = f"HTTP {status}"
    kinds: dict[int, type[EnvError]] = {404: EpisodeLost, 503: EnvUnavailable}
    return kinds.get(status, EnvError)(f"the browser server refused: {said}")
