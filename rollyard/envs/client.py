"""`connect(url)`: drive an environment somewhere else, ours or OpenEnv's.

One handshake on `/ws` offers our subprotocol. A server that takes it gets request ids, a lease, and a reattach after a lost
socket, with requests sent again under the same id. One that does not is OpenEnv's: exactly its envelope, one request at a
time, and a timeout or a lost socket is a lost episode, because a late answer could not be told from the next one.

A lost episode (`EpisodeLost`) is also what is left when a server died and could not put the session back. `reset` then begins
another one, on a new connection.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self
from urllib.parse import urlsplit, urlunsplit

import msgspec

from rollyard.core.errors import ConfigError, EnvError, EnvUnavailable, EpisodeLost
from rollyard.core.ids import new_id
from rollyard.envs.env import StepResult

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

SUBPROTOCOL = "rollyard.v1"
_TRY_LATER = frozenset(("CAPACITY_REACHED", "FACTORY_ERROR"))
_MAX_FRAME = 100 * 2**20
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`timeout_s`: of one move; `queue_s`: how long to wait for a place; `lease_s`: how long ours keep a lost session."""

    timeout_s: float = 600.0
    queue_s: float = 60.0
    connect_s: float = 10.0
    lease_s: float = 60.0
    ping_s: float = 20.0
    headers: Mapping[str, str] = {}


Progress = Callable[[float, float | None, str | None], None]


class Wire(Protocol):
    @property
    def lost(self) -> bool: ...
    async def ask(self, move: str, given: Mapping[str, Any], progress: Progress | None = None) -> Any: ...
    async def aclose(self) -> None: ...


def connect(url: str, *, key: str | None = None, **options: Any) -> RemoteEnv:
    """`async with connect("http://host:port") as env`. Options are those of `Options`."""
    headers = dict(options.pop("headers", {}))
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    try:
        chosen = Options(**options, headers=headers)
    except TypeError as error:
        raise ConfigError(f"connect: {error}") from error
    return RemoteEnv(socket_url(url), chosen)


def socket_url(url: str) -> str:
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not parts.netloc:
        raise ConfigError(f"{url!r} is no address of an environment", hint="http://host:port")
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/").removesuffix("/ws") + "/ws", parts.query, ""))


class RemoteEnv:
    """The face of `Env`, over a socket. `agent_key` opens `/mcp` for the agent of this session, where the server has keys."""

    def __init__(self, url: str, options: Options) -> None:
        self.url = url
        self.agent_key: str | None = None
        self._options = options
        self._wire: Wire | None = None

    async def __aenter__(self) -> Self:
        await self._connect()
        return self

    async def _connect(self) -> None:
        from rollyard.envs.client_openenv import OpenEnvWire

        socket = await dial(self.url, self._options)
        if socket.subprotocol == SUBPROTOCOL:
            own = OwnWire(self.url, self._options, socket)
            self.agent_key = await own.open()
            self._wire = own
        else:
            self._wire = OpenEnvWire(self.url, self._options, socket)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None, episode_id: str | None = None
    ) -> StepResult:
        """Begin an episode, on a new connection where the last one was lost."""
        if self._wire is not None and self._wire.lost:
            await self._wire.aclose()
            await self._connect()
        given = {"seed": seed, "options": dict(options or {}), "episode_id": episode_id}
        return _result(await self._ask("reset", given))

    async def step(self, action: Any, *, progress: Progress | None = None) -> StepResult:
        """`progress` hears how far a step is that takes long, where the server is ours."""
        return _result(await self._ask("step", {"action": msgspec.to_builtins(action)}, progress))

    async def state(self) -> dict[str, Any]:
        return await self._ask("state", {})

    async def tools(self) -> list[dict[str, Any]]:
        """Name, description and input_schema of each."""
        return await self._ask("tools", {})

    async def call(self, name: str, arguments: Mapping[str, Any], *, progress: Progress | None = None) -> Any:
        """A tool's value; one that failed raises `EnvError` with its words."""
        answer = await self._ask("call", {"name": name, "arguments": dict(arguments)}, progress)
        if answer["failed"]:
            raise EnvError(str(answer["value"]))
        return answer["value"]

    async def cancel(self) -> bool:
        """Cut the running move short; whether there was one. OpenEnv's wire has no word for it."""
        return bool((await self._ask("cancel", {}))["cancelled"])

    async def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.aclose()

    async def _ask(self, move: str, given: Mapping[str, Any], progress: Progress | None = None) -> Any:
        if self._wire is None:
            raise ConfigError("the environment is not connected", hint="async with connect(url) as env")
        return await self._wire.ask(move, given, progress)


