"""Gemini CLI: the Gemini dialect only. Its processes linger for seconds after the last answer."""

from __future__ import annotations

from collections.abc import Iterator

from rollyard.agents.events import Fields, decode, plain_text
from rollyard.agents.node_flags import on_layer_node
from rollyard.core.agent import Addition, Agent, LayerSpec, Mcp, ToolUse
from rollyard.core.events import AgentEvent

SETTINGS = "{home}/.gemini/settings.json"
_TOOLS = (
    "activate_skill",
    "enter_plan_mode",
    "glob",
    "google_web_search",
    "grep_search",
    "invoke_agent",
    "list_background_processes",
    "list_directory",
    "read_background_output",
    "read_file",
    "replace",
    "run_shell_command",
    "update_topic",
    "web_fetch",
    "write_file",
)


def _events(line: str, before: str) -> Iterator[AgentEvent]:
    event = decode(line)
    match event["type"]:
        case "message" if event["role"] == "assistant":
            yield AgentEvent(kind="assistant", text=event["content"], fields={"delta": bool(event.get("delta"))})
        case "tool_use":
            yield AgentEvent(
                kind="tool_call", tool=event["tool_name"], call_id=event["tool_id"], fields=event["parameters"]
            )
        case "tool_result":
            failed = event["status"] != "success"
            text = plain_text(event.get("output")) or plain_text(event.get("error"))
            yield AgentEvent(kind="tool_result", call_id=event["tool_id"], text=text, fields={"is_error": failed})
        case "error":
            yield AgentEvent(kind="error", text=event.get("message") or "")
        case "result":
            yield AgentEvent(kind="usage", fields=event.get("stats") or {})
            error: Fields = event.get("error") or {}
            yield AgentEvent(kind="done", ok=event["status"] == "success", text=error.get("message") or "")
        case _:
            return


agent = Agent(
    name="gemini-cli",
    version="0.61.0",
    summary="Gemini CLI by Google",
    layer=LayerSpec(npm=("@google/gemini-cli@0.61.0",), before="2026-11-01", node="20"),
    check=("{prefix}/bin/gemini", "--version"),
    argv=(
        "{prefix}/bin/gemini",
        "--model={model}",
        "--yolo",
        "--skip-trust",
        "--output-format=stream-json",
        "--prompt={instruction}",
    ),
    env={
        "GEMINI_API_KEY": "{key}",
        "GOOGLE_GEMINI_BASE_URL": "{root_url}",
        # else it starts itself again with a larger heap, and the first process keeps 98 MB until the end
        "GEMINI_CLI_NO_RELAUNCH": "true",
    },
    files={
        SETTINGS: {
            "security": {"auth": {"selectedType": "gemini-api-key"}},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        }
    },
    wires={"gemini": Addition()},
    tools=_TOOLS,
    options={
        # flat: text that looks like an import (`@file`) stays as it is
        "system_prompt": Addition(
            files={"{home}/.gemini/GEMINI.md": "{system_prompt}", SETTINGS: {"context": {"importFormat": "flat"}}}
        ),
        "disabled_tools": Addition(files={SETTINGS: {"tools": {"exclude": "{disabled_tools}"}}}),
    },
    mcp=Mcp(style="gemini", file=SETTINGS, secret="$GEMINI_API_KEY", transports=("stdio", "http", "sse")),  # noqa: S106
    artifacts=("{home}/.gemini/tmp/*",),
    needs_isolation="landlock",
    says_done=True,
    subagent=ToolUse(tool="invoke_agent", args={"agent_name": "generalist", "prompt": "{instruction}"}),
    off=("usage statistics", "telemetry", "auto-update", "model router"),
    command=on_layer_node,
    events=_events,
)
