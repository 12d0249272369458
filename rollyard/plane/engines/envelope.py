"""`{success, code, message, data}`: calls to services that answer in this envelope.

`code` is an int at some of them and an empty string at others, so nobody looks at it. What is not such an envelope (HTML of a
proxy, half a body, a list) is a `PlaneUnavailable`, a 404 is a `PlaneNotFound`, and a refusal carries the service's own words.
Keys travel in headers only and are in no error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError, Error, PlaneInvalid, PlaneNotFound, PlaneUnavailable
from rollyard.core.log import Log
from rollyard.net.http_session import HttpFailure, HttpSession

_log = Log("rollyard.plane")
_CLEANUP_S = 30.0
_SAID = 200  # characters of a service's words that go into an error


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    success: bool
    code: int | str | None = None
    message: str | None = None
    data: Any = None


class Service:
    """`async with` it: one connection pool, headers of every request, a deadline for each."""

    def __init__(self, name: str, url: str, *, headers: Mapping[str, str], timeout_s: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"engine {name} needs the URL of its service", hint=f"--engine {name}=http://host:port")
        self._name, self.url = name, url.rstrip("/")
        self._timeout_s = timeout_s
        self._session = HttpSession(headers=headers)

    async def aclose(self) -> None:
        await self._session.aclose()

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Any:
        """The envelope's data."""
        all_headers = {"Content-Type": "application/json", **(headers or {})}
        data = None if body is None else msgspec.json.encode(body)
        try:
            answer = await self._session.request(
                method, self.url + path, data, headers=all_headers, query=query, timeout_s=self._timeout_s
            )
        except TimeoutError as error:
            raise PlaneUnavailable(f"{self._name} did not answer {method} {path} in time") from error
        except HttpFailure as error:
            raise PlaneUnavailable(f"{self._name} did not answer {method} {path}: {error.kind}") from error
        return self._data(f"{method} {path}", answer.status, answer.body)

    def _data(self, what: str, status: int, raw: bytes) -> Any:
        try:
            envelope = msgspec.json.decode(raw, type=Envelope)
        except (*BAD_JSON, ValueError) as error:
            if status == 404:
                raise PlaneNotFound(f"{self._name}: {what} is not there") from error
            raise PlaneUnavailable(f"{self._name} answered {what} with {status} and no envelope") from error
        words = f"{self._name}: {(envelope.message or 'no reason given')[:_SAID]}"
        if status == 404:
            raise PlaneNotFound(words)
        if status in (400, 403, 422):
            raise PlaneInvalid(words)
        if not 200 <= status < 300 or not envelope.success:
            raise PlaneUnavailable(f"{words} ({what}: {status})")
        return envelope.data


def text(data: Any, *names: str) -> str:
    """The first of these fields that is a non-empty text; "" where there is none, whatever `data` is."""
    found = data if isinstance(data, dict) else {}
    return next((value for name in names if isinstance(value := found.get(name), str) and value), "")


async def remove(delete: Callable[[str], Awaitable[None]], ref: str) -> None:
    """What came up wrong is deleted. A failure here is not told: the one that led here is."""
    try:
        async with asyncio.timeout(_CLEANUP_S):
            await delete(ref)
    except (Error, TimeoutError):
        _log.warning("what an engine made and could not use was not deleted", ref=ref)
