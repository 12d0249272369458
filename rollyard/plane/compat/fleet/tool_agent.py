"""`tool-agent`: what a job runs where its client names no harness. Our loop (`inside/agent_loop.py`) over its tools."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from rollyard.agents.events import decode
from rollyard.core.agent import Addition, Agent, Launch, Mcp
from rollyard.core.events import AgentEvent

_PROGRAM = "{home}/.tool-agent/agent_loop.py"
_PROMPT = "{home}/.tool-agent/prompt.md"
_TASK = "{home}/.tool-agent/instruction.md"
_KEY_IN_FILE = "${ROLLYARD_KEY}"  # the loop fills it in from its environment
_SERVERS = "{home}/.tool-agent/mcp.json"


def _config(launch: Launch) -> dict[str, Any]:
    return {_PROGRAM: files("rollyard.inside").joinpath("agent_loop.py").read_bytes()}


def _events(line: str, before: str) -> Iterator[AgentEvent]:
    event = decode(line)
    if event["type"] == "message":
        message = event["message"]
        if message.get("content"):
            yield AgentEvent(kind="assistant", text=message["content"])
        for call in message.get("tool_calls") or []:
            asked = call["function"]
            fields = {"arguments": asked["arguments"]}
            yield AgentEvent(kind="tool_call", tool=asked["name"], call_id=call["id"], fields=fields)
    elif event["type"] == "result":
        yield AgentEvent(kind="tool_result", tool=event["tool"], call_id=event["id"], text=event["text"])
    elif event["type"] == "done":
        yield AgentEvent(kind="done", ok=event["ok"], text=event["text"])


tool_agent = Agent(
    name="tool-agent",
    version="1",
    summary="our own: one loop over the tools of MCP servers",
    check=("python3", "--version"),
    argv=("python3", "-I", _PROGRAM, _PROMPT, _TASK, _SERVERS),
    env={"ROLLYARD_KEY": "{key}", "AGENT_LOOP_URL": "{base_url}", "AGENT_LOOP_MODEL": "{model}"},
    files={_PROMPT: "Do the task with the tools. Say done when done.", _TASK: "{instruction}"},
    wires={"chat": Addition()},
    options={"system_prompt": Addition(files={_PROMPT: "{system_prompt}"})},
    mcp=Mcp(style="claude", file=_SERVERS, secret=_KEY_IN_FILE, transports=("http",)),
    says_done=True,
    config=_config,
    events=_events,
)
