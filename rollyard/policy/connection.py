"""One pooled HTTP connection to a model server.

What it is not: a retrying client. A request is sent once; a refusal becomes an `UpstreamError` with the server's status, a
broken connection one with 502, a deadline one with 504. The key goes only to the server it was given for (no redirects, no
environment proxies) and is cut out of every body that may end in an error.

Trap: servers close idle connections after five seconds (uvicorn's default, so vLLM's and SGLang's), and a POST on a
connection that is being closed cannot be sent again safely; idle connections are therefore dropped on our side first.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError, UpstreamError
from rollyard.net.http_client import BadAnswer, HttpPool
from rollyard.net.http_session import HttpSession
from rollyard.policy.key_scrubber import HIDDEN
from rollyard.policy.model_server import show_url, words_of

IDLE_S = 4.0
MAX_BODY = 256 * 2**20
_NO_ANSWER = (TimeoutError, BadAnswer, OSError)


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds: to connect, and for a whole answer. `idle` bounds the silence inside a relayed stream."""

    connect: float = 10.0
    total: float = 600.0
    idle: float = 600.0


def check_url(url: str) -> str:
    """The base url without a trailing slash; refuses what could not be dialled or would carry a secret."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        shown = url.rpartition("@")[2]  # a password may stand before it
        raise ConfigError(f"{shown!r} is no http(s) URL", hint="for example http://localhost:8000/v1")
    if parts.username or parts.password:
        raise ConfigError("a url must not hold credentials", hint="pass key= or key_env=")
    return url.rstrip("/")


def resolve_key(key: str | None, key_env: str | None) -> str | None:
    if key is not None and key_env is not None:
        raise ConfigError("give key or key_env, not both")
    if key_env is not None:
        key = os.environ.get(key_env)
        if not key:
            raise ConfigError(f"the environment variable {key_env} is not set")
    if key is not None and (not key.strip() or not key.isprintable()):
        raise ConfigError("the upstream key is empty or has unprintable characters")
    return key


def origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


class ModelConnection:
    """Whole answers come over a `HttpPool`; `session` is a general client for those that must be relayed as they come. Each is
    opened on first use, in the loop that uses it."""

    def __init__(self, *, timeouts: Timeouts | None = None, secrets: tuple[str, ...] = ()) -> None:
        self.timeouts = timeouts or Timeouts()
        self._secrets = tuple(s.encode() for s in secrets)
        self._session = HttpSession(limit=0, idle_s=IDLE_S)
        self._pool: HttpPool | None = None
        self._ended = False

    def session(self) -> HttpSession:
        if self._ended:
            raise ConfigError("this policy was closed")
        return self._session

    def scrub(self, body: bytes, key: str | None = None) -> bytes:
        """Without the secrets, and without a session's own key."""
        for word in self._secrets:
            body = body.replace(word, HIDDEN)
        return body.replace(key.encode(), HIDDEN) if key else body

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], key: str | None = None) -> bytes:
        """The body of a 2xx answer, without our keys; everything else raises `UpstreamError`."""
        try:
            status, fields, answer = await self._open().exchange("POST", url, body, headers, self.timeouts.total)
        except _NO_ANSWER as error:
            raise _explain(url, error) from error
        if 200 <= status < 300:
            return self.scrub(answer, key) if self._secrets or key else answer
        raise self.refusal(url, status, answer, key, retry_after=seconds(fields.get("retry-after")))

    def refusal(
        self, url: str, status: int, body: bytes, key: str | None = None, *, retry_after: float | None = None
    ) -> UpstreamError:
        """What the server at `url` said instead of an answer, without our keys."""
        body = self.scrub(body, key)
        message = f"{show_url(url)} answered {status}"
        if words := words_of(body):
            message = f"{message}: {words}"
        return UpstreamError(message, status=status, body=body, retry_after=retry_after)

    async def exchange(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes, float | None]:
        try:
            answer = await self._open().exchange(method, url, body, headers, self.timeouts.total)
        except _NO_ANSWER as error:
            raise _explain(url, error) from error
        return answer.status, answer.body, seconds(answer.headers.get("retry-after"))

    def _open(self) -> HttpPool:
        if self._ended:
            raise ConfigError("this policy was closed")
        if self._pool is None:
            self._pool = HttpPool(connect_s=self.timeouts.connect, idle_s=IDLE_S, max_body=MAX_BODY)
        return self._pool

    async def aclose(self) -> None:
        self._ended = True
        if self._pool is not None:
            await self._pool.aclose()
        await self._session.aclose()


def _explain(url: str, error: Exception) -> UpstreamError:
    if isinstance(error, TimeoutError):
        return UpstreamError(f"{show_url(url)} did not answer in time", status=504)
    if isinstance(error, BadAnswer):
        return UpstreamError(f"the answer of {show_url(url)} is unreadable ({error})", status=502)
    why = type(error).__name__
    if (
        isinstance(error, OSError)
        and not isinstance(error, ssl.SSLError)
        and error.errno is not None
        and error.errno > 0
    ):
        why = os.strerror(error.errno)  # asyncio's own `strerror` names the address again
    return UpstreamError(f"no answer from {show_url(url)} ({why})", status=502)


def seconds(value: str | None) -> float | None:
    """`Retry-After` as seconds; its date form is left alone."""
    try:
        return max(0.0, float(value)) if value is not None else None
    except ValueError:
        return None


def json_object(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except BAD_JSON as error:
        raise UpstreamError("the upstream's answer is not JSON", status=502, body=body[:4096]) from error
    if not isinstance(value, dict):
        raise UpstreamError("the upstream's answer is not a JSON object", status=502, body=body[:4096])
    return value
