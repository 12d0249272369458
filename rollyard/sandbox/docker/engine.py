"""The engine's HTTP API, with deadlines and typed errors. The only file that imports aiodocker and aiohttp.

aiodocker finds the engine (unix, tcp, TLS, ssh) and agrees on a version. Calls are made here, because three things it does not
do are needed: archives that are not held in memory, closing a program's stdin while its output is read, and a deadline on every
call. An engine's own words are kept (`Refused.text`); what a spec's environment holds never goes into a request that is echoed.
No cause is chained to an error of a client: a traceback would print the address with the password it may carry.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import socket
from collections.abc import AsyncGenerator, AsyncIterable, Generator, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit

from rollyard.core.errors import ConfigError, MissingExtra, SandboxError, SandboxInterrupted, SandboxUnavailable
from rollyard.sandbox.retry import OpenLimits, retry_open

CALL_S = 60.0
CONNECT_S = 10.0
_SHOWN = 300
_LIMIT = 2**20
_ASKING = OpenLimits(attempts=3, wait_max_s=0.5)
_SOCKETS = {
    "docker": ("/var/run/docker.sock", "{runtime}/docker.sock"),
    "podman": ("/run/podman/podman.sock", "{runtime}/podman/podman.sock"),
}
_VARIABLES = {"docker": ("DOCKER_HOST",), "podman": ("CONTAINER_HOST", "DOCKER_HOST")}


class EngineRefused(SandboxError):
    """The engine answered no. `status` is its HTTP status, `text` its own words."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"the engine refused ({status}): {text[:_SHOWN]}")
        self.status = status
        self.text = text


def find_host(kind: str, host: str | None) -> str:
    """The engine's address: as given, from the environment, or a socket where this kind of engine puts one."""
    for name in _VARIABLES[kind]:
        host = host or os.environ.get(name)
    if host:
        return host
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
    for place in _SOCKETS[kind]:
        path = Path(place.format(runtime=runtime))
        if path.is_socket():
            return f"unix://{path}"
    raise SandboxUnavailable(
        f"no {kind} engine was found", hint=f"start one, or set {_VARIABLES[kind][0]} to its address"
    )


