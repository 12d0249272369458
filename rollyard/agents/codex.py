"""Codex: Responses only, and a 429 ends it at once. Its stdin must be closed: a pipe would become part of the prompt."""

from __future__ import annotations

from collections.abc import Iterator

from rollyard.agents.events import Fields, decode, plain_text
from rollyard.core.agent import Addition, Agent, LayerSpec, Mcp, Resume, ToolUse
from rollyard.core.events import AgentEvent

CONFIG = "{home}/.codex/config.toml"


def _events(line: str, before: str) -> Iterator[AgentEvent]:
    event = decode(line)
    kind = event["type"]
    if kind in ("item.started", "item.completed"):
        yield from _item(event["item"], finished=kind == "item.completed")
    elif kind == "error":
        yield AgentEvent(kind="error", text=event["message"])
    elif kind == "turn.completed":
        yield AgentEvent(kind="usage", fields=event.get("usage") or {})
        yield AgentEvent(kind="done", ok=True)
    elif kind == "turn.failed":
        yield AgentEvent(kind="done", ok=False, text=event["error"]["message"])


def _item(item: Fields, *, finished: bool) -> Iterator[AgentEvent]:
    kind, call = item["type"], item["id"]
    if kind in _TOOLS and not finished:
        fields = {name: item[name] for name in _TOOLS[kind] if name in item}
        yield AgentEvent(kind="tool_call", tool=item.get("tool") or kind, call_id=call, fields=fields)
    elif kind in _TOOLS:
        text = item.get("aggregated_output") or plain_text(item.get("result"))
        fields = {"exit_code": item.get("exit_code"), "status": item.get("status"), "error": item.get("error")}
        yield AgentEvent(kind="tool_result", tool=item.get("tool") or kind, call_id=call, text=text, fields=fields)
    elif kind == "agent_message" and finished:
        yield AgentEvent(kind="assistant", text=item["text"])
    elif kind == "reasoning" and finished:
        yield AgentEvent(kind="reasoning", text=item.get("text") or "")
    elif kind == "error":
        yield AgentEvent(kind="error", text=item["message"])


# item type -> the fields of its start that say what was asked
_TOOLS: dict[str, tuple[str, ...]] = {
    "command_execution": ("command",),
    "mcp_tool_call": ("server", "arguments"),
    "collab_tool_call": ("prompt", "receiver_thread_ids"),
    "file_change": ("changes",),
    "web_search": ("query",),
}


_ARGV = (
    "{prefix}/bin/codex",
    "exec",
    "--json",
    "--skip-git-repo-check",
    "--dangerously-bypass-approvals-and-sandbox",
    "--disable",
    "plugins",
)

agent = Agent(
    name="codex",
    version="0.166.0",
    summary="Codex CLI by OpenAI",
    layer=LayerSpec(npm=("@openai/codex@0.166.0",), node="20"),
    check=("{prefix}/bin/codex", "--version"),
    argv=(*_ARGV, "--", "{instruction}"),
    env={"ROLLYARD_KEY": "{key}"},
    files={
        CONFIG: {
            "model": "{model}",
            "model_provider": "rollyard",
            "model_context_window": "{context_window}",
            "check_for_update_on_startup": False,
            "web_search": "disabled",
            "analytics": {"enabled": False},
            "model_providers": {
                "rollyard": {
                    "name": "rollyard",
                    "base_url": "{base_url}",
                    "env_key": "ROLLYARD_KEY",
                    "wire_api": "responses",
                    "request_max_retries": 4,
                    "stream_max_retries": 5,
                    "stream_idle_timeout_ms": 3_600_000,
                }
            },
        }
    },
    wires={"responses": Addition()},
    options={
        "system_prompt": Addition(files={CONFIG: {"developer_instructions": "{system_prompt}"}}),
        "disable_thinking": Addition(files={CONFIG: {"model_reasoning_effort": "none"}}),
    },
    mcp=Mcp(style="codex", file=CONFIG, key="mcp_servers", secret="${ROLLYARD_KEY}"),  # noqa: S106 - a reference
    artifacts=("{home}/.codex/sessions/*",),
    needs_isolation="landlock",
    says_done=True,
    resume=Resume(argv=(*_ARGV, "resume", "--last", "--", "{instruction}")),
    subagent=ToolUse(tool="spawn_agent", args={"message": "{instruction}"}),
    off=("plugins", "analytics", "update check", "web search"),
    events=_events,
)
