"""OpenHands CLI: chat through litellm, without streaming; Python 3.12 or newer."""

from __future__ import annotations

from collections.abc import Iterator

from rollyard.agents.events import Fields, decode, plain_text
from rollyard.core.agent import Addition, Agent, LayerSpec, Mcp, ToolUse
from rollyard.core.events import AgentEvent


def _events(line: str, before: str) -> Iterator[AgentEvent]:
    if line == "Agent finished":
        yield AgentEvent(kind="done", ok=True)
        return
    event = decode(line)
    match event["kind"]:
        case "MessageEvent" if event["source"] == "agent":
            message: Fields = event["llm_message"]
            yield from _thoughts(message)
            yield AgentEvent(kind="assistant", text=plain_text(message["content"]))
        case "ActionEvent":
            yield from _thoughts(event)
            tool, call = event["tool_name"], event["tool_call_id"]
            yield AgentEvent(kind="tool_call", tool=tool, call_id=call, fields=event.get("action") or {})
        case "ObservationEvent":
            result: Fields = event["observation"]
            text, failed = plain_text(result.get("content")), bool(result.get("is_error"))
            tool, call = event["tool_name"], event["tool_call_id"]
            yield AgentEvent(kind="tool_result", tool=tool, call_id=call, text=text, fields={"is_error": failed})
        case "AgentErrorEvent":
            yield AgentEvent(kind="error", text=event.get("error") or "")
        case "ConversationErrorEvent":
            yield AgentEvent(kind="error", text=event.get("detail") or event["code"])
            yield AgentEvent(kind="done", ok=False, text=event["code"])
        case _:
            return


def _thoughts(event: Fields) -> Iterator[AgentEvent]:
    if event.get("reasoning_content"):
        yield AgentEvent(kind="reasoning", text=event["reasoning_content"])


agent = Agent(
    name="openhands",
    version="1.16.0",
    summary="OpenHands CLI",
    layer=LayerSpec(pip=("openhands==1.16.0",), python="3.12"),
    check=("{prefix}/bin/openhands", "--version"),
    argv=(
        "{prefix}/bin/openhands",
        "--headless",
        "--json",
        "--always-approve",
        "--override-with-envs",
        "--task={instruction}",
    ),
    env={
        "LLM_MODEL": "hosted_vllm/{model}",
        "LLM_BASE_URL": "{base_url}",
        "LLM_API_KEY": "{key}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENHANDS_SUPPRESS_BANNER": "1",
        "SHELL": "/bin/bash",  # its terminal is a tmux, which would take the login shell of a user who has none
    },
    wires={"chat": Addition()},
    mcp=Mcp(style="openhands", file="{home}/.openhands/mcp.json", secret="${LLM_API_KEY}"),  # noqa: S106 - a reference
    artifacts=("{home}/.openhands/conversations/*",),
    needs_isolation="landlock",
    subagent=ToolUse(
        tool="task",
        args={"description": "part", "prompt": "{instruction}", "subagent_type": "general-purpose"},
    ),
    says_done=True,
    asks_for=("github.com", "py*.org"),  # its public skills, its newest version
    off=("price map fetch", "banner"),
    events=_events,
)
