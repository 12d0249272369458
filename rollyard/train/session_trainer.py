"""The trainer's half of a session in `interception_gate`: it takes the agent's model calls, answers them, and offers tools.

It is an object of its own with a key of its own: the session is the environment's side, and no key serves two. A trainer in
another process takes the same calls at `url` with `key` (`GET /calls`, `POST /calls/ID/reply`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from rollyard import sync
from rollyard.core.call import Call, Reply
from rollyard.core.errors import ConfigError, ReplyRefused
from rollyard.core.message import ToolSpec
from rollyard.gate.rollout_json import chat_request
from rollyard.policy.held_call import HeldCall
from rollyard.policy.queue import Queue
from rollyard.tools import ToolAnswer, Toolset
from rollyard.tools.bridge import bridge
from rollyard.tools.mcp_extra import require_mcp

Handler = Callable[[dict[str, Any]], Awaitable[Any]]
_ANYTHING: dict[str, Any] = {"type": "object", "properties": {}}


class SessionTrainer:
    """`next_request` and `deliver` may be awaited on any loop. `rollout_id` names whose calls these are."""

    def __init__(self, queue: Queue, rollout_id: str, tools: Toolset) -> None:
        self.rollout_id = rollout_id
        self.url: str | None = None  # once the session's gate listens
        self.key: str | None = None
        self._calls = queue.session(rollout_id)
        self._tools = tools
        self._held: dict[str, HeldCall] = {}

    async def next_request(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The agent's next call: `request_id`, `rollout_id`, `messages`, `tools`, `model`, `stream`, `sampling`, `prompt_ids` and
        its `body` as the agent sent it. None once the agent has ended; `TimeoutError` after `timeout_s`."""
        held = await self._calls.next_request(timeout_s)
        if held is None:
            return None
        self._held = {name: one for name, one in self._held.items() if one.open}
        self._held[held.call.id] = held
        return describe_call(held.call)

    async def deliver(self, intercept: Mapping[str, Any], response: Reply | str | Mapping[str, Any]) -> None:
        """Answers it, once, with a chat completion as a mapping (its token ids and logprobs are kept), with text, or with a
        `Reply`."""
        await self._calls.deliver(self._find(intercept), response)

    async def reply(self, intercept: Mapping[str, Any], *args: Any, **fields: Any) -> None:
        """Answers it with what `HeldCall.reply` takes: sampled ids and their logprobs, the version that sampled them."""
        await self._find(intercept).reply(*args, **fields)

    def _find(self, intercept: Mapping[str, Any]) -> HeldCall:
        held = self._held.get(intercept.get("request_id", ""))
        if held is None:
            raise ReplyRefused(f"no call {intercept.get('request_id')!r} was taken from this session")
        return held

    def add_tool(self, name: str, handler: Handler, definition: Mapping[str, Any] | None = None) -> None:
        """`definition` is a chat API tool, or its `function` alone; without one the tool takes no arguments. What the handler
        raises reaches the agent as an id, and the log as it is."""
        given = dict(definition or {})
        given = dict(given.get("function", given))
        if given.get("name", name) != name:
            raise ConfigError(f"the definition is of tool {given['name']!r}, not of {name!r}")
        schema = given.get("parameters", given.get("input_schema", _ANYTHING))
        spec = ToolSpec(name, str(given.get("description", "")), msgspec.json.encode(schema).decode())
        require_mcp("a session's tool handler")

        async def ask(_: str, arguments: Mapping[str, Any]) -> ToolAnswer:
            found = await handler(dict(arguments))
            text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
            return ToolAnswer(value=found, text=text)

        self._tools.add(bridge(spec, ask))
        sync.wait(self._tools.ready())  # no agent waits for a tool server that is slow to come


def describe_call(call: Call) -> dict[str, Any]:
    return {
        "request_id": call.id,
        "rollout_id": call.rollout_id,
        "model": call.model,
        "stream": call.stream,
        **chat_request(call),
        "sampling": {name: value for name, value in msgspec.to_builtins(call.wanted).items() if value is not None},
        "prompt_ids": None if call.prompt_ids is None else list(call.prompt_ids),
        "body": msgspec.json.decode(call.raw) if call.raw else {},
    }