class OwnWire:
    def __init__(self, url: str, options: Options, socket: ClientConnection) -> None:
        self._url = url
        self._options = options
        self._socket = socket
        self._waiting: dict[str, tuple[str, asyncio.Future[Any], Progress | None]] = {}
        self._session: dict[str, Any] = {}
        self._name = new_id("c")
        self._count = itertools.count()
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def open(self) -> str | None:
        options = self._options
        given = {"lease_s": options.lease_s, "deadline_s": options.timeout_s, "queue_s": options.queue_s}
        try:
            self._session = await self._sent("open", given, options.queue_s + options.connect_s)
        except BaseException:  # cancelled too: a socket without a session is of no use
            await self._end()
            raise
        return self._session.get("agent_key")

    @property
    def lost(self) -> bool:
        return self._reader.done()

    async def ask(self, move: str, given: Mapping[str, Any], progress: Progress | None = None) -> Any:
        return await self._sent(move, given, self._options.timeout_s + self._options.connect_s, progress)

    async def aclose(self) -> None:
        try:
            await self._sent("close", {}, self._options.connect_s)
        except EnvError:
            pass  # gone already: its lease ends it
        await self._end()

    async def _end(self) -> None:
        self._reader.cancel()
        await self._socket.close()

    async def _sent(
        self, move: str, given: Mapping[str, Any], within_s: float, progress: Progress | None = None
    ) -> Any:
        if self._reader.done():
            raise EpisodeLost("the connection to the environment is gone")
        name = f"{self._name}.{next(self._count)}"
        text = msgspec.json.encode({"id": name, "do": move, "with": given}).decode()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[name] = (text, answer, progress)
        try:
            async with asyncio.timeout(within_s):
                await _put(self._socket, text)
                return await answer
        except TimeoutError as error:
            kind = EnvError if move == "step" else EnvUnavailable  # a step may have run: doing it again is another step
            raise kind(f"{move}: no answer in {within_s:g} s") from error
        finally:
            del self._waiting[name]

    async def _read(self) -> None:
        """Until the session cannot be had back; whoever waits then learns it."""
        from websockets.exceptions import ConnectionClosed

        try:
            while True:
                try:
                    self._take(msgspec.json.decode(await self._socket.recv()))
                except ConnectionClosed:
                    await self._reattach()
        except Exception as error:  # noqa: BLE001 - whatever ended the reader is what every waiting request gets
            lost = EpisodeLost(f"the session is lost: {error}")
            for _, answer, _ in self._waiting.values():
                if not answer.done():
                    answer.set_exception(lost)

    def _take(self, frame: Mapping[str, Any]) -> None:
        _, answer, progress = self._waiting.get(str(frame.get("id")), ("", None, None))
        if answer is None or answer.done():
            return  # a heartbeat, or the answer to a request that was given up
        if "event" in frame:
            _tell(progress, frame, answer)
        elif "error" in frame:
            answer.set_exception(refusal(frame["error"]))
        else:
            answer.set_result(frame.get("ok"))

    async def _reattach(self) -> None:
        from websockets.exceptions import ConnectionClosed

        if not self._session:
            raise EpisodeLost("the connection was lost before there was a session")
        try:
            async with asyncio.timeout(self._session["lease_s"]):
                for attempt in itertools.count():
                    try:
                        await self._open_again()
                        break
                    except (EnvUnavailable, ConnectionClosed):
                        await asyncio.sleep(backoff(attempt))
        except TimeoutError as error:
            raise EpisodeLost(f"nobody answered within its lease of {self._session['lease_s']:g} s") from error

    async def _open_again(self) -> None:
        given = {"session": self._session["session"], "lease": self._session["lease"]}
        self._socket = await dial(self._url, self._options)
        await self._socket.send(msgspec.json.encode({"id": "open", "do": "open", "with": given}).decode())
        while (frame := msgspec.json.decode(await self._socket.recv())).get("id") != "open":
            self._take(frame)
        if "error" in frame:
            await self._socket.close()
            raise refusal(frame["error"])
        for text, answer, _ in list(self._waiting.values()):
            if not answer.done():
                await self._socket.send(text)


async def dial(url: str, options: Options) -> ClientConnection:
    from websockets.asyncio.client import connect as open_socket
    from websockets.exceptions import InvalidHandshake, InvalidStatus
    from websockets.typing import Subprotocol

    try:
        return await open_socket(
            url,
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            additional_headers=dict(options.headers),
            open_timeout=options.connect_s,
            ping_interval=options.ping_s,
            ping_timeout=options.ping_s,
            max_size=_MAX_FRAME,
            compression=None,
            proxy=None if urlsplit(url).hostname in _LOOPBACK else True,
        )
    except InvalidStatus as error:
        if error.response.status_code in (401, 403):
            raise EnvError(f"{url} refuses this key", hint="connect(url, key=...)") from error
        raise EnvUnavailable(f"{url} answered {error.response.status_code}") from error
    except (OSError, TimeoutError, InvalidHandshake) as error:
        raise EnvUnavailable(f"no environment can be reached at {url}: {type(error).__name__}") from error


def refusal(told: Mapping[str, Any]) -> EnvError:
    code, message = str(told.get("code")), str(told.get("message"))
    kind = EnvUnavailable if code in _TRY_LATER else EpisodeLost if code == "SESSION_ERROR" else EnvError
    return kind(f"{message} [{code}]")


def backoff(attempt: int) -> float:
    return min(5.0, 0.1 * 2**attempt) * (0.5 + random.random() / 2)


async def _put(socket: ClientConnection, text: str) -> None:
    from websockets.exceptions import ConnectionClosed

    try:
        await socket.send(text)
    except ConnectionClosed:
        return  # the reader reattaches and sends it again


def _result(value: Mapping[str, Any]) -> StepResult:
    return msgspec.convert(value, StepResult)


def _tell(progress: Progress | None, frame: Mapping[str, Any], answer: asyncio.Future[Any]) -> None:
    if progress is None:
        return
    try:
        progress(frame["done"], frame.get("total"), frame.get("message"))
    except Exception as error:  # noqa: BLE001 - the listener's own bug: it is raised where the move was asked for
        answer.set_exception(error)
