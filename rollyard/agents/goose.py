"""goose: chat by default, Messages too. The binary comes from its npm platform package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollyard.agents.events import Fields, decode, plain_text
from rollyard.core.agent import Addition, Agent, Launch, LayerSpec, Mcp, Resume
from rollyard.core.events import AgentEvent

CONFIG = "{home}/.config/goose/config.yaml"
_PROVIDER = "{home}/.config/goose/custom_providers/rollyard.json"
_TOOLS = ("edit", "read_image", "shell", "tree", "write")
_OFF = ("analyze", "apps", "extensionmanager", "skills", "summon", "todo", "tom", "chatrecall", "code_execution")


def _config(launch: Launch) -> dict[str, Any]:
    """Tools are chosen by naming those that stay."""
    if not launch.disabled_tools:
        return {}
    left = [tool for tool in _TOOLS if tool not in launch.disabled_tools]
    return {CONFIG: {"extensions": {"developer": {"available_tools": left}}}}


def _wire(engine: str, url: str) -> Addition:
    return Addition(files={_PROVIDER: {"engine": engine, "base_url": url}})


def _events(line: str, before: str) -> Iterator[AgentEvent]:
    event = decode(line)
    if event["type"] == "message":
        for part in event["message"]["content"]:
            yield from _part(part, own_words="inference" in (event["message"].get("metadata") or {}))
    elif event["type"] == "error":
        yield AgentEvent(kind="error", text=str(event.get("error") or ""))
    elif event["type"] == "complete":
        failed = _FAILED in before or before.startswith('{"type":"error"')
        yield AgentEvent(kind="usage", fields={name: n for name, n in event.items() if name.endswith("tokens")})
        yield AgentEvent(kind="done", ok=not failed)


def _part(part: Fields, *, own_words: bool) -> Iterator[AgentEvent]:
    match part["type"]:
        case "text" if not own_words and part["text"].startswith(_FAILED):
            yield AgentEvent(kind="error", text=part["text"])
        case "text":
            yield AgentEvent(kind="assistant", text=part["text"])
        case "thinking" | "reasoning":
            yield AgentEvent(kind="reasoning", text=part.get("thinking") or part.get("text") or "")
        case "toolRequest":
            call: Fields = part["toolCall"]["value"]
            yield AgentEvent(
                kind="tool_call", tool=call["name"], call_id=part["id"], fields=call.get("arguments") or {}
            )
        case "toolResponse":
            result: Fields = part["toolResult"]
            value: Fields = result.get("value") or {}
            failed = result["status"] != "success" or bool(value.get("isError"))
            text = plain_text(value) or str(result.get("error") or "")
            yield AgentEvent(kind="tool_result", call_id=part["id"], text=text, fields={"is_error": failed})
        case _:
            return


# goose reports a failed model call as words of its own in the assistant's name, and exits with 0
_FAILED = "Ran into this error:"


_ARGV = (
    "{prefix}/bin/goose-binary-linux-x64",
    "run",
    "--name=task",
    "--output-format",
    "stream-json",
    "{options}",
)

agent = Agent(
    name="goose",
    version="1.52.0",
    summary="goose by the Agentic AI Foundation",
    layer=LayerSpec(npm=("@aaif/goose-binary-linux-x64@1.52.0",)),
    check=("{prefix}/bin/goose-binary-linux-x64", "--version"),
    argv=(*_ARGV, "--text={instruction}"),
    env={
        "ROLLYARD_KEY": "{key}",
        "GOOSE_PROVIDER": "rollyard",
        "GOOSE_MODEL": "{model}",
        "GOOSE_MODE": "auto",
        "GOOSE_DISABLE_KEYRING": "1",
        "GOOSE_TELEMETRY_ENABLED": "false",
        "GOOSE_DISABLE_SESSION_NAMING": "true",
        "GOOSE_CONTEXT_LIMIT": "{context_window}",
    },
    files={
        _PROVIDER: {
            "name": "rollyard",
            "display_name": "rollyard",
            "api_key_env": "ROLLYARD_KEY",
            "models": [{"name": "{model}", "context_limit": "{context_window}"}],
            "supports_streaming": True,
        },
        CONFIG: {
            "extensions": {
                "developer": {"enabled": True, "type": "platform", "name": "developer", "bundled": True},
                **{name: {"enabled": False, "type": "platform", "name": name} for name in _OFF},
            }
        },
    },
    wires={"chat": _wire("openai", "{base_url}/chat/completions"), "messages": _wire("anthropic", "{root_url}")},
    tools=_TOOLS,
    options={
        "disabled_tools": Addition(),
        "system_prompt": Addition(argv=("--system={system_prompt}",)),
        "max_tokens": Addition(env={"GOOSE_MAX_TOKENS": "{max_tokens}"}),
    },
    mcp=Mcp(style="goose", file=CONFIG, key="extensions", secret="${ROLLYARD_KEY}"),  # noqa: S106 - a reference
    artifacts=("{home}/.local/share/goose/sessions/*", "{home}/.local/state/goose/logs/*"),
    needs_isolation="landlock",
    says_done=True,
    resume=Resume(argv=(*_ARGV, "--resume", "--text={instruction}")),
    off=("session naming call", "telemetry", "keyring"),
    config=_config,
    events=_events,
)
