"""Cline CLI: chat, as its LiteLLM provider, whose key may come from the environment. It leaves a daemon behind after a clean
exit."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rollyard.agents.events import Fields, decode, plain_text
from rollyard.core.agent import Addition, Agent, LayerSpec, Mcp, ToolUse
from rollyard.core.events import AgentEvent

_PROVIDERS = "{home}/.cline/data/settings/providers.json"
_SETTINGS = "{home}/.cline/data/settings/global-settings.json"
_MCP = "{home}/.cline/data/settings/cline_mcp_settings.json"
_TOOLS = (
    "ask_question",
    "editor",
    "fetch_web_content",
    "read_files",
    "run_commands",
    "search_codebase",
    "spawn_agent",
    "team_attach_outcome_fragment",
    "team_await_runs",
    "team_broadcast",
    "team_cancel_run",
    "team_cleanup",
    "team_create_outcome",
    "team_finalize_outcome",
    "team_list_outcomes",
    "team_list_runs",
    "team_mission_log",
    "team_read_mailbox",
    "team_review_outcome_fragment",
    "team_run_task",
    "team_send_message",
    "team_shutdown_teammate",
    "team_spawn_teammate",
    "team_status",
    "team_task",
)


def _events(line: str, before: str) -> Iterator[AgentEvent]:
    record = decode(line)
    if record["type"] == "agent_event":
        yield from _event(record["event"])
    elif record["type"] == "run_result":
        yield AgentEvent(kind="usage", fields=record.get("usage") or {})
        ok = record["finishReason"] == "completed"
        yield AgentEvent(kind="done", ok=ok, text=record.get("text") or "", fields={"reason": record["finishReason"]})


def _event(event: Fields) -> Iterator[AgentEvent]:
    match event["type"], event.get("contentType"):
        case "content_start", "tool":
            tool, call = event["toolName"], event["toolCallId"]
            yield AgentEvent(kind="tool_call", tool=tool, call_id=call, fields=event.get("input") or {})
        case "content_end", "tool":
            text = json.dumps(event.get("output")) if event.get("error") is None else plain_text(event["error"])
            yield AgentEvent(kind="tool_result", tool=event["toolName"], call_id=event["toolCallId"], text=text)
        case "content_end", "text":
            yield AgentEvent(kind="assistant", text=event["text"])
        case "content_end", "reasoning":
            yield AgentEvent(kind="reasoning", text=event.get("reasoning") or event.get("text") or "")
        case "error", _:
            yield AgentEvent(kind="error", text=plain_text(event["error"]))
        case _:
            return


agent = Agent(
    name="cline",
    version="3.0.65",
    summary="Cline CLI",
    layer=LayerSpec(npm=("cline@3.0.65",), before="2026-11-01", node="20"),
    check=("{prefix}/bin/cline", "--version"),
    argv=(
        "{prefix}/bin/cline",
        "--json",
        "--auto-approve",
        "true",
        "-P",
        "litellm",
        "-m",
        "{model}",
        "{options}",
        "--",
        "{instruction}",
    ),
    env={"LITELLM_API_KEY": "{key}", "CLINE_TELEMETRY_DISABLED": "1", "DO_NOT_TRACK": "1"},
    files={
        _SETTINGS: {"telemetryOptOut": True, "autoUpdateEnabled": False},
        _PROVIDERS: {
            "version": 1,
            "lastUsedProvider": "litellm",
            "modes": {},
            "providers": {
                "litellm": {
                    "settings": {
                        "provider": "litellm",
                        "model": "{model}",
                        "baseUrl": "{base_url}",
                    },
                    "updatedAt": "2026-01-01T00:00:00.000Z",
                    "tokenSource": "manual",
                }
            },
        },
    },
    wires={"chat": Addition()},
    tools=_TOOLS,
    options={
        "system_prompt": Addition(argv=("--system={system_prompt}",)),
        "disabled_tools": Addition(files={_SETTINGS: {"disabledTools": "{disabled_tools}"}}),
    },
    mcp=Mcp(style="cline", file=_MCP, transports=("stdio", "http", "sse")),
    artifacts=("{home}/.cline/data/sessions/*", "{home}/.cline/data/logs/*"),
    needs_isolation="landlock",
    subagent=ToolUse(tool="spawn_agent", args={"task": "{instruction}", "systemPrompt": "Do it."}),
    says_done=True,
    asks_for=("data.cline.bot",),
    off=("telemetry", "auto-update"),
    events=_events,
)
