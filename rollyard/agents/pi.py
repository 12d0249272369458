"""pi: the smallest of the full agents; speaks all four dialects. It has no permission system and no MCP client, and exits
with 0 when the model failed: its last event tells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollyard.agents.events import Fields, decode, plain_text
from rollyard.agents.node_flags import on_layer_node
from rollyard.core.agent import Addition, Agent, Launch, LayerSpec, Resume
from rollyard.core.events import AgentEvent

MODELS = "{home}/.pi/agent/models.json"
_PROMPT = "{home}/.pi/agent/rollyard.md"
_TOOLS = ("read", "bash", "edit", "write")


def _command(launch: Launch, argv: list[str]) -> list[str]:
    """Tools are chosen by naming those that stay. It has no `--`, so words that start like an option or a file reference
    need something before them."""
    *before, words = on_layer_node(launch, argv)
    if launch.disabled_tools:
        left = [tool for tool in _TOOLS if tool not in launch.disabled_tools]
        before += ["--tools", ",".join(left)] if left else ["--no-tools"]
    return [*before, "\n" + words if words.startswith(("-", "@")) else words]


def _config(launch: Launch) -> dict[str, Any]:
    """A list of models, which an addition could not reach into."""
    model = {
        "id": launch.model,
        "name": "policy",
        "reasoning": True,
        "input": ["text"],
        "contextWindow": launch.context_window,
        "maxTokens": launch.max_tokens or 8192,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    return {MODELS: {"providers": {"rollyard": {"models": [model]}}}}


def _wire(api: str, url: str) -> Addition:
    return Addition(files={MODELS: {"providers": {"rollyard": {"api": api, "baseUrl": url}}}})


def _events(line: str, before: str) -> Iterator[AgentEvent]:
    if line.startswith('{"type":"message_update"'):  # each repeats the whole message so far
        return
    event = decode(line)
    match event["type"]:
        case "message_end" if event["message"]["role"] == "assistant":
            yield from _message(event["message"])
        case "tool_execution_start":
            yield AgentEvent(
                kind="tool_call", tool=event["toolName"], call_id=event["toolCallId"], fields=event["args"]
            )
        case "tool_execution_end":
            text, failed = plain_text(event["result"]), bool(event.get("isError"))
            yield AgentEvent(
                kind="tool_result",
                tool=event["toolName"],
                call_id=event["toolCallId"],
                text=text,
                fields={"is_error": failed},
            )
        case "auto_retry_start":
            yield AgentEvent(kind="error", text=f"retry {event.get('attempt')}: {event.get('errorMessage', '')}")
        case "agent_end":
            last: Fields = event["messages"][-1] if event["messages"] else {}
            failed = last.get("stopReason") in ("error", "aborted")
            yield AgentEvent(kind="done", ok=not failed, text=last.get("errorMessage") or "")
        case _:
            return


def _message(message: Fields) -> Iterator[AgentEvent]:
    for part in message["content"]:
        if part["type"] == "text":
            yield AgentEvent(kind="assistant", text=part["text"])
        elif part["type"] == "thinking":
            yield AgentEvent(kind="reasoning", text=part["thinking"])
    yield AgentEvent(kind="usage", fields=message.get("usage") or {})
    if message.get("errorMessage"):
        yield AgentEvent(kind="error", text=message["errorMessage"])


_ARGV = (
    "{prefix}/bin/pi",
    "-p",
    "--mode",
    "json",
    "--provider",
    "rollyard",
    "--model",
    "{model}",
    "{options}",
)

agent = Agent(
    name="pi",
    version="0.73.1",
    summary="pi, a minimal coding agent with four tools",
    layer=LayerSpec(npm=("@mariozechner/pi-coding-agent@0.73.1",), before="2026-11-01", node="20"),
    check=("{prefix}/bin/pi", "--version"),
    argv=(*_ARGV, "{instruction}"),
    env={"ROLLYARD_KEY": "{key}", "PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
    files={
        MODELS: {
            "providers": {
                "rollyard": {
                    "apiKey": "ROLLYARD_KEY",
                }
            }
        }
    },
    wires={
        "chat": _wire("openai-completions", "{base_url}"),
        "responses": _wire("openai-responses", "{base_url}"),
        "messages": _wire("anthropic-messages", "{root_url}"),
        "gemini": _wire("google-generative-ai", "{root_url}/v1beta"),
    },
    tools=_TOOLS,
    options={
        "system_prompt": Addition(argv=("--append-system-prompt", _PROMPT), files={_PROMPT: "{system_prompt}"}),
        "disabled_tools": Addition(),
        "max_tokens": Addition(),
        "disable_thinking": Addition(argv=("--thinking", "off")),
    },
    artifacts=("{home}/.pi/agent/sessions/*",),
    needs_isolation="landlock",
    says_done=True,
    resume=Resume(argv=(*_ARGV, "--continue", "{instruction}")),
    off=("start-up network", "telemetry"),
    command=_command,
    config=_config,
    events=_events,
)
