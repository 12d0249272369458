"""`Toolset`: tools as an MCP server over streamable HTTP, in the form of an ASGI application.

A gate mounts it at `/mcp` for one rollout and puts that rollout's id into `scope["state"]`; handlers get it as their
context. Only the tools that the host gave it exist: there is nothing to look up by a name that the agent chose. What an
agent that vanishes leaves behind ends with the toolset. The `mcp` package is imported by the first request, in a thread: it
takes a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError
from rollyard.core.ids import new_id
from rollyard.core.log import Log
from rollyard.core.sequences import as_tuple
from rollyard.tools.mcp_extra import require_mcp
from rollyard.tools.tool import Tool, ToolContext, ToolError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_log = Log("rollyard.tools")
_CLOSE_S = 5.0
_CANCELLED = -32800
_KEPT = 1024  # answers of calls that came with a key
_GRACE_S = 3.0  # for a caller that lost the connection to ask again by its key
CALL_KEY = "rollyard/call"  # in `_meta` of a call: the same key is the same call; in `_meta` of a tool: it honours them


class KeyedCall:
    """A call that runs or has run, and how many wait for it."""

    def __init__(self, task: asyncio.Task[tuple[Any, bool]]) -> None:
        self.task, self.waiting = task, 0

    def cancel_if_alone(self) -> None:
        if not self.waiting:
            self.task.cancel()


class Toolset:
    """`allow` narrows the tools to those names; a name that no tool has is an error. Make one for each session: closing
    the session closes it."""

    def __init__(self, tools: Iterable[Tool], *, allow: Iterable[str] | None = None, name: str = "rollyard") -> None:
        by_name: dict[str, Tool] = {}
        for tool in as_tuple(tools, "tools"):
            _put(by_name, tool)
        if allow is not None:
            wanted = as_tuple(allow, "allow")
            if missing := [n for n in wanted if n not in by_name]:
                raise ConfigError(f"no tool named {', '.join(missing)}", hint=f"known: {', '.join(by_name) or 'none'}")
            by_name = {n: by_name[n] for n in wanted}
        self.name = name
        self.tools = by_name
        self._ready: asyncio.Future[Any] | None = None  # the running MCP manager
        self._runner: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._running: set[asyncio.Task[tuple[Any, bool]]] = set()
        self._keyed: dict[tuple[str, str], KeyedCall] = {}

    def add(self, tool: Tool) -> None:
        """One more; an agent that has asked for the list already may not ask again."""
        _put(self.tools, tool)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        manager = await self._manager()
        await manager.handle_request(scope, receive, _without_cancelled(send))

    async def ready(self) -> None:
        """Returns when requests are answered at once; for callers whose agents do not wait for slow tool servers."""
        await self._manager()

    async def aclose(self) -> None:
        self._stop.set()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=_CLOSE_S)
        if self._runner is not None:
            _, late = await asyncio.wait([self._runner], timeout=_CLOSE_S)
            for task in late:
                task.cancel()

    async def call_apart(
        self, name: str, arguments: dict[str, Any], context: ToolContext, key: str | None = None
    ) -> tuple[Any, bool]:
        """`call` in a task of its own. A caller who is cancelled cancels it once and goes; what the handler then has to clean
        up it can await in peace, which it could not inside a cancelled scope of the MCP server. A `key` names the call: asked
        for again it is not run again, and what its caller lost with the connection is there for a moment longer."""
        known = self._keyed.get((context.rollout_id, key)) if key is not None else None
        if known is None:
            known = KeyedCall(asyncio.get_running_loop().create_task(self.call(name, arguments, context)))
            self._running.add(known.task)
            known.task.add_done_callback(self._running.discard)
            if key is not None:
                while len(self._keyed) >= _KEPT:
                    del self._keyed[next(iter(self._keyed))]
                self._keyed[context.rollout_id, key] = known
        known.waiting += 1
        try:
            return await asyncio.shield(known.task)
        except asyncio.CancelledError:
            if key is None:
                known.task.cancel()
            else:
                asyncio.get_running_loop().call_later(_GRACE_S, known.cancel_if_alone)
            raise
        finally:
            known.waiting -= 1

    async def call(self, name: str, arguments: dict[str, Any], context: ToolContext) -> tuple[Any, bool]:
        """(what to show the agent, whether it is an error)."""
        tool = self.tools.get(name)
        if tool is None:
            return f"there is no tool named {name!r}", True
        try:
            async with asyncio.timeout(tool.timeout_s):
                return await tool(arguments, context), False
        except ToolError as error:
            return error.message, True
        except TimeoutError:
            return f"{name} took longer than {tool.timeout_s:g} s", True
        except Exception as error:  # noqa: BLE001 - a handler's bug is the trainer's business: the agent gets an id, the log the rest
            incident = new_id("err")
            _log.error("%s rollout=%s tool %s failed", incident, context.rollout_id, name, exc_info=error)
            return f"{name} failed ({incident})", True

    async def _manager(self) -> Any:
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._runner = asyncio.get_running_loop().create_task(self._run(self._ready))
        return await asyncio.shield(self._ready)

    async def _run(self, ready: asyncio.Future[Any]) -> None:
        """The manager's task group lives in this task from first use to close."""
        try:
            require_mcp("serving tools to agents")
            from rollyard.tools.mcp_server import manager_of

            manager = await asyncio.to_thread(manager_of, self)
            async with manager.run():
                ready.set_result(manager)
                await self._stop.wait()
        except Exception as error:  # told to the caller that waits for it, then raised here
            if not ready.done():
                ready.set_exception(error)
            raise


def _put(tools: dict[str, Tool], tool: Tool) -> None:
    if tool.name in tools:
        raise ConfigError(f"two tools are named {tool.name!r}")
    tools[tool.name] = tool


def _without_cancelled(send: Send) -> Send:
    """MCP gives a cancelled request no response. The package ends its stream with an error all the same: a comment stands
    there instead, and the stream ends after it."""

    async def quiet(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body" and _is_cancelled(message.get("body", b"")):
            message = {**message, "body": b": cancelled\r\n\r\n"}
        await send(message)

    return quiet


def _is_cancelled(event: bytes) -> bool:
    if b"-32800" not in event:
        return False
    for line in event.splitlines():
        if line.startswith(b"data:"):
            try:
                said: Any = msgspec.json.decode(line[5:])
            except BAD_JSON:
                return False
            return (
                isinstance(said, dict)
                and isinstance(said.get("error"), dict)
                and said["error"].get("code") == _CANCELLED
            )
    return False
