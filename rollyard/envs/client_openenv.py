"""The client's side of OpenEnv's wire: one request, one answer, nothing in the envelope that their servers do not know.

A frame without a request is never taken for an answer: between requests it is dropped, and during one only a frame of the
expected type, or an error, ends the wait. A server without a free place says so unasked on a fresh socket: the first request
is then tried again on another one, for as long as `queue_s` says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from rollyard.core.errors import EnvError, EnvUnavailable, EpisodeLost, Unsupported
from rollyard.envs.client import Options, Progress, backoff, dial, refusal
from rollyard.net.websocket_client import Lost, Socket


class OpenEnvWire:
    def __init__(self, url: str, options: Options, socket: Socket) -> None:
        self._url = url
        self._options = options
        self._socket: Socket | None = socket
        self._begun = False
        self._turn = asyncio.Lock()

    @property
    def lost(self) -> bool:
        return self._socket is None

    async def ask(self, move: str, given: Mapping[str, Any], progress: Progress | None = None) -> Any:
        """`progress` hears nothing: this wire has no word for it."""
        if move == "reset":
            known = {k: given[k] for k in ("seed", "episode_id") if given.get(k) is not None}
            return _convert_answer(await self._ask("reset", {**given["options"], **known}, "observation"))
        if move == "step":
            return _convert_answer(await self._ask("step", given["action"], "observation"))
        if move == "state":
            return await self._ask("state", None, "state")
        if move == "tools":
            listed = (await self._rpc("tools/list", {}))["tools"]
            return [_spec(tool) for tool in listed]
        if move == "call":
            return _unwrap_result(
                await self._rpc("tools/call", {"name": given["name"], "arguments": given["arguments"]})
            )
        raise Unsupported(f"OpenEnv's wire has no {move}")

    async def aclose(self) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        socket.send(b'{"type":"close"}')
        await socket.close()

    async def _rpc(self, method: str, params: Mapping[str, Any]) -> Any:
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        answer = await self._ask("mcp", request, "mcp")
        if answer.get("error"):
            raise EnvError(str(answer["error"].get("message")))
        return answer["result"]

    async def _ask(self, kind: str, data: Any, expects: str) -> Any:
        frame = {"type": kind} if data is None else {"type": kind, "data": data}
        text = msgspec.json.encode(frame)
        async with self._turn:
            until = time.monotonic() + self._options.queue_s
            attempt = 0
            while True:
                try:
                    answer = await self._exchange(text, expects)
                    self._begun = True
                    return answer
                except EnvUnavailable:
                    if self._begun or time.monotonic() > until:
                        raise
                attempt += 1
                if self._socket is not None:
                    await self._socket.close()
                await asyncio.sleep(backoff(attempt))
                self._socket = await dial(self._url, self._options)

    async def _exchange(self, text: bytes, expects: str) -> Any:
        socket = self._socket
        if socket is None:
            raise EpisodeLost("the connection to the environment is gone")
        answered = False
        try:
            async with asyncio.timeout(self._options.timeout_s):
                self._drain(socket)
                socket.send(text)
                frame = await _await_answer(socket, expects)
            answered = True
        except TimeoutError as error:
            raise EpisodeLost(f"no answer in {self._options.timeout_s:g} s") from error
        except Lost as error:
            kind = EpisodeLost if self._begun else EnvUnavailable
            raise kind("the environment's server closed the connection") from error
        finally:
            if not answered:  # also when cancelled: a late answer must not meet the next request
                self._socket = None
                await socket.close()
        if frame["type"] == "error":
            raise refusal(frame.get("data") or {})
        return frame.get("data") or {}

    def _drain(self, socket: Socket) -> None:
        """Frames that came unasked. Before the first request, one of them may say that there is no place."""
        while (text := socket.pending()) is not None:
            frame = msgspec.json.decode(text)
            if not self._begun and isinstance(frame, dict) and frame.get("type") == "error":
                raise refusal(frame.get("data") or {})


async def _await_answer(socket: Socket, expects: str) -> dict[str, Any]:
    while True:
        frame = msgspec.json.decode(await socket.recv())
        if isinstance(frame, dict) and frame.get("type") in (expects, "error"):
            return frame


def _convert_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Servers before 0.4 leave metadata out; then there is none."""
    observation: Any = answer.get("observation")
    inner = observation.get("metadata") if isinstance(observation, dict) else None
    info: dict[str, Any] = answer.get("metadata") or inner or {}
    done, cut = bool(answer.get("done")), bool(info.get("truncated"))
    reward = answer.get("reward")
    return {
        "observation": observation,
        "reward": None if reward is None else float(reward),
        "terminated": done and not cut,
        "truncated": cut,
        "info": info,
    }


def _spec(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object"}
    return {"name": tool["name"], "description": tool.get("description") or "", "input_schema": schema}


def _unwrap_result(result: Any) -> dict[str, Any]:
    """The value inside FastMCP's result: `data`, else the structured result, else the text."""
    if not isinstance(result, dict):
        return {"value": result, "failed": False}
    failed = bool(result.get("is_error") or result.get("isError"))
    content: list[Any] = result.get("content") or []
    text = "\n".join(part["text"] for part in content if isinstance(part, dict) and part.get("text") is not None)
    structured: Any = result.get("structured_content") or result.get("structuredContent")
    if failed or (result.get("data") is None and structured is None):
        return {"value": text, "failed": failed}
    if result.get("data") is not None:
        return {"value": result["data"], "failed": False}
    return {"value": structured.get("result", structured), "failed": False}
