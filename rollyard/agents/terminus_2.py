"""terminus-2: Harbor's agent, which types into a tmux. Chat through litellm, no tools: commands are JSON in its text. Its own
program is `terminus_drive.py`, run by the layer's Python inside the sandbox."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from rollyard.agents.events import Fields, decode, plain_text
from rollyard.core.agent import Addition, Agent, Launch, LayerSpec
from rollyard.core.events import AgentEvent

_PROGRAM = "{home}/.terminus/drive.py"
_TASK = "{home}/.terminus/instruction.md"
_LOGS = "{home}/.terminus/logs"


def _config(launch: Launch) -> dict[str, Any]:
    return {_PROGRAM: files("rollyard.inside").joinpath("terminus_drive.py").read_bytes()}


def _events(line: str, before: str) -> Iterator[AgentEvent]:
    event = decode(line)
    if event["type"] == "done":
        yield AgentEvent(kind="done", ok=event["ok"], text=event["text"])
    elif event["type"] == "step" and event["step"]["source"] == "agent":
        yield from _step(event["step"])


def _step(step: Fields) -> Iterator[AgentEvent]:
    if step.get("reasoning_content"):
        yield AgentEvent(kind="reasoning", text=step["reasoning_content"])
    yield AgentEvent(kind="assistant", text=plain_text(step.get("message")))
    for call in step.get("tool_calls") or []:
        name, arguments = call["function_name"], call.get("arguments") or {}
        yield AgentEvent(kind="tool_call", tool=name, call_id=call["tool_call_id"], fields=arguments)
    for result in (step.get("observation") or {}).get("results") or []:
        yield AgentEvent(
            kind="tool_result", call_id=result.get("source_call_id"), text=plain_text(result.get("content"))
        )


agent = Agent(
    name="terminus-2",
    version="0.24.0",
    summary="Terminus 2 of Harbor",
    layer=LayerSpec(pip=("harbor==0.24.0", "litellm==1.106.2"), python="3.12"),
    check=("{prefix}/bin/python3", "-c", "import harbor"),
    argv=("{prefix}/bin/python3", _PROGRAM, _TASK, _LOGS),
    env={
        "HOSTED_VLLM_API_KEY": "{key}",
        "HOSTED_VLLM_API_BASE": "{base_url}",
        "TERMINUS_MODEL": "hosted_vllm/{model}",
        "TERMINUS_CONTEXT": "{context_window}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "SHELL": "/bin/bash",
    },
    files={_TASK: "{instruction}"},
    wires={"chat": Addition()},
    artifacts=(f"{_LOGS}/*",),
    needs_isolation="landlock",
    says_done=True,
    acts_by="keystrokes",
    off=("price map fetch", "terminal recording"),
    config=_config,
    events=_events,
)