def show_host(host: str) -> str:
    """An address without the user name and password it may carry."""
    parts = urlsplit(host)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class Stream:
    """A connection the engine has handed over to a program: its output in frames, its input as bytes. `broken` says that it
    ended where no end was."""

    def __init__(self, response: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._response, self._reader, self._writer = response, reader, writer
        self.broken = False

    async def receive(self) -> tuple[int, bytes] | None:
        """(1 for stdout or 2 for stderr, bytes); None at the end."""
        head = b""
        try:
            head = await self._reader.readexactly(8)
            return head[0], await self._reader.readexactly(int.from_bytes(head[4:], "big"))
        except ConnectionError:
            self.broken = True
        except asyncio.IncompleteReadError as ended:
            self.broken = bool(head or ended.partial)
        return None

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def send_eof(self) -> None:
        if self._writer.can_write_eof():
            self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()
        self._response.close()


class DockerEngine:
    """One pooled client. `async with` connects and asks the engine what it is."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.info: Mapping[str, Any] = {}
        self.podman = False
        self._client: Any = None

    async def __aenter__(self) -> Self:
        self._client = _client(self.host)
        try:
            async with asyncio.timeout(CONNECT_S):
                version = await self._client.version()
                self.podman = any(
                    "podman" in str(part.get("Name", "")).lower() for part in version.get("Components", ())
                )
                self.info = await self.call("GET", "info")
        except BaseException as error:  # cancelled or failed, its connections are closed first
            await self.aclose()
            if isinstance(error, (OSError, TimeoutError, ValueError)) or _is_foreign(error):
                raise SandboxUnavailable(
                    f"no engine answers at {show_host(self.host)}: {type(error).__name__}",
                    hint="is its daemon running?",
                ) from None
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.close()

    @property
    def shares_host(self) -> bool:
        """Whether it runs containers out of this very machine's files and processes, as far as it says."""
        if not self.host.startswith("unix://") or "Desktop" in str(self.info.get("OperatingSystem", "")):
            return False
        return self.info.get("Name") == socket.gethostname() and self.info.get("KernelVersion") == platform.release()

    def _url(self, path: str) -> Any:
        from yarl import URL

        return URL(f"{self._client.docker_host}/{self._client.api_version}/{path}", encoded=True)

    @contextlib.asynccontextmanager
    async def request(self, method: str, path: str, *, timeout: float = CALL_S, **options: Any) -> AsyncGenerator[Any]:
        """The response of a call that succeeded. `timeout` is for the whole call, with what is done in the block."""
        with self._type_errors(f"{method} {path}", timeout):
            async with asyncio.timeout(timeout):
                response = await self._send(method, path, **options)
                try:
                    yield response
                finally:
                    response.release()

    @contextlib.contextmanager
    def _type_errors(self, what: str, timeout: float) -> Generator[None]:
        import aiohttp

        try:
            yield
        except aiohttp.ClientConnectorError:
            raise SandboxUnavailable(
                f"no engine answers at {show_host(self.host)}", hint="is its daemon running?"
            ) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise SandboxInterrupted(f"the engine broke off {what}: {type(error).__name__}") from None
        except TimeoutError:
            raise SandboxInterrupted(f"the engine did not finish {what} in {timeout:g} s") from None

    async def _send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        data: AsyncIterable[bytes] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Any:
        if body is not None:
            data, headers = json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
        query = "&".join(f"{name}={quote(_word(value), safe='')}" for name, value in (params or {}).items())
        url = self._url(f"{path}?{query}" if query else path)
        response = await self._client.session.request(method, url, data=data, headers=headers, **options)
        if response.status >= 400:
            try:
                raise _refusal(response.status, _message(await response.read()), response.headers.get("Retry-After"))
            finally:
                response.release()
        return response

    async def call(self, method: str, path: str, **options: Any) -> Any:
        """The JSON it answers with, or None. What does no harm when it is done twice is tried
        again when its answer did not come through."""
        text = await retry_open(
            lambda: self._text(method, path, **options), _ASKING, idempotent=method in ("GET", "DELETE")
        )
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            return None

    async def _text(self, method: str, path: str, **options: Any) -> bytes:
        async with self.request(method, path, **options) as response:
            return await response.read()

    async def hijack(self, path: str, *, body: Any = None, params: Mapping[str, Any] | None = None) -> Stream:
        """Ask for a raw connection and take it over from the HTTP client."""
        with self._type_errors(f"POST {path}", CALL_S):
            async with asyncio.timeout(CALL_S):
                response = await self._send(
                    "POST", path, body=body if body is not None else {}, params=params,
                    headers={"Connection": "Upgrade", "Upgrade": "tcp"}, read_until_eof=False,
                )  # fmt: skip
        connection = response.connection
        if connection is None or connection.transport is None:
            response.close()
            raise SandboxInterrupted(f"the engine closed the connection of {path}")
        handler, transport = connection.protocol, connection.transport
        reader = asyncio.StreamReader(limit=_LIMIT)
        protocol = _Taken(reader, handler)
        handler.set_parser(_Into(reader), None)  # hands over what came together with the response's head
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        transport.resume_reading()
        writer = asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
        return Stream(response, reader, writer)


class _Taken(asyncio.StreamReaderProtocol):
    """Reads for us, and lets the HTTP client know when the connection that was its own is gone."""

    def __init__(self, reader: asyncio.StreamReader, before: Any) -> None:
        super().__init__(reader)
        self._before = before

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._before.connection_lost(exc)


class _Into:
    """A parser, as the HTTP client knows them, that only passes bytes on."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        if data:
            self._reader.feed_data(data)
        return False, b""

    def feed_eof(self) -> None:
        """The end comes through the protocol that reads now."""

    def set_exception(self, *_error: object) -> None:
        """As `feed_eof`."""


def _refusal(status: int, text: str, retry_after: str | None) -> SandboxError:
    """The engine's own refusal, or that of something between it and us: engines answer none of these themselves."""
    if status in (429, 503):
        wait = float(retry_after) if retry_after is not None and retry_after.isdigit() else None
        return SandboxUnavailable(f"the engine is busy ({status}): {text[:_SHOWN]}", retry_after=wait)
    if status in (502, 504):
        return SandboxInterrupted(f"no answer of the engine came through ({status}): {text[:_SHOWN]}")
    return EngineRefused(status, text)


def _client(host: str) -> Any:
    try:
        import aiodocker
        import aiohttp
    except ImportError as error:
        raise MissingExtra("aiodocker", "docker", why="the docker backend") from error
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    if host.startswith("unix://"):  # a connector without aiohttp's limit of 100: every program holds a connection
        connector = aiohttp.UnixConnector(host.removeprefix("unix://"), limit=0)
        session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        client = aiodocker.Docker("unix://localhost", connector=connector, session=session, timeout=timeout)
        return _Owning(client, session)
    try:
        return aiodocker.Docker(host, timeout=timeout)
    except ValueError:
        raise ConfigError(
            f"{show_host(host)!r} is not the address of an engine", hint="unix:///path, tcp://host:port, ssh://host"
        ) from None


class _Owning:
    """aiodocker's client with a session that is ours to close."""

    def __init__(self, client: Any, session: Any) -> None:
        self._client, self.session = client, session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def close(self) -> None:
        await self._client.close()
        await self.session.close()


def _is_foreign(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in ("aiohttp", "aiodocker")


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return value if isinstance(value, str) else json.dumps(value)


def _message(body: bytes) -> str:
    try:
        found = json.loads(body)
        return str(found.get("message") or found.get("cause") or found)[:2000]
    except (ValueError, AttributeError):
        return body[:2000].decode("utf-8", "replace").strip()
