"""One MCP server at one URL: its connection, its list of tools, a call.

The connection lives in a task of its own: the `mcp` package ties it to the task that opened it, while callers here may come
from any task, the blocking facade's included. A connection that broke is made anew by the next request. Every failure is
told apart once, here: `EnvUnavailable` where asking again may help, `EnvError` where it cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from rollyard.core.errors import EnvError, EnvUnavailable
from rollyard.core.message import ToolSpec
from rollyard.net.paging import each_page
from rollyard.tools.answers import NO_IMAGE, ToolAnswer, invalid, read
from rollyard.tools.mcp_extra import require_mcp
from rollyard.tools.toolset import CALL_KEY

T = TypeVar("T")
_CLOSE_S = 5.0
_EVENT_BYTES = 64 * 2**20  # a screenshot is one event
_FINAL = (400, 401, 403)  # statuses that the same request gets again
_ABSENT = (404, 405)
_UNSERVED = (429, 503)  # the server says itself that it did nothing
_MAY_HAVE_RUN = "the tool may have run, and is not called again"


class EndpointAbsent(EnvUnavailable):
    """Nothing answers to this address, on a server that answers; one that is starting may yet."""


class Endpoint:
    """`timeout_s` bounds every request, the connection's own included."""

    def __init__(self, url: str, key: str | None = None, *, timeout_s: float = 60.0) -> None:
        self.url, self.timeout_s = url, timeout_s
        self._key = key
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Any] | None = None
        self._stop = asyncio.Event()
        self._keyed: set[str] = set()  # tools whose server knows a call by its key
        self._status: int | None = None  # of the last HTTP response that was a refusal

    async def list(self) -> list[ToolSpec]:
        async def read(cursor: str | None) -> tuple[list[Any], str | None]:
            page = await self._ask(lambda client: client.list_tools(cursor=cursor))
            self._keyed |= {tool.name for tool in page.tools if (tool.meta or {}).get(CALL_KEY)}
            return page.tools, page.next_cursor

        return [
            ToolSpec(tool.name, tool.description or "", msgspec.json.encode(tool.input_schema).decode())
            async for tool in each_page(read)
        ]

    async def call(self, name: str, arguments: Mapping[str, Any], *, key: str) -> ToolAnswer:
        """`key` names the call. A server of ours answers it once however often it comes, so that one whose connection broke may
        be sent again; to any other server it is not."""
        from pydantic import ValidationError

        keyed = name in self._keyed
        meta = {CALL_KEY: key} if keyed else None
        try:
            result = await self._ask(
                lambda client: client.call_tool(name, dict(arguments), meta=meta), repeatable=keyed
            )
        except ValidationError as error:
            return _not_valid(error)
        except RuntimeError as error:  # the result does not keep to the tool's own output schema
            return invalid([str(error)])
        return read(result.content, result.structured_content, is_error=bool(result.is_error))

    async def aclose(self) -> None:
        self._stop.set()
        task, self._task, self._ready = self._task, None, None
        if task is not None:
            _, late = await asyncio.wait([task], timeout=_CLOSE_S)
            for one in late:
                one.cancel()

    async def _ask(self, ask: Callable[[Any], Awaitable[T]], *, repeatable: bool = True) -> T:
        """What is not `repeatable` is `EnvUnavailable` only where the server surely did nothing: a call whose connection broke
        on the way is never sent again."""
        sent = False
        require_mcp(f"calling the tools at {self.url}")
        from mcp.shared.exceptions import MCPError
        from pydantic import ValidationError

        try:
            async with asyncio.timeout(self.timeout_s):
                client = await self._client()
                sent = not repeatable
                return await ask(client)
        except TimeoutError as error:
            raise EnvError(f"{self.url} did not answer within {self.timeout_s:g} s") from error
        except (ValidationError, RuntimeError):
            raise  # an answer came, and asking again would run the tool again
        except MCPError as error:
            raise await self._to_error(error, sent) from error
        except Exception as error:  # what the SDK's transports raise has no common base
            await self.aclose()
            if sent and type(_leaf(error)).__name__ not in ("ConnectError", "ConnectTimeout"):
                raise EnvError(f"{self.url}: {_cause(error)}: {_MAY_HAVE_RUN}") from error
            raise EnvUnavailable(f"{self.url}: {_cause(error)}") from error

    async def _to_error(self, error: Any, sent: bool) -> EnvError:
        """A JSON-RPC error is the server's word, except where the transport made it up for a response it could not use."""
        from mcp_types import CONNECTION_CLOSED

        status, self._status = self._status, None
        if status is not None:
            await self.aclose()
            kind = EnvError if status in _FINAL else EndpointAbsent if status in _ABSENT else EnvUnavailable
            if sent and kind is EnvUnavailable and status not in _UNSERVED:
                return EnvError(f"{self.url}: HTTP {status}: {_MAY_HAVE_RUN}")
            return kind(f"{self.url}: HTTP {status}")
        if error.code == CONNECTION_CLOSED:
            await self.aclose()
            kind = EnvError if sent else EnvUnavailable
            return kind(f"{self.url}: the connection was lost{f': {_MAY_HAVE_RUN}' if sent else ''}")
        return EnvError(f"{self.url}: {error.message}")

    async def _client(self) -> Any:
        if self._task is None or self._task.done() or self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._stop = asyncio.Event()
            self._task = asyncio.create_task(self._run(self._ready, self._stop))
        return await asyncio.shield(self._ready)

    async def _run(self, ready: asyncio.Future[Any], stop: asyncio.Event) -> None:
        try:
            client_type, transport, http_type = await asyncio.to_thread(_import)
            headers = {} if self._key is None else {"authorization": f"Bearer {self._key}"}
            http = http_type(
                headers=headers, timeout=self.timeout_s, trust_env=False, event_hooks={"response": [self._observe]}
            )
            wire = transport(self.url, http_client=http, max_sse_event_size=_EVENT_BYTES)
            async with http, client_type(wire) as client:
                self._status = None
                ready.set_result(client)
                await stop.wait()
        except Exception as error:  # noqa: BLE001 - who waits for the connection gets it; one lost later ends its requests
            if not ready.done():
                ready.set_exception(_leaf(error))
                ready.exception()  # seen, even if the waiter has gone

    async def _observe(self, response: Any) -> None:
        if response.status_code >= 400 and response.request.method == "POST":
            self._status = response.status_code


def _import() -> tuple[Any, Any, Any]:
    """They take a second: not on the event loop."""
    import httpx2
    from mcp.client.client import Client
    from mcp.client.streamable_http import streamable_http_client

    return Client, streamable_http_client, httpx2.AsyncClient


def _leaf(error: BaseException) -> BaseException:
    """The first real error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _cause(error: BaseException) -> str:
    error = _leaf(error)
    words = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _not_valid(error: Any) -> ToolAnswer:
    """What was wrong with a result, by place; an image whose data is null is the case that tools really send."""
    problems = error.errors(include_url=False)
    if any("data" in problem["loc"] and problem["input"] is None for problem in problems):
        return ToolAnswer(value={"error": NO_IMAGE}, text=NO_IMAGE, is_error=True)
    return invalid(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems[:5])
