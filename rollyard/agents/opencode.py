"""opencode: chat by default; Responses and Messages by the choice of its bundled AI SDK package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollyard.agents.events import Fields, decode, plain_text
from rollyard.core.agent import Addition, Agent, Launch, LayerSpec, Mcp, Resume, ToolUse
from rollyard.core.events import AgentEvent

_DIR = "{home}/.config/opencode"
CONFIG = f"{_DIR}/opencode.json"
_PROMPT = f"{_DIR}/rollyard.md"
_PLUGIN: dict[str, Any] = {"dependencies": {"@opencode-ai/plugin": "1.18.33"}}
_TOOLS = (
    "bash",
    "edit",
    "glob",
    "grep",
    "read",
    "skill",
    "task",
    "todowrite",
    "webfetch",
    "write",
)


def _wire(package: str) -> Addition:
    return Addition(files={CONFIG: {"provider": {"rollyard": {"npm": package}}}})


def _config(launch: Launch) -> dict[str, Any]:
    """Tools are switched off by name, which is a mapping that no template can spell."""
    if not launch.disabled_tools:
        return {}
    return {CONFIG: {"tools": dict.fromkeys(launch.disabled_tools, False)}}


def _events(line: str, before: str) -> Iterator[AgentEvent]:
    event = decode(line)
    if event["type"] == "error":
        error: Fields = event["error"]
        text = (error.get("data") or {}).get("message") or error.get("name") or ""
        yield AgentEvent(kind="error", text=text)
        yield AgentEvent(kind="done", ok=False, text=text)
        return
    part: Fields = event["part"]
    match event["type"]:
        case "text":
            yield AgentEvent(kind="assistant", text=part["text"])
        case "reasoning":
            yield AgentEvent(kind="reasoning", text=part["text"])
        case "tool_use":
            state: Fields = part["state"]
            call, tool = part["callID"], part["tool"]
            failed = state["status"] == "error"
            text = plain_text(state.get("error") if failed else state.get("output"))
            yield AgentEvent(kind="tool_call", tool=tool, call_id=call, fields=state.get("input") or {})
            yield AgentEvent(kind="tool_result", tool=tool, call_id=call, text=text, fields={"is_error": failed})
        case "step_finish":
            yield AgentEvent(kind="usage", fields=part.get("tokens") or {})
            if part["reason"] not in ("tool-calls", "unknown"):
                yield AgentEvent(kind="done", ok=part["reason"] == "stop", text=part["reason"])
        case _:
            return


_ARGV = ("{prefix}/bin/opencode", "run", "--format", "json", "--auto")

agent = Agent(
    name="opencode",
    version="1.18.33",
    summary="opencode, a terminal agent by Anomaly",
    layer=LayerSpec(npm=("opencode-ai@1.18.33",)),
    check=("{prefix}/bin/opencode", "--version"),
    argv=(*_ARGV, "--title", "task"),
    stdin="{instruction}",  # an argument with spaces would be quoted again, and its quotes escaped
    env={
        "ROLLYARD_KEY": "{key}",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_SHARE": "1",
    },
    files={
        # it installs its plugin package into its own directory, unless that looks as if it had
        f"{_DIR}/package.json": _PLUGIN,
        f"{_DIR}/package-lock.json": {"packages": {"": _PLUGIN}},
        f"{_DIR}/node_modules/.keep": "",
        CONFIG: {
            "model": "rollyard/{model}",
            "small_model": "rollyard/{model}",
            "autoupdate": False,
            "share": "disabled",
            "provider": {
                "rollyard": {
                    "name": "rollyard",
                    "options": {"baseURL": "{base_url}", "apiKey": "{env:ROLLYARD_KEY}", "timeout": False},
                    "models": {
                        "{model}": {
                            "name": "policy",
                            "tool_call": True,
                            "limit": {"context": "{context_window}", "output": 8192},
                        }
                    },
                }
            },
        },
    },
    wires={
        "chat": _wire("@ai-sdk/openai-compatible"),
        "responses": _wire("@ai-sdk/openai"),
        "messages": _wire("@ai-sdk/anthropic"),
    },
    tools=_TOOLS,
    options={
        "system_prompt": Addition(files={_PROMPT: "{system_prompt}", CONFIG: {"instructions": [_PROMPT]}}),
        "disabled_tools": Addition(),
        "max_tokens": Addition(
            files={CONFIG: {"provider": {"rollyard": {"models": {"{model}": {"limit": {"output": "{max_tokens}"}}}}}}}
        ),
    },
    mcp=Mcp(style="opencode", file=CONFIG, key="mcp", secret="{env:ROLLYARD_KEY}"),  # noqa: S106 - a reference
    artifacts=("{home}/.local/share/opencode/opencode.db*", "{home}/.local/share/opencode/log/*"),
    needs_isolation="landlock",
    says_done=True,
    resume=Resume(argv=(*_ARGV, "--continue")),
    subagent=ToolUse(
        tool="task",
        args={"description": "part", "prompt": "{instruction}", "subagent_type": "general"},
    ),
    off=("title call", "auto-update", "model list fetch", "LSP download", "share", "plugin install"),
    config=_config,
    events=_events,
)
