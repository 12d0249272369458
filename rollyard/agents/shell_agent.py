"""shell-agent: our own loop (`inside/agent_loop.py`), for examples and tiny models. Needs python3 in the image, no layer. Its
sibling over tools of MCP servers is `tool_agent`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from rollyard.agents.events import decode
from rollyard.core.agent import Addition, Agent, Launch, Resume
from rollyard.core.events import AgentEvent

_PROGRAM = "{home}/.shell-agent/agent_loop.py"
PROMPT = "{home}/.shell-agent/prompt.md"
_TASK = "{home}/.shell-agent/instruction.md"


def _config(launch: Launch) -> dict[str, Any]:
    return {_PROGRAM: files("rollyard.inside").joinpath("agent_loop.py").read_bytes()}


def _events(line: str, before: str) -> Iterator[AgentEvent]:
    event = decode(line)
    if event["type"] == "message":
        message = event["message"]
        if message.get("reasoning_content"):
            yield AgentEvent(kind="reasoning", text=message["reasoning_content"])
        if message.get("content"):
            yield AgentEvent(kind="assistant", text=message["content"])
        for call in message.get("tool_calls") or []:
            function = call["function"]
            fields = {"arguments": function["arguments"]}
            yield AgentEvent(kind="tool_call", tool=function["name"], call_id=call["id"], fields=fields)
    elif event["type"] == "result":
        yield AgentEvent(kind="tool_result", tool=event["tool"], call_id=event["id"], text=event["text"])
    elif event["type"] == "done":
        yield AgentEvent(kind="done", ok=event["ok"], text=event["text"])


# -S: it uses the standard library alone, and what an image adds to every start may cost more than the start
_ARGV = ("python3", "-I", "-S", _PROGRAM, PROMPT, _TASK)

agent = Agent(
    name="shell-agent",
    version="1",
    summary="our own: one loop, one shell tool, small prompts",
    check=("python3", "--version"),
    argv=_ARGV,
    env={"ROLLYARD_KEY": "{key}", "AGENT_LOOP_URL": "{base_url}", "AGENT_LOOP_MODEL": "{model}"},
    files={PROMPT: "Use the shell tool. Say done when done.", _TASK: "{instruction}"},
    wires={"chat": Addition()},
    options={
        "system_prompt": Addition(files={PROMPT: "{system_prompt}"}),
        "max_tokens": Addition(env={"AGENT_LOOP_MAX_TOKENS": "{max_tokens}"}),
    },
    needs_isolation="landlock",
    says_done=True,
    resume=Resume(argv=_ARGV, env={"AGENT_LOOP_RESUME": "1"}),
    config=_config,
    events=_events,
)
