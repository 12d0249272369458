"""Fleet's environments through its own SDK (extra `fleet`). `FLEET_BASE_URL` may point it at any server of that shape.

The SDK has types for most of what goes wrong; where it has only a status, the status decides. It is imported on first use, and
its own retries (with the request id that makes them safe) stay on below ours. Verifier code is never given to it: it would run
that in this process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from rollyard.core.errors import ConfigError, EnvError, EnvUnavailable, EpisodeLost, MissingExtra, Unsupported
from rollyard.envs.fleet.databases import MAX_ROWS, QueryRows, Table
from rollyard.envs.fleet.provider import PROVISION_S, InstanceRequest

T = TypeVar("T")
KEY_VARIABLE = "FLEET_API_KEY"
URL_VARIABLE = "FLEET_BASE_URL"
_CALL_S = 60.0
_AGAIN = (408, 409, 425, 429)
_GONE = (404, 410)


class FleetProvider:
    """The key is an argument or `FLEET_API_KEY`; without one this fails here and now, and makes no request."""

    name = "fleet"

    def __init__(self, api_key: str | None = None, base_url: str | None = None, *, sdk_retries: int = 3) -> None:
        self._key = api_key or os.environ.get(KEY_VARIABLE, "")
        if not self._key.strip():
            raise ConfigError("Fleet environments need an API key", hint=f"set {KEY_VARIABLE}, or pass api_key")
        self._base_url = base_url or os.environ.get(URL_VARIABLE) or None
        self._retries = sdk_retries
        self._fleet: Any = None

    @property
    def tools_key(self) -> str | None:
        return self._key

    async def make(self, request: InstanceRequest) -> FleetInstance:
        if self._fleet is None:
            self._fleet = await asyncio.to_thread(self._make)
        made = await _ask(
            self._fleet.make(
                env_key=_with_version(request.env_key, request.env_version),
                data_key=_with_version(request.data_key, request.data_version) if request.data_key else None,
                region=request.region,
                env_variables=dict(request.env_variables) or None,
                image_type=request.image_type,
                ttl_seconds=round(request.ttl_s),
                run_id=request.run_id,
            ),
            f"no instance of {request.env_key} could be made",
            timeout_s=PROVISION_S,
        )
        if made.urls is None:
            raise EnvError(f"instance {made.instance_id} of {request.env_key} has no addresses")
        return FleetInstance(made)

    async def aclose(self) -> None:
        used, self._fleet = self._fleet, None
        if used is not None:
            async with asyncio.timeout(_CALL_S):
                await used.client.httpx_client.aclose()

    def _make(self) -> Any:
        try:
            from fleet import AsyncFleet
        except ImportError as error:
            raise MissingExtra("fleet-python", "fleet", why="Fleet's environments") from error
        return AsyncFleet(api_key=self._key, base_url=self._base_url, max_retries=self._retries)


class FleetInstance:
    def __init__(self, made: Any) -> None:
        self._made = made
        self.id: str = made.instance_id
        self.databases = FleetDatabases(made)

    @property
    def tool_urls(self) -> Sequence[str]:
        """Its root: whether the tools are at `mcp` or at `api/v1/mcp` depends on the kind of image."""
        return (self._made.urls.root,)

    @property
    def page_url(self) -> str | None:
        return self._made.urls.app[0] if self._made.urls.app else None

    async def reset(self, *, seed: int | None, timeout_s: float) -> None:
        body = {"timestamp": None, "seed": seed}
        answer = await _ask(
            self._made.instance.client.request("POST", "/reset", json=body), "reset failed", timeout_s=timeout_s
        )
        if answer.status_code == 501 and seed is not None:
            raise Unsupported(f"this environment takes no seed: {_detail(answer)}")
        if answer.status_code in _GONE:
            raise EpisodeLost(f"instance {self.id} is gone: {_detail(answer)}")
        if answer.status_code >= 400:
            raise EnvError(f"HTTP {answer.status_code}: {_detail(answer)}")
        reply = _json(answer)
        if not reply.get("success"):
            raise EnvError(str(reply.get("message") or "the manager did not say why"))

    async def close(self) -> None:
        try:
            await _ask(self._made.close(), f"instance {self.id} could not be released")
        except EpisodeLost:
            return


class FleetDatabases:
    def __init__(self, made: Any) -> None:
        self._made = made
        self._names: tuple[str, ...] | None = None

    async def names(self) -> Sequence[str]:
        if self._names is None:
            found = await _ask(self._made.instance.resources(), "resources could not be listed")
            self._names = tuple(one.resource.name for one in found if one.resource.type.value == "sqlite")
        return self._names

    async def describe(self, name: str) -> list[Table]:
        reply = await _ask((await self._find(name)).describe(), f"database {name} could not be described")
        if not reply.success:
            raise EnvError(reply.error or reply.message)
        return [Table(name=one.name, sql=one.sql, columns=one.columns) for one in reply.tables or ()]

    async def query(
        self, name: str, sql: str, args: Sequence[Any] = (), *, read_only: bool = True, max_rows: int = MAX_ROWS
    ) -> QueryRows:
        database = await self._find(name)
        asking = database.query if read_only else database.exec
        reply = await _ask(asking(sql, list(args)), f"database {name} could not be asked")
        if not reply.success:
            raise EnvError(reply.error or reply.message)
        rows = reply.rows or []
        return QueryRows(
            columns=reply.columns or [],
            rows=[list(row) for row in rows[:max_rows]],
            truncated=len(rows) > max_rows or reply.message.startswith("only the first"),
            rows_affected=reply.rows_affected,
            last_insert_id=reply.last_insert_id,
        )

    async def _find(self, name: str) -> Any:
        known = await self.names()
        if name not in known:
            raise EnvError(f"there is no database {name!r}; known: {', '.join(sorted(known)) or 'none'}")
        return self._made.db(name)


def _with_version(key: str, version: str | None) -> str:
    return f"{key}:{version}" if version and ":" not in key else key


async def _ask(asking: Awaitable[T], what: str, *, timeout_s: float = _CALL_S) -> T:
    """One call of the SDK, its errors turned into ours once."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asking
    except TimeoutError as error:
        raise EnvUnavailable(f"{what}: no answer within {timeout_s:g} s") from error
    except (ConfigError, EnvError):
        raise
    except Exception as error:  # the SDK and its transport raise many kinds; each becomes one of ours
        raise _as_env_error(error, what) from error


def _as_env_error(error: Exception, what: str) -> EnvError:
    """The SDK's errors carry a status; one of theirs without it is a network that failed, or a timeout. An instance's own calls
    look at no status: an answer that is none of the instance's does not fit its type."""
    status = getattr(error, "status_code", None)
    words = f"{what}: {type(error).__name__}: {error}"
    kind = type(error).__name__
    if status is None:
        transient = kind in ("FleetAPIError", "FleetTimeoutError", "ValidationError") or type(
            error
        ).__module__.startswith("httpx")
        return EnvUnavailable(words) if transient else EnvError(words)
    if status in _GONE:
        return EpisodeLost(words)
    return EnvUnavailable(words) if status >= 500 or status in _AGAIN else EnvError(words)


def _json(answer: Any) -> dict[str, Any]:
    try:
        reply = answer.json()
    except ValueError:
        return {}
    return reply if isinstance(reply, dict) else {}


def _detail(answer: Any) -> str:
    return str(_json(answer).get("detail") or answer.text[:200])
