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
from typing import Any, NamedTuple, Protocol, Self, cast
from urllib.parse import urlsplit, urlunsplit

import msgspec

from rollyard.core.errors import ConfigError, EnvError, EnvUnavailable, EpisodeLost
from rollyard.core.ids import new_id
from rollyard.envs.env import StepResult
from rollyard.net.websocket_client import Lost, Socket
from rollyard.net.websocket_client import dial as open_socket

SUBPROTOCOL = "rollyard.v1"
_TRY_LATER = frozenset(("CAPACITY_REACHED", "FACTORY_ERROR"))


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`timeout_s`: of one move; `queue_s`: how long to wait for a place; `lease_s`: how long ours keep a lost session."""

    timeout_s: float = 600.0
    queue_s: float = 60.0
    connect_s: float = 10.0
    lease_s: float = 60.0
    ping_s: float = 20.0
    headers: Mapping[str, str] = {}


Progress = Callable[[float, float | None, str | None], None]


class EnvWire(Protocol):
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
        raise ConfigError(f"{url!r} is not the address of an environment", hint="give http://host:port")
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/").removesuffix("/ws") + "/ws", parts.query, ""))


class RemoteEnv:
    """The methods of `Env`, over a socket. `agent_key` opens `/mcp` for the agent of this session, where the server has keys."""

    def __init__(self, url: str, options: Options) -> None:
        self.url = url
        self.agent_key: str | None = None
        self._options = options
        self._wire: EnvWire | None = None

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

    async def __aexit__(self, *_: object) -> None:
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
    def __init__(self, url: str, options: Options, socket: Socket) -> None:
        self._url = url
        self._options = options
        self._socket = socket
        self._waiting: dict[str, Waiting] = {}
        self._session: dict[str, Any] = {}
        self._seen: list[str] = []  # answers that arrived since the last request said so
        self._name = new_id("c")[-4:]  # only this client speaks to its session: short is enough
        self._count = itertools.count()
        self._lost: EpisodeLost | None = None
        self._reattaching: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        socket.listen(self._take, self._cut)

    async def open(self) -> str | None:
        options = self._options
        given = {"lease_s": options.lease_s, "deadline_s": options.timeout_s, "queue_s": options.queue_s}
        try:
            self._session = await self._send("open", given, options.queue_s + options.connect_s)
        except BaseException:  # cancelled too: the socket has no other owner
            await self._end()
            raise
        return self._session.get("agent_key")

    @property
    def lost(self) -> bool:
        return self._lost is not None

    async def ask(self, move: str, given: Mapping[str, Any], progress: Progress | None = None) -> Any:
        return await self._send(move, given, self._options.timeout_s + self._options.connect_s, progress)

    async def aclose(self) -> None:
        try:
            if self._reattaching is None:
                await self._send("close", {}, self._options.connect_s)
        except EnvError:
            pass  # gone already: its lease ends it
        await self._end()

    async def _end(self) -> None:
        self._give_up(self._lost or EpisodeLost("the environment is closed"))
        if self._reattaching is not None:
            self._reattaching.cancel()
        if self._timer is not None:
            self._timer.cancel()
        await self._socket.close()

    async def _send(
        self, move: str, given: Mapping[str, Any], within_s: float, progress: Progress | None = None
    ) -> Any:
        if self._lost is not None:
            raise self._lost
        name = f"{self._name}.{next(self._count)}"
        text = _encode({"id": name, "do": move, "with": given, "seen": self._seen})
        self._seen.clear()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        due = loop.time() + within_s
        self._waiting[name] = Waiting(text, answer, progress, move, within_s, due)
        if self._timer is None or self._timer.when() > due:
            self._set_timer(due)
        try:
            self._socket.send(text)  # a socket that is gone takes it: it is sent again after the reattach
            return await answer
        finally:
            del self._waiting[name]

    def _set_timer(self, due: float) -> None:
        """Requests are many and nearly all are answered early: one timer outlives them and looks at those it finds waiting."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._check_deadlines)

    def _check_deadlines(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for waiting in self._waiting.values():
            if waiting.due <= now and not waiting.answer.done():
                waiting.answer.set_exception(_timeout_error(waiting.move, waiting.within_s))
        due = min((w.due for w in self._waiting.values() if not w.answer.done()), default=None)
        if due is not None:
            self._set_timer(due)

    def _take(self, text: bytes) -> None:
        frame = _decode(text)
        if frame.id is None:
            return  # a heartbeat
        if frame.event is None:
            self._seen.append(frame.id)
        waiting = self._waiting.get(frame.id)
        if waiting is None or waiting.answer.done():
            return  # the answer to a request that was given up
        if frame.event is not None:
            _tell(waiting, frame)
        elif frame.error is not None:
            waiting.answer.set_exception(refusal(frame.error))
        else:
            waiting.answer.set_result(frame.ok)

    def _cut(self) -> None:
        """The socket is gone. Until the session cannot be had back, requests wait; then they fail."""
        if self._lost is None:
            self._reattaching = asyncio.get_running_loop().create_task(self._reattach())

    async def _reattach(self) -> None:
        try:
            if not self._session:
                raise EpisodeLost("the connection was lost before there was a session")
            async with asyncio.timeout(self._session["lease_s"]):
                for attempt in itertools.count():
                    try:
                        self._socket = await self._reopen()
                        break
                    except (EnvUnavailable, Lost):
                        await asyncio.sleep(backoff(attempt))
            self._reattaching = None
            self._socket.listen(self._take, self._cut)
            for waiting in list(self._waiting.values()):
                if not waiting.answer.done():
                    self._socket.send(waiting.text)
        except TimeoutError:
            self._give_up(
                EpisodeLost(f"the server did not answer within the session's lease of {self._session['lease_s']:g} s")
            )
        except Exception as error:  # noqa: BLE001 - whatever ended the session is what every waiting request gets
            self._give_up(EpisodeLost(f"the session is lost: {error}"))

    async def _reopen(self) -> Socket:
        given = {"session": self._session["session"], "lease": self._session["lease"]}
        socket = await dial(self._url, self._options)
        socket.send(msgspec.json.encode({"id": "open", "do": "open", "with": given}))
        while (frame := _decode(await socket.recv())).id != "open":
            continue  # a heartbeat
        if frame.error is not None:
            await socket.close()
            raise refusal(frame.error)
        return socket

    def _give_up(self, lost: EpisodeLost) -> None:
        self._lost = lost
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(lost)


class Waiting(NamedTuple):
    text: bytes
    answer: asyncio.Future[Any]
    progress: Progress | None
    move: str
    within_s: float
    due: float


class Answered(msgspec.Struct, frozen=True):
    """A frame of the server's."""

    id: str | None = None
    ok: Any = None
    error: dict[str, Any] | None = None
    event: str | None = None
    done: float = 0.0
    total: float | None = None
    message: str | None = None


_decode = msgspec.json.Decoder(Answered).decode
_encode = msgspec.json.Encoder().encode


async def dial(url: str, options: Options) -> Socket:
    return await open_socket(
        url,
        subprotocol=SUBPROTOCOL,
        headers=options.headers,
        connect_s=options.connect_s,
        ping_s=options.ping_s,
    )


def refusal(answer: Mapping[str, Any]) -> EnvError:
    code, message = str(answer.get("code")), str(answer.get("message"))
    kind = EnvUnavailable if code in _TRY_LATER else EpisodeLost if code == "SESSION_ERROR" else EnvError
    return kind(f"{message}{_details(answer.get('errors'))} [{code}]")


def _details(errors: Any) -> str:
    """What OpenEnv's servers say about each field of a request that they refuse."""
    if not isinstance(errors, list):
        return ""
    found = [error for error in cast("list[Any]", errors) if isinstance(error, dict)]
    said = [f"{'.'.join(str(part) for part in error.get('loc') or ())}: {error.get('msg')}" for error in found]
    return f" ({'; '.join(said)})" if said else ""


def backoff(attempt: int) -> float:
    return min(5.0, 0.1 * 2**attempt) * (0.5 + random.random() / 2)


def _result(value: Mapping[str, Any]) -> StepResult:
    return msgspec.convert(value, StepResult)


def _tell(waiting: Waiting, frame: Answered) -> None:
    if waiting.progress is None:
        return
    try:
        waiting.progress(frame.done, frame.total, frame.message)
    except Exception as error:  # noqa: BLE001 - the listener's own bug: it is raised where the move was asked for
        waiting.answer.set_exception(error)


def _timeout_error(move: str, within_s: float) -> EnvError:
    kind = EnvError if move == "step" else EnvUnavailable  # a step may have run: doing it again is another step
    return kind(f"{move}: no answer in {within_s:g} s")
